"""A Trainer of transformers on several ranks, whose checkpoints storage takes slowly or refuses.

    torchrun --standalone --nproc-per-node=2 tests/hf_trainer_ranks.py FOLDER slow|full

Each rank writes FOLDER/rank-R.json: the error that its training raised, and whether the last
checkpoint was complete at its end.
"""

import errno
import json
import os
import sys
import time
from pathlib import Path

import integrations_script
import torch
import transformers

from gdsdata.checkpoint.background.save_job import SaveJob
from gdsdata.errors import IoError
from gdsdata.integrations import hf_trainer


def main():
    folder, storage = Path(sys.argv[1]), sys.argv[2]
    write = SaveJob.write

    def write_slowly(job, path, *arguments):
        time.sleep(0.3)
        if storage == "full":
            raise IoError(errno.ENOSPC, "the disk is full", path)
        return write(job, path, *arguments)

    SaveJob.write = write_slowly
    arguments = transformers.TrainingArguments(
        str(folder / "run"), max_steps=4, save_steps=4, use_cpu=True, report_to="none", disable_tqdm=True
    )
    data = integrations_script.read(folder, transform=lambda batch: {"values": batch})
    trainer = hf_trainer.use(
        transformers.Trainer(integrations_script.Model(), arguments), train=data, checkpoints="background"
    )
    error = None
    try:
        trainer.train()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    is_complete = (folder / "run" / "checkpoint-4" / "trainer_state.json").exists()
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps([error, is_complete]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

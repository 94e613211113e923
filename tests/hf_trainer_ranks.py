"""A Trainer of transformers on two ranks, whose checkpoints storage takes slowly or refuses.

    torchrun --standalone --nproc-per-node=2 tests/hf_trainer_ranks.py FOLDER STORAGE

STORAGE is slow, full, twice (full at the first of two saves), late or refuses. The last two are
those of rank 1, which writes the state of its random generators alone. Each rank writes
FOLDER/rank-R.json: the error that its training raised, whether the last checkpoint was complete at
its end, and whether it had the file of rank 1 when it became complete.
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
from gdsdata.integrations import hf_trainer, hf_trainer_background


def main():
    folder, storage = Path(sys.argv[1]), sys.argv[2]
    write = SaveJob.write

    def write_slowly(job, path, *arguments):
        time.sleep(0.3 if storage in ("slow", "full") else 0)
        if storage in ("full", "twice"):
            raise IoError(errno.ENOSPC, "the disk is full", path)
        return write(job, path, *arguments)

    SaveJob.write = write_slowly
    save_rng, complete, had_file = transformers.Trainer._save_rng_state, hf_trainer_background._complete, []

    def save_rng_of_rank_1(trainer, place):
        if os.environ["RANK"] == "1" and storage == "late":
            time.sleep(1.5)
        if os.environ["RANK"] == "1" and storage == "refuses":
            raise OSError(errno.EIO, "rank 1 cannot write")
        save_rng(trainer, place)

    def complete_and_look(place, *arguments):
        had_file.append(os.path.exists(os.path.join(place, "rng_state_1.pth")))
        complete(place, *arguments)

    transformers.Trainer._save_rng_state = save_rng_of_rank_1
    hf_trainer_background._complete = complete_and_look

    def as_values(batch):
        return {"values": batch}

    def slow_batch(batch):
        time.sleep(0.2)  # the first save has failed when the second begins
        return {"values": batch}

    arguments = transformers.TrainingArguments(
        str(folder / "run"),
        max_steps=4,
        save_steps=2 if storage == "twice" else 4,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    data = integrations_script.read(folder, transform=slow_batch if storage == "twice" else as_values)
    trainer = hf_trainer.use(
        transformers.Trainer(integrations_script.Model(), arguments), train=data, checkpoints="background"
    )
    error = None
    try:
        trainer.train()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    is_complete = (folder / "run" / "checkpoint-4" / "trainer_state.json").exists()
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps([error, is_complete, had_file]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a small GPT with the Trainer of transformers, stop it, and resume with equal losses.

    python examples/integrations/train_transformers.py --stop-at 25   # some seconds on 2 cores
    python examples/integrations/train_transformers.py                # resumes behind step 25
    torchrun --nproc-per-node=2 examples/integrations/train_transformers.py  # each on its share

The losses are the same as without the stop, digit for digit. The text is the Python standard
library, byte by byte. tests/test_integration_examples.py runs this example.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import transformers

import gdsdata
from gdsdata.integrations import hf_trainer

FILES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))


class Printing(transformers.TrainerCallback):
    """Prints each loss, and saves and stops after a step."""

    def __init__(self, stop_at):
        self.stop_at = stop_at

    def on_step_end(self, arguments, state, control, **_):
        if state.global_step == self.stop_at:
            control.should_save = control.should_training_stop = True

    def on_log(self, arguments, state, control, logs, **_):
        if "loss" in logs and state.is_world_process_zero:
            print(f"step {state.global_step}: loss {logs['loss']:.9g}", flush=True)


def inputs_of(batch):
    """Return the arguments of the model's ``forward``. It shifts the labels by itself."""
    return {"input_ids": batch, "labels": batch}


def main():
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsdata"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps in all, those before a restart included")
    parser.add_argument("--stop-at", type=int, help="save and stop after this step")
    parser.add_argument("--folder", type=Path, default=cache / "train_transformers", help="folder of the checkpoints")
    args = parser.parse_args()

    arguments = transformers.TrainingArguments(
        str(args.folder),
        max_steps=args.steps,
        learning_rate=1e-3,
        save_steps=10,
        save_total_limit=2,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    transformers.set_seed(0)
    config = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    trainer = transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, callbacks=[Printing(args.stop_at)])
    trainer.remove_callback(transformers.PrinterCallback)

    data = gdsdata.GDSDataset(
        FILES,
        batch_size=16,  # of each process
        format=gdsdata.formats.Tokens("uint8", seq_len=63),  # 64 bytes a sample
        seed=0,
        device=arguments.device,
        transform=inputs_of,
    )
    hf_trainer.use(trainer, train=data, checkpoints="background")
    trainer.train(resume_from_checkpoint=any(args.folder.glob("checkpoint-*")))


if __name__ == "__main__":
    main()

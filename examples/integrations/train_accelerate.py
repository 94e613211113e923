"""Train in a loop of accelerate, stop in the middle of an epoch, and resume with equal losses.

    python examples/integrations/train_accelerate.py --stop-at 25   # a few seconds on 2 cores
    python examples/integrations/train_accelerate.py                # resumes behind step 25
    accelerate launch --num-processes 2 examples/integrations/train_accelerate.py

On a CPU the losses are the same as without the stop, digit for digit. On two GPUs, runs differed in
the seventh digit, with and without a stop. Each of several processes trains on its share. A small
network learns which byte follows 16 others in the Python standard library.
tests/test_integration_examples.py runs this example.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

import gdsdata
from gdsdata.integrations.accelerate import prepare

FILES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))  # the data, as they are: 17 bytes at a time


class Counter:
    """The number of steps. It is saved with the rest, because it has a state."""

    steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def main():
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsdata"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps in all, those before a restart included")
    parser.add_argument("--stop-at", type=int, help="save and stop after this step")
    parser.add_argument("--folder", type=Path, default=cache / "train_accelerate", help="folder of the checkpoint")
    args = parser.parse_args()

    accelerator, counter = Accelerator(), Counter()
    set_seed(0)
    dataset = gdsdata.GDSDataset(
        FILES,
        batch_size=512,  # of each process
        format=gdsdata.formats.Tokens("uint8", seq_len=16),
        seed=0,
        device=accelerator.device,
    )
    net = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    data = prepare(accelerator, dataset)  # saved and loaded by the accelerator from here on
    accelerator.register_for_checkpointing(counter)

    with gdsdata.torch_hooks():  # optimizer.bin and others are written and read by gdsdata
        if args.folder.exists():
            accelerator.load_state(args.folder)
        last = args.stop_at or args.steps
        while counter.steps < last:
            for batch in data:
                loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                counter.steps += 1
                accelerator.print(f"step {counter.steps}: loss {loss.item():.9g}", flush=True)
                if counter.steps == last:
                    break
        accelerator.save_state(args.folder)
    accelerator.end_training()


if __name__ == "__main__":
    main()

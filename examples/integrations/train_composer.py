"""Train in a Trainer of Composer, stop in the middle of an epoch, and resume with equal losses.

    python examples/integrations/train_composer.py --stop-at 25   # some seconds on 2 cores
    python examples/integrations/train_composer.py                # resumes behind step 25

The losses are the same as without the stop, digit for digit, and with dropout. A small network
learns which byte follows 16 others in the Python standard library.
tests/test_integration_examples.py runs this example.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from composer import Callback, ComposerModel, Trainer
from composer.utils import dist
from torch import nn

import gdsdata
from gdsdata.integrations.composer import Loader

FILES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))  # the data, as they are: 17 bytes at a time


class NextByte(ComposerModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        hidden = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256))
        self.net = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), *hidden)

    def forward(self, batch):
        return self.net(batch[:, :-1])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[:, -1])


class Printing(Callback):
    """Prints each loss."""

    def batch_end(self, state, logger):
        if dist.get_global_rank() == 0:
            print(f"step {state.timestamp.batch.value}: loss {state.loss.item():.9g}", flush=True)


def main():
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsdata"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps in all, those before a restart included")
    parser.add_argument("--stop-at", type=int, help="save and stop after this step")
    parser.add_argument("--folder", type=Path, default=cache / "train_composer", help="folder of the checkpoints")
    args = parser.parse_args()

    data = Loader(
        gdsdata.GDSDataset(
            FILES,
            batch_size=512,  # of each process
            format=gdsdata.formats.Tokens("uint8", seq_len=16),
            seed=0,
        )
    )
    model = NextByte()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        train_dataloader=data,
        callbacks=[data, Printing()],
        max_duration=f"{args.stop_at or args.steps}ba",
        save_folder=str(args.folder),
        save_interval="10ba",  # and at the end
        save_num_checkpoints_to_keep=2,
        run_name="bytes",
        autoresume=True,
        seed=0,
        progress_bar=False,
    )
    with gdsdata.torch_hooks():  # Composer's own files are written by gdsdata
        trainer.fit()
    trainer.close()


if __name__ == "__main__":
    main()

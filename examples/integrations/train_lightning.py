"""Train with Lightning, stop in the middle of an epoch, and resume with equal losses.

    python examples/integrations/train_lightning.py --stop-at 25   # a few seconds on 2 cores
    python examples/integrations/train_lightning.py                # resumes behind step 25

The losses are the same as without the stop, digit for digit. Checkpoints are written while training
goes on. A small network learns which byte follows 16 others in the Python standard library. With
``--devices 2`` two processes train, each on its share. tests/test_integration_examples.py runs this
example.
"""

import argparse
import os
import sysconfig
import warnings
from pathlib import Path

import lightning.pytorch as lightning
import torch
from torch import nn

import gdsdata
from gdsdata.integrations.lightning_async import AsyncGDSCheckpointIO

FILES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))  # the data, as they are: 17 bytes at a time


class Module(lightning.LightningModule):
    """It predicts the last byte of each sample."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256)
        )

    def train_dataloader(self):
        # The ranks are known here. Lightning takes the data set as it is, and saves its state.
        tokens = gdsdata.formats.Tokens("uint8", seq_len=16)
        return gdsdata.GDSDataset(FILES, batch_size=512, format=tokens, seed=0, device=self.device)

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.net(batch[:, :-1]), batch[:, -1])
        if self.trainer.is_global_zero:
            print(f"step {self.global_step + 1}: loss {loss.item():.9g}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsdata"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps in all, those before a restart included")
    parser.add_argument("--stop-at", type=int, help="stop after this step")
    parser.add_argument("--devices", type=int, default=1, help="processes, each with a GPU if there are some")
    parser.add_argument("--folder", type=Path, default=cache / "train_lightning", help="folder of the checkpoint")
    args = parser.parse_args()

    warnings.filterwarnings("ignore", module="lightning")  # of validation and loggers that this program lacks
    lightning.seed_everything(0)
    last = args.folder / "last.ckpt"
    trainer = lightning.Trainer(
        max_steps=args.stop_at or args.steps,
        devices=args.devices,
        callbacks=[
            lightning.callbacks.ModelCheckpoint(
                args.folder, "last", every_n_train_steps=5, enable_version_counter=False
            )
        ],
        plugins=[AsyncGDSCheckpointIO()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()

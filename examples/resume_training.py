"""Train with checkpoints in the background, kill -9 it at any moment, start it again: it goes on
with the same losses.

    python examples/resume_training.py                      # a few seconds on 2 cores
    python examples/resume_training.py --kill-in-save 40    # kill -9 while the checkpoint of step 40 is being written
    python examples/resume_training.py                      # goes on from the last complete one, digit for digit
    python examples/resume_training.py --folder elsewhere   # from the beginning

A small network learns which byte follows 16 others in the Python standard library.
tests/test_examples.py runs it.
"""

import argparse
import os
import signal
import sysconfig
from pathlib import Path

import torch
from torch import nn

import gdsdata

cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsdata"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=100, help="steps in all, those before a restart included")
parser.add_argument("--save-every", type=int, default=10, help="steps from one checkpoint to the next")
parser.add_argument("--kill-in-save", type=int, help="end as by kill -9 in the middle of the save of this step")
parser.add_argument("--folder", type=Path, default=cache / "resume_training", help="of the checkpoints")
args = parser.parse_args()

# The data are the files as they are: 17 bytes at a time, and the last of them is to be told from
# the others.
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
dataset = gdsdata.GDSDataset(
    sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")),
    batch_size=256,
    format=gdsdata.formats.Tokens("uint8", seq_len=16),
    seed=0,
    device=device,
)
model = nn.Sequential(
    nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 256)
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# What makes up the training's state: objects with a state_dict, and plain tensors and values.
state = {"model": model, "optimizer": optimizer, "dataset": dataset, "rng": torch.get_rng_state()}

with gdsdata.AsyncCheckpointer(args.folder, keep_last=2) as checkpoints:
    step = checkpoints.restore(state) or 0
    torch.set_rng_state(state["rng"])
    print(f"from step {step}", flush=True)
    while step < args.steps:
        for batch in dataset:
            loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            print(f"step {step}: loss {loss.item():.9g}", flush=True)  # 9 digits tell any two float32 apart
            if step % args.save_every == 0:
                state["rng"] = torch.get_rng_state()
                saving = checkpoints.save(step, state)  # returns when it has a copy; training goes on meanwhile
                if step == args.kill_in_save:
                    assert not saving.done()
                    os.kill(os.getpid(), signal.SIGKILL)
            if step == args.steps:
                break

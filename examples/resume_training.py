"""Train with checkpoints in the background, kill it at any moment, and resume with equal losses.

    python examples/resume_training.py                     # a few seconds on 2 cores
    python examples/resume_training.py --kill-in-save 40   # kill -9 in the save of step 40
    python examples/resume_training.py                     # resumes from the last complete save
    python examples/resume_training.py --folder elsewhere  # from the beginning

The losses are the same, digit for digit. A small network learns which byte follows 16 others in the
Python standard library. tests/test_examples.py runs this example.
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
parser.add_argument("--folder", type=Path, default=cache / "resume_training", help="folder of the checkpoints")
args = parser.parse_args()

# The files are the data, as they are: 17 bytes at a time. The last byte is to be predicted.
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

# The training's state: objects with a state_dict, and plain tensors and values.
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
            print(f"step {step}: loss {loss.item():.9g}", flush=True)  # 9 digits distinguish any two float32
            if step % args.save_every == 0:
                state["rng"] = torch.get_rng_state()
                saving = checkpoints.save(step, state)  # returns when the state is copied; training continues meanwhile
                if step == args.kill_in_save:
                    assert not saving.done()
                    os.kill(os.getpid(), signal.SIGKILL)
            if step == args.steps:
                break

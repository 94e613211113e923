"""Train a 3-D convolutional network on .npy volumes, by a DataLoader or by GDSDataset.

    python examples/train_volumes.py                      # a few seconds on 2 cores
    python examples/train_volumes.py --loader dataloader  # the same training, by torch alone
    python examples/train_volumes.py --in-order           # both print the same losses (CPU)
    python examples/train_volumes.py --cold               # begins with an empty page cache

It makes its volumes, and prints how long the loop waited. A file is one case, uint8 (2, side, side,
side): a noisy scan and the mask of the ball in it, which the network has to find. The guide
(docs/guide/data-sets.md) shows the difference between the loaders. tests/test_examples.py runs it.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gdsdata

cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsdata"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--loader", choices=("gdsdata", "dataloader"), default="gdsdata")
parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8), help="processes of the DataLoader")
parser.add_argument("--data", type=Path, help="folder of .npy files like the ones described above; made if left out")
parser.add_argument("--volumes", type=int, default=64, help="files to make")
parser.add_argument("--side", type=int, default=32, help="voxels along an edge, a multiple of 4")
parser.add_argument("--batch-size", type=int, default=8, help="volumes in a step")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--in-order", action="store_true", help="do not shuffle: the loaders' orders are not the same")
parser.add_argument("--cold", action="store_true", help="drop the files from the page cache first")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()
if args.side < 4 or args.side % 4:
    parser.error(f"--side {args.side} is no multiple of 4: the network works on cubes of 4 voxels")

# ---------------------------------------------------------------------------------------------------------------- data


def make_volumes(folder: Path) -> None:
    """Draw balls of random place and size in noise. The folder appears only when it is complete."""
    making = folder.with_name(f"{folder.name}.making-{os.getpid()}")
    making.mkdir(parents=True)
    rng, voxels = np.random.default_rng(0), np.indices([args.side] * 3)
    for number in range(args.volumes):
        centre = rng.uniform(args.side / 4, args.side * 3 / 4, (3, 1, 1, 1))
        mask = ((voxels - centre) ** 2).sum(0) < rng.uniform(args.side / 8, args.side / 4) ** 2
        scan = rng.integers(0, 128, mask.shape) + 64 * mask
        np.save(making / f"{number:05}.npy", np.stack([scan, mask]).astype(np.uint8))
    making.rename(folder)


def drop_from_page_cache(paths: list[Path]) -> None:
    os.sync()  # dirty pages cannot be dropped from the page cache
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Volumes(Dataset):
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.load(self.paths[index]))


folder = args.data or cache / f"train_volumes-{args.volumes}x{args.side}"
if args.data is None and not folder.exists():
    make_volumes(folder)
paths = sorted(folder.glob("*.npy"))
if not paths:
    parser.error(f"--data {folder} has no .npy files: leave --data out, and some are made")
if args.cold:
    drop_from_page_cache(paths)

# --------------------------------------------------------------------------------------------------------------- model

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv3d(1, 16, 4, stride=4),
    nn.ReLU(),
    nn.Conv3d(16, 16, 3, padding=1),
    nn.ReLU(),
    nn.ConvTranspose3d(16, 1, 4, stride=4),
).to(args.device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

# ---------------------------------------------------------------------------------------------------------------- loop

began = time.perf_counter()
if args.loader == "gdsdata":
    loader = gdsdata.GDSDataset(paths, args.batch_size, shuffle=not args.in_order, device=args.device)
else:
    workers = dict(num_workers=args.workers, persistent_workers=args.workers > 0, pin_memory=args.device != "cpu")
    loader = DataLoader(Volumes(paths), args.batch_size, shuffle=not args.in_order, **workers)
steps, waited_s, first_s = 0, 0.0, 0.0
for epoch in range(args.epochs):
    sum_of_losses, asked = torch.zeros((), device=args.device), time.perf_counter()
    for batch in loader:
        batch = batch.to(args.device, non_blocking=True)  # uint8 (B, 2, side, side, side); no copy for GDSDataset
        if steps == 0:  # from here on both loaders have started: workers run, memory is allocated
            first_s, asked = time.perf_counter() - began, time.perf_counter()
        waited_s += time.perf_counter() - asked
        scan, mask = batch[:, :1].float() / 255, batch[:, 1:].float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(scan), mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sum_of_losses += loss.detach()
        steps, asked = steps + 1, time.perf_counter()
    print(f"epoch {epoch}: loss {sum_of_losses.item() / len(loader):.9g}", flush=True)  # waits for the GPU
elapsed_s = time.perf_counter() - began - first_s
print(
    f"{args.loader} on {args.device}: {steps} steps, the first after {first_s:.2f} s, then {steps / elapsed_s:.1f} "
    f"steps/s, {waited_s / elapsed_s:.1%} of the time waiting for a batch"
)
if args.loader == "gdsdata":
    print(loader.report())
    print("served by:", {way: moved for way, moved in loader.stats()["bytes"].items() if moved})

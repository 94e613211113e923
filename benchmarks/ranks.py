"""Measure several GPUs, one process each, on shares of the same data.

    torchrun --nproc-per-node=2 benchmarks/ranks.py

Each rank first reads its share alone. Then all ranks read at once. Prints GB/s of each, and checks
that the shares are disjoint, cover the data, and hold what was written. The data, records of 2 MiB,
is made in the folder and stays in the page cache.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import gdsdata

ELEMENTS = 2**18  # int64 numbers: 2 MiB
CHECKED_BATCHES = 4


def make(path, records):
    base = np.arange(ELEMENTS, dtype=np.int64)
    with open(path, "wb") as file:
        for index in range(records):
            file.write((base + index).tobytes())


def epoch(dataset, base):
    """Return (seconds, indices of the records). The first batches are compared with the data."""
    indices = []
    torch.cuda.synchronize()
    started = time.perf_counter()
    for place, batch in enumerate(dataset):
        indices.append(batch[:, 0].clone())
        if place < CHECKED_BATCHES:
            assert torch.equal(batch, batch[:, :1] + base), "a record is not what was written"
    torch.cuda.synchronize()
    return time.perf_counter() - started, torch.cat(indices)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/gdsdata-ranks"))
    parser.add_argument("--records", type=int, default=2048, help="records of 2 MiB in all")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3, help="epochs of a measurement; the last is counted")
    chosen = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    path = chosen.folder / "records.bin"
    if rank == 0:
        chosen.folder.mkdir(parents=True, exist_ok=True)
        make(path, chosen.records)
    dist.barrier()
    base = torch.arange(ELEMENTS, device=device)
    dataset = gdsdata.GDSDataset(path, chosen.batch, gdsdata.formats.Records("int64", (ELEMENTS,)), device=device)
    share_gb = len(dataset) * chosen.batch * ELEMENTS * 8 / 1e9
    rates = torch.zeros(2)
    for turn in range(world):  # alone
        dist.barrier()
        if turn == rank:
            for _ in range(chosen.epochs):
                seconds, _ = epoch(dataset, base)
            rates[0] = share_gb / seconds
    for _ in range(chosen.epochs):  # together
        dist.barrier()
        seconds, indices = epoch(dataset, base)
        rates[1] = share_gb / seconds
    everyone = [torch.zeros(2) for _ in range(world)]
    dist.all_gather(everyone, rates)
    shares = [torch.zeros_like(indices, device="cpu") for _ in range(world)]
    dist.all_gather(shares, indices.cpu())
    if rank == 0:
        seen = torch.cat(shares)
        assert len(seen.unique()) == len(seen), "two ranks read the same record"
        assert len(seen) == chosen.records // world * world, f"{len(seen)} of {chosen.records} records came"
        for place, (alone, together) in enumerate(everyone):
            print(f"rank {place}: {alone:.1f} GB/s alone, {together:.1f} GB/s together ({together / alone:.2f})")
        print(f"all {world} ranks: {sum(float(pair[1]) for pair in everyone):.1f} GB/s; {len(seen)} records, disjoint")
        print("served by", {route: count for route, count in dataset.stats()["bytes"].items() if count})
        path.unlink()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

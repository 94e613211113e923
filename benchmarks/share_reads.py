"""Measure tensor-parallel peers that get the same batches, with and without share_reads.

    torchrun --nproc-per-node=2 benchmarks/share_reads.py [--device cpu] [--folder /data/volumes]

All ranks are peers. They take turns of an epoch each: reading everything by themselves, and a part
each (`Sharding(share_reads=True)`), from the page cache and from storage (O_DIRECT). Each row has
the batches a second, the GB that all ranks read together, as the engine and the kernel count them,
and what the second way gains. Every batch is compared with what was written.
"""

import argparse
import os
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gdsdata import EngineOptions, GDSDataset, Reading, Sharding
from gdsdata.formats import Records

ELEMENTS = 2**18  # int64 numbers: a volume of 2 MiB


def make(path, volumes):
    base = np.arange(ELEMENTS, dtype=np.int64)
    with open(path, "wb") as file:
        for index in range(volumes):
            file.write((base + index).tobytes())
        os.fsync(file.fileno())


def bytes_from_storage():
    """Return what the kernel has read from disks for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


class Way:
    """One way to read, and its turns."""

    def __init__(self, name, dataset, device):
        self.name, self.dataset, self.device = name, dataset, device
        self.base = torch.arange(ELEMENTS, device=device)
        self.seconds, self.engine_gb, self.kernel_gb = [], 0.0, 0.0

    def take_turn(self):
        """Read an epoch; seconds are of the slowest rank, and bytes of all ranks."""
        before, stored = sum(self.dataset.stats()["bytes"].values()), bytes_from_storage()
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        dist.barrier()
        started = perf_counter()
        for batch in self.dataset:
            wrong += (batch - batch[:, :1] != self.base).sum()
        if int(wrong):  # which waits for the device
            raise AssertionError(f"{self.name}: {int(wrong)} numbers are not what was written")
        seconds = perf_counter() - started
        read = sum(self.dataset.stats()["bytes"].values()) - before
        told = torch.tensor([seconds, read / 1e9, (bytes_from_storage() - stored) / 1e9], dtype=torch.float64)
        everyone = [torch.zeros_like(told) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, told)
        table = torch.stack(everyone)
        self.seconds.append(float(table[:, 0].max()))
        self.engine_gb, self.kernel_gb = float(table[:, 1].sum()), float(table[:, 2].sum())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/gdsdata-share-reads"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--volumes", type=int, default=2048, help="of 2 MiB each")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way; the median is printed")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (1, ranks), mesh_dim_names=("dp", "tp"))
    path = chosen.folder / "volumes.bin"
    if rank == 0:
        chosen.folder.mkdir(parents=True, exist_ok=True)
        make(path, chosen.volumes)
    dist.barrier()
    for place, options in (("page cache", EngineOptions()), ("storage", EngineOptions(direct="always"))):
        ways = []
        for share_reads, name in ((False, "each reads all"), (True, "each reads a part")):
            sharding = Sharding(device_mesh=mesh, dp_dim="dp", share_reads=share_reads)
            data = dict(format=Records("int64", (ELEMENTS,)), sharding=sharding, reading=Reading(options=options))
            ways.append(Way(f"{place}, {name}", GDSDataset(path, chosen.batch, device=device, **data), device))
        for turn in range(chosen.rounds + 1):
            for way in ways:
                way.take_turn()
                if turn == 0:  # engines and connections are made
                    way.seconds.clear()
        for way in ways:
            rate = len(way.dataset) / median(way.seconds)
            gain = median(ways[0].seconds) / median(way.seconds)
            if rank == 0:
                print(
                    f"{way.name}: {rate:.1f} batches/s, {rate * chosen.batch * ELEMENTS * 8 / 1e9:.2f} GB/s a rank, "
                    f"{way.engine_gb:.2f} GB read in all ({way.kernel_gb:.2f} from storage), {gain:.2f} x"
                )
    if rank == 0:
        path.unlink()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

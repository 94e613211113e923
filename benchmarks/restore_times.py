"""Predict how long N GPUs take to restore one checkpoint, each by itself and together.

    python benchmarks/restore_times.py [--gb 140] [--gpus 8 64 1024] [--peer 200] ...
    torchrun --nproc-per-node=4 benchmarks/restore_times.py --check --gb 1 --folder F

The first command prints a table of seconds. It plays the schedule of `gdsdata.load(group=)`
(`gdsdata.collective.plan`) with the rates that are given, in GB/s:

- A rank reads its pieces in their order, at its share of the storage or of its link.
- A round is passed on when all have read it, all have agreed, and the round before is passed on.
- That takes as long as for the rank that sends or receives most: within a node at ``--peer``,
  between nodes at ``--nic``, which each GPU has for itself.
- An agreement takes ``--agreement-us`` for each rank, because gloo passes headers around a ring.

Nothing else costs anything: no metadata of a file system, no allocation, no other job. All ranks
want all bytes, in tensors of 64 MiB.

The second command loads a file from a cold cache with 1, 2, 4, ... ranks over gloo, and prints the
times beside the predicted ones. It measures the rates first: a cold read by one rank, a transfer
between two ranks, and an agreement.
"""

import argparse
import math
import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import gdsdata
from gdsdata.collective import plan
from gdsdata.collective.agreement import Agreement, Kind

GB, TENSOR_BYTES = 1e9, 64 << 20
A_NODE = 8  # GPUs


class Rates(NamedTuple):
    """Rates of a cluster in GB/s, and the time of an agreement for each rank in us."""

    link: float = 50.0  # from the host to each GPU
    disk: float = 20.0  # of the disks of each node
    shared: float = 200.0  # of a file system that all nodes share
    store: float = 100.0  # of an object store
    store_node: float = 20.0  # of that, at most for each node
    peer: float = 200.0  # between two GPUs of a node, each way
    nic: float = 45.0  # of each GPU's network card, each way
    agreement_us: float = 30.0

    def storage(self, kind: str, nodes: int) -> float:
        """Return what one node can read while ``nodes`` read."""
        return {
            "disk": self.disk,
            "shared": self.shared / nodes,
            "store": min(self.store_node, self.store / nodes),
        }[kind]


def schedule(total_bytes: float, ranks: int) -> plan.Schedule:
    """Return the schedule of rank 0, which has all pieces, because all ranks want all bytes."""
    count = max(1, round(total_bytes / TENSOR_BYTES))
    sizes = np.full(count, int(total_bytes) // count)
    files, none = (plan.FileVersion("/checkpoint", int(sizes.sum()), 0),), np.zeros(count, np.int8)
    wants = plan.Wants(files, none.astype(np.int32), np.cumsum(sizes) - sizes, sizes, none, none.astype(bool))
    return plan.schedule_of([wants], [0] * ranks, range(ranks), 0)


def seconds_alone(total_bytes: float, gpus: int, kind: str, rates: Rates, a_node: int = A_NODE) -> float:
    """Return the time in which each rank reads all by itself."""
    ranks = min(gpus, a_node)
    return total_bytes / GB / min(rates.link, rates.storage(kind, math.ceil(gpus / a_node)) / ranks)


def seconds_together(total_bytes: float, gpus: int, kind: str, once: str, rates: Rates, a_node: int = A_NODE) -> float:
    """Return the time in which ranks read once, and pass on.

    Args:
        total_bytes: of the checkpoint.
        gpus: of all nodes; each is a rank.
        kind: of storage; see `Rates.storage`.
        once: "node" or "job".
        rates: of the cluster.
        a_node: GPUs of a node.
    """
    sharing = gpus if once == "job" else min(gpus, a_node)
    rate = min(rates.link, rates.storage(kind, math.ceil(gpus / a_node)) / min(gpus, a_node))
    if sharing == 1:
        return total_bytes / GB / rate
    node_of = [rank // a_node for rank in range(sharing)]
    agreement_s = rates.agreement_us * 1e-6 * gpus
    read_until, passed_until = np.zeros(sharing), 0.0
    rounds: dict[int, list[plan.Piece]] = {}
    for piece in schedule(total_bytes, sharing).pieces:
        rounds.setdefault(piece.round, []).append(piece)
    for pieces in rounds.values():
        moved = np.zeros((2, 2, sharing, 2))  # by phase, by way (within a node, between), by rank, out and in
        for piece in pieces:
            size = float(piece.parts.size.sum())
            read_until[piece.reader] += size / GB / rate
            for phase, hops in enumerate(plan.hops_of(piece, node_of)):
                for sender, receiver in hops:
                    way = int(node_of[sender] != node_of[receiver])
                    moved[phase, way, sender, 0] += size
                    moved[phase, way, receiver, 1] += size
        speeds = np.array([rates.peer, rates.nic])[None, :, None, None]
        passing_s = (moved / GB / speeds).max(axis=(1, 2, 3)).sum()
        passed_until = max(passed_until, read_until[[piece.reader for piece in pieces]].max()) + agreement_s + passing_s
    return passed_until


def print_predictions(total_bytes: float, counts: list[int], rates: Rates) -> None:
    print(f"Seconds to restore {total_bytes / GB:g} GB on each of N GPUs, {A_NODE} a node, by {rates}\n")
    print("| GPUs | storage | each by itself | once a node | once in all |")
    print("|---:|---|---:|---:|---:|")
    for gpus in counts:
        for kind in ("disk", "shared", "store"):
            each = f"{seconds_alone(total_bytes, gpus, kind, rates):.2f}"
            node, job = (
                "-"
                if kind == "disk" and once == "job"
                else f"{seconds_together(total_bytes, gpus, kind, once, rates):.2f}"
                for once in ("node", "job")
            )
            print(f"| {gpus} | {kind} | {each} | {node} | {job} |")


# ------------------------------------------------------------------------------------------------ the check


def timed(call) -> float:
    """Return the seconds until all ranks have made a call."""
    dist.barrier()
    began = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - began


def evict(path: Path) -> None:
    """Evict a file's pages, which are on storage, so that a load reads that."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured_rates(path: Path, total_bytes: int) -> Rates:
    """Measure a cold read by rank 0 alone, a transfer to rank 1, and an agreement of all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    evict(path)
    disk_s = timed(lambda: gdsdata.load(path) if rank == 0 else None)
    moved = torch.zeros(TENSOR_BYTES, dtype=torch.uint8)

    def transfer() -> None:
        for _ in range(8):
            if rank < 2:
                (dist.send if rank == 0 else dist.recv)(moved, 1 - rank)

    transfer()
    peer_s = timed(transfer) / 8
    agreements_s = []

    def agree() -> None:
        began = time.perf_counter()
        for _ in range(200):
            session.agree(Kind.STEP)
        agreements_s.append((time.perf_counter() - began) / 200)

    with Agreement(dist.group.WORLD, 60.0).session({"call": "check"}, lambda *_: None) as session:
        agree()
    said = [disk_s, peer_s, agreements_s[0]]
    dist.broadcast_object_list(said, 0)
    disk, peer = total_bytes / GB / said[0], TENSOR_BYTES / GB / said[1]
    return Rates(link=disk, disk=disk, peer=peer, nic=peer, agreement_us=said[2] * 1e6 / ranks)


def check(folder: Path, total_bytes: int) -> None:
    """Print measured times of loads beside predicted ones. All ranks call this."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks < 2:
        raise SystemExit("start it with two ranks or more: torchrun --nproc-per-node=2")
    path = folder / "restore.safetensors"
    try:
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            count = max(1, total_bytes // TENSOR_BYTES)
            gdsdata.save({str(i): torch.full((TENSOR_BYTES,), i % 251, dtype=torch.uint8) for i in range(count)}, path)
        dist.barrier()
        total_bytes = path.stat().st_size
        gdsdata.load(path, group="auto")  # the first load makes engines and connections
        rates = measured_rates(path, total_bytes)
        if rank == 0:
            print(f"{total_bytes / GB:.2f} GB, cold, {rates}\n\n| ranks | predicted s | measured s |\n|---:|---:|---:|")
        for count in [2**power for power in range(ranks.bit_length()) if 2**power <= ranks]:
            group = dist.new_group(range(count))
            dist.barrier()
            if rank == 0:
                evict(path)
            dist.barrier()
            seconds = timed(lambda group=group, count=count: gdsdata.load(path, group=group) if rank < count else None)
            if rank == 0:
                predicted = seconds_together(total_bytes, count, "disk", "node", rates, a_node=max(count, 1))
                print(f"| {count} | {predicted:.2f} | {seconds:.2f} |", flush=True)
    finally:
        dist.barrier()
        if rank == 0:
            path.unlink(missing_ok=True)
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=140.0, help="of the checkpoint")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 64, 256, 1024])
    for name, value in Rates()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value)
    parser.add_argument("--check", action="store_true", help="compare with loads of this machine, under torchrun")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/gdsdata-restore"))
    chosen = parser.parse_args()
    if chosen.check:
        return check(chosen.folder, int(chosen.gb * GB))
    return print_predictions(chosen.gb * GB, chosen.gpus, Rates(*(getattr(chosen, name) for name in Rates._fields)))


if __name__ == "__main__":
    main()

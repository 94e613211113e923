"""Predict how long N GPUs take to restore one checkpoint, each by itself and together.

    python benchmarks/restore_times.py [--gb 140] [--gpus 8 64 1024] [--peer 200] ...
    torchrun --nproc-per-node=4 benchmarks/restore_times.py --check --gb 1 --folder F

The first command prints a table of seconds. It plays the schedule of `gdsdata.load(group=)`
(`gdsdata.collective.plan`) with the rates that are given, in GB/s:

- A rank reads its pieces in their order, at its share of the storage or of its link. From the page
  cache, all ranks of a node together read at ``--memory``: processors copy it.
- A round is passed on when all have read it, all have agreed, and the round before is passed on.
- That takes as long as for the rank that sends or receives most: within a node at ``--peer``,
  between nodes at ``--nic``, which each GPU has for itself. Over gloo, processors copy here too:
  all ranks of a node together pass on at most ``--passed``.
- A round takes ``--round-ms`` of calls besides. Its agreement takes ``--agreement-us`` for each
  rank, because gloo passes headers around a ring.

Nothing else costs anything: no metadata of a file system, no allocation, no other job. All ranks
want all bytes, in tensors of 64 MiB.

A second table has times that were measured on machines with 2 and 4 GPUs, beside predicted ones.
Their rates are limits from the same runs; the sources are pages below benchmarks/results.

The second command loads a file from a cold cache with 1, 2, 4, ... ranks over gloo, and prints the
times beside the predicted ones. It measures the rates first: a cold read by one rank, a transfer
between two ranks, transfers of all ranks at once, and an agreement.
"""

import argparse
import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import gdsdata
from gdsdata.bench.measure import system
from gdsdata.collective import plan
from gdsdata.collective.agreement import Agreement, Kind

GB, TENSOR_BYTES = 1e9, 64 << 20
A_NODE = 8  # GPUs


class Rates(NamedTuple):
    """Rates of a cluster in GB/s, and times of a round."""

    link: float = 50.0  # from the host to each GPU
    memory: float = 90.0  # of the processors of each node that copy memory: four H200, 2026-11-26
    disk: float = 20.0  # of the disks of each node
    shared: float = 200.0  # of a file system that all nodes share
    store: float = 100.0  # of an object store
    store_node: float = 20.0  # of that, at most for each node
    peer: float = 200.0  # between two GPUs of a node, each way
    nic: float = 45.0  # of each GPU's network card, each way
    passed: float = math.inf  # between all ranks of a node together
    round_ms: float = 2.0  # two H100, 2026-11-26
    agreement_us: float = 30.0  # for each rank

    def storage(self, kind: str, nodes: int) -> float:
        """Return what one node can read while ``nodes`` read."""
        return {
            "cache": self.memory,
            "disk": self.disk,
            "shared": self.shared / nodes,
            "store": min(self.store_node, self.store / nodes),
        }[kind]


class Measured(NamedTuple):
    """Times of loads of 8 GiB by several GPUs of one node, each by itself and together.

    Attributes:
        name: of the machine, and what was read.
        ranks: one for each GPU.
        kind: of storage.
        rates: limits that were measured in the same run.
        piece_mib: the most bytes of a piece.
        alone_s, together_s: what the loads took; None: ``rates`` follow from it.
        source: a page below benchmarks/results.
    """

    name: str
    ranks: int
    kind: str
    rates: Rates
    alone_s: float | None
    together_s: float
    source: str
    piece_mib: int = plan.PIECE_BYTES >> 20


MEASURED_GB = 2**33 / GB
# The memory of the machines with H100 was not measured: it is what two ranks read by themselves.
MEASURED = (
    Measured("2 H200, page cache", 2, "cache", Rates(54.9, 89.5, peer=626), 0.1968, 0.1144, "h200/once-two.json"),
    Measured("4 H200, page cache", 4, "cache", Rates(55.0, 87.0, peer=466), 0.4201, 0.1195, "h200/once-four.json"),
    Measured("2 H100, page cache", 2, "cache", Rates(55.0, 99.0, peer=625), None, 0.118, "h100/replicas-warm.md", 64),
    Measured("2 other H100, the same", 2, "cache", Rates(53.0, 65.4, peer=600), None, 0.1576, "h100/README.md"),
    Measured("2 H100, cold disk", 2, "disk", Rates(disk=1.82, peer=600), 10.06, 4.80, "h100/replicas-cold.md"),
    Measured("4 H200, cold disk", 4, "disk", Rates(disk=2.1, peer=466), 17.2, 4.77, "h200/README.md"),
)


def schedule(total_bytes: float, ranks: int, piece_bytes: int = plan.PIECE_BYTES) -> plan.Schedule:
    """Return the schedule of rank 0, which has all pieces, because all ranks want all bytes."""
    count = max(1, round(total_bytes / TENSOR_BYTES))
    sizes = np.full(count, int(total_bytes) // count)
    files, none = (plan.FileVersion("/checkpoint", int(sizes.sum()), 0),), np.zeros(count, np.int8)
    wants = plan.Wants(files, none.astype(np.int32), np.cumsum(sizes) - sizes, sizes, none, none.astype(bool))
    return plan.schedule_of([wants], [0] * ranks, range(ranks), 0, piece_bytes)


def seconds_alone(total_bytes: float, gpus: int, kind: str, rates: Rates, a_node: int = A_NODE) -> float:
    """Return the time in which each rank reads all by itself."""
    ranks = min(gpus, a_node)
    return total_bytes / GB / min(rates.link, rates.storage(kind, math.ceil(gpus / a_node)) / ranks)


def seconds_together(
    total_bytes: float,
    gpus: int,
    kind: str,
    once: str,
    rates: Rates,
    a_node: int = A_NODE,
    piece_bytes: int = plan.PIECE_BYTES,
) -> float:
    """Return the time in which ranks read once, and pass on.

    Args:
        total_bytes: of the checkpoint.
        gpus: of all nodes; each is a rank.
        kind: of storage; see `Rates.storage`.
        once: "node" or "job".
        rates: of the cluster.
        a_node: GPUs of a node.
        piece_bytes: the most bytes of a piece.
    """
    sharing = gpus if once == "job" else min(gpus, a_node)
    rate = min(rates.link, rates.storage(kind, math.ceil(gpus / a_node)) / min(gpus, a_node))
    if sharing == 1:
        return total_bytes / GB / rate
    node_of = [rank // a_node for rank in range(sharing)]
    round_s = rates.round_ms * 1e-3 + rates.agreement_us * 1e-6 * gpus
    read_until, passed_until = np.zeros(sharing), 0.0
    rounds: dict[int, list[plan.Piece]] = {}
    for piece in schedule(total_bytes, sharing, piece_bytes).pieces:
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
        of_nodes = np.bincount(node_of, moved[:, 0, :, 0].sum(axis=0))
        passing_s = max(passing_s, of_nodes.max() / GB / rates.passed)
        passed_until = max(passed_until, read_until[[piece.reader for piece in pieces]].max()) + round_s + passing_s
    return passed_until


def print_predictions(total_bytes: float, counts: list[int], rates: Rates) -> None:
    print(f"Seconds to restore {total_bytes / GB:g} GB on each of N GPUs, {A_NODE} a node, by {rates}\n")
    print("| GPUs | storage | each by itself | once a node | once in all |")
    print("|---:|---|---:|---:|---:|")
    for gpus in counts:
        for kind in ("cache", "disk", "shared", "store"):
            each = f"{seconds_alone(total_bytes, gpus, kind, rates):.2f}"
            node, job = (
                "-"
                if kind in ("cache", "disk") and once == "job"
                else f"{seconds_together(total_bytes, gpus, kind, once, rates):.2f}"
                for once in ("node", "job")
            )
            print(f"| {gpus} | {kind} | {each} | {node} | {job} |")


def predicted(one: Measured) -> tuple[float, float]:
    """Return the seconds of loads by each GPU itself, and together."""
    size, piece_bytes = MEASURED_GB * GB, one.piece_mib << 20
    return (
        seconds_alone(size, one.ranks, one.kind, one.rates, one.ranks),
        seconds_together(size, one.ranks, one.kind, "node", one.rates, one.ranks, piece_bytes),
    )


def print_comparison() -> None:
    """Print what was measured beside what is predicted from the limits of the same run."""
    print(f"\nSeconds to load {MEASURED_GB:.2f} GB on each GPU of a node: predicted, measured\n")
    print("| machine | each by itself | together | source |\n|---|---:|---:|---|")
    for one in MEASURED:
        cells = (
            "-" if seconds is None else f"{by:.3g}, {seconds:.3g} ({by / seconds - 1:+.0%})"
            for by, seconds in zip(predicted(one), (one.alone_s, one.together_s), strict=True)
        )
        print(f"| {one.name} | {' | '.join(cells)} | {one.source} |")


# ------------------------------------------------------------------------------------------------ the check


def timed(call) -> float:
    """Return the seconds until all ranks have made a call."""
    dist.barrier()
    began = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - began


def measured_rates(path: Path, total_bytes: int) -> Rates:
    """Measure a cold read by rank 0 alone, a transfer to rank 1, and an agreement of all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    system.drop([path])
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
    return Rates(disk, disk=disk, peer=peer, nic=peer, round_ms=0.0, agreement_us=said[2] * 1e6 / ranks)


def passed_in_sum(group: dist.ProcessGroup, ranks: int) -> float:
    """Return the GB/s of the first ranks together, if each sends to the next. All call this."""
    if ranks == 1:
        return math.inf
    rank = dist.get_rank()
    sent, received = (torch.zeros(TENSOR_BYTES, dtype=torch.uint8) for _ in range(2))

    def pass_on() -> None:
        for _ in range(4 if rank < ranks else 0):
            sending = dist.isend(sent, (rank + 1) % ranks, group)
            dist.recv(received, (rank - 1) % ranks, group)
            sending.wait()

    pass_on()
    return ranks * 4 * TENSOR_BYTES / GB / timed(pass_on)


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
            print(f"{total_bytes / GB:.2f} GB, cold, {rates}\n")
            print("| ranks | passed on in sum, GB/s | predicted s | measured s |\n|---:|---:|---:|---:|")
        for count in [2**power for power in range(ranks.bit_length()) if 2**power <= ranks]:
            group = dist.new_group(range(count))
            rates = rates._replace(passed=passed_in_sum(group, count))
            dist.barrier()
            if rank == 0:
                system.drop([path])
            dist.barrier()
            seconds = timed(lambda group=group, count=count: gdsdata.load(path, group=group) if rank < count else None)
            if rank == 0:
                by = seconds_together(total_bytes, count, "disk", "node", rates, a_node=count)
                print(f"| {count} | {rates.passed:.2f} | {by:.2f} | {seconds:.2f} |", flush=True)
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
    print_predictions(chosen.gb * GB, chosen.gpus, Rates(*(getattr(chosen, name) for name in Rates._fields)))
    return print_comparison()


if __name__ == "__main__":
    main()

"""The row's side of case=replicas: a process that starts the ranks, and commands them."""

import collections

from gdsdata.bench.cases.replicas.ranks import Ranks
from gdsdata.bench.harness.row import Row
from gdsdata.bench.peers import registry


class ReplicasRow(Row):
    """A row whose work is done by ranks, in processes of their own.

    This process makes no CUDA context.
    """

    def __init__(self, peer, kind, ranks, patience_s, command, device):
        super().__init__(peer, registry.find("replicas", peer, kind), "cpu")
        of_rank = "VolumesRank" if kind == "volumes" else "TensorsRank"
        self.ranks = Ranks(of_rank, ranks, device, patience_s, peer=peer, **command)

    def prepare(self, touched_bytes):
        self.ranks.ask("prepare", touched_bytes=touched_bytes)

    def verify(self, **command):
        found = self.ranks.ask("verify", **command)
        return {name: max(one[name] for one in found) for name in found[0]}

    def open(self, dtype):
        self.ranks.ask("open", dtype=dtype)

    def run(self):
        """`seconds` are from the barrier to the end of the last rank."""
        found, peak_bytes = self.ranks.ask_and_sample("run")
        served: collections.Counter[str] = collections.Counter()
        for one in found:
            served.update(one["served"])
        return found[0] | {
            "seconds": max(one["ended"] for one in found) - min(one["began"] for one in found),
            "served": dict(served),
            "storage_bytes": sum(one["storage_bytes"] for one in found),
            "device_peak_bytes": max(one["device_peak_bytes"] for one in found),
            "peak_bytes": peak_bytes,
        }

    def after(self):
        return {"cpu_seconds": sum(one["cpu_seconds"] for one in self.ranks.ask("close"))}


class LimitsRow(Row):
    """No row: its ranks measure limits."""

    def __init__(self, ranks, patience_s, size_bytes, device):
        super().__init__("limits", None, "cpu")
        self.ranks = Ranks("LimitsRank", ranks, device, patience_s, size_bytes=size_bytes)

    def describe(self):
        return {}

    def all_gather(self, seconds):
        """Measure GB/s a rank, of the bytes that all ranks have in the end."""
        return {"gb_per_s": min(one["gb_per_s"] for one in self.ranks.ask("all_gather", seconds=seconds))}

    def pinned_copies(self, seconds):
        """Measure GB/s of pinned copies to all GPUs at once, together."""
        found = self.ranks.ask("pinned_copies", seconds=seconds)
        return {"gb_per_s": sum(one["gb_per_s"] for one in found), "buffer_bytes": found[0]["buffer_bytes"]}

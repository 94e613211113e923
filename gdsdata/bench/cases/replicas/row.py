"""The row's side of case=replicas: a process that starts the ranks, and commands them."""

import collections
from collections.abc import Callable

from gdsdata.bench.cases.replicas.ranks import Ranks
from gdsdata.bench.harness.row import Row
from gdsdata.bench.measure import system


class RanksRow(Row):
    """The base of rows whose work is done by ranks, in processes of their own.

    This process makes no CUDA context. A class has `of_rank()`, the name of its ranks' class.
    """

    of_rank: Callable[[], str]

    def __init__(self, key, source, settings, engine, device_name):
        super().__init__(key, source, settings, engine, "cpu")
        self.ranks = Ranks(self.of_rank(), settings, device_name, key=key, source=source, engine=engine)


class ReplicasRow(RanksRow):
    def of_rank(self):
        return "VolumesRank" if self.source.kind == "volumes" else "TensorsRank"

    def prepare(self, touched_bytes):
        self.ranks.ask("prepare", touched_bytes=touched_bytes)

    def verify(self, dtype):
        system.warm(self.source.files)  # The load that follows is timed, as the first one in a process.
        found = self.ranks.ask("verify", dtype=dtype)
        return {name: max(one[name] for one in found) for name in found[0]}

    def open(self, dtype):
        self.ranks.ask("open", dtype=dtype)

    def run(self, dtype, cache):
        """`seconds` are from the barrier to the end of the last rank."""
        found, peak_bytes = self.ranks.ask_and_sample("run", dtype=dtype, cache=cache)
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


class LimitsRow(RanksRow):
    """No row: its ranks measure limits."""

    def find(self):
        """Return None: it has no peer."""

    def of_rank(self):
        return "LimitsRank"

    def describe(self):
        return {}

    def all_gather(self, seconds):
        """Measure GB/s a rank, of the bytes that all ranks have in the end."""
        return {"gb_per_s": min(one["gb_per_s"] for one in self.ranks.ask("all_gather", seconds=seconds))}

    def pinned_copies(self, seconds):
        """Measure GB/s of pinned copies to all GPUs at once, together."""
        found = self.ranks.ask("pinned_copies", seconds=seconds)
        return {"gb_per_s": sum(one["gb_per_s"] for one in found), "buffer_bytes": found[0]["buffer_bytes"]}

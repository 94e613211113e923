"""The bench's side of case=io.

A table is one direction, one state of the page cache, one I/O size and one depth. Several values of
`case.io_bytes` and `case.depth` make a table for each pair, and a picture of throughput over size
and depth. `xfer_type` names a row's way as gdsio does, and notes.md says what is measured. A row
that leaves in the page cache what it was to move past it is marked, and no other is compared with
it.
"""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gdsdata.bench.data.made import need_space
from gdsdata.bench.data.pattern import Pattern
from gdsdata.bench.data.sources import CaseSource
from gdsdata.bench.data.transfers import MOST_THREADS, Work, new_file
from gdsdata.bench.harness.case import COLD_MEANS, IN_MEMORY, Case
from gdsdata.bench.measure import device, limits, system

IO_TYPES = {"read": "read", "write": "write", "randread": "random read", "randwrite": "random write"}
LIMIT_REQUESTS = 2**18  # more than there is time for


@dataclass
class Transfers(CaseSource):
    """One direction to or from one device."""

    kind: str
    direction: str
    device: str
    path: str
    size_bytes: int

    @property
    def peer_kind(self):
        """Return None: every row moves bytes in each direction."""

    @property
    def file_bytes(self):
        return self.size_bytes

    @property
    def writes(self):
        return self.direction.endswith("write")

    @property
    def files(self):
        return [str(Path(self.path).parent) if self.writes else self.path]  # the folder, before there is a file

    def summary(self):
        state = "new each time, its space allocated" if self.writes else "its bytes follow from their offset"
        return f"one file of {system.size_text(self.file_bytes)}, {state}"


class Io(Case):
    of_runs = (
        "iops", "latency_us", "p50_us", "p90_us", "p99_us", "p99_9_us", "cpu_user_s", "cpu_system_s", "ops",
        "cached_share", "requests_per_op",
    )  # fmt: skip

    def measure(self):
        results = super().measure()
        return results if self.case.verify else results | {"verified": None}

    @functools.cached_property
    def points(self):
        sizes = [(f"{system.size_text(io_bytes)} x", io_bytes) for io_bytes in self.case.io_bytes]
        return {f"{size} {depth}": (io_bytes, depth) for size, io_bytes in sizes for depth in self.case.depth}

    def sources(self):
        on_gpu = device.is_cuda(self.device)
        if not on_gpu and set(self.case.xfer) - {"cpu"}:
            self.notes.append(f"Transfers to and from a GPU were left out, for device.name={self.device}.")
        need_space(self.files_folder, "case=io", 2 * self.case.file_bytes, "case.file_bytes=")
        read_file = str(self.files_folder / "read.bin")
        for there in dict.fromkeys(["cpu", self.device]):
            for direction in self.case.direction:
                source = Transfers(IO_TYPES[direction], direction, there, read_file, self.case.file_bytes)
                if there != "cpu":
                    source.kind += ", GPU"
                if source.writes:
                    source.path = str(self.files_folder / "written.bin")
                elif not Path(read_file).exists():
                    with self.progress.bytes("file to read", self.case.file_bytes) as advance:
                        Pattern(self.case.seed).write_file(read_file, self.case.file_bytes, advance)
                yield source

    def facts(self, source):
        return {"file_bytes": source.file_bytes}

    def caches(self, source):
        return ["direct"] if source.writes else super().caches(source)

    def dtypes(self, source, cache):
        return list(self.points)

    def rows_for(self, source, cache):
        """The rows of the wanted transfer types and ways to submit."""
        on_gpu = device.is_cuda(source.device)
        xfers = {"any"} if ("cpu_gpu" if on_gpu else "cpu") in self.case.xfer else set()
        xfers |= {"gpu"} if on_gpu and "gpu" in self.case.xfer else set()
        rows = super().rows_for(source, cache)
        return [peer for peer in rows if peer.submit in self.case.submit and peer.xfer in xfers]

    def work(self, table, cache=None):
        source, (io_bytes, depth) = table.source, self.points[table.dtype]
        threads = self.case.threads or min(depth, MOST_THREADS)
        return Work(
            source.path, source.direction, cache or table.cache, source.file_bytes, io_bytes, depth, threads,
            self.case.batch_calls, self.case.duration_s, self.case.seed,
        )  # fmt: skip

    def verify_command(self, row):
        """Verifies in all states of the page cache at once; all its tables share the outcome."""
        possible = self.find(row.key).caches if self.case.verify else ()
        caches = [cache for cache in self.caches(row.table.source) if cache in possible]
        return {"works": [self.work(row.table, cache) for cache in caches]}

    def touched_bytes(self, source):
        return max(io_bytes * depth for io_bytes, depth in self.points.values())

    def run(self, row):
        source, resident = row.table.source, None
        if not source.writes:
            resident = self.with_cache(source, row.table.cache)
        try:
            result = row.process.run(work=self.work(row.table))
            result["cached_share"] = self.cached_share(row.table, result["bytes"], resident or 0.0)
            if self.case.verify:
                row.process.ask("compare")
        finally:
            if source.writes:
                Path(source.path).unlink(missing_ok=True)
        return result | {"resident_before": resident}

    def cached_share(self, table, moved_bytes, resident_before):
        """The share of what a run moved past the page cache that is in it; None in memory."""
        path, size = table.source.path, table.source.file_bytes
        if table.cache == "warm" or system.file_system(path)[0] in IN_MEMORY:
            return None
        came = system.resident_bytes(path)[0] - resident_before * size
        return max(0.0, came / min(size, moved_bytes))

    def note_surroundings(self, table):
        super().note_surroundings(table)
        for one in filter(went_through_cache, table.rows):
            share = max(run["cached_share"] for run in one.runs)
            self.notes.append(
                f"{table.full_name}: of what {one.described['name']} moved, up to {min(share, 1.0):.0%} was in the "
                "page cache afterwards: it did not go past it, or not always, so that memory served what storage was "
                "asked for. Its figures are no storage's, and no other row is compared with them."
            )

    def compared(self, table, limit, limit_name):
        self.no_peers = tuple(one.key for one in table.rows if went_through_cache(one))
        return super().compared(table, limit, limit_name)

    def take_limits(self, table, seconds):
        if table.cache == "warm":
            return super().take_limits(table, seconds)
        work = self.work(table)
        return {"native_aio": limits.measured("native AIO", lambda: native_aio(work, seconds))}

    def limit_for(self, table, found):
        if table.cache == "warm":
            return super().limit_for(table, found)
        return limits.rate_of(found["native_aio"], f"native AIO, one thread, {table.dtype}")

    def summary(self, row):
        source = row.table.source
        io_bytes, depth = self.points[row.table.dtype]
        first = row.runs[0] if row.runs else {}
        return super().summary(row) | {
            "io_type": IO_TYPES[source.direction],
            "xfer_type": self.xfer_type(row),
            "through_cache": went_through_cache(row),
            "file_bytes": source.file_bytes,
            "io_bytes": io_bytes,
            "depth": depth,
            **{name: first.get(name) for name in ("threads", "calls_in_flight", "transfers_per_call")},
        }

    def xfer_type(self, row):
        source, peer = row.table.source, self.find(row.key)
        from_cache = row.table.cache == "warm" or (went_through_cache(row) and not source.writes)
        way = ["page cache" if from_cache else "storage", "CPU"]
        if source.device != "cpu":
            way = [way[0], "GPU"] if peer.xfer == "gpu" else [*way, "GPU"]
        if source.writes:
            way.reverse()
        return "->".join(way) + {"sync": "", "async": ", async", "batch": ", batch"}[peer.submit]


def went_through_cache(row):
    """Whether a run that was to go past the page cache left there what it moved."""
    return any((run["cached_share"] or 0.0) > COLD_MEANS for run in row.runs)


def native_aio(work, seconds):
    """Measures the same transfers by the kernel's native AIO; a file that it writes is removed."""
    offsets = np.tile(work.offsets(), -(-LIMIT_REQUESTS // work.slots))
    requests = np.zeros(len(offsets), np.int64), offsets, np.full(len(offsets), work.io_bytes, np.uint64)
    path = Path(work.path)
    if work.writes:
        path = path.with_name("limit.bin")
        os.close(new_file(path, work.file_bytes))
    else:
        system.drop([path])
    try:
        return limits.direct_io([path], lambda count: requests, work.depth, seconds, work.writes)
    finally:
        if work.writes:
            path.unlink()

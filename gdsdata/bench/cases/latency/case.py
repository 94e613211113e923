"""The bench's side of case=latency: each size of each kind of work is a source of its own.

A cold read has its file's pages dropped before. Only the reads and writes are timed, and only their
CPU time counts.
"""

import collections
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from gdsdata.bench.data.made import need_space, write_synced
from gdsdata.bench.data.pieces import random_bytes
from gdsdata.bench.data.sources import CaseSource
from gdsdata.bench.harness.case import Case
from gdsdata.bench.measure import intervals, limits, system

REQUEST_BYTES, MOST_DEPTH = 2**20, 32  # of the O_DIRECT reads and writes that are measured as a limit
TOUCHED_BYTES = 64 * 2**20  # and twice the tensor


@dataclass
class TensorFile(CaseSource):
    """One tensor's file, and what is done with it."""

    work: str
    tensor_bytes: int
    path: str
    dtype: ClassVar[str] = "uint8"

    @property
    def kind(self):
        return f"{self.work} {system.size_text(self.tensor_bytes)}"

    @property
    def peer_kind(self):
        return self.work

    @property
    def files(self):
        return [self.path]

    @property
    def file_bytes(self):
        return self.tensor_bytes

    def summary(self):
        return f"a file of {self.tensor_bytes:,} random bytes"


class Latency(Case):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.latencies = collections.defaultdict(list)  # seconds, by row

    def sources(self):
        for work in self.case.work:
            for size in sorted(set(self.case.sizes_bytes)):
                need_space(self.files_folder, f"case.sizes_bytes=[{size}]", 3 * size, "case.sizes_bytes=")
                with self.written(TensorFile(work, size, self.path(work, size))) as source:
                    yield source

    def path(self, *parts):
        """Return the path of a file in the run's own folder."""
        return str(self.files_folder / f"tensor-{'-'.join(map(str, parts))}.bin")

    @contextlib.contextmanager
    def written(self, source):
        """Write the source's file; remove it in the end."""
        write_synced(source.path, random_bytes(source.tensor_bytes, self.case.seed).numpy())
        try:
            yield source
        finally:
            Path(source.path).unlink(missing_ok=True)

    def facts(self, source):
        return {"work": source.work, "tensor_bytes": source.tensor_bytes, "first_file": source.path}

    def caches(self, source):
        return super().caches(source) if source.work == "read" else self.case.writes

    def rows_for(self, source, cache):
        refused = limits.direct_alignment(source.path) is None
        rows = super().rows_for(source, cache)
        rows = [peer for peer in rows if peer.can(source.work, cache, source.tensor_bytes)]
        left_out = [peer.key for peer in rows if refused and peer.direct]
        if left_out:
            self.notes.append(f"Left out, for the file system refuses O_DIRECT: {', '.join(left_out)}.")
        return [peer for peer in rows if peer.key not in left_out]

    def touched_bytes(self, source):
        return TOUCHED_BYTES + 2 * source.tensor_bytes

    def run(self, row):
        if row.table.cache == "warm":
            self.warmed(row.table.source)
        found = row.process.run(dtype=row.table.dtype, cache=row.table.cache)
        latencies = found.pop("latencies_s")
        self.latencies[row] += latencies
        return found | {"latency_s": intervals.described(latencies)}

    def summary(self, row):
        size, latencies = row.table.source.tensor_bytes, self.latencies[row]
        return row.summary() | {
            "work": row.table.source.work,
            "tensor_bytes": size,
            "latency_s": intervals.described(latencies) if latencies else None,
            "bandwidth_gb_per_s": intervals.described([size / one / 1e9 for one in latencies]) if latencies else None,
        }

    def take_limits(self, table, seconds):
        """Measures a file of the tensor's size, read or written and nothing else."""
        source, state = table.source, table.cache
        if state == "warm":
            return super().take_limits(table, seconds)
        whole = source.tensor_bytes // system.PAGE * system.PAGE
        if not whole:
            return {"direct": {"unavailable": f"{source.tensor_bytes} bytes are less than a page"}}
        request = min(whole, REQUEST_BYTES)
        depth = min(whole // request, MOST_DEPTH)
        verb = source.work + (" in place" if state == "in_place" else "")
        name = f"O_DIRECT {verb}, {request >> 10:,} KiB x {depth}"
        measured = limits.measured(name, lambda: self.direct(source, state, request, depth, seconds))
        return {"direct": measured if "unavailable" in measured else measured | {"request_bytes": request}}

    def direct(self, source, state, request, depth, seconds):
        if source.work == "read":
            system.drop(source.files)  # Bytes that were written to verify may still be on their way out.
            return limits.direct_io(source.files, limits.sequential_requests(source.files, request), depth, seconds)
        found: list[dict] = []
        ends = time.perf_counter() + seconds
        while not found or time.perf_counter() < ends:
            if state == "in_place":
                # Within the tensor, so that the file keeps its size: the next row would pay for it.
                offsets = np.arange(source.tensor_bytes // request) * request
                places = np.zeros(len(offsets), np.int64), offsets, np.full(len(offsets), request, np.uint64)
                found.append(limits.direct_io(source.files, lambda _, places=places: places, depth, write=True))
            else:
                found.append(limits.durable_write(self.files_folder, source.tensor_bytes, request, depth))
        return sorted(found, key=lambda one: one["gb_per_s"])[len(found) // 2]

    def limit_for(self, table, found):
        if table.cache == "warm":
            return super().limit_for(table, found)
        direct = found["direct"]
        if "unavailable" in direct:
            return None, direct["unavailable"]
        synced = ", synced" if table.source.work == "write" else ""
        request, depth = int(direct["request_bytes"]) >> 10, int(direct["depth"])
        return direct["gb_per_s"], f"O_DIRECT {table.source.work}, {request:,} KiB x {depth}{synced}"

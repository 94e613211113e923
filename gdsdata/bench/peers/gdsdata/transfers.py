"""The engine's own calls and futures: the rows of case=io."""

import ctypes.util
import os
from typing import Any

import numpy as np

import gdsdata
from gdsdata.bench.data.transfers import MOST_THREADS, new_file
from gdsdata.bench.peers.protocols import TransferPeer
from gdsdata.io import engine as io_engine
from gdsdata.io.options import EngineOptions


class Calls(TransferPeer):
    """The engine's calls of many transfers, which `gdsdata.load` and `save` make."""

    xfer, backend = "any", ""
    shared: Any  # the engine
    file: Any  # an Output, or a FileTable of one

    @property
    def options(self):
        return options_for(self.work, self.engine, self.backend, batches=self.submit == "batch")

    def open(self):
        self.place = io_engine.resolved(self.device)
        self.shared = io_engine.shared_engine(self.options, self.place)
        if self.work.writes:
            self.file = io_engine.Output(self.work.path, self.work.file_bytes)
        else:
            self.file = io_engine.table_of_one(self.work.path)
        shares = max(self.shares())
        self.zeros, self.sizes = np.zeros(shares, np.int32), np.full(shares, self.work.io_bytes, np.int64)
        self.steps = np.arange(shares, dtype=np.int64) * self.work.io_bytes

    def move(self, place, offsets):
        count = len(offsets)
        memory, places, sizes = self.memory.tensor, self.steps[:count] + place * self.work.io_bytes, self.sizes[:count]
        before = self.shared.mark(io_engine.stream_of(self.place))
        if self.work.writes:
            self.file.write(self.shared, offsets, sizes, memory, places, False, before, False)
        else:
            self.shared.read_many(self.file, self.zeros[:count], offsets, sizes, memory, places, False, before, False)

    def commit(self):
        if self.work.writes:
            self.file.commit()

    def statistics(self):
        return self.shared.statistics()

    def served(self):
        return self.statistics()["bytes"]

    def requests(self):
        return self.statistics()["requests"]

    def close(self):
        self.shared = self.file = None


class Threads(Calls, serves="io"):
    key, name, submit = "gdsdata_sync", "gdsdata, threads", "sync"
    setting = "threads that call the same engine, each for one transfer at a time"


class Futures(Calls, serves="io"):
    key, name, submit = "gdsdata_async", "gdsdata, futures", "async"
    setting = "gdsdata.Engine.read and write from one thread, a future each; every write of its own is synced"

    def open(self):
        if self.work.writes:  # At its full length, or the first write would be taken for the whole file.
            os.close(new_file(self.work.path, self.work.file_bytes))
        self.calls: Any = gdsdata.Engine(self.options, most_calls=min(self.work.depth, MOST_THREADS))

    def start(self, place, offset):
        part = self.memory.tensor[self.memory.range(place)]
        call = self.calls.write if self.work.writes else self.calls.read
        return call(self.work.path, part, int(offset), priority="training")

    def commit(self):
        """Nothing is left to do: each of its writes was synced."""

    def statistics(self):
        found = list(self.calls.stats().values())
        return found[0] if found else {"bytes": {}, "requests": 0}

    def close(self):
        self.calls.close()


class Batches(Calls, serves="io"):
    key, name, submit = "gdsdata_batch", "gdsdata, batches", "batch"
    setting = "one engine; calls of it that carry many transfers each (case.batch_calls of them share the depth)"


class CuFile(TransferPeer):
    """Comes before one of the three above: straight to the GPU."""

    xfer, backend, caches, devices = "gpu", "cufile", ("cold", "direct"), ("cuda",)

    @classmethod
    def lacks(cls):
        if ctypes.util.find_library("cufile") or io_engine.cufile_of_wheels():
            return ""
        return "libcufile.so.0 was not found; it comes with the CUDA toolkit, or pip install nvidia-cufile"


class CuFileThreads(CuFile, Threads, serves="io"):
    key, name = "gdsdata_cufile_sync", "gdsdata cuFile, threads"
    setting = "gdsdata_sync with backend=cufile"


class CuFileFutures(CuFile, Futures, serves="io"):
    key, name = "gdsdata_cufile_async", "gdsdata cuFile, futures"
    setting = "gdsdata_async with backend=cufile"


class CuFileBatches(CuFile, Batches, serves="io"):
    key, name = "gdsdata_cufile_batch", "gdsdata cuFile, batches"
    setting = "gdsdata_batch with backend=cufile and cufile_batch: cuFile's batch interface"


def options_for(work, engine, backend, batches):
    """Return the user's engine settings; the transfer type decides the others."""
    chosen = dict(engine or {})
    if chosen.get("direct", "auto") == "auto":
        chosen["direct"] = "never" if work.cache == "warm" else "always"
    if not chosen.get("queue_depth"):
        chosen["queue_depth"] = max(64, min(work.depth, 4096))
    if chosen.get("coalesce_gap_bytes") in (None, EngineOptions.coalesce_gap_bytes):
        chosen["coalesce_gap_bytes"] = 0  # Nothing is read that was not asked for.
    if backend:
        chosen |= {"backend": backend, "cufile_batch": batches}
    elif chosen.get("backend", "auto") == "auto" and io_engine.cufile_dma_is_possible():
        chosen["backend"] = "uring"  # Over host memory, which "auto" would avoid.
    return EngineOptions(**chosen)

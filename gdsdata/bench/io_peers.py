"""Who carries case=io's transfers, and how they are submitted: gdsdata's engine three ways, plain threads, kvikio."""

import contextlib
import ctypes.util
import dataclasses
import os
from dataclasses import dataclass

import numpy as np
import torch

import gdsdata
from gdsdata.bench import case, case_settings, device, kvikio_ways, limits
from gdsdata.io.engine import (
    Output,
    cufile_dma_is_possible,
    cufile_of_wheels,
    resolved,
    shared_engine,
    stream_of,
    table_of_one,
)
from gdsdata.io.options import EngineOptions

RANDOM = {"randread": True, "randwrite": True, "read": False, "write": False}


@dataclass
class Work:
    """What one run does; sent to a row's process as a dict.

    path: the file that is read, or written anew. cache: "cold": past the page cache; "warm": out of
    it. depth: transfers in flight. threads: of the synchronous rows; batch_calls: which carry the
    batch rows' depth. duration_s: None: one pass over the file.
    """

    path: str
    direction: str
    cache: str
    file_bytes: int
    io_bytes: int
    depth: int
    threads: int
    batch_calls: int
    duration_s: float | None
    seed: int

    @property
    def writes(self):
        return self.direction.endswith("write")

    @property
    def slots(self):
        """Transfers in one pass: whole ones only."""
        return self.file_bytes // self.io_bytes

    def offsets(self):
        """Of one pass, in bytes: each transfer of the file once."""
        order = np.arange(self.slots)
        if RANDOM[self.direction]:
            order = np.random.default_rng(self.seed).permutation(self.slots)
        return order * self.io_bytes

    def as_dict(self):
        return dataclasses.asdict(self)


class Memory:
    """What a run's transfers fill or are taken from: so many places of `io_bytes`, on the device, touched."""

    def __init__(self, pattern, io_bytes, places, device_name):
        self.pattern, self.io_bytes, self.on_gpu = pattern, io_bytes, device.is_cuda(device_name)
        if self.on_gpu:
            self.tensor = torch.empty(places * io_bytes, dtype=torch.uint8, device=device_name)
        else:
            self.mapping, self.array = limits.huge_pages(places * io_bytes)
            self.tensor = torch.from_numpy(self.array)

    def fill(self):
        array = np.empty(self.tensor.numel(), np.uint8) if self.on_gpu else self.array
        self.pattern.fill(array)
        if self.on_gpu:
            self.tensor.copy_(torch.from_numpy(array))

    def range(self, place, count=1):
        return slice(place * self.io_bytes, (place + count) * self.io_bytes)

    def stamp(self, place, offsets):
        """Makes the places from `place` on what is to be at these offsets."""
        if not self.on_gpu:
            self.pattern.stamp(self.array[self.range(place, len(offsets))], offsets)
            return
        stamps = torch.from_numpy(self.pattern.stamps(offsets, self.io_bytes).view(np.int64))
        words = self.tensor[self.range(place, len(offsets))].view(torch.int64)
        words.view(*stamps.shape, -1)[:, :, 0] = stamps.to(self.tensor.device)

    def check(self, place, offsets, path):
        """Raises ValueError where these places do not hold what is at these offsets."""
        held = self.tensor[self.range(place, len(offsets))].cpu().numpy()
        self.pattern.check(held, offsets, path)


class IoPeer:
    """Carries transfers between a file and `memory`.

    submit: "sync" (`threads` threads, a transfer each), "batch" (`batch_calls` calls in flight,
    which share the depth)
        or "async" (one thread, a future for each transfer in flight).
    """

    key, name, setting, package = "", "", "", None
    submit = "sync"
    xfer = "cpu"  # or cpu_gpu (over host memory), gpu (straight), any: as the device asks
    caches = ("cold", "warm", "direct")

    def __init__(self, work, memory, device_name, engine):
        self.work, self.memory, self.device, self.engine_settings = work, memory, device_name, engine or {}
        self.path = ""

    @classmethod
    def lacks(cls):
        """Why it cannot be had here; "" where it can."""
        return ""

    def shares(self):
        """Of the transfers in flight, how many each of the calls that are under way at a time carries."""
        if self.submit == "sync":
            return [1] * self.work.threads
        calls = min(self.work.batch_calls, self.work.depth)
        return [len(part) for part in np.array_split(np.arange(self.work.depth), calls)]

    def move(self, place, offsets):
        """Carries one call's transfers, from or to the places from `place` on; returns when all have ended."""
        raise NotImplementedError

    def start(self, place, offset):
        """A future of one transfer ("async" only)."""
        raise NotImplementedError

    def commit(self):
        """What was written is on storage, under its name, when this returns."""

    def served(self):
        return {}

    def requests(self):
        """How many storage was asked for; None where that is not known."""
        return None

    def close(self):
        pass


# ------------------------------------------------------------------------------------------------ gdsdata


class Batches(IoPeer):
    """The engine's own calls, which carry many transfers: those under `gdsdata.load` and `gdsdata.save`."""

    key, name, submit = "gdsdata_batch", "gdsdata, batches", "batch"
    setting = "one engine; calls of it that carry many transfers each (case.batch_calls of them share the depth)"
    backend, xfer = None, "any"

    def __init__(self, work, memory, device_name, engine):
        super().__init__(work, memory, device_name, engine)
        self.options = options_for(work, engine, self.backend, batches=self.submit == "batch")
        self.open()

    def open(self):
        self.place = resolved(self.device)
        self.engine = shared_engine(self.options, self.place)
        if self.work.writes:
            self.output = Output(self.work.path, self.work.file_bytes)
        else:
            self.files = table_of_one(self.work.path)
        shares = max(self.shares())
        self.zeros, self.sizes = np.zeros(shares, np.int32), np.full(shares, self.work.io_bytes, np.int64)
        self.steps = np.arange(shares, dtype=np.int64) * self.work.io_bytes

    def move(self, place, offsets):
        count = len(offsets)
        memory, places = self.memory.tensor, self.steps[:count] + place * self.work.io_bytes
        before = self.engine.mark(stream_of(self.place))
        if self.work.writes:
            self.output.write(self.engine, offsets, self.sizes[:count], memory, places, False, before, False)
        else:
            sizes = self.sizes[:count]
            self.engine.read_many(self.files, self.zeros[:count], offsets, sizes, memory, places, False, before, False)

    def commit(self):
        if self.work.writes:
            self.output.commit()

    def statistics(self):
        return self.engine.statistics()

    def served(self):
        return self.statistics()["bytes"]

    def requests(self):
        return self.statistics()["requests"]

    def close(self):
        self.engine = self.output = self.files = None


class Threads(Batches):
    key, name, submit = "gdsdata_sync", "gdsdata, threads", "sync"
    setting = "threads that call the same engine, each for one transfer at a time"


class Futures(Batches):
    key, name, submit = "gdsdata_async", "gdsdata, futures", "async"
    setting = "gdsdata.Engine.read and write from one thread, a future each; every write of its own is synced"

    def open(self):
        if self.work.writes:  # there at its full length, or the first write would be taken for the whole file
            os.close(new_file(self.work.path, self.work.file_bytes))
        self.engine = gdsdata.Engine(self.options, most_calls=min(self.work.depth, case_settings.MOST_THREADS))

    def start(self, place, offset):
        part = self.memory.tensor[self.memory.range(place)]
        call = self.engine.write if self.work.writes else self.engine.read
        return call(self.work.path, part, int(offset), priority="training")

    def commit(self):
        """Each of its writes was synced."""

    def statistics(self):
        found = list(self.engine.stats().values())
        return found[0] if found else {"bytes": {}, "requests": 0}

    def close(self):
        if self.engine:
            self.engine.close()
        self.engine = None


class CuFile(IoPeer):
    """Of the three ways above, straight to the GPU."""

    xfer, backend, caches = "gpu", "cufile", ("cold", "direct")

    @classmethod
    def lacks(cls):
        if ctypes.util.find_library("cufile") or cufile_of_wheels():
            return ""
        return "libcufile.so.0 was not found; it comes with the CUDA toolkit, or pip install nvidia-cufile"


class CuFileBatches(CuFile, Batches):
    key, name = "gdsdata_cufile_batch", "gdsdata cuFile, batches"
    setting = "gdsdata_batch with backend=cufile and cufile_batch: cuFile's batch interface"


class CuFileThreads(CuFile, Threads):
    key, name = "gdsdata_cufile_sync", "gdsdata cuFile, threads"
    setting = "gdsdata_sync with backend=cufile"


class CuFileFutures(CuFile, Futures):
    key, name = "gdsdata_cufile_async", "gdsdata cuFile, futures"
    setting = "gdsdata_async with backend=cufile"


def options_for(work, engine, backend, batches):
    """The user's engine settings with what the transfer type asks for, where these leave it open."""
    chosen = dict(engine or {})
    if chosen.get("direct", "auto") == "auto":
        chosen["direct"] = "never" if work.cache == "warm" else "always"
    if not chosen.get("queue_depth"):
        chosen["queue_depth"] = max(64, min(work.depth, 4096))
    if chosen.get("coalesce_gap_bytes") in (None, EngineOptions.coalesce_gap_bytes):
        chosen["coalesce_gap_bytes"] = 0  # nothing is read that was not asked for
    if backend:
        chosen |= {"backend": backend, "cufile_batch": batches}
    elif chosen.get("backend", "auto") == "auto" and cufile_dma_is_possible():
        chosen["backend"] = "uring"  # over host memory, where "auto" would not go
    return EngineOptions(**chosen)


# ------------------------------------------------------------------------------------------------ others


def new_file(path, size_bytes, flags=0):
    """A descriptor of a file made anew, its space allocated."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o644)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError:
        os.close(fd)
        os.unlink(path)
        raise
    return fd


class Plain(IoPeer):
    """preadv and pwritev on threads; to and from a GPU by way of pinned memory, a stream for each thread."""

    key, name, xfer = "pread", "plain threads", "any"
    setting = "os.preadv, os.pwritev (O_DIRECT, but for the page cache) and one fsync; to a GPU by pinned memory"

    def __init__(self, work, memory, device_name, engine):
        super().__init__(work, memory, device_name, engine)
        flags = 0 if work.cache == "warm" else os.O_DIRECT
        self.path = "page cache" if work.cache == "warm" else "O_DIRECT"
        open_file = (lambda flags: new_file(work.path, work.file_bytes, flags)) if work.writes else self.open_to_read
        try:
            self.fd = open_file(flags)
        except OSError:
            if not flags:
                raise
            self.fd, self.path = open_file(0), "buffered (O_DIRECT refused)"
        self.host = memory.tensor
        if device.is_cuda(device_name):
            self.host = device.pinned(memory.tensor.shape, torch.uint8)
            self.streams = [torch.cuda.Stream(torch.device(device_name)) for _ in self.shares()]
        self.view = memoryview(self.host.numpy())

    def open_to_read(self, flags):
        return os.open(self.work.path, os.O_RDONLY | flags)

    def copy(self, place, target, source):
        """Behind what the current stream has been given."""
        stream, part = self.streams[place], self.memory.range(place)
        stream.wait_stream(torch.cuda.current_stream(torch.device(self.device)))
        with torch.cuda.stream(stream):
            target[part].copy_(source[part], non_blocking=True)
        stream.synchronize()

    def move(self, place, offsets):
        part, offset = self.view[self.memory.range(place)], int(offsets[0])
        on_gpu = self.host is not self.memory.tensor
        if self.work.writes:
            if on_gpu:
                self.copy(place, self.host, self.memory.tensor)
            moved = os.pwritev(self.fd, [part], offset)
        else:
            moved = os.preadv(self.fd, [part], offset)
            if on_gpu:
                self.copy(place, self.memory.tensor, self.host)
        if moved != len(part):
            raise OSError(f"{self.work.path}: {moved:,} of {len(part):,} bytes were moved at offset {offset:,}")

    def commit(self):
        if self.work.writes:
            os.fsync(self.fd)

    def close(self):
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.view, self.host = -1, None, None


class Kvikio(IoPeer):
    """By POSIX, with O_DIRECT but for the page cache; to and from a GPU by way of kvikio's pinned memory."""

    key, name, package, submit, xfer = "kvikio", "kvikio", "kvikio", "batch", "any"
    setting = "kvikio.CuFile.pread and pwrite by POSIX (O_DIRECT, but for the page cache), batches of futures; as many "
    setting += "threads as case.threads, at most 64"
    options = {"compat_mode": "ON"}

    def __init__(self, work, memory, device_name, engine):
        super().__init__(work, memory, device_name, engine)
        import kvikio

        on_gpu = device.is_cuda(device_name)
        kvikio_ways.configure(self.options | {"num_threads": min(work.threads, 64)})
        kvikio_ways.go_past_page_cache(work.cache != "warm")
        if work.writes:
            os.close(new_file(work.path, work.file_bytes))
        self.file = kvikio.CuFile(work.path, "r+" if work.writes else "r")
        self.path = kvikio_ways.way(self.file, on_gpu, work.writes)
        self.part = memory.tensor if on_gpu else memory.array

    def move(self, place, offsets):
        device.wait_for_stream(self.device)  # which has made what is to be written
        call, size = self.file.pwrite if self.work.writes else self.file.pread, self.work.io_bytes
        futures = [
            call(self.part[self.memory.range(place + index)], size, int(offset)) for index, offset in enumerate(offsets)
        ]
        for future, offset in zip(futures, offsets, strict=True):
            if (moved := future.get()) != size:
                raise OSError(f"{self.work.path}: kvikio moved {moved:,} of {size:,} bytes at offset {offset:,}")

    def commit(self):
        if self.work.writes:
            with open(self.work.path, "rb") as file:
                os.fsync(file.fileno())

    def close(self):
        self.file.close()


class KvikioCuFile(Kvikio):
    key, name, xfer, caches = "kvikio_cufile", "kvikio cuFile", "gpu", CuFile.caches
    setting = "the same by cuFile, which is given transfers of every size"
    options = {"compat_mode": "AUTO", "gds_threshold": 0}  # which would send those of less than 16 KiB by POSIX

    @classmethod
    def lacks(cls):
        return CuFile.lacks()


ROWS = [Threads, Futures, Batches, CuFileThreads, CuFileFutures, CuFileBatches, Plain, Kvikio, KvikioCuFile]


def rows_for(xfer, submit, cache, on_gpu):
    """Those of these transfer types, over host memory or straight, and ways to submit."""
    over_host = "cpu_gpu" if on_gpu else "cpu"
    wanted = {"any"} if over_host in xfer else set()
    if on_gpu and "gpu" in xfer:
        wanted.add("gpu")
    return [row for row in ROWS if row.submit in submit and cache in row.caches and row.xfer in wanted]


def find(key):
    return case.find(key, ROWS)

"""The machine's limits, measured in the same run and without gdsdata's engine.

Memory: threads copy (numpy releases the GIL). Disk: O_DIRECT reads and writes through the
kernel's native AIO, one thread that keeps `depth` in flight: with Python threads the GIL, not the
disk, would set the pace of small ones.
"""

import contextlib
import ctypes
import errno
import functools
import math
import mmap
import os
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from gdsdata.bench.measure import system

SYSCALLS = {
    "x86_64": {"io_setup": 206, "io_destroy": 207, "io_getevents": 208, "io_submit": 209},
    "aarch64": {"io_setup": 0, "io_destroy": 1, "io_getevents": 4, "io_submit": 2},
}
# struct iocb of linux/aio_abi.h, little endian
IOCB = np.dtype([
    ("data", "<u8"), ("key", "<u4"), ("rw_flags", "<u4"), ("opcode", "<u2"), ("prio", "<i2"), ("fd", "<u4"),
    ("buf", "<u8"), ("nbytes", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("flags", "<u4"), ("resfd", "<u4"),
])  # fmt: skip
EVENT = np.dtype([("data", "<u8"), ("obj", "<u8"), ("res", "<i8"), ("res2", "<i8")])
AIO_READ, AIO_WRITE = 0, 1  # IOCB_CMD_PREAD, IOCB_CMD_PWRITE
FILES = 256  # at most so many files are opened
WRITES = ((2**20, 32), (8 * 2**20, 8))  # (bytes of a request, in flight)
COPY_BYTES = 64 * 2**20
COPYING_THREADS = 8  # at most: with ten and twelve no more came through (docs/design-decisions.md)


def memory_copy(seconds, most_threads=COPYING_THREADS):
    """Measure GB/s copied between buffers larger than the caches, by a thread a core."""
    threads = min(most_threads, len(os.sched_getaffinity(0)))
    pairs = [(np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)) for _ in range(threads)]
    end = time.perf_counter() + seconds

    def copy(pair):
        source, target = pair
        copied = 0
        while not copied or time.perf_counter() < end:  # once at least, also where a thread comes late
            np.copyto(target, source)
            copied += COPY_BYTES
        return copied

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        copied = sum(pool.map(copy, pairs))
    return {"gb_per_s": copied / (time.perf_counter() - started) / 1e9, "threads": threads}


class NativeAio:
    """io_setup(2) and its companions through ctypes."""

    def __init__(self, depth):
        if platform.machine() not in SYSCALLS:
            raise OSError(errno.ENOSYS, f"native AIO's system call numbers are not known here for {platform.machine()}")
        self.numbers = SYSCALLS[platform.machine()]
        self.context, self.depth, self.events = ctypes.c_ulong(0), depth, np.zeros(depth, EVENT)
        self.call("io_setup", depth, ctypes.byref(self.context))

    def call(self, name, *arguments):
        while (result := system.libc.syscall(ctypes.c_long(self.numbers[name]), *arguments)) < 0:
            if ctypes.get_errno() != errno.EINTR:  # a signal came, and Python has called its handler
                raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
        return result

    def submit(self, pointers):
        """Hand over the control blocks at these addresses (uint64 array, contiguous)."""
        at = 0
        while at < len(pointers):
            address = ctypes.c_void_p(pointers.ctypes.data + 8 * at)
            at += self.call("io_submit", self.context, ctypes.c_long(len(pointers) - at), address)

    def wait(self, least):
        lengths, events = (ctypes.c_long(least), ctypes.c_long(self.depth)), ctypes.c_void_p(self.events.ctypes.data)
        return self.events[: self.call("io_getevents", self.context, *lengths, events, None)]

    def close(self):
        self.call("io_destroy", self.context)


def direct_alignment(path):
    """Try which least offset and length O_DIRECT takes; None if it is refused."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    with open(fd, "rb", buffering=0), mmap.mmap(-1, 4096) as buffer, memoryview(buffer) as view:
        for size in (512, 4096):
            with contextlib.suppress(OSError), view[:size] as part:
                os.preadv(fd, [part], size)
                return size
    return None


def direct_io(files, requests, depth, seconds=math.inf, write=False):
    """Read with O_DIRECT, `depth` in flight.

    Args:
        requests: `requests(count)` gives the next ones as arrays (index into files, offset,
            length), aligned and inside the files.
        seconds: how long it reads; endless means all requests once.
        write: writes all requests once instead, and syncs.

    Returns:
        {"gb_per_s", "per_s", "depth", "mean_bytes"}

    Raises:
        OSError: AIO or O_DIRECT is not available.
    """
    opcode, verb, flags = (AIO_WRITE, "write", os.O_WRONLY) if write else (AIO_READ, "read", os.O_RDONLY)
    with contextlib.ExitStack() as opened:
        fds = []
        for path in files:
            fds.append(os.open(path, flags | os.O_DIRECT))
            opened.callback(os.close, fds[-1])
        fd_of = np.array(fds, np.uint32)
        indices, offsets, lengths = requests(1 << 16)
        due = len(indices) if write or seconds == math.inf else math.inf
        largest = int(lengths.max())
        room = -(-largest // system.PAGE) * system.PAGE
        buffers = huge_pages(depth * room)
        if write:  # a disk may know a shorter way for zeros
            buffers[:] = np.random.default_rng(0).integers(0, 256, len(buffers), np.uint8)
        blocks = np.zeros(depth, IOCB)
        blocks["data"] = np.arange(depth)
        blocks["opcode"] = opcode
        blocks["buf"] = buffers.ctypes.data + np.arange(depth, dtype=np.uint64) * np.uint64(room)
        addresses = (blocks.ctypes.data + np.arange(depth) * IOCB.itemsize).astype(np.uint64)
        aio = opened.enter_context(contextlib.closing(NativeAio(depth)))
        at, moved, done = 0, 0, 0

        def give(slots):
            nonlocal at
            slots = slots[: min(len(slots), due - at)]
            picked = np.arange(at, at + len(slots)) % len(indices)
            at += len(slots)
            blocks["fd"][slots] = fd_of[indices[picked]]
            blocks["offset"][slots] = offsets[picked]
            blocks["nbytes"][slots] = lengths[picked]
            aio.submit(np.ascontiguousarray(addresses[slots]))
            return len(slots)

        started = time.perf_counter()
        end = started + seconds
        flying = give(np.arange(depth))
        # Large ones go out one by one; small ones in handfuls, or Python would be the limit and not
        # the disk.
        least = 1 if largest >= 2**17 else max(1, depth // 8)
        while flying:
            events = aio.wait(min(least, flying))
            if (events["res"] < 0).any():
                code = -int(events["res"].min())
                raise OSError(code, f"O_DIRECT {verb}: {os.strerror(code)}")
            now = time.perf_counter()
            flying -= len(events)
            if now < end:
                moved, done, elapsed = moved + int(events["res"].sum()), done + len(events), now - started
                flying += give(events["data"].astype(np.int64))
        if not done:
            raise OSError(errno.ETIMEDOUT, f"no O_DIRECT {verb} of {largest} bytes ended within {seconds} s")
        if write:
            for fd in fds:
                os.fsync(fd)
            elapsed = time.perf_counter() - started
        return {"gb_per_s": moved / elapsed / 1e9, "per_s": done / elapsed, "depth": depth, "mean_bytes": moved / done}


def durable_write(folder, size_bytes, request_bytes, depth):
    """Write a new file of allocated space with O_DIRECT; the write and sync are timed."""
    path = os.path.join(folder, f"limit-{os.getpid()}.bin")
    try:
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            os.fsync(file.fileno())
        return direct_io([path], sequential_requests([path], request_bytes), depth, write=True)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def durable_writes(folder, size_bytes):
    """Write files of `size_bytes` with each request size and depth of `WRITES`."""
    found = {}
    for request_bytes, depth in WRITES:
        request_bytes = min(request_bytes, size_bytes // system.PAGE * system.PAGE)
        kib, write = request_bytes >> 10, functools.partial(durable_write, folder, size_bytes, request_bytes, depth)
        found[f"direct_write_{kib}_kib_{depth}"] = measured(f"O_DIRECT write, {kib} KiB x {depth}", write)
    return found


def huge_pages(size):
    """Return a uint8 array of touched memory, in one piece if the system allows."""
    # 1 MiB in scattered pages is 256 pieces to the disk: virtio then gave 1.3 GB/s, not 2.3.
    huge = 2**21
    memory = mmap.mmap(-1, size + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)  # which keeps the mapping
    start = -array.ctypes.data % huge
    buffers = array[start : start + size]
    buffers[:: system.PAGE] = 1
    return buffers


def sequential_requests(files, size):
    """Return requests of `size` bytes through the files in order, whole ones only."""
    counts = [os.path.getsize(path) // size for path in files]
    if not any(counts):
        raise OSError(errno.EINVAL, f"no file of {size} bytes or more")
    indices = np.repeat(np.arange(len(files)), counts)
    offsets = np.concatenate([np.arange(count) * size for count in counts])
    return lambda count: (indices, offsets, np.full(len(indices), size, np.uint64))


def sample_requests(source, alignment):
    """Return requests for random samples of a Source, widened to the alignment."""
    generator = np.random.default_rng(0)
    usable = min(len(source.files), FILES)
    firsts = source.first_ids[: usable + 1]
    headers = np.array(source.headers[:usable])
    sizes = np.array([os.path.getsize(path) for path in source.files[:usable]])

    def requests(count):
        ids = generator.integers(0, firsts[-1], count)
        files = np.searchsorted(firsts, ids, side="right") - 1
        starts = headers[files] + (ids - firsts[files]) * source.stride * source.itemsize
        begins = starts // alignment * alignment
        ends = -(-(starts + source.sample_bytes) // alignment) * alignment
        # The kernel stops at the end of the file by itself; the length stays aligned.
        inside = begins < sizes[files]
        return files[inside], begins[inside].astype(np.int64), (ends - begins)[inside].astype(np.uint64)

    return requests


def measured(name, function, **more):
    """Return the measurement, with `more` beside it; {"unavailable": why} if it fails."""
    try:
        return function() | more
    except OSError as error:
        return {"unavailable": f"{name}: {error}"}


def sequential_reads(files, seconds=math.inf):
    """Read files (the first `FILES`) from end to end, for so long or once."""
    # Once is for rows that read whole files: a disk's pace changes within a second.
    files = files[:FILES]
    if direct_alignment(files[0]) is None:
        return {"direct_sequential": {"unavailable": f"the file system of {files[0]} refuses O_DIRECT"}}
    size = 2**20
    while size > 4096 and max(map(os.path.getsize, files)) < size:
        size //= 2
    found = measured(
        "O_DIRECT, sequential",
        lambda: direct_io(files, sequential_requests(files, size), 32, seconds),
        request_bytes=size,
    )
    return {"direct_sequential": found}


def cold_reads(source, seconds, depths=(32, 64)):
    """Measure the limits of a cold table once; `depths` are those of the random reads.

    Returns:
        {name: {"gb_per_s", ...} or {"unavailable": why}}

    They take turns with the rows: a virtual machine's disk changes its speed from minute to minute.
    """
    files = source.files[:FILES]
    found = sequential_reads(files, seconds)
    if source.kind == "tokens" and (alignment := direct_alignment(files[0])) is not None:
        for depth in depths:
            read = functools.partial(direct_io, files, sample_requests(source, alignment), depth, seconds)
            name = f"O_DIRECT, random, depth {depth}"
            found[f"direct_random_{depth}"] = measured(name, read, alignment_bytes=alignment)
    return found


def rate_of(one, name):
    """Return (GB/s, the limit's name) of what was measured, or (None, why it was not)."""
    return (one["gb_per_s"], name) if "gb_per_s" in one else (None, one["unavailable"])


def over_turns(turns):
    """Return the medians of several turns' limits, and each turn's GB/s."""
    found = {}
    for name in turns[0]:
        ones = [turn[name] for turn in turns]
        failed = next((one for one in ones if "unavailable" in one), None)
        if failed:
            found[name] = failed
            continue
        found[name] = {key: statistics.median(one[key] for one in ones) for key in ones[0]}
        found[name]["turns_gb_per_s"] = [one["gb_per_s"] for one in ones]
    return found


COPIES = {
    "pinned_copy": "pinned copy to the GPU",
    "pinned_copy_to_host": "pinned copy from the GPU",
    "memory_copy": "memory copy",
}


def limit_of(found):
    """Return (GB/s, its name) of the limits found for a table, or (None, why not).

    A copy is the limit of bytes that are in memory. Else it is reading files from end to end past
    the page cache, or the fastest of `durable_writes`.
    """
    copies = [name for name in COPIES if name in found]
    if copies:
        return found[copies[0]]["gb_per_s"], COPIES[copies[0]]
    rates = {name: one["gb_per_s"] for name, one in found.items() if "gb_per_s" in one}
    if "direct_sequential" in found:
        rates = {name: rate for name, rate in rates.items() if name == "direct_sequential"}
    if not rates:
        return None, next(iter(found.values()))["unavailable"]
    best = max(rates, key=rates.__getitem__)
    if best == "direct_sequential":
        return rates[best], "O_DIRECT, 1 MiB x 32"
    _, _, kib, _, depth = best.split("_")
    return rates[best], f"O_DIRECT write, {int(kib):,} KiB x {depth}, synced"


def limit_for(source, cache, cold_samples, limits):
    """Return (GB/s of samples that no row is expected to pass, its name), or (None, why).

    Warm: a memory copy of the samples' bytes, or a copy of pinned memory to the GPU. Cold: the
    faster of fetching just the samples (random reads; for volumes, sequential ones) and of reading
    the whole data set once from end to end, which pays when many samples are asked for.
    """
    rate, name = limit_of(limits)
    if cache == "warm" or rate is None:
        return rate, name
    gb_a_sample = source.sample_bytes / 1e9
    if source.kind == "npy":
        return rate * source.samples * source.sample_bytes / source.file_bytes, name
    whole = cold_samples / (source.file_bytes / (rate * 1e9))
    depths = [int(name.rpartition("_")[2]) for name in limits if name.startswith("direct_random_")]
    picked = max((limits[f"direct_random_{depth}"].get("per_s", 0), depth) for depth in depths)
    if picked[0] >= whole:
        return picked[0] * gb_a_sample, f"O_DIRECT, one sample x {picked[1]}"
    return whole * gb_a_sample, "O_DIRECT, the whole set once, 1 MiB x 32"

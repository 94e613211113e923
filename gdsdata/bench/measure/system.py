"""Measurements around a run: CPU time, memory, the page cache, the machine."""

import contextlib
import ctypes
import mmap
import os
import platform
import re
import resource
import signal
import statistics
import sys
import time
from importlib import metadata

import numpy as np

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
PR_SET_PDEATHSIG = 1
SHOW_STACKS = signal.SIGUSR1  # a row's process writes the stacks of its threads to its log
UNMAPPED_WITHIN_S = 0.5  # of those who had them mapped
WARMED_AT_MOST = 2  # times: of 2 GiB that were read, 2 MiB are gone now and then
RESIDENCY_FILES = 4096  # of more files than this, every k-th is looked at


def cpu_seconds():
    """Return user + system seconds of this process and of children waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def tree_cpu_seconds(pid):
    """Return user + system seconds of a process and its descendants, in 10 ms ticks."""
    total = 0
    for one in [pid, *descendants(pid)]:
        with contextlib.suppress(OSError), open(f"/proc/{one}/stat") as stat:  # It may have ended meanwhile.
            times = stat.read().rpartition(")")[2].split()[11:15]  # utime, stime, and those of children waited for
            total += sum(map(int, times))
    return total / os.sysconf("SC_CLK_TCK")


def machine_cpu_seconds():
    """Return CPU seconds that the machine used, or its hypervisor gave to others."""
    with open("/proc/stat") as stat:
        user, nice, system, _, _, irq, softirq, steal = (int(ticks) for ticks in stat.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def storage_bytes():
    """Return the bytes that this process has had read from storage."""
    return int(first_line("/proc/self/io", "read_bytes:"))


def end_with_parent(parent):
    """Have the kernel kill this process when `parent`, which started it, ends."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It ended before the kernel knew.
        os.kill(os.getpid(), signal.SIGKILL)


# ------------------------------------------------------------------------------------------------ memory


def own_bytes(pid):
    """Return anonymous and shared memory; mapped files' pages are the page cache's."""
    return kib_in(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:")) * 1024


def shared_out_bytes(pid):
    """Return the same with shared pages divided (PSS): slow right after a fork."""
    return kib_in(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) * 1024


def kib_in(path, fields):
    with open(path) as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith(fields))


def descendants(pid):
    """Return pids of children and theirs; none without CONFIG_PROC_CHILDREN."""
    found = []
    with contextlib.suppress(OSError):  # It may have ended meanwhile, and its threads as well.
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as children:
                for child in map(int, children.read().split()):
                    found += [child, *descendants(child)]
    return found


def tree_bytes(pid):
    """Memory of a process and its descendants, in bytes; 0 when it has gone."""
    children, total = descendants(pid), 0
    with contextlib.suppress(OSError):
        if not children:
            return own_bytes(pid)
        total = shared_out_bytes(pid)
        for child in children:
            with contextlib.suppress(OSError):  # it ended meanwhile
                total += shared_out_bytes(child)
    return total


# ------------------------------------------------------------------------------------------------ the page cache


def resident_bytes(path):
    """Return (bytes in the page cache, bytes of the file), by mincore on a mapping.

    The kernel answers "all resident" for files that the caller neither owns nor may write.
    """
    size = os.path.getsize(path)
    if size == 0:
        return 0, 0
    with (
        open(path, "rb", buffering=0) as file,
        mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapping,
    ):
        flags = np.empty(-(-size // PAGE), np.uint8)
        view = ctypes.c_char.from_buffer(mapping)
        try:
            failed = libc.mincore(ctypes.addressof(view), size, flags.ctypes.data)
        finally:
            del view  # The mapping cannot be closed while a buffer of it is out.
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", path)
    return min(size, int((flags & 1).sum()) * PAGE), size


def resident_share(files):
    """0.0 to 1.0: how much of the files is in the page cache."""
    step = -(-len(files) // RESIDENCY_FILES)
    counts = [resident_bytes(path) for path in files[::step]]
    total = sum(size for _, size in counts)
    return sum(resident for resident, _ in counts) / total if total else 1.0


def warm(files):
    """Read files into the page cache; return the share of them that is there.

    Files that are partly there are dropped first: a page that was read by itself keeps read-ahead's
    large folios away from its neighbors, which are then copied at half the rate
    (docs/design-decisions.md).
    """
    share = resident_share(files)
    if share < 1:
        drop(files)
    for _ in range(WARMED_AT_MOST):
        if share == 1:
            break
        read_through(files)
        share = resident_share(files)
    return share


def read_through(files):
    buffer = bytearray(2**20)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(files):
    """Drop the files' pages (no root needed); return the share that stays resident.

    Pages that are dirty or mapped by some process stay; the first are written out before, the
    second is why runs close their mappings. Long ones are unmapped in the background
    (csrc/base/mapping.cpp): what stays is asked for a while.
    """
    ends = time.monotonic() + UNMAPPED_WITHIN_S
    while True:
        for path in files:
            with open(path, "rb", buffering=0) as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        share = resident_share(files)
        if not share or time.monotonic() > ends:
            return share
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------ summaries


def touch_memory(size_bytes):
    """Allocate, touch and free memory, so that later allocations are fast.

    The host of a virtual machine may take free memory away, and returns it when it is touched, at
    1 GB/s. The first row after a pause would pay for that, by what it allocates.
    """
    with mmap.mmap(-1, size_bytes) as memory:
        for offset in range(0, size_bytes, mmap.PAGESIZE):
            memory[offset] = 1


def spread(values):
    """Return median, min and max of the values that are not None; None without any."""
    values = sorted(value for value in values if value is not None)
    if not values:
        return None
    return {"median": statistics.median(values), "min": values[0], "max": values[-1]}


def first_line(path, prefix=""):
    """Return the rest of the first line with the prefix; "" if none, or no file."""
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            if line.startswith(prefix):
                return line[len(prefix) :].lstrip(" \t:").strip()
    return ""


def available_bytes():
    """Memory that could be had now, the page cache included."""
    return int(first_line("/proc/meminfo", "MemAvailable").split()[0]) * 1024


def file_system(path):
    """Return (type, device) of the mount that holds `path`."""
    path, best = os.path.realpath(path), ("", "?", "?")
    with open("/proc/self/mounts") as mounts:
        for line in mounts:
            device, point, kind = line.split()[:3]
            inside = point == "/" or path == point or path.startswith(point + "/")
            if inside and len(point) >= len(best[0]):
                best = (point, kind, device)
    return best[1], best[2]


def machine():
    return {
        "cpu": first_line("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * PAGE,
        "kernel": platform.release(),
        "virtual": "hypervisor" in first_line("/proc/cpuinfo", "flags").split(),
        "transparent_huge_pages": first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_before": os.getloadavg()[0],
    }


def versions():
    found = {"python": sys.version.split()[0]}
    libraries = r"(safetensors|deepspeed|instanttensor|fastsafetensors|torchsnapshot|torch[-_.]checkpointing|"
    libraries += r"webdataset|mosaicml-streaming|litdata|spdl|ffcv|(lib)?kvikio-cu\d+|nvidia-dali-cuda\d+|"
    libraries += r"orbax-checkpoint|jax|obstore|awscrt|s3fs|pyarrow|botocore)"
    found |= {
        name: one.version
        for one in metadata.distributions()
        if (name := (one.metadata["Name"] or "").lower()) and re.fullmatch(libraries, name)
    }
    for name in ("gdsdata", "torch", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed (run from its sources)" if name == "gdsdata" else "missing"
    return found


def size_text(size_bytes):
    """Exactly, and as a user would write it: 4 KiB, 1.5 MiB, 1,000 B."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        text = f"{size_bytes / unit:.4g}"
        if size_bytes >= unit and float(text) * unit == size_bytes:
            return f"{text} {name}"
    return f"{size_bytes:,} B"

"""The memory that this process may still take of the machine and its groups."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from torch.utils.data import get_worker_info

# At most this share of the available memory is taken, because the rest of the program needs memory.
_SHARE = 0.5
# Launchers say in these how many processes of this job run on this machine.
_PROCESSES_HERE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
# A group of version 1 without a limit has the largest number of pages that the kernel counts to.
_NO_LIMIT_V1 = 2**62


def share_bytes() -> int:
    """Return how many bytes a data set in this process may hold beside its batches.

    This is half of `available_bytes`. It is divided among the processes of this job on this
    machine, as its launcher counts them (``LOCAL_WORLD_SIZE``), and the workers of a DataLoader.
    """
    worker = get_worker_info()
    return int(_SHARE * available_bytes()) // (processes_here() * (worker.num_workers if worker else 1))


def processes_here() -> int:
    """Return how many processes of this job run on this machine, as its launcher counts them."""
    counts = (os.environ.get(name, "") for name in _PROCESSES_HERE)
    return next((int(count) for count in counts if count.isdecimal() and int(count) > 0), 1)


def available_bytes(root: str = "/") -> int:
    """Return how many bytes machine and control groups have left; page cache is free.

    Args:
        root: the folder with ``proc`` and ``sys``; tests have others.
    """
    return max(0, min([_left_in_machine(root), *_left_in_groups(root)]))


def _left_in_machine(root: str) -> int:
    try:
        with open(os.path.join(root, "proc/meminfo")) as meminfo:
            return next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # the process may have no descriptor left
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_groups(root: str) -> Iterator[int]:
    """Yield the bytes left in each group with a limit, the innermost first."""
    try:
        mountinfo, memberships = _read(root, "proc/self/mountinfo"), _read(root, "proc/self/cgroup")
    except OSError:
        return
    for kind, path in memory_groups(mountinfo, memberships):
        left_in = _left_in_v2 if kind == "cgroup2" else _left_in_v1
        # The outermost group has no such files, and others may not be ours to read.
        with contextlib.suppress(OSError, ValueError, KeyError):
            yield from left_in(os.path.join(root, path.lstrip("/")))


def memory_groups(mountinfo: str, memberships: str) -> Iterator[tuple[str, str]]:
    """Yield this process's control groups that count memory, the innermost of each hierarchy first.

    Args:
        mountinfo: content of /proc/self/mountinfo: proc_pid_mountinfo(5).
        memberships: content of /proc/self/cgroup: cgroups(7).

    Yields:
        "cgroup" or "cgroup2", and the group's folder.
    """
    inside_of = {}
    for line in memberships.splitlines():
        _, controllers, inside = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            inside_of["cgroup" if controllers else "cgroup2"] = inside
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind not in inside_of or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        top, mount = before.split(" ")[3:5]
        # A container may see its own group as the top, but the path that its group has outside.
        relative = os.path.relpath(inside_of[kind], top)
        folder = os.path.normpath(os.path.join(mount, "" if relative.startswith("..") else relative))
        while True:
            yield kind, folder
            if folder in (mount, "/"):
                break
            folder = os.path.dirname(folder)


def _left_in_v2(folder: str) -> Iterator[int]:
    texts = [_read(folder, name).strip() for name in ("memory.max", "memory.high")]
    limits = [int(text) for text in texts if text != "max"]
    if limits:
        counts = _counts_of(folder)
        cached = counts["active_file"] + counts["inactive_file"] + counts.get("slab_reclaimable", 0)
        yield min(limits) - max(0, int(_read(folder, "memory.current")) - cached)


def _left_in_v1(folder: str) -> Iterator[int]:
    limit = int(_read(folder, "memory.limit_in_bytes"))
    if limit < _NO_LIMIT_V1:
        counts = _counts_of(folder)
        cached = counts["total_active_file"] + counts["total_inactive_file"]
        yield limit - max(0, int(_read(folder, "memory.usage_in_bytes")) - cached)


def _counts_of(folder: str) -> dict[str, int]:
    lines = _read(folder, "memory.stat").splitlines()
    return {name: int(count) for name, count in (line.split() for line in lines)}


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), errors="replace") as file:  # mount points may have any bytes
        return file.read()

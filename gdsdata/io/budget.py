"""The memory and the cores that this process may take of the machine and its control groups."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

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
    return int(_SHARE * available_bytes()) // _sharers()


def usable_cores(root: str = "/") -> int:
    """Return how many cores this process may use.

    They are those that ``taskset`` or SLURM gave it, or as many as the quota of a control group
    lets it use, as ``docker run --cpus`` and limits of Kubernetes set it. Parts of a core do not
    count, but there is at least one.

    Args:
        root: as of `available_bytes`.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(root)]))


def share_of_cores(least: int = 1, root: str = "/") -> int:
    """Return how many `usable_cores` this process takes if all others of `share_bytes` are as busy.

    Args:
        least: so many, if it may use them, however many processes there are.
        root: as of `available_bytes`.
    """
    usable, sharers = usable_cores(root), _sharers()
    if sharers == 1:
        return usable
    share = min([os.cpu_count() or 1, *_quotas(root)]) // sharers  # the launcher may have given each its own
    return max(1, min(usable, max(share, least)))


def _sharers() -> int:
    """Return how many processes share what a machine has."""
    worker = get_worker_info()
    return processes_here() * (worker.num_workers if worker else 1)


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
    return _of_groups(root, "memory", {"cgroup": _left_in_v1, "cgroup2": _left_in_v2})


def _quotas(root: str) -> Iterator[int]:
    """Yield the whole cores of each group with a quota, the innermost first."""
    return _of_groups(root, "cpu", {"cgroup": _quota_of_v1, "cgroup2": _quota_of_v2})


def _of_groups(root: str, controller: str, ask: dict[str, Callable[[str], Iterator[int]]]) -> Iterator[int]:
    """Yield what each group says, as it is asked for its version, the innermost first."""
    try:
        mountinfo, memberships = _read(root, "proc/self/mountinfo"), _read(root, "proc/self/cgroup")
    except OSError:
        return
    for kind, path in control_groups(controller, mountinfo, memberships):
        # The outermost group has no such files, and others may not be ours to read.
        with contextlib.suppress(OSError, ValueError, KeyError):
            yield from ask[kind](os.path.join(root, path.lstrip("/")))


def control_groups(controller: str, mountinfo: str, memberships: str) -> Iterator[tuple[str, str]]:
    """Yield this process's control groups of a controller, the innermost of each hierarchy first.

    Args:
        controller: "memory" or "cpu".
        mountinfo: content of /proc/self/mountinfo: proc_pid_mountinfo(5).
        memberships: content of /proc/self/cgroup: cgroups(7).

    Yields:
        "cgroup" or "cgroup2", and the group's folder.
    """
    inside_of = {}
    for line in memberships.splitlines():
        _, controllers, inside = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            inside_of["cgroup" if controllers else "cgroup2"] = inside
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind not in inside_of or (kind == "cgroup" and controller not in options.split(",")):
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


def _quota_of_v2(folder: str) -> Iterator[int]:
    quota_us, period_us = _read(folder, "cpu.max").split()
    if quota_us != "max":
        yield int(quota_us) // int(period_us)


def _quota_of_v1(folder: str) -> Iterator[int]:
    quota_us = int(_read(folder, "cpu.cfs_quota_us"))
    if quota_us > 0:
        yield quota_us // int(_read(folder, "cpu.cfs_period_us"))


def _counts_of(folder: str) -> dict[str, int]:
    lines = _read(folder, "memory.stat").splitlines()
    return {name: int(count) for name, count in (line.split() for line in lines)}


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), errors="replace") as file:  # mount points may have any bytes
        return file.read()

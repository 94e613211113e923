"""Samples of what a process holds, from /proc and its folders, as rows of a CSV file."""

import collections
import contextlib
import csv
import json
import os
import time
from pathlib import Path

# PSS and private memory without pages of files: whether a library's pages are shared depends on the
# other programs of the machine.
MEMORY = {"rss_mib": "Rss", "pss_mib": "Pss_Anon", "anonymous_mib": "Anonymous", "private_mib": "Private_Dirty"}


def memory_of(pid: int) -> dict[str, float]:
    """Return a process's memory in MiB. `private_mib` is what it has written and does not share."""
    kib: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        kib[name.rstrip(":")] = int(value)
    return {name: kib[field] / 1024 for name, field in MEMORY.items()}


def descriptors_of(pid: int, folder: Path) -> dict[str, int]:
    """Count a process's descriptors, in all and by kind."""
    names = ("fd_files", "fd_sockets", "fd_pipes", "fd_io_uring", "fd_events", "fd_memory", "fd_other")
    kinds = dict.fromkeys(names, 0)
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            kinds[kind_of(os.readlink(entry.path), folder)] += 1
    return {"fds": sum(kinds.values()), **kinds}


def kind_of(target: str, folder: Path) -> str:
    starts = {
        "socket:": "fd_sockets",
        "pipe:": "fd_pipes",
        "anon_inode:[io_uring]": "fd_io_uring",
        "anon_inode:": "fd_events",
    }
    starts |= {"/memfd:": "fd_memory", "/dev/shm": "fd_memory", str(folder): "fd_files"}
    return next((kind for start, kind in starts.items() if target.startswith(start)), "fd_other")


def children_of(pid: int) -> list[int]:
    """Return the direct children, of all threads."""
    found: list[int] = []
    for task in os.scandir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            found += map(int, Path(task.path, "children").read_text().split())
    return found


def disk_of(folder: Path) -> float:
    """Return the space of a folder's files in MiB; files without a name there do not count."""
    blocks = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                blocks += os.lstat(os.path.join(where, name)).st_blocks
    return blocks * 512 / 2**20


class Sampler:
    """Writes a row each time that it is called.

    Args:
        pid: of the process.
        folder: its subfolders are measured one by one.
        counts: the file of the process's own counts.
        path: of the CSV file.
    """

    def __init__(self, pid: int, folder: Path, counts: Path, path: Path, subfolders: tuple[str, ...]) -> None:
        self.pid, self.folder, self.counts, self.path, self.subfolders = pid, folder, counts, path, subfolders
        self.began = time.monotonic()
        self.rows: list[dict[str, float]] = []

    def sample(self) -> dict[str, float]:
        """Take a sample. Raises OSError if the process is gone."""
        row: dict[str, float] = {"seconds": round(time.monotonic() - self.began, 2), **memory_of(self.pid)}
        row |= descriptors_of(self.pid, self.folder)
        row["threads"] = len(os.listdir(f"/proc/{self.pid}/task"))
        row["children"] = len(children_of(self.pid))
        for name in self.subfolders:
            row[f"disk_{name.replace('-', '_')}_mib"] = disk_of(self.folder / name)
        row["disk_mib"] = disk_of(self.folder)
        with contextlib.suppress(OSError, ValueError):
            row |= {f"count_{name}": value for name, value in json.loads(self.counts.read_text()).items()}
        self.rows.append({name: round(value, 3) for name, value in row.items()})
        return self.rows[-1]

    def write(self) -> None:
        names = list(collections.ChainMap(*reversed(self.rows)))
        first = [name for row in self.rows[-1:] for name in row]
        with open(self.path, "w", newline="") as file:
            writer = csv.DictWriter(file, [*first, *(name for name in names if name not in first)], restval="")
            writer.writeheader()
            writer.writerows(self.rows)

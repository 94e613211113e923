"""Which file systems are shared between machines."""

from __future__ import annotations

import functools
import os

# The kernel's names of file systems whose bytes come over a network.
NETWORK_KINDS = frozenset(
    {"nfs", "nfs4", "lustre", "wekafs", "beegfs", "gpfs", "ceph", "cifs", "smb3", "9p", "glusterfs", "daos"}
)


def is_on_network(path: str) -> bool:
    """Return whether a file's bytes come over a network. False if nothing says so."""
    try:
        device = os.stat(path).st_dev
    except OSError:
        return False
    kind = _kinds().get(f"{os.major(device)}:{os.minor(device)}", "")
    return kind.removeprefix("fuse.") in NETWORK_KINDS


@functools.lru_cache(maxsize=1)
def _parsed(text: str) -> dict[str, str]:
    """Return the kinds of mounted file systems by device number.

    Format: proc_pid_mountinfo(5).
    """
    found = {}
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split()
        if dash and len(fields) > 2 and after:
            found[fields[2]] = after.split(" ")[0]
    return found


def _kinds() -> dict[str, str]:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            return _parsed(file.read())
    except OSError:
        return {}

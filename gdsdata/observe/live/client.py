"""Ask the processes of this user for their snapshots. Imports no torch, so it starts quickly."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from gdsdata.observe.live import folder

VERSION = 1  # of snapshots that are understood
_TIMEOUT_S = 2.0  # a process answers within milliseconds, unless a thread of it holds the GIL
_MOST_BYTES = 16 << 20
_AT_ONCE = 16
_PART_BYTES = 1 << 16


class Silent(NamedTuple):
    """A process whose snapshot is not there, and why."""

    pid: int
    reason: str


class Answers(NamedTuple):
    """The answers of the processes of this user.

    Attributes:
        snapshots: by process id, rising.
        silent: processes that did not answer, or not as this version does.
    """

    snapshots: list[dict[str, Any]]
    silent: list[Silent]


class _Ended(Exception):
    """Nobody is at the socket any more."""


def ask(pid: int | None = None, timeout_s: float = _TIMEOUT_S) -> Answers:
    """Return the snapshots of all processes of this user that export their numbers.

    Sockets of processes that have ended are removed.

    Args:
        pid: of the only process to ask; None: all.
        timeout_s: how long to wait for a process.

    Raises:
        PermissionError: the sockets' folder belongs to another user, or others may enter it.
    """
    found: list[tuple[int, str, int]] = []
    with contextlib.ExitStack() as stack:
        for path in folder.places():
            try:
                descriptor = stack.enter_context(folder.opened(path))
            except FileNotFoundError:
                continue
            names = [(name, folder.process_of(name)) for name in os.listdir(descriptor)]
            found += [(descriptor, name, one) for name, one in names if one is not None and pid in (None, one)]
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            answers = list(threads.map(lambda one: _answer(one, timeout_s), found))
    snapshots = [one for one in answers if isinstance(one, dict)]
    return Answers(
        sorted(snapshots, key=lambda one: int(one["pid"])), sorted(one for one in answers if isinstance(one, Silent))
    )


def _answer(found: tuple[int, str, int], timeout_s: float) -> dict[str, Any] | Silent | None:
    """Return a process's snapshot; None if it has ended."""
    descriptor, name, pid = found
    try:
        return _understood(_received(descriptor, name, timeout_s))
    except _Ended:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=descriptor)
        return None
    except TimeoutError:
        return Silent(pid, f"does not answer within {timeout_s:g} s: it is stopped, or a thread of it holds the GIL")
    except (OSError, ValueError) as error:
        return Silent(pid, str(error))


def _received(descriptor: int, name: str, timeout_s: float) -> bytes:
    until = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(folder.address(descriptor, name))
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise _Ended from error
        parts: list[bytes] = []
        left_bytes = _MOST_BYTES
        try:
            while part := connection.recv(_PART_BYTES):
                parts.append(part)
                left_bytes -= len(part)
                if left_bytes < 0:
                    raise ValueError(f"its answer is longer than {_MOST_BYTES} bytes")
                connection.settimeout(max(0.001, until - time.monotonic()))
        except TimeoutError:
            if not _is_there(connection):
                raise _Ended from None
            raise
        except ConnectionResetError:
            pass
        if not parts and not _is_there(connection):
            raise _Ended
    return b"".join(parts)


def _is_there(connection: socket.socket) -> bool:
    """Return whether the process that made the socket still runs. A child may keep it open."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _, _ = struct.unpack("3i", credentials)
    return pid == 0 or os.path.exists(f"/proc/{pid}")  # 0: it is in another container


def _understood(answer: bytes) -> dict[str, Any]:
    try:
        snapshot = json.loads(answer)
    except ValueError as error:
        raise ValueError("its answer was cut: it ended, or this reader was too slow") from error
    version = snapshot.get("version")
    if version != VERSION:
        raise ValueError(
            f"it has gdsdata {snapshot.get('gdsdata')}, whose snapshots have version {version}, and this one reads "
            f"version {VERSION}: run gdsdata.top of the same gdsdata"
        )
    if "error" in snapshot:
        raise ValueError(f"its numbers could not be read: {snapshot['error']}")
    return dict(snapshot)

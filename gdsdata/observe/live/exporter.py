"""The thread that answers `gdsdata.top` in a process that exports its numbers."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import struct
import threading

from gdsdata.io.engine import warn_once
from gdsdata.observe.live import folder
from gdsdata.observe.live.snapshot import VERSION, Snapshots
from gdsdata.version import __version__

_SEND_S = 2.0  # a reader that takes its answer no faster is left
_JOIN_S = 1.0
_WAITING = 16  # connections


class Exporter:
    """A socket, and the thread that waits there. One process uses it.

    The thread takes no lock that the data path holds for long, and only reads.

    Raises:
        OSError: the folder or the socket cannot be made, or others may enter the folder.
    """

    def __init__(self) -> None:
        self._path = folder.writing()
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}{folder.ENDING}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with folder.opened(self._path, make=True) as descriptor:
                hidden = folder.address(descriptor, f".{self._name}")
                self._socket.bind(hidden)
                self._socket.listen(_WAITING)
                # Now it answers: a reader removes the sockets that refuse connections.
                os.rename(hidden, folder.address(descriptor, self._name))
        except BaseException:
            self._socket.close()
            raise
        self._snapshots = Snapshots()
        self._thread = threading.Thread(target=self._answer, name="gdsdata-top", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Remove the socket, and end the thread."""
        with contextlib.suppress(OSError), folder.opened(self._path) as descriptor:
            os.unlink(self._name, dir_fd=descriptor)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # the thread's `accept` fails
        self._thread.join(_JOIN_S)
        self._socket.close()

    def forget(self) -> None:
        """Close the parent's socket in a forked child, which would keep it open."""
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                if _user_of(connection) in (0, os.geteuid()):
                    connection.settimeout(_SEND_S)
                    connection.sendall(self._answer_of())

    def _answer_of(self) -> bytes:
        try:
            return json.dumps(self._snapshots.take()).encode()
        except Exception as error:  # the thread goes on, and the next snapshot may succeed
            return json.dumps({"version": VERSION, "gdsdata": __version__, "error": repr(error)}).encode()


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)


_exporter: Exporter | None = None
_changing = threading.Lock()  # guards _exporter


def start() -> bool:
    """Export this process's numbers: see `observe.live.start`."""
    global _exporter
    with _changing:
        if _exporter is None:
            try:
                _exporter = Exporter()
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread is available
                warn_once(f"gdsdata.top will not see process {os.getpid()}: {error}")
        return _exporter is not None


def stop() -> None:
    """End the export: see `observe.live.stop`."""
    global _exporter
    with _changing:
        ended, _exporter = _exporter, None
    if ended is not None:
        ended.stop()


def _forget() -> None:
    """Forget the parent's exporter in a forked child, whose thread exists only there."""
    global _exporter, _changing
    inherited, _exporter = _exporter, None
    _changing = threading.Lock()  # another thread of the parent may have held it
    if inherited is not None:
        inherited.forget()


os.register_at_fork(after_in_child=_forget)
atexit.register(stop)

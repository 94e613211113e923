"""A lock for file systems without `flock`: a file that one process can create."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref

from gdsdata.checkpoint.threads import refusal_explained
from gdsdata.errors import IoError

# No clocks are compared, because those of hosts differ.
BEAT_S = 5.0  # how often the holder changes its file
STALE_S = 60.0  # a file that a waiting process has not seen change for so long is stale
_POLLS_PER_BEAT = 10


class Held(Exception):
    """Another process holds the lock; the message is what it wrote about itself."""


class HeartbeatLock:
    """Holds a lock, for which a file stands.

    The lock is held from construction until `release` or the process's end.

    A thread of its own rewrites the file every `BEAT_S` seconds. If the holder dies, the next one
    waits `STALE_S` seconds and takes the file over. A holder that was suspended for longer has lost
    the lock, and `check` raises.

    Args:
        path: of the file, which exists while a process holds the lock.
        holder: words for this process, for the messages of others.

    Raises:
        Held: another process holds the lock, and is alive.
        OSError: the file cannot be created.
        IoError: no thread can start.
    """

    def __init__(self, path: str, holder: str) -> None:
        self._path, self._id = path, secrets.token_hex(16)
        while True:
            try:
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                break
            except FileExistsError:
                _remove_stale(path)
        self._stopping = threading.Event()
        beat = _Beat(self._file, f"{self._id} {{}} {holder}\n", self._stopping)
        try:
            beat()
        except BaseException:
            os.close(self._file)
            os.unlink(path)
            raise
        # Also called at the interpreter's end, after the saves that it waits for.
        self.release = weakref.finalize(self, _release, path, self._id, self._stopping, os.getpid())
        try:
            with contextlib.suppress(RuntimeError), refusal_explained():  # none starts at the interpreter's end
                threading.Thread(target=beat.repeat, name="gdsdata-heartbeat", daemon=True).start()
        except IoError:
            self.release()
            os.close(self._file)
            raise

    def check(self) -> None:
        """Raise `Held` if another process has taken the lock over."""
        content = _content(self._path)
        if not content.startswith(self._id):
            raise Held(_holder_of(content))

    def forget(self) -> None:
        """Leave the lock to the process from which this one was forked."""
        self.release.detach()


class _Beat:
    """Rewrites the lock's file, and owns its descriptor.

    It has no reference to the lock, so the lock can be freed.
    """

    def __init__(self, file: int, content: str, stopping: threading.Event) -> None:
        self._file, self._content, self._stopping = file, content, stopping
        self._count = 0

    def __call__(self) -> None:
        self._count += 1
        os.pwrite(self._file, self._content.format(f"{self._count:012d}").encode(), 0)
        os.fsync(self._file)

    def repeat(self) -> None:
        while not self._stopping.wait(BEAT_S):
            with contextlib.suppress(OSError):  # storage may recover before the lock is stale
                self()
        os.close(self._file)


def _release(path: str, id_: str, stopping: threading.Event, process: int) -> None:
    stopping.set()
    if process == os.getpid() and _content(path).startswith(id_):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _content(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(400)
    except OSError:
        return ""


def _holder_of(content: str) -> str:
    return " ".join(content.split()[2:]) or "another process"


def _remove_stale(path: str) -> None:
    """Wait until the file is gone, and remove it if it is stale.

    Raises:
        Held: the file changed, so its holder is alive.
    """
    seen = _content(path)
    until = time.monotonic() + STALE_S
    while time.monotonic() < until:
        if not os.path.exists(path):
            return
        content = _content(path)
        if content and content != seen:
            raise Held(_holder_of(content))
        time.sleep(BEAT_S / _POLLS_PER_BEAT)
    # If several processes find the file stale, a rename gives it to one of them. The renamed file
    # may be the new file of another process, which is then put back.
    mine = f"{path}.{secrets.token_hex(8)}"
    try:
        os.rename(path, mine)
    except FileNotFoundError:
        return
    content = _content(mine)
    if content == seen:
        os.unlink(mine)
        return
    try:
        os.link(mine, path)
        os.unlink(mine)
    except FileExistsError:  # a third process was faster; the next `check` of the second one raises
        os.unlink(mine)
    except OSError:  # a file system without hard links
        os.rename(mine, path)
    raise Held(_holder_of(content))

"""A lock by a file that only one process can create, for file systems without `flock`."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref

# The holder changes its file so often; a file that a waiting process has not seen change for so long is stale. No
# clocks are compared, because those of hosts differ.
BEAT_S = 5.0
STALE_S = 60.0
_POLLS_PER_BEAT = 10


class Held(Exception):
    """Another process holds the lock; the message is what it wrote about itself."""


class HeartbeatLock:
    """The lock that the file ``path`` stands for, held from construction until `release` or the program's end.

    A thread rewrites the file every `BEAT_S` seconds. If the holder dies, the next one waits `STALE_S` seconds and
    takes the file over. A holder that was suspended for longer has lost it, and `check` says so.

    Args:
        path: of the file, which exists while somebody holds the lock.
        holder: who that is, for others' messages.

    Raises:
        Held: another process holds it and lives.
        OSError: the file cannot be created.
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
        # Ends at the program's end as well, behind the saves that it waits for.
        self.release = weakref.finalize(self, _release, path, self._id, self._stopping, os.getpid())
        with contextlib.suppress(RuntimeError):  # no thread starts any more at the interpreter's end
            threading.Thread(target=beat.repeat, name="gdsdata-heartbeat", daemon=True).start()

    def check(self) -> None:
        """Raise `Held` if another process has taken the lock over."""
        content = _content(self._path)
        if not content.startswith(self._id):
            raise Held(_holder_of(content))

    def forget(self) -> None:
        """Leave the lock to the process that this one was forked from."""
        self.release.detach()


class _Beat:
    """Rewrites a file, whose descriptor it closes at the end. Knows no lock, which can be collected meanwhile."""

    def __init__(self, file: int, content: str, stopping: threading.Event) -> None:
        self._file, self._content, self._stopping = file, content, stopping
        self._count = 0

    def __call__(self) -> None:
        self._count += 1
        os.pwrite(self._file, self._content.format(f"{self._count:012d}").encode(), 0)
        os.fsync(self._file)

    def repeat(self) -> None:
        while not self._stopping.wait(BEAT_S):
            with contextlib.suppress(OSError):  # storage may come back before others take the lock for stale
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
    """Return when the file is gone, after removing it if it is stale; raise `Held` as soon as it changes."""
    seen = _content(path)
    until = time.monotonic() + STALE_S
    while time.monotonic() < until:
        if not os.path.exists(path):
            return
        content = _content(path)
        if content and content != seen:
            raise Held(_holder_of(content))
        time.sleep(BEAT_S / _POLLS_PER_BEAT)
    # Of several that find it stale, one gets each file. It may be the new file of another one, which then goes back.
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
    except FileExistsError:  # a third one was quicker; the second one's next `check` says so
        os.unlink(mine)
    except OSError:  # a file system without hard links
        os.rename(mine, path)
    raise Held(_holder_of(content))

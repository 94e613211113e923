"""A folder of checkpoints, of which each is there if and only if its manifest is.

    runs/a/lock                            held by the one who saves
    runs/a/lock-held                       instead, if the file system has no flock: see `heartbeat_lock`
    runs/a/step-100/rank-0-5f2c91d0.pt     what rank 0 saved; torch.load reads it
    runs/a/step-100/manifest.json          written last: names the files of every rank

A step that is saved anew gets files of other names, and the rename of its manifest replaces the one by the other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from gdsdata.checkpoint.background import heartbeat_lock
from gdsdata.checkpoint.background.heartbeat_lock import HeartbeatLock
from gdsdata.checkpoint.writing import TEMPORARY, Writing, make_folder, sync_folder
from gdsdata.errors import CorruptData, IoError
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions

MANIFEST = "manifest.json"
_LOCK, _HEARTBEAT_LOCK = "lock", "lock-held"
_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
_FORMAT = 1
_STEP_FOLDER = re.compile(r"step-(0|[1-9][0-9]*)")
_OURS = re.compile(rf"rank-[0-9]+-[0-9a-f]{{8}}\.pt({TEMPORARY})?|manifest\.json{TEMPORARY}")


@dataclass(frozen=True)
class SavedFile:
    """What one rank saved.

    Attributes:
        name: in the step's folder.
        size_bytes: of the file.
    """

    name: str
    size_bytes: int


@dataclass(frozen=True)
class Manifest:
    """A checkpoint that is complete.

    Attributes:
        step: that the user gave it.
        sequence: how many were saved into the folder before: the newest has the highest.
        files: of each rank, in order.
    """

    step: int
    sequence: int
    files: tuple[SavedFile, ...]


# A forked child has a share in each lock, and would keep it when its parent lets go, or has crashed.
_locked: weakref.WeakSet[Folder] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [folder.drop_lock() for folder in list(_locked)])


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


class Folder:
    """Where checkpoints lie. Reading it needs no lock; whoever writes takes it first."""

    def __init__(self, path: str, options: EngineOptions) -> None:
        self.path = path
        self._options = options
        self._lock: int | None = None
        self._heartbeat: HeartbeatLock | None = None
        # The complete checkpoints, the newest last. Only of the one who holds the lock: nobody else adds any.
        self._known: list[Manifest] | None = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then the modules that this needs are gone, and the system unlocks
            self.unlock()

    def file(self, step: int, name: str) -> str:
        return os.path.join(self._folder_of(step), name)

    def complete(self) -> list[Manifest]:
        """All that are there, the newest last.

        Raises:
            CorruptData: a manifest is damaged.
        """
        found = (self._manifest_of(step) for step in self._steps())
        return sorted((one for one in found if one is not None), key=lambda one: one.sequence)

    def check(self, manifest: Manifest, file: SavedFile) -> str:
        """The path of a file of a checkpoint.

        Raises:
            CorruptData: it is not as long as the manifest says.
            FileNotFoundError: it is gone.
        """
        path = self.file(manifest.step, file.name)
        remedy = f"Restore another step, and remove '{self._folder_of(manifest.step)}'"
        try:
            size_bytes = os.stat(path).st_size
        except FileNotFoundError as error:
            message = f"there is no file '{path}', which the manifest beside it names. {remedy}"
            raise FileNotFoundError(errno.ENOENT, message) from error
        if size_bytes != file.size_bytes:
            message = f"'{path}' has {size_bytes} bytes, and its manifest says {file.size_bytes}. {remedy}"
            raise CorruptData(message, path, 0, size_bytes)
        return path

    def lock(self) -> None:
        """Makes the folder and becomes the one who saves into it, until `unlock`, or until this process ends.

        On a file system without flock, the lock is a file with a heartbeat. If its holder has died, this waits for a
        minute (`heartbeat_lock.STALE_S`) before it takes it over.

        Raises:
            IoError: another one is, or the folder cannot be locked.
        """
        if self._lock is not None or self._heartbeat is not None:
            return
        make_folder(self.path)
        path = os.path.join(self.path, _HEARTBEAT_LOCK)
        self._lock = self._flocked()
        try:
            if self._lock is None or os.path.exists(path):  # of a host whose mount has no flock
                self._heartbeat = HeartbeatLock(path, _this_process())
        except BaseException as error:
            self.unlock()
            if isinstance(error, heartbeat_lock.Held):
                raise self._is_held_by(str(error), errno.EWOULDBLOCK) from None
            raise
        _locked.add(self)

    def _flocked(self) -> int | None:
        """The descriptor that holds the lock; None if the file system has no flock, which is warned of."""
        path = os.path.join(self.path, _LOCK)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            who = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise self._is_held_by(who, error.errno) from error
            if error.errno not in _NO_FLOCK:
                message = f"could not lock '{path}': {error.strerror}; save into a folder on another file system"
                raise IoError(error.errno or 0, message, path) from error
            engine.warn_once(
                f"the file system of '{self.path}' has no flock ({error.strerror}): the file '{_HEARTBEAT_LOCK}' keeps "
                f"others from saving there; if this process is killed, the next one waits {heartbeat_lock.STALE_S:.0f} "
                "s before it saves"
            )
            return None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{_this_process()}\n".encode(), 0)
        return descriptor

    def _is_held_by(self, who: str, number: int) -> IoError:
        remedy = "end it, or use another folder"
        if who == _this_process():
            who, remedy = "another AsyncCheckpointer of this process", "close() that one first, or use another folder"
        message = f"{who} saves checkpoints to '{self.path}' now: {remedy}"
        return IoError(number, message, os.path.join(self.path, _LOCK))

    def _check_lock(self) -> None:
        """Raise `IoError` if another process has taken the lock over, because this one was suspended."""
        if self._heartbeat is not None:
            try:
                self._heartbeat.check()
            except heartbeat_lock.Held as holder:
                raise self._is_held_by(str(holder), errno.EWOULDBLOCK) from None

    def unlock(self) -> None:
        """Also where a child has a share in it, which it has until it has been told of its fork, or runs a program."""
        if self._heartbeat is not None:
            self._heartbeat.release()
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        self.drop_lock()

    def drop_lock(self) -> None:
        """This process's share in it."""
        self._known = None
        if self._heartbeat is not None:
            self._heartbeat.forget()
            self._heartbeat = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        _locked.discard(self)

    def tidy(self) -> None:
        """Removes what saves that did not come to their end have left. With the lock, and with no save under way."""
        self._check_lock()
        self._known = None
        for step in self._steps():
            manifest = self._manifest_of(step)
            self._remove(step, kept=() if manifest is None else manifest.files)

    def begin(self, step: int) -> str:
        """Makes the folder of a checkpoint; returns what tells its files from those of another one of that step."""
        self._check_lock()
        make_folder(self._folder_of(step))
        return secrets.token_hex(4)

    def commit(self, step: int, files: Sequence[SavedFile]) -> None:
        """The checkpoint is there when this returns, and was not before; its files are on storage already."""
        complete = self._complete_and_known()
        sequence = complete[-1].sequence + 1 if complete else 0
        manifest = Manifest(step, sequence, tuple(files))
        content = json.dumps({"format": _FORMAT, **asdict(manifest)}, indent=1).encode()
        self._check_lock()
        with Writing(self.file(step, MANIFEST), len(content), self._options) as writing:
            writing.write_bytes([(0, content)])
            writing.commit()
        if self._known is not None:
            self._known = [*(one for one in complete if one.step != step), manifest]

    def retain(self, keep_last: int, keep_every: int | None) -> None:
        """Removes all but the newest ``keep_last`` and those whose step is a multiple of ``keep_every``; of those that
        stay, what a save of the same step has replaced.
        """
        older, newest = list(self._complete_and_known()), []
        while older and len(newest) < keep_last:
            manifest = older.pop()
            if os.path.exists(self.file(manifest.step, MANIFEST)):  # else somebody has removed it
                newest.append(manifest)
        for manifest in newest:
            self._remove(manifest.step, kept=manifest.files)
        kept = []
        for manifest in older:
            if keep_every is not None and manifest.step % keep_every == 0:
                kept.append(manifest)
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.file(manifest.step, MANIFEST))
                sync_folder(self._folder_of(manifest.step))  # no manifest, then no files: never the other way round
            self._remove(manifest.step, kept=())
        if self._known is not None:
            self._known = kept + newest[::-1]

    def _complete_and_known(self) -> list[Manifest]:
        """`complete`, remembered while this holds the lock: with thousands, reading them for each save takes long."""
        if self._known is not None:
            return self._known
        complete = self.complete()
        if self._lock is not None or self._heartbeat is not None:
            self._known = complete
        return complete

    def _folder_of(self, step: int) -> str:
        return os.path.join(self.path, f"step-{step}")

    def _steps(self) -> list[int]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return [int(found[1]) for found in map(_STEP_FOLDER.fullmatch, names) if found]

    def _manifest_of(self, step: int) -> Manifest | None:
        path = self.file(step, MANIFEST)
        try:
            with open(path, "rb") as file:
                said = json.load(file)
            if said["format"] != _FORMAT:
                raise ValueError(f"it is of format {said['format']!r}, and this version knows {_FORMAT}")
            files = tuple(SavedFile(str(one["name"]), int(one["size_bytes"])) for one in said["files"])
            if said["step"] != step or not all(_OURS.fullmatch(one.name) for one in files):
                raise ValueError("it is of another step, or names files that are none of a checkpoint's")
            return Manifest(step, int(said["sequence"]), files)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError) as error:
            message = f"'{path}' is no manifest: {error!r}; remove its folder to go on without it"
            raise CorruptData(message, path) from error

    def _remove(self, step: int, kept: Sequence[SavedFile]) -> None:
        """What is ours in a step's folder but its manifest and ``kept``; then the folder, where nothing is left."""
        names = {file.name for file in kept}
        folder = self._folder_of(step)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in os.listdir(folder):
                if name not in names and _OURS.fullmatch(name):
                    os.unlink(os.path.join(folder, name))
            if not names:
                with contextlib.suppress(OSError):  # somebody has put something there
                    os.rmdir(folder)

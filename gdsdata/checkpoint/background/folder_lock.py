"""The lock of a checkpoint folder, which one `AsyncCheckpointer` at a time holds.

runs/a/lock         locked by flock
runs/a/lock-held    instead, if the file system has no flock: see `heartbeat_lock`
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
import weakref
from collections.abc import Callable

from gdsdata.checkpoint.background import heartbeat_lock
from gdsdata.checkpoint.background.heartbeat_lock import HeartbeatLock
from gdsdata.checkpoint.synced_folders import make_folder
from gdsdata.checkpoint.urls import not_a_folder
from gdsdata.errors import IoError
from gdsdata.io import engine

_LOCK, _HEARTBEAT_LOCK = "lock", "lock-held"
_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)

# A forked child has a share in each lock. It would keep the folder locked after its parent has
# released it or crashed.
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _drop_all() -> None:
    for lock in list(_held):
        lock.drop()


os.register_at_fork(after_in_child=_drop_all)


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


class FolderLock:
    """Guards the files below a folder against other writers.

    The lock is held from construction until `release` or the process's end.

    On a file system without flock, the lock is a file with a heartbeat. If its holder has died,
    construction waits a minute (`heartbeat_lock.STALE_S`) before it takes the file over.

    Args:
        folder: its path; it is made if it does not exist.

    Raises:
        IoError: another process or object holds the lock, or the folder cannot be locked.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._descriptor: int | None = None
        self._heartbeat: HeartbeatLock | None = None
        self._take()

    def _take(self) -> None:
        folder = self._folder
        held = os.path.join(folder, _HEARTBEAT_LOCK)
        try:
            make_folder(folder)
            self._descriptor = self._flocked()
        except NotADirectoryError as error:
            raise not_a_folder("folder", folder) from error
        try:
            if self._descriptor is None or os.path.exists(held):  # made by a host whose mount has no flock
                self._heartbeat = HeartbeatLock(held, _this_process())
        except BaseException as error:
            self.release()
            if isinstance(error, heartbeat_lock.Held):
                raise self._held_by(str(error), errno.EWOULDBLOCK) from None
            raise
        _held.add(self)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then the modules that this needs are gone, and the system unlocks
            self.release()

    def check(self) -> bool:
        """Check that this process still holds the lock.

        A process that was suspended may have lost it. If somebody has removed the folder, it is
        made and locked again.

        Returns:
            Whether the folder was as it was left; False: it is a new one.

        Raises:
            IoError: another process has taken the lock over, or has locked the new folder.
        """
        if self._is_removed():
            self.release()
            self._take()
            return False
        if self._heartbeat is not None:
            try:
                self._heartbeat.check()
            except heartbeat_lock.Held as holder:
                raise self._held_by(str(holder), errno.EWOULDBLOCK) from None
        return True

    def _is_removed(self) -> bool:
        """Return whether the file that is locked is no longer the folder's."""
        if self._descriptor is None:
            return not os.path.isdir(self._folder)
        try:
            return not os.path.samestat(os.stat(os.path.join(self._folder, _LOCK)), os.fstat(self._descriptor))
        except FileNotFoundError:
            return True

    def release(self) -> None:
        """Release the lock. May be called again.

        A forked child that still shares it, because its fork handlers have not run, loses it too.
        """
        if self._heartbeat is not None:
            self._heartbeat.release()
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.drop()

    def drop(self) -> None:
        """Give up this process's share in the lock.

        The process that it was forked from keeps its own.
        """
        if self._heartbeat is not None:
            self._heartbeat.forget()
            self._heartbeat = None
        _held.discard(self)
        # First forgotten: a child that is forked by another thread meanwhile would close the number
        # once more, which may be that of another file by then.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _flocked(self) -> int | None:
        """Return the descriptor that holds the lock.

        None, with a warning, if the file system has no flock.
        """
        path = os.path.join(self._folder, _LOCK)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except NotADirectoryError:
            raise
        except OSError as error:
            message = f"could not open '{path}': {error.strerror}; mend that, or save into another folder"
            raise IoError.caused_by(error, message, path) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise self._held_by(holder, error.errno) from error
            if error.errno not in _NO_FLOCK:
                message = f"could not lock '{path}': {error.strerror}; save into a folder on another file system"
                raise IoError(error.errno or 0, message, path) from error
            engine.warn_once(
                f"the file system of '{self._folder}' has no flock ({error.strerror}): the file '{_HEARTBEAT_LOCK}' "
                "keeps others from saving there; if this process is killed, the next one waits "
                f"{heartbeat_lock.STALE_S:.0f} s before it saves"
            )
            return None
        with contextlib.suppress(OSError):  # a full disk: the holder's name is for messages only
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{_this_process()}\n".encode(), 0)
        return descriptor

    def _held_by(self, holder: str, number: int) -> IoError:
        remedy = "end it, or use another folder"
        if holder == _this_process():
            holder, remedy = (
                "another AsyncCheckpointer of this process",
                "close() that one first, or use another folder",
            )
        message = f"{holder} saves checkpoints to '{self._folder}' now: {remedy}"
        return IoError(number, message, os.path.join(self._folder, _LOCK))

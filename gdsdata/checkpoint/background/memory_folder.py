"""`MemoryFolder`: copies of ranks' files in the memory of a node, which outlive its processes.

/dev/shm/gdsdata-1000-5d1c6b8f90a2e374/                      of a user and a checkpoint folder
    12-step-100-of-16-5f2c91d0-90b1c4d2a6e8f735/             a generation (`Generation.name`)
        rank-3-5f2c91d0.pt                                   a complete copy
        rank-3-5f2c91d0.pt.tmp                               one that is being made

A process that makes or has restored a generation holds a shared lock (flock) on its folder. A
program in another container, whose checkpoint folder has the same path, removes none that is held.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import shutil
import stat
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from gdsdata.checkpoint.background.copies import Copy, Generation, Held
from gdsdata.checkpoint.urls import folder_name, local_folder
from gdsdata.collective.agreement import node_name
from gdsdata.io.budget import available_bytes
from gdsdata.storage.paths import absolute

DEFAULT_BASE = "/dev/shm"
_TEMPORARY = ".tmp"
# A copy takes at most this share of what the node has left: training needs memory too.
_MOST_TAKEN = 0.75


# Forked children, as workers of a DataLoader, have the descriptors of their parent. These would
# keep the memory of files that the parent removes, and its locks.
_open: weakref.WeakSet[_Descriptor] = weakref.WeakSet()


class _Descriptor:
    """An open file or folder, which forked children close. It is closed with its last reference."""

    def __init__(self, path: str, flags: int) -> None:
        self._number: int | None = None
        self._number = os.open(path, flags | os.O_CLOEXEC, 0o600)
        _open.add(self)

    @property
    def is_open(self) -> bool:
        return self._number is not None

    def fileno(self) -> int:
        assert self._number is not None  # it is open
        return self._number

    def close(self) -> None:
        """Close it. May be called again."""
        number, self._number = self._number, None
        if number is not None:
            os.close(number)

    __del__ = close

    def unlock(self) -> None:
        """Release its lock (flock), and close it. May be called again.

        A child that another thread forks has the lock too, until it closes its descriptor.
        """
        if self._number is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._number, fcntl.LOCK_UN)
        self.close()


def _close_all() -> None:
    for one in list(_open):
        one.close()


os.register_at_fork(after_in_child=_close_all)


class MemoryFolder:
    """The copies that a node has of one folder's checkpoints.

    All ranks of the node use it, each for its own files.

    Args:
        base: a folder in the node's memory.
        checkpoints: the path of the checkpoint folder.

    Attributes:
        path: of the folder.

    Raises:
        ValueError: ``base`` is a URL.
    """

    def __init__(self, base: str | os.PathLike[str], checkpoints: str) -> None:
        base = folder_name("memory_folder", base)
        digest = hashlib.blake2b(os.fsencode(os.path.realpath(checkpoints)), digest_size=8).hexdigest()
        self.path = os.path.join(absolute(local_folder("memory_folder", base)), f"gdsdata-{os.geteuid()}-{digest}")
        self._locks: dict[str, _Descriptor] = {}  # by the name of the generation

    def make(self) -> str:
        """Make the folder, and return its place (`Held.place`).

        Raises:
            OSError: it cannot be made, or another user may write into it.
        """
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
        except FileNotFoundError as error:
            message = f"'{os.path.dirname(self.path)}' does not exist: create it, or pass another memory_folder="
            raise FileNotFoundError(error.errno, message) from None
        found = self._checked()
        return f"{node_name()} {found.st_dev} {found.st_ino}"

    def _checked(self) -> os.stat_result:
        found = os.lstat(self.path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            message = f"'{self.path}' is not a folder that this user alone may use: remove it"
            raise PermissionError(errno.EACCES, message)
        return found

    def held(self) -> Held:
        """Return the complete copies. It raises what `make` does."""
        place = self.make()
        found = []
        for generation in filter(None, map(Generation.named, os.listdir(self.path))):
            names = {generation.file(rank): rank for rank in range(generation.ranks)}
            with contextlib.suppress(FileNotFoundError):  # somebody has freed it
                for name in os.listdir(self._folder_of(generation)):
                    if name in names:
                        size_bytes = os.stat(os.path.join(self._folder_of(generation), name)).st_size
                        found.append(Copy(generation, names[name], size_bytes))
        return Held(place, tuple(found))

    def file(self, generation: Generation, rank: int) -> str:
        """Return the path of the complete copy of a rank's file."""
        return os.path.join(self._folder_of(generation), generation.file(rank))

    def begin(self, generation: Generation, rank: int, size_bytes: int) -> MemoryCopy:
        """Begin a copy of a rank's file.

        Raises:
            OSError: the folder cannot be used, or there is no room.
        """
        self.make()
        with self._locked():  # ranks of a node must not all take the same room
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._folder_of(generation), 0o700)
            self._lock(generation)
            self._check_room(size_bytes)
            return MemoryCopy(self.file(generation, rank), size_bytes)

    def hold(self, generation: Generation) -> None:
        """Have no other run remove a generation until `release`, or while this process lives.

        It raises what `make` does.
        """
        self.make()
        with self._locked(), contextlib.suppress(FileNotFoundError):  # this node has none of it
            self._lock(generation)

    def release(self) -> None:
        """Hold no generation any more. The copies stay. May be called again."""
        self._release(list(self._locks))

    def remove(self, generation: Generation, rank: int) -> None:
        """Remove the copy of a rank's file, if there is one."""
        self._release([generation.name])
        with contextlib.suppress(OSError):
            os.unlink(self.file(generation, rank))
        with contextlib.suppress(OSError):
            os.rmdir(self._folder_of(generation))  # fails while there are others

    def keep_only(self, current: Generation, older: Generation | None = None) -> None:
        """Remove everything but a generation, and the complete copies of an older one.

        Generations of other runs stay while a process holds them. It raises what `make` does, and
        then removes nothing.
        """
        self.make()
        kept = {current.name} | ({older.name} if older else set())
        self._release([name for name in list(self._locks) if name not in kept])
        with self._locked():
            self._remove_all(kept, current.run)
        if older is not None:
            for path in self._temporary_files(older):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def free(self) -> None:
        """Remove all copies that no process holds. A folder that `make` refuses stays as it is."""
        with contextlib.suppress(FileNotFoundError, PermissionError):
            self._checked()
            with self._locked():
                self._remove_all(set(), None)
                with contextlib.suppress(OSError):
                    os.rmdir(self.path)  # fails while there are others

    def _remove_all(self, kept: set[str], run: str | None) -> None:
        """Remove everything but what has the names ``kept``, and what other runs hold."""
        for name in set(os.listdir(self.path)) - kept:
            path, generation = os.path.join(self.path, name), Generation.named(name)
            if generation is None or generation.run == run or not _is_held(path):
                shutil.rmtree(path, ignore_errors=True)

    def _lock(self, generation: Generation) -> None:
        """Hold a generation, whose folder exists. The caller has locked the folder around it."""
        if generation.name not in self._locks:
            lock = _Descriptor(self._folder_of(generation), os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_SH)
            self._locks[generation.name] = lock

    def _release(self, names: list[str]) -> None:
        for name in names:
            if (lock := self._locks.pop(name, None)) is not None:
                lock.unlock()

    def _folder_of(self, generation: Generation) -> str:
        return os.path.join(self.path, generation.name)

    def _temporary_files(self, generation: Generation) -> list[str]:
        folder = self._folder_of(generation)
        with contextlib.suppress(FileNotFoundError):
            return [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(_TEMPORARY)]
        return []

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder, which `make` has made, against other processes."""
        while True:
            lock = _Descriptor(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self._is_the_folder(lock):
                    yield
                    return
            finally:
                lock.unlock()
            self.make()

    def _is_the_folder(self, lock: _Descriptor) -> bool:
        """Return whether a folder is still there. Another process may have removed it (`free`)."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(lock.fileno()), os.lstat(self.path))
        return False

    def _check_room(self, size_bytes: int) -> None:
        """Check that a copy leaves memory for others.

        Raises:
            OSError: it does not.
        """
        coming_bytes = 0  # of copies that were begun, and that do not occupy their memory yet
        for generation in filter(None, map(Generation.named, os.listdir(self.path))):
            for path in self._temporary_files(generation):
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(path)
                    coming_bytes += max(0, found.st_size - found.st_blocks * 512)
        disk = os.statvfs(self.path)
        left_bytes = min(disk.f_bavail * disk.f_frsize, int(_MOST_TAKEN * available_bytes())) - coming_bytes
        if size_bytes > left_bytes:
            message = (
                f"a copy of {size_bytes} bytes does not fit into '{self.path}': {max(0, left_bytes)} bytes are left, "
                f"because copies take at most {_MOST_TAKEN:.0%} of the free memory. Give the node or its container "
                "more (docker run --shm-size), or pass another memory_folder="
            )
            raise OSError(errno.ENOSPC, message)


def _is_held(path: str) -> bool:
    """Return whether a process holds the folder of a generation."""
    try:
        lock = _Descriptor(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # it is a file, or gone
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        lock.unlock()
    return False


class MemoryCopy:
    """A copy on its way into a node's memory. It appears under its name when it is complete.

    Several threads may call `write`; the other methods belong to one thread. It owns the temporary
    file, which `complete` renames and `abandon` removes.

    Args:
        path: of the complete copy.
        size_bytes: the size that it will have.

    Raises:
        OSError: the temporary file cannot be made.
    """

    def __init__(self, path: str, size_bytes: int) -> None:
        self.path, self.size_bytes = path, size_bytes
        self._temporary = path + _TEMPORARY
        with contextlib.suppress(FileNotFoundError):  # a killed process has left it
            os.unlink(self._temporary)
        self._file = _Descriptor(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(self._file.fileno(), size_bytes)
        except BaseException:
            self.abandon()
            raise

    def write(self, offset: int, content: Any) -> None:
        """Write bytes (a buffer) at an offset of the file.

        Raises:
            OSError: the memory is full.
        """
        rest = memoryview(content).cast("B")
        while rest:
            count = os.pwrite(self._file.fileno(), rest, offset)
            rest, offset = rest[count:], offset + count

    def occupy(self) -> None:
        """Have the file occupy all of its memory: what is mapped of it cannot fail then.

        Raises:
            OSError: the memory is full.
        """
        os.posix_fallocate(self._file.fileno(), 0, self.size_bytes)

    def mapped(self) -> torch.Tensor:
        """Return the file's bytes, to be filled. `occupy` was called before."""
        return mapped(self._temporary)

    def complete(self) -> None:
        """Rename the file.

        Raises:
            OSError: it is gone.
        """
        os.rename(self._temporary, self.path)
        self._file.close()

    def abandon(self) -> None:
        """Remove the file, unless it is complete. May be called again."""
        if self._file.is_open:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            self._file.close()


def mapped(path: str) -> torch.Tensor:
    """Return the bytes of a file as a tensor (uint8, one dimension) that shares its memory.

    Forked children do not have the mapping: it would keep the memory of a file that is removed.

    Raises:
        OSError: the file cannot be opened for writing.
        ValueError: it is empty.
    """
    with open(path, "r+b") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if not size_bytes:
            raise ValueError(f"'{path}' is empty")
        try:  # torch would make a file that is gone, with zeros
            content = torch.from_file(f"/proc/self/fd/{file.fileno()}", True, size_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise OSError(errno.EIO, f"'{path}' cannot be mapped: {error}") from error
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(content.data_ptr()), ctypes.c_size_t(size_bytes), ctypes.c_int(mmap.MADV_DONTFORK)
    )
    return content

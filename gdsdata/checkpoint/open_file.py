"""`OpenFile`: a file that a load opens once.

So header and data come from one file, also if another one gets its name meanwhile.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

from gdsdata.checkpoint.explanations import folder, no_file
from gdsdata.errors import CorruptData, IoError
from gdsdata.io import engine

HEAD_BYTES = 64  # of a file are enough to recognize its format

Seen = tuple[int, int]  # a file's size in bytes, and its modification time in ns


def most_kept_files() -> int:
    """Return how many files one load may keep open.

    At two descriptors each, they take a quarter of the process's limit.
    """
    import resource  # late: few calls open several files, and a start pays for its library

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if soft == resource.RLIM_INFINITY else min(max(soft // 8, 4), 4096)


class OpenFile:
    """A file as it was when it was opened.

    It owns the descriptor, which is closed with the last reference; a read in progress may hold
    that one. Any thread may call it.

    Args:
        path: of the file.
        keep: keep the descriptor. False, for checkpoints of more than `most_kept_files`: the file
            is opened again by its name for each read, and it is an error if it was replaced or
            changed since.

    Attributes:
        path: of the file.
        seen: its size and modification time when it was opened.

    Raises:
        FileNotFoundError, IoError: the file cannot be opened, or is a folder.
        ValueError: the file is a pipe or a device.
    """

    __slots__ = ("_file", "path", "seen")
    ends_bytes = 1024  # so much is read at each end of an archive, to find out what it holds

    def __init__(self, path: str, keep: bool = True) -> None:
        self.path = path
        file = _opened(path)
        self.seen = _seen(file, path)
        self._file = file if keep else None

    @property
    def size_bytes(self) -> int:
        return self.seen[0]

    def file(self) -> Any:
        """Return the engine's open file.

        Its ``descriptor`` is open as long as that object lives.

        Raises:
            CorruptData: the file is opened by its name, and has been replaced or changed.
        """
        if self._file is not None:
            return self._file
        file = _opened(self.path)
        self._compare(_seen(file, self.path))
        return file

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return bytes from an offset; fewer if the file ends.

        Raises:
            IoError: the storage refuses the read.
        """
        file, parts = self.file(), []
        try:
            while size_bytes > 0 and (part := os.pread(file.descriptor, size_bytes, offset)):
                parts.append(part)
                offset, size_bytes = offset + len(part), size_bytes - len(part)
        except OSError as error:
            raise _refused("read", self.path, error, offset, size_bytes) from error
        return b"".join(parts)

    def read_each(self, offsets: Sequence[int], size_bytes: int) -> bytes:
        """Return ``size_bytes`` from each of these offsets, joined. See `engine.read_each`."""
        return engine.read_each(self.file().descriptor, self.path, offsets, size_bytes)

    def reader(self) -> BinaryIO:
        """Return a Python file object at the file's beginning.

        It shares its position with other readers.
        """
        reader = _Reader(io.FileIO(os.dup(self.file().descriptor), "rb"))
        reader.seek(0)
        return reader

    def check_unchanged(self) -> None:
        """Check that the file was not changed in place since it was opened.

        Raises:
            CorruptData: it was changed; without ``keep``, it may have been replaced.
            FileNotFoundError, IoError: without ``keep``, the name cannot be looked up.
        """
        if self._file is not None:
            return self._compare(_seen(self._file, self.path))
        try:
            status = os.stat(self.path)
        except FileNotFoundError as error:
            raise missing(self.path, no_file(self.path)) from error
        except OSError as error:
            raise _refused("open", self.path, error) from error
        return self._compare((status.st_size, status.st_mtime_ns))

    def _compare(self, now: Seen) -> None:
        if now != self.seen:
            raise CorruptData(
                f"'{self.path}' was changed while it was being loaded: {self.seen[0]} bytes when it was opened, "
                f"{now[0]} bytes now{', modified later' if now[1] != self.seen[1] else ''}. Load it again when nobody "
                "writes it; a file that is replaced by a rename is read whole",
                self.path,
                0,
                now[0],
            )


class _Reader(io.BufferedReader):
    """A file object of gdsdata's own, so that `torch_hooks` leaves it to torch."""


def table_of(files: Sequence[OpenFile]) -> Any:
    """Return the engine's table of these files.

    It has open files, and the names of those that are not kept, and of objects.
    """
    return engine.table_of([one.path for one in files], [one.seen for one in files], [one._file for one in files])


def missing(path: str, message: str) -> FileNotFoundError:
    """Return an error with the attributes that the engine's own have."""
    error = FileNotFoundError(errno.ENOENT, message)
    error.path = path  # type: ignore[attr-defined]
    return error


def _opened(path: str) -> Any:
    sys.audit("open", path, "rb", 0)  # as Python's own `open` does
    try:
        return engine.File(path)
    except FileNotFoundError as error:
        raise missing(path, no_file(path)) from error
    except ValueError as error:
        if os.path.isdir(path):
            raise IoError(errno.EISDIR, folder(path), path) from error
        raise ValueError(f"{error}: give the path of a checkpoint's file") from error


def _seen(file: Any, path: str) -> Seen:
    try:
        status = os.fstat(file.descriptor)
    except OSError as error:  # as ESTALE of NFS
        raise _refused("find the size of", path, error) from error
    return status.st_size, status.st_mtime_ns


def _refused(what: str, path: str, error: OSError, offset: int = 0, size_bytes: int = 0) -> IoError:
    message = f"could not {what} '{path}': {error.strerror or error}"
    return IoError(error.errno or errno.EIO, message, path, offset, size_bytes)

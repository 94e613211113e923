"""`OpenObject`: an object of a store, in the place of an `OpenFile`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from gdsdata.checkpoint.open_file import OpenFile, missing
from gdsdata.checkpoint.urls import is_url, store_and_name

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on

_READER_BYTES = 8 << 20  # the buffer of `OpenObject.reader`: each time it is empty costs a round trip


def open_path(path: str, keep: bool = True) -> OpenFile:
    """Open a file, or the object that a URL names. See `OpenFile`.

    Raises:
        FileNotFoundError, PermissionError, IoError: it cannot be opened, or is a folder.
    """
    if not is_url(path):
        return OpenFile(path, keep)
    store_and_name(path)  # raises if it names a folder
    return OpenObject(path)


class OpenObject(OpenFile):
    """One version of an object: its size, its version, and its bytes by ranges.

    The engine's own requests are for this version too. If the object is replaced meanwhile, a read
    is `CorruptData`.

    Args:
        url: of the object.

    Raises:
        FileNotFoundError, PermissionError, IoError: it cannot be opened.
    """

    __slots__ = ("_opened",)
    # Most pickles and directories are within it, and a request takes as long on most networks.
    ends_bytes = 256 << 10

    def __init__(self, url: str) -> None:
        from gdsdata.storage.objects import newest  # late: see `urls`
        from gdsdata.storage.remote_file import RemoteFile

        self.path = url
        try:
            self._opened = RemoteFile(url, newest(url))
        except FileNotFoundError as error:
            raise missing(url, str(error)) from error
        self.seen = self._opened.size_bytes, self._opened.mtime_ns
        self._file = None  # the engine opens it by its URL

    def read(self, offset: int, size_bytes: int) -> bytes:
        return self._opened.read(offset, size_bytes)

    def read_each(self, offsets: Sequence[int], size_bytes: int) -> bytes:
        return self._opened.read_each(np.array(offsets, np.int64), size_bytes).tobytes()

    def reader(self) -> BinaryIO:
        return io.BufferedReader(_Reader(self), _READER_BYTES)

    def check_unchanged(self) -> None:
        """Return at once: each response is compared with what was opened."""


class _Reader(io.RawIOBase):
    """An object as a file object of Python's."""

    def __init__(self, opened: OpenObject) -> None:
        self._opened, self._at = opened, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        target: Any = memoryview(buffer).cast("B")
        found = self._opened.read(self._at, len(target))
        target[: len(found)] = found
        self._at += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._opened.size_bytes}[whence]
        self._at = max(begin + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at


def read_object(url: str, most_bytes: int | None = None) -> bytes:
    """Return the content of a small object, or its first ``most_bytes``.

    Raises:
        FileNotFoundError, PermissionError, IoError: it cannot be read.
    """
    opened = open_path(url)
    return opened.read(0, opened.size_bytes if most_bytes is None else min(opened.size_bytes, most_bytes))

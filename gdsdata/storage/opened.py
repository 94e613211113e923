"""`open_file`: the bytes of a file or an object that are looked at before its samples are read."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, Protocol, TypeVar

import numpy as np

from gdsdata.errors import CorruptData, IoError
from gdsdata.storage.heads import sizes_of
from gdsdata.storage.regular import REFUSED, open_without_waiting, read_at, read_resident, regular
from gdsdata.storage.urls import have_urls, is_remote

T = TypeVar("T")

# Objects that are looked at side by side: each request waits for a server.
REMOTE_THREADS = 64
# So many files for each thread may be looked at before a caller takes the results.
_AHEAD = 4
# The errors of file systems that do not know RWF_NOWAIT.
_CANNOT_SAY = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Opened(Protocol):
    """A file or an object that is read at a few places, by one thread.

    Every method that reads raises `IoError` if that fails.

    Attributes:
        path: as it was given.
        size_bytes: when it was opened.
        mtime_ns: then, too; the version of an object (`store.ObjectInfo.version`).
        walks_ahead: it reads ahead by itself if places are read one behind another.
    """

    walks_ahead: bool
    path: str
    size_bytes: int
    mtime_ns: int

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes from ``offset`` on; fewer only at the end."""

    def read_each(self, offsets: np.ndarray, length: int) -> np.ndarray:
        """Return ``length`` bytes from each offset (int64 (n,)) on: uint8 (n, length).

        Behind the end they are zeros.
        """

    def read_if_cached(self, offset: int, length: int) -> bytes | None:
        """Do as `read`, if that needs no new request to storage; else return None."""

    def ask_for(self, offset: int, length: int) -> None:
        """Begin to read these bytes, for a `read` that follows."""

    def has_changed(self) -> bool:
        """Return whether it is another one by now, by its size and ``mtime_ns``."""

    def __enter__(self) -> Opened: ...

    def __exit__(self, *_: object) -> None: ...


def open_file(path: str, at_random: bool = False) -> Opened:
    """Open a file or an object to read it.

    Args:
        path: of a file, or the URL of an object.
        at_random: it is read at a few places, so nothing behind them is read ahead.

    Raises:
        FileNotFoundError: there is none.
        IoError: it cannot be opened.
    """
    if is_remote(path):
        from gdsdata.storage.remote_file import RemoteFile

        return RemoteFile(path)
    return _LocalFile(path, at_random)


@contextlib.contextmanager
def open_files(paths: Sequence[str], at_random: bool = False) -> Iterator[list[Opened]]:
    """Open several files or objects, which the block reads side by side: see `open_file`."""
    if have_urls(paths):
        sizes_of(paths)  # all objects are identified at once, and not one after another
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(open_file(path, at_random)) for path in paths]


def read_whole(path: str, most_bytes: int | None = None) -> np.ndarray:
    """Return all bytes of a file or an object: uint8, one dimension.

    Args:
        most_bytes: a longer one is refused before memory is allocated.

    Raises:
        FileNotFoundError, IoError: it is not available.
        CorruptData: it has more than ``most_bytes``.
    """
    if not is_remote(path):
        try:
            with open(path, "rb", buffering=0, opener=regular) as content:
                check_length(path, os.fstat(content.fileno()).st_size, most_bytes)
                return np.fromfile(content, np.uint8)
        except FileNotFoundError:
            raise
        except OSError as error:
            message = f"reading {path} failed: {error.strerror or error}"  # numpy's own have no strerror
            raise IoError.caused_by(error, message, path) from error
    with open_file(path) as file:
        check_length(path, file.size_bytes, most_bytes)
        return np.frombuffer(file.read(0, file.size_bytes), np.uint8)


def check_length(path: str, size_bytes: int, most_bytes: int | None) -> None:
    """Raise CorruptData if a file that is read as a whole is too long: it may be one large hole."""
    if most_bytes is not None and size_bytes > most_bytes:
        raise CorruptData(
            f"{path} has {size_bytes} bytes, and no file of its kind has more than {most_bytes}: fetch or write it "
            "again",
            path,
            0,
            size_bytes,
        )


def open_stream(path: str) -> BinaryIO:
    """Open a file or an object to read it from its begin to its end.

    Raises:
        OSError: it cannot be opened.
    """
    if is_remote(path):
        from gdsdata.storage.remote_file import stream_of

        return stream_of(path)
    return open(path, "rb", opener=regular)


def exist(paths: Sequence[str]) -> list[bool]:
    """Return whether each of these files and objects is there."""
    if not have_urls(paths):
        return [os.path.exists(path) for path in paths]
    from gdsdata.storage.objects import sizes_and_versions

    urls = [path for path in paths if is_remote(path)]
    there = {url for url, size_bytes in zip(urls, sizes_and_versions(urls)[0].tolist(), strict=True) if size_bytes >= 0}
    return [path in there if is_remote(path) else os.path.exists(path) for path in paths]


def of_each(
    look: Callable[[str], T], paths: Sequence[str], threads: int = 1, only_if_slow: bool = False
) -> Iterator[T]:
    """Yield what ``look`` returns for each path, in order.

    Args:
        look: called by several threads.
        paths: of files and objects.
        threads: for files, so that a disk has several reads to serve. Objects take
            `REMOTE_THREADS`.
        only_if_slow: files are looked at by one thread, until it has waited longer than it has
            computed. Threads that compute in Python take turns, and longer than one alone.
    """
    most = REMOTE_THREADS if have_urls(paths) else threads
    known = 0
    if only_if_slow and most == threads:
        for found in _until_slow(look, paths):
            yield found
            known += 1
    paths = paths[known:]
    if min(most, len(paths)) < 2:
        yield from map(look, paths)
        return
    pool, begun = ThreadPoolExecutor(min(most, len(paths)), "gdsdata-indexing"), deque[Future[T]]()
    try:
        for path in paths:
            begun.append(pool.submit(look, path))
            if len(begun) > _AHEAD * most:  # results must not pile up
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _until_slow(look: Callable[[str], T], paths: Sequence[str]) -> Iterator[T]:
    """Yield what ``look`` returns, until the calls have waited longer than they have computed.

    One call does not show it: a shard without samples is not even opened.
    """
    took_s = computed_s = 0.0
    for path in paths:
        began_s, computed_before_s = time.perf_counter(), time.thread_time()
        found = look(path)
        computed_s += time.thread_time() - computed_before_s
        took_s += time.perf_counter() - began_s
        yield found
        if took_s > 2 * computed_s:
            return


class _LocalFile:
    """A file, by a plain descriptor: ``open()`` takes three times as long.

    It makes system calls, 0.6 us each. A mapping would take a quarter of that, but a file that is
    cut short meanwhile, or whose storage fails, would end the process (SIGBUS).
    """

    walks_ahead = False

    def __init__(self, path: str, at_random: bool) -> None:
        self.path = path
        self._buffer = bytearray()  # of `read_if_cached`
        self._knows_cached = True
        try:
            self._descriptor = open_without_waiting(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise IoError.caused_by(error, f"indexing {path}: it cannot be opened: {error.strerror}", path) from error
        try:
            status = self._status()
            if stat.S_ISFIFO(status.st_mode):
                raise IoError(errno.EINVAL, f"indexing {path}: {REFUSED}", path)
        except IoError:
            os.close(self._descriptor)
            raise
        self.size_bytes, self.mtime_ns = status.st_size, status.st_mtime_ns
        if at_random:
            with contextlib.suppress(OSError):  # advice
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def __enter__(self) -> _LocalFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, length: int) -> bytes:
        try:
            return read_at(self._descriptor, length, offset)
        except OSError as error:
            raise self._failed(error, offset, length) from error

    def read_each(self, offsets: np.ndarray, length: int) -> np.ndarray:
        places = offsets.tolist()
        if not places:
            return np.empty((0, length), np.uint8)
        if not self._seem_cached(places):
            # The disk then serves them side by side: 1000 of 64 MB in 12 ms, not in 85 ms.
            for offset in places:
                self.ask_for(offset, length)
        try:
            parts = [read_at(self._descriptor, length, offset) for offset in places]
        except OSError as error:
            raise self._failed(error, places[0], length) from error
        data = b"".join(parts)
        if len(data) < len(places) * length:
            data = b"".join(part.ljust(length, b"\0") for part in parts)
        return np.frombuffer(data, np.uint8).reshape(len(places), length)

    def _seem_cached(self, offsets: Sequence[int]) -> bool:
        """Return whether the page cache seems to have these places, by a sample."""
        byte = bytearray(1)
        try:
            for offset in offsets[:: len(offsets) // 16 + 1]:
                read_resident(self._descriptor, byte, offset)
        except OSError:  # EAGAIN: it has not; any other: this file system does not know
            return False
        return True

    def read_if_cached(self, offset: int, length: int) -> bytes | None:
        if not self._knows_cached:
            return None
        if len(self._buffer) != length:
            self._buffer = bytearray(length)
        try:
            count = read_resident(self._descriptor, self._buffer, offset)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in _CANNOT_SAY:
                raise self._failed(error, offset, length) from error
            self._knows_cached = False
            return None
        return bytes(self._buffer) if count == length else None

    def ask_for(self, offset: int, length: int) -> None:
        with contextlib.suppress(OSError):  # a hint: a read waits for bytes that do not come now
            os.posix_fadvise(self._descriptor, max(offset, 0), length, os.POSIX_FADV_WILLNEED)

    def has_changed(self) -> bool:
        status = self._status()
        return (status.st_size, status.st_mtime_ns) != (self.size_bytes, self.mtime_ns)

    def _status(self) -> os.stat_result:
        try:
            return os.fstat(self._descriptor)
        except OSError as error:  # as ESTALE of NFS
            message = f"indexing {self.path}: its size cannot be found: {error.strerror}"
            raise IoError.caused_by(error, message, self.path) from error

    def _failed(self, error: OSError, offset: int, length: int) -> IoError:
        message = f"indexing {self.path}: reading {length} bytes at {offset} failed: {error.strerror}"
        return IoError.caused_by(error, message, self.path, offset, length)

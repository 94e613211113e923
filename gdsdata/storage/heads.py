"""The first bytes, sizes and modification times of many files, or versions of many objects."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from gdsdata.errors import IoError
from gdsdata.progress_bars import current
from gdsdata.storage.regular import REFUSED, open_without_waiting
from gdsdata.storage.urls import have_urls, is_remote

# Files whose heads are asked for before the first is read. With a cold cache the disk then serves
# them side by side: the first batch of 256 files takes 28 ms instead of 40 ms.
_HEADS_AT_ONCE = 64
# From this time a file on, the storage is slow, and threads wait for it side by side. Files in
# memory take 6 us, and threads would only wait for the GIL.
_SLOW_S = 200e-6
_THREADS = 16
_HEADS_OF_A_THREAD = 16  # few, because each is an open descriptor

_Heads = tuple[list[bytes], list[int], list[int]]  # with sizes in bytes and times of modification in ns


def read_heads(paths: Sequence[str], head_bytes: int) -> tuple[list[bytes], np.ndarray, np.ndarray]:
    """Return the first ``head_bytes`` of each file, or all of a shorter one.

    It uses plain descriptors, because a folder of a hundred thousand samples may be indexed at
    every start: 6 us a file, and ``open()`` takes 20 us.

    Returns:
        With the heads, sizes in bytes and times of modification in ns: int64 (F,) each.

    Raises:
        FileNotFoundError: as the system raises it.
        IoError: any other refusal.
    """
    current("files").expect(len(paths))
    if have_urls(paths):
        return _heads_of_some_urls(paths, head_bytes)
    return _heads_of_files(paths, head_bytes)


def _heads_of_files(paths: Sequence[str], head_bytes: int) -> tuple[list[bytes], np.ndarray, np.ndarray]:
    heads: list[bytes] = []
    size_bytes, mtime_ns = np.empty(len(paths), np.int64), np.empty(len(paths), np.int64)
    bar = current("files")
    for some, sizes, times in _parts(paths, head_bytes):
        files = slice(len(heads), len(heads) + len(some))
        heads += some
        size_bytes[files], mtime_ns[files] = sizes, times
        bar.add(len(some))
    return heads, size_bytes, mtime_ns


def _heads_of_some_urls(paths: Sequence[str], head_bytes: int) -> tuple[list[bytes], np.ndarray, np.ndarray]:
    from gdsdata.storage.remote_heads import heads_of_urls

    are_urls = np.fromiter(map(is_remote, paths), bool, len(paths))
    heads = np.empty(len(paths), object)
    size_bytes, mtime_ns = np.empty(len(paths), np.int64), np.empty(len(paths), np.int64)
    for of_these, read in ((are_urls, heads_of_urls), (~are_urls, _heads_of_files)):
        some = [paths[place] for place in np.flatnonzero(of_these).tolist()]
        found, size_bytes[of_these], mtime_ns[of_these] = read(some, head_bytes)
        heads[of_these] = np.fromiter(found, object, len(found))
    return heads.tolist(), size_bytes, mtime_ns


def sizes_of(paths: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the files' sizes in bytes and times of modification in ns: int64 (F,) each.

    Raises:
        FileNotFoundError, IoError: as `read_heads`.
    """
    _, size_bytes, mtime_ns = read_heads(paths, 0)
    return size_bytes, mtime_ns


def _parts(paths: Sequence[str], head_bytes: int) -> Iterator[_Heads]:
    for first in range(0, len(paths), _HEADS_AT_ONCE):
        some = paths[first : first + _HEADS_AT_ONCE]
        begun = time.monotonic()
        part = _heads_of(some, head_bytes)
        is_slow = time.monotonic() - begun > _SLOW_S * len(some)
        yield part
        if is_slow and first + len(some) < len(paths):
            yield from _parts_by_threads(paths[first + len(some) :], head_bytes)
            return


def _parts_by_threads(paths: Sequence[str], head_bytes: int) -> Iterator[_Heads]:
    threads = ThreadPoolExecutor(_THREADS, "gdsdata-indexing")
    try:
        parts = [paths[first : first + _HEADS_OF_A_THREAD] for first in range(0, len(paths), _HEADS_OF_A_THREAD)]
        yield from threads.map(lambda part: _heads_of(part, head_bytes), parts)
    finally:
        threads.shutdown(cancel_futures=True)


def _heads_of(paths: Sequence[str], head_bytes: int) -> _Heads:
    heads: list[bytes] = []
    size_bytes: list[int] = []
    mtime_ns: list[int] = []
    descriptors: list[int] = []
    try:
        for path in paths:
            descriptors.append(open_without_waiting(path))
            os.posix_fadvise(descriptors[-1], 0, 0, os.POSIX_FADV_RANDOM)  # the head alone, no readahead behind it
            if head_bytes:  # to the kernel, 0 means the whole file
                os.posix_fadvise(descriptors[-1], 0, head_bytes, os.POSIX_FADV_WILLNEED)
        for i, descriptor in enumerate(descriptors):
            path = paths[i]
            heads.append(os.pread(descriptor, head_bytes, 0))
            status = os.fstat(descriptor)
            size_bytes.append(status.st_size)
            mtime_ns.append(status.st_mtime_ns)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = REFUSED if error.errno == errno.ESPIPE else error.strerror
        message = f"indexing {path}: reading its first {head_bytes} bytes failed: {reason}"
        raise IoError.caused_by(error, message, path, 0, head_bytes) from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return heads, size_bytes, mtime_ns

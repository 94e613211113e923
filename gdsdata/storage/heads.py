"""The first bytes, sizes and modification times of many files, or versions of many objects."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence

import numpy as np

from gdsdata.errors import IoError
from gdsdata.io import engine
from gdsdata.progress_bars import current
from gdsdata.storage.paths import joined
from gdsdata.storage.regular import REFUSED, open_without_waiting, read_at
from gdsdata.storage.urls import have_urls, is_remote

# These files are read one after another, which shows how fast the storage is. From this time a file
# on, it is slow, and more threads than cores wait for it. Files in memory take 4 to 6 us. Four
# threads read heads as fast as eight there (H200's machine, 2026-11-27).
_FILES_TRIED = 64
_SLOW_S = 200e-6
_WAITING_THREADS, _MOST_BUSY_THREADS = 16, 8
# Files of one call of the extension, in memory or on slow storage. A progress bar moves, and Ctrl-C
# takes effect, between two calls.
_FILES_AT_ONCE, _SLOW_FILES_AT_ONCE = 4096, 512

# With sizes in bytes and times of modification in ns.
_Heads = tuple[list[bytes], Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]


def read_heads(paths: Sequence[str], head_bytes: int) -> tuple[list[bytes], np.ndarray, np.ndarray]:
    """Return the first ``head_bytes`` of each file, or all of a shorter one.

    Many files are read by threads of the extension, because a folder of a hundred thousand samples
    may be indexed at every start.

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


def statuses_of(paths: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what `os.stat` returns of files: int64 (F,) each.

    Returns:
        ``st_mode``, sizes in bytes and times of modification in ns. They are 0, -1 and 0 if nothing
        can be found there.
    """
    tried = paths[:_FILES_TRIED]
    begun = time.monotonic()
    found = [engine.find_statuses(joined(tried), len(tried), 1)]
    threads, at_once = _threads_after(time.monotonic() - begun)
    for first in range(_FILES_TRIED, len(paths), at_once):
        some = paths[first : first + at_once]
        found.append(engine.find_statuses(joined(some), len(some), threads))
    modes, size_bytes, mtime_ns = map(np.concatenate, zip(*found, strict=True))
    return modes, size_bytes, mtime_ns


def _threads_after(tried_s: float) -> tuple[int, int]:
    """Return how many threads to use, and how many files at once.

    Args:
        tried_s: the time that ``_FILES_TRIED`` files took.
    """
    if tried_s > _SLOW_S * _FILES_TRIED:
        return _WAITING_THREADS, _SLOW_FILES_AT_ONCE
    return min(len(os.sched_getaffinity(0)), _MOST_BUSY_THREADS), _FILES_AT_ONCE


def _parts(paths: Sequence[str], head_bytes: int) -> Iterator[_Heads]:
    begun, tried = time.monotonic(), paths[:_FILES_TRIED]
    try:
        parts = [_heads_of(tried, head_bytes)]
    except IoError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        # The extension opens as many files at once as it can, and closes idle ones of data sets.
        parts = list(_heads_by_threads(tried, head_bytes, threads=1))
    threads, at_once = _threads_after(time.monotonic() - begun)
    yield from parts
    for first in range(_FILES_TRIED, len(paths), at_once):
        yield from _heads_by_threads(paths[first : first + at_once], head_bytes, threads)


def _heads_by_threads(paths: Sequence[str], head_bytes: int, threads: int) -> Iterator[_Heads]:
    while paths:
        failed, rows, lengths, size_bytes, mtime_ns = engine.read_heads(joined(paths), len(paths), head_bytes, threads)
        count = len(paths) if failed is None else failed
        content = rows.tobytes()
        heads = [content[i * head_bytes : i * head_bytes + lengths[i]] for i in range(count)]
        yield heads, size_bytes[:count], mtime_ns[:count]
        if failed is not None:  # once more, for the error: it may be another one by now, or none
            yield _heads_of(paths[failed : failed + 1], head_bytes)
            count += 1
        paths = paths[count:]


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
            heads.append(read_at(descriptor, head_bytes, 0))
            status = os.fstat(descriptor)
            size_bytes.append(status.st_size)
            mtime_ns.append(status.st_mtime_ns)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = REFUSED if error.errno == errno.ESPIPE else error.strerror
        is_of_open = error.filename is not None
        failed = "it cannot be opened" if is_of_open else f"reading its first {head_bytes} bytes failed"
        message = f"indexing {path}: {failed}: {reason}"
        raise IoError.caused_by(error, message, path, 0, head_bytes) from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return heads, size_bytes, mtime_ns

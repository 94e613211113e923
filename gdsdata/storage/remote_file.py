"""`RemoteFile`: an object as `opened.Opened`, by few and large ranges."""

from __future__ import annotations

import io
import os
import weakref
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from gdsdata.fork_safe import cached_property
from gdsdata.storage import objects, ranges

if TYPE_CHECKING:
    from gdsdata.io.engine import FileTable

# Read at least, because a request takes as long as 256 KiB on most networks. A walk from header to
# header reads on further and further ahead, up to 8 MiB in pieces that come side by side. All
# objects that are open share 64 MiB of that.
LEAST_BYTES = 256 * 1024
_PIECE_BYTES = 2**20
_MOST_AHEAD_BYTES = 8 * 2**20
_AHEAD_OF_ALL_BYTES = 64 * 2**20
# Stretches that are kept behind a walk, oldest first out.
_KEPT_BEHIND_BYTES = 2 * 2**20
# More than this is asked for once these bytes are there: a size that a server or a header claims
# allocates no memory until the server has sent as much.
_MOST_ASKED_BYTES = 16 * 2**20
# Short stretches this near to each other are read as one.
_GAP_BYTES = 64 * 1024

_open_files: weakref.WeakSet[RemoteFile] = weakref.WeakSet()  # they share _AHEAD_OF_ALL_BYTES


class _Stretch(NamedTuple):
    begin: int
    end: int
    content: ranges.BegunRange


class RemoteFile:
    """An object that is read at a few places, by one thread.

    It reads ahead by itself, so that a walk over a whole object takes few requests.

    Args:
        path: the URL.
        identity: the version to read; None: the one that this process knows, or the newest.

    Raises:
        FileNotFoundError: there is none.
        IoError: the store refuses.
    """

    walks_ahead = True

    def __init__(self, path: str, identity: objects.Identity | None = None) -> None:
        self.path = path
        self._identity = objects.identity_of(path) if identity is None else identity
        self.size_bytes, self.mtime_ns = self._identity.size_bytes, self._identity.version
        self._stretches: list[_Stretch] = []  # by their begins; none overlaps another
        self._ages: list[_Stretch] = []  # the same, the oldest first
        self._kept_bytes = 0
        # Where the last read ended: far from any offset before the first one.
        self._walked_to, self._ahead_bytes = -2 * LEAST_BYTES, LEAST_BYTES
        _open_files.add(self)

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *_: object) -> None:
        _open_files.discard(self)
        for stretch in self._stretches:
            stretch.content.cancel()
        self._stretches.clear()
        self._ages.clear()

    def read(self, offset: int, length: int) -> bytes:
        end = min(offset + length, self.size_bytes)
        if offset >= end:
            return b""
        if end - offset <= _MOST_ASKED_BYTES:
            return self._read(offset, end)
        return b"".join(
            self._read(begin, min(begin + _MOST_ASKED_BYTES, end)) for begin in range(offset, end, _MOST_ASKED_BYTES)
        )

    def _read(self, begin: int, end: int) -> bytes:
        self._ask_ahead(begin, end)
        return self._joined(begin, end)

    def read_if_cached(self, offset: int, length: int) -> bytes | None:
        end = min(offset + length, self.size_bytes)
        if offset >= end or self._covered_to(offset) < end:
            return None
        return self._read(offset, end)

    def read_each(self, offsets: np.ndarray, length: int) -> np.ndarray:
        found = np.zeros((len(offsets), length), np.uint8)
        order = np.argsort(offsets, kind="stable")
        begins = np.minimum(offsets[order], self.size_bytes)
        ends = np.minimum(begins + length, self.size_bytes)
        runs = _runs(begins, ends)
        stretches = [
            ranges.Range(self.path, self._identity, int(begins[first]), int(ends[last]) - int(begins[first]))
            for first, last in runs
        ]
        wanted = [one for one in stretches if one.length]
        parts = dict(zip((one.offset for one in wanted), ranges.read_many(wanted), strict=True)) if wanted else {}
        for (first, last), stretch in zip(runs, stretches, strict=True):
            if stretch.length:
                data = np.frombuffer(parts[stretch.offset], np.uint8)
                for place in range(first, last + 1):
                    begin, end = int(begins[place]) - stretch.offset, int(ends[place]) - stretch.offset
                    found[order[place], : end - begin] = data[begin:end]
        return found

    def ask_for(self, offset: int, length: int) -> None:
        self._fetch(max(0, offset), min(offset + min(length, _MOST_ASKED_BYTES), self.size_bytes))

    def has_changed(self) -> bool:
        """Return False: each range is of the version that was known first, or an error."""
        return False

    @cached_property
    def _table(self) -> FileTable:
        return ranges.table_of(self.path, self._identity)

    def _ask_ahead(self, offset: int, end: int) -> None:
        """Ask for a range, and for what a walk needs next."""
        is_walk = self._walked_to <= offset <= self._walked_to + LEAST_BYTES
        if not is_walk:
            self._ahead_bytes = LEAST_BYTES
        self._walked_to = end
        covered_to = self._covered_to(offset)
        needed_to = end if self._ahead_bytes == LEAST_BYTES else end + self._ahead_bytes // 2
        if covered_to >= min(needed_to, self.size_bytes):
            return
        if is_walk:
            most_bytes = min(_MOST_AHEAD_BYTES, max(_PIECE_BYTES, _AHEAD_OF_ALL_BYTES // max(1, len(_open_files))))
            self._ahead_bytes = min(2 * self._ahead_bytes, most_bytes)
        ahead_to = max(end, offset + self._ahead_bytes)
        if ahead_to >= self.size_bytes and covered_to == offset:  # what ends a file is read from its end on
            offset = min(offset, max(0, self.size_bytes - LEAST_BYTES))
        self._fetch(offset, min(ahead_to, self.size_bytes))

    def _fetch(self, begin: int, end: int) -> None:
        """Begin to read what is missing of a range."""
        while begin < end:
            place = bisect_right(self._stretches, begin, key=lambda one: one.begin)
            if place and self._stretches[place - 1].end > begin:
                begin = self._stretches[place - 1].end
                continue
            until = min(end, begin + _PIECE_BYTES)
            if place < len(self._stretches):
                until = min(until, self._stretches[place].begin)
            stretch = _Stretch(begin, until, ranges.BegunRange(self._table, begin, until - begin))
            self._stretches.insert(place, stretch)
            self._ages.append(stretch)
            self._kept_bytes += until - begin
            begin = until

    def _covered_to(self, offset: int) -> int:
        """Return where the bytes from ``offset`` on end that are there or asked for."""
        place = bisect_right(self._stretches, offset, key=lambda one: one.begin) - 1
        while 0 <= place < len(self._stretches):
            stretch = self._stretches[place]
            if not stretch.begin <= offset < stretch.end:
                break
            offset, place = stretch.end, place + 1
        return offset

    def _joined(self, begin: int, end: int) -> bytes:
        """Return bytes of stretches that were asked for."""
        parts = []
        while begin < end:
            self._fetch(begin, end)
            stretch = self._stretches[bisect_right(self._stretches, begin, key=lambda one: one.begin) - 1]
            data = stretch.content.result()
            parts.append(data[begin - stretch.begin : end - stretch.begin])
            begin = stretch.end
        self._drop_old()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _drop_old(self) -> None:
        """Drop stretches that a walk has passed."""
        excess_bytes = self._kept_bytes - self._ahead_bytes - _KEPT_BEHIND_BYTES
        if excess_bytes <= 0:
            return
        kept = []
        for stretch in self._ages:
            if excess_bytes > 0 and stretch.end <= self._walked_to and stretch.content.done():
                excess_bytes -= stretch.end - stretch.begin
                self._kept_bytes -= stretch.end - stretch.begin
            else:
                kept.append(stretch)
        if len(kept) < len(self._ages):
            self._ages = kept
            self._stretches = sorted(kept, key=lambda one: one.begin)


def stream_of(url: str) -> BinaryIO:
    """Open an object to read it from its begin to its end."""
    return io.BufferedReader(_Stream(RemoteFile(url)), _PIECE_BYTES)


class _Stream(io.RawIOBase):
    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size_bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.__exit__()
        super().close()


def _runs(begins: np.ndarray, ends: np.ndarray) -> list[tuple[int, int]]:
    """Return the first and the last place of each run of neighbors.

    Args:
        begins, ends: int64 (n,), ascending.
    """
    runs: list[tuple[int, int]] = []
    for place, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        if runs:
            first, last = runs[-1]
            if begin - ends[last] <= _GAP_BYTES and end - begins[first] <= _MOST_AHEAD_BYTES:
                runs[-1] = first, place
                continue
        runs.append((place, place))
    return runs

"""`HeaderReader`: reads a tar's headers out of a file, ahead of the parser.

Other projects' indexes say where they may lie. Headers are the truth: DALI's wds2idx has written
wrong offsets for pax headers (https://github.com/NVIDIA/DALI/pull/4226).

Sources of the indexes: Megatron-Energon ``itar.py``; DALI ``wds2idx.py``.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np

from gdsdata.formats.parsers.tar_members import WINDOW_BYTES
from gdsdata.storage.opened import Opened, open_file

_LARGEST_INDEX_BYTES = 2**26  # of another project's
_DALI_MEMBER_WORDS = {b"v1.1": 3, b"v1.2": 4}


class HeaderReader:
    """Reads headers from the page cache; at a miss, several of them from storage.

    From header to header alone, each would wait for the one before it: 1.1 s for a cold tar of 270
    MB in small members. Reading ahead takes 0.3 s, and reading ahead at the offsets of another
    project's index takes 0.2 s.
    """

    _SMALL_BYTES = 256 * 1024  # reading members this small is faster than waiting for each header
    _AHEAD_BYTES = 8 * 2**20
    _REQUEST_BYTES = 2**20  # the kernel cuts longer ones
    _HINTED = 1024  # headers asked for at a time
    _AROUND_BYTES = 4096  # of a hint: the headers lie in front of a payload's offset, or behind a sample's

    def __init__(self, file: Opened) -> None:
        self._file, self._size_bytes = file, file.size_bytes
        self._reads = 0
        self._asked_until = 0
        self._hints: np.ndarray | None = None

    def read(self, length: int, offset: int) -> bytes:
        """Return up to ``length`` bytes at ``offset``: see `tar_members.Read`."""
        self._reads += 1
        if length == WINDOW_BYTES and (data := self._file.read_if_cached(offset, length)) is not None:
            return data
        self._ask_ahead(offset)
        return self._file.read(offset, length)

    def _ask_ahead(self, offset: int) -> None:
        if self._hints is None:
            self._hints = _foreign_hints(self._file.path, self._size_bytes)
        if len(self._hints):
            self._ask_for_hints(self._hints, offset)
        elif not self._file.walks_ahead and offset < self._reads * self._SMALL_BYTES:
            until = min(offset + self._AHEAD_BYTES, self._size_bytes)
            for begin in range(max(offset, self._asked_until), until, self._REQUEST_BYTES):
                self._file.ask_for(begin, self._REQUEST_BYTES)
                self._asked_until = begin + self._REQUEST_BYTES

    def _ask_for_hints(self, hints: np.ndarray, offset: int) -> None:
        first, last = np.searchsorted(hints, (max(offset, self._asked_until), self._size_bytes))
        for hint in hints[first : min(last, first + self._HINTED)].tolist():
            begin = max(hint - self._AROUND_BYTES, 0)
            self._file.ask_for(begin, 2 * self._AROUND_BYTES)
            self._asked_until = hint + 1


def _foreign_hints(path: str, size_bytes: int) -> np.ndarray:
    """Return likely places of the headers of ``path``, by Energon's or DALI's index.

    int64, in bytes, ascending; empty if there is no such index.
    """
    folder, name = os.path.split(path)
    for index_path, parse in (
        (f"{path}.idx", energon_offsets),
        (os.path.join(folder, name[:1] + name[1:].split(".")[0] + ".idx"), dali_offsets),
    ):
        with contextlib.suppress(OSError), open_file(index_path) as file:
            # No index is longer than its tar; one that is longer than this is not worth its memory.
            if file.size_bytes <= min(size_bytes, _LARGEST_INDEX_BYTES):
                return np.sort(parse(file.read(0, file.size_bytes)))
    return np.empty(0, np.int64)


def energon_offsets(index: bytes) -> np.ndarray:
    """Return the offsets in Energon's ``.tar.idx``: int64, in bytes.

    They are where each sample's first header lies, then where the last one ends.
    """
    return np.frombuffer(index[: len(index) // 8 * 8], "<u8").astype(np.int64)


def dali_offsets(index: bytes) -> np.ndarray:
    """Return the offsets in DALI's index: where each payload lies, int64, in bytes.

    Empty: the index is of another kind.

    A line ``v1.2 N``, then one a sample, with extension, offset, size and name of each member;
    ``v1.1`` has no names.
    """
    version, *_ = index[:5].split(b" ")
    if version not in _DALI_MEMBER_WORDS:
        return np.empty(0, np.int64)
    words = (line.split()[1 :: _DALI_MEMBER_WORDS[version]] for line in index.splitlines()[1:])
    # A name with a blank in it shifts the words of its line: words that are no offset are left out.
    return np.array([int(word) for line in words for word in line if word.isdigit() and len(word) < 19], np.int64)

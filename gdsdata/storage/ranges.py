"""Ranges of objects, read beside the batches: headers, directories, indexes.

The engine reads them, so they are retried, checked against the object's version, and cached as the
bytes of batches are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from gdsdata.io import engine
from gdsdata.io.options import EngineOptions
from gdsdata.storage.objects import Identity

if TYPE_CHECKING:
    from gdsdata.io.engine import BegunRead, FileTable

_LOOK_S = 1.0  # how often a wait looks for signals


class Range(NamedTuple):
    """Bytes of one version of an object: at least one, and all within its size."""

    url: str
    identity: Identity
    offset: int
    length: int


class BegunRange:
    """A range that is being read.

    Args:
        table: of the object alone: see `table_of`.
        offset, length: in bytes, within its size; ``length`` is at least 1.
    """

    def __init__(self, table: FileTable, offset: int, length: int) -> None:
        self._memory = np.empty(length, np.uint8)
        self._read = _begin(table, [0], [offset], [length], self._memory)
        self._bytes: bytes | None = None

    def done(self) -> bool:
        """Return whether `result` need not wait."""
        return self._bytes is not None or self._read.ended()

    def result(self) -> bytes:
        """Wait for the bytes, as many as were asked for.

        Raises:
            CorruptData: the object was replaced.
            FileNotFoundError: it was deleted.
            IoError: any other failure, after retries.
        """
        if self._bytes is None:
            _wait(self._read)
            self._bytes, self._memory = self._memory.tobytes(), np.empty(0, np.uint8)
        return self._bytes

    def cancel(self) -> None:
        """Read no more of it, unless it has ended."""
        if self._bytes is None:
            self._read.cancel()
            self._read.abandon()


def read_many(wanted: Sequence[Range]) -> list[bytes]:
    """Read ranges, as many at a time as the network serves: see `BegunRange.result` for errors."""
    if not wanted:
        return []
    place_of: dict[str, int] = {}
    files = [place_of.setdefault(one.url, len(place_of)) for one in wanted]
    identities = {one.url: (one.identity.size_bytes, one.identity.version) for one in wanted}
    table = engine.table_of(list(place_of), [identities[url] for url in place_of], [None] * len(place_of))
    lengths = [one.length for one in wanted]
    memory = np.empty(sum(lengths), np.uint8)
    read = _begin(table, files, [one.offset for one in wanted], lengths, memory)
    try:
        _wait(read)
    except BaseException:
        read.cancel()
        read.abandon()
        raise
    ends = np.cumsum(lengths).tolist()
    return [memory[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)]


def _begin(table: FileTable, files: list[int], offsets: list[int], lengths: list[int], memory: np.ndarray) -> BegunRead:
    places = np.cumsum([0, *lengths[:-1]])
    shared = engine.kept_engine(EngineOptions(), torch.device("cpu"))
    return shared.begin_read(
        table,
        np.array(files, np.int32),
        np.array(offsets, np.int64),
        np.array(lengths, np.int64),
        memory,
        places.astype(np.int64),
        shared.mark(0),
    )


def _wait(read: BegunRead) -> None:
    while not read.wait(_LOOK_S):
        pass
    read.check()


def table_of(url: str, identity: Identity) -> FileTable:
    """Return a table of one object. It keeps the access to it for the next range."""
    return engine.table_of([url], [(identity.size_bytes, identity.version)], [None])

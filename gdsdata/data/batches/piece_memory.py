"""`PieceMemory`: memory for the pieces of a lane shuffle, which an engine reads as a file."""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress

# Whole pages are read, straight into memory, because O_DIRECT takes no less.
PAGE_BYTES = 4096

Pair = tuple["PieceMemory", "PieceMemory"]


class PieceMemory:
    """A file without a name, in memory, which an engine can read from and write into.

    Args:
        size_bytes: address space, until it is used.

    Attributes:
        taken_bytes: of its pages, at most.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._descriptor = os.memfd_create("gdsdata-pieces", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, size_bytes)
        self.mapping = mmap.mmap(self._descriptor, size_bytes)
        with suppress(OSError):
            self.mapping.madvise(mmap.MADV_HUGEPAGE)
        self.taken_bytes = 0

    def free(self, kept_bytes: int = 0) -> None:
        """Free its pages but for those of the first bytes. It can be filled anew."""
        kept_bytes = -(-kept_bytes // PAGE_BYTES) * PAGE_BYTES
        if self.taken_bytes > kept_bytes:
            with suppress(OSError):
                self.mapping.madvise(mmap.MADV_REMOVE, kept_bytes, self.size_bytes - kept_bytes)
                self.taken_bytes = kept_bytes

    @property
    def path(self) -> str:
        """As long as this object lives."""
        return f"/proc/self/fd/{self._descriptor}"


class SpareMemory:
    """Memory that an epoch leaves for the next one: new pages take longer than filling them.

    A forked child does not use its parent's.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._pairs: list[Pair] = []  # one at most

    @property
    def size_bytes(self) -> int:
        """The size of each of the two; 0: there are none."""
        return sum(first.size_bytes for first, _ in self._pairs) if self._process == os.getpid() else 0

    def take(self, size_bytes: int) -> Pair:
        """Return two memories of at least this size. Their content is arbitrary."""
        if self._process != os.getpid():
            self._process, self._pairs = os.getpid(), []
        with suppress(IndexError):
            pair = self._pairs.pop()
            if pair[0].size_bytes >= size_bytes:
                return pair
        return PieceMemory(size_bytes), PieceMemory(size_bytes)

    def leave(self, pair: Pair) -> None:
        """Keep memories that nothing reads or writes any more."""
        if self._process == os.getpid():
            self._pairs[:] = [pair]

"""`Chunks`: parts of a data set that are read whole, before their samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Local = TypeVar("Local")


class Chunks(ABC, Generic[Local]):
    """Parts of a data set that threads fetch ahead, and that samples are taken from.

    The windows of a lane shuffle, Parquet's row groups and shards that are compressed as a whole
    are chunks. They have numbers. One thread calls these methods.

    Args:
        budget_bytes: all chunks that are held may take so much; `size_bytes` says what one takes.
        threads: fetch so many chunks at a time.
        name: of these threads.
    """

    def __init__(self, budget_bytes: int, threads: int, name: str) -> None:
        self.budget_bytes, self.held_bytes = budget_bytes, 0
        self._held: dict[int, Future[Local]] = {}
        self._fetchers = ThreadPoolExecutor(threads, thread_name_prefix=name)

    @abstractmethod
    def size_bytes(self, chunk: int) -> int:
        """Return the bytes that a chunk takes when it is local."""

    @abstractmethod
    def _fetch(self, chunk: int) -> Local:
        """Make a chunk local. A thread calls it."""

    @property
    def held(self) -> Set[int]:
        """The chunks that are local, or on their way."""
        return self._held.keys()

    def get(self, chunk: int) -> Future[Local] | None:
        """Hold a chunk from now on, and return it; None if the budget has no room for it."""
        if chunk not in self._held:
            size_bytes = self.size_bytes(chunk)
            if self.held_bytes + size_bytes > self.budget_bytes:
                return None
            self.held_bytes += size_bytes
            self._held[chunk] = self._fetchers.submit(self._fetch, chunk)
        return self._held[chunk]

    def drop(self, chunks: Iterable[int]) -> None:
        """Hold these chunks no longer. A caller that has one keeps it."""
        for chunk in chunks:
            del self._held[chunk]
            self.held_bytes -= self.size_bytes(chunk)

    def stop(self) -> None:
        """Drop fetches that have not begun. Does not wait."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    def close(self, wait: bool = True) -> None:
        """Stop, and drop all chunks. ``wait``: return when no thread fetches any more."""
        self.stop()
        self._fetchers.shutdown(wait=wait)
        self.drop(list(self._held))

"""What all batches that Python begins have in common: they are begun in order, a few ahead of who takes them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from gdsdata.data.batches.skipped import Skipped, nothing_left
from gdsdata.errors import CorruptData, EngineClosed, IoError
from gdsdata.io import engine
from gdsdata.io.stalls import ReadsInFlight


class Begun(Protocol):
    """A batch on its way.

    Attributes:
        planned: columns, each with a row for a sample.
        done: bytes by route, and what else there is when all is there.
    """

    planned: Any
    done: Future[tuple[dict[str, int], Any]]


class BatchesAhead(ABC):
    """Batches that are begun in the order of their plan and taken in that order.

    Args:
        prefetch: batches in flight or ready ahead of the consumer.
        stall_timeout_s: raise `StallError` when nothing has moved for so long.
        readers: threads on which batches come.
        skipped: takes note of bad samples, which are left out; None: they are errors.
    """

    def __init__(
        self, prefetch: int, stall_timeout_s: float, readers: ThreadPoolExecutor, skipped: Skipped | None
    ) -> None:
        self._prefetch, self._stall_timeout_s = prefetch, stall_timeout_s
        self._reads = ReadsInFlight(stall_timeout_s)
        self._readers, self._skipped = readers, skipped
        self._planned: deque[Any] = deque()
        self._begun: deque[Begun] = deque()
        self._closed = False
        self._bytes = dict.fromkeys(engine.ROUTES, 0)
        self._batches = self._stalls = self._ready = 0
        self._stall_s = 0.0

    @abstractmethod
    def _begin(self, planned: Any) -> Begun:
        """Ask for a batch."""

    @abstractmethod
    def _values_of(self, begun: Begun) -> Any:
        """The batch, as its user gets it, of one that has come."""

    def _joined(self, parts: list[Begun]) -> Begun:
        """One batch of batches that have come."""
        planned = [part.planned for part in parts]
        return self._begin(type(planned[0])(*map(np.concatenate, zip(*planned, strict=True))))

    def _check(self, begun: Begun) -> None:
        """Raise what is wrong with a sample that has come."""
        self._values_of(begun)

    def next(self) -> Any:
        """The next batch, whose bytes are in place, for every stream.

        Raises:
            FileNotFoundError, IoError, CorruptData: a file is not to be had, or not as it was indexed. Where bad
                samples are skipped: nothing is left of the batch.
            StallError: nothing has moved for ``stall_timeout_s``.
            EngineClosed: these batches were closed.
        """
        if self._closed:
            raise EngineClosed("the data set's iterator was closed")
        self._begin_some()
        begun = self._begun.popleft()
        self._ready += sum(one.done.done() for one in (begun, *self._begun))
        self._wait_for(begun.done)
        self._begin_some()
        self._batches += 1
        try:
            self._arrive(begun)
            return self._values_of(begun)
        except (IoError, CorruptData):
            if self._skipped is None:
                raise
        begun = self._joined(self._without_bad(begun.planned))
        self._arrive(begun)
        return self._values_of(begun)

    def _arrive(self, begun: Begun) -> None:
        self._wait_for(begun.done)
        routes, _ = begun.done.result()
        for route, count in routes.items():
            self._bytes[route] += count

    def _without_bad(self, planned: Any) -> list[Begun]:
        """Of those samples of a batch that by themselves are sound; a stall, or a missing file, is still an error."""
        kept: list[Begun] = []
        last_error = None
        for i in range(len(planned[0])):
            try:
                alone = self._begin(type(planned)(*(column[i : i + 1] for column in planned)))
                self._arrive(alone)
                self._check(alone)
                kept.append(alone)
            except (IoError, CorruptData) as error:
                self._skipped.leave_out_sample(error)
                last_error = error
        if not kept:
            raise nothing_left(len(planned[0]), last_error)
        return kept

    def _wait_for(self, done: Future[Any]) -> None:
        if done.done():
            return
        started = time.monotonic()
        self._reads.wait_for(done, "batch", getattr(done, "progress", None))
        self._stalls += 1
        self._stall_s += time.monotonic() - started

    def _plan(self, planned: Iterable[Any]) -> None:
        self._planned.extend(planned)
        self._begin_some()

    def _begin_some(self) -> None:
        while self._planned and len(self._begun) < self._prefetch and not self._closed:
            self._begun.append(self._begin(self._planned.popleft()))

    def statistics(self) -> dict[str, Any]:
        """As `GDSDataset.stats` has them."""
        return {
            "bytes": dict(self._bytes),
            "batches": self._batches,
            "stalls": self._stalls,
            "stall_s": self._stall_s,
            "mean_ready": self._ready / self._batches if self._batches else 0.0,
            "ring_full_s": 0.0,
        }

    def stop(self) -> None:
        """Drop what has not begun, and give up what storage has not given yet. Does not wait."""
        self._closed = True
        self._planned.clear()
        for begun in list(self._begun):
            begun.done.cancel()
        self._reads.close()
        self._readers.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Returns when nothing is being read any more, but for what has stalled, which is not waited for."""
        self.stop()
        self._readers.shutdown(wait=not self._reads.has_stalled)
        self._begun.clear()

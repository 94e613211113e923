"""Readers that begin their batches from Python: in order, a few ahead of the consumer."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gdsdata.data.batches.reader import IndexT, Reader
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.errors import CorruptData, EngineClosed, IoError
from gdsdata.formats.plan import Plan
from gdsdata.io import engine
from gdsdata.io.stalls import ReadsInFlight

if TYPE_CHECKING:
    from gdsdata.data.batches.pieces import OpenPieces


class Begun(Protocol):
    """A batch on its way.

    Attributes:
        plan: of its samples.
        done: ends with the batch's bytes by route, and what the reader makes the batch of.
    """

    plan: Plan
    done: Future[tuple[dict[str, int], Any]]


class AheadReader(Reader[IndexT]):
    """Begins batches in the order of their plan, and hands them out in that order.

    Args:
        index: of the samples.
        settings: of the batches.
        readers: threads on which batches come.
        pieces: as of `Reader`.
    """

    def __init__(
        self,
        index: IndexT,
        settings: BatchSettings,
        readers: ThreadPoolExecutor,
        pieces: OpenPieces | None = None,
    ) -> None:
        super().__init__(index, pieces)
        self._prefetch, self._skipped = settings.prefetch, settings.skipped
        self._stall_timeout_s = settings.options.stall_timeout_s
        self._reads = ReadsInFlight(self._stall_timeout_s)
        self._readers = readers
        self._planned: deque[Plan] = deque()
        self._begun: deque[Any] = deque()
        self._closed = False
        self._bytes = dict.fromkeys(engine.ROUTES, 0)
        self._batches = self._stalls = self._ready = 0
        self._stall_s = 0.0

    @abstractmethod
    def _begin(self, plan: Plan) -> Any:
        """Begin to read a batch, and return its `Begun`."""

    @abstractmethod
    def _batch_of(self, begun: Any) -> Any:
        """Return the batch, as its user gets it, of one that has come."""

    @abstractmethod
    def _check(self, begun: Any) -> None:
        """Raise what is wrong with a sample that has come."""

    def _joined(self, parts: list[Any]) -> Any:
        """Return the `Begun` of one batch of several that have come."""
        return self._begin(Plan.joined([part.plan for part in parts]))

    def plan(self, samples: np.ndarray, sizes: np.ndarray) -> None:
        self._planned.extend(self.located(samples).split(sizes))
        self._begin_some()

    def next(self) -> Any:
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
            return self._batch_of(begun)
        except (IoError, CorruptData):
            if self._skipped is None:
                raise
        begun = self._joined(self._skipped.sound(len(begun.plan.samples), self._alone(begun.plan)))
        self._arrive(begun)
        return self._batch_of(begun)

    def _alone(self, plan: Plan) -> Callable[[int], Any]:
        """Return what reads one of a batch's samples by itself, and raises what is wrong with it."""
        plans = plan.split([1] * len(plan.samples))

        def read(i: int) -> Any:
            begun = self._begin(plans[i])
            self._arrive(begun)
            self._check(begun)
            return begun

        return read

    def _arrive(self, begun: Any) -> None:
        self._wait_for(begun.done)
        routes, _ = begun.done.result()
        for route, count in routes.items():
            self._bytes[route] += count

    def _wait_for(self, done: Future[Any]) -> None:
        if done.done():
            return
        started = time.monotonic()
        self._reads.wait_for(done, "batch", getattr(done, "progress", None))
        self._stalls += 1
        self._stall_s += time.monotonic() - started

    def _begin_some(self) -> None:
        while self._planned and len(self._begun) < self._prefetch and not self._closed:
            self._begun.append(self._begin(self._planned.popleft()))

    def statistics(self) -> dict[str, Any]:
        return {
            "bytes": dict(self._bytes),
            "batches": self._batches,
            "stalls": self._stalls,
            "stall_s": self._stall_s,
            "mean_ready": self._ready / self._batches if self._batches else 0.0,
            "ring_full_s": 0.0,
        }

    def stop(self) -> None:
        """Drop what has not begun, and give up reads that storage has not answered. Does not wait."""
        self._closed = True
        self._planned.clear()
        for begun in list(self._begun):
            begun.done.cancel()
        self._reads.close()
        self._readers.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        self.stop()
        self._readers.shutdown(wait=not self._reads.has_stalled)
        self._begun.clear()
        super().close()

"""Readers that begin batches from Python: in order, a few ahead of the consumer."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from gdsdata.data.batches.reader import IndexT, Reader
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.errors import ITERATOR_CLOSED, CorruptData, EngineClosed, IoError
from gdsdata.formats.plan import Plan
from gdsdata.io import engine
from gdsdata.io.stalls import Awaited, ReadsInFlight

if TYPE_CHECKING:
    from gdsdata.data.batches.pieces import OpenPieces


class Coming(Awaited, Protocol):
    """Reads of a batch: a `Future`, or an object that behaves like one."""

    def result(self) -> tuple[dict[str, int], Any]:
        """Return bytes by route, and the values of which the reader makes the batch."""

    def cancel(self) -> object:
        """Give the reads up, if they have not ended."""


class Begun(Protocol):
    """A batch on its way."""

    @property
    def plan(self) -> Plan:
        """The plan of its samples."""

    @property
    def done(self) -> Coming:
        """Its reads."""


BegunT = TypeVar("BegunT", bound=Begun)


class AheadReader(Reader[IndexT], Generic[IndexT, BegunT]):
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
        self._begun: deque[BegunT] = deque()
        self._beginning = threading.Lock()  # held while batches begin: `plan` and `next` may be of two threads
        self._closed = False
        self._bytes = dict.fromkeys(engine.ROUTES, 0)
        self._batches = self._stalls = self._ready = 0
        self._stall_s = 0.0

    @abstractmethod
    def _begin(self, plan: Plan) -> BegunT:
        """Begin to read a batch."""

    @abstractmethod
    def _batch_of(self, begun: BegunT) -> Any:
        """Return the batch, as its user gets it, of one that has come."""

    @abstractmethod
    def _check(self, begun: BegunT) -> None:
        """Raise what is wrong with a sample that has come."""

    def _joined(self, parts: list[BegunT]) -> BegunT:
        """Return one batch of the samples of several that have come."""
        return self._begin(Plan.joined([part.plan for part in parts]))

    def plan(self, samples: np.ndarray, sizes: np.ndarray, steps: np.ndarray) -> None:
        self._planned.extend(self.located(samples, sizes, steps).split(sizes))
        self._begin_some()

    def next(self) -> Any:
        if self._closed:
            raise EngineClosed(ITERATOR_CLOSED)
        self._begin_some()
        if not self._begun:  # `stop` was called meanwhile
            raise EngineClosed(ITERATOR_CLOSED)
        begun = self._begun[0]
        self._ready += sum(one.done.done() for one in list(self._begun))
        self._wait_for(begun.done)
        self._begun.popleft()
        self._begin_some()
        self._batches += 1
        plan = begun.plan
        try:
            self._arrive(begun)
            return self._batch_of(begun)
        except (IoError, CorruptData):
            if self._skipped is None:
                raise
        finally:
            del begun  # see `_arrive`
        begun = self._joined(self._skipped.sound(len(plan.samples), self._alone(plan)))
        self._arrive(begun)
        return self._batch_of(begun)

    def _alone(self, plan: Plan) -> Callable[[int], BegunT]:
        """Return a function that reads one sample of a batch, and raises its error."""
        plans = plan.split([1] * len(plan.samples))

        def read(i: int) -> BegunT:
            with self._beginning:
                begun = self._begin(plans[i])
            try:
                self._arrive(begun)
                self._check(begun)
                return begun
            finally:
                del begun  # see `_arrive`

        return read

    def _arrive(self, begun: BegunT) -> None:
        """Wait for a batch, and count its bytes.

        A future keeps its error, whose traceback keeps the frames that it passed. If one of them
        has the future, it keeps the data set and its files until garbage is collected.
        """
        try:
            self._wait_for(begun.done)
            routes, _ = begun.done.result()
        finally:
            del begun
        for route, count in routes.items():
            self._bytes[route] += count

    def _wait_for(self, done: Coming) -> None:
        if done.done():
            return
        started = time.monotonic()
        self._reads.wait_for(done, "batch", getattr(done, "progress", None))
        self._stalls += 1
        self._stall_s += time.monotonic() - started

    def _begin_some(self) -> None:
        with self._beginning:
            while self._planned and len(self._begun) < self._prefetch and not self._closed:
                self._begun.append(self._begin(self._planned.popleft()))

    def statistics(self) -> dict[str, Any]:
        begun = list(self._begun)
        ready = sum(one.done.done() for one in begun)
        return {
            "bytes": dict(self._bytes),
            "batches": self._batches,
            "stalls": self._stalls,
            "stall_s": self._stall_s,
            "mean_ready": self._ready / self._batches if self._batches else 0.0,
            "ring_full_s": 0.0,
            "ready": ready,
            "filling": len(begun) - ready,
        }

    def stop(self) -> None:
        """Drop batches that have not begun, and give up reads under way. Does not wait."""
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

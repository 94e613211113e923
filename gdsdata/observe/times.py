"""Times of a training loop and of the engine's workers, for `observe.report`."""

from __future__ import annotations

import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch

from gdsdata import torch_private

T = TypeVar("T")

is_profiling = torch_private.is_profiling


class StepTimes:
    """A loop's time, as its iterator measures it in the thread that takes batches.

    Attributes:
        batches: how many were handed out.
        input_s: time in which the loop waited for a batch, ``transform=`` included.
        first_s: the part of ``input_s`` in which it waited for the first batch of an epoch.
        transform_s: the part of ``input_s`` in ``transform=``.
        training_s: time from a batch to the next request for one.
        checkpoint_s: the part of ``training_s`` in which saves blocked this process
            (`note_checkpoint_stall`).
    """

    def __init__(
        self,
        batches: int = 0,
        input_s: float = 0.0,
        transform_s: float = 0.0,
        training_s: float = 0.0,
        checkpoint_s: float = 0.0,
        first_s: float = 0.0,
    ) -> None:
        self.batches, self.input_s, self.transform_s = batches, input_s, transform_s
        self.training_s, self.checkpoint_s, self.first_s = training_s, checkpoint_s, first_s
        self._asked_at = self._stalled_before = 0.0
        self._is_first = False

    @property
    def elapsed_s(self) -> float:
        return self.input_s + self.training_s

    def asked(self) -> None:
        """Note that the first batch of an epoch is requested."""
        self._asked_at, self._is_first = time.perf_counter(), True

    def transformed(self, transform: Callable[[Any], T], batch: Any) -> T:
        began = time.perf_counter()
        try:
            return transform(batch)
        finally:
            self.transform_s += time.perf_counter() - began

    def handed_out(self) -> None:
        now = time.perf_counter()
        self.batches += 1
        self.input_s += now - self._asked_at
        self.first_s += now - self._asked_at if self._is_first else 0.0
        self._is_first = False
        self._asked_at, self._stalled_before = now, _checkpoints.stall_s

    def trained(self) -> None:
        """Note that the loop has used its batch and requests the next one."""
        now = time.perf_counter()
        self.training_s += now - self._asked_at
        self.checkpoint_s += _checkpoints.stall_s - self._stalled_before
        self._asked_at = now


class _Checkpoints:
    """The time in which saves blocked this process's threads."""

    def __init__(self) -> None:
        self.stall_s = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self.stall_s += seconds


_checkpoints = _Checkpoints()


def note_checkpoint_stall(seconds: float) -> None:
    """Note that a save blocked its caller for so long."""
    _checkpoints.add(seconds)


class WorkerTimes(NamedTuple):
    """The times of an engine's workers, summed over all of them.

    Attributes:
        active_s: time in which they worked.
        storage_s: the part of it in which they read, or waited for storage.
        link_s: the part in which they waited for copies to the GPU.
        device_s: the part in which they waited until the GPU had used batches whose memory is next.
            The rest is the processor's: copies out of the page cache, conversions.
        requests, storage_bytes: of storage.
    """

    active_s: float = 0.0
    storage_s: float = 0.0
    link_s: float = 0.0
    device_s: float = 0.0
    requests: int = 0
    storage_bytes: int = 0

    @classmethod
    def of(cls, engine_stats: Mapping[str, Any]) -> WorkerTimes:
        """Return the times in ``stats()["engine"]``, since the engine was made."""
        return cls(
            active_s=engine_stats["worker_active_s"],
            storage_s=engine_stats["worker_storage_s"],
            link_s=engine_stats["worker_link_s"],
            device_s=engine_stats["worker_device_s"],
            requests=engine_stats["requests"],
            storage_bytes=engine_stats["storage_bytes"],
        )

    def plus(self, other: WorkerTimes) -> WorkerTimes:
        return WorkerTimes(*map(operator.add, self, other))

    def minus(self, other: WorkerTimes) -> WorkerTimes:
        return WorkerTimes(*map(operator.sub, self, other))


class NetworkUse(NamedTuple):
    """The requests of this process to servers, and what a data set waited for.

    Attributes:
        requests: for ranges of objects, with all that follow.
        retries: requests that were sent again, because they failed.
        throttled: responses of servers that have too many requests (429, 503).
        hedges: requests that were sent twice, because the first was slow.
        bytes: that came from servers.
        other_bytes: that it read from disks, a local cache included.
        pieces_s: time in which its loop waited for pieces of a lane shuffle.
    """

    requests: int = 0
    retries: int = 0
    throttled: int = 0
    hedges: int = 0
    bytes: int = 0
    other_bytes: int = 0
    pieces_s: float = 0.0

    @classmethod
    def of(cls, http_statistics: Mapping[str, int]) -> NetworkUse:
        """Return the requests of this process's client so far."""
        return cls(*(http_statistics[name] for name in ("requests", "retries", "throttled", "hedges", "bytes")))

    def plus(self, other: NetworkUse) -> NetworkUse:
        return NetworkUse(*map(operator.add, self, other))

    def minus(self, other: NetworkUse) -> NetworkUse:
        """Return the difference; 0 of counts that a new client has begun anew."""
        difference: list[Any] = [max(0, now - before) for now, before in zip(self, other, strict=True)]
        return NetworkUse(*difference)


def marked(what: str) -> AbstractContextManager[Any]:
    """Mark a range in torch.profiler's trace, or in NVTX's under ``emit_nvtx``.

    Ask `is_profiling` before, because few steps are profiled.
    """
    return torch.profiler.record_function(what)


class Reporter:
    """Prints reports at intervals and after each epoch; not in worker processes.

    Its owner gives the function that makes a report at each call: kept here, it would keep the
    owner, and its files, until garbage is collected.

    Args:
        every_s: the interval. None: never print.
    """

    def __init__(self, every_s: float | None) -> None:
        self._every_s, self._process = every_s, os.getpid()
        self._next = time.monotonic() + (every_s or 0.0)

    @property
    def is_on(self) -> bool:
        return self._every_s is not None

    def handed_out(self, report: Callable[[], object]) -> None:
        if self._every_s is not None and time.monotonic() >= self._next:
            self._print(report)

    def epoch_ended(self, report: Callable[[], object]) -> None:
        if self._every_s is not None:
            self._print(report)

    def _print(self, report: Callable[[], object]) -> None:
        if os.getpid() != self._process:
            return
        print(report(), file=sys.stderr, flush=True)
        self._next = time.monotonic() + (self._every_s or 0.0)

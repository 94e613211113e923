"""Times of a training loop, for `observe.report`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

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
        result = transform(batch)
        # Not after an error: then no batch is handed out, and ``input_s`` lacks this time too.
        self.transform_s += time.perf_counter() - began
        return result

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

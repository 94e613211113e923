"""Waits for storage. Slow storage is waited for; `StallError` if nothing moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as NotYet
from typing import Any, Protocol

from gdsdata.errors import ITERATOR_CLOSED, EngineClosed, StallError

# A wait checks progress after a quarter of the timeout, and at least this often.
_LONGEST_LOOK_S = 0.25


class Awaited(Protocol):
    """An object that can be waited for: a `Future`, or one that behaves like it."""

    def done(self) -> bool: ...

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; raise `concurrent.futures.TimeoutError` if it takes longer."""


class ReadsInFlight:
    """The reads that one iterator's threads wait for, and the waits for these threads.

    Time counts towards the timeout while the engine has a read and no read makes progress. Progress
    is a request taken or completed, or a segment ended. Time in which threads decode or wait for
    each other does not count. Thread-safe.

    Args:
        stall_timeout_s: `EngineOptions.stall_timeout_s`.

    Attributes:
        has_stalled: `wait_for` has raised `StallError`. Threads then abandon their reads.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self.has_stalled = self._is_closed = False
        self._timeout_s = stall_timeout_s
        self._look_s = min(stall_timeout_s / 4, _LONGEST_LOOK_S)
        self._changing = threading.Lock()
        self._reads: set[Any] = set()
        self._ended = 0

    def routes_of(self, reads: Sequence[Any]) -> list[dict[str, int]]:
        """Wait for begun reads; return the bytes of each by route.

        Raises:
            StallError, EngineClosed: the iterator has stalled or was closed meanwhile. The reads'
                memory is then kept until they end.
            IoError, CorruptData, FileNotFoundError, DeviceError: of the first read that failed.
        """
        with self._changing:
            self._reads.update(reads)
        try:
            for read in reads:
                while not read.wait(_LONGEST_LOOK_S):
                    if self.has_stalled or self._is_closed:
                        self._give_up(reads)
        finally:
            with self._changing:
                self._reads.difference_update(reads)
                self._ended += len(reads)
        return [read.routes() for read in reads]

    def _give_up(self, reads: Sequence[Any]) -> None:
        for read in reads:
            read.cancel()
        for read in reads:
            read.abandon()
        if self.has_stalled:
            raise StallError(f"a read was given up: nothing had been read for {self._timeout_s} s")
        raise EngineClosed(ITERATOR_CLOSED)

    def close(self) -> None:
        """Have threads abandon the reads that they wait for."""
        self._is_closed = True

    def progress(self) -> Hashable:
        """Return a value that changes if a read makes progress; None without reads."""
        with self._changing:
            reads, ended = list(self._reads), self._ended
        return (ended, *sorted(read.progress() for read in reads)) if reads else None

    def wait_for(self, done: Awaited, what: str, progress: Callable[[], Hashable] | None = None) -> None:
        """Return when ``done`` has ended.

        Args:
            done: is waited for.
            what: names it in the error.
            progress: of what ``done`` waits for, as the method `progress`; None: that method.

        Raises:
            StallError: nothing has moved for ``stall_timeout_s``.
            EngineClosed: ``done`` was canceled.
        """
        progress = progress or self.progress
        before, moved_at = None, time.monotonic()
        while not done.done():
            try:
                done.exception(self._look_s)
            except CancelledError:
                raise EngineClosed(ITERATOR_CLOSED) from None
            except NotYet:
                now, found = time.monotonic(), progress()
                if found is None or found != before:
                    before, moved_at = found, now
                elif now - moved_at >= self._timeout_s:
                    self.has_stalled = True
                    raise self._stall(what) from None

    def _stall(self, what: str) -> StallError:
        return StallError(
            f"no {what} for {self._timeout_s} s: nothing has been read in that time. Is the storage still reachable? "
            "stall_timeout_s raises the limit"
        )

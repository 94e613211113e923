"""Waits for storage: one that is slow is waited for, and one that gives nothing is a `StallError`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as NotYet
from typing import Any, Protocol

from gdsdata.errors import EngineClosed, StallError

# A wait looks at the progress so often: at a quarter of the timeout, or this.
_LONGEST_LOOK_S = 0.25
_CLOSED = "the data set's iterator was closed"


class Awaited(Protocol):
    """What a wait ends with: a `Future`, or what behaves like one."""

    def done(self) -> bool: ...

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for its end; raise `concurrent.futures.TimeoutError` if that takes longer."""


class ReadsInFlight:
    """Reads that the threads of one iterator wait for, and the wait for what they make of them.

    Only time in which the engine has a read and none makes progress (a request taken or completed,
    a segment ended) counts towards the timeout: not time in which threads decode, or wait for each
    other. Thread-safe.

    Args:
        stall_timeout_s: `EngineOptions.stall_timeout_s`.

    Attributes:
        has_stalled: `wait_for` has raised; then threads give up the reads that they wait for.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self.has_stalled = self._is_closed = False
        self._timeout_s = stall_timeout_s
        self._look_s = min(stall_timeout_s / 4, _LONGEST_LOOK_S)
        self._changing = threading.Lock()
        self._reads: set[Any] = set()
        self._ended = 0

    def routes_of(self, reads: Sequence[Any]) -> list[dict[str, int]]:
        """Wait for begun reads; the bytes of each by route.

        Raises:
            StallError, EngineClosed: the iterator was told of a stall meanwhile, or closed. Their
                memory is then kept until they end.
            IoError, CorruptData, FileNotFoundError, DeviceError: of the first one that failed.
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
            read.let_go()
        if self.has_stalled:
            raise StallError(f"a read was given up: nothing had been read for {self._timeout_s} s")
        raise EngineClosed(_CLOSED)

    def close(self) -> None:
        """Nobody wants the reads any more: threads give up those that they wait for."""
        self._is_closed = True

    def progress(self) -> Hashable:
        """Equal to what it was before if nothing has moved since; None while there is nothing to be
        moved.
        """
        with self._changing:
            reads, ended = list(self._reads), self._ended
        return (ended, *sorted(read.progress() for read in reads)) if reads else None

    def wait_for(self, done: Awaited, what: str, progress: Callable[[], Hashable] | None = None) -> None:
        """Return when ``done`` is.

        Args:
            what: it is, for the error.
            progress: of what it waits for, as `progress`, which it is if this is None.

        Raises:
            StallError: nothing has moved for ``stall_timeout_s``.
            EngineClosed: it was canceled.
        """
        progress = progress or self.progress
        before, moved_at = None, time.monotonic()
        while not done.done():
            try:
                done.exception(self._look_s)
            except CancelledError:
                raise EngineClosed(_CLOSED) from None
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

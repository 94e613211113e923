"""`ScheduledReads`: what one rank reads of a schedule, ahead of the agreements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from types import TracebackType
from typing import Protocol

import numpy as np
import torch

from gdsdata.collective.agreement import Session
from gdsdata.collective.plan import Parts, Schedule

# 8 GiB to two H200, in turns: 99 ms with two, 101 with three, 102 with four, 147 with one. Two
# ranks on two cores, 24 and 256 MB, cold: no difference between two and four.
_READS_AT_A_TIME = 2
_PRIVATE_BYTES = 256 << 20  # of one call of the engine


class Reader(Protocol):
    """Reads extents of one rank into its memory, and knows that memory."""

    def read(self, parts: Parts) -> None:
        """Read parts of extents. Any thread may call it, also several at a time."""

    def memories(self, parts: Parts) -> list[torch.Tensor]:
        """Return the memory of each part: uint8, one dimension."""


class NoReader:
    """That of a rank that wants nothing."""

    def read(self, parts: Parts) -> None: ...

    def memories(self, parts: Parts) -> list[torch.Tensor]:
        raise AssertionError("this rank wants nothing")


class ScheduledReads:
    """The reads of one rank for a schedule. Leaving the block waits for those that have begun.

    Args:
        session: in progress.
        schedule: of this rank.
        reader: makes the reads, on threads of this object.

    Attributes:
        schedule: as above.
    """

    def __init__(self, session: Session, schedule: Schedule, reader: Reader) -> None:
        self.schedule = schedule
        self._session, self._reader = session, reader
        self._pieces = {piece.round: piece.parts for piece in schedule.pieces if piece.reader == session.rank}
        self._private = list(_batches(schedule.private))
        self._threads = ThreadPoolExecutor(_READS_AT_A_TIME, thread_name_prefix="gdsdata-read")
        self._of_rounds: dict[int, Future[None]] = {}
        self._alone: list[Future[None]] = []

    def __enter__(self) -> ScheduledReads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def begin_first(self) -> None:
        """Begin to read the piece of the first round."""
        if 0 in self._pieces:
            self._of_rounds[0] = self._begun(self._pieces.pop(0))

    def begin(self) -> None:
        """Begin to read all that is left, round after round."""
        self._of_rounds |= {number: self._begun(parts) for number, parts in self._pieces.items()}
        self._pieces = {}
        self._alone += map(self._begun, self._private)
        self._private = []

    def drop(self) -> None:
        """Begin no more reads, and wait for those that have begun, whatever becomes of them.

        None may write into memory that gets the bytes of another rank.
        """
        for read in [read for read in (*self._of_rounds.values(), *self._alone) if not read.cancel()]:
            self._wait_for(read)

    def wait_for_round(self, number: int) -> None:
        """Wait until the piece of a round has been read. Raises as the reader does."""
        if number in self._of_rounds:
            read = self._of_rounds.pop(number)
            self._wait_for(read)
            read.result()

    def wait_for_private(self) -> None:
        """Wait for what this rank alone reads. Raises as the reader does."""
        for read in self._alone:
            self._wait_for(read)
            read.result()

    def _begun(self, parts: Parts) -> Future[None]:
        return self._threads.submit(self._reader.read, parts)

    def _wait_for(self, read: Future[None]) -> None:
        def is_done(seconds: float) -> bool:
            with contextlib.suppress(NotDone):
                read.exception(seconds)
            return read.done()

        self._session.wait(is_done)


def _batches(parts: Parts) -> Iterator[Parts]:
    """Yield parts in batches of about `_PRIVATE_BYTES`."""
    if len(parts.size) == 0:
        return
    number = (np.cumsum(parts.size) - parts.size) // _PRIVATE_BYTES
    for its in np.split(np.arange(len(number)), np.flatnonzero(np.diff(number)) + 1):
        yield Parts(*(column[its] for column in parts))

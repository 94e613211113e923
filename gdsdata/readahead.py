"""`Readahead`: brings the pieces of a lane shuffle into the page cache, in large reads, before samples are needed."""

from __future__ import annotations

import math
import os
import threading
from contextlib import suppress
from queue import SimpleQueue

from gdsdata.formats.fields import FieldIndex
from gdsdata.formats.index import Index
from gdsdata.formats.megatron import WindowIndex
from gdsdata.lanes import LanePermutation

# What one call may ask for: the kernel cuts it, in silence, to the device's own read-ahead, which is seldom less. On a
# virtual disk 1 MiB pieces came at 1.2 GiB/s whether asked for by 128 KiB or by 1 MiB.
_STEP_BYTES = 2**17
_STEPS_A_WINDOW = 64


class Readahead:
    """Asks the kernel for an epoch's pieces, in the order of their first use, at the pace of the consumer.

    While a window is consumed the next one is asked for, so that up to two windows of the lanes are in the page cache.
    What is not there in time, or does not fit, is read sample by sample: slower, and never wrong.

    Args:
        index: of the samples. Each piece is one read, or one a file where it lies in several.
        permutation: the epoch.
        lanes: those that this process reads.

    Attributes:
        bytes: asked for so far; they count where they are in memory already, too.
    """

    def __init__(self, index: Index | FieldIndex | WindowIndex, permutation: LanePermutation, lanes: range) -> None:
        self._index, self._permutation, self._lanes = index, permutation, lanes
        self.bytes = 0
        self._reached = -1.0  # windows, and the share of the next one
        self._wanted: SimpleQueue[float | None] = SimpleQueue()
        self._closed = False
        threading.Thread(target=self._run, name="gdsdata-readahead", daemon=True).start()

    def reach(self, step: int) -> None:
        """Say that ``step`` of the epoch is about to be read; the thread does the rest."""
        window, share = self._permutation.window_of(step)
        if window + share >= self._reached + 1 / _STEPS_A_WINDOW:
            self._reached = window + share
            self._wanted.put(self._reached)

    def close(self) -> None:
        """End the thread behind the read that it is at."""
        self._closed = True
        self._wanted.put(None)

    def _run(self) -> None:
        window: int | None = None  # the one that is asked for; those before it have been
        for reached in iter(self._wanted.get, None):
            if window is None:
                window, asked, pieces = int(reached), 0, self._pieces(int(reached))
            while pieces:
                share = min(1.0, max(0.0, reached + 1 - window))  # all of the one reached, a share of the one behind it
                end = math.ceil(share * len(pieces))
                for piece in pieces[asked:end]:
                    if self._closed:
                        return
                    self._ask(*piece)
                asked = max(asked, end)
                if asked < len(pieces):
                    break
                window, asked, pieces = window + 1, 0, self._pieces(window + 1)

    def _pieces(self, window: int) -> list[tuple[int, int]]:
        """First id and samples of each piece of a window; none behind the last one."""
        if window >= self._permutation.windows:
            return []
        first, count = self._permutation.reads(self._lanes, window)
        return list(zip(first.tolist(), count.tolist(), strict=True))

    def _ask(self, first: int, count: int) -> None:
        for path, offset, size_bytes in self._index.runs(first, count):
            # A file that cannot be opened is the engine's to report, at its batch.
            with suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    for begin in range(offset, offset + size_bytes, _STEP_BYTES):
                        step_bytes = min(_STEP_BYTES, offset + size_bytes - begin)
                        os.posix_fadvise(descriptor, begin, step_bytes, os.POSIX_FADV_WILLNEED)
                        self.bytes += step_bytes
                finally:
                    os.close(descriptor)

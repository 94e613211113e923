"""`OpenPieces`: the pieces that a lane shuffle has open, read into memory, in large requests, ahead of the samples."""

from __future__ import annotations

import bisect
import dataclasses
import mmap
import os
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from gdsdata import engine
from gdsdata.errors import GdsdataError
from gdsdata.formats.fields import FieldIndex
from gdsdata.formats.index import Index
from gdsdata.formats.megatron import WindowIndex
from gdsdata.lanes import LanePermutation
from gdsdata.options import MIB, EngineOptions
from gdsdata.program_end import stop_at_exit
from gdsdata.stalls import ReadsInFlight

# Bytes of one call of the engine, and how many calls are under way: the storage has something to do between them.
_CALL_BYTES = 32 * MIB
_CALLS = 2
_WORKERS = 2
# Whole pages are read, straight into memory, for O_DIRECT takes no less.
_PAGE_BYTES = 4096
# Of what windows have on the average: the room of one whose samples are larger. It is address space until it is used.
_ROOM = 4


class _Window(NamedTuple):
    """The R runs of bytes that make up a window's pieces: int64 (R,) each, in the order of ``begin``.

    ``begin`` and ``end`` are places on the line of all files, one behind the other.
    """

    begin: np.ndarray
    end: np.ndarray
    memory_begin: np.ndarray  # of the byte at ``begin``
    is_read: np.ndarray  # bool (R,)


class _Memory:
    """A file without a name, in memory, which an engine can read from and write into."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._descriptor = os.memfd_create("gdsdata-pieces", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, size_bytes)
        self._mapping = mmap.mmap(self._descriptor, size_bytes)
        with suppress(OSError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.address = np.frombuffer(self._mapping, np.uint8).ctypes.data

    @property
    def path(self) -> str:
        """As long as this object lives."""
        return f"/proc/self/fd/{self._descriptor}"


class OpenPieces:
    """An epoch's pieces in memory, each read once, a window ahead of the consumer.

    The window that samples come from and the next one are in memory, no more: the even ones in one file in memory and
    the odd ones in another. `extents` says where samples lie there, so whoever makes batches of extents, for the CPU or
    a GPU, copies them from there. What could not be read stays where it is: who reads it there learns what is wrong.

    Args:
        index: of the samples.
        permutation: the epoch.
        lanes: those that this process reads.
        options: of the engine that reads pieces, which is one of the CPU. Pieces that are in the page cache are copied.
        stall_timeout_s: raise `StallError` when nothing has moved for so long.

    Attributes:
        files: the index's and those in memory, for who reads what `extents` says.
    """

    def __init__(
        self,
        index: Index | FieldIndex | WindowIndex,
        permutation: LanePermutation,
        lanes: range,
        options: EngineOptions,
        stall_timeout_s: float,
    ) -> None:
        self._index, self._permutation, self._lanes = index, permutation, lanes
        self._reads = ReadsInFlight(stall_timeout_s)
        self._engine = engine.shared_engine(
            dataclasses.replace(options, workers=options.workers or _WORKERS), torch.device("cpu")
        )
        self._file_begin = np.cumsum([0, *index.size_bytes])
        total_bytes = int(self._file_begin[-1])
        window_bytes = permutation.most_window_samples(lanes) * index.spacing_bytes
        room_bytes = 64 * MIB + _ROOM * min(total_bytes, window_bytes)
        self._memories = (_Memory(room_bytes), _Memory(room_bytes))
        self._sources = engine.file_table(index)
        self.files = engine.file_table(index, {memory.path: room_bytes for memory in self._memories})
        self._windows: dict[int, Future[_Window]] = {}
        self._openers = ThreadPoolExecutor(2, thread_name_prefix="gdsdata-pieces")
        self._readers = ThreadPoolExecutor(_CALLS, thread_name_prefix="gdsdata-pieces")
        self._counting = threading.Lock()
        self._bytes, self._memory_bytes = dict.fromkeys(engine.ROUTES, 0), [0, 0]
        self._closed = False
        stop_at_exit(self)

    @property
    def bytes(self) -> Mapping[str, int]:
        """Read so far, by the route that served them."""
        return dict(self._bytes)

    @property
    def memory_bytes(self) -> int:
        """That windows have taken so far."""
        return sum(self._memory_bytes)

    def reach(self, step: int) -> None:
        """Say that ``step`` of the epoch is the next to be handed out: what only those before it needed may go."""
        window = self._permutation.window_of(step)
        for passed in [one for one in self._windows if one < window]:
            del self._windows[passed]
        for due in range(window, min(window + 2, self._permutation.windows)):
            if due not in self._windows:
                self._windows[due] = self._openers.submit(self._open, due)

    def steps_in_memory(self, steps: range | np.ndarray) -> int:
        """How many of these steps, from the first on (they ascend), need not be waited for."""
        there = None
        for window, opened in sorted(self._windows.items()):
            if not opened.done():
                break
            there = window
        return 0 if there is None else bisect.bisect_left(steps, self._permutation.steps_within(there))

    def extents(self, samples: np.ndarray) -> tuple[np.ndarray, ...]:
        """What the index's ``extents`` says, but in memory where they are there. Waits for the windows of `reach`.

        Args:
            samples: int64 (m,), of steps of the windows that `reach` has come to.

        Raises:
            StallError: nothing has moved for ``stall_timeout_s``.
        """
        file, begin_bytes, *more = self._index.extents(samples)
        length_bytes = more[0] if more else np.int64(self._index.sample.bytes)
        on_line = self._file_begin[file].reshape(-1, *[1] * (begin_bytes.ndim - 1)) + begin_bytes
        file, begin_bytes = file.copy(), begin_bytes.copy()
        unknown = np.ones(len(file), bool)
        # The later window first: what two of them have is there as long as a sample of either can be asked for.
        for number, opened in sorted(self._windows.items(), reverse=True):
            window = self._wait_for(opened)
            if not len(window.begin):
                continue
            run = np.searchsorted(window.begin, on_line, side="right") - 1
            inside = (run >= 0) & (on_line + length_bytes <= window.end[run])
            is_read = window.is_read[run]
            if inside.ndim == 2:  # fields: all that a sample has, or none
                inside, is_read = ((part | (length_bytes <= 0)).all(axis=1) for part in (inside, is_read))
            inside &= unknown
            unknown &= ~inside
            inside &= is_read
            run = run[inside]
            begin_bytes[inside] = window.memory_begin[run] + on_line[inside] - window.begin[run]
            file[inside] = len(self._index.paths) + number % 2
        return file, begin_bytes, *more

    def stop(self) -> None:
        """Drop what has not begun, and give up what storage has not given yet. Does not wait."""
        self._closed = True
        for threads in (self._openers, self._readers):
            threads.shutdown(wait=False, cancel_futures=True)
        self._reads.close()

    def close(self) -> None:
        """Returns when nothing is being read any more, but for what has stalled, which is not waited for."""
        self.stop()
        for threads in (self._openers, self._readers):
            threads.shutdown(wait=not self._reads.has_stalled)
        self._windows.clear()

    def _wait_for(self, opened: Future[_Window]) -> _Window:
        self._reads.wait_for(opened, "pieces")
        return opened.result()

    def _open(self, number: int) -> _Window:
        """Read a window, in the order of first use."""
        file, begin_bytes, length_bytes = self._runs(number)
        first_page = begin_bytes // _PAGE_BYTES * _PAGE_BYTES
        end = np.minimum(-(-(begin_bytes + length_bytes) // _PAGE_BYTES) * _PAGE_BYTES, self._index.size_bytes[file])
        room_bytes = -(-(end - first_page) // _PAGE_BYTES) * _PAGE_BYTES
        place = np.cumsum(room_bytes) - room_bytes
        memory = self._memories[number % 2]
        is_read = np.zeros(len(file), bool)
        calls, fits = [], int(np.searchsorted(place + room_bytes, memory.size_bytes, side="right"))
        taken_bytes = int(room_bytes[:fits].sum())
        self._memory_bytes[number % 2] = max(self._memory_bytes[number % 2], taken_bytes)
        starts = np.flatnonzero(np.diff(place[:fits] // _CALL_BYTES, prepend=-1))
        for runs in map(slice, starts, [*starts[1:], fits]):
            lengths = (end - first_page)[runs]
            call = self._readers.submit(self._read, memory, file[runs], first_page[runs], lengths, place[runs])
            calls.append((runs, call))
        for runs, call in calls:
            is_read[runs] = call.result()
        on_line = self._file_begin[file] + begin_bytes
        order = np.argsort(on_line, kind="stable")
        window = (on_line, on_line + length_bytes, place + begin_bytes - first_page, is_read)
        return _Window(*(part[order] for part in window))

    def _runs(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """File, offset and length in bytes of what makes up a window; what follows or overlaps is one."""
        first, count = self._permutation.reads(self._lanes, number)
        runs = []
        for samples in zip(first.tolist(), count.tolist(), strict=True):
            if self._closed:
                break
            runs += self._index.runs(*samples)
        file, begin_bytes, length_bytes = np.array(runs, np.int64).reshape(-1, 3).T
        end = begin_bytes + length_bytes
        goes_on = (file[1:] == file[:-1]) & (begin_bytes[1:] >= begin_bytes[:-1]) & (begin_bytes[1:] <= end[:-1])
        heads = np.flatnonzero(~np.concatenate([[False], goes_on]))[: len(runs)]
        longest = np.maximum.reduceat(end, heads) if len(heads) else end
        return file[heads].astype(np.int32), begin_bytes[heads], longest - begin_bytes[heads]

    def _read(
        self, memory: _Memory, file: np.ndarray, begin_bytes: np.ndarray, length_bytes: np.ndarray, place: np.ndarray
    ) -> bool:
        """Whether they were read; what was wrong is told by who reads the samples one by one."""
        if self._closed:
            return False
        address = (memory.address + place).astype(np.uint64)
        try:
            read = self._engine.begin_read(
                self._sources, file, begin_bytes, length_bytes, address, self._engine.mark(0), memory
            )
            (routes,) = self._reads.routes_of([read])
        except (GdsdataError, FileNotFoundError):
            return False
        with self._counting:
            for route, count in routes.items():
                self._bytes[route] += count
        return True

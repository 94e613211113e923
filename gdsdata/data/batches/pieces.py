"""`OpenPieces`: a lane shuffle's open pieces, read into memory ahead of samples."""

from __future__ import annotations

import bisect
import dataclasses
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from gdsdata.data.batches.piece_memory import PAGE_BYTES, PieceMemory, SpareMemory
from gdsdata.data.order.lanes import LanePermutation
from gdsdata.distinct import distinct
from gdsdata.errors import GdsdataError
from gdsdata.formats.chunks import Chunks
from gdsdata.formats.index import SampleIndex
from gdsdata.formats.plan import Plan
from gdsdata.io import engine
from gdsdata.io.budget import share_bytes
from gdsdata.io.options import MIB, EngineOptions
from gdsdata.io.program_end import stop_at_exit
from gdsdata.io.stalls import ReadsInFlight

# Bytes of one call of the engine, and how many calls are under way: the storage has something to do
# between them. A window's first calls are shorter, 2, 4, 8 and 16 MiB: the first batch of an epoch
# waits for them.
_CALL_BYTES, _FIRST_CALL_BYTES = 32 * MIB, 2 * MIB
_CALLS = 2
_WORKERS = 2
# Windows may take so much beyond their average, because samples differ in size and pieces are read
# by whole pages.
_SLACK, _SLACK_BYTES = 1 / 8, 16 * MIB

_NO_RUNS = np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64)

FoundT = TypeVar("FoundT")
_Call = Future[np.ndarray]  # of the engine; bool: which of its runs it has read


class _Runs(NamedTuple):
    """The R runs of bytes of a window's pieces: int64 (R,) each, by first use."""

    file: np.ndarray
    begin_bytes: np.ndarray  # in the file, as is ``first_page``, where reading begins
    length_bytes: np.ndarray
    first_page: np.ndarray
    read_bytes: np.ndarray
    place: np.ndarray  # in memory, of what is read
    end_place: np.ndarray  # there, of its last page


class _Window(NamedTuple):
    """A window's runs in the order of ``begin``, and the calls that read them.

    ``begin`` and ``end`` are places on the line of all files, one behind the other.
    """

    begin: np.ndarray
    end: np.ndarray
    memory_begin: np.ndarray  # of the byte at ``begin``
    by_use: np.ndarray  # int64 (R,), which of ``runs`` each is
    farthest: np.ndarray  # int64 (R,), of the runs up to each, the one that ends last: runs of fields can overlap
    runs: _Runs
    begun: int  # so many of ``runs`` are read, or cannot be
    starts: np.ndarray  # int64 (C,), the first of ``runs`` that each call reads
    calls: list[_Call]

    @property
    def is_local(self) -> bool:
        """Whether nothing of it is still being read."""
        return all(call.done() for call in self.calls)

    @property
    def has_room(self) -> bool:
        """Whether all of it is being read, or has been."""
        return self.begun == len(self.begin)

    @property
    def has_nothing(self) -> bool:
        """Whether all reads have ended, and none of it is in our memory."""
        return self.is_local and not any(call.result().any() for call in self.calls)


class OpenPieces(Chunks[_Window]):
    """An epoch's pieces in memory, each read once.

    A chunk is a window of all lanes that this process reads.

    The window that samples come from and the next one are held: the even ones in one file in
    memory, the odd ones in another. Each has half of the budget, which is what two windows and an
    eighth more need, or `budget.share_bytes` if that is less. The last window can be longer.
    It has what the one before leaves, and is read to its end when that one is past.

    Pieces are read in the order of first use, and a sample waits for its own alone.

    Pieces that are in the page cache stay there, and their samples are read from it. Samples of
    pieces that have no room, or could not be read, are read from the files one by one. So they
    report what is wrong there.

    Args:
        index: of the samples.
        permutation: the epoch.
        lanes: those that this process reads.
        options: of the engine that reads pieces, for the CPU.
        stall_timeout_s: raise `StallError` if nothing has moved for so long.
        spare: of the epoch before; this one leaves its memory there if it is read to its end.

    Attributes:
        files: the index's files and those in memory, for a reader of what `local` returns.
        waited_s: time in which `local` waited for windows.
    """

    def __init__(
        self,
        index: SampleIndex,
        permutation: LanePermutation,
        lanes: range,
        options: EngineOptions,
        stall_timeout_s: float,
        spare: SpareMemory | None = None,
    ) -> None:
        window_bytes = permutation.window_samples(lanes) * index.spacing_bytes
        wanted_bytes = 2 * (int((1 + _SLACK) * window_bytes) + _SLACK_BYTES)
        self._spare = spare or SpareMemory()
        budget_bytes = min(wanted_bytes, max(share_bytes(), self._spare.size_bytes)) // PAGE_BYTES * PAGE_BYTES
        super().__init__(budget_bytes, 2, "gdsdata-pieces")
        self._index, self._permutation, self._lanes = index, permutation, lanes
        self._reads = ReadsInFlight(stall_timeout_s)
        self._engine = engine.shared_engine(
            dataclasses.replace(options, workers=options.workers or _WORKERS), torch.device("cpu")
        )
        self._file_begin = np.cumsum([0, *index.size_bytes])
        room_bytes = max(budget_bytes, PAGE_BYTES)  # address space, until it is used
        self._memories = self._spare.take(room_bytes)
        self._calls: tuple[list[_Call], list[_Call]] = ([], [])  # that read into each
        self._filling = (threading.Lock(), threading.Lock())  # held while a window's calls for each begin
        self._reached = 0  # the window that samples come from; earlier ones are not read any more
        if budget_bytes < 2 * window_bytes:
            engine.warn_once(
                f"pieces of this shuffle would take {2 * window_bytes / MIB:.0f} MiB, and this process may take "
                f"{budget_bytes / MIB:.0f} MiB for them: samples of the others are read one by one. Give it more "
                "memory, or use shuffle=gdsdata.Lanes(...) with smaller windows"
            )
        self._sources = engine.file_table(index)
        self._leaves_cached = options.direct != "always"
        self.files = engine.file_table(index, {memory.path: memory.size_bytes for memory in self._memories})
        self._readers = ThreadPoolExecutor(_CALLS, thread_name_prefix="gdsdata-pieces")
        self._counting = threading.Lock()  # guards the bytes that are read and taken
        self._bytes, self._most_bytes = dict.fromkeys(engine.ROUTES, 0), 0
        self.waited_s = 0.0
        self._closed = False
        stop_at_exit(self)

    def size_bytes(self, chunk: int) -> int:
        return self.budget_bytes // 2

    @property
    def bytes(self) -> Mapping[str, int]:
        """Bytes that were read so far, by route."""
        return dict(self._bytes)

    @property
    def memory_bytes(self) -> int:
        """The memory that windows have taken at a time, at most."""
        return self._most_bytes

    def reach(self, step: int) -> None:
        """Note that ``step`` comes next, and drop pieces that no later step needs."""
        window = self._permutation.window_of(step)
        last = self._permutation.windows - 1
        self._reached = window
        for passed in [one for one in self.held if one < window]:
            self.drop([passed])
            if passed == last - 1:
                self._memories[passed % 2].free()
                opened = self._held.get(last)  # if it is not held, it has all of the room when it is fetched
                if opened is not None and not (opened.done() and opened.result().has_room):
                    self._held[last] = self._fetchers.submit(self._fetch_rest, last, opened)
        for due in range(window, min(window + 2, last + 1)):
            self.get(due)

    def steps_in_memory(self, steps: range | np.ndarray) -> int:
        """Return how many of these steps, from the first on, have their windows in memory.

        Args:
            steps: ascending.
        """
        there = None
        for window, opened in sorted(self._held.items()):
            if not opened.done() or not opened.result().is_local:
                break
            waits_for_room = window == self._permutation.windows - 1 and window - 1 in self._held
            if waits_for_room and not opened.result().has_room:
                break
            there = window
        return 0 if there is None else bisect.bisect_left(steps, self._permutation.steps_within(there))

    def local(self, plan: Plan, steps: np.ndarray) -> Plan:
        """Wait for the pieces of these samples; return the plan with the pieces in memory.

        A window is dropped before the first step that begins behind it. The last, partial step can
        have samples of any window, or of none, and extents of tokens overlap. So a window can have
        a sample's bytes, and pass before its step is read.

        Args:
            plan: of samples of steps in the windows that `reach` has come to.
            steps: int64, the step of each sample.

        Raises:
            StallError: nothing has moved for ``stall_timeout_s``.
        """
        on_line = self._file_begin[plan.source] + plan.offset
        source, offset = plan.source.copy(), plan.offset.copy()
        begins_in = plan.of_pieces(self._permutation.windows_of(steps))
        unknown = np.ones(len(source), bool)
        for number, opened in sorted(self._held.items()):
            window = self._wait_for(opened)
            if window.has_nothing:
                continue
            run = window.farthest[np.searchsorted(window.begin, on_line, side="right") - 1]
            inside = (window.begin[run] <= on_line) & (on_line + plan.length <= window.end[run])
            inside &= unknown & (begins_in <= number)
            unknown &= ~inside
            inside[inside] = self._are_read(window, run[inside])
            run = run[inside]
            offset[inside] = window.memory_begin[run] + on_line[inside] - window.begin[run]
            source[inside] = len(self._index.paths) + number % 2
        return plan._replace(source=source, offset=offset)

    def stop(self) -> None:
        """Drop reads that have not begun, and abandon the others. Does not wait."""
        self._closed = True
        super().stop()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._reads.close()

    def close(self, wait: bool = True) -> None:
        """Return when nothing is being read, except what has stalled."""
        has_all = all(window.done() for window in self._held.values()) and all(
            one.done() for one in chain(*self._calls)
        )
        is_at_rest = has_all and not self._closed
        self.stop()
        super().close(wait=wait and not self._reads.has_stalled)
        self._readers.shutdown(wait=wait and not self._reads.has_stalled)
        if is_at_rest:  # else a read that was given up may still write there
            for memory in self._memories:
                memory.free(self.budget_bytes // 2)  # the last window may have taken more
            self._spare.leave(self._memories)

    def _are_read(self, window: _Window, run: np.ndarray) -> np.ndarray:
        """Wait for runs of a window, and return which of them are in memory: bool (N,)."""
        run = window.by_use[run]
        call = np.searchsorted(window.starts, run, side="right") - 1
        is_read = run < window.begun
        for number in distinct(call[is_read]).tolist():
            of_call = np.flatnonzero(is_read & (call == number))
            is_read[of_call] = self._wait_for(window.calls[number])[run[of_call] - window.starts[number]]
        return is_read

    def _wait_for(self, coming: Future[FoundT]) -> FoundT:
        if not coming.done():
            began = time.perf_counter()
            try:
                self._reads.wait_for(coming, "pieces")
            finally:
                self.waited_s += time.perf_counter() - began
        return coming.result()

    def _fetch(self, number: int) -> _Window:
        """Begin to read a window, in the order of first use, as far as there is room."""
        with self._filling[number % 2]:
            for call in list(self._calls[number % 2]):  # samples need not have waited for all of these
                with suppress(CancelledError):
                    call.exception()
            return self._begin(number, self._runs(number) if number >= self._reached else _NO_RUNS)

    def _begin(self, number: int, ranges: tuple[np.ndarray, np.ndarray, np.ndarray]) -> _Window:
        """Begin to read a window of these runs (`_runs`)."""
        file, begin_bytes, length_bytes = ranges
        first_page = begin_bytes // PAGE_BYTES * PAGE_BYTES
        end = np.minimum(-(-(begin_bytes + length_bytes) // PAGE_BYTES) * PAGE_BYTES, self._index.size_bytes[file])
        room_bytes = -(-(end - first_page) // PAGE_BYTES) * PAGE_BYTES
        end_place = np.cumsum(room_bytes)
        place = end_place - room_bytes
        runs = _Runs(file, begin_bytes, length_bytes, first_page, end - first_page, place, end_place)
        begun = self._with_room(number, runs)
        return self._window_of(runs, begun, *self._begin_reads(number, runs, 0, begun))

    def _fetch_rest(self, number: int, opened: Future[_Window]) -> _Window:
        """Read the rest of the last window, which had no room beside the one before it."""
        window = opened.result()
        begun = self._with_room(number, window.runs)
        if begun <= window.begun:
            return window
        starts, calls = self._begin_reads(number, window.runs, window.begun, begun)
        return window._replace(begun=begun, starts=np.append(window.starts, starts), calls=[*window.calls, *calls])

    def _with_room(self, number: int, runs: _Runs) -> int:
        """Return how many of a window's runs have room."""
        is_alone = number == self._permutation.windows - 1 and number - 1 not in self._held
        may_take = self.budget_bytes if is_alone else self.budget_bytes // 2
        return int(np.searchsorted(runs.end_place, may_take, side="right"))

    def _take(self, memory: PieceMemory, end: int) -> None:
        """Count the memory as taken up to this place."""
        with self._counting:
            memory.taken_bytes = max(memory.taken_bytes, end)
            self._most_bytes = max(self._most_bytes, sum(one.taken_bytes for one in self._memories))

    def _begin_reads(self, number: int, runs: _Runs, first: int, end: int) -> tuple[np.ndarray, list[_Call]]:
        """Begin to read the runs from one to another.

        Returns:
            The first run of each call, and the calls.
        """
        memory, begun = self._memories[number % 2], self._calls[number % 2]
        starts = first + np.flatnonzero(np.diff(_calls_at(runs.place[first:end]), prepend=-1))
        calls = []
        for some in map(slice, starts, [*starts[1:], end]):
            what = runs.file[some], runs.first_page[some], runs.read_bytes[some], runs.place[some]
            calls.append(self._readers.submit(self._read, memory, *what))
        begun[:] = [call for call in (*begun, *calls) if not call.done()]
        return starts, calls

    def _on_line(self, runs: _Runs) -> np.ndarray:
        return self._file_begin[runs.file] + runs.begin_bytes

    def _window_of(self, runs: _Runs, begun: int, starts: np.ndarray, calls: list[_Call]) -> _Window:
        on_line = self._on_line(runs)
        order = np.argsort(on_line, kind="stable")
        end, memory_begin = on_line + runs.length_bytes, runs.place + runs.begin_bytes - runs.first_page
        ends_last = end[order] == np.maximum.accumulate(end[order])
        farthest = np.maximum.accumulate(np.where(ends_last, np.arange(len(order)), 0))
        return _Window(on_line[order], end[order], memory_begin[order], order, farthest, runs, begun, starts, calls)

    def _runs(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return file, offset and length in bytes of the runs that make up a window.

        Runs that follow each other or overlap are one.
        """
        first, count = self._permutation.reads(self._lanes, number)
        runs: list[tuple[int, int, int]] = []
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
        self,
        memory: PieceMemory,
        file: np.ndarray,
        begin_bytes: np.ndarray,
        length_bytes: np.ndarray,
        place: np.ndarray,
    ) -> np.ndarray:
        """Read runs that are not in the page cache.

        Returns:
            bool (N,): which of them are in ``memory`` now. Samples of the others are read one by
            one: from the page cache, or so that the read raises what is wrong.
        """
        is_wanted = np.full(len(file), not self._closed)
        if self._leaves_cached and not self._closed:
            is_wanted = ~self._sources.in_page_cache(file, begin_bytes, length_bytes)
        if not is_wanted.any():
            return is_wanted
        what = file[is_wanted], begin_bytes[is_wanted], length_bytes[is_wanted]
        self._take(memory, int((place + length_bytes)[is_wanted].max()))
        try:
            read = self._engine.begin_read(self._sources, *what, memory.mapping, place[is_wanted], self._engine.mark(0))
            (routes,) = self._reads.routes_of([read])
        except (GdsdataError, FileNotFoundError):
            return np.zeros(len(file), bool)
        with self._counting:
            for route, count in routes.items():
                self._bytes[route] += count
        return is_wanted


def _calls_at(place: np.ndarray) -> np.ndarray:
    """Return the number of the call that reads what comes to each of these places of a window."""
    short = round(np.log2(_CALL_BYTES / _FIRST_CALL_BYTES))  # calls that are shorter than the others
    in_short = np.log2(place / _FIRST_CALL_BYTES + 1).astype(np.int64)
    return np.where(in_short < short, in_short, short + (place - _CALL_BYTES + _FIRST_CALL_BYTES) // _CALL_BYTES)

"""`RowGroupChunks`: row groups of tables, decoded before their rows are needed.

The engine reads them, and pyarrow decodes them.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

import numpy as np

from gdsdata.data.order.row_groups import UpcomingGroups
from gdsdata.formats.chunks import Chunks
from gdsdata.formats.column_values import Values
from gdsdata.formats.tables import TableIndex
from gdsdata.io import engine
from gdsdata.io.budget import share_bytes, share_of_cores
from gdsdata.io.options import MIB
from gdsdata.io.stalls import ReadsInFlight

# Row groups that are read and decoded at the same time, each by a thread.
_DECODERS = 4
# A table whose decoded row groups fit into this many bytes keeps them to the epoch's end.
_KEPT_BYTES = 2**31
# The memory that an epoch takes is estimated at so many places of it.
_PLACES_ASKED = 64


class RowGroupChunks(Chunks[list[Values]]):
    """The row groups that the next steps of an epoch need.

    `held_budget` bounds those that are held. A row group that has no room is decoded again for each
    batch that needs it.

    Args:
        index: of the table.
        shared: the engine that reads, for the CPU.
        files: its table of the files of ``index``.
        upcoming: says which row groups the epoch's steps need.
        prefetch: batches that are read ahead.
        reads: that threads wait for.
    """

    def __init__(
        self,
        index: TableIndex,
        shared: engine.Engine,
        files: engine.FileTable,
        upcoming: UpcomingGroups,
        prefetch: int,
        reads: ReadsInFlight,
    ) -> None:
        budget_bytes, threads = held_budget(index, share_bytes())
        super().__init__(budget_bytes, threads, "gdsdata-row-groups")
        self._index, self._engine, self._files, self._upcoming, self._reads = index, shared, files, upcoming, reads
        self._held_steps = _steps_held(upcoming, prefetch)
        self._keeps_all = int(index.decoded_bytes.sum()) <= min(_KEPT_BYTES, budget_bytes)
        self._look_at = 0
        self._bytes, self._counting = dict.fromkeys(engine.ROUTES, 0), threading.Lock()  # it guards the bytes
        self._decoding_again = threading.Lock()  # held while a row group is decoded that has no room

    def size_bytes(self, chunk: int) -> int:
        return int(self._index.decoded_bytes[chunk])

    @property
    def bytes_read(self) -> dict[str, int]:
        """Bytes that were read so far, by route."""
        with self._counting:
            return dict(self._bytes)

    def reach(self, step: int) -> None:
        """Fetch the chunks that ``step`` and the next steps need, and drop the others."""
        if step < self._look_at:
            return
        groups = self._upcoming.groups(step, step + self._held_steps).tolist()
        self._look_at = step + max(1, self._held_steps // 5)
        if not self._keeps_all:
            self.drop(self.held - set(groups))  # a batch that has begun keeps what it needs
        at_once = self._upcoming.groups(step, step).tolist()
        has_room = [self.get(group) is not None for group in dict.fromkeys([*at_once, *groups])]
        if not all(has_room[: len(at_once)]):
            engine.warn_once(
                f"a batch needs {len(at_once)} row groups, more than the {self.budget_bytes / MIB:.0f} MiB that this "
                "process may hold of them: some are decoded again for each batch. Give it more memory, or use "
                "shuffle=gdsdata.RowGroups(...) with fewer lanes and smaller windows"
            )

    def rows_of(
        self, group: int, held: Future[list[Values]] | None, rows: np.ndarray
    ) -> tuple[list[Values], np.ndarray]:
        """Return values with some rows of a row group, and the rows' places in them.

        A thread calls it.

        Args:
            group: which.
            held: what `get` returned for it.
            rows: int64 (r,).
        """
        if held is not None:
            return held.result(), rows
        from gdsdata.formats.columns import arrow_module

        # One that has no room is decoded alone, and no more than these rows are kept.
        with self._decoding_again:
            values = [
                one[rows] if isinstance(one, np.ndarray) else one.take(arrow_module().array(rows))
                for one in self._fetch(group)
            ]
        return values, np.arange(len(rows))

    def _fetch(self, chunk: int) -> list[Values]:
        begins, lengths = self._index.begin_bytes[chunk], self._index.length_bytes[chunk]
        memory = np.empty(int(lengths.sum()), np.uint8)
        places = np.cumsum(lengths) - lengths
        read = self._engine.begin_read(
            self._files,
            np.full(len(begins), self._index.group_file[chunk], np.int32),
            begins,
            lengths,
            memory,
            places,
            self._engine.mark(0),
        )
        (routes,) = self._reads.routes_of([read])
        stored = [memory.data[place : place + length] for place, length in zip(places, lengths, strict=True)]
        with self._counting:
            for route, count in routes.items():
                self._bytes[route] += count
        return self._index.decode(chunk, stored)


def most_held_bytes(
    index: TableIndex, upcoming: UpcomingGroups, steps: int, prefetch: int, budget_bytes: int | None = None
) -> int:
    """Estimate the most memory of row groups, held or being decoded, in an epoch.

    Args:
        index: of the table.
        upcoming: says which row groups the epoch's steps need.
        steps: of the epoch.
        prefetch: batches that are read ahead.
        budget_bytes: of those that are held; None: what `held_budget` finds now.
    """
    budget_now, threads = held_budget(index, share_bytes())
    budget_bytes = budget_now if budget_bytes is None else budget_bytes
    total_bytes = int(index.decoded_bytes.sum())
    if total_bytes <= min(_KEPT_BYTES, budget_bytes):
        held_bytes = total_bytes
    else:
        held = _steps_held(upcoming, prefetch)
        places = range(0, steps, max(1, steps // _PLACES_ASKED))
        held_bytes = max(int(index.decoded_bytes[upcoming.groups(step, step + held)].sum()) for step in places)
    return min(held_bytes, budget_bytes) + threads * _decoding_bytes(index)


def held_budget(index: TableIndex, share_bytes: int) -> tuple[int, int]:
    """Return how many decoded bytes may be held, and how many threads decode.

    Args:
        share_bytes: that both may take. If it is little, fewer threads decode. One more row group
            at a time may be decoded again for a batch.
    """
    decoding_bytes = max(1, _decoding_bytes(index))
    most_threads = min(_DECODERS, share_of_cores())
    threads = min(most_threads, max(1, share_bytes // (4 * decoding_bytes)))
    return max(0, share_bytes - (threads + 1) * decoding_bytes), threads


def _decoding_bytes(index: TableIndex) -> int:
    """Return the memory that decoding a row group takes.

    It is stored, then pyarrow's, then its values, with copies.
    """
    stored_bytes = index.length_bytes.sum(axis=1)
    return 2 * int((stored_bytes + index.decoded_bytes).max(initial=0))


def _steps_held(upcoming: UpcomingGroups, prefetch: int) -> int:
    """Return how many steps ahead row groups are held.

    `reach` looks again when a fifth of them is past.
    """
    return max(prefetch + 2, upcoming.steps_ahead * 5 // 4)

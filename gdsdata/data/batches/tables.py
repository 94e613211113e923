"""Batches of rows of tables: row groups are read by the engine and decoded by pyarrow ahead, and rows gathered."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from gdsdata.data.batches.ahead import BatchesAhead
from gdsdata.data.batches.fields import Collate, FieldBatches, Ragged, RaggedAs
from gdsdata.data.batches.skipped import Skipped
from gdsdata.data.order.row_groups import UpcomingGroups
from gdsdata.decoders import Decoder, Image, Undecodable
from gdsdata.errors import CorruptData
from gdsdata.formats.columns import arrow_module
from gdsdata.formats.index import torch_equivalent
from gdsdata.formats.parquet import TableIndex, Values
from gdsdata.io import engine
from gdsdata.io.memory_budget import share_bytes
from gdsdata.io.options import MIB
from gdsdata.io.program_end import stop_at_exit

# Row groups that are read and decoded at the same time, each by a thread.
_DECODERS = 4
# Tables whose decoded row groups all fit into it keep them to the epoch's end.
_KEPT_BYTES = 2**31
# Of an epoch, to say how much memory it takes.
_PLACES_ASKED = 64

Routes = dict[str, int]


class _Planned(NamedTuple):
    """One batch of B rows: their row groups and places there, int64 (B,) each."""

    group: np.ndarray
    row: np.ndarray


class _Begun(NamedTuple):
    planned: _Planned
    done: Future[tuple[Routes, list[Any]]]


class TableBatches(FieldBatches):
    """What `GDSDataset` takes its batches from where samples are rows of tables.

    Batches are on the CPU. `reach` says which row groups are held; a batch that needs another one has it decoded then.
    No more are held than `held_budget` allows: the others are decoded for each batch that needs them. The ``bytes`` of
    `statistics` are those of the row groups that were read.

    Args:
        shared, files, index, prefetch, stall_timeout_s, ragged_as, decode, collate, skipped: as for `FieldBatches`.
        upcoming: the epoch.
    """

    def __init__(
        self,
        shared: Any,
        files: Any,
        index: TableIndex,
        prefetch: int,
        stall_timeout_s: float,
        ragged_as: RaggedAs,
        decode: Mapping[str, Decoder | Image],
        upcoming: UpcomingGroups,
        collate: Collate | None,
        skipped: Skipped | None,
    ) -> None:
        device = torch.device("cpu")
        super().__init__(
            shared, files, index, device, prefetch, stall_timeout_s, ragged_as, decode, None, collate, skipped
        )
        self._engine, self._index, self._upcoming = shared, index, upcoming
        self._held_steps = _steps_held(upcoming, prefetch)
        self.budget_bytes, threads = held_budget(index, share_bytes())
        self._keeps_all = int(index.decoded_bytes.sum()) <= min(_KEPT_BYTES, self.budget_bytes)
        self._look_at = self._held_bytes = 0
        self._held: dict[int, Future[list[Values]]] = {}
        self._counting, self._decoding_again = threading.Lock(), threading.Lock()
        self._decoders = ThreadPoolExecutor(threads, thread_name_prefix="gdsdata-row-groups")
        stop_at_exit(self)

    def reach(self, step: int) -> None:
        """Say that ``step`` of the epoch is about to be read: what it and those behind it need is decoded."""
        if step < self._look_at:
            return
        groups = self._upcoming.groups(step, step + self._held_steps).tolist()
        self._look_at = step + max(1, self._held_steps // 5)
        if not self._keeps_all:
            for group in self._held.keys() - set(groups):  # a batch that has begun keeps what it needs
                del self._held[group]
                self._held_bytes -= int(self._index.decoded_bytes[group])
        at_once = self._upcoming.groups(step, step).tolist()
        has_room = [self._held_group(group) is not None for group in dict.fromkeys([*at_once, *groups])]
        if not all(has_room[: len(at_once)]):
            engine.warn_once(
                f"a batch needs {len(at_once)} row groups, more than the {self.budget_bytes / MIB:.0f} MiB that this "
                "process may hold of them: some are decoded again for each batch. Give it more memory, or use "
                "shuffle=gdsdata.RowGroups(...) with fewer lanes and smaller windows"
            )

    def plan(self, group: np.ndarray, row: np.ndarray, sizes: np.ndarray) -> None:
        """Batches of ``sizes`` rows each, which follow one another (`TableIndex.extents`)."""
        ends = np.cumsum(sizes)[:-1]
        self._plan(map(_Planned, np.split(group, ends), np.split(row, ends)))

    def stop(self) -> None:
        self._decoders.shutdown(wait=False, cancel_futures=True)
        super().stop()

    def close(self) -> None:
        """As `FieldBatches.close`; what is not yet being decoded is not."""
        super().close()
        self._decoders.shutdown(wait=not self._reads.has_stalled)
        self._held.clear()

    def _begin(self, planned: _Planned) -> _Begun:
        needed = np.flatnonzero(np.bincount(planned.group)).tolist()
        groups = {group: self._held_group(group) for group in needed}
        return _Begun(planned, self._readers.submit(self._gather, planned, groups))

    def _held_group(self, group: int) -> Future[list[Values]] | None:
        """What is held, from now on; None if there is no room for it."""
        if group not in self._held:
            size_bytes = int(self._index.decoded_bytes[group])
            if self._held_bytes + size_bytes > self.budget_bytes:
                return None
            self._held_bytes += size_bytes
            self._held[group] = self._decoders.submit(self._read_group, group)
        return self._held[group]

    def _read_group(self, group: int) -> list[Values]:
        begins, lengths = self._index.begin_bytes[group], self._index.length_bytes[group]
        memory = np.empty(int(lengths.sum()), np.uint8)
        places = np.cumsum(lengths) - lengths
        read = self._engine.begin_read(
            self._files,
            np.full(len(begins), self._index.group_file[group], np.int32),
            begins,
            lengths,
            memory,
            places,
            self._engine.mark(engine.stream_of(self._device)),
        )
        (routes,) = self._reads.routes_of([read])
        stored = [memoryview(memory)[place : place + length] for place, length in zip(places, lengths, strict=True)]
        with self._counting:  # these are the bytes of `statistics`
            for route, count in routes.items():
                self._bytes[route] += count
        return self._index.decode(group, stored)

    def _gather(self, planned: _Planned, groups: dict[int, Future[list[Values]] | None]) -> tuple[Routes, list[Any]]:
        """The values of a batch's rows: of each field a tensor, or a `Ragged`. Routes count with row groups."""
        order = np.argsort(planned.group, kind="stable")
        numbers, first = np.unique(planned.group[order], return_index=True)
        places = np.split(order, first[1:])
        parts = [
            self._rows_of(number, groups[number], planned.row[place], place)
            for number, place in zip(numbers.tolist(), places, strict=True)
        ]
        fields = range(len(self._fields))
        return {}, [self._gathered(k, [(values[k], rows, place) for values, rows, place in parts]) for k in fields]

    def _rows_of(
        self, group: int, held: Future[list[Values]] | None, rows: np.ndarray, place: np.ndarray
    ) -> tuple[list[Values], np.ndarray, np.ndarray]:
        """Values, and which rows of them go where in the batch."""
        if held is not None:
            return held.result(), rows, place
        # Of one that is not held only these rows are kept, and one at a time is decoded.
        with self._decoding_again:
            values = [
                one[rows] if isinstance(one, np.ndarray) else one.take(arrow_module().array(rows))
                for one in self._read_group(group)
            ]
        return values, np.arange(len(rows)), place

    def _gathered(self, k: int, parts: list[tuple[Values, np.ndarray, np.ndarray]]) -> torch.Tensor | Ragged:
        field, rows = self._fields[k], sum(len(place) for _, _, place in parts)
        if field.shape is None:
            return _gathered_ragged(parts, np.dtype(np.uint8) if field.dtype is None else field.dtype)
        tensor = torch.empty((rows, *field.shape), dtype=torch_equivalent(field.dtype))
        array = tensor.numpy()
        for values, there, place in parts:
            array[place] = values[there]
        return tensor

    def _values_of(self, begun: _Begun) -> Any:
        _, columns = begun.done.result()
        ragged_as = self._ragged_as if self._collate is None else Ragged.as_list
        values = {}
        for field, column in zip(self._fields, columns, strict=True):
            if field.name in self._decode:
                values[field.name] = self._decoded_rows(field.name, begun.planned, column)
            else:
                values[field.name] = ragged_as(column) if isinstance(column, Ragged) else column
        if self._collate is None:
            return values
        rows = zip(*values.values(), strict=True)
        return self._collate([dict(zip(values, row, strict=True)) for row in rows])

    _joined = BatchesAhead._joined  # row groups are held

    def _check(self, begun: _Begun) -> None:
        _, columns = begun.done.result()
        for field, column in zip(self._fields, columns, strict=True):
            if field.name in self._decode:
                self._decoded_rows(field.name, begun.planned, column)

    def _decoded_rows(self, name: str, planned: _Planned, column: torch.Tensor | Ragged) -> Any:
        if isinstance(column, Ragged):
            width = column.values.element_size()
            samples = column.values.view(torch.uint8).split((column.offsets.diff() * width).tolist())
        else:
            samples = column.reshape(len(column), -1).view(torch.uint8).unbind()
        try:
            return self._made_of(name, samples)
        except Undecodable as error:
            group, row = int(planned.group[error.sample]), int(planned.row[error.sample])
            path = self._index.paths[self._index.group_file[group]]
            where = f"row {row} of {self._index.name_of(group)}"
            raise CorruptData(f"{where}: column {name!r} cannot be decoded: {error}", path) from error


def most_held_bytes(
    index: TableIndex, upcoming: UpcomingGroups, steps: int, prefetch: int, budget_bytes: int | None = None
) -> int:
    """Of row groups that `TableBatches` holds or is decoding, about: the most at some places of an epoch of so many
    steps.

    Args:
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
    """Bytes of decoded row groups that may be held, and how many threads decode.

    Args:
        share_bytes: that both may take. With little of it fewer threads decode, and one more row group at a time may be
            decoded again for a batch.
    """
    decoding_bytes = max(1, _decoding_bytes(index))
    most_threads = min(_DECODERS, len(os.sched_getaffinity(0)))
    threads = min(most_threads, max(1, share_bytes // (4 * decoding_bytes)))
    return max(0, share_bytes - (threads + 1) * decoding_bytes), threads


def _decoding_bytes(index: TableIndex) -> int:
    """That decoding a row group takes: as it is stored, as pyarrow has it, and what is made of that, with copies."""
    stored_bytes = index.length_bytes.sum(axis=1)
    return 2 * int((stored_bytes + index.decoded_bytes).max(initial=0))


def _steps_held(upcoming: UpcomingGroups, prefetch: int) -> int:
    """Steps ahead whose row groups are held: `TableBatches.reach` looks again when a fifth of them is past."""
    return max(prefetch + 2, upcoming.steps_ahead * 5 // 4)


def _gathered_ragged(parts: list[tuple[Values, np.ndarray, np.ndarray]], dtype: np.dtype) -> Ragged:
    """Values of the rows of pyarrow's arrays, in the order of their places in the batch."""
    arrow = arrow_module()
    taken = arrow.concat_arrays([values.take(arrow.array(rows)) for values, rows, _ in parts])
    places = np.concatenate([place for _, _, place in parts])
    back = np.empty_like(places)
    back[places] = np.arange(len(places))
    batch = taken.take(arrow.array(back))
    offsets = np.frombuffer(batch.buffers()[1], np.int64)[batch.offset : batch.offset + len(batch) + 1]
    if arrow.types.is_large_list(batch.type):
        elements = batch.values
        elements = getattr(elements, "storage", elements)
        if arrow.types.is_boolean(elements.type):
            stored = elements.to_numpy(zero_copy_only=False)
        else:
            stored = np.frombuffer(elements.buffers()[1] or b"", dtype)[elements.offset :]
    else:
        stored = np.frombuffer(batch.buffers()[2] or b"", dtype)
    values = torch.empty(int(offsets[-1] - offsets[0]), dtype=torch_equivalent(dtype))
    values.numpy()[:] = stored[offsets[0] : offsets[-1]]
    return Ragged(values, torch.from_numpy(offsets - offsets[0]))

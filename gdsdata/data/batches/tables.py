"""`TableReader`: batches of rows, gathered from the row groups that they lie in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from gdsdata.data.batches.ahead import AheadReader
from gdsdata.data.batches.ragged import moved
from gdsdata.data.batches.row_groups import RowGroupChunks
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.data.batches.values import FieldBytes, FieldValues
from gdsdata.data.order.row_groups import UpcomingGroups
from gdsdata.formats.column_values import Values, elements_of
from gdsdata.formats.columns import arrow_module
from gdsdata.formats.field import Field
from gdsdata.formats.plan import Plan
from gdsdata.formats.sample import torch_equivalent
from gdsdata.formats.tables import TableIndex
from gdsdata.io import engine
from gdsdata.io.program_end import stop_at_exit

# Batches that are gathered at the same time: while one is planned and handed over, another is
# copied.
_AT_A_TIME = 2
_CPU = torch.device("cpu")

# The values that a row group has of a field, which of its rows are wanted, and their places in the
# batch.
_Part = tuple[Values, np.ndarray, np.ndarray]


class _Begun(NamedTuple):
    plan: Plan
    done: Future[tuple[dict[str, int], FieldBytes]]


class TableReader(AheadReader[TableIndex, _Begun]):
    """Reads rows of tables. ``bytes`` in its statistics are those of whole row groups.

    Args:
        index: of the samples.
        settings: of the batches.
        shared: the engine that reads, for the CPU.
        files: its table of the files of ``index``.
        upcoming: says which row groups the epoch's steps need.

    Attributes:
        row_groups: that are held.
    """

    def __init__(
        self,
        index: TableIndex,
        settings: BatchSettings,
        shared: engine.Engine,
        files: engine.FileTable,
        upcoming: UpcomingGroups,
    ) -> None:
        readers = ThreadPoolExecutor(min(settings.prefetch, _AT_A_TIME), "gdsdata-rows")
        super().__init__(index, settings, readers)
        self._values = FieldValues(index, settings, _CPU)
        self._device = settings.device
        self.row_groups = RowGroupChunks(index, shared, files, upcoming, settings.prefetch, self._reads)
        self.reach = self._reach
        stop_at_exit(self)

    def _reach(self, step: int) -> None:
        with self._beginning:
            self.row_groups.reach(step)

    def _begin(self, plan: Plan) -> _Begun:
        needed = np.flatnonzero(np.bincount(plan.source)).tolist()
        groups = {group: self.row_groups.get(group) for group in needed}
        return _Begun(plan, self._readers.submit(self._gather, plan, groups))

    def _gather(self, plan: Plan, groups: dict[int, Future[list[Values]] | None]) -> tuple[dict[str, int], FieldBytes]:
        """Return the bytes of a batch's rows, on a thread.

        Routes are counted when row groups are read.
        """
        order = np.argsort(plan.source, kind="stable")
        numbers, first = np.unique(plan.source[order], return_index=True)
        found: list[tuple[list[Values], np.ndarray, np.ndarray]] = []
        for number, place in zip(numbers.tolist(), np.split(order, first[1:]), strict=True):
            found.append((*self.row_groups.rows_of(number, groups[number], plan.offset[place]), place))
        flat: dict[int, torch.Tensor] = {}
        lists: dict[int, Sequence[np.ndarray]] = {}
        length_bytes = np.empty((len(plan.samples), len(self.index.fields)), np.int64)
        for k, field in enumerate(self.index.fields):
            parts = [(values[k], rows, place) for values, rows, place in found]
            if field.shape is not None:
                flat[k], length_bytes[:, k] = _gathered(field, parts, len(plan.samples))
                continue
            flat[k], lengths = _gathered_ragged(field, parts)
            length_bytes[:, k] = _sample_bytes(field, lengths)
            if field.depth > 1:
                lists[k] = lengths
        return {}, FieldBytes(plan.samples, length_bytes, flat, lists=lists)

    def _batch_of(self, begun: _Begun) -> Any:
        batch = self._values.batch(begun.done.result()[1], {})
        return batch if self._device.type == "cpu" else moved(batch, self._device)

    def _check(self, begun: _Begun) -> None:
        self._values.check(begun.done.result()[1], {})

    def statistics(self) -> dict[str, Any]:
        return {**super().statistics(), "bytes": self.row_groups.bytes_read}

    def stop(self) -> None:
        self.row_groups.stop()
        super().stop()

    def close(self) -> None:
        super().close()
        self.row_groups.close(wait=not self._reads.has_stalled)
        self._values.close(wait=not self._reads.has_stalled)


def _gathered(field: Field, parts: list[_Part], rows: int) -> tuple[torch.Tensor, int]:
    """Return a field's bytes of some rows in the batch's order, and each row's size."""
    tensor = torch.empty((rows, *(field.shape or ())), dtype=torch_equivalent(field.element_dtype))
    array = tensor.numpy()
    for values, there, place in parts:
        array[place] = values[there]
    flat = tensor.view(-1).view(torch.uint8)
    return flat, len(flat) // max(1, rows)


def _gathered_ragged(field: Field, parts: list[_Part]) -> tuple[torch.Tensor, list[np.ndarray]]:
    """Return the bytes of values whose sizes differ, and the lengths of their lists.

    They are pyarrow's arrays, and the lengths those of `elements_of`.
    """
    arrow = arrow_module()
    taken = arrow.concat_arrays([values.take(arrow.array(rows)) for values, rows, _ in parts])
    places = np.concatenate([place for _, _, place in parts])
    back = np.empty_like(places)
    back[places] = np.arange(len(places))
    elements, lengths = elements_of(taken.take(arrow.array(back)), field)
    values = torch.empty(len(elements), dtype=torch_equivalent(field.element_dtype))
    values.numpy()[:] = elements
    return values.view(torch.uint8), lengths


def _sample_bytes(field: Field, lists: list[np.ndarray]) -> np.ndarray:
    """Return the bytes of each sample, whose lists have these lengths: int64."""
    elements = lists[-1] * (field.element_dtype.itemsize * math.prod(field.row_shape))
    for lengths in lists[-2::-1]:
        ends = np.append(0, np.cumsum(elements))[np.cumsum(np.append(0, lengths))]
        elements = np.diff(ends)
    return elements

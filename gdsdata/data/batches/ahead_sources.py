"""Sources of batches that Python begins: fields, windows and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gdsdata.data.batches.reader import IndexT, Reader
from gdsdata.data.batches.source import BatchSource
from gdsdata.data.order.epoch import Epoch
from gdsdata.io import engine

# Modules that only some of these need are imported by them: a program pays for what it uses.
if TYPE_CHECKING:
    from gdsdata.data.batches.tables import TableReader
    from gdsdata.formats.fields import FieldIndex
    from gdsdata.formats.tables import TableIndex
    from gdsdata.formats.windows import WindowIndex
    from gdsdata.io.memory import MemoryPool


class _MemorySource(BatchSource[IndexT]):
    """Samples of many sizes.

    Their batches on the CPU get memory of a pool that is kept from epoch to epoch.
    """

    _memory: MemoryPool | None = None

    def _kept_memory(self) -> MemoryPool:
        if self._memory is None:
            from gdsdata.io.memory import MemoryPool

            self._memory = MemoryPool(self.settings.prefetch + 2)
        return self._memory

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_memory": None}


class FieldSource(_MemorySource["FieldIndex"]):
    """Samples with fields."""

    def reader(self, epoch: Epoch, owner: object) -> Reader[FieldIndex]:
        from gdsdata.data.batches.fields import FieldReader

        shared, files, pieces = self._open_with_pieces(epoch)
        # Decoders want bytes on the CPU; the other fields are read to the GPU.
        reads_to_both = bool(self.settings.decode) and self.settings.device.type == "cuda"
        host = engine.kept_engine(self.settings.options, torch.device("cpu")) if reads_to_both else None
        return FieldReader(self.index, self.settings, shared, files, host, self._kept_memory(), pieces)


class WindowSource(_MemorySource["WindowIndex"]):
    """Windows of tokens, in several pieces."""

    def reader(self, epoch: Epoch, owner: object) -> Reader[WindowIndex]:
        from gdsdata.data.batches.windows import WindowReader

        shared, files, pieces = self._open_with_pieces(epoch)
        return WindowReader(self.index, self.settings, shared, files, self._kept_memory(), pieces)


class TableSource(BatchSource["TableIndex"]):
    """Rows of tables, which pyarrow decodes on the CPU."""

    @property
    def _reads_to(self) -> torch.device:
        return torch.device("cpu")

    def reader(self, epoch: Epoch, owner: object) -> TableReader:
        from gdsdata.data.batches.tables import TableReader

        shared, files = self.open_for_epoch()
        upcoming = epoch.upcoming_groups(self.index.group_first_row)
        return TableReader(self.index, self.settings, shared, files, upcoming)

    def ring_bytes(self, epoch: Epoch, steps: int, reader: Reader[TableIndex] | None) -> int:
        from gdsdata.data.batches.row_groups import most_held_bytes
        from gdsdata.data.batches.tables import TableReader

        budget_bytes = reader.row_groups.budget_bytes if isinstance(reader, TableReader) else None
        upcoming = epoch.upcoming_groups(self.index.group_first_row)
        return self._most_bytes + most_held_bytes(self.index, upcoming, steps, self.settings.prefetch, budget_bytes)

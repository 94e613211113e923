"""`EngineReader`: each batch is one call of the engine, into memory of its own."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from gdsdata.data.batches.ahead import AheadReader
from gdsdata.data.batches.reader import IndexT
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.data.batches.values import FieldBytes
from gdsdata.formats.plan import Plan
from gdsdata.io import engine
from gdsdata.io.engine import Engine, FileTable, Mark
from gdsdata.io.memory import MemoryPool
from gdsdata.io.stalls import ReadsInFlight

if TYPE_CHECKING:
    from gdsdata.data.batches.pieces import OpenPieces

# Reads that were canceled are waited for so long. Those that have not ended by then keep their
# memory.
_CLOSING_S = 1.0
# Each field's values begin at a multiple of it, so that any dtype may be their view.
_ALIGNMENT_BYTES = 64


# Gets the checksums of some transfers, and raises `CorruptData` if one is wrong.
Check = Callable[[np.ndarray], None]


class Read(NamedTuple):
    """One call of an engine, for some fields of a batch.

    Attributes:
        memory: what it reads into.
        engine: that reads.
        transfers: files, sources, offsets, lengths, memory, places and mark, as `begin_read` takes
            them.
        conversion: what the engine does with each element on the way.
        checksum: what the engine computes of each transfer.
        check: of these checksums.
    """

    memory: torch.Tensor
    engine: Engine
    transfers: tuple[FileTable, np.ndarray, np.ndarray, np.ndarray, torch.Tensor, np.ndarray, Mark]
    conversion: str
    checksum: str
    check: Check | None


class Reads:
    """Reads that have begun.

    It behaves like a `Future` of their bytes by route, and of no decoded values.
    """

    def __init__(self, reads: Sequence[Read]) -> None:
        self._begun = [read.engine.begin_read(*read.transfers, read.conversion, read.checksum) for read in reads]
        self._unchecked = [(i, read.check) for i, read in enumerate(reads) if read.check is not None]

    def done(self) -> bool:
        return all(read.ended() for read in self._begun)

    def progress(self) -> Hashable:
        """Return the progress of reads that have not ended (`ReadsInFlight.progress`)."""
        return tuple(read.progress() for read in self._begun if not read.ended()) or None

    def exception(self, timeout: float | None = None) -> None:
        ends = math.inf if timeout is None else time.monotonic() + timeout
        for read in self._begun:
            if not read.wait(max(0.0, ends - time.monotonic())):
                raise NotYet

    def result(self) -> tuple[dict[str, int], dict[int, Any]]:
        """Wait for reads and copies to a GPU; return bytes by route, and no values.

        Raises:
            CorruptData: a checksum differs.
        """
        self.exception()
        routes = sum_of([read.routes() for read in self._begun])
        self._compare()
        return routes, {}

    def result_in_thread(self, in_flight: ReadsInFlight) -> dict[str, int]:
        """Return bytes by route, in a thread that ``in_flight`` can have give up.

        Raises:
            CorruptData: a checksum differs.
        """
        routes = sum_of(in_flight.routes_of(self._begun))
        self._compare()
        return routes

    def _compare(self) -> None:
        for i, check in self._unchecked:
            check(self._begun[i].checksums())
        self._unchecked = []

    def cancel(self) -> None:
        for read in self._begun:
            read.cancel()

    def abandon(self) -> None:
        """Abandon the reads. The engine keeps their memory: it may still write there."""
        for read in self._begun:
            read.abandon()


def sum_of(routes: Sequence[dict[str, int]]) -> dict[str, int]:
    """Return the bytes of several reads, by route."""
    return routes[0] if len(routes) == 1 else {route: sum(one[route] for one in routes) for route in engine.ROUTES}


class Destination(NamedTuple):
    """The engine that reads some pieces of each sample, and its device.

    Attributes:
        columns: the places of these pieces among a sample's.
        chosen: the same, as an index of NumPy's; a slice if they are all.
    """

    engine: Engine
    device: torch.device
    columns: list[int]
    chosen: list[int] | slice


class BatchRead(NamedTuple):
    """A batch on its way.

    Attributes:
        plan: of its samples.
        read: the memory of its fields.
        done: ends with their bytes by route, and the values that are decoded ahead.
    """

    plan: Plan
    read: FieldBytes
    done: Future[tuple[dict[str, int], dict[int, Any]]] | Reads


class EngineReader(AheadReader[IndexT, BatchRead]):
    """Reads the pieces of a batch's samples column by column, without gaps.

    Args:
        index: of the samples.
        settings: of the batches.
        readers: threads on which batches come.
        files: the engine's table of the files of ``index``, and of those of ``pieces``.
        destinations: where each of a sample's pieces goes; together they have all columns.
        memory: of batches on the CPU, kept from epoch to epoch.
        pieces: as of `Reader`.
        conversion: of each element, by the engine; a byte that is stored becomes ``growth`` of
            them.
    """

    def __init__(
        self,
        index: IndexT,
        settings: BatchSettings,
        readers: ThreadPoolExecutor,
        files: FileTable,
        destinations: Sequence[Destination],
        memory: MemoryPool | None = None,
        pieces: OpenPieces | None = None,
        conversion: str = "none",
        growth: int = 1,
    ) -> None:
        super().__init__(index, settings, readers, pieces)
        self._files, self._device = files, settings.device
        self._destinations = [there for there in destinations if there.columns]
        self._columns = sum(len(there.columns) for there in destinations)
        self._memory = memory or MemoryPool(settings.prefetch + 2)
        self._conversion, self._growth = conversion, growth

    def _begin(self, plan: Plan) -> BatchRead:
        """Read after the current stream's work, because the batch may get its memory."""
        length = plan.lengths.reshape(-1, self._columns)
        flat: dict[int, torch.Tensor] = {}
        read = FieldBytes(plan.samples, np.maximum(length, 0), flat, self._presence(length))
        reads = [self._read_of(plan, read.length_bytes, there, flat) for there in self._destinations]
        return BatchRead(plan, read, self._start(reads, read))

    def _presence(self, length_bytes: np.ndarray) -> np.ndarray | None:
        """Return `FieldBytes.is_there`."""
        return None

    def _start(self, reads: list[Read], read: FieldBytes) -> Future[tuple[dict[str, int], dict[int, Any]]] | Reads:
        return Reads(reads)

    def _read_of(self, plan: Plan, length_bytes: np.ndarray, there: Destination, flat: dict[int, torch.Tensor]) -> Read:
        """Lay columns out in new memory, and put the part of each into ``flat``."""
        chosen, shape = there.chosen, (-1, self._columns)
        length_bytes = length_bytes[:, chosen]
        result_bytes = length_bytes * self._growth
        field_bytes = result_bytes.sum(0)
        begins = np.cumsum([0, *(-(-field_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)])
        memory = self._memory_for(int(begins[-1]), there.device)
        for k, begin, size in zip(there.columns, begins.tolist(), field_bytes.tolist(), strict=False):
            flat[k] = memory[begin : begin + size]
        places = begins[:-1] + np.cumsum(result_bytes, 0) - result_bytes
        wanted = length_bytes > 0
        transfers = (
            self._files,
            plan.source.reshape(shape)[:, chosen][wanted],
            plan.offset.reshape(shape)[:, chosen][wanted],
            length_bytes[wanted],
            memory,
            places[wanted],
            there.engine.mark(engine.stream_of(there.device)),
        )
        checksum, check = self._check_of(plan.samples, there.columns, wanted)
        return Read(memory, there.engine, transfers, self._conversion, checksum, check)

    def _check_of(self, samples: np.ndarray, columns: list[int], wanted: np.ndarray) -> tuple[str, Check | None]:
        """Return the checksum that the engine computes of each transfer, and its check.

        Args:
            samples: int64 (B,), ids.
            columns: that are read.
            wanted: bool (B, len(columns)), which of them have bytes, and so a checksum.
        """
        return "none", None

    def _memory_for(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        if device.type == self._device.type == "cpu":
            return self._memory.take(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8, device=device, pin_memory=device != self._device)

    def _joined(self, parts: list[BatchRead]) -> BatchRead:
        """Join batches in memory: what has come is not read again."""
        done: Future[tuple[dict[str, int], dict[int, Any]]] = Future()
        done.set_result(({}, {}))
        return BatchRead(
            Plan.joined([part.plan for part in parts]), FieldBytes.joined([part.read for part in parts]), done
        )

    def close(self) -> None:
        reads = [begun.done for begun in self._begun if isinstance(begun.done, Reads)]
        for one in reads:
            one.cancel()
        until = time.monotonic() + min(_CLOSING_S, self._stall_timeout_s)
        for one in reads:
            if not self._reads.has_stalled:
                with contextlib.suppress(NotYet):
                    one.exception(max(0.0, until - time.monotonic()))
            one.abandon()
        super().close()

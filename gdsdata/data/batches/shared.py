"""`SharedReader`: batches that several processes read together, each a part of them."""

from __future__ import annotations

import contextlib
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from gdsdata.collective.gloo import complete
from gdsdata.collective.peers import Gathers, GlooGathers, NcclGathers, Peers
from gdsdata.data.batches.ragged import RAGGED_AS
from gdsdata.data.batches.reader import IndexT, Reader
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.data.batches.shared_layout import Gathered
from gdsdata.data.batches.shared_parts import Agreed, PartsAhead, Planned
from gdsdata.errors import ITERATOR_CLOSED, EngineClosed
from gdsdata.io.memory import MemoryPool

if TYPE_CHECKING:
    from torch.distributed import Work


class _Gathering(NamedTuple):
    """A batch that is being gathered.

    Attributes:
        gathered: how large its parts are.
        wholes: the memory of its tensors.
        works: of the CPU, what is waited for.
        event: on a GPU, behind it.
    """

    gathered: Gathered
    wholes: list[torch.Tensor]
    works: list[Work]
    event: torch.cuda.Event | None


class SharedReader(Reader[IndexT]):
    """Reads a part of each batch, and gathers the parts of all peers.

    The peers' parts of B samples are ceil(B / P) each, in order; the last ones can have fewer. A
    thread takes them ahead, and agrees with the peers (`PartsAhead`). The consumer's thread has the
    tensors gathered, one batch ahead.

    Memory: two whole batches, the one that is handed out and the next one, and twice ``prefetch``
    parts, half of them in the ring of the reader behind this one. Fields of different sizes take
    another batch for a moment.

    Args:
        inner: reads this process's parts. A batch of it is a tensor, or a dict of tensors and of
            `Ragged`.
        peers: that read together.
        settings: of the whole batches.
        call: what must not differ between the peers, by name.
    """

    least_planned = 2

    def __init__(
        self, inner: Reader[IndexT], peers: Peers, settings: BatchSettings, call: Mapping[str, object]
    ) -> None:
        super().__init__(inner.index)
        self._inner, self._peers, self._settings, self._device = inner, peers, settings, settings.device
        self.pieces, self.reach = inner.pieces, inner.reach
        self.batches_in_slot = inner.batches_in_slot + 1  # as many parts again wait until they are gathered
        self.next = self._next
        # On a GPU, of the parts, and of what is gathered. They do not wait for the program's work.
        self._part_stream: torch.cuda.Stream | None = None
        self._gather_stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._part_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch does not annotate it
            self._gather_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._parts = PartsAhead(inner, peers, settings, call, self._part_stream, self._abort, self._end_gathers)
        self._memory = MemoryPool(4)
        self._left_to_gather = 0  # planned batches
        self._begun: deque[_Gathering] = deque()
        self._gathers: Gathers | None = None
        self._handed_out = self._ready = 0

    def plan(self, samples: np.ndarray, sizes: np.ndarray, steps: np.ndarray) -> None:
        most = -(-sizes // self._peers.count)
        begins = np.minimum(self._peers.place * most, sizes)
        mine = np.minimum(begins + most, sizes) - begins
        batches = np.split(samples, np.cumsum(sizes)[:-1])
        if mine.any():
            parts = [ids[begin : begin + count] for ids, begin, count in zip(batches, begins, mine, strict=True)]
            with _current(self._part_stream):
                self._inner.plan(np.concatenate(parts), mine[mine > 0], steps[mine > 0])
        checks = [zlib.crc32(ids.tobytes()) for ids in batches]
        self._parts.plan(map(Planned, sizes.tolist(), mine.tolist(), most.tolist(), checks))
        self._left_to_gather += len(sizes)

    def _next(self) -> Any:
        """Return the next batch, and begin to gather the one behind it.

        All peers begin to gather at the same calls, whatever has come by then: NCCL needs one order
        of collectives, and the program has collectives of its own between the calls.
        """
        self._parts.begin()
        self._ready += self._parts.ready
        if not self._begun:
            self._begin_next()
        if self._left_to_gather:
            self._begin_next()
        if self._parts.is_closed:
            raise EngineClosed(ITERATOR_CLOSED)
        error = self._parts.error
        if error is not None and (self._parts.is_lost or not self._begun):
            raise error
        batch = self._whole(self._begun.popleft())
        self._handed_out += 1
        return batch

    def _begin_next(self) -> None:
        """Begin to gather the next batch, if it comes without an error."""
        agreed = self._parts.take()
        if agreed is None:
            return
        self._left_to_gather -= 1
        try:
            self._begun.append(self._gathering_of(agreed))
        except BaseException:  # as when memory is short
            self._parts.undo_take()
            raise

    def _gathering_of(self, agreed: Agreed) -> _Gathering:
        if self._gathers is None:
            self._gathers = self._made_gathers()
        wholes, works = [], []
        with _current(self._gather_stream):
            if agreed.is_ready is not None:
                agreed.is_ready.wait()
            for part in agreed.parts:
                wholes.append(whole := self._memory_for(self._peers.count * len(part)))
                if len(part):
                    works.append(self._gathers.begin(whole, part))
            if self._gather_stream is None:
                return _Gathering(agreed.gathered, wholes, works, None)
            for work in works:
                work.wait()  # the stream does, and not this thread
            for part in agreed.parts:  # memory of the other stream, which may be used again when it is dropped
                part.record_stream(self._gather_stream)
            return _Gathering(agreed.gathered, wholes, [], self._gather_stream.record_event())

    def _whole(self, begun: _Gathering) -> Any:
        """Return a batch that is gathered, for the current stream."""
        try:
            for work in begun.works:
                complete(work, self._is_wanted)
        except EngineClosed as closed:
            raise self._parts.error or closed from None
        except RuntimeError as error:  # of gloo, which has no type of its own
            raise self._parts.error or self._peers.lost(error) from error
        if begun.event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(begun.event)
            for whole in begun.wholes:
                whole.record_stream(stream)
        assert self._parts.layout is not None  # the peers have agreed on it
        return self._parts.layout.joined(begun.wholes, begun.gathered, RAGGED_AS[self._settings.ragged])

    def _made_gathers(self) -> Gathers:
        if self._device.type == "cuda":
            return NcclGathers(self._peers, self._device, self._parts.is_new_communicator)
        try:
            return GlooGathers(self._peers, f"{self._parts.begin().name}/data", self._is_wanted)
        except EngineClosed as closed:
            raise self._parts.error or closed from None

    def _memory_for(self, size_bytes: int) -> torch.Tensor:
        if self._device.type == "cuda":
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        return self._memory.take(size_bytes)

    def _is_wanted(self) -> bool:
        return not self._parts.is_closed and not self._parts.is_lost

    def _abort(self) -> None:
        if self._gathers is not None:
            self._gathers.abort()

    def _end_gathers(self, is_wanted: Callable[[], bool]) -> None:
        """Wait for what is being gathered, because the peers may need this process's parts of it.

        The thread calls it when the iterator is closed.
        """
        if self._gathers is None:
            return
        try:
            for work in [work for begun in self._begun for work in begun.works]:
                complete(work, is_wanted)
        except (EngineClosed, RuntimeError):
            self._gathers.abort()
        self._begun.clear()
        self._gathers.close()

    def statistics(self) -> dict[str, Any]:
        """Return what `GDSDataset.stats` says. Bytes are those that this process has read."""
        return {
            **self._inner.statistics(),
            "batches": self._handed_out,
            "stalls": self._parts.stalls,
            "stall_s": self._parts.stall_s,
            "mean_ready": self._ready / self._handed_out if self._handed_out else 0.0,
        }

    def stop(self) -> None:
        self._parts.stop()

    def close(self) -> None:
        """Drop what is read ahead. The thread notifies the peers by itself."""
        self._parts.close()


def _current(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Make a stream the current one, if there is any."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

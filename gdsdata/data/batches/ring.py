"""`RingReader`: batches of samples of one size, read into a ring of slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from gdsdata.data.batches.reader import Reader
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.data.counts import sum_of
from gdsdata.errors import CorruptData, IoError
from gdsdata.formats.index import Index
from gdsdata.io import engine
from gdsdata.io.dlpack_types import SMALL_FLOATS

if TYPE_CHECKING:
    from gdsdata.data.batches.pieces import OpenPieces
    from gdsdata.data.batches.skipped import Skipped
    from gdsdata.data.batches.slot import SlotBatches
    from gdsdata.data.order.permutation import Order

# Makes the engine's reader of batches of so many samples, and returns it with their dtype.
MakeBatches = Callable[[int], tuple[engine.Batches, torch.dtype]]
GetIds = Callable[[], np.ndarray]


# Shorter batches for a GPU share a slot of the ring, up to so many bytes. H200, twelve workers,
# GB/s of shuffled records of 4 KiB in batches of 2048, 512, 128 and 32: 47, 43, 32 and 20. With 16
# MiB 45, 37, 28 and 16, with 24 MiB 45, 41, 31 and 19. With a slot for each batch, and eight
# workers, the last three had 16, 6 and 3.
_SLOT_BYTES = 32 << 20


class _Again:
    """Batches that are read once more, in other sizes, and the function that takes one."""

    def __init__(self, batches: engine.Batches, take: Callable[[], torch.Tensor]) -> None:
        self.batches, self.take = batches, take


def batches_in_slot(index: Index, settings: BatchSettings) -> int:
    """Return how many batches share a slot of the ring, at most.

    For a GPU a slot costs copies, events and a cast, whatever its size. On the CPU it costs little,
    and a batch is best handed out while it is in the processor's cache. Bad samples are left out of
    one batch at a time.
    """
    if settings.device.type == "cpu" or settings.skipped is not None:
        return 1
    batch_bytes = max(1, settings.batch_size * index.sample.bytes)
    batches = len(index) // settings.batch_size
    return max(1, min(_SLOT_BYTES // batch_bytes, batches // settings.prefetch))


class RingReader(Reader[Index]):
    """Hands out the engine's batches. Each is a tensor ``(B, *sample shape)``.

    Args:
        index: of the samples.
        settings: of the batches.
        make_batches: makes the engine's reader.
        pieces: as of `Reader`.
    """

    def __init__(
        self, index: Index, settings: BatchSettings, make_batches: MakeBatches, pieces: OpenPieces | None = None
    ) -> None:
        super().__init__(index, pieces)
        self._settings, self._make_batches = settings, make_batches
        self.batches_in_slot = batches_in_slot(index, settings)
        self._batches, dtype = make_batches(settings.batch_size * self.batches_in_slot)
        self._take = _taking(self._batches, dtype, index, settings)
        self._planned: deque[tuple[GetIds, np.ndarray]] = deque()  # of each slot: ids, sizes of its batches
        self._has_order = False
        self._again: _Again | None = None  # what had an error
        self._left_in_slot = self._taken = 0  # batches
        self._counted_again: dict[str, Any] | None = None  # statistics of what was read again
        if settings.skipped is not None:
            self.next = partial(self._next_sound, settings.skipped)
        elif self.batches_in_slot == 1:
            self.next = self._take
        else:
            from gdsdata.data.batches.slot import SlotBatches

            self.next = partial(self._next_of_slot, SlotBatches(self._batches, settings.device))

    def plan(self, samples: np.ndarray, sizes: np.ndarray, steps: np.ndarray) -> None:
        plan = self.located(samples, sizes, steps)
        first = np.concatenate([[0], np.cumsum(sizes)])
        sizes = self._noted(sizes, lambda begin, end: samples[first[begin] : first[end]])
        self._batches.plan(plan.source, plan.offset, sizes)

    def plan_in_order(self, order: Order, epoch: int, steps: range | np.ndarray) -> None:
        """Add batches of an order. The engine computes where a uniform one finds its samples."""
        uniform = order.uniform(epoch)
        if self.pieces is not None or uniform is None:
            return super().plan_in_order(order, epoch, steps)
        with order.memory_errors_named(len(steps)):
            if not self._has_order:
                index = self.index
                self._batches.set_order(*uniform, index.first_sample, index.base_bytes, index.stride_bytes)
                self._has_order = True
            begin, length, sizes = order.runs_of(steps)
        sizes = self._noted(sizes, lambda begin, end: order.samples_of(epoch, steps[begin:end])[0])
        self._batches.plan_runs(begin, length, sizes)

    def _noted(self, sizes: np.ndarray, ids: Callable[[int, int], np.ndarray]) -> np.ndarray:
        """Note the batches of each slot, if a slot has several or bad samples are skipped.

        Args:
            sizes: int64 (batches,), their samples.
            ids: returns those of the batches from one to another. It is called if some of these
                have an error.

        Returns:
            The slots' samples, int64 (slots,).
        """
        if self.batches_in_slot == 1 and self._settings.skipped is None:
            return sizes
        if len(sizes) >= 2 * self.batches_in_slot:
            together = self.batches_in_slot
        else:  # an epoch begins with few, which come soon
            together = max(1, min(self.batches_in_slot, len(sizes) // self._settings.prefetch))
        begins = np.arange(0, len(sizes), together)
        for begin in begins.tolist():
            end = min(begin + together, len(sizes))
            self._planned.append((partial(ids, begin, end), sizes[begin:end]))
        return np.add.reduceat(sizes, begins)

    def _next_of_slot(self, slot: SlotBatches) -> torch.Tensor:
        """Take the next batch of a slot."""
        if not self._left_in_slot:
            self._take_slot(slot)
        self._left_in_slot -= 1
        if self._again is None:
            batch = slot.next()
        else:
            batch = self._again.take()
            if not self._left_in_slot:
                self._end_again()
        self._taken += 1
        return batch

    def _take_slot(self, slot: SlotBatches) -> None:
        ids, sizes = self._planned.popleft()
        try:
            slot.add(self._take(), sizes)
        except (CorruptData, FileNotFoundError, IoError):
            if len(sizes) == 1:
                raise
            self._again = self._read_again(ids(), sizes)  # one of these batches has the error
        self._left_in_slot = len(sizes)

    def _next_sound(self, skipped: Skipped) -> torch.Tensor:
        """Take the next batch. If it is bad, read its samples one by one from files."""
        ids, _ = self._planned.popleft()
        try:
            return self._take()
        except (IoError, CorruptData):
            samples = ids()
        self._again = again = self._read_again(samples, np.ones(len(samples), np.int64))
        try:
            # Cloned, because the ring's own memory is for whole batches.
            return torch.cat(skipped.sound(len(samples), lambda _: again.take().clone()))
        finally:
            self._end_again()

    def _read_again(self, samples: np.ndarray, sizes: np.ndarray) -> _Again:
        """Begin to read samples in batches of these sizes, from files."""
        batches, dtype = self._make_batches(int(sizes.max()))
        plan = self.index.plan(samples)
        batches.plan(plan.source, plan.offset, sizes)
        return _Again(batches, _taking(batches, dtype, self.index, self._settings))

    def _end_again(self) -> None:
        assert self._again is not None  # by the callers
        counted = self._again.batches.statistics()
        counted["batches"] = 0 if self._settings.skipped is None else 1  # `_taken` has the others
        before = self._counted_again
        self._counted_again = counted if before is None else sum_of(before, counted)
        self._again.batches.close()
        self._again = None

    def statistics(self) -> dict[str, Any]:
        counted = self._batches.statistics()
        if self.batches_in_slot > 1:
            counted["batches"] = self._taken
        return counted if self._counted_again is None else sum_of(counted, self._counted_again)

    def stop(self) -> None:
        self._batches.close()
        if (again := self._again) is not None:
            again.batches.close()

    def close(self) -> None:
        self.stop()
        super().close()


def _taking(
    batches: engine.Batches, dtype: torch.dtype, index: Index, settings: BatchSettings
) -> Callable[[], torch.Tensor]:
    """Return a function that takes the next batch, as its user gets it.

    It is called once a batch, so it decides nothing twice.
    """
    next_batch = batches.next
    result_dtype = index.sample.torch_dtype if index.sample.torch_dtype != dtype else None
    as_tensor = partial(_small_floats, dtype) if dtype in SMALL_FLOATS else from_dlpack
    if settings.device.type == "cpu":
        if result_dtype is None:
            return lambda: as_tensor(next_batch())
        return lambda: as_tensor(next_batch()).to(result_dtype)
    from gdsdata.io.captures import beside_captures

    most_leases = settings.prefetch if settings.zero_copy else -1
    return partial(_take_on_cuda, batches, settings.device, as_tensor, result_dtype, most_leases, beside_captures)


def _small_floats(dtype: torch.dtype, batch: Any) -> torch.Tensor:
    return from_dlpack(batch).view(dtype)


def _take_on_cuda(
    batches: engine.Batches,
    device: torch.device,
    as_tensor: Callable[[Any], torch.Tensor],
    result_dtype: torch.dtype | None,
    most_leases: int,
    beside_captures: Callable[[], AbstractContextManager[None]],
) -> torch.Tensor:
    """Take a batch on the current stream.

    The stream waits for the copies, and the host does not. Work that is queued here comes behind
    them. The lease ends with ``leased``, behind that work.
    """
    leased = as_tensor(batches.next(engine.stream_of(device)))
    if result_dtype is None and batches.leased <= most_leases:
        return leased
    with beside_captures():  # torch may allocate
        return leased.clone() if result_dtype is None else leased.to(result_dtype)

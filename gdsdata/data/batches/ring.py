"""`RingReader`: batches of samples of one size, read into a ring of slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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

if TYPE_CHECKING:
    from gdsdata.data.batches.pieces import OpenPieces
    from gdsdata.data.batches.skipped import Skipped

# Makes the engine's reader of batches of so many samples, and returns it with their dtype.
MakeBatches = Callable[[int], tuple[engine.Batches, torch.dtype]]


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
        self._batches, dtype = make_batches(settings.batch_size)
        self._take = _taking(self._batches, dtype, index, settings)
        self.next = self._take if settings.skipped is None else partial(self._next_sound, settings.skipped)
        self._planned: deque[np.ndarray] = deque()  # ids of each batch, if bad samples are left out
        self._alone: dict[str, Any] | None = None  # statistics of samples that were read one by one

    def plan(self, samples: np.ndarray, sizes: np.ndarray) -> None:
        plan = self.located(samples)
        if self._settings.skipped is not None:
            self._planned.extend(np.split(samples, np.cumsum(sizes)[:-1]))
        self._batches.plan(plan.source, plan.offset, sizes)

    def _next_sound(self, skipped: Skipped) -> torch.Tensor:
        """Take the next batch. If it is bad, read its samples one by one from files."""
        samples = self._planned.popleft()
        try:
            return self._take()
        except (IoError, CorruptData):
            pass
        one_each, dtype = self._make_batches(1)
        take = _taking(one_each, dtype, self.index, self._settings)
        plan = self.index.plan(samples)
        one_each.plan(plan.source, plan.offset, np.ones(len(samples), np.int64))
        try:
            # Cloned, because the ring's own memory is for whole batches.
            return torch.cat(skipped.sound(len(samples), lambda _: take().clone()))
        finally:
            counted = {**one_each.statistics(), "batches": 1}
            self._alone = counted if self._alone is None else sum_of(self._alone, counted)
            one_each.close()

    def statistics(self) -> dict[str, Any]:
        counted = self._batches.statistics()
        return counted if self._alone is None else sum_of(counted, self._alone)

    def close(self) -> None:
        self._batches.close()
        super().close()


def _taking(
    batches: engine.Batches, dtype: torch.dtype, index: Index, settings: BatchSettings
) -> Callable[[], torch.Tensor]:
    """Return a function that takes the next batch, as its user gets it.

    It is called once a batch, so it decides nothing twice.
    """
    next_batch = batches.next
    result_dtype = index.sample.torch_dtype if index.sample.torch_dtype != dtype else None
    if settings.device.type == "cpu":
        if result_dtype is None:
            return lambda: from_dlpack(next_batch())
        return lambda: from_dlpack(next_batch()).to(result_dtype)
    most_leases = settings.prefetch if settings.zero_copy else -1
    return partial(_take_on_cuda, batches, settings.device, result_dtype, most_leases)


def _take_on_cuda(
    batches: engine.Batches, device: torch.device, result_dtype: torch.dtype | None, most_leases: int
) -> torch.Tensor:
    """Take a batch on the current stream.

    The stream waits for the copies, and the host does not. Work that is queued here comes behind
    them. The lease ends with ``lent``, behind that work.
    """
    lent = from_dlpack(batches.next(engine.stream_of(device)))
    if result_dtype is not None:
        return lent.to(result_dtype)
    return lent if batches.leased <= most_leases else lent.clone()

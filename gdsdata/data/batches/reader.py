"""`Reader`: the base of the classes that read the batches of one epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from gdsdata.data.order.permutation import as_array
from gdsdata.errors import ITERATOR_CLOSED, EngineClosed
from gdsdata.formats.index import SampleIndex

if TYPE_CHECKING:
    from gdsdata.data.batches.pieces import OpenPieces
    from gdsdata.data.order.permutation import Order
    from gdsdata.formats.plan import Plan

IndexT = TypeVar("IndexT", bound=SampleIndex)


class Reader(ABC, Generic[IndexT]):
    """Reads batches ahead, in the order in which they are planned.

    One thread uses it, and closes it. `next` may be called by another one, which ends before it is
    closed (see `stop`). An error ends it.

    Args:
        index: of the samples.
        pieces: chunks of the data that are in memory, and that samples come from if they are there.

    Attributes:
        next: takes the next batch, whose bytes are in place for the current stream. It raises what
            is wrong with a file, `StallError` if nothing has moved for ``stall_timeout_s``, and
            `EngineClosed` after `close`.
        pieces: as above.
        reach: called with the number of the epoch's next step, so that its chunks are fetched.
            None: there are none.
        batches_in_slot: how many batches it reads together. ``prefetch`` times as many are read
            ahead.
        least_planned: so many batches must be planned when `next` is called, if the epoch has them.
    """

    next: Callable[[], Any]
    reach: Callable[[int], None] | None
    batches_in_slot = 1
    least_planned = 1

    def __init__(self, index: IndexT, pieces: OpenPieces | None = None) -> None:
        self.index, self.pieces = index, pieces
        self.reach = None if pieces is None else pieces.reach

    @abstractmethod
    def plan(self, samples: np.ndarray, sizes: np.ndarray, steps: np.ndarray) -> None:
        """Add batches.

        Args:
            samples: int64, the ids of all batches' samples.
            sizes: int64 (B,), samples of each batch.
            steps: int64 (B,), the number of each batch in the epoch.
        """

    def plan_in_order(self, order: Order, epoch: int, steps: range | np.ndarray) -> None:
        """Add batches of an order by their numbers in the epoch, which ascend."""
        numbers = as_array(steps)
        self.plan(*order.samples_of(epoch, numbers), numbers)

    def located(self, samples: np.ndarray, sizes: np.ndarray, steps: np.ndarray) -> Plan:
        """Return where the samples of batches are read from. The arguments are those of `plan`."""
        plan = self.index.plan(samples)
        return plan if self.pieces is None else self.pieces.local(plan, np.repeat(steps, sizes))

    def steps_local(self, steps: range | np.ndarray) -> int:
        """Return how many of these steps, from the first on, need not wait for a chunk.

        Args:
            steps: ascending.
        """
        return len(steps) if self.pieces is None else self.pieces.steps_in_memory(steps)

    @abstractmethod
    def statistics(self) -> dict[str, Any]:
        """Return what `GDSDataset.stats` says of batches."""

    @abstractmethod
    def stop(self) -> None:
        """Have `next`, which another thread may be in, raise `EngineClosed`. Does not wait."""

    def close(self) -> None:
        """Drop what is read ahead, and wait for all reads but stalled ones."""
        if self.pieces is not None:
            self.pieces.close()
        # Methods of this reader: they would keep it, and its files, until garbage is collected.
        self.next, self.reach = _raise_closed, None


def _raise_closed() -> Any:
    raise EngineClosed(ITERATOR_CLOSED)

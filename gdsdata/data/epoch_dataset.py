"""`EpochDataset`: the base of `GDSDataset` and `Mix`, whose iterators give an epoch each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from gdsdata.data.batch_dataset import BatchDataset
from gdsdata.data.loaders import (
    LightningLoop,
    is_evaluated_by_lightning,
    lightning_loop,
    refuse_spinning,
    warn_of_stacking,
)
from gdsdata.data.progress import Begun, Progress


class EpochDataset(BatchDataset):
    """A data set whose iterators give an epoch each, or the rest of it.

    A subclass makes `_progress`, and has the abstract methods.
    """

    _progress: Progress

    @abstractmethod
    def __len__(self) -> int:
        """Return this rank's number of batches in an epoch."""

    def _epoch_turns(self) -> int:
        """Return how many numbers of batches an epoch has: some of a `Mix` may have no batch."""
        return len(self)

    @abstractmethod
    def _step_samples(self) -> int | list[int]:
        """Return the samples of a step of all ranks; of several sources, for each."""

    @abstractmethod
    def _batches_of(self, begun: Begun) -> Iterator[Any]:
        """Return the batches of an iterator that has begun."""

    def __iter__(self) -> Iterator[Any]:
        """Begin to read this epoch, or the rest of it after `load_state_dict`."""
        warn_of_stacking(self)
        refuse_spinning(self)
        if is_evaluated_by_lightning():
            # Its sanity check and limit_val_batches leave an epoch early on purpose: no warning.
            self._progress.go_to(self._progress.epoch)
        loop = lightning_loop()
        batches = self._begin(loop)
        return batches if loop is None else self._of_restored(loop, batches)

    def _begin(self, loop: LightningLoop | None) -> Iterator[Any]:
        is_over = loop is not None and loop.asks_behind_the_end()
        try:
            begun = self._progress.begin(self._epoch_turns(), self._step_samples())
        except ValueError as error:
            if self._progress.is_in_later_loop:
                return _fails(error)
            raise
        return iter(()) if is_over else self._batches_of(begun)

    def _of_restored(self, loop: LightningLoop, batches: Iterator[Any]) -> Iterator[Any]:
        """Give ``batches``, or those of a place that the loop has restored since they began."""
        if loop.load_late(self):
            batches = self._begin(loop)
        del loop  # Lightning's has this iterator
        yield from batches


def _fails(error: Exception) -> Iterator[Any]:
    """Raise ``error`` at the first batch.

    A DataLoader passes on no error of ``iter(dataset)`` in a worker's later loops: it dies of it.
    """
    yield from ()
    raise error

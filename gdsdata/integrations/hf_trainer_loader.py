"""The loader that a Trainer of transformers iterates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from gdsdata.data.batch_dataset import BatchDataset
from gdsdata.integrations.accelerate import Loader


class TrainerLoader(Loader):
    """The loader that a Trainer iterates.

    Attributes:
        dataset, prefetch_factor, collate_fn: of the loader that ``skip_first_batches`` makes in the
            place of this one after a resume.
    """

    prefetch_factor = None

    def __init__(self, accelerator: Any, batches: BatchDataset) -> None:
        super().__init__(accelerator, batches)
        self.dataset = _Resumed(batches)

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """Return a batch as it is."""
        return batch


class _Resumed(IterableDataset[Any]):
    """An epoch with None in the place of the batches that were trained on before.

    The Trainer drops these from the first epoch after a resume, so nothing is read for them.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __len__(self) -> int:
        """Return the samples in an epoch: the Trainer computes samples a second with it."""
        return getattr(self._batches, "samples", len(self._batches))

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._batches.state_dict()["batches"]):
            yield None
        yield from self._batches

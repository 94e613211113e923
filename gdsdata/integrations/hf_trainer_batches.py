"""The loader that a Trainer of transformers iterates, and errors about its batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gdsdata.data.batch_dataset import BatchDataset
from gdsdata.data.batches.ragged import Ragged
from gdsdata.integrations.accelerate import Loader, Resumed


class TrainerLoader(Loader):
    """The loader that a Trainer iterates."""

    def __init__(self, accelerator: Any, dataset: BatchDataset) -> None:
        super().__init__(accelerator, dataset)
        self.dataset = _CountedSamples(dataset)


class _CountedSamples(Resumed):
    """A `Resumed` whose length is in samples: a Trainer computes samples a second with it."""

    def __len__(self) -> int:
        return getattr(self._batches, "samples", len(self._batches))


@contextlib.contextmanager
def explaining(batch: Any) -> Iterator[None]:
    """Say what to do about a batch that a Trainer cannot use, if it raises an error."""
    try:
        yield
    except (AttributeError, RuntimeError, TypeError) as error:
        if isinstance(batch, torch.Tensor):
            raise TypeError(
                "a batch of the data set is a tensor, and a Trainer passes a dict of what the model's forward() "
                'takes: make one with transform=, as in transform=lambda batch: {"input_ids": batch}'
            ) from error
        for name, value in batch.items() if isinstance(batch, Mapping) else ():
            if isinstance(value, Ragged):
                raise TypeError(
                    f"the batch's {name!r} is a Ragged, because its samples may differ in size, and a Trainer takes "
                    'tensors: make them with Fields(ragged="padded"), or with as_padded() in transform=, and leave '
                    "out columns that the model does not take"
                ) from error
        raise

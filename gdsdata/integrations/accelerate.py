"""A data set in a training loop of accelerate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from gdsdata.data.batch_dataset import BatchDataset
from gdsdata.integrations.versions import importing

with importing("accelerate"):
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.utils import find_batch_size, send_to_device

__all__ = ["prepare"]


def prepare(accelerator: Accelerator, dataset: BatchDataset) -> Loader:
    """Return a loader of a data set for a training loop, in the place of ``accelerator.prepare``.

        accelerator = Accelerator()
        ds = gdsdata.GDSDataset("train/*.tar", batch_size=64)
        model, optimizer = accelerator.prepare(model, optimizer)
        data = gdsdata.integrations.accelerate.prepare(accelerator, ds)
        accelerator.load_state("checkpoint")  # the loop below continues behind the last batch
        for batch in data:
            ...

    Each process reads its own share; none reads for the others. ``accelerator.save_state`` and
    ``load_state`` save and load the place in the data, for another number of processes too if
    ``batch_size`` times processes stays the same. The last batch of an epoch ends a gradient
    accumulation, as with accelerate's own loaders.

    ``accelerator.prepare(DataLoader(ds))`` is refused if there are several processes: it would
    share out the batches of each share once more.

    Args:
        accelerator: of this process.
        dataset: a `GDSDataset` or `Mix`. If it is made before the Accelerator, give its ``device``:
            the default is the GPU that is current when it is made.

    Raises:
        TypeError: ``dataset`` is another object.
    """
    if not isinstance(dataset, BatchDataset):
        raise TypeError(
            f"prepare() takes a GDSDataset or a Mix, and not a {type(dataset).__name__}: pass a DataLoader, a model "
            "or an optimizer to accelerator.prepare()"
        )
    loader = Loader(accelerator, dataset)
    accelerator.register_for_checkpointing(loader)
    return loader


class Loader(DataLoaderStateMixin):  # type: ignore[misc]  # accelerate declares no types
    """A data set that says where it is, as accelerate's own loaders do.

    Args:
        accelerator: batches are moved to its device, and it asks which batch is the last one.
        dataset: the batches.

    Attributes:
        dataset, batch_size, drop_last, prefetch_factor, collate_fn: what accelerate asks of any
            DataLoader. ``skip_first_batches`` makes another loader of them.
    """

    batch_size, drop_last, prefetch_factor = None, False, None
    _is_accelerate_prepared = True  # `prepare_data_loader` returns it as it is

    def __init__(self, accelerator: Accelerator, dataset: BatchDataset) -> None:
        self.dataset = Resumed(dataset)
        self.gradient_state, self.device = accelerator.gradient_state, accelerator.device
        self._batches: Any = dataset

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            self.remainder = 0  # gather_for_metrics leaves out none of a batch
            batches = iter(self._batches)
            left = len(self) - self._batches.state_dict()["batches"]  # a resumed epoch has fewer
            for batch in batches:
                left -= 1
                if left == 0:
                    self.end_of_dataloader, self.remainder = True, self._distinct_in(batch)
                yield send_to_device(batch, self.device)
        finally:
            self.end()

    def _distinct_in(self, batch: Any) -> int:
        """Return how many rows of all ranks' last batches differ; 0 if that is not known, or all.

        With ``uneven="pad"`` or ``"repeat"``, some samples come twice. They are the last rows of
        the last ranks. The rows are samples if there are as many, whatever ``transform=`` does.
        """
        size, distinct = getattr(self._batches, "partial_step", (0, 0))
        with contextlib.suppress(IndexError, TypeError, ValueError):  # no tensors, or without rows
            if distinct > 0 and find_batch_size(batch) == size:
                return distinct
        return 0

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """Return a batch as it is."""
        return batch

    def set_epoch(self, epoch: int) -> None:
        """Have the next iterator begin this epoch, as `GDSDataset.set_epoch`."""
        self._batches.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the data set's state."""
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, as `GDSDataset.load_state_dict`."""
        self._batches.load_state_dict(state)


class Resumed(IterableDataset[Any]):
    """An epoch with None in the place of the batches that were trained on before.

    ``skip_first_batches`` drops these from the first epoch after a resume, so nothing is read.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __len__(self) -> int:
        """Return the batches in an epoch: ``skip_first_batches`` subtracts those that it drops."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._batches)  # first: it may begin an epoch again that was broken off
        for _ in range(self._batches.state_dict()["batches"]):
            yield None
        yield from batches

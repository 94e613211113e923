"""A data set in the Trainer of Composer. Checked with mosaicml 0.32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from gdsdata.data.batch_dataset import BatchDataset
from gdsdata.integrations.versions import importing

with importing("mosaicml"):
    from composer import Callback, Logger, State
    from composer.utils import reproducibility

__all__ = ["Loader"]


class Loader(Callback):  # type: ignore[misc]  # Composer declares no types that mypy finds
    """The training data of a Composer Trainer: its ``train_dataloader``, and a callback.

        data = Loader(gdsdata.GDSDataset("shards/", batch_size=64))
        trainer = Trainer(model=model, train_dataloader=data, callbacks=[data], save_folder="run")
        trainer.fit()

    Each checkpoint has the place in the data, and the random generators of all ranks. A resume goes
    on behind the last batch, and reads none of those before it. It works on another number of ranks
    if ``batch_size`` times ranks stays the same; new ranks have no generators to restore.

    Args:
        dataset: a `GDSDataset` or `Mix`. Each rank reads its own share.

    Attributes:
        dataset: the data set.

    Raises:
        TypeError: ``dataset`` is another object.
    """

    def __init__(self, dataset: BatchDataset) -> None:
        if not isinstance(dataset, BatchDataset):
            raise TypeError(
                f"Loader() takes a GDSDataset or a Mix, and not a {type(dataset).__name__}: pass other loaders to the "
                "Trainer as they are"
            )
        self.dataset: Any = dataset
        self._generators: list[dict[str, Any]] | None = None  # to be restored
        self._is_epoch_over = False  # Composer has all batches of an epoch, and has not begun the next one

    @property
    def batch_size(self) -> int:
        """The most samples in a batch of this rank. Composer divides it into microbatches."""
        return max(source.batch_size for source in getattr(self.dataset, "sources", [self.dataset]))

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        if self._is_epoch_over:
            self._is_epoch_over = False
            return iter(())
        return iter(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Return the data set's state, and the generators of all ranks. All ranks call it."""
        return {"data": self.dataset.state_dict(), "generators": _text_of(reproducibility.get_rng_state())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, as `GDSDataset.load_state_dict`."""
        self.dataset.load_state_dict(state["data"])
        self._generators = _generators_of(state["generators"])

    def fit_start(self, state: State, logger: Logger) -> None:
        """Have the data set go on where it is, instead of Composer reading batches to drop them.

        Raises:
            RuntimeError: Composer is at another place. For example, it resumes from a checkpoint
                that was saved without this.
        """
        place = self.dataset.state_dict()
        epoch, batch = state.timestamp.epoch.value, state.timestamp.batch_in_epoch.value
        self._is_epoch_over = batch == len(self)
        if (place["epoch"], place["batches"]) != ((epoch + 1, 0) if self._is_epoch_over else (epoch, batch)):
            raise RuntimeError(
                f"the data set is at batch {place['batches']} of epoch {place['epoch']}, and Composer would continue "
                f"at batch {batch} of epoch {epoch}: the checkpoint was saved without this Loader among the callbacks, "
                "or with another product of batch size and ranks. Resume with what it was saved with, or begin an "
                "epoch with load_weights_only=True"
            )
        self.dataset.load_state_dict(place)  # an iterator that an earlier fit() has left does not begin again
        state.dataset_resumption["train"] = True

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Restore the generators before the first batch. Composer does it only between epochs."""
        if self._generators is not None:
            reproducibility.load_rng_state(self._generators)
            self._generators = None


def _text_of(generators: list[dict[str, Any]]) -> str:
    """Return the states of generators as JSON: one value, whatever the number of ranks.

    Composer reads sharded checkpoints into the state of the ranks that there are now. A list would
    lack entries for new ones.
    """
    return json.dumps(generators, default=lambda array: array.tolist())


def _generators_of(text: str) -> list[dict[str, Any]]:
    """Return what `_text_of` was given."""
    found = []
    for one in json.loads(text):
        state = {name: torch.tensor(one[name], dtype=torch.uint8) for name in ("torch", "cuda") if name in one}
        version, numbers, gauss = one["python"]
        kind, keys, *rest = one["numpy"]
        found.append(
            {**state, "python": (version, tuple(numbers), gauss), "numpy": (kind, np.array(keys, np.uint32), *rest)}
        )
    return found

"""A data set in the Trainer of transformers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from gdsdata.checkpoint.api import load, save
from gdsdata.checkpoint.hooks import torch_hooks
from gdsdata.data.batch_dataset import BatchDataset
from gdsdata.integrations.accelerate import Loader
from gdsdata.integrations.overrides import check_overrides

if TYPE_CHECKING:
    from transformers import Trainer

    _Base = Any
else:
    _Base = object

# The data set's state, in a folder checkpoint-N of the Trainer.
STATE_FILE = "gdsdata_dataset.pt"


def use(trainer: Trainer, train: BatchDataset | None = None, *, checkpoints: bool = True) -> Trainer:
    """Have a Trainer train and evaluate from data sets, and resume where they were.

        trainer = Trainer(model, TrainingArguments("runs/a", save_steps=100))
        gdsdata.integrations.hf_trainer.use(trainer, train=ds)
        trainer.train(resume_from_checkpoint=True)

    Batches go to the model as the data set gives them: dicts of what its ``forward`` takes
    (``transform=`` makes them). The data set chooses the batch size; the Trainer's
    ``per_device_train_batch_size``, ``data_collator`` and ``dataloader_...`` arguments have no
    effect. Each process reads its own share.

    Each checkpoint has the data set's state. ``resume_from_checkpoint`` continues behind the last
    batch, without reading those before it, also on another number of processes if ``batch_size``
    times processes stays the same. With ``ignore_data_skip=True`` the epoch begins again.

    A `GDSDataset` or `Mix` as ``eval_dataset`` is used in the same way.

    Args:
        trainer: a Trainer, or an object of a class derived from it. Its class becomes one that is
            derived from `TrainerMixin` and its own.
        train: the training data. None: the Trainer's ``train_dataset``.
        checkpoints: False: the Trainer's files are written and read by torch alone, instead of
            through `gdsdata.torch_hooks`.

    Returns:
        The same Trainer.

    Raises:
        TypeError: the training data are no `GDSDataset` or `Mix`.
        RuntimeError: this version of transformers has no method that this needs.
    """
    check_overrides(type(trainer), TrainerMixin, _OVERRIDDEN, "transformers", "5.24")
    data = trainer.train_dataset if train is None else train
    if not isinstance(data, BatchDataset):
        raise TypeError(
            f"the training data must be a GDSDataset or a Mix, and not a {type(data).__name__}: pass one as train="
        )
    trainer.train_dataset = data
    if not isinstance(trainer, TrainerMixin):
        of_user = type(trainer)
        trainer.__class__ = type(of_user.__name__, (TrainerMixin, of_user), {"__module__": of_user.__module__})
    used: Any = trainer
    used.files_through_gdsdata = checkpoints
    return trainer


class TrainerMixin(_Base):  # type: ignore[misc]  # its methods go before those of a Trainer
    """The methods that `use` adds to a Trainer.

    A class of your own may derive from it and from Trainer instead, in this order.

    Attributes:
        files_through_gdsdata: the files of checkpoints are written and read by gdsdata.
    """

    files_through_gdsdata = True

    def get_train_dataloader(self) -> Any:
        """Return the loader of the training data."""
        loader = self._loader_of(self.train_dataset)
        return super().get_train_dataloader() if loader is None else loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader of a data set, or the Trainer's own for other data."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.eval_dataset[data]
        loader = self._loader_of(data)
        if loader is None:
            return super().get_eval_dataloader(eval_dataset)
        if data is self.train_dataset:
            raise ValueError(
                "eval_dataset is the training data set, whose place an evaluation would move: make a second one"
            )
        loader.set_epoch(0)  # the same batches each time
        return loader

    def train(self, *arguments: Any, **named: Any) -> Any:
        """Train as the Trainer does."""
        check_overrides(type(self), TrainerMixin, _OVERRIDDEN, "transformers", "5.24")
        with torch_hooks(safetensors=True) if self.files_through_gdsdata else contextlib.nullcontext():
            return super().train(*arguments, **named)

    def _loader_of(self, data: Any) -> TrainerLoader | None:
        return TrainerLoader(self.accelerator, data) if isinstance(data, BatchDataset) else None

    def _data_set(self) -> Any:
        """Return the training data if this saves their state, else None."""
        return self.train_dataset if isinstance(self.train_dataset, BatchDataset) else None

    def _init_training_state(self, *arguments: Any, **named: Any) -> tuple[int, int]:
        self._trained = super()._init_training_state(*arguments, **named)
        return self._trained

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        data = self._data_set()
        if self.args.should_save and data is not None:
            save(data.state_dict(), os.path.join(output_dir, STATE_FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        data = self._data_set()
        if checkpoint is None or self.args.ignore_data_skip or data is None:
            return
        path = os.path.join(checkpoint, STATE_FILE)
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"{path} is missing: the checkpoint was saved without gdsdata.integrations.hf_trainer.use(), so the "
                "place in the data is not known. Pass ignore_data_skip=True in TrainingArguments to begin its epoch "
                "again"
            )
        state = load(path)
        if (state["epoch"], state["batches"]) != self._trained:
            raise ValueError(
                f"{path}: the data set was at batch {state['batches']} of epoch {state['epoch']}, and the Trainer "
                f"would continue at batch {self._trained[1]} of epoch {self._trained[0]}. Resume with the same "
                "gradient_accumulation_steps, and the same product of batch size and processes"
            )
        data.load_state_dict(state)


# The methods of a Trainer that `TrainerMixin` overrides. Most are private to transformers.
_OVERRIDDEN = (
    "get_train_dataloader", "get_eval_dataloader", "train", "_init_training_state", "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)  # fmt: skip


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

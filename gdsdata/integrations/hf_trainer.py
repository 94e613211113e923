"""A data set in the Trainer of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from gdsdata.data.batch_dataset import BatchDataset
from gdsdata.integrations.hf_trainer_background import BackgroundTrainerMixin
from gdsdata.integrations.hf_trainer_mixin import STATE_FILE, TrainerMixin, check_version

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["STATE_FILE", "TrainerMixin", "use"]


def use(
    trainer: Trainer, train: BatchDataset | None = None, *, checkpoints: bool | Literal["background"] = True
) -> Trainer:
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

    A `GDSDataset` or `Mix` as ``eval_dataset``, or given to ``predict``, is used in the same way.

    Args:
        trainer: a Trainer, or an object of a class derived from it. Its class becomes one that is
            derived from `TrainerMixin` and its own.
        train: the training data. None: the Trainer's ``train_dataset``, which may be None for a
            Trainer that only evaluates or predicts.
        checkpoints: True: the Trainer's files are written and read through `gdsdata.torch_hooks`.
            "background": a save copies what it writes to the host, and files follow while training
            goes on (see `hf_trainer_background.BackgroundTrainerMixin`). Old checkpoints are
            removed when the new one is complete, and `train` returns when all are. Callbacks for
            saves run before that. Checkpoints of DeepSpeed and FSDP, those of a search for
            hyperparameters, and those that are pushed to the hub are written before a save returns.
            False: torch alone does it.

    Returns:
        The same Trainer.

    Raises:
        TypeError: the training data are no `GDSDataset` or `Mix`.
        ValueError: ``checkpoints`` has another value.
        RuntimeError: this version of transformers has no method that this needs.
    """
    mixin = _mixin_for(checkpoints)
    check_version(type(trainer))
    data = trainer.train_dataset if train is None else train
    if data is not None and not isinstance(data, BatchDataset):  # with None it evaluates or predicts
        raise TypeError(
            f"the training data must be a GDSDataset or a Mix, and not a {type(data).__name__}: pass one as train="
        )
    trainer.train_dataset = data
    if not isinstance(trainer, mixin):
        of_user = type(trainer)
        trainer.__class__ = type(of_user.__name__, (mixin, of_user), {"__module__": of_user.__module__})
    used: Any = trainer
    used.files_through_gdsdata, used.in_background = bool(checkpoints), checkpoints == "background"
    return trainer


def _mixin_for(checkpoints: bool | Literal["background"]) -> type[TrainerMixin]:
    if isinstance(checkpoints, bool):
        return TrainerMixin
    if checkpoints != "background":
        raise ValueError(f'checkpoints={checkpoints!r} is none of True, False and "background"')
    return BackgroundTrainerMixin

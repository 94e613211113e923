"""The methods that a Trainer of transformers gets."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import torch

from gdsdata.checkpoint.api import load, save
from gdsdata.checkpoint.deferred import deferred_for
from gdsdata.checkpoint.hooks import torch_hooks
from gdsdata.data.batch_dataset import BatchDataset
from gdsdata.integrations.hf_trainer_batches import TrainerLoader, explaining
from gdsdata.integrations.hf_trainer_folders import newest_complete
from gdsdata.integrations.overrides import check_overrides

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object

STATE_FILE = "gdsdata_dataset.pt"
"""The file with the data set's state, in a folder ``checkpoint-N`` of the Trainer."""


class TrainerMixin(_Base):  # type: ignore[misc]  # its methods go before those of a Trainer
    """The methods that `use` adds to a Trainer.

    A class of your own may derive from it and from Trainer instead, in this order.

    Attributes:
        files_through_gdsdata: the files of checkpoints are written and read by gdsdata.
    """

    files_through_gdsdata = True
    _loss_and_samples: Any = 0.0  # of an evaluation: sums over the samples of this process

    def get_train_dataloader(self) -> Any:
        """Return the loader of the training data."""
        loader = self._loader_of(self.train_dataset)
        return super().get_train_dataloader() if loader is None else loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader of a data set, or the Trainer's own for other data."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.eval_dataset[data]
        loader = self._evaluation_loader_of(data, "eval_dataset")
        return super().get_eval_dataloader(eval_dataset) if loader is None else loader

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the loader of what `predict` is given, or the Trainer's own for other data."""
        loader = self._evaluation_loader_of(test_dataset, "test_dataset")
        return super().get_test_dataloader(test_dataset) if loader is None else loader

    def prediction_step(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        """Return loss, logits and labels of a batch, and add to the losses of this evaluation."""
        from transformers.trainer_pt_utils import find_batch_size  # late: transformers is optional

        with explaining(inputs):
            found = super().prediction_step(model, inputs, *arguments, **named)
        if found[0] is not None:
            loss = found[0].detach().float().mean()
            is_counted = loss.isfinite() | (not self.args.logging_nan_inf_filter)
            sums = torch.stack([loss, torch.ones_like(loss)]) * (find_batch_size(inputs) or 1)  # type: ignore[no-untyped-call]
            self._loss_and_samples += sums.where(is_counted, 0.0).to(self.args.device)
        return found

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate as the Trainer does, but the loss of a data set is the mean over its samples.

        The Trainer counts all batches alike.
        """
        self._loss_and_samples = torch.zeros(2, device=self.args.device)
        found = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        name = f"{metric_key_prefix}_loss"
        if isinstance(dataloader, TrainerLoader) and name in found.metrics:
            loss, samples = self.accelerator.gather(self._loss_and_samples).view(-1, 2).sum(0).tolist()
            found.metrics[name] = loss / samples if samples else found.metrics[name]
        return found

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **named: Any) -> Any:
        """Train as the Trainer does.

        With ``resume_from_checkpoint=True`` it continues from the newest complete checkpoint.
        """
        check_version(type(self))
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_complete(self.args.output_dir) or True
        with torch_hooks(safetensors=True) if self.files_through_gdsdata else contextlib.nullcontext():
            return super().train(resume_from_checkpoint, *arguments, **named)

    def _loader_of(self, data: Any) -> TrainerLoader | None:
        return TrainerLoader(self.accelerator, data) if isinstance(data, BatchDataset) else None

    def _evaluation_loader_of(self, data: Any, argument: str) -> TrainerLoader | None:
        loader = self._loader_of(data)
        if loader is None:
            return None
        if data is self.train_dataset:
            raise ValueError(
                f"{argument} is the training data set, whose place an evaluation would move: make a second one"
            )
        loader.set_epoch(0)  # the same batches each time
        return loader

    def _data_set(self) -> Any:
        """Return the training data if this saves their state, else None."""
        return self.train_dataset if isinstance(self.train_dataset, BatchDataset) else None

    def _prepare_inputs(self, inputs: Any) -> Any:
        with explaining(inputs):
            return super()._prepare_inputs(inputs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], *arguments: Any) -> Any:
        with explaining(batch_samples[0] if batch_samples else None):
            return super()._get_num_items_in_batch(batch_samples, *arguments)

    def _init_training_state(self, *arguments: Any, **named: Any) -> tuple[int, int]:
        self._trained = super()._init_training_state(*arguments, **named)
        return self._trained

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        data = self._data_set()
        if self.args.should_save and data is not None:
            path = os.path.join(output_dir, STATE_FILE)
            deferred = deferred_for(path)
            if deferred is None:
                save(data.state_dict(), path)
            else:
                deferred.save_state(data.state_dict(), path)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        data = self._data_set()
        if checkpoint is None or self.args.ignore_data_skip or data is None:
            return
        path = os.path.join(checkpoint, STATE_FILE)
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"{path} is missing: the checkpoint was saved without gdsdata.integrations.hf_trainer.use(), or with "
                "save_only_model=True, so the place in the data is not known. Pass ignore_data_skip=True in "
                "TrainingArguments to begin its epoch again"
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
    "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "prediction_step", "evaluation_loop", "train",
    "_prepare_inputs", "_get_num_items_in_batch", "_init_training_state",
    "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler",
)  # fmt: skip


def check_version(kind: type) -> None:
    """Check that a class of Trainers has the methods that `TrainerMixin` overrides.

    Raises:
        RuntimeError: one is missing.
    """
    check_overrides(kind, TrainerMixin, _OVERRIDDEN, "transformers", "5.24")

"""Checkpoints of the Trainer of transformers that are written while training goes on."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch

from gdsdata.checkpoint.background.arguments import size_in_bytes
from gdsdata.checkpoint.background.file_saves import FileSaves
from gdsdata.checkpoint.deferred import deferring
from gdsdata.checkpoint.file_writer import sync_folder
from gdsdata.integrations.hf_trainer_folders import STATE_OF_TRAINER, remove_old
from gdsdata.integrations.hf_trainer_mixin import TrainerMixin
from gdsdata.integrations.overrides import check_overrides
from gdsdata.io.engine import warn_once
from gdsdata.io.options import EngineOptions

_SUFFIX = ".saving"  # of the Trainer's state, until the checkpoint is complete


class BackgroundTrainerMixin(TrainerMixin):
    """The methods that `use` adds to a Trainer with ``checkpoints="background"``.

    A checkpoint is complete when it has its ``trainer_state.json``, which appears last.

    Attributes:
        staging_bytes: the most host memory for checkpoints that are being written: a number, or as
            "8GiB". A larger one passes through it piece by piece.
    """

    staging_bytes: int | str = "8GiB"
    _saves: FileSaves | None = None  # while it trains

    def train(self, *arguments: Any, **named: Any) -> Any:
        """Train as the Trainer does, and wait until every checkpoint is on storage.

        Raises:
            IoError, ...: a checkpoint could not be written.
        """
        check_overrides(type(self), BackgroundTrainerMixin, _OVERRIDDEN, "transformers", "5.24")
        saves = FileSaves(
            os.path.abspath(self.args.output_dir), size_in_bytes("staging_bytes", self.staging_bytes), EngineOptions()
        )
        self._saves = saves
        try:
            saves.prepare(*self._expected_state())
            result = super().train(*arguments, **named)
            saves.raise_unseen()
            return result
        finally:
            self._saves = None
            saves.close()

    def _expected_state(self) -> tuple[int, torch.device | None]:
        """Return the likely size of weights and two moments in bytes, and a GPU that has them."""
        parameters = list(self.model.parameters())
        device = self.args.device if self.args.device.type == "cuda" else None
        return sum(one.nbytes * (3 if one.requires_grad else 1) for one in parameters), device

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        saves = self._saves
        is_of_others = self.is_deepspeed_enabled or self.is_fsdp_enabled or not self.args.should_save
        if saves is None or is_of_others or trial is not None or self.args.push_to_hub:
            return super()._save_checkpoint(model, trial)
        saves.raise_unseen(only_ended=True)
        step, limit = self.state.global_step, self.args.save_total_limit
        folder = os.path.join(self.args.output_dir, f"checkpoint-{step}")
        saves.step = step
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, STATE_OF_TRAINER))  # an older checkpoint of this step is replaced
        self.args.save_total_limit = None  # the Trainer would remove old ones now
        try:
            with _state_aside(self.state), deferring(saves, folder):
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        saves.behind(functools.partial(_complete, folder, limit, self.state.best_model_checkpoint))
        return None

    def _finalize_training(self, *arguments: Any, **named: Any) -> Any:
        if self._saves is not None:
            self._saves.raise_unseen()  # the best checkpoint may be loaded, and others removed
        return super()._finalize_training(*arguments, **named)


# The methods of a Trainer that `BackgroundTrainerMixin` overrides besides those of `TrainerMixin`.
_OVERRIDDEN = ("train", "_save_checkpoint", "_finalize_training")


@contextlib.contextmanager
def _state_aside(state: Any) -> Iterator[None]:
    """For ``with``: have the Trainer's state written under another name than its own."""
    save = state.save_to_json
    state.save_to_json = lambda path: save(f"{path}{_SUFFIX}")
    try:
        yield
    finally:
        del state.save_to_json


def _complete(folder: str, limit: int | None, best: str | None) -> None:
    """Give the state of a checkpoint its name, and remove checkpoints that are too many."""
    place = os.path.join(folder, STATE_OF_TRAINER)
    with open(place + _SUFFIX, "rb") as written:
        os.fsync(written.fileno())
    os.replace(place + _SUFFIX, place)
    sync_folder(folder)
    if limit is None or limit <= 0:
        return
    try:
        remove_old(folder, limit, best)
    except OSError as error:  # this checkpoint is complete all the same
        warn_once(f"older checkpoints beside '{folder}' could not be removed: {error}")

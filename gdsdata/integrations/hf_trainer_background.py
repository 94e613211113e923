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
from gdsdata.checkpoint.synced_folders import sync_folder
from gdsdata.integrations.hf_trainer_folders import STATE_OF_TRAINER, remove_old
from gdsdata.integrations.hf_trainer_mixin import TrainerMixin
from gdsdata.integrations.overrides import check_overrides
from gdsdata.io.options import EngineOptions
from gdsdata.storage.paths import absolute

_SUFFIX = ".saving"  # of the Trainer's state, until the checkpoint is complete


class BackgroundTrainerMixin(TrainerMixin):
    """The methods that `use` adds to a Trainer with ``checkpoints="background"``.

    A checkpoint is complete when it has its ``trainer_state.json``. This appears when all files of
    the process that saves it are on storage.

    Attributes:
        staging_bytes: the most host memory for checkpoints that are being written: a number, or as
            "8GiB". A larger one passes through it piece by piece.
        in_background: False: saves are complete when they return.
    """

    staging_bytes: int | str = "8GiB"
    in_background = True
    _saves: FileSaves | None = None  # while it trains
    _last_step = -1  # that was saved

    def train(self, *arguments: Any, **named: Any) -> Any:
        """Train as the Trainer does, and wait until every checkpoint is on storage.

        Raises:
            IoError, ...: a checkpoint could not be written.
            RuntimeError: another process could not write one.
        """
        check_overrides(type(self), BackgroundTrainerMixin, _OVERRIDDEN, "transformers", "5.24")
        if not self.in_background:
            return super().train(*arguments, **named)
        saves = FileSaves(
            absolute(self.args.output_dir), size_in_bytes("staging_bytes", self.staging_bytes), EngineOptions()
        )
        self._saves, self._last_step = saves, -1
        try:
            if self._is_deferred() and self.args.save_strategy != "no":
                saves.prepare(*self._expected_state())
            result = super().train(*arguments, **named)
            saves.raise_unseen()
            return result
        finally:
            self._saves = None
            saves.close()

    def _is_deferred(self) -> bool:
        """Return whether this process leaves files of its checkpoints to the background."""
        return self._saves is not None and self.args.should_save and not self._is_of_others()

    def _is_of_others(self) -> bool:
        """Return whether others write files of checkpoints, which no save here knows."""
        return bool(self.is_deepspeed_enabled or self.is_fsdp_enabled or self.args.push_to_hub)

    def _expected_state(self) -> tuple[int, torch.device | None]:
        """Return the likely size of weights and two moments in bytes, and a GPU that has them."""
        parameters = list(self.model.parameters())
        device = self.args.device if self.args.device.type == "cuda" else None
        return sum(one.nbytes * (3 if one.requires_grad else 1) for one in parameters), device

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        saves, step, limit = self._saves, self.state.global_step, self.args.save_total_limit
        if saves is None or trial is not None or self._is_of_others():
            return super()._save_checkpoint(model, trial)
        folder = os.path.join(absolute(self.args.output_dir), f"checkpoint-{step}")
        # Two saves of a step would share files, and an earlier step would look like a rest.
        with self._all_succeed():
            saves.raise_unseen(only_ended=step > self._last_step)
        self._last_step = saves.step = step
        if not self._is_deferred():
            return super()._save_checkpoint(model, trial)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, STATE_OF_TRAINER))  # an older checkpoint of this step is replaced
        try:
            with _state_aside(self.state, self.args), deferring(saves, folder):
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        best = self.state.best_model_checkpoint
        saves.behind(functools.partial(_complete, folder, limit, best and absolute(best)))
        return None

    def _save_rng_state(self, output_dir: str) -> None:
        """Have each process write its file, and wait for all: no checkpoint is complete before.

        The Trainer's own collectives of a save come before, so an error here meets none of them.
        """
        if self._saves is None or self._is_of_others():
            return super()._save_rng_state(output_dir)
        with self._all_succeed():
            return super()._save_rng_state(output_dir)

    def _finalize_training(self, *arguments: Any, **named: Any) -> Any:
        if self._saves is not None:  # the best checkpoint may be loaded, and others removed
            self._wait_on_all(self._saves)
        return super()._finalize_training(*arguments, **named)

    def _wait_on_all(self, saves: FileSaves) -> None:
        """Wait until the checkpoints of all processes are complete.

        Raises:
            IoError, ...: one of this process is not.
            RuntimeError: one of another process is not.
        """
        with self._all_succeed():
            saves.raise_unseen()

    @contextlib.contextmanager
    def _all_succeed(self) -> Iterator[None]:
        """For ``with``: wait for all processes at the end, and have an error of one raised by all.

        Raises:
            RuntimeError: another process has failed.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            failed = torch.tensor(int(error is not None), device=self.args.device)
            torch.distributed.all_reduce(failed, torch.distributed.ReduceOp.MAX)
            if error is None and failed.item():
                raise RuntimeError("another process could not write a checkpoint; it has raised the reason")
        if error is not None:
            raise error


# The methods of a Trainer that `BackgroundTrainerMixin` overrides besides those of `TrainerMixin`.
_OVERRIDDEN = ("train", "_save_checkpoint", "_save_rng_state", "_finalize_training")


@contextlib.contextmanager
def _state_aside(state: Any, arguments: Any) -> Iterator[None]:
    """For ``with``: have the Trainer's state written under another name than its own.

    The state comes last, before old checkpoints are removed. They stay: there is no limit then.
    """
    save = state.save_to_json

    def save_aside(path: str) -> None:
        save(f"{path}{_SUFFIX}")
        arguments.save_total_limit = None

    state.save_to_json = save_aside
    try:
        yield
    finally:
        del state.save_to_json


def _complete(folder: str, limit: int | None, best: str | None) -> None:
    """Give the state of a checkpoint its name, and remove checkpoints that are too many."""
    place = os.path.join(folder, STATE_OF_TRAINER)
    if not os.path.exists(place + _SUFFIX):
        return  # an override of `_save_checkpoint` writes no whole checkpoint
    for below, _, names in os.walk(folder):  # the Trainer syncs none of what it writes itself
        for name in names:
            with open(os.path.join(below, name), "rb") as written:
                os.fsync(written.fileno())
        sync_folder(below)
    os.replace(place + _SUFFIX, place)
    sync_folder(folder)
    sync_folder(os.path.dirname(folder))
    if limit is not None and limit > 0:
        remove_old(folder, limit, best)

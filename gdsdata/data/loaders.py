"""Loaders around a data set that would change its batches: found among its callers.

A loader passes nothing of itself to its data set. So these functions look at the frames that call
it, once an epoch.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info

from gdsdata.data.batch_dataset import BatchDataset
from gdsdata.io import engine
from gdsdata.torch_private import FETCHERS

# From `iter(dataset)` in a loader's fetcher, or in Lightning's loop around its own, to the method
# that is asked, with a subclass's own between them.
_MOST_FRAMES = 10
_LIGHTNING_LOOPS = ("lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop")
_LIGHTNING_EVALUATIONS = tuple(
    f"{package}.loops.{loop}_loop"
    for package in ("lightning.pytorch", "pytorch_lightning")
    for loop in ("evaluation", "prediction")
)


def _callers(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Yield the nearest callers of a frame."""
    for _ in range(_MOST_FRAMES):
        frame = frame and frame.f_back
        if frame is None:
            return
        yield frame


def warn_of_stacking(dataset: object) -> None:
    """Warn once of a DataLoader that has a batch size: it stacks whole batches.

    Call it when ``dataset`` is asked for an iterator.
    """
    worker = get_worker_info()
    if worker is not None and worker.id > 0:
        return
    for frame in _callers(sys._getframe(1)):
        if frame.f_code.co_name == "__init__" and "auto_collation" in frame.f_code.co_varnames:  # a loader's fetcher
            given = frame.f_locals
            if given.get("dataset") is dataset and given["auto_collation"] and _stacks(given.get("collate_fn")):
                engine.warn_once(
                    f"the DataLoader around a {type(dataset).__name__} has a batch_size, and stacks whole batches to "
                    "(batch_size, B, ...): pass batch_size=None to the DataLoader; for a Trainer of transformers call "
                    "gdsdata.integrations.hf_trainer.use(trainer)"
                )
            return


def fetcher_of_worker() -> object | None:
    """Return the fetcher of the loop for which a DataLoader's worker asks; None: it is too far."""
    for frame in _callers(sys._getframe(1)):
        if frame.f_globals.get("__name__") == FETCHERS:
            return frame.f_locals.get("self")
    return None


def refuse_spinning(dataset: object) -> None:
    """Refuse a Trainer of Composer that would begin the first epoch again.

    It resumes in a later epoch by one batch of each epoch before, as if an abandoned iterator ended
    its epoch. Call it when ``dataset`` is asked for an iterator.

    Raises:
        RuntimeError: such a Trainer is the caller.
    """
    for frame in _callers(sys._getframe(1)):
        if frame.f_code.co_name == "_spin_dataloaders_to_cur_epoch":
            state = getattr(frame.f_locals.get("self"), "state", None)
            if getattr(state, "train_dataloader", None) is dataset:
                raise RuntimeError(
                    f"Composer resumes in a later epoch, and does not know how this {type(dataset).__name__} gets "
                    "there: it would train on the first epoch again. Save and resume with loader = "
                    "gdsdata.integrations.composer.Loader(dataset) and Trainer(train_dataloader=loader, "
                    "callbacks=[loader])"
                )


class LightningLoop:
    """A loop of a Trainer of Lightning that asks data sets for iterators to train with.

    Args:
        loop: Lightning's ``FitLoop``.
        loaders: its ``CombinedLoader``, which has the data sets.
    """

    def __init__(self, loop: Any, loaders: Any) -> None:
        self._loop, self._loaders = loop, loaders

    def asks_behind_the_end(self) -> bool:
        """Return whether the loop asks for the rest of an epoch that is over.

        It does so if it counts steps, and resumes from a checkpoint of the end of an epoch: it
        would train on one batch more. If it counts epochs, it loads no states of its loaders then,
        so this loads those of data sets.
        """
        if self._loop.restarting:
            batches = self._loop.epoch_loop.batch_progress
            return bool(batches.is_last_batch and batches.total.completed == batches.total.processed)
        for dataset, _ in self._kept_states():
            self.load_late(dataset)
        return False

    def load_late(self, dataset: Any) -> bool:
        """Load what the loop has kept of a data set's state; return whether it had kept any.

        Lightning loads the states of its loaders when it makes their iterators, and only in the
        middle of an epoch. It makes them before it has the states if ``configure_optimizers`` asks
        for ``estimated_stepping_batches``.
        """
        for one, state in self._kept_states():
            if one is dataset:
                kept = self._loop._combined_loader_states_to_load
                self._loop._combined_loader_states_to_load = [None if other is state else other for other in kept]
                one.load_state_dict(state)
                if not self._loop.restarting:
                    iter(one)  # has no batch left, and so begins the next epoch
                return True
        return False

    def _kept_states(self) -> list[tuple[Any, Any]]:
        """Return the data sets whose states the loop has kept and not loaded, with these."""
        states = getattr(self._loop, "_combined_loader_states_to_load", None)
        if not states or self._loaders is None:
            return []
        loaders = [one for one in self._loaders.flattened if hasattr(one, "state_dict")]
        pairs = zip(loaders, states, strict=False)
        return [(one, state) for one, state in pairs if isinstance(one, BatchDataset) and state is not None]


def lightning_loop() -> LightningLoop | None:
    """Return the loop of Lightning that asks for an iterator to train with, or None.

    Call it when a data set is asked for an iterator.
    """
    for frame in _callers(sys._getframe(1)):
        if frame.f_code.co_name == "setup_data" and frame.f_globals.get("__name__") in _LIGHTNING_LOOPS:
            return LightningLoop(frame.f_locals["self"], frame.f_locals.get("combined_loader"))
    return None


def is_evaluated_by_lightning() -> bool:
    """Return whether a Trainer of Lightning asks for an iterator to validate, test or predict with.

    Call it when a data set is asked for an iterator.
    """
    return any(frame.f_globals.get("__name__") in _LIGHTNING_EVALUATIONS for frame in _callers(sys._getframe(1)))


def _stacks(collate: object) -> bool:
    """Return whether a loader's function stacks: torch's does, and those of transformers do."""
    collate = getattr(collate, "data_collator", collate)  # the Trainer's own around one leaves out columns
    module = getattr(collate, "__module__", None) or ""
    return collate is default_collate or module.startswith("transformers.data.")


def refuse_in_worker(device: torch.device, shares_reads: bool) -> None:
    """Refuse to read batches in a DataLoader's worker process that cannot be read there.

    Args:
        device: of the batches.
        shares_reads: peers share the reading of them.

    Raises:
        ValueError: this is a worker process, and they cannot.
    """
    if get_worker_info() and shares_reads:
        raise ValueError(
            "share_reads=True does not work in a DataLoader's worker processes, which gather nothing: use "
            "num_workers=0 (the engine's own threads read ahead) or share_reads=False"
        )
    if get_worker_info() and device.type != "cpu":
        raise ValueError(
            f"device={device} does not work in a DataLoader's worker processes: use num_workers=0 (the engine's own "
            "threads read ahead) or device='cpu'"
        )


def refuse_second_share(dataset: object, world_size: Callable[[], int]) -> None:
    """Refuse a loader of accelerate that would share batches of a share once more.

    ``accelerator.prepare(DataLoader(dataset))`` makes such a loader if there are several processes.
    Either its first process reads for all, or each takes every n-th batch of what it reads.
    Call it when ``dataset`` gets an epoch: these loaders set one before each iteration.

    Args:
        dataset: that gets it.
        world_size: returns how many processes share its batches already.

    Raises:
        RuntimeError: such a loader is among the callers.
    """
    for frame in _callers(sys._getframe(1)):
        if frame.f_globals.get("__name__") == "accelerate.data_loader":
            loader = frame.f_locals.get("self")
            if _shares(loader) and (world_size() > 1 or _fails(loader)):
                kind = type(dataset).__name__
                raise RuntimeError(
                    f"accelerate's {type(loader).__name__} would share out the batches of this {kind} among the "
                    "processes, and each process reads only its own share already: batches would be left out. Use "
                    "gdsdata.integrations.accelerate.prepare(accelerator, dataset) in the place of a prepared "
                    "DataLoader, and gdsdata.integrations.hf_trainer.use(trainer) for a Trainer of transformers"
                )


def _shares(loader: Any) -> bool:
    """Return whether a loader gives each of several processes another part of what it reads."""
    if type(loader).__name__ == "DataLoaderDispatcher":  # its first process reads for all
        return loader.state.num_processes > 1
    return type(loader).__name__ == "IterableDatasetShard" and loader.num_processes > 1


def _fails(loader: Any) -> bool:
    """Return whether a loader that shares out batches ends in a TypeError of accelerate."""
    return type(loader).__name__ == "IterableDatasetShard" and loader.batch_size is None

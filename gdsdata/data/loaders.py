"""Loaders around a data set that would change its batches: found among its callers.

A loader passes nothing of itself to its data set. So these functions look at the frames that call
it, once an epoch.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import default_collate, get_worker_info

from gdsdata.data.batch_dataset import BatchDataset
from gdsdata.io import engine
from gdsdata.torch_private import FETCHERS

# From `iter(dataset)` in a loader's fetcher, or in Lightning's loop around its own, to the method
# that is asked, with a subclass's own between them.
_MOST_FRAMES = 10
_LIGHTNING_LOOPS = ("lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop")


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


def is_over_in_lightning(dataset: object) -> bool:
    """Return whether a Trainer of Lightning asks for the rest of an epoch that is over.

    It does so if it counts steps, and resumes from a checkpoint of the end of an epoch: it would
    train on one batch more. If it counts epochs, it loads no states of its loaders then, so this
    loads those of data sets. Call it when ``dataset`` is asked for an iterator.
    """
    for frame in _callers(sys._getframe(1)):
        if frame.f_code.co_name == "setup_data" and frame.f_globals.get("__name__") in _LIGHTNING_LOOPS:
            loop = frame.f_locals["self"]
            if loop.restarting:
                batches = loop.epoch_loop.batch_progress
                return bool(batches.is_last_batch and batches.total.completed == batches.total.processed)
            _load_states_of(loop, frame.f_locals.get("combined_loader"))
            return False
    return False


def _load_states_of(loop: Any, combined_loader: Any) -> None:
    """Load what a loop of Lightning has kept of a checkpoint of the end of an epoch, once."""
    states = getattr(loop, "_combined_loader_states_to_load", None)
    if not states or combined_loader is None:
        return
    loop._combined_loader_states_to_load = []
    loaders = [one for one in combined_loader.flattened if hasattr(one, "state_dict")]
    for one, state in zip(loaders, states, strict=False):
        if isinstance(one, BatchDataset):
            one.load_state_dict(state)  # type: ignore[attr-defined]
            iter(one)  # has no batch left, and so begins the next epoch


def _stacks(collate: object) -> bool:
    """Return whether a loader's function stacks: torch's does, and those of transformers do."""
    collate = getattr(collate, "data_collator", collate)  # the Trainer's own around one leaves out columns
    module = getattr(collate, "__module__", None) or ""
    return collate is default_collate or module.startswith("transformers.data.")


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

"""`BatchDataset`: the base of `GDSDataset` and `Mix`, which yield whole batches."""

from __future__ import annotations

import functools
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from gdsdata.io import engine

# From `iter(dataset)` in a loader's fetcher to the method that is asked, with a subclass's own
# between them.
_FRAMES_TO_A_FETCHER = 6


def warn_of_stacking(dataset: object) -> None:
    """Warn once of a DataLoader that has a batch size: it stacks whole batches.

    Call it when ``dataset`` is asked for an iterator. A loader passes nothing to its data set, so
    this looks for the loader's fetcher among the callers.
    """
    worker = get_worker_info()
    if worker is not None and worker.id > 0:
        return
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_TO_A_FETCHER):
        frame = frame and frame.f_back
        if frame is None:
            return
        if frame.f_code.co_name == "__init__" and "auto_collation" in frame.f_code.co_varnames:
            told = frame.f_locals
            is_ours = told.get("dataset") is dataset
            if is_ours and told["auto_collation"] and told.get("collate_fn") is default_collate:
                engine.warn_once(
                    f"the DataLoader around a {type(dataset).__name__} has a batch_size, and stacks whole batches to "
                    "(batch_size, B, ...): pass batch_size=None to the DataLoader"
                )
            return


class BatchDataset(IterableDataset):
    """An iterable data set of whole batches.

    It has no items, and its errors name the argument that multiprocessing cannot send.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        ForkingPickler.register(cls, _reduced)  # other picklers may be able to send what this one cannot

    def __getitem__(self, index: object) -> NoReturn:
        """Refuse ``dataset[i]``, which `Subset` and `random_split` ask for too."""
        raise NotImplementedError(
            f"a {type(self).__name__} has no samples by number, which [], Subset and random_split ask for: iterate "
            "over it; for a part of the samples pass split= to GDSDataset, as in split=(0, 0.9) and split=(0.9, 1)"
        )

    def _of_user(self) -> dict[str, Any]:
        """Return the user's own functions and objects, by the names of arguments."""
        return {}


def _reduced(dataset: BatchDataset) -> str | tuple[Any, ...]:
    for name, value in dataset._of_user().items():
        while isinstance(value, functools.partial):
            value = value.func
        by_name = value if isinstance(value, (types.FunctionType, type)) else type(value)
        try:
            pickle.dumps(by_name)
        except Exception as error:
            raise TypeError(
                f"{name}= cannot be sent to a DataLoader's worker: {by_name.__qualname__} is a lambda, or defined "
                "within a function; define it at the top of a module, or use num_workers=0"
            ) from error
    return dataset.__reduce_ex__(2)

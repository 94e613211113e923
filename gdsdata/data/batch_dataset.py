"""`BatchDataset`: the base of data sets that yield whole batches."""

from __future__ import annotations

import functools
import pickle
import types
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NoReturn

from torch.utils.data import IterableDataset


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

    if not TYPE_CHECKING:  # type checkers would allow any name

        def __getattr__(self, name: str) -> NoReturn:
            """Say what to do in the place of ``.dataset``, which loops that skip batches want."""
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name == "dataset":
                message += (
                    ", because it is no DataLoader. A Trainer of transformers takes it by "
                    "gdsdata.integrations.hf_trainer.use(trainer), and a loop of accelerate by "
                    "gdsdata.integrations.accelerate.prepare(accelerator, dataset): both resume behind the last batch"
                )
            raise AttributeError(message, name=name, obj=self)

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

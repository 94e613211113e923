"""What a data set refuses, in words: arguments of other types, uses that cannot work, and what cannot be sent."""

from __future__ import annotations

import functools
import math
import os
import pickle
import sys
import types
from collections.abc import Collection, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from gdsdata import engine, formats
from gdsdata.formats.index import Format, Index, has_fields, is_of_windows, is_table
from gdsdata.options import EngineOptions

if TYPE_CHECKING:
    from gdsdata.decoders import Decoder, Image
    from gdsdata.skipped import Skipped

# From `iter(dataset)` in a loader's fetcher to the method that is asked, with a subclass's own between them.
_FRAMES_TO_A_FETCHER = 6


# ------------------------------------------------------------------------------------------------------- arguments


def check_types(
    source: Any,
    batch_size: Any,
    format: Any,
    seed: Any,
    prefetch: Any,
    transform: Any,
    collate: Any,
    decode: Any,
    options: Any,
) -> None:
    """Refuse arguments of `GDSDataset` that are of another type, before anything is made of them.

    Raises:
        TypeError: one is.
    """
    is_path = isinstance(source, (str, os.PathLike))
    is_list = isinstance(source, Collection) and all(isinstance(one, (str, os.PathLike)) for one in source)
    if not is_path and not is_list:
        raise TypeError(f"source={_shown(source)} must be a path, a directory, a glob, or a list of these")
    if format is not None:
        _check_format(format)
    for name, number in (("batch_size", batch_size), ("seed", seed), ("prefetch", prefetch)):
        if isinstance(number, bool) or not hasattr(type(number), "__index__"):
            raise TypeError(f"{name}={_shown(number)} must be a whole number")
    for name, function in (("transform", transform), ("collate", collate)):
        if function is not None and not callable(function):
            raise TypeError(f"{name}={_shown(function)} must be a function, called with a batch's values")
    if decode is not None and not isinstance(decode, Mapping):
        raise TypeError(f'decode={_shown(decode)} must be a dict by the names of fields, as in {{"jpg": "image"}}')
    if options is not None and not isinstance(options, EngineOptions):
        raise TypeError(f"options={_shown(options)} must be a gdsdata.EngineOptions, as in EngineOptions(workers=4)")


def _check_format(format: Any) -> None:
    names = [name for name in formats.__all__ if name[0].isupper()]
    if isinstance(format, str):
        meant = [name for name in names if name.lower() == format.lower()]
        remedy = f"pass gdsdata.formats.{meant[0]}(...)" if meant else f"it is one of {', '.join(names)}"
        raise TypeError(f"format={format!r} must be an object of gdsdata.formats: {remedy}")
    if isinstance(format, type):
        raise TypeError(f"format={format.__name__} is a class: write {format.__name__}() with its arguments")
    if not callable(getattr(format, "index", None)):
        raise TypeError(f"format={_shown(format)} must be one of gdsdata.formats, or have a method index(paths)")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:60]}... ({type(value).__name__})"


def check_values(prefetch: int, residency: str | None, device: torch.device, ragged: str, on_error: str) -> None:
    """
    Raises:
        ValueError: an argument of `GDSDataset` is out of range.
    """
    if prefetch < 1:
        raise ValueError(f"prefetch={prefetch}: at least one batch has to be in flight")
    if residency not in (None, "pinned"):
        raise ValueError(f'residency={residency!r} must be None or "pinned"')
    if residency is not None and device.type != "cuda":
        raise ValueError(f'residency="pinned" is for CUDA devices: on {device} files are mapped anyway')
    if ragged != "flat":
        from gdsdata.field_batches import check_ragged_as

        check_ragged_as(ragged)
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error={on_error!r} is none of 'raise', 'skip'")


def skipped_of(on_error: str) -> Skipped | None:
    """What takes note of bad samples; None: they are errors."""
    if on_error == "raise":
        return None
    from gdsdata.skipped import Skipped

    return Skipped()


def decoders_of(decode: Mapping[str, str | Decoder | Image] | None) -> dict[str, Decoder | Image]:
    """
    Raises:
        ValueError: one is of no name that is known, and no function.
        ImportError: one needs an extra that is not installed.
    """
    if not decode:
        return {}
    from gdsdata.decoders import decoder_of

    return {name: decoder_of(said) for name, said in decode.items()}


def checked_split(split: Any) -> tuple[float, float]:
    """
    Raises:
        TypeError, ValueError: it is no pair of numbers that rise within 0 and 1.
    """
    is_list = isinstance(split, (tuple, list)) and all(isinstance(one, (int, float)) for one in split)
    if not is_list or len(split) != 2:
        raise TypeError(f"split={_shown(split)} must be two numbers, where the part begins and ends: (0, 0.9)")
    if not (0 <= split[0] < split[1] <= 1):  # a NaN is refused too
        raise ValueError(f"split={tuple(split)}: the part begins and ends within 0 and 1, as in (0, 0.9) and (0.9, 1)")
    return float(split[0]), float(split[1])


def part_of(index: Any, split: tuple[float, float], source: str) -> Any:
    """The samples of an index that a split has.

    Sample i of N belongs to it if ``round(begin * N) <= i < round(end * N)``, where a half is rounded up. So parts of
    which one ends where the other begins have no sample in common and leave none out.

    Raises:
        ValueError: there are none.
    """
    if split == (0.0, 1.0):
        return index
    samples = len(index)
    begin, end = (math.floor(bound * samples + 0.5) for bound in split)
    if begin == end:
        raise ValueError(f"split={split}: of the {samples} samples of {source} it has none: use a larger part")
    return index.part(begin, end)


def check_index(
    index: Any, format: Format, collate: Any, residency: str | None, decode: Mapping[str, Decoder | Image]
) -> None:
    """
    Raises:
        ValueError: an argument of `GDSDataset` does not fit the samples that were found.
    """
    if is_of_windows(index) and not index.is_even:
        raise ValueError(f"{format}: last windows are shorter, which no batch holds: leave drop_last True")
    if collate is not None and not (has_fields(index) or is_table(index)):
        raise ValueError(
            f"collate= is for samples with fields: of {format} a batch is one tensor already, and transform= gets that"
        )
    names = {field.name for field in getattr(index, "fields", ())}
    if residency is not None and not isinstance(index, Index):
        raise ValueError(f"residency={residency!r} is for samples of one size: leave it out for fields")
    if lost := sorted(decode.keys() - names):
        raise ValueError(f"decode= names {lost[0]!r}, but the samples' fields are {sorted(names) or 'none'}")


# ------------------------------------------------------------------------------------------------------------- uses


def warn_of_stacking(dataset: object) -> None:
    """Say once that a DataLoader with a batch size stacks whole batches, when it asks ``dataset`` for an iterator.

    A loader does not tell its data set how it is called, so this looks for the loader's fetcher among the callers.
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


# ---------------------------------------------------------------------------------------------------- the class


class BatchDataset(IterableDataset):
    """An iterable data set of whole batches: it has no items, and says what multiprocessing cannot send."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        ForkingPickler.register(cls, _reduced)  # other picklers may be able to send what this one cannot

    def __getitem__(self, index: Any) -> NoReturn:
        """Of ``dataset[i]``, which `Subset` and `random_split` ask for too."""
        raise NotImplementedError(
            f"a {type(self).__name__} has no samples by number, which [], Subset and random_split ask for: iterate "
            "over it; for a part of the samples pass split= to GDSDataset, as in split=(0, 0.9) and split=(0.9, 1)"
        )

    def _of_user(self) -> dict[str, Any]:
        """What the user gave it, by the names of arguments: functions, and objects of classes of his own."""
        return {}


def _reduced(dataset: BatchDataset) -> Any:
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

"""Arguments of `AsyncCheckpointer`, checked."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from numbers import Real
from typing import Any, TypeVar

from gdsdata.checkpoint.background.manifest import LARGEST_STEP
from gdsdata.checkpoint.urls import folder_name, is_url, local_folder
from gdsdata.storage.paths import absolute
from gdsdata.whole_numbers import whole_number

T = TypeVar("T")

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_in_bytes(name: str, size: int | str) -> int:
    """Return a size that may have a unit, as "8GiB", in bytes.

    Args:
        name: of the argument, for the error.
        size: a number of bytes, or a number and a unit.

    Raises:
        ValueError: it is not positive, or not a size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    size_bytes = float(found[1]) * _UNITS.get(found[2].upper(), 0) if found else 0
    if not 0 < size_bytes < math.inf:
        raise ValueError(f"{name}={size!r:.100} must be a number of bytes, or have a unit as in '8GiB' or '500MB'")
    return int(size_bytes)


def step_number(step: Any) -> int:
    """Return the step of a save as an int.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is negative, or longer than the names of folders that are found again.
    """
    number = whole_number("step", step, 0)
    if number > LARGEST_STEP:
        raise ValueError(f"step={number} is more than {LARGEST_STEP}: give a smaller one")
    return number


def checkpoint_folder(folder: str | os.PathLike[str]) -> str:
    """Return the absolute path of the folder: the program may change its working directory.

    Raises:
        TypeError: it is no path.
        ValueError: it is empty, or the URL of objects.
    """
    path = folder_name("folder", folder)
    url = path if is_url(path) else "s3://bucket/run"
    return absolute(local_folder("folder", path, f", and upload={url!r} to have the checkpoints uploaded"))


def seconds(name: str, value: Any) -> float:
    """Return a time limit of a user, which ends.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, infinite, or not a number (NaN).
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r:.100} is of type {type(value).__name__}: give a number of seconds")
    limit_s = float(value)
    if not 0 <= limit_s < math.inf:
        raise ValueError(f"{name}={value} must be a number of seconds, 0 or more")
    return limit_s


def peers_of(count: Any) -> int:
    """Return how many other nodes keep a copy of each rank's state: 0 or 1.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is another number.
    """
    number = whole_number("peers", count, 0)
    if number > 1:
        raise ValueError(f"peers={number}: give 1 to keep states in the memory of one more node, or 0")
    return number


def check_no_replicas(are_there: bool) -> None:
    """Check that a checkpointer with ``peers`` has no replicas.

    Raises:
        ValueError: it has.
    """
    if are_there:
        raise ValueError(
            "peers= keeps the file of each rank in memory; with replicas= only some ranks have one: give one of them"
        )


def same_on_all(name: str, values: Sequence[T]) -> T:
    """Return the value that all ranks have of an argument.

    Args:
        name: of the argument, for the error.
        values: of each rank.

    Raises:
        ValueError: they differ.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"{name}= differs among the ranks: rank 0 has {values[0]!r}, and rank {rank} has {value!r}. Give the "
                "same on all of them"
            )
    return values[0]


def upload_url(upload: Any) -> str | None:
    """Return where checkpoints are uploaded to; None: nowhere.

    Raises:
        ValueError: it is no URL of a store.
    """
    if upload is None:
        return None
    if not isinstance(upload, str) or not is_url(upload):
        raise ValueError(f"upload={upload!r:.100} is no URL of a store: write it as 's3://bucket/run'")
    if upload.startswith(("http://", "https://")):
        raise ValueError(
            f"upload={upload!r:.100} is of a web server, which is only read: upload to s3://, gs:// or az://"
        )
    return upload


def bytes_per_s(name: str, gb_per_s: float | None) -> float | None:
    """Return a bandwidth in GB/s as bytes a second.

    Raises:
        TypeError: it is no number.
        ValueError: it is not positive.
    """
    if gb_per_s is None:
        return None
    if isinstance(gb_per_s, bool) or not isinstance(gb_per_s, (int, float)):
        raise TypeError(f"{name}={gb_per_s!r:.100} is of type {type(gb_per_s).__name__}: give a number of GB/s")
    if not 0 < gb_per_s < math.inf:
        raise ValueError(f"{name}={gb_per_s} must be more than 0; None has no bound")
    return gb_per_s * 1e9

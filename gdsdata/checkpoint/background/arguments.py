"""Arguments of `AsyncCheckpointer`, checked."""

from __future__ import annotations

import operator
import re
from typing import Any

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
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise ValueError(f"{name}={size!r} must be a number of bytes, or have a unit as in '8GiB' or '500MB'")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def whole_number(name: str, value: Any, least: int) -> int:
    """Return an argument as an int.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r:.100} is of type {type(value).__name__}: give a whole number") from None
    if number < least:
        raise ValueError(f"{name}={number} must be {least} or more")
    return number

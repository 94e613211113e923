"""Arguments of any type, numpy's among them, as plain ints and bools that a state can hold."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return an argument as a plain int.

    Args:
        name: of the argument, for the error.
        value: its value.
        least: the smallest number that it may be; None: there is none.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than ``least``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name}={shown(value)} must be a whole number")
    if least is not None and number < least:
        raise ValueError(f"{name}={number} must be {least} or more")
    return number


def flag(name: str, value: Any) -> bool:
    """Return an argument as a plain bool. 0 and 1 are taken for False and True.

    Args:
        name: of the argument, for the error.
        value: its value.

    Raises:
        TypeError: it is neither True nor False.
    """
    if value not in (True, False):
        raise TypeError(f"{name}={shown(value)} must be True or False")
    return bool(value)


def shown(value: object) -> str:
    """Return a value as errors show it: at most some 60 characters and its type."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:60]}... ({type(value).__name__})"

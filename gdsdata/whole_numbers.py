"""Whole numbers of any type, numpy's among them, as plain ints that a state can hold."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(name: str, value: Any) -> int:
    """Return an argument as a plain int.

    Args:
        name: of the argument, for the error.
        value: its value.

    Raises:
        TypeError: it is no whole number.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}={shown(value)} must be a whole number")


def shown(value: object) -> str:
    """Return a value as errors show it: at most some 60 characters and its type."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:60]}... ({type(value).__name__})"

"""Warnings of gdsdata show the line of the program that called it."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

import torch

# They stand between a program and a warning: torch iterates data sets, contextlib runs generators.
_BETWEEN = (
    os.path.join(os.path.dirname(__file__), ""),
    os.path.join(os.path.dirname(torch.__file__), ""),
    contextlib.__file__,
)


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn at the line of the program that called gdsdata, however deep this call is.

    Python shows a ``DeprecationWarning`` only if that line is in ``__main__``.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)

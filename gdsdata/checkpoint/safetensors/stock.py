"""The functions of the package `safetensors` itself, whatever stands under their names now."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from gdsdata.checkpoint.safetensors.errors import NotInstalled


class Stock(NamedTuple):
    """The functions of `safetensors` and `safetensors.torch`."""

    safe_open: Callable[..., Any]
    load_file: Callable[..., Any]
    save_file: Callable[..., Any]
    load: Callable[..., Any]
    save: Callable[..., Any]


def stock(what: str) -> Stock:
    """Return the functions of the package.

    Args:
        what: the caller does with them, for the error.

    Raises:
        NotInstalled: the package is not installed.
        ImportError: it is, and cannot be imported.
    """
    try:
        return _stock()
    except ModuleNotFoundError as error:
        if error.name != "safetensors":
            raise
        raise NotInstalled(what) from error


@functools.cache  # `installed` calls this before it replaces any of them
def _stock() -> Stock:
    import safetensors
    import safetensors.torch

    of_torch = safetensors.torch
    return Stock(safetensors.safe_open, of_torch.load_file, of_torch.save_file, of_torch.load, of_torch.save)

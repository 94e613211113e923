"""Saves of a thread that something else takes over, to write the files later."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from gdsdata.storage.paths import absolute


class Deferred(Protocol):
    """Takes saves over.

    A save raises NotReplaceable if no new file can take its name: hooks leave it to its package.
    """

    def save_state(self, value: Any, path: str) -> int:
        """Copy a value that `torch.save` would write, and return its size in bytes."""
        ...

    def save_tensors(self, tensors: list[torch.Tensor], header: bytes, path: str) -> None:
        """Copy the tensors of a safetensors file, in their order in it.

        Args:
            tensors: contiguous ones.
            header: everything in the file before the first tensor.
            path: of the file.
        """
        ...


_of_thread = threading.local()


@contextlib.contextmanager
def deferring(saves: Deferred, folder: str) -> Iterator[None]:
    """For ``with``: ``saves`` takes over what hooks would save below a folder.

    This holds for the calling thread, and not for `gdsdata.save`.
    """
    before = getattr(_of_thread, "taken_over", None)
    _of_thread.taken_over = saves, os.path.join(absolute(folder), "")
    try:
        yield
    finally:
        _of_thread.taken_over = before


def deferred_for(path: str) -> Deferred | None:
    """Return what takes over a save of the calling thread to a path; None: nothing does."""
    saves, folder = getattr(_of_thread, "taken_over", None) or (None, "")
    return saves if saves is not None and absolute(path).startswith(folder) else None

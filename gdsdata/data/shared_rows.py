"""Rows of numbers that a process shares with those that it begins."""

from __future__ import annotations

import numpy as np
import torch

from gdsdata import torch_private

_ROWS, _MOST_WORKERS = 3, 1024


def new_rows(numbers: np.ndarray | int = 0) -> torch.UntypedStorage:
    """Return rows of these numbers, which this process can share with those that it begins."""
    rows = torch_private.shared_memory(_ROWS * _MOST_WORKERS * 8)
    numbers_in(rows)[:] = numbers
    return rows


def numbers_in(rows: torch.UntypedStorage) -> np.ndarray:
    """Return rows as numpy's: int64 (3, _MOST_WORKERS).

    As a tensor, with torch's first operations, they would cost a start 0.5 ms more.
    """
    return np.asarray(_RowsMemory(rows))


class _RowsMemory:
    """Says to numpy where rows are. The array refers to it, and it keeps them."""

    def __init__(self, rows: torch.UntypedStorage) -> None:
        self._rows = rows
        self.__array_interface__ = {
            "data": (rows.data_ptr(), False),
            "typestr": np.dtype(np.int64).str,
            "shape": (_ROWS, _MOST_WORKERS),
            "version": 3,
        }

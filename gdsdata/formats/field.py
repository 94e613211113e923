"""`Field`: one of the fields that samples have."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch


def are_names(names: object) -> bool:
    """Return whether these are several names, each once, and no single string."""
    if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        return False
    return 0 < len(names) == len(set(names))


@dataclass(frozen=True)
class Field:
    """One of the fields that samples have.

    Attributes:
        name: as the format has it: the extension of a member ("jpg"), the name of a column.
        dtype: of its elements as stored, with their byte order; None: its bytes mean nothing to the
            format.
        shape: of one sample's value, which then no sample lacks; ``()`` is one element. None: a
            value has one dimension, of as many elements as its bytes hold.
        row_shape: if ``shape`` is None: the shape of each element along that dimension.
        fortran_order: the first axis varies fastest in the file.
        view_as: what the stored bits are, if numpy has no such dtype: bfloat16 in a ``dtype`` of
            uint16.
        depth: if ``shape`` is None: how many levels of lists its elements lie in. More than 1: a
            value is a list of lists.
        units: what its integers count, by their places in nested values: "us", "days"; "" is not
            known. Files of a data set agree in them (`columns.check_alike`).
    """

    name: str
    dtype: np.dtype | None = None
    shape: tuple[int, ...] | None = None
    row_shape: tuple[int, ...] = ()
    fortran_order: bool = False
    view_as: torch.dtype | None = None
    depth: int = 1
    units: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @property
    def element_dtype(self) -> np.dtype:
        """The dtype of stored elements: uint8 if the bytes mean nothing to the format."""
        return np.dtype(np.uint8) if self.dtype is None else self.dtype

"""The parts of an index that the engine knows: `Sample`, one of them, and `IndexedFiles`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gdsdata.fork_safe import cached_property
from gdsdata.values import Value

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from numpy.typing import DTypeLike

    class IndexedFiles(Protocol):
        """The files of a `gdsdata.formats.index.SampleIndex`."""

        @property
        def size_bytes(self) -> np.ndarray: ...
        @property
        def mtime_ns(self) -> np.ndarray: ...
        def joined_paths(self, more: Sequence[str] = ()) -> np.ndarray: ...
else:
    DTypeLike = Any  # at run time: numpy.typing takes as long to import as all of this

_TORCH_DTYPES = {
    np.dtype(name): getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


@dataclass(eq=False, repr=False)
class Sample(Value):
    """One sample, as it lies in a file and as it comes out.

    Attributes:
        dtype: as stored, with its byte order.
        shape: as stored; ``()`` is one element.
        fortran_order: the first axis varies fastest in the file, and also in the batch, which is a
            view with these strides.
        result_dtype: of the batch's tensor, if it is not the stored one.
        view_as: what the stored bits are, if numpy has no such dtype: bfloat16 in a ``dtype`` of
            uint16.

    Raises:
        ValueError: torch has no equivalent of ``dtype``.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    fortran_order: bool = False
    result_dtype: torch.dtype | None = None
    view_as: torch.dtype | None = None

    def __post_init__(self) -> None:
        torch_equivalent(self.dtype)

    @cached_property
    def bytes(self) -> int:
        """Bytes of one sample in its file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_torch_dtype(self) -> torch.dtype:
        """The torch dtype of the stored values, in native byte order."""
        return self.view_as or torch_equivalent(self.dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the batch's tensor."""
        return self.result_dtype or self.stored_torch_dtype


def torch_equivalent(dtype: np.dtype) -> torch.dtype:
    """Return the torch dtype of the same values, whatever the byte order of ``dtype``.

    Raises:
        ValueError: torch has none (strings, dates, long doubles, records, objects).
    """
    try:
        return _TORCH_DTYPES[dtype.newbyteorder("=")]
    except KeyError:
        known = ", ".join(known.name for known in _TORCH_DTYPES)
        raise ValueError(f"torch has no equivalent of numpy's {dtype}: convert the data to one of {known}") from None


def numpy_dtype(dtype: DTypeLike | torch.dtype) -> np.dtype:
    """Return a dtype that a user gave as numpy's.

    Raises:
        TypeError: it is none.
        ValueError: it is one of torch's that numpy lacks.
    """
    if isinstance(dtype, torch.dtype):
        found = next((of_numpy for of_numpy, of_torch in _TORCH_DTYPES.items() if of_torch == dtype), None)
        if found is None:
            bits = f"<u{dtype.itemsize}"
            raise ValueError(f"numpy has no equivalent of {dtype}: name the stored bits, as in dtype={bits!r}")
        return found
    if dtype is None:  # numpy takes it for float64
        raise TypeError("dtype=None is no dtype of numpy or torch: write one as in '<f4'")
    try:
        return np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype={dtype!r} is no dtype of numpy or torch ({error}): write one as in '<f4'") from None

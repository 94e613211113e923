"""Fixed-size records, one after another, behind an optional header of fixed size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from gdsdata.formats.index import Index, count_items, first_samples
from gdsdata.formats.sample import Sample, numpy_dtype
from gdsdata.storage.heads import sizes_of
from gdsdata.whole_numbers import whole_number

if TYPE_CHECKING:
    from numpy.typing import DTypeLike
else:
    DTypeLike = Any  # at run time: numpy.typing takes as long to import as all of this


@dataclass(frozen=True)
class Records:
    """Files of fixed-size records in C order, such as ``array.tofile`` writes.

    A batch is ``(B, *shape)``.

    Args:
        dtype: of a record's elements as stored, of numpy or torch; ``">f4"`` is big endian.
        shape: of one record; ``()`` is one element, and a number is a shape of one dimension.
        header_bytes: to skip at each file's start.

    Raises:
        TypeError: ``dtype`` is no dtype, ``shape`` no shape, or ``header_bytes`` no whole number.
        ValueError: torch or numpy has no equivalent of ``dtype``, a record has no bytes, or
            ``header_bytes`` is negative.
    """

    dtype: DTypeLike | torch.dtype
    shape: int | tuple[int, ...]
    header_bytes: int = 0
    takes_any_bytes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        shape = _shape_of(self.shape)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "header_bytes", whole_number("header_bytes", self.header_bytes))
        if isinstance(self.dtype, torch.dtype):
            object.__setattr__(self, "dtype", numpy_dtype(self.dtype))
        if any(size < 1 for size in shape) or self.header_bytes < 0:
            raise ValueError(f"{self}: a record has at least one element, and a header no less than 0 bytes")
        self._sample()

    def _sample(self) -> Sample:
        return Sample(numpy_dtype(self.dtype), _shape_of(self.shape))

    def index(self, paths: list[str]) -> Index:
        """Count the records of ``paths``. A file may hold none.

        Raises:
            CorruptData: a file is shorter than its header, or ends within a record.
            FileNotFoundError, IoError: a file is not available.
        """
        size_bytes, mtime_ns = sizes_of(paths)
        sample = self._sample()
        counts = [
            count_items(path, size, self.header_bytes, sample.bytes, "record")
            for path, size in zip(paths, size_bytes.tolist(), strict=True)
        ]
        return Index(
            paths=paths,
            size_bytes=size_bytes,
            mtime_ns=mtime_ns,
            first_sample=first_samples(counts),
            base_bytes=np.full(len(paths), self.header_bytes, np.int64),
            stride_bytes=np.full(len(paths), sample.bytes, np.int64),
            sample=sample,
        )


def _shape_of(shape: int | Iterable[int]) -> tuple[int, ...]:
    try:
        if not isinstance(shape, (str, bytes)):
            sizes = shape if isinstance(shape, Iterable) else (shape,)
            return tuple(whole_number("shape", size) for size in sizes)
    except TypeError:
        pass
    raise TypeError(f"shape={shape!r} must be whole numbers, as in (3, 224, 224), or one of them")

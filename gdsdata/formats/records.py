"""Fixed-size records, one after another, behind an optional header of fixed size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gdsdata.formats.index import Index, count_items, first_samples
from gdsdata.formats.sample import Sample
from gdsdata.storage.heads import sizes_of

if TYPE_CHECKING:
    from numpy.typing import DTypeLike
else:
    DTypeLike = Any  # at run time: numpy.typing takes as long to import as all of this


@dataclass(frozen=True)
class Records:
    """Files of fixed-size records in C order, such as ``array.tofile`` writes.

    A batch is ``(B, *shape)``.

    Args:
        dtype: of a record's elements as stored; ``">f4"`` is big endian.
        shape: of one record; ``()`` is one element.
        header_bytes: to skip at each file's start.

    Raises:
        ValueError: torch has no equivalent of ``dtype``, a record has no bytes, or ``header_bytes``
            is negative.
    """

    dtype: DTypeLike
    shape: tuple[int, ...]
    header_bytes: int = 0

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.shape) or self.header_bytes < 0:
            raise ValueError(f"{self}: a record has at least one element, and a header no less than 0 bytes")
        self._sample()

    def _sample(self) -> Sample:
        return Sample(np.dtype(self.dtype), tuple(self.shape))

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

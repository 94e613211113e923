"""`Plan`: where the pieces of some samples lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Plan(NamedTuple):
    """The pieces of m samples, p in all, sample after sample.

    It is a sparse matrix in CSR form. If each sample has equally many pieces, it has no row
    pointers.

    Attributes:
        samples: int64 (m,), ids in the index.
        source: int32 (p,), which file each piece lies in, a place in `SampleIndex.paths`; of a
            table the row group.
        offset: int64 (p,), where it begins there, in bytes; of a table the row.
        length: int64 (p,), in bytes; -1 is a field that the sample does not have. An int is the
            length of all pieces.
        sample_ptr: int64 (m + 1,): sample i has the pieces ``sample_ptr[i] : sample_ptr[i + 1]``.
            None: each sample has ``p // m`` of them.
    """

    samples: np.ndarray
    source: np.ndarray
    offset: np.ndarray
    length: np.ndarray | int
    sample_ptr: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """The length of each piece in bytes: int64 (p,), as ``length``."""
        return np.full(len(self.offset), self.length) if isinstance(self.length, int) else self.length

    def of_pieces(self, values: np.ndarray) -> np.ndarray:
        """Return the value of each piece's sample: (p,), of values (m,)."""
        if self.sample_ptr is not None:
            return np.repeat(values, np.diff(self.sample_ptr))
        return np.repeat(values, len(self.source) // max(1, len(self.samples)))

    def split(self, sizes: Sequence[int] | np.ndarray) -> list[Plan]:
        """Return the plans of batches of so many samples each: views of the arrays."""
        ends = np.cumsum(sizes)
        pieces = (
            self.sample_ptr[ends] if self.sample_ptr is not None else ends * (len(self.source) // len(self.samples))
        )
        plans = []
        begin = first = 0
        for end, stop in zip(ends.tolist(), pieces.tolist(), strict=True):
            length = self.length if isinstance(self.length, int) else self.length[first:stop]
            pointers = None if self.sample_ptr is None else self.sample_ptr[begin : end + 1] - first
            plans.append(
                Plan(self.samples[begin:end], self.source[first:stop], self.offset[first:stop], length, pointers)
            )
            begin, first = end, stop
        return plans

    @classmethod
    def joined(cls, plans: Sequence[Plan]) -> Plan:
        """Return the plan of the samples of several plans of one index, in order."""
        samples, source, offset, length, sample_ptr = zip(*plans, strict=True)
        pointers = None
        if sample_ptr[0] is not None:
            pointers = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(one) for one in sample_ptr]))])
        return cls(
            np.concatenate(samples),
            np.concatenate(source),
            np.concatenate(offset),
            length[0] if isinstance(length[0], int) else np.concatenate(length),
            pointers,
        )

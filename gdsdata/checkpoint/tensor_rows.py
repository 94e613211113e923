"""Where the elements of stored tensors lie: rows, gaps between them, and overlaps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gdsdata.checkpoint.stored import Stored
from gdsdata.checkpoint.tree import Path

# Rows are read together with the gaps between them if the mean gap is smaller than this: the gaps'
# pages are read anyway.
PAGE_BYTES = 4096
# Such a read is at most this many times as long as its rows, or no longer than this. With 8 of 256
# interleaved columns of 16 MiB, it takes 10 ms, and row by row it takes 55 to 70 (tmpfs).
_MOST_TIMES_AS_LONG = 16
_SHORT_READ_BYTES = 64 << 20


class Rows:
    """Rows: the longest stretches of a tensor without gaps in file and memory.

    Args:
        stored: the tensor in the file.
        stride: of the tensor in memory, in elements.

    Attributes:
        size_bytes: of each row.
        sizes: how many rows there are along each of the other dimensions.
        of_stored, of_target: the steps from one row to the next along these dimensions, in bytes.
    """

    def __init__(self, stored: Stored, stride: Sequence[int]) -> None:
        dimensions = [
            dimension for dimension in zip(stored.stride, stride, stored.shape, strict=True) if dimension[2] != 1
        ]
        dimensions.sort(reverse=True)
        elements = 1
        while dimensions and dimensions[-1][0] == dimensions[-1][1] == elements:
            elements *= dimensions.pop()[2]
        width = stored.dtype.itemsize
        self.size_bytes = elements * width
        self.of_stored = [step * width for step, _, _ in dimensions]
        self.of_target = [step * width for _, step, _ in dimensions]
        self.sizes = [size for _, _, size in dimensions]

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    @property
    def follow_in_target(self) -> bool:
        """Whether the rows are adjacent in memory, in the order of the file."""
        expected = self.size_bytes
        for step, size in zip(reversed(self.of_target), reversed(self.sizes), strict=True):
            if step != expected:
                return False
            expected *= size
        return True

    def offsets(self, steps: Sequence[int]) -> np.ndarray:
        """Return each row's distance from the first one, in bytes.

        ``steps`` are `of_stored` or `of_target`.
        """
        found = np.zeros(1, np.int64)
        for step, size in zip(steps, self.sizes, strict=True):
            found = (found[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
        return found


def without_gaps(stored: Stored) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements have the same order and no gaps."""
    strides, elements = [0] * len(stored.shape), 1
    for axis in sorted(range(len(stored.shape)), key=lambda axis: (stored.stride[axis], -axis)):
        strides[axis] = elements
        elements *= stored.shape[axis]
    return tuple(strides)


def is_read_with_gaps(stored: Stored, rows: Rows) -> bool:
    """Return whether one read from the first row to the last costs less than a read of each."""
    return costs_less_with_gaps(stored.span_bytes, stored.size_bytes, rows.count)


def costs_less_with_gaps(span_bytes: int, size_bytes: int, rows: int) -> bool:
    """Return whether rows of ``size_bytes`` are read faster with the gaps between them."""
    most_bytes = max(_MOST_TIMES_AS_LONG * size_bytes, _SHORT_READ_BYTES)
    return span_bytes - size_bytes < rows * PAGE_BYTES and span_bytes <= most_bytes


def overlapping(wanted: dict[Path, Stored]) -> list[list[tuple[Path, Stored]]]:
    """Return groups of tensors that share bytes of one record.

    They share them directly, or through others of their group.
    """
    groups: list[list[tuple[Path, Stored]]] = []
    end = 0

    def place(item: tuple[Path, Stored]) -> tuple[str, int, int]:
        return item[1].record.path, item[1].record.offset, item[1].offset

    for path, stored in sorted(wanted.items(), key=place):
        last = groups[-1][0][1] if groups else None
        shared = last is not None and last.record == stored.record and stored.offset < end and stored.span_bytes > 0
        # A tensor of another dtype might begin between two elements of the group's.
        if last is not None and shared and (stored.offset - last.offset) % stored.dtype.itemsize == 0:
            groups[-1].append((path, stored))
            end = max(end, stored.offset + stored.span_bytes)
        else:
            groups.append([(path, stored)])
            end = stored.offset + stored.span_bytes
    return groups

"""Where a checkpoint file has its tensors: `Record` and `Stored`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gdsdata.checkpoint.open_file import OpenFile


def sealed(one: Any) -> TypeError:
    """Return the error of `__setstate__`, by which a pickle could change its objects."""
    return TypeError(f"a {type(one).__name__} is not to be changed")


# Tuples, because thousands of them are made before the first byte of a checkpoint is read.
class Record(NamedTuple):
    """Bytes of a file that have one checksum.

    They are a storage in a torch archive, or a tensor in a safetensors file.

    Attributes:
        file: the file; None if the record is in no file, and not to be read.
        offset, size_bytes: where the bytes lie in the file.
        crc32: the checksum of all of them; None if the file has none.
        is_compared_by_caller: who has them read looks for checksums within them.
    """

    file: OpenFile | None
    offset: int
    size_bytes: int
    crc32: int | None = None
    is_compared_by_caller: bool = False

    def __setstate__(self, state: Any) -> None:
        raise sealed(self)

    @property
    def path(self) -> str:
        return "" if self.file is None else self.file.path


@functools.lru_cache(maxsize=1024)  # layers repeat
def spanned(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return how many elements lie from a tensor's first one to its last one.

    -1 if no tensor can be so.
    """
    if len(shape) != len(stride) or min((0, *shape, *stride)) < 0:
        return -1
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        record: the storage that it is a view of.
        offset: of its first element in the record, in bytes.
        dtype, shape, stride: of the tensor; the stride in elements, as torch counts.
        location: the device that it was saved from, as torch names it.
    """

    record: Record
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    location: str = "cpu"

    def __setstate__(self, state: Any) -> None:
        raise sealed(self)

    @property
    def span_bytes(self) -> int:
        """How many bytes lie from its first element to the end of its last one."""
        return spanned(self.shape, self.stride) * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """How many bytes its elements have, without gaps."""
        return math.prod(self.shape) * self.dtype.itemsize

    def box(self, offsets: Sequence[int], sizes: Sequence[int]) -> Stored:
        """Return a part of the tensor.

        The part has ``sizes`` from ``offsets`` on, one number for each dimension.

        Raises:
            ValueError: the part reaches beyond the tensor.
        """
        if sizes == self.shape and not any(offsets):
            return self
        within = [0 <= at <= at + size <= end for at, size, end in zip(offsets, sizes, self.shape, strict=True)]
        if not all(within):
            raise ValueError(f"a box of {tuple(sizes)} at {tuple(offsets)} is not within a tensor of {self.shape}")
        first = sum(at * step for at, step in zip(offsets, self.stride, strict=True))
        return Stored(self.record, self.offset + first * self.dtype.itemsize, self.dtype, tuple(sizes), self.stride)


def bytes_of_storage(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the memory of a storage as a uint8 tensor of one dimension."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def view_in(storage: torch.UntypedStorage, begin: int, stored: Stored) -> torch.Tensor:
    """Return a stored tensor in a storage that has the bytes of its record from ``begin`` on."""
    empty = torch.empty(0, dtype=stored.dtype, device=storage.device)
    return empty.set_(storage, (stored.offset - begin) // stored.dtype.itemsize, stored.shape, stored.stride)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as a uint8 tensor of one dimension.

    The tensor must have no gaps: it is contiguous, or transposed.
    """
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    first = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), first, (tensor.nbytes,), (1,))


@functools.lru_cache(maxsize=1024)  # layers repeat
def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))

"""Where a tensor lies in a data file of DCP, noted in ``.metadata``.

So a reader need not open the tensor's archive.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.stored import Record, Stored

_ATTRIBUTE = "gdsdata_place"  # of an item's storage info; other readers ignore it


def note_place(
    info: Any, offset: int, crc32: int, tensor: torch.Tensor, stride: tuple[int, ...], file_bytes: int
) -> None:
    """Note a tensor's place in its storage info, which ``.metadata`` will have.

    Args:
        info: the storage info: relative_path, offset and length of the tensor's archive.
        offset: of the tensor's first byte in the file.
        crc32: the checksum of its bytes.
        tensor: the tensor.
        stride: of its elements in the file.
        file_bytes: the size of the whole file.
    """
    place = (offset - info.offset, crc32, tensor.dtype, tuple(tensor.shape), stride, file_bytes)
    setattr(info, _ATTRIBUTE, place)


def noted_place(info: Any, file: OpenFile) -> Stored | None:
    """Return a tensor's place.

    None if none is noted, or if it is wrong, or belongs to another file than ``file``.
    """
    try:
        begin, crc32, dtype, shape, stride, file_bytes = getattr(info, _ATTRIBUTE)
        size_bytes = math.prod(shape) * dtype.itemsize
        record = Record(file, info.offset + begin, size_bytes, crc32)
        stored = Stored(record, 0, dtype, shape, stride)
        is_within = 0 <= begin <= begin + size_bytes <= info.length and stored.span_bytes == size_bytes
    except (AttributeError, TypeError, ValueError):
        return None
    return stored if is_within and file_bytes == file.size_bytes else None

"""safetensors files as data: rows of their tensors, or each file one sample.

The format is in `safetensors_header`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from gdsdata.formats.arrays import Array, ArrayFile, Kind, checked_names, index_arrays
from gdsdata.formats.fields import FieldIndex
from gdsdata.formats.index import Index
from gdsdata.formats.parsers import safetensors_header
from gdsdata.formats.parsers.safetensors_header import LENGTH_BYTES, Header
from gdsdata.storage.heads import read_heads

# The header of a file with a few tensors; longer ones are read again.
_HEAD_BYTES = 1024
# Files whose heads are in memory together.
_HEADS_AT_ONCE = 1024


@dataclass(frozen=True)
class Safetensors:
    """Tensors of safetensors files, of every dtype that torch has.

    Args:
        mode: ``"rows"``: each row of a tensor, along its first axis, is a sample. ``"file"``: each
            file is one.
        tensor: names. With ``mode="rows"``, a batch of one name is ``(B, *shape[1:])``, and a batch
            of a tuple is a dict of these, whose tensors have equally many rows. With
            ``mode="file"``, a batch is a dict of the tensors named, or of all. A tensor of one
            shape in all files is ``(B, *shape)``; one that differs along its first axis is a
            `Ragged` of rows.

    Raises:
        ValueError: there is no such mode, rows without a name, or a name comes twice.
    """

    mode: Literal["rows", "file"] = "file"
    tensor: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensor", checked_names(self.mode, self.tensor, "tensor"))

    def index(self, paths: list[str]) -> Index | FieldIndex:
        """Read the headers of ``paths``, but not an index of tensors (``.index.json``).

        Raises:
            CorruptData: a header is damaged or lies, or the tensors do not lie one behind the other
                to the file's end.
            ValueError: a tensor is missing, has no rows or too few, or is unlike that of the same
                name in another file.
            FileNotFoundError, IoError: a file is not available.
        """
        paths = [path for path in paths if not path.endswith(".index.json")] or paths
        return index_arrays(_read_headers(paths), self.mode, self.tensor)


def _read_headers(paths: list[str]) -> Iterator[ArrayFile]:
    for first in range(0, len(paths), _HEADS_AT_ONCE):
        some = paths[first : first + _HEADS_AT_ONCE]
        heads, size_bytes, mtime_ns = read_heads(some, _HEAD_BYTES)
        for path, head, size, mtime in zip(some, heads, size_bytes.tolist(), mtime_ns.tolist(), strict=True):
            data_begin = safetensors_header.data_offset(head[:LENGTH_BYTES], path, size)
            if data_begin > len(head):
                (head,), _, _ = read_heads([path], data_begin)
            text = head[LENGTH_BYTES:data_begin]
            header = safetensors_header.parse(text, path, data_begin, size, is_repeated=True)
            yield ArrayFile(path, size, mtime, _arrays(header), data_begin)


def _arrays(header: Header) -> dict[str, Array]:
    return {
        name: Array(_kind(tensor.dtype, tensor.shape), tensor.begin_bytes) for name, tensor in header.tensors.items()
    }


@lru_cache(maxsize=4096)  # equal kinds are one object, which is soon compared
def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> Kind:
    try:
        return Kind(np.dtype(str(dtype).removeprefix("torch.")).newbyteorder("<"), shape)
    except TypeError:  # bfloat16 and floats of 8 bits
        return Kind(np.dtype(f"<u{dtype.itemsize}"), shape, view_as=dtype)

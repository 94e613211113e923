"""A `SampleIndex` as a file, whose arrays are mapped: the processes of a machine share them.

The file is a head, and behind it blocks that start at multiples of 64 bytes:

    16 bytes    magic, with the version
    u32, u32    CRC-32C of the description; 0
    u64         its length in bytes
    ...         the description, JSON
    ...         blocks: arrays, and lists of strings

Numbers are little endian. The description says what the index is, and where its blocks lie, with
the CRC-32C of each. A damaged file is thus never taken for an index.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, BinaryIO

import numpy as np
import torch

from gdsdata.formats.field import Field
from gdsdata.formats.fields import FieldIndex
from gdsdata.formats.index import Index, Sample, SampleIndex
from gdsdata.formats.windows import WindowIndex
from gdsdata.io.engine import crc32c_of_rows

_HEAD = struct.Struct("<16s I 4x Q")
_MAGIC = b"gdsdata index v1"
_ALIGNMENT = 64
_PARTS = {kind.__name__: kind for kind in (Index, FieldIndex, WindowIndex, Sample, Field)}


class CannotBeStored(TypeError):
    """The index has something that this file has no form for."""


class Damaged(ValueError):
    """The file is not one that `write` wrote."""


@dataclass
class Stored:
    """The contents of a file.

    Attributes:
        index: of samples.
        facts: plain values and lists of strings that were written with it.
    """

    index: SampleIndex
    facts: dict[str, Any]


def write(file: BinaryIO, stored: Stored) -> None:
    """Write an index and its facts, from the start of a file.

    Raises:
        CannotBeStored: such an index has no form here, as tables of Parquet.
        OSError: of the file.
    """
    blocks: list[np.ndarray] = []
    said = {"index": _described(stored.index, blocks), "facts": _described(stored.facts, blocks)}
    places, at = [], 0
    for block in blocks:
        places.append([at, block.nbytes, _checksum(block)])
        at += -(-block.nbytes // _ALIGNMENT) * _ALIGNMENT
    described = json.dumps({**said, "blocks": places}).encode()
    file.write(_HEAD.pack(_MAGIC, _checksum(np.frombuffer(described, np.uint8)), len(described)))
    file.write(described)
    begin = _begin_of_blocks(len(described))
    for (place, _, _), block in zip(places, blocks, strict=True):
        file.seek(begin + place)
        file.write(block.data)
    file.truncate(begin + at)


def read(path: str) -> Stored:
    """Map a file that `write` wrote. Its arrays cannot be written to.

    Raises:
        Damaged: it is not such a file.
        OSError: it is not available.
    """
    with open(path, "rb") as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise Damaged(f"{path} has another magic")
        _, checksum, length = _HEAD.unpack(head)
        if length > os.fstat(file.fileno()).st_size:
            raise Damaged(f"{path} ends within its description")
        described = file.read(length)
        if checksum != _checksum(np.frombuffer(described, np.uint8)):
            raise Damaged(f"{path}: the description's checksum differs")
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    said = json.loads(described)
    begin = _begin_of_blocks(length)
    blocks = [mapped[begin + at : begin + at + size] for at, size, _ in said["blocks"]]
    for block, (_, size, expected) in zip(blocks, said["blocks"], strict=True):
        if len(block) != size or _checksum(block) != expected:
            raise Damaged(f"{path}: a block's checksum differs")
    return Stored(_undescribed(said["index"], blocks), _undescribed(said["facts"], blocks))


def _begin_of_blocks(described_bytes: int) -> int:
    return -(-(_HEAD.size + described_bytes) // _ALIGNMENT) * _ALIGNMENT


def _checksum(block: np.ndarray) -> int:
    return int(crc32c_of_rows(block.reshape(1, -1).view(np.uint8))[0])


def _described(value: Any, blocks: list[np.ndarray]) -> Any:
    """Return what JSON can say of a value. Arrays and lists of strings become blocks."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray):
        said = {"array": len(blocks), "dtype": value.dtype.str, "shape": value.shape}
        first = value[:1]
        if len(value) > 1 and (value == first).all():
            blocks.append(np.ascontiguousarray(first).reshape(-1).view(np.uint8))
            return {**said, "repeated": True}  # one row: it takes no memory
        blocks.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        return said
    if isinstance(value, list) and all(type(one) is str for one in value):
        if any("\0" in one for one in value):
            raise CannotBeStored("a string with a NUL")
        blocks.append(np.frombuffer(os.fsencode("\0".join(value)), np.uint8))
        return {"strings": len(blocks) - 1, "count": len(value)}
    if isinstance(value, np.dtype) and value.names is None and not value.hasobject:
        return {"dtype": value.str}
    if isinstance(value, torch.dtype):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, (tuple, list)):
        return {"sequence": type(value) is tuple, "of": [_described(one, blocks) for one in value]}
    if isinstance(value, dict) and all(type(name) is str for name in value):
        return {"dict": [[name, _described(one, blocks)] for name, one in value.items()]}
    if is_dataclass(value) and _PARTS.get(type(value).__name__) is type(value):
        names = [field.name for field in fields(value)]
        return {
            "part": type(value).__name__,
            "attributes": {name: _described(getattr(value, name), blocks) for name in names},
        }
    raise CannotBeStored(f"a {type(value).__qualname__}")


def _undescribed(said: Any, blocks: list[np.ndarray]) -> Any:
    """Return the value that `_described` described."""
    if not isinstance(said, dict):
        return said
    if "array" in said:
        shape = tuple(said["shape"])
        array = blocks[said["array"]].view(said["dtype"])
        if "repeated" in said:
            return np.broadcast_to(array.reshape(1, *shape[1:]), shape)
        return array.reshape(shape)
    if "strings" in said:
        return os.fsdecode(blocks[said["strings"]].tobytes()).split("\0") if said["count"] else []
    if "dtype" in said:
        return np.dtype(said["dtype"])
    if "torch" in said:
        return getattr(torch, said["torch"])
    if "sequence" in said:
        values = [_undescribed(one, blocks) for one in said["of"]]
        return tuple(values) if said["sequence"] else values
    if "dict" in said:
        return {name: _undescribed(one, blocks) for name, one in said["dict"]}
    return _PARTS[said["part"]](**{name: _undescribed(one, blocks) for name, one in said["attributes"].items()})

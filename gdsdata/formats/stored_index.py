"""A `SampleIndex` as a file. On a local file system its arrays are mapped, so processes share them.

The file is a head, and behind it blocks that start at multiples of 64 bytes:

    16 bytes    magic, with the version
    u32, u32    CRC-32C of the description; 0
    u64         its length in bytes
    ...         the description, JSON
    ...         blocks: arrays, bytes, and lists of strings

Numbers are little endian. The description says what the index is, and where its blocks lie, with
the CRC-32C of each. A damaged file is thus never taken for an index, and neither is a whole one
that another build of this version wrote in other words.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, BinaryIO

import numpy as np
import torch

from gdsdata.formats.arrow_batches import ArrowFile
from gdsdata.formats.columns import Column
from gdsdata.formats.extents import Extents
from gdsdata.formats.field import Field
from gdsdata.formats.fields import FieldIndex
from gdsdata.formats.index import Index, SampleIndex
from gdsdata.formats.mds_text import TextFile
from gdsdata.formats.parquet_file import ParquetFile
from gdsdata.formats.sample import Sample
from gdsdata.formats.tables import TableIndex
from gdsdata.formats.windows import WindowIndex
from gdsdata.io.engine import crc32c_of_rows
from gdsdata.storage.paths import JoinedPaths, absolute, ends_of, joined
from gdsdata.storage.regular import regular

_HEAD = struct.Struct("<16s I 4x Q")
_MAGIC = b"gdsdata index v4"
_ALIGNMENT = 64
# On other file systems, a page of a file that another machine has replaced is lost: SIGBUS.
_LOCAL = frozenset({"btrfs", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
_PARTS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Index, FieldIndex, WindowIndex, TableIndex, Sample, Field, Extents),
        *(Column, ParquetFile, ArrowFile, TextFile),
    )
}


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


@dataclass(frozen=True)
class StoredAt:
    """A file with an index: a path, and which of the files that may have had it."""

    path: str
    device: int
    inode: int
    size_bytes: int

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> StoredAt:
        return cls(absolute(path), status.st_dev, status.st_ino, status.st_size)

    def is_there(self) -> bool:
        """Return whether the path still names this file."""
        try:
            return StoredAt.of(self.path, os.stat(self.path)) == self
        except OSError:
            return False

    def index(self) -> SampleIndex:
        """Return the file's index.

        Raises:
            Damaged: the path names another file meanwhile.
            OSError: it is not available.
        """
        index = read(self.path).index
        if index.mapped_from != self:
            raise Damaged(f"{self.path} was made again while a process began that needs it: start it again")
        return index


def write(file: BinaryIO, stored: Stored) -> None:
    """Write an index and its facts, from the start of a file.

    Raises:
        CannotBeStored: the index has a value that has no form here.
        OSError: of the file.
    """
    described_by = _Described()
    said = {"index": described_by.of(stored.index), "facts": described_by.of(stored.facts)}
    places, at = [], 0
    for block in described_by.blocks:
        places.append([at, block.nbytes, _checksum(block)])
        at += -(-block.nbytes // _ALIGNMENT) * _ALIGNMENT
    described = json.dumps({**said, "shared": described_by.shared, "blocks": places}).encode()
    file.write(_HEAD.pack(_MAGIC, _checksum(np.frombuffer(described, np.uint8)), len(described)))
    file.write(described)
    begin = _begin_of_blocks(len(described))
    for (place, _, _), block in zip(places, described_by.blocks, strict=True):
        file.seek(begin + place)
        file.write(block.data)
    file.truncate(begin + at)


def read(path: str) -> Stored:
    """Map a file that `write` wrote, or read it if its file system is not local.

    The arrays cannot be written to.

    Raises:
        Damaged: it is not such a file.
        OSError: it is not available.
    """
    with open(path, "rb", opener=regular) as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise Damaged(f"{path} has another magic")
        _, checksum, length = _HEAD.unpack(head)
        if length > os.fstat(file.fileno()).st_size:
            raise Damaged(f"{path} ends within its description")
        described = file.read(length)
        if checksum != _checksum(np.frombuffer(described, np.uint8)):
            raise Damaged(f"{path}: the description's checksum differs")
        is_local = _is_local(file)
        content = _mapped(file) if is_local else _content_of(file)
        place = StoredAt.of(path, os.fstat(file.fileno()))
    said = json.loads(described)
    begin = _begin_of_blocks(length)
    blocks = [content[begin + at : begin + at + size] for at, size, _ in said["blocks"]]
    for block, (_, size, expected) in zip(blocks, said["blocks"], strict=True):
        if len(block) != size or _checksum(block) != expected:
            raise Damaged(f"{path}: a block's checksum differs")
    try:
        values = _Values(blocks, said["shared"])
        stored = Stored(values.of(said["index"]), values.of(said["facts"]))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Damaged(f"{path} describes no index of this version: {error}") from error
    if is_local:
        object.__setattr__(stored.index, "mapped_from", place)
    return stored


def _is_local(file: BinaryIO) -> bool:
    """Return whether a mapped file stays whole if another machine deletes or replaces it."""
    device = os.fstat(file.fileno()).st_dev
    with open("/proc/self/mountinfo") as mounts:  # format: proc_pid_mountinfo(5)
        for fields in map(str.split, mounts):
            if fields[2] == f"{os.major(device)}:{os.minor(device)}":
                return fields[fields.index("-") + 1] in _LOCAL
    return False


def _content_of(file: BinaryIO) -> np.ndarray:
    file.seek(0)
    return np.frombuffer(file.read(), np.uint8)


def _mapped(file: BinaryIO) -> np.ndarray:
    return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def _begin_of_blocks(described_bytes: int) -> int:
    return -(-(_HEAD.size + described_bytes) // _ALIGNMENT) * _ALIGNMENT


def _checksum(block: np.ndarray) -> int:
    return int(crc32c_of_rows(block.reshape(1, -1).view(np.uint8))[0])


def _attributes_of(value: Any) -> Sequence[str]:
    """Return the names of what a dataclass or a named tuple has."""
    return [field.name for field in fields(value)] if is_dataclass(value) else value._fields


class _Described:
    """Describes values as JSON can. Arrays, bytes and lists of strings become blocks.

    Attributes:
        blocks: of uint8, in order.
        shared: descriptions of tuples, each of which several values may have.
    """

    def __init__(self) -> None:
        self.blocks: list[np.ndarray] = []
        self.shared: list[Any] = []
        self._place_of: dict[int, int] = {}  # of tuples, by identity: the index keeps them alive

    def of(self, value: Any) -> Any:
        """Return the description of a value.

        Raises:
            CannotBeStored: there is none.
        """
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, np.ndarray):
            return self._of_array(value)
        if isinstance(value, bytes):
            return {"bytes": self._block(np.frombuffer(value, np.uint8))}
        if isinstance(value, list) and all(type(one) is str for one in value):
            if any("\0" in one for one in value):
                raise CannotBeStored("a string with a NUL")
            if not value:
                return {"list": []}
            content = joined(value)
            return {"strings": self._block(content), "ends": self._block(ends_of(content).view(np.uint8))}
        if isinstance(value, np.dtype) and value.names is None and not value.hasobject:
            return {"dtype": value.str}
        if isinstance(value, torch.dtype):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, dict) and all(type(name) is str for name in value):
            return {"dict": [[name, self.of(one)] for name, one in value.items()]}
        if _PARTS.get(type(value).__name__) is type(value):
            described = {name: self.of(getattr(value, name)) for name in _attributes_of(value)}
            return {"part": type(value).__name__, "attributes": described}
        if type(value) is list:
            return {"list": [self.of(one) for one in value]}
        if type(value) is tuple:
            return {"tuple": self._of_tuple(value)}
        raise CannotBeStored(f"a {type(value).__qualname__}")

    def _of_array(self, array: np.ndarray) -> dict[str, Any]:
        first = array[:1]
        # One row then takes the place of all.
        is_repeated = len(array) > 1 and np.array_equal(array[-1:], first) and bool((array == first).all())
        content = np.ascontiguousarray(first if is_repeated else array).reshape(-1).view(np.uint8)
        said = {"array": self._block(content), "dtype": array.dtype.str, "shape": array.shape}
        return {**said, "repeated": True} if is_repeated else said

    def _of_tuple(self, value: tuple) -> int:
        if id(value) not in self._place_of:
            described = [self.of(one) for one in value]
            self._place_of[id(value)] = len(self.shared)
            self.shared.append(described)
        return self._place_of[id(value)]

    def _block(self, content: np.ndarray) -> int:
        self.blocks.append(content)
        return len(self.blocks) - 1


class _Values:
    """Makes the values that `_Described` described."""

    def __init__(self, blocks: list[np.ndarray], shared: list[Any]) -> None:
        self._blocks = blocks
        self._shared: list[tuple] = []
        for described in shared:  # one may contain those before it
            self._shared.append(tuple(map(self.of, described)))

    def of(self, said: Any) -> Any:
        """Return the value of a description."""
        if not isinstance(said, dict):
            return said
        if "array" in said:
            shape = tuple(said["shape"])
            array = self._blocks[said["array"]].view(said["dtype"])
            if "repeated" in said:
                return np.broadcast_to(array.reshape(1, *shape[1:]), shape)
            return array.reshape(shape)
        if "bytes" in said:
            return self._blocks[said["bytes"]].tobytes()
        if "strings" in said:
            return JoinedPaths(self._blocks[said["strings"]], self._blocks[said["ends"]].view(np.int64))
        if "dtype" in said:
            return np.dtype(said["dtype"])
        if "torch" in said:
            return getattr(torch, said["torch"])
        if "dict" in said:
            return {name: self.of(one) for name, one in said["dict"]}
        if "list" in said:
            return [self.of(one) for one in said["list"]]
        if "tuple" in said:
            return self._shared[said["tuple"]]
        return _PARTS[said["part"]](**{name: self.of(one) for name, one in said["attributes"].items()})

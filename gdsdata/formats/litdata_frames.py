"""LitData's shards with zstd inside: unpacked, they are shards as `shards` describes them.

A shard is ``LDFZ01\\0\\0``; u16 version (1), u16 flags; u32 N samples, u32 samples a frame, u32 F
frames; u32 offset[N + 1]; F descriptions of 24 bytes; then the frames, one behind the other.
Offsets count from the first sample's start in the unpacked bytes. All numbers are little endian.

Source of the format: https://github.com/Lightning-AI/litdata, ``framed_zstd.py`` in
``src/litdata/streaming``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import BinaryIO, Protocol

import numpy as np

from gdsdata.formats.parsers.damage import damaged
from gdsdata.formats.shards import Shard, missing_shards_named, table_size
from gdsdata.storage.opened import open_file

COMPRESSION = "litdata_batch"  # of such a `Shard`
_HEAD = struct.Struct("<8s 2H 3I")
_MAGIC = b"LDFZ01\0\0"
_FRAME_BYTES = 24


class Stream(Protocol):
    """Unpacked bytes."""

    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


class NotFramed(ValueError):
    """The bytes are no such shard."""


def with_size(shard: Shard) -> Shard:
    """Return a shard with its sizes, packed and unpacked, by its head.

    Raises:
        CorruptData: it is no such shard, or has another number of samples.
        FileNotFoundError, IoError: it is not available.
    """
    path = shard.packed or shard.path
    with missing_shards_named([shard]), open_file(path) as file:
        try:
            samples, _ = _parsed(file.read(0, _HEAD.size))
            if samples != shard.samples:
                raise NotFramed(f"it has {samples} samples, and index.json says {shard.samples}")
            (end,) = struct.unpack("<I", file.read(_HEAD.size + 4 * samples, 4))
        except (NotFramed, struct.error) as error:
            raise damaged(path, 0, file.size_bytes, str(error)) from error
    return shard._replace(size_bytes=table_size(samples) + end, packed_bytes=file.size_bytes)


def unpacking(file: BinaryIO, zstd: Callable[[BinaryIO], Stream]) -> Stream:
    """Return the unpacked bytes of a shard.

    Args:
        file: with the shard.
        zstd: unpacks all frames from a place of a file on.

    Raises:
        NotFramed: see there.
    """
    samples, frames = _parsed(file.read(_HEAD.size))
    table = file.read(4 * (samples + 1))
    if len(table) < 4 * (samples + 1):
        raise NotFramed("it ends within its table")
    offsets = np.frombuffer(table, "<u4").astype(np.int64) + table_size(samples)
    if offsets[-1] >= 2**32:
        raise NotFramed(f"unpacked, it would have {offsets[-1]} bytes, more than a shard can have")
    file.seek(frames * _FRAME_BYTES, 1)
    return _Shard(struct.pack("<I", samples) + offsets.astype("<u4").tobytes(), zstd(file))


class _Shard:
    """A table, and behind it what a stream has."""

    def __init__(self, table: bytes, samples: Stream) -> None:
        self._table, self._samples = table, samples

    def read(self, size: int, /) -> bytes:
        table, self._table = self._table[:size], self._table[size:]
        return table or self._samples.read(size)

    def close(self) -> None:
        self._samples.close()


def _parsed(head: bytes) -> tuple[int, int]:
    """Return the numbers of samples and frames."""
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise NotFramed(f"it begins with {head[:8]!r}, and not with the magic of compression_level='batch'")
    _, version, _, samples, _, frames = _HEAD.unpack(head)
    if version != 1:
        raise NotFramed(f"it has version {version} of this layout, and 1 is known")
    return samples, frames

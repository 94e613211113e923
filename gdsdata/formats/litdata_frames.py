"""LitData's shards with zstd inside: unpacked, they are shards as `shards` describes them.

With ``compression_level="batch"``, a shard is the magic; u16 version (1), u16 flags; u32 N samples,
u32 samples a frame, u32 F frames; u32 offset[N + 1]; F descriptions of 24 bytes. Behind these lie
the frames. Offsets count from the first sample's start in the unpacked bytes. All numbers are
little endian.

With ``"sample"``, it is a shard as `shards` describes it, and each sample is a frame of zstd.

Source of the format: https://github.com/Lightning-AI/litdata, ``framed_zstd.py`` in
``src/litdata/streaming``. RFC 8878, section 3.1.1.1, describes the heads of zstd's frames.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import BinaryIO, Protocol

import numpy as np

from gdsdata.distinct import distinct
from gdsdata.formats.parsers.damage import damaged
from gdsdata.formats.shards import Shard, missing_shards_named, table_size
from gdsdata.storage.opened import open_file

BATCH, SAMPLE = "litdata_batch", "litdata_sample"  # the compression of such a `Shard`
LEVELS = {BATCH: "batch", SAMPLE: "sample"}  # in index.json
_HEAD = struct.Struct("<8s 2H 3I")
_MAGIC = b"LDFZ01\0\0"
_FRAME_BYTES = 24
_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_HEAD_BYTES = 18
_MOST_BYTES = 2**32 - 1  # of a shard: offsets have 32 bits


class Stream(Protocol):
    """Unpacked bytes."""

    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


class NotFramed(ValueError):
    """The bytes are no such shard."""


def with_size(shard: Shard) -> Shard:
    """Return a shard with its sizes, packed and unpacked, by its heads.

    Raises:
        CorruptData: it is no such shard, or has another number of samples.
        FileNotFoundError, IoError: it is not available.
    """
    path = shard.packed or shard.path
    with missing_shards_named([shard]), open_file(path) as file:
        try:
            if shard.compression == SAMPLE:
                table = file.read(0, min(table_size(shard.samples), file.size_bytes))
                offsets = _offsets_of_samples(table, shard.samples, file.size_bytes)
                end = int(_sizes_of(file.read_each(offsets[:-1], _ZSTD_HEAD_BYTES)).sum())
            else:
                _check_samples(_parsed(file.read(0, _HEAD.size))[0], shard.samples)
                (end,) = struct.unpack("<I", file.read(_HEAD.size + 4 * shard.samples, 4))
        except (NotFramed, struct.error) as error:
            raise damaged(path, 0, file.size_bytes, str(error)) from error
    return shard._replace(size_bytes=table_size(shard.samples) + end, packed_bytes=file.size_bytes)


def unpacking(file: BinaryIO, compression: str, zstd: Callable[[BinaryIO], Stream]) -> Stream:
    """Return the unpacked bytes of a shard.

    Args:
        file: with the shard.
        compression: one of `LEVELS`.
        zstd: unpacks all frames from a place of a file on.

    Raises:
        NotFramed: see there.
    """
    if compression == SAMPLE:
        samples = int.from_bytes(file.read(4), "little")
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        packed = _offsets_of_samples(file.read(min(table_size(samples), size_bytes)), samples, size_bytes)
        offsets = np.concatenate([[0], np.cumsum(_sizes_of(_heads_at(file, packed[:-1])))])
        file.seek(int(packed[0]))
    else:
        samples, frames = _parsed(file.read(_HEAD.size))
        table = file.read(4 * (samples + 1))
        if len(table) < 4 * (samples + 1):
            raise NotFramed("it ends within its table")
        offsets = np.frombuffer(table, "<u4").astype(np.int64)
        file.seek(frames * _FRAME_BYTES, 1)
    offsets += table_size(samples)
    if offsets[-1] > _MOST_BYTES:
        raise NotFramed(f"unpacked, it would have {offsets[-1]} bytes, more than a shard can have")
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


def _check_samples(found: int, said: int) -> None:
    if found != said:
        raise NotFramed(f"it has {found} samples, and index.json says {said}")


def _offsets_of_samples(table: bytes, samples: int, size_bytes: int) -> np.ndarray:
    """Return where samples that are frames lie, and the end: int64 (N + 1,).

    Args:
        table: the first bytes of the shard.
        samples: that it should have.
        size_bytes: of the shard.
    """
    _check_samples(int.from_bytes(table[:4], "little"), samples)
    if len(table) < table_size(samples):
        raise NotFramed("it ends within its table")
    offsets = np.frombuffer(table, "<u4", samples + 1, 4).astype(np.int64)
    if offsets[0] != table_size(samples) or offsets[-1] != size_bytes or (np.diff(offsets) <= 0).any():
        raise NotFramed("its table of offsets lies")
    return offsets


def _heads_at(file: BinaryIO, offsets: np.ndarray) -> np.ndarray:
    """Return the first bytes of frames: uint8 (n, `_ZSTD_HEAD_BYTES`), zeros behind the end."""
    heads = []
    for offset in offsets.tolist():
        file.seek(offset)
        heads.append(file.read(_ZSTD_HEAD_BYTES).ljust(_ZSTD_HEAD_BYTES, b"\0"))
    return np.frombuffer(b"".join(heads), np.uint8).reshape(len(heads), _ZSTD_HEAD_BYTES)


def _sizes_of(heads: np.ndarray) -> np.ndarray:
    """Return the unpacked bytes that frames of zstd say: int64 (n,).

    Args:
        heads: uint8 (n, `_ZSTD_HEAD_BYTES`), the first bytes of each.

    Raises:
        NotFramed: they are no frames, or do not say it.
    """
    magic = np.ascontiguousarray(heads[:, :4]).view("<u4")[:, 0]
    if (magic != _ZSTD_MAGIC).any():
        raise NotFramed(f"sample {int(np.argmax(magic != _ZSTD_MAGIC))} does not begin as zstd does")
    sizes = np.empty(len(heads), np.int64)
    for form in distinct(heads[:, 4]).tolist():
        has_window, dictionary_bytes = not form >> 5 & 1, (0, 1, 2, 4)[form & 3]
        width = (0 if has_window else 1, 2, 4, 8)[form >> 6]
        rows, at = np.flatnonzero(heads[:, 4] == form), 5 + has_window + dictionary_bytes
        if width == 0:
            raise NotFramed(f"sample {int(rows[0])} does not say its unpacked size")
        said = np.ascontiguousarray(heads[rows, at : at + width]).view(f"<u{width}")[:, 0].astype(np.uint64)
        sizes[rows] = np.minimum(said, _MOST_BYTES + 1) + (256 if width == 2 else 0)
    if sizes.sum() > _MOST_BYTES:
        raise NotFramed(f"unpacked, it would have {int(sizes.sum())} bytes, more than a shard can have")
    return sizes


def _parsed(head: bytes) -> tuple[int, int]:
    """Return the numbers of samples and frames."""
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise NotFramed(f"it begins with {head[:8]!r}, and not with the magic of compression_level='batch'")
    _, version, _, samples, _, frames = _HEAD.unpack(head)
    if version != 1:
        raise NotFramed(f"it has version {version} of this layout, and 1 is known")
    return samples, frames

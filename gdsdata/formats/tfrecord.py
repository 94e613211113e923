"""TFRecord files: records of bytes, each between its length and a checksum. What the bytes mean is left to the user.

The engine takes the checksums of data when it has read them. Out of the page cache that cost 0.8 us of the processor
for a record of 300 bytes, which takes 2.1 us without, 9 us for 100 kB (21 without), and 150 us for 1 MB (140 without):
two busy cores of an AMD EPYC, November 2026.

Source of the format: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details. A record is a
uint64 length, the masked CRC-32C of those 8 bytes, the data, and its masked CRC-32C; little endian, nothing between.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from gdsdata.errors import CorruptData, IoError
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.index import first_samples, open_descriptor, read_heads
from gdsdata.formats.parsers.crc32c import crc32c_of_rows

# Bytes of a file from an offset, at most so many; fewer where it ends.
Read = Callable[[int, int], bytes]

_LENGTH_BYTES = 8
_HEAD_BYTES = 12
_FOOT_BYTES = 4
# A record's checksum of its data, and the next one's head: what is read between two records' data.
_JOINT_BYTES = _FOOT_BYTES + _HEAD_BYTES
# Heads of records shorter than this are found in windows of the file, for a read of its own would cost each of them
# more than the data between; behind a longer one, the next head is read by itself.
_LONG_BYTES = 2**16
_WINDOW_BYTES = 2**20
# Heads whose checksums are computed together.
_HEADS_AT_ONCE = 4096
# Files indexed at a time, so that a disk has several reads to serve; a thread mostly waits or copies.
_READERS = 8
_MASK = np.uint32(0xA282EAD8)


@dataclass(frozen=True)
class TFRecord:
    """TFRecord files, not compressed as a whole. A sample is a record: one field "data", of as many bytes as it has.

    Indexing reads every record's head and checks its length's checksum: files of records under 64 KiB are read whole,
    of longer ones the heads alone.

    Args:
        check_data: compare the checksum of each record's data when it is read: one that differs is CorruptData, or left
            out with ``on_error="skip"``. Data on their way to a GPU then pass the processor, and False lets GPUDirect
            Storage take them past it.
    """

    check_data: bool = True

    def index(self, paths: list[str]) -> FieldIndex:
        """Find the records of ``paths``. A file may hold none.

        Raises:
            CorruptData: a checksum differs, or a file ends within a record.
            ValueError: a file is compressed.
            FileNotFoundError, IoError: a file is not to be had.
        """
        _, size_bytes, mtime_ns = read_heads(paths, 0)
        with ThreadPoolExecutor(min(_READERS, len(paths))) as readers:
            found = list(readers.map(_find, paths, size_bytes.tolist()))
        begins, lengths, checksums = zip(*found, strict=True)
        return FieldIndex(
            paths=paths,
            size_bytes=size_bytes,
            mtime_ns=mtime_ns,
            first_sample=first_samples([len(length) for length in lengths]),
            fields=(Field("data"),),
            begin_bytes=np.concatenate(begins)[:, None],
            length_bytes=np.concatenate(lengths)[:, None],
            checksums=np.concatenate(checksums)[:, None] if self.check_data else None,
            checksum="crc32c",
        )


def _find(path: str, size_bytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with open_descriptor(path) as descriptor:
        return find_records(partial(_read, descriptor, path), size_bytes, path)


def _read(descriptor: int, path: str, offset: int, count: int) -> bytes:
    try:
        return os.pread(descriptor, count, offset)
    except OSError as error:
        message = f"indexing {path}: reading {count} bytes at {offset} failed: {error.strerror}"
        raise IoError(error.errno, message, path, offset, count) from error


def find_records(read: Read, size_bytes: int, path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the data of each record lies, by one pass over their heads.

    Args:
        read: gives the file's bytes.
        size_bytes: of the file.
        path: named in errors.

    Returns:
        Offset and length in bytes of each of the n records' data, int64 (n,) each, and its CRC-32C, uint32 (n,), as the
        file has it.

    Raises:
        CorruptData, ValueError: as `TFRecord.index`.
    """
    begins, lengths, feet = [np.empty(0, np.int64)], [np.empty(0, np.int64)], []
    at = 0
    while at < size_bytes:
        offsets, joints, end = _walk(read, at, size_bytes)
        if joints:
            rows = np.frombuffer(b"".join(joints), np.uint8).reshape(-1, _JOINT_BYTES)
            begins.append(np.array(offsets, np.int64) + _HEAD_BYTES)
            lengths.append(_checked_lengths(rows[:, _FOOT_BYTES:], offsets, path))
            feet.append(_uint32(rows[:, :_FOOT_BYTES]))
        if end > size_bytes or not joints:  # after the checksums, for a wrong length points anywhere
            at = offsets[-1] if joints else at
            raise _corrupt(
                path, at, size_bytes - at, f"the file ends at {size_bytes}, within the record that begins here"
            )
        at = end
    if not feet:
        return begins[0], lengths[0], np.empty(0, np.uint32)
    last = read(size_bytes - _FOOT_BYTES, _FOOT_BYTES)
    if len(last) < _FOOT_BYTES:
        reason = "the file has become shorter while it was indexed"
        raise _corrupt(path, size_bytes - _FOOT_BYTES, _FOOT_BYTES, reason)
    stored = np.concatenate([*feet, np.frombuffer(last, "<u4")])[1:]  # nothing lies before the first head
    return np.concatenate(begins), np.concatenate(lengths), unmasked(stored)


def _walk(read: Read, at: int, size_bytes: int) -> tuple[list[int], list[bytes], int]:
    """Offsets of the heads of some of the records from ``at`` on, each head with the checksum before it, and where the
    last of the records ends, all as the heads say.

    No heads: the file ends within the first.
    """
    offsets: list[int] = []
    joints: list[bytes] = []
    length = _LONG_BYTES  # the first record tells how to go on
    while at < size_bytes and len(joints) < _HEADS_AT_ONCE:
        before = min(at, _FOOT_BYTES)
        count = before + (_HEAD_BYTES if length >= _LONG_BYTES else _WINDOW_BYTES)
        window = bytes(_FOOT_BYTES - before) + read(at - before, count)
        place, last = 0, len(window) - _JOINT_BYTES
        if last < 0:
            break
        while place <= last:
            joint = window[place : place + _JOINT_BYTES]
            offsets.append(at + place)
            joints.append(joint)
            length = int.from_bytes(joint[_FOOT_BYTES : _FOOT_BYTES + _LENGTH_BYTES], "little")
            place += _HEAD_BYTES + length + _FOOT_BYTES
        at += place
    return offsets, joints, at


def _checked_lengths(heads: np.ndarray, offsets: list[int], path: str) -> np.ndarray:
    """The lengths (int64 (n,)) of records whose heads (uint8 (n, 12)) these are."""
    lengths, stored = heads[:, :_LENGTH_BYTES], heads[:, _LENGTH_BYTES:]
    wrong = masked(crc32c_of_rows(lengths, np.array([_LENGTH_BYTES]))) != _uint32(stored)
    if wrong.any():
        first = int(wrong.argmax())
        if offsets[first] == 0 and _is_compressed(heads[first].tobytes()):
            raise ValueError(f"{path} is compressed as a whole, so its records cannot be read apart: decompress it")
        raise _corrupt(path, offsets[first], _HEAD_BYTES, "the length of a record does not have the checksum beside it")
    return np.ascontiguousarray(lengths).view("<u8")[:, 0].astype(np.int64)


def recognises(head: bytes) -> bool:
    """Whether a file that begins so begins with a record: its length has the checksum that stands beside it."""
    row = np.frombuffer(head[:_HEAD_BYTES], np.uint8)[None]
    if row.shape[1] < _HEAD_BYTES:
        return False
    found = masked(crc32c_of_rows(row[:, :_LENGTH_BYTES], np.array([_LENGTH_BYTES])))
    return bool((found == _uint32(row[:, _LENGTH_BYTES:]))[0])


def _is_compressed(head: bytes) -> bool:
    """Whether a file begins as gzip or zlib does."""
    return head[:2] == b"\x1f\x8b" or (head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0)


def masked(checksums: np.ndarray) -> np.ndarray:
    """CRCs (uint32) as they are stored: turned and added to, lest a CRC of data that hold CRCs mean little."""
    return (checksums >> 15 | checksums << 17) + _MASK


def unmasked(stored: np.ndarray) -> np.ndarray:
    """CRCs (uint32) of what is stored."""
    turned = stored - _MASK
    return turned >> 17 | turned << 15


def _uint32(octets: np.ndarray) -> np.ndarray:
    """Little-endian numbers (n,) of uint8 (n, 4)."""
    return np.ascontiguousarray(octets).view("<u4")[:, 0]


def _corrupt(path: str, offset: int, length: int, reason: str) -> CorruptData:
    message = f"{path} is damaged at bytes {offset} to {offset + length}: {reason}; write or copy it again"
    return CorruptData(message, path, offset, length)

"""TFRecord's records, parsed: their heads, lengths and checksums.

A record is a uint64 length, the masked CRC-32C of those 8 bytes, the data, and its masked CRC-32C.
Numbers are little endian, and nothing lies between records.

Source: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gdsdata.formats.parsers.damage import damaged
from gdsdata.io.engine import crc32c_of_rows

# Returns at most so many bytes of a file from an offset; fewer at its end.
Read = Callable[[int, int], bytes]

_LENGTH_BYTES = 8
_HEAD_BYTES = 12
_FOOT_BYTES = 4
# A record's checksum of its data, and the next one's head: all that is read between two records'
# data.
_JOINT_BYTES = _FOOT_BYTES + _HEAD_BYTES
# Heads of records shorter than this are found in windows of the file, because a read of its own
# would cost more than reading the data between. Behind a longer record, the next head is read by
# itself.
_LONG_BYTES = 2**16
_WINDOW_BYTES = 2**20
# Heads whose checksums are computed together.
_HEADS_AT_ONCE = 4096
_MASK = np.uint32(0xA282EAD8)


def find_records(read: Read, size_bytes: int, path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where the data of each record lies, by one pass over their heads.

    Args:
        read: gives the file's bytes.
        size_bytes: of the file.
        path: named in errors.

    Returns:
        Offset and length in bytes of each of the n records' data, int64 (n,) each, and its CRC-32C,
        uint32 (n,), as the file has it.

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
        if end > size_bytes or not joints:  # after the checksums, because a wrong length points anywhere
            at = offsets[-1] if joints else at
            raise damaged(
                path, at, size_bytes - at, f"the file ends at {size_bytes}, within the record that begins here"
            )
        at = end
    if not feet:
        return begins[0], lengths[0], np.empty(0, np.uint32)
    last = read(size_bytes - _FOOT_BYTES, _FOOT_BYTES)
    if len(last) < _FOOT_BYTES:
        reason = "the file has become shorter while it was indexed"
        raise damaged(path, size_bytes - _FOOT_BYTES, _FOOT_BYTES, reason)
    stored = np.concatenate([*feet, np.frombuffer(last, "<u4")])[1:]  # nothing lies before the first head
    return np.concatenate(begins), np.concatenate(lengths), unmasked(stored)


def _walk(read: Read, at: int, size_bytes: int) -> tuple[list[int], list[bytes], int]:
    """Return the heads of some records from ``at`` on: each says where the next is.

    Returns:
        The heads' offsets, each head with the checksum before it, and where the last record ends.
        No heads: the file ends within the first.
    """
    offsets: list[int] = []
    joints: list[bytes] = []
    length = _LONG_BYTES  # the first record shows how to go on
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
    """Return the lengths (int64 (n,)) of records by their heads (uint8 (n, 12))."""
    lengths, stored = heads[:, :_LENGTH_BYTES], heads[:, _LENGTH_BYTES:]
    wrong = masked(crc32c_of_rows(lengths)) != _uint32(stored)
    if wrong.any():
        first = int(wrong.argmax())
        if offsets[first] == 0 and _is_compressed(heads[first].tobytes()):
            raise ValueError(f"{path} is compressed as a whole, so its records cannot be read apart: decompress it")
        raise damaged(path, offsets[first], _HEAD_BYTES, "the length of a record does not have the checksum beside it")
    return np.ascontiguousarray(lengths).view("<u8")[:, 0].astype(np.int64)


def recognises(head: bytes) -> bool:
    """Return whether a file that begins so begins with a record.

    The record's length has the checksum that stands beside it.
    """
    row = np.frombuffer(head[:_HEAD_BYTES], np.uint8)[None]
    if row.shape[1] < _HEAD_BYTES:
        return False
    found = masked(crc32c_of_rows(row[:, :_LENGTH_BYTES]))
    return bool((found == _uint32(row[:, _LENGTH_BYTES:]))[0])


def _is_compressed(head: bytes) -> bool:
    """Return whether a file begins as gzip or zlib does."""
    return head[:2] == b"\x1f\x8b" or (head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0)


def masked(checksums: np.ndarray) -> np.ndarray:
    """Return CRCs (uint32) as they are stored: turned, with a constant added.

    A plain CRC of data that hold CRCs would mean little.
    """
    return (checksums >> 15 | checksums << 17) + _MASK


def unmasked(stored: np.ndarray) -> np.ndarray:
    """Return the CRCs (uint32) of stored ones."""
    turned = stored - _MASK
    return turned >> 17 | turned << 15


def _uint32(octets: np.ndarray) -> np.ndarray:
    """Return little-endian numbers (n,) of uint8 (n, 4)."""
    return np.ascontiguousarray(octets).view("<u4")[:, 0]

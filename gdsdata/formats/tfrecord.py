"""TFRecord files: records of bytes, each between its length and a checksum. What the bytes mean is left to the user.

Source of the format: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details. A record is a
uint64 length, the masked CRC-32C of those 8 bytes, the data, and its masked CRC-32C; little endian, nothing between.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from gdsdata.errors import CorruptData, IoError
from gdsdata.formats.crc32c import crc32c, crc32c_joined, crc32c_of_rows
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.index import first_samples, read_heads

# Bytes of a file from an offset, at most so many; fewer where it ends.
Read = Callable[[int, int], bytes]

_LENGTH_BYTES = 8
_HEAD_BYTES = 12
_FOOT_BYTES = 4
# Heads of records shorter than this are found in windows of the file, for a read of its own would cost each of them
# more than the data between; behind a longer one, the next head is read by itself.
_LONG_BYTES = 2**16
_WINDOW_BYTES = 2**20
# Heads whose checksums are computed together.
_HEADS_AT_ONCE = 4096
# Files indexed at a time, so that a disk has several reads to serve; a thread mostly waits or copies.
_READERS = 8
# Of data whose checksums are computed together.
_DATA_AT_ONCE_BYTES = 2**22


@dataclass(frozen=True)
class TFRecord:
    """TFRecord files, not compressed as a whole. A sample is a record: one field "data", of as many bytes as it has.

    Indexing reads every record's head and checks its length's checksum: files of records under 64 KiB are read whole,
    of longer ones the heads alone.

    Args:
        check_data: when indexing, also read all data and check its checksums: some 100 MB/s, of small records less.
    """

    check_data: bool = False

    def index(self, paths: list[str]) -> FieldIndex:
        """Find the records of ``paths``. A file may hold none.

        Raises:
            CorruptData: a checksum differs, or a file ends within a record.
            ValueError: a file is compressed.
            FileNotFoundError, IoError: a file is not to be had.
        """
        _, size_bytes, mtime_ns = read_heads(paths, 0)
        with ThreadPoolExecutor(min(_READERS, len(paths))) as readers:
            found = list(readers.map(self._find, paths, size_bytes.tolist()))
        begins, lengths = zip(*found, strict=True)
        return FieldIndex(
            paths=paths,
            size_bytes=size_bytes,
            mtime_ns=mtime_ns,
            first_sample=first_samples([len(length) for length in lengths]),
            fields=(Field("data"),),
            begin_bytes=np.concatenate(begins)[:, None],
            length_bytes=np.concatenate(lengths)[:, None],
        )

    def _find(self, path: str, size_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            read = partial(_read, descriptor, path)
            begins, lengths = find_records(read, size_bytes, path)
            if self.check_data:
                check_data(read, begins, lengths, path)
        finally:
            os.close(descriptor)
        return begins, lengths


def _read(descriptor: int, path: str, offset: int, count: int) -> bytes:
    try:
        return os.pread(descriptor, count, offset)
    except OSError as error:
        message = f"indexing {path}: reading {count} bytes at {offset} failed: {error.strerror}"
        raise IoError(error.errno, message, path, offset, count) from error


def find_records(read: Read, size_bytes: int, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the data of each record lies, by one pass over their heads.

    Args:
        read: gives the file's bytes.
        size_bytes: of the file.
        path: named in errors.

    Returns:
        Offset and length in bytes of each of the n records' data, int64 (n,) each.

    Raises:
        CorruptData, ValueError: as `TFRecord.index`.
    """
    begins, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    at = 0
    while at < size_bytes:
        offsets, heads, end = _walk(read, at, size_bytes)
        if heads:
            begins.append(np.array(offsets, np.int64) + _HEAD_BYTES)
            lengths.append(_checked_lengths(heads, offsets, path))
        if end > size_bytes or not heads:  # after the checksums, for a wrong length points anywhere
            at = offsets[-1] if heads else at
            raise _corrupt(
                path, at, size_bytes - at, f"the file ends at {size_bytes}, within the record that begins here"
            )
        at = end
    return np.concatenate(begins), np.concatenate(lengths)


def _walk(read: Read, at: int, size_bytes: int) -> tuple[list[int], list[bytes], int]:
    """Offsets and heads of some of the records from ``at`` on, and where the last of them ends, all as the heads say.

    No heads: the file ends within the first.
    """
    offsets: list[int] = []
    heads: list[bytes] = []
    length = _LONG_BYTES  # the first record tells how to go on
    while at < size_bytes and len(heads) < _HEADS_AT_ONCE:
        window = read(at, _HEAD_BYTES if length >= _LONG_BYTES else _WINDOW_BYTES)
        if len(window) < _HEAD_BYTES:
            break
        place, last = 0, len(window) - _HEAD_BYTES
        while place <= last:
            head = window[place : place + _HEAD_BYTES]
            offsets.append(at + place)
            heads.append(head)
            length = int.from_bytes(head[:_LENGTH_BYTES], "little")
            place += _HEAD_BYTES + length + _FOOT_BYTES
        at += place
    return offsets, heads, at


def _checked_lengths(heads: list[bytes], offsets: list[int], path: str) -> np.ndarray:
    """The lengths (int64 (n,)) of records whose heads these are."""
    rows = np.frombuffer(b"".join(heads), np.uint8).reshape(-1, _HEAD_BYTES)
    lengths, stored = rows[:, :_LENGTH_BYTES], rows[:, _LENGTH_BYTES:]
    wrong = masked(crc32c_of_rows(lengths, np.array([_LENGTH_BYTES]))) != _uint32(stored)
    if wrong.any():
        first = int(wrong.argmax())
        if offsets[first] == 0 and _is_compressed(heads[first]):
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


def check_data(read: Read, begins: np.ndarray, lengths: np.ndarray, path: str) -> None:
    """Check the checksum of each of the records' data, which `find_records` found.

    Raises:
        CorruptData: one differs, or the file has become shorter.
    """

    def exactly(offset: int, count: int) -> bytes:
        data = read(offset, count)
        if len(data) < count:
            raise _corrupt(path, offset, count, "the file has become shorter while it was indexed")
        return data

    for first, end in _groups(lengths.tolist()):
        begin, length = begins[first:end], lengths[first:end]
        if end - first == 1:
            found, stored = _checksum(exactly, int(begin[0]), int(length[0]))
        else:
            found, stored = _checksums(exactly, begin, length)
        wrong = masked(found) != stored
        if wrong.any():
            bad = int(wrong.argmax())
            reason = f"the data of record {first + bad} do not have the checksum behind them"
            raise _corrupt(path, int(begin[bad]), int(length[bad]), reason)


def _groups(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of successive records, [first, end), that as rows of equal length are not much; or one that is by itself."""
    first, longest = 0, 0
    for end, length in enumerate(lengths):
        longest = max(longest, length)
        if end > first and (end + 1 - first) * (longest + _HEAD_BYTES + _FOOT_BYTES) > _DATA_AT_ONCE_BYTES:
            yield first, end
            first, longest = end, length
    if lengths:
        yield first, len(lengths)


def _checksums(read: Read, begins: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of successive records' data: the CRC-32C, and the masked one that is stored; uint32 (n,) each."""
    ends = begins + lengths
    data = memoryview(read(int(begins[0]), int(ends[-1] - begins[0]) + _FOOT_BYTES))
    bounds = np.stack([begins, ends], axis=1) - begins[0]
    found = crc32c([data[begin:end] for begin, end in bounds.tolist()])
    foots = bounds[:, 1:] + np.arange(_FOOT_BYTES)
    return found, _uint32(np.frombuffer(data, np.uint8)[foots])


def _checksum(read: Read, begin: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """`_checksums` of one record, however long."""
    found, end = crc32c([b""]), begin + length
    for at in range(begin, end, _DATA_AT_ONCE_BYTES):
        data = read(at, min(_DATA_AT_ONCE_BYTES, end - at))
        found = crc32c_joined(found, crc32c([data]), np.array([len(data)]))
    return found, np.frombuffer(read(end, _FOOT_BYTES), "<u4")


def masked(checksums: np.ndarray) -> np.ndarray:
    """CRCs (uint32) as they are stored: turned and added to, lest a CRC of data that hold CRCs mean little."""
    return (checksums >> 15 | checksums << 17) + np.uint32(0xA282EAD8)


def _uint32(octets: np.ndarray) -> np.ndarray:
    """Little-endian numbers (n,) of uint8 (n, 4)."""
    return np.ascontiguousarray(octets).view("<u4")[:, 0]


def _corrupt(path: str, offset: int, length: int, reason: str) -> CorruptData:
    message = f"{path} is damaged at bytes {offset} to {offset + length}: {reason}; write or copy it again"
    return CorruptData(message, path, offset, length)

"""A zip of plain records, laid out before a byte is written.

Headers are written last, because they have checksums.

Source: PKWARE's APPNOTE.TXT, 4.3 (the structures), 4.4 (their fields) and 4.5.3 (sizes and offsets
of 4 GiB and more).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_EXTRA = struct.Struct("<2H")

_VERSION = 45  # of the specification that introduced 64-bit sizes
_NAMES_ARE_UTF8 = 1 << 11
_FIRST_OF_1980 = 33  # the date of every record, so that files of equal content are equal
ZIP64, _PADDING = 1, 0x4246  # ids of extra fields; the second one is torch's own
MOST_32, _MOST_16 = 0xFFFFFFFF, 0xFFFF


# Where the CRC-32 lies in a local header and in an entry of the directory, in bytes.
CRC32_IN_HEADER, CRC32_IN_ENTRY = 14, 16


@dataclass(frozen=True, slots=True)
class Placed:
    """A record's place.

    Attributes:
        name: of the record.
        header_offset: where its header begins in the zip, in bytes.
        offset, size_bytes: where its content lies in the zip.
    """

    name: str
    header_offset: int
    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes

    @property
    def _is_long(self) -> bool:
        return self.size_bytes >= MOST_32

    @property
    def _is_far(self) -> bool:
        return self.header_offset >= MOST_32

    @property
    def entry_bytes(self) -> int:
        """The length of its `entry`."""
        longer = 2 * self._is_long + self._is_far
        return _CENTRAL.size + len(self.name.encode()) + (_EXTRA.size + 8 * longer if longer else 0)

    def header(self, crc32: int) -> bytes:
        """Return its local header, padded up to its content."""
        name = self.name.encode()
        sizes = _EXTRA.pack(ZIP64, 16) + struct.pack("<2Q", self.size_bytes, self.size_bytes) if self._is_long else b""
        padding_bytes = self.offset - self.header_offset - _LOCAL.size - len(name) - len(sizes) - _EXTRA.size
        extra = sizes + _EXTRA.pack(_PADDING, padding_bytes) + b"Z" * padding_bytes
        size = MOST_32 if self._is_long else self.size_bytes
        about = (_VERSION, _NAMES_ARE_UTF8, 0, 0, _FIRST_OF_1980, crc32, size, size, len(name), len(extra))
        return _LOCAL.pack(b"PK\x03\x04", *about) + name + extra

    def entry(self, crc32: int) -> bytes:
        """Return its entry in the directory."""
        name, far = self.name.encode(), self._is_far
        longer = [self.size_bytes] * 2 * self._is_long + [self.header_offset] * far
        extra = _EXTRA.pack(ZIP64, 8 * len(longer)) + struct.pack(f"<{len(longer)}Q", *longer) if longer else b""
        size = MOST_32 if self._is_long else self.size_bytes
        about = (_VERSION, _VERSION, _NAMES_ARE_UTF8, 0, 0, _FIRST_OF_1980, crc32, size, size, len(name), len(extra))
        at = MOST_32 if far else self.header_offset
        return _CENTRAL.pack(b"PK\x01\x02", *about, 0, 0, 0, 0, at) + name + extra


def place(records: list[tuple[str, int, int]], begin: int = 0) -> list[Placed]:
    """Place records one after another.

    Args:
        records: the name, the size in bytes and the alignment in bytes (at most 32 KiB) of each.
        begin: where the zip begins in its file; contents are aligned in the file.

    Returns:
        Their places, counted from ``begin``.
    """
    placed = []
    header_offset = 0
    for name, size_bytes, alignment in records:
        least = _LOCAL.size + len(name.encode()) + _EXTRA.size + (20 if size_bytes >= MOST_32 else 0)
        offset = -(-(begin + header_offset + least) // alignment) * alignment - begin
        placed.append(Placed(name, header_offset, offset, size_bytes))
        header_offset = offset + size_bytes
    return placed


def directory(placed: list[Placed], checksums: list[int]) -> bytes:
    """Return everything after the last record, to the zip's end."""
    entries = b"".join(record.entry(crc32) for record, crc32 in zip(placed, checksums, strict=True))
    return entries + end_of_directory(placed[-1].end, len(placed), len(entries))


def end_bytes(at: int, count: int, size: int) -> int:
    """Return the length of the `end_of_directory`."""
    return _END.size + (_END64.size + _LOCATOR64.size) * _has_long_end(at, count, size)


def _has_long_end(at: int, count: int, size: int) -> bool:
    return at >= MOST_32 or size >= MOST_32 or count >= _MOST_16


def end_of_directory(at: int, count: int, size: int) -> bytes:
    """Return everything after the directory's entries.

    Args:
        at: where the entries begin in the zip, in bytes.
        count: how many entries there are.
        size: the length of all entries, in bytes.
    """
    end = b""
    if _has_long_end(at, count, size):
        rest = _END64.size - 12
        end = _END64.pack(b"PK\x06\x06", rest, _VERSION, _VERSION, 0, 0, count, count, size, at)
        end += _LOCATOR64.pack(b"PK\x06\x07", 0, at + size, 1)
    short = min(count, _MOST_16)
    return end + _END.pack(b"PK\x05\x06", 0, 0, short, short, min(size, MOST_32), min(at, MOST_32), 0)

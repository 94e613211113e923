"""Zip records whose names are consecutive numbers, all of them placed and described at once.

A checkpoint may have hundreds of thousands of storages. So these are columns with one row for each
record, and what zip_layout.py does for one record is done here for many.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gdsdata.checkpoint.torch_zip import zip_layout
from gdsdata.checkpoint.torch_zip.zip_layout import Placed

Column = NDArray[np.int64]

# The fixed parts of zip_layout.py's structures. Every field has a constant value, but for these.
_LOCAL = np.frombuffer(Placed("", 0, 34, 0).header(0), np.uint8)[:30]
_CENTRAL = np.frombuffer(Placed("", 0, 34, 0).entry(0), np.uint8)
_LOCAL_EXTRA_BYTES, _CENTRAL_EXTRA_BYTES = 28, 30
_CENTRAL_HEADER_OFFSET = 42
_PADDING = np.frombuffer(Placed("", 0, 34, 0).header(0), np.uint8)[30:34]  # of the extra field that pads a header
_FAR_EXTRA_BYTES = 12  # of an entry whose header offset has 64 bits


class NumberedRecords:
    """Records that are placed one after another. Their names are ``prefix`` and "0", "1" and so on.

    Args:
        prefix: of their names, in ASCII.
        sizes_bytes: their sizes.
        alignments: of their contents in the file, in bytes.
        first: where the first one begins in the zip, which is the whole file, in bytes.

    Attributes:
        sizes_bytes: their sizes.
        header_offsets, offsets: where their headers and their contents lie in the zip.
        end: where the last one ends.
    """

    def __init__(self, prefix: str, sizes_bytes: Column, alignments: Column, first: int) -> None:
        self._prefix = prefix
        numbers = np.arange(len(sizes_bytes))
        digits = 1 + np.searchsorted(10 ** np.arange(1, 12), numbers, side="right")
        self._name_bytes = digits + len(prefix)
        self.sizes_bytes = sizes_bytes
        self._is_long = self.sizes_bytes >= zip_layout.MOST_32
        least_bytes = 34 + self._name_bytes + 20 * self._is_long
        offsets, at = [], first
        for least, size_bytes, alignment in zip(
            least_bytes.tolist(), sizes_bytes.tolist(), alignments.tolist(), strict=True
        ):
            offset = -(-(at + least) // alignment) * alignment
            offsets.append(offset)
            at = offset + size_bytes
        self.offsets: Column = np.array(offsets, np.int64)
        self.end = at
        self.header_offsets: Column = np.concatenate(([first], (self.offsets + self.sizes_bytes)[:-1]))[: len(offsets)]
        self._is_far = self.header_offsets >= zip_layout.MOST_32

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, number: int) -> Placed:
        place = self.header_offsets[number], self.offsets[number], self.sizes_bytes[number]
        return Placed(f"{self._prefix}{number}", *map(int, place))

    @property
    def entry_bytes(self) -> int:
        """The length of `entries`."""
        far = int((self._is_far & ~self._is_long).sum())
        usual = int(~self._is_long @ (len(_CENTRAL) + self._name_bytes)) + far * _FAR_EXTRA_BYTES
        return usual + sum(self[i].entry_bytes for i in np.flatnonzero(self._is_long).tolist())

    def entries(self, checksums: NDArray[np.uint32]) -> bytes:
        """Return the records' entries in the zip's directory."""
        return b"".join(self._entries(checksums))

    def _entries(self, checksums: NDArray[np.uint32]) -> Iterator[bytes]:
        for begin, end in self._alike(0, len(self)):
            if self._is_long[begin]:
                for i in range(begin, end):
                    yield self[i].entry(int(checksums[i]))
                continue
            name_bytes, is_far = int(self._name_bytes[begin]), bool(self._is_far[begin])
            extra_bytes = _FAR_EXTRA_BYTES * is_far
            rows = self._rows(_CENTRAL, zip_layout.CRC32_IN_ENTRY, begin, end, checksums, extra_bytes)
            if is_far:
                _set(rows, _CENTRAL_EXTRA_BYTES, "<u2", extra_bytes)
                _set(rows, _CENTRAL_HEADER_OFFSET, "<u4", zip_layout.MOST_32)
                extra = len(_CENTRAL) + name_bytes
                _set(rows, extra, "<u2", zip_layout.ZIP64)
                _set(rows, extra + 2, "<u2", 8)
                _set(rows, extra + 4, "<u8", self.header_offsets[begin:end])
            else:
                _set(rows, _CENTRAL_HEADER_OFFSET, "<u4", self.header_offsets[begin:end])
            yield rows.tobytes()

    def stamp(
        self, image: NDArray[np.uint8], image_begin: int, first: int, last: int, checksums: NDArray[np.uint32]
    ) -> None:
        """Write the headers of some records into an image of the zip.

        Args:
            image: bytes of the zip.
            image_begin: where they lie in the zip.
            first, last: the records' numbers, from ``first`` to ``last - 1``. None of them has 4
                GiB or more.
            checksums: the CRC-32 of every record.
        """
        for begin, end in self._alike(first, last):
            rows = self._rows(_LOCAL, zip_layout.CRC32_IN_HEADER, begin, end, checksums, len(_PADDING))
            at = self.header_offsets[begin:end] - image_begin
            padding = self.offsets[begin:end] - self.header_offsets[begin:end] - rows.shape[1]
            _set(rows, _LOCAL_EXTRA_BYTES, "<u2", padding + len(_PADDING))
            rows[:, -4:-2] = _PADDING[:2]
            _set(rows, rows.shape[1] - 2, "<u2", padding)
            image[at[:, None] + np.arange(rows.shape[1])] = rows
            in_padding = np.arange(int(padding.sum())) - np.repeat(np.cumsum(padding) - padding, padding)
            image[np.repeat(at + rows.shape[1], padding) + in_padding] = ord("Z")

    def _rows(
        self,
        fixed: NDArray[np.uint8],
        crc32_at: int,
        begin: int,
        end: int,
        checksums: NDArray[np.uint32],
        extra_bytes: int,
    ) -> NDArray[np.uint8]:
        """Return structures with names and room for what follows them; one row for each record."""
        name_bytes = int(self._name_bytes[begin])
        rows = np.zeros((end - begin, len(fixed) + name_bytes + extra_bytes), np.uint8)
        rows[:, : len(fixed)] = fixed
        # The size twice and the length of the name follow the CRC-32.
        _set(rows, crc32_at, "<u4", checksums[begin:end])
        _set(rows, crc32_at + 4, "<u4", self.sizes_bytes[begin:end])
        _set(rows, crc32_at + 8, "<u4", self.sizes_bytes[begin:end])
        _set(rows, crc32_at + 12, "<u2", name_bytes)
        names = "".join(f"{self._prefix}{i}" for i in range(begin, end)).encode()
        rows[:, len(fixed) : len(fixed) + name_bytes] = np.frombuffer(names, np.uint8).reshape(-1, name_bytes)
        return rows

    def _alike(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield where consecutive records begin and end whose structures have the same length."""
        kinds = (self._name_bytes * 4 + self._is_far * 2 + self._is_long)[first:last]
        cuts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), last - first]
        for begin, end in zip(cuts, cuts[1:], strict=False):
            if begin < end:
                yield first + begin, first + end


def _set(rows: NDArray[np.uint8], at: int, kind: str, values: Column | NDArray[np.uint32] | int) -> None:
    """Set a number in each row."""
    column = np.ascontiguousarray(np.broadcast_to(values, len(rows))).astype(kind)
    rows[:, at : at + column.itemsize] = column.view(np.uint8).reshape(-1, column.itemsize)

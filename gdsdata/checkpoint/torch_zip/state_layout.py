"""Where the parts of a state's archive go in its file.

Everything is laid out before the first byte is written.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from gdsdata.checkpoint.partial_pages import PAGE_BYTES
from gdsdata.checkpoint.torch_zip import torch_config, zip_layout
from gdsdata.checkpoint.torch_zip.numbered_records import NumberedRecords

PREFIX = "archive/"
FORMAT_VERSION = b"3\n"  # as torch.save writes it

Checksums = NDArray[np.uint32]


class StateLayout:
    """The layout of an archive that fills its file.

    Args:
        pickled: the content of "data.pkl".
        sizes_bytes: the sizes of the storages that it refers to as "0", "1" and so on.
        alignment: of every record, in bytes; records of a page and more lie on whole pages.
        has_checksums: False writes zeros in the place of every CRC-32, as torch does.

    Attributes:
        storages: their records.
        end: the size of the file.
    """

    def __init__(
        self,
        pickled: bytes,
        sizes_bytes: NDArray[np.int64],
        alignment: int = torch_config.SMALL_ALIGNMENT,
        has_checksums: bool = True,
    ) -> None:
        self._has_checksums = has_checksums
        self._contents = {"data.pkl": pickled, "byteorder": sys.byteorder.encode(), "version": FORMAT_VERSION}
        self._placed = zip_layout.place(
            [(f"{PREFIX}{name}", len(content), alignment) for name, content in self._contents.items()]
        )
        alignments = np.where(sizes_bytes >= PAGE_BYTES, PAGE_BYTES, alignment)
        self.storages = NumberedRecords(f"{PREFIX}data/", sizes_bytes, alignments, self._placed[-1].end)
        self._count = len(self._placed) + len(self.storages)
        self._directory_bytes = sum(one.entry_bytes for one in self._placed) + self.storages.entry_bytes
        self.end = self.storages.end + self._directory_bytes
        self.end += zip_layout.end_bytes(self.storages.end, self._count, self._directory_bytes)

    def contents(self) -> Iterator[tuple[int, bytes]]:
        """Yield the records that are no storages: offsets in the file, and bytes."""
        for record, content in zip(self._placed, self._contents.values(), strict=True):
            yield record.header_offset, record.header(self._noted(zlib.crc32(content))) + content

    def header(self, storage: int, crc32: int) -> tuple[int, bytes]:
        """Return where a storage's header goes in the file, and its bytes."""
        record = self.storages[storage]
        return record.header_offset, record.header(self._noted(crc32))

    def around(self, storages: Sequence[int], checksums: Checksums) -> Iterator[tuple[int, bytes]]:
        """Yield everything that is no storage: offsets in the file, and bytes.

        Args:
            storages: those whose headers are not written yet.
            checksums: the CRC-32 of each storage.
        """
        yield from self.contents()
        for storage in storages:
            yield self.header(storage, int(checksums[storage]))
        yield self.directory(checksums)

    def stamp(self, image: NDArray[np.uint8], image_begin: int, first: int, last: int, checksums: Checksums) -> None:
        """Write headers into an image of the file: see `NumberedRecords.stamp`."""
        self.storages.stamp(image, image_begin, first, last, self._all_noted(checksums))

    def directory(self, checksums: Checksums) -> tuple[int, bytes]:
        """Return where everything after the last record goes in the file, and its bytes.

        Args:
            checksums: the CRC-32 of each storage.
        """
        crc32s = [self._noted(zlib.crc32(content)) for content in self._contents.values()]
        entries = b"".join(record.entry(crc32) for record, crc32 in zip(self._placed, crc32s, strict=True))
        entries += self.storages.entries(self._all_noted(checksums))
        at = self.storages.end
        return at, entries + zip_layout.end_of_directory(at, self._count, self._directory_bytes)

    def _noted(self, crc32: int) -> int:
        return crc32 if self._has_checksums else 0

    def _all_noted(self, checksums: Checksums) -> Checksums:
        return checksums if self._has_checksums else np.zeros_like(checksums)

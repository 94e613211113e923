"""TFRecord files: records of bytes, each between its length and a checksum.

The meaning of the bytes is left to the user. The engine computes the checksums of data when it has
read them. Out of the page cache, that costs these times of the processor (two busy cores of an AMD
EPYC, November 2026):

- 0.8 us for a record of 300 bytes, which takes 2.1 us without;
- 9 us for one of 100 kB, which takes 21 us without;
- 150 us for one of 1 MB, which takes 140 us without.

Source of the format:
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details. A record is a
uint64 length, the masked CRC-32C of those 8 bytes, the data, and its masked CRC-32C; little endian,
nothing between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gdsdata.formats.extents import Extents
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.index import first_samples
from gdsdata.formats.parsers.tfrecord_records import find_records
from gdsdata.storage.opened import of_each, open_file

# Files indexed at a time, so that a disk has several reads to serve; a thread mostly waits or
# copies.
_READERS = 8


@dataclass(frozen=True)
class TFRecord:
    """TFRecord files, not compressed as a whole.

    A sample is a record: one field "data", of as many bytes as it has.

    Indexing reads every record's head and checks its length's checksum: files of records under 64
    KiB are read whole, of longer ones the heads alone.

    Args:
        check_data: compare the checksum of each record's data when it is read: one that differs is
            CorruptData, or left out with ``on_error="skip"``. Data on their way to a GPU then pass
            the processor, and False lets GPUDirect Storage take them past it.
    """

    check_data: bool = True

    def index(self, paths: list[str]) -> FieldIndex:
        """Find the records of ``paths``. A file may hold none.

        Indexes of other readers (``.idx``, ``.index``) among them are passed over.

        Raises:
            CorruptData: a checksum differs, or a file ends within a record.
            ValueError: a file is compressed.
            FileNotFoundError, IoError: a file is not available.
        """
        paths = self.data_files(paths)
        found = of_each(_find, paths, _READERS)
        sizes, times, begins, lengths, checksums = zip(*found, strict=True)
        return FieldIndex(
            paths=paths,
            size_bytes=np.array(sizes, np.int64),
            mtime_ns=np.array(times, np.int64),
            first_sample=first_samples([len(length) for length in lengths]),
            fields=(Field("data"),),
            extents=Extents.of(np.concatenate(begins)[:, None], np.concatenate(lengths)[:, None]),
            checksums=np.concatenate(checksums)[:, None] if self.check_data else None,
            checksum="crc32c",
        )

    @staticmethod
    def data_files(paths: list[str]) -> list[str]:
        """Return ``paths`` without other readers' indexes, unless only these are left."""
        return [path for path in paths if not path.endswith((".idx", ".index"))] or paths


def _find(path: str) -> tuple[int, int, np.ndarray, np.ndarray, np.ndarray]:
    """Return size and time of modification of a file, and where its records lie."""
    with open_file(path) as file:
        return file.size_bytes, file.mtime_ns, *find_records(file.read, file.size_bytes, path)

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

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from gdsdata.errors import IoError
from gdsdata.formats.extents import Extents
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.file_heads import read_heads
from gdsdata.formats.index import first_samples, open_descriptor
from gdsdata.formats.parsers.tfrecord_records import find_records

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

        Raises:
            CorruptData: a checksum differs, or a file ends within a record.
            ValueError: a file is compressed.
            FileNotFoundError, IoError: a file is not available.
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
            extents=Extents.of(np.concatenate(begins)[:, None], np.concatenate(lengths)[:, None]),
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
        raise IoError.caused_by(error, message, path, offset, count) from error

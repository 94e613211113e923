"""`ParquetFile`: decodes the row groups of a file, by its footer."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from gdsdata.formats.columns import Column, arrow_module
from gdsdata.formats.parsers import magics

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet


class ParquetFile(NamedTuple):
    """A file's footer, by which pyarrow decodes row groups, and wanted columns: a `TableFile`."""

    footer: bytes  # with the tail behind it
    columns: tuple[Column, ...]
    leaves: tuple[str, ...]

    def decoded(
        self, number: int, begins: Sequence[int], stored: Sequence[memoryview], size_bytes: int
    ) -> pyarrow.Table:
        source = _Stored(begins, stored, size_bytes)
        reader = arrow_module("pyarrow.parquet").ParquetFile(
            arrow_module().PythonFile(source, "r"),
            metadata=metadata_of(self.footer),
            pre_buffer=False,  # each column by itself, as it was read
            page_checksum_verification=True,
        )
        table = reader.read_row_group(number, columns=list(self.leaves), use_threads=False)
        table.validate()
        return table


@functools.lru_cache(maxsize=64)  # of the files that are decoded now
def metadata_of(footer: bytes) -> pyarrow.parquet.FileMetaData:
    """Return pyarrow's metadata of a file with this footer, and the tail behind it.

    Raises:
        Exception: the footer cannot be read; the type is one of `errors_of_pyarrow`.
    """
    return arrow_module("pyarrow.parquet").read_metadata(arrow_module().BufferReader(magics.PARQUET + footer))


class _Stored:
    """A file for pyarrow with some ranges in memory; other reads are an error."""

    closed = False

    def __init__(self, begins: Sequence[int], stored: Sequence[memoryview], size_bytes: int) -> None:
        self._ranges = sorted(zip(begins, stored, strict=True), key=lambda one: one[0])
        self._size_bytes, self._at = size_bytes, 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def close(self) -> None:
        self.closed = True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        return self._at

    def read(self, count: int) -> memoryview:
        for begin, stored in self._ranges:
            place = self._at - begin
            if 0 <= place and place + count <= len(stored):
                self._at += count
                return stored[place : place + count]
        raise ValueError(f"{count} bytes at {self._at} belong to none of the columns")

"""`ParquetFile`: decodes the row groups of a file, by its footer."""

from __future__ import annotations

import functools
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gdsdata.formats.column_values import TimesBeyond
from gdsdata.formats.columns import Column, arrow_module
from gdsdata.formats.parsers import magics

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_PARTS = 64  # 64 MiB each, on average, of the largest row group
_MOST_SECONDS = 2**63 // 10**9 + 1  # of 64 bits of nanoseconds, on either side of 1970


class ParquetFile(NamedTuple):
    """A file's footer, by which pyarrow decodes row groups, and wanted columns: a `TableFile`."""

    footer: bytes  # with the tail behind it
    columns: tuple[Column, ...]
    leaves: tuple[str, ...]

    def decoded(
        self, number: int, begins: Sequence[int], stored: Sequence[memoryview], size_bytes: int
    ) -> pyarrow.Table:
        def opened(unit: str) -> pyarrow.parquet.ParquetFile:
            return arrow_module("pyarrow.parquet").ParquetFile(
                arrow_module().PythonFile(_Stored(begins, stored, size_bytes), "r"),
                metadata=metadata_of(self.footer),
                pre_buffer=False,  # each column by itself, as it was read
                page_checksum_verification=True,
                coerce_int96_timestamp_unit=unit,
            )

        table = _row_group(opened("ns"), number, self.leaves)
        table.validate()
        if old_times := _int96_leaves(self.footer, self.leaves):
            _check_times(_row_group(opened("s"), number, old_times))
        return table


def _row_group(reader: pyarrow.parquet.ParquetFile, number: int, leaves: Sequence[str]) -> pyarrow.Table:
    """Read columns of a row group: at once, or in parts.

    pyarrow (26) reads no column of lists, structs or maps at once whose texts or bytes take more
    than 2 GiB.
    """
    try:
        return reader.read_row_group(number, columns=list(leaves), use_threads=False)
    except NotImplementedError:
        rows = reader.metadata.row_group(number).num_rows
        if rows < 2:
            raise
        parts = reader.iter_batches(-(-rows // _PARTS), [number], list(leaves), use_threads=False)
        return arrow_module().Table.from_batches(parts)


@functools.lru_cache(maxsize=64)
def _int96_leaves(footer: bytes, leaves: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the leaves whose times are of type INT96. pyarrow wraps them in silence."""
    schema = metadata_of(footer).schema
    columns = map(schema.column, range(len(schema)))
    return tuple({one.path for one in columns if one.physical_type == "INT96"}.intersection(leaves))


def _check_times(table: pyarrow.Table) -> None:
    """Check that nanoseconds can have all times of a table, which are in seconds.

    Raises:
        TimesBeyond: they cannot.
    """
    arrow = arrow_module()
    for name, column in zip(table.column_names, table.columns, strict=True):
        for times in (one for chunk in column.chunks for one in _times_in(chunk)):
            seconds = times.view(arrow.int64()).drop_null().to_numpy()
            if len(seconds) and not -_MOST_SECONDS <= seconds.min() <= seconds.max() < _MOST_SECONDS:
                raise TimesBeyond(name)


def _times_in(array: pyarrow.Array) -> Iterator[pyarrow.Array]:
    types = arrow_module("pyarrow.types")
    if types.is_timestamp(array.type):
        yield array
    elif types.is_map(array.type):
        yield from (*_times_in(array.keys), *_times_in(array.items))
    elif types.is_struct(array.type):
        yield from (time for member in array.flatten() for time in _times_in(member))
    elif types.is_nested(array.type):
        yield from _times_in(array.flatten())


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
        found = ((begin, content) for begin, content in zip(begins, stored, strict=True) if len(content))
        self._ranges = sorted(found, key=lambda one: one[0])
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
        number = bisect_right(self._ranges, self._at, key=lambda one: one[0]) - 1
        if number >= 0:
            begin, stored = self._ranges[number]
            place = self._at - begin
            if place + count <= len(stored):
                self._at += count
                return stored[place : place + count]
        raise ValueError(f"{count} bytes at {self._at} belong to none of the columns")

"""Parquet: rows are samples, columns are fields. pyarrow decodes row groups.

Source of the format: https://parquet.apache.org/docs/file-format/ and ``parquet.thrift`` of
https://github.com/apache/parquet-format. Files that parquet-mr wrote before 1.2.9 (2014)
have a wrong end for some columns, and are not read.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

from gdsdata.errors import CorruptData
from gdsdata.formats.columns import (
    Column,
    FillNull,
    arrow_module,
    checked_fill,
    checked_names,
    columns_of,
    value_bytes,
)
from gdsdata.formats.parquet_file import ParquetFile, metadata_of
from gdsdata.formats.parsers import magics
from gdsdata.formats.parsers.damage import damaged
from gdsdata.formats.parsers.parquet_footer import StoredColumn, row_groups_of
from gdsdata.formats.partitions import warn_of_partitions
from gdsdata.formats.tables import FileGroups, TableIndex, errors_of_pyarrow, index_tables, line_of, unknown_schema
from gdsdata.storage.opened import Opened, open_file

_ENCRYPTED = b"PARE"
_TAIL_BYTES = 8
# Footers of thousands of row groups and columns take far less; a length that lies must not become
# memory.
_LONGEST_FOOTER_BYTES = 2**28
# A row group may take so much when it is decoded: a number of rows that lies must not become
# memory.
_LARGEST_GROUP_BYTES = 2**32
# Files indexed at a time, so that a disk has several reads to serve.
_READERS = 8


@dataclass(frozen=True)
class Parquet:
    """Parquet files, of every encoding and codec that pyarrow decodes.

    - Numbers, booleans, dates and times (as integers) are tensors ``(B,)``. Decimals are float64.
      Fixed-size lists and binaries, fixed-shape tensors and the arrays of ``datasets`` (Array2D)
      are ``(B, *shape)``.
    - Strings, binaries and lists of numbers are fields whose size differs from sample to sample.
      Null is empty.
    - Lists of lists of numbers, and lists of binaries, are a `gdsdata.Ragged` whose values are a
      `gdsdata.Ragged`.
    - A struct's members are columns: ``image.bytes``. A null struct has null members.
    - Lists of structs or of strings, and maps, are JSON text for each sample, UTF-8
      (`gdsdata.formats.json_rows.json_rows` says how): decode them with ``"json"``.
    - Nulls among numbers are refused, unless ``fill_null`` says what takes their place.
    - Dictionaries are decoded. Unions, intervals, list views, and encrypted files are refused.

    A row group is read and decoded as a whole, so it has to fit in memory several times: see
    `gdsdata.RowGroups`.

    Args:
        columns: names of those that are wanted, and no others are read; a struct's means all
            members that it has in the first file. None: all.
        fill_null: takes the place of nulls among numbers. One number is for every column whose
            dtype has it; a mapping is by column, as in ``{"label": -100}``. None: they are refused.

    Raises:
        ValueError: ``columns`` is empty, a string, or names one twice; ``fill_null`` is no number.
    """

    columns: tuple[str, ...] | None = None
    fill_null: FillNull = None
    decoded_on_cpu: ClassVar[bool] = True  # the engine of a GPU does not read them

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", checked_names(self.columns, self))
        object.__setattr__(self, "fill_null", checked_fill(self.fill_null, "Parquet"))

    def index(self, paths: list[str]) -> TableIndex:
        """Read the footer of each of ``paths``. A file may hold no rows.

        Raises:
            CorruptData: a footer is damaged or lies.
            ValueError: a type that is refused, nulls among numbers, what is encrypted, a column
                that is not there, a row group that takes more than 4 GiB, or files with unlike
                columns.
            ImportError: pyarrow is not installed.
            FileNotFoundError, IoError: a file is not available.
        """
        arrow_module("pyarrow.parquet")
        paths = [path for path in paths if not magics.is_beside_data(path)] or paths
        index = index_tables(paths, self.columns, partial(_index_file, fill_null=self.fill_null), _READERS)
        if self.columns is None:
            warn_of_partitions(paths, index.fields)
        return index


def _index_file(path: str, wanted: Sequence[str] | None, fill_null: FillNull) -> FileGroups:
    with open_file(path) as file:
        footer, footer_at = _footer_of(file)
    groups = row_groups_of(footer, footer_at, path)
    try:
        metadata = metadata_of(footer)
        schema = metadata.schema.to_arrow_schema()
        paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    except NotImplementedError as error:
        raise unknown_schema(path, error) from error
    except errors_of_pyarrow() as error:
        raise damaged(path, footer_at, len(footer), f"the footer cannot be read ({line_of(error)})") from error
    if metadata.num_row_groups != len(groups) or any(len(group.columns) != len(paths) for group in groups):
        raise damaged(path, footer_at, len(footer), f"not all of its row groups have the schema's {len(paths)} columns")
    columns = columns_of(schema, wanted, path, fill_null)
    names = {column.field.name for column in columns}
    chosen = [i for i, leaf in enumerate(paths) if not names.isdisjoint(_columns_around(leaf))]
    decodes = ParquetFile(footer, columns, tuple(paths[i] for i in chosen))
    found = FileGroups(decodes, file.size_bytes, file.mtime_ns, [], [], [], [], [])
    for number, group in enumerate(groups):
        rows = group.rows
        if rows == 0:  # what its columns say means nothing
            continue
        leaves = [_Leaf.of(paths[i], group.columns[i]) for i in chosen]
        for leaf in leaves:
            leaf.check(number, rows, footer_at, path)
        if sum(leaf.length for leaf in leaves) > footer_at:
            raise damaged(path, footer_at, len(footer), f"by its footer, columns of row group {number} overlap")
        found.rows.append(rows)
        found.numbers.append(number)
        found.begins.append([leaf.begin for leaf in leaves])
        found.lengths.append([leaf.length for leaf in leaves])
        found.decoded.append(_decoded_bytes(columns, leaves, rows, number, path))
    return found


def _columns_around(leaf: str) -> Iterator[str]:
    """Yield the names that a stored column may be a part of, and its own."""
    return itertools.accumulate(leaf.split("."), "{}.{}".format)


def _footer_of(file: Opened) -> tuple[bytes, int]:
    """Return the footer with the tail behind it, and its offset."""
    path, size_bytes = file.path, file.size_bytes
    tail, head = file.read(max(0, size_bytes - _TAIL_BYTES), _TAIL_BYTES), file.read(0, 4)
    if tail[4:] == _ENCRYPTED:
        raise ValueError(f"{path} is encrypted, which is not read: write it without encryption")
    if head != magics.PARQUET or tail[4:] != magics.PARQUET or size_bytes < len(magics.PARQUET) + _TAIL_BYTES:
        raise damaged(path, 0, size_bytes, "it does not begin and end with Parquet's magic: it was cut short")
    footer_bytes = int.from_bytes(tail[:4], "little") + _TAIL_BYTES
    footer_at = size_bytes - footer_bytes
    if footer_at < len(magics.PARQUET) or footer_bytes > _LONGEST_FOOTER_BYTES:
        raise damaged(path, size_bytes - _TAIL_BYTES, _TAIL_BYTES, f"its footer would have {footer_bytes} bytes")
    return file.read(footer_at, footer_bytes), footer_at


class _Leaf(NamedTuple):
    """A stored column of a row group: its place, and its values' metadata."""

    name: str
    begin: int
    length: int
    values: int
    is_flat: bool
    unpacked_bytes: int
    other_file: str
    is_encrypted: bool

    @classmethod
    def of(cls, name: str, stored: StoredColumn) -> _Leaf:
        return cls(
            name,
            min(stored.data_page_offset, stored.dictionary_page_offset or stored.data_page_offset),
            stored.compressed_bytes,
            stored.values,
            "." not in name,
            stored.uncompressed_bytes,
            stored.file_path,
            stored.is_encrypted,
        )

    def check(self, number: int, rows: int, footer_at: int, path: str) -> None:
        """Check its place and its number of values.

        Raises:
            CorruptData: it lies outside the data, or has another number of values than the row
                group has rows.
            ValueError: it lies in another file, or is encrypted.
        """
        if self.is_encrypted:
            raise ValueError(f"{path}: column {self.name!r} is encrypted: write it without, or leave it out (columns=)")
        if self.other_file:
            raise ValueError(
                f"{path}: column {self.name!r} lies in {self.other_file!r}, which is not followed: name that file as a "
                "source, or leave the column out (columns=)"
            )
        is_inside = len(magics.PARQUET) <= self.begin <= self.begin + self.length <= footer_at and self.length >= 0
        fits = self.values == rows if self.is_flat else self.values >= rows
        if not is_inside or rows < 0 or not fits or not self.length:
            raise CorruptData(
                f"{path} is damaged: by its footer, row group {number} has {rows} rows, and of column {self.name!r} "
                f"{self.values} values in {self.length} bytes at {self.begin}, with {footer_at} bytes before the "
                f"footer; write or copy it again",
                path,
                self.begin,
                self.length,
            )


def _decoded_bytes(columns: Sequence[Column], leaves: Sequence[_Leaf], rows: int, number: int, path: str) -> int:
    """Return the memory of a row group's columns when decoded.

    It is exact for values of one size, and an estimate for others.
    """
    decoded_bytes, unpacked_bytes = 0, Counter[str]()
    for leaf in leaves:
        for name in _columns_around(leaf.name):
            unpacked_bytes[name] += max(leaf.unpacked_bytes, 0)
    for column in columns:
        if column.field.shape is not None:
            decoded_bytes += rows * value_bytes(column.field)
        else:
            decoded_bytes += unpacked_bytes[column.field.name] + 8 * rows
    if decoded_bytes > _LARGEST_GROUP_BYTES:
        raise ValueError(
            f"{path}: row group {number} of {rows} rows would take {decoded_bytes} bytes when decoded, and the most is "
            f"{_LARGEST_GROUP_BYTES}: write smaller row groups (pyarrow.parquet.write_table(row_group_size=)), or name "
            f"the columns that are wanted (columns=)"
        )
    return decoded_bytes

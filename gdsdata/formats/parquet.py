"""Parquet: a row is a sample, a column a field, and a row group what is read and decoded at a time, by pyarrow.

Source of the format: https://parquet.apache.org/docs/file-format/ and ``parquet.thrift`` of
https://github.com/apache/parquet-format. Files that parquet-mr wrote before 1.2.9 (2014) say wrongly where some columns
end, and are not read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from gdsdata.errors import CorruptData, IoError
from gdsdata.formats.columns import (
    Column,
    arrow_module,
    check_alike,
    checked_names,
    columns_of,
    is_bytes,
    nulls_among_numbers,
    storage_of,
    value_bytes,
)
from gdsdata.formats.fields import Field
from gdsdata.formats.index import SampleIndex, files_of_part, first_samples, open_descriptor
from gdsdata.formats.parsers import magics
from gdsdata.formats.parsers.damage import damaged
from gdsdata.formats.parsers.parquet_footer import StoredColumn, row_groups_of

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_ENCRYPTED = b"PARE"
_TAIL_BYTES = 8
# Footers of thousands of row groups and columns take far less; a length that lies must not become memory.
_LONGEST_FOOTER_BYTES = 2**28
# What a row group may take when it is decoded: a number of rows that lies must not become memory.
_LARGEST_GROUP_BYTES = 2**32
# Files indexed at a time, so that a disk has several reads to serve.
_READERS = 8

# A column of a row group: an array (rows, *shape), or, of strings and lists, pyarrow's of the large type.
Values = Any


@dataclass(frozen=True)
class Parquet:
    """Parquet files, of every encoding and codec that pyarrow decodes.

    - Numbers, booleans, dates and times (as integers) are tensors ``(B,)``; fixed-size lists and binaries, and
      fixed-shape tensors, ``(B, *shape)``. A column of them that has nulls is refused: fill them (``fill_null``).
    - Strings, binaries and lists of numbers are fields whose size differs from sample to sample. Null is empty.
    - A struct's members are columns: ``image.bytes``. A null struct has null members.
    - Dictionaries are decoded. Decimals, lists of lists or structs, and encrypted files are refused.

    A row group is read and decoded as a whole, so it has to fit in memory several times: see `gdsdata.RowGroups`.

    Args:
        columns: names of those that are wanted, and no others are read; a struct's means all its members. None: all.

    Raises:
        ValueError: ``columns`` is empty, a string, or names one twice.
    """

    columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", checked_names(self.columns, self))

    def index(self, paths: list[str]) -> TableIndex:
        """Read the footer of each of ``paths``. A file may hold no rows.

        Raises:
            CorruptData: a footer is damaged or lies.
            ValueError: a type that is refused, nulls among numbers, what is encrypted, a column that is not there, a
                row group that takes more than 4 GiB, or files with unlike columns.
            ImportError: pyarrow is not installed.
            FileNotFoundError, IoError: a file is not to be had.
        """
        arrow_module("pyarrow.parquet")
        wanted = self.columns
        with ThreadPoolExecutor(min(_READERS, len(paths))) as readers:
            found = list(readers.map(lambda path: _index_file(path, wanted), paths))
        fields = tuple(column.field for column in found[0].columns)
        for path, other in zip(paths, found, strict=True):
            check_alike(fields, [column.field for column in other.columns], (paths[0], path))
        file_of_group = [[i] * len(one.rows) for i, one in enumerate(found)]
        return TableIndex(
            paths=paths,
            size_bytes=np.array([one.size_bytes for one in found], np.int64),
            mtime_ns=np.array([one.mtime_ns for one in found], np.int64),
            first_sample=first_samples([sum(one.rows) for one in found]),
            fields=fields,
            group_first_row=first_samples([rows for one in found for rows in one.rows]),
            group_file=np.array(sum(file_of_group, []), np.int32),
            group_number=np.array(sum((one.numbers for one in found), []), np.int64),
            group_begin=np.zeros(sum(len(one.rows) for one in found), np.int64),
            group_rows=np.array(sum((one.rows for one in found), []), np.int64),
            begin_bytes=np.array(sum((one.begins for one in found), []), np.int64).reshape(-1, len(found[0].leaves)),
            length_bytes=np.array(sum((one.lengths for one in found), []), np.int64).reshape(-1, len(found[0].leaves)),
            decoded_bytes=np.array(sum((one.decoded for one in found), []), np.int64),
            files=tuple(_File(one.metadata, one.columns, one.leaves) for one in found),
        )


class _File(NamedTuple):
    """What pyarrow has to know to decode a file's row groups, and which of its columns are wanted."""

    metadata: pyarrow.parquet.FileMetaData
    columns: tuple[Column, ...]
    leaves: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class TableIndex(SampleIndex):
    """Where the row groups of some files lie.

    Attributes:
        fields: the K fields.
        group_first_row: int64 (G + 1,), id of each row group's first sample, then N. None is empty.
        group_file: int32 (G,), a place in ``paths``.
        group_number: int64 (G,), among the row groups of its file.
        group_begin: int64 (G,), the row of it that is its first sample: 0, but for the first one of a `part`.
        group_rows: int64 (G,), rows that are stored in it; a `part` may have fewer of the first one and the last one.
        begin_bytes, length_bytes: int64 (G, C), extents of the stored columns that are wanted.
        decoded_bytes: int64 (G,), memory of it when decoded, about.
        files: what pyarrow has to know of each file.
    """

    kind: ClassVar[str] = "table"
    fields: tuple[Field, ...]
    group_first_row: np.ndarray
    group_file: np.ndarray
    group_number: np.ndarray
    group_begin: np.ndarray
    group_rows: np.ndarray
    begin_bytes: np.ndarray
    length_bytes: np.ndarray
    decoded_bytes: np.ndarray
    files: tuple[_File, ...]

    def extents(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The row group of each of ``samples`` (int64 (m,), not checked), and its row there: int64 (m,) each."""
        group = np.searchsorted(self.group_first_row, samples, side="right") - 1
        return group, samples - self.group_first_row[group] + self.group_begin[group]

    def _part(self, files: slice, begin: int, end: int) -> dict[str, Any]:
        """A row group that the part has some rows of is still read and decoded as a whole."""
        groups, group_first_row = files_of_part(self.group_first_row, begin, end)
        group_begin = self.group_begin[groups].copy()
        group_begin[0] += begin - self.group_first_row[groups.start]
        of_groups = ("group_number", "group_rows", "begin_bytes", "length_bytes", "decoded_bytes")
        return {
            "files": self.files[files],
            "group_first_row": group_first_row,
            "group_begin": group_begin,
            "group_file": self.group_file[groups] - np.int32(files.start),
            **{name: getattr(self, name)[groups] for name in of_groups},
        }

    def most_bytes(self, samples: int) -> int:
        """Of so many samples' fields, about."""
        return samples * self.spacing_bytes

    @cached_property
    def spacing_bytes(self) -> int:
        """Of a sample when it is decoded, on the average; at least 1."""
        return max(1, int(self.decoded_bytes.sum()) // max(1, len(self)))

    def name_of(self, group: int) -> str:
        """Of a row group, for errors."""
        return f"row group {self.group_number[group]} of {self.paths[self.group_file[group]]}"

    def decode(self, group: int, stored: Sequence[memoryview]) -> list[Values]:
        """The columns of a row group.

        Args:
            group: which.
            stored: the bytes of its extents.

        Returns:
            Of each field its values: an array (rows, *shape), or, of strings and lists, pyarrow's of the large type.

        Raises:
            CorruptData: the bytes are not what the footer says.
            ValueError: nulls among numbers.
        """
        arrow, parquet = arrow_module(), arrow_module("pyarrow.parquet")
        file = self.files[self.group_file[group]]
        path = self.paths[self.group_file[group]]
        source = _Stored(self.begin_bytes[group].tolist(), stored, int(self.size_bytes[self.group_file[group]]))
        try:
            reader = parquet.ParquetFile(
                arrow.PythonFile(source, "r"),
                metadata=file.metadata,
                pre_buffer=False,  # each column by itself, as it was read
                page_checksum_verification=True,
            )
            number = int(self.group_number[group])
            table = reader.read_row_group(number, columns=list(file.leaves), use_threads=False)
            table.validate()
            columns = [_column_of(table, column) for column in file.columns]
        except _errors_of_pyarrow() as error:
            raise self._corrupt(group, f"it cannot be decoded ({_line_of(error)})") from error
        rows = int(self.group_rows[group])
        values = []
        for column, (array, lists_have_nulls) in zip(file.columns, columns, strict=True):
            if len(array) != rows:
                raise self._corrupt(group, f"column {column.field.name!r} has {len(array)} rows and should have {rows}")
            if lists_have_nulls or (column.field.shape is not None and array.null_count):
                raise nulls_among_numbers(path, column.field.name)
            values.append(array if column.field.shape is None else _dense(array, column.field))
        return values

    def _corrupt(self, group: int, reason: str) -> CorruptData:
        begin = int(self.begin_bytes[group].min())
        length = int((self.begin_bytes[group] + self.length_bytes[group]).max()) - begin
        message = (
            f"{self.name_of(group)}, at bytes {begin} to {begin + length}, is damaged: {reason}; write or copy it again"
        )
        return CorruptData(message, self.paths[self.group_file[group]], begin, length)


class _Stored:
    """A file of which some ranges are at hand, for pyarrow: reads beyond them are an error."""

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


def _errors_of_pyarrow() -> tuple[type[Exception], ...]:
    """What it raises where data are damaged."""
    arrow = arrow_module()
    return arrow.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError


def _line_of(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


# --------------------------------------------------------------------------------------------------------- footers


class _Found(NamedTuple):
    columns: tuple[Column, ...]
    leaves: tuple[str, ...]
    metadata: pyarrow.parquet.FileMetaData
    rows: list[int]
    numbers: list[int]
    begins: list[list[int]]
    lengths: list[list[int]]
    decoded: list[int]
    size_bytes: int
    mtime_ns: int


def _index_file(path: str, wanted: Sequence[str] | None) -> _Found:
    footer, footer_at, status = _footer_of(path)
    groups = row_groups_of(footer, footer_at, path)
    parquet, arrow = arrow_module("pyarrow.parquet"), arrow_module()
    try:
        metadata = parquet.read_metadata(arrow.BufferReader(magics.PARQUET + footer))  # as of a file without data
        schema = metadata.schema.to_arrow_schema()
        paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    except _errors_of_pyarrow() as error:
        raise damaged(path, footer_at, len(footer), f"the footer cannot be read ({_line_of(error)})") from error
    if metadata.num_row_groups != len(groups) or any(len(group.columns) != len(paths) for group in groups):
        raise damaged(path, footer_at, len(footer), f"not all of its row groups have the schema's {len(paths)} columns")
    columns = columns_of(schema, wanted, path)
    names = [column.field.name for column in columns]
    chosen = [i for i, leaf in enumerate(paths) if any(leaf == name or leaf.startswith(f"{name}.") for name in names)]
    found = _Found(
        columns, tuple(paths[i] for i in chosen), metadata, [], [], [], [], [], status.st_size, status.st_mtime_ns
    )
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


def _footer_of(path: str) -> tuple[bytes, int, os.stat_result]:
    """The footer with what is behind it, where it begins, and the file's size and times."""
    with open_descriptor(path) as descriptor, _failures_told(path):
        status = os.fstat(descriptor)
        size_bytes = status.st_size
        head, tail = os.pread(descriptor, 4, 0), os.pread(descriptor, _TAIL_BYTES, max(0, size_bytes - _TAIL_BYTES))
        if tail[4:] == _ENCRYPTED:
            raise ValueError(f"{path} is encrypted, which is not read: write it without encryption")
        if head != magics.PARQUET or tail[4:] != magics.PARQUET or size_bytes < len(magics.PARQUET) + _TAIL_BYTES:
            raise damaged(path, 0, size_bytes, "it does not begin and end with Parquet's magic: it was cut short")
        footer_bytes = int.from_bytes(tail[:4], "little") + _TAIL_BYTES
        footer_at = size_bytes - footer_bytes
        if footer_at < len(magics.PARQUET) or footer_bytes > _LONGEST_FOOTER_BYTES:
            raise damaged(path, size_bytes - _TAIL_BYTES, _TAIL_BYTES, f"its footer would have {footer_bytes} bytes")
        footer = os.pread(descriptor, footer_bytes, footer_at)
    return footer, footer_at, status


@contextlib.contextmanager
def _failures_told(path: str) -> Iterator[None]:
    try:
        yield
    except IoError:
        raise
    except OSError as error:
        message = f"indexing {path}: reading its footer failed: {error.strerror}"
        raise IoError(error.errno, message, path, 0, 0) from error


class _Leaf(NamedTuple):
    """A stored column of a row group: where it lies, and what its metadata say of its values."""

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
        """
        Raises:
            CorruptData: it lies outside the data, or has another number of values than the row group has rows.
            ValueError: it lies in another file, or is encrypted.
        """
        if self.is_encrypted:
            raise ValueError(f"{path}: column {self.name!r} is encrypted: write it without, or leave it out (columns=)")
        if self.other_file:
            raise ValueError(f"{path}: column {self.name!r} lies in {self.other_file!r}, which is not followed")
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
    """Memory of a row group's columns when decoded: exactly of values of one size, about of others."""
    decoded_bytes = 0
    for column in columns:
        name = column.field.name
        if column.field.shape is not None:
            decoded_bytes += rows * value_bytes(column.field)
        else:
            stored = [leaf for leaf in leaves if leaf.name == name or leaf.name.startswith(f"{name}.")]
            decoded_bytes += sum(max(leaf.unpacked_bytes, 0) for leaf in stored) + 8 * rows
    if decoded_bytes > _LARGEST_GROUP_BYTES:
        raise ValueError(
            f"{path}: row group {number} of {rows} rows would take {decoded_bytes} bytes when decoded, and the most is "
            f"{_LARGEST_GROUP_BYTES}: write smaller row groups (pyarrow.parquet.write_table(row_group_size=)), or name "
            f"the columns that are wanted (columns=)"
        )
    return decoded_bytes


# --------------------------------------------------------------------------------------------------------- columns


def _column_of(table: pyarrow.Table, column: Column) -> tuple[pyarrow.Array, bool]:
    """A column out of its structs, strings and lists with 64-bit offsets; and whether its lists have nulls in them."""
    arrow, types = arrow_module(), arrow_module("pyarrow.types")
    name, *members = _names_of(table, column)
    chunks = table.column(name)
    for member in members:
        place = storage_of(chunks.type).get_field_index(member)
        flat = [_stored(chunk).flatten()[place] for chunk in chunks.chunks]  # so nulls of the struct are the member's
        chunks = arrow.chunked_array(flat, storage_of(chunks.type).field(place).type)
    kind = storage_of(chunks.type)
    chunks = arrow.chunked_array([_stored(chunk) for chunk in chunks.chunks], kind)
    if types.is_dictionary(kind):
        kind = kind.value_type
        chunks = chunks.cast(kind)
    if column.field.shape is None:
        wide = arrow.large_binary() if is_bytes(kind) else arrow.large_list(storage_of(kind.value_type))
        chunks = chunks.cast(wide)
    array = chunks.combine_chunks()
    if isinstance(array, arrow.ChunkedArray):
        array = arrow.concat_arrays(array.chunks)
    inside = array.flatten().null_count if types.is_large_list(array.type) else _nulls_within(array)
    return array, inside > 0


def _names_of(table: pyarrow.Table, column: Column) -> list[str]:
    return _split(table.schema, column.field.name)


def _split(fields: Any, name: str) -> list[str]:
    """The names of a column and of the members in its structs, any of which may have dots."""
    for one in fields:
        if one.name == name:
            return [one.name]
        stored = storage_of(one.type)
        if name.startswith(f"{one.name}.") and arrow_module("pyarrow.types").is_struct(stored):
            members = [stored.field(i) for i in range(stored.num_fields)]
            return [one.name, *_split(members, name[len(one.name) + 1 :])]
    raise KeyError(name)


def _stored(array: pyarrow.Array) -> pyarrow.Array:
    """An extension array's storage; of others themselves."""
    return getattr(array, "storage", array)


def _nulls_within(array: pyarrow.Array) -> int:
    """Of the values in fixed-size lists."""
    types = arrow_module("pyarrow.types")
    nulls = 0
    while types.is_fixed_size_list(array.type):
        array = _stored(array.flatten())
        nulls += array.null_count
    return nulls


def _dense(array: pyarrow.Array, field: Field) -> np.ndarray:
    """Values of one size, without nulls: (rows, *shape)."""
    types = arrow_module("pyarrow.types")
    rows = len(array)
    while types.is_fixed_size_list(array.type):
        array = _stored(array.flatten())
    if types.is_boolean(array.type):
        return array.to_numpy(zero_copy_only=False)
    values = np.frombuffer(array.buffers()[1], field.dtype) if rows else np.empty(0, field.dtype)
    width = array.type.byte_width // field.dtype.itemsize
    return values[array.offset * width : (array.offset + len(array)) * width].reshape(rows, *field.shape)

"""`TableIndex`: row groups of Parquet files, which pyarrow decodes as a whole."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from gdsdata.errors import CorruptData
from gdsdata.formats.columns import Column, arrow_module, is_bytes, nulls_among_numbers, storage_of
from gdsdata.formats.field import Field
from gdsdata.formats.index import Made, Readers, SampleIndex, files_of_part
from gdsdata.formats.parsers import magics
from gdsdata.formats.plan import Plan

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

# The values that a row group has of a column: an array (rows, *shape), or for strings and lists an
# array of pyarrow, of the large type.
Values: TypeAlias = "np.ndarray | pyarrow.Array"


class TableFile(NamedTuple):
    """A file's footer, by which pyarrow decodes row groups, and wanted columns."""

    footer: bytes  # with the tail behind it
    columns: tuple[Column, ...]
    leaves: tuple[str, ...]


@functools.lru_cache(maxsize=64)  # of the files that are decoded now
def metadata_of(footer: bytes) -> pyarrow.parquet.FileMetaData:
    """Return pyarrow's metadata of a file with this footer, and the tail behind it.

    Raises:
        Exception: the footer cannot be read; the type is one of `errors_of_pyarrow`.
    """
    return arrow_module("pyarrow.parquet").read_metadata(arrow_module().BufferReader(magics.PARQUET + footer))


@dataclass(frozen=True, eq=False)
class TableIndex(SampleIndex):
    """Where the row groups of some files lie.

    Attributes:
        fields: the K fields.
        group_first_row: int64 (G + 1,), id of each row group's first sample, then N. None is empty.
        group_file: int32 (G,), a place in ``paths``.
        group_number: int64 (G,), among the row groups of its file.
        group_begin: int64 (G,), the row of it that is its first sample: 0, but for the first one of
            a `part`.
        group_rows: int64 (G,), rows that are stored in it; a `part` may have fewer of the first one
            and the last one.
        begin_bytes, length_bytes: int64 (G, C), extents of the stored columns that are wanted.
        decoded_bytes: int64 (G,), memory of it when decoded, about.
        files: the metadata of each file.
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
    files: tuple[TableFile, ...]

    def plan(self, samples: np.ndarray) -> Plan:
        """Return the row group of each sample, and its row there."""
        group = np.searchsorted(self.group_first_row, samples, side="right") - 1
        row = samples - self.group_first_row[group] + self.group_begin[group]
        return Plan(samples, group.astype(np.int32), row, 1)

    def read_by(self, readers: Readers[Made]) -> Made:
        return readers.of_row_groups(self)

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    @property
    def group_first_sample(self) -> np.ndarray:
        return self.group_first_row

    def damaged(self, sample: int, field: int, reason: str) -> CorruptData:
        """Return the error for a column of a row.

        Args:
            sample: id of the row.
            field: number of the column.
            reason: what the column does or lacks.
        """
        plan = self.plan(np.array([sample]))
        group, row = int(plan.source[0]), int(plan.offset[0])
        message = f"row {row} of {self.name_of(group)}: column {self.fields[field].name!r} {reason}"
        return CorruptData(message, self.paths[self.group_file[group]])

    def _part(self, files: slice, begin: int, end: int) -> dict[str, Any]:
        """Keep the row groups with rows of the part: they are decoded as a whole."""
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
        return samples * self.spacing_bytes

    @cached_property
    def spacing_bytes(self) -> int:
        """Bytes of a sample when it is decoded, on the average; at least 1."""
        return max(1, int(self.decoded_bytes.sum()) // max(1, len(self)))

    def name_of(self, group: int) -> str:
        """Return the name of a row group, for errors."""
        return f"row group {self.group_number[group]} of {self.paths[self.group_file[group]]}"

    def decode(self, group: int, stored: Sequence[memoryview]) -> list[Values]:
        """Return the columns of a row group.

        Args:
            group: which.
            stored: the bytes of its extents.

        Returns:
            The values of each field.

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
                metadata=metadata_of(file.footer),
                pre_buffer=False,  # each column by itself, as it was read
                page_checksum_verification=True,
            )
            number = int(self.group_number[group])
            table = reader.read_row_group(number, columns=list(file.leaves), use_threads=False)
            table.validate()
            columns = [_column_of(table, column) for column in file.columns]
        except errors_of_pyarrow() as error:
            raise self._corrupt(group, f"it cannot be decoded ({line_of(error)})") from error
        rows = int(self.group_rows[group])
        values: list[Values] = []
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


def errors_of_pyarrow() -> tuple[type[Exception], ...]:
    """Return the exceptions that pyarrow raises for damaged data."""
    arrow = arrow_module()
    return arrow.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError


def line_of(error: Exception) -> str:
    """Return the first line of what an error says."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _column_of(table: pyarrow.Table, column: Column) -> tuple[pyarrow.Array, bool]:
    """Return a column out of its structs, and whether its lists have nulls in them.

    Strings and lists have 64-bit offsets.
    """
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


def _split(fields: Iterable[pyarrow.Field], name: str) -> list[str]:
    """Return the names of a column and its structs' members; all may have dots."""
    for one in fields:
        if one.name == name:
            return [one.name]
        stored = storage_of(one.type)
        if name.startswith(f"{one.name}.") and arrow_module("pyarrow.types").is_struct(stored):
            members = [stored.field(i) for i in range(stored.num_fields)]
            return [one.name, *_split(members, name[len(one.name) + 1 :])]
    raise KeyError(name)


def _stored(array: pyarrow.Array) -> pyarrow.Array:
    """Return an extension array's storage; other arrays as they are."""
    return getattr(array, "storage", array)


def _nulls_within(array: pyarrow.Array) -> int:
    """Return how many nulls the values in fixed-size lists have."""
    types = arrow_module("pyarrow.types")
    nulls = 0
    while types.is_fixed_size_list(array.type):
        array = _stored(array.flatten())
        nulls += array.null_count
    return nulls


def _dense(array: pyarrow.Array, field: Field) -> np.ndarray:
    """Return values of one size, without nulls: (rows, *shape)."""
    types = arrow_module("pyarrow.types")
    rows = len(array)
    while types.is_fixed_size_list(array.type):
        array = _stored(array.flatten())
    shape, dtype = (rows, *(field.shape or ())), field.element_dtype
    if types.is_boolean(array.type):
        return array.to_numpy(zero_copy_only=False).reshape(shape)
    values = np.frombuffer(array.buffers()[1], dtype) if rows else np.empty(0, dtype)
    width = array.type.byte_width // dtype.itemsize
    return values[array.offset * width : (array.offset + len(array)) * width].reshape(shape)

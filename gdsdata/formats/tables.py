"""`TableIndex`: row groups of tables, which pyarrow decodes as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from gdsdata.errors import CorruptData
from gdsdata.fork_safe import cached_property
from gdsdata.formats.column_values import HasNulls, OtherShape, TimesBeyond, Values, places_in, values_of_column
from gdsdata.formats.columns import Column, arrow_module, check_alike, nulls_among_numbers
from gdsdata.formats.dictionaries import TooLarge
from gdsdata.formats.field import Field
from gdsdata.formats.index import SampleIndex, files_of_part, first_samples
from gdsdata.formats.plan import Plan
from gdsdata.storage.opened import of_each

if TYPE_CHECKING:
    import pyarrow

    from gdsdata.formats.index import Made, Readers


class TableFile(Protocol):
    """Decodes the row groups of one file; a named tuple.

    Attributes:
        columns: that are wanted.
    """

    def __iter__(self) -> Iterator[Any]: ...

    @property
    def columns(self) -> tuple[Column, ...]: ...

    def decoded(
        self, number: int, begins: Sequence[int], stored: Sequence[memoryview], size_bytes: int
    ) -> pyarrow.Table:
        """Return the wanted columns of a row group.

        Args:
            number: of the row group in the file.
            begins: offsets of its extents.
            stored: their bytes.
            size_bytes: of the file.

        Raises:
            Exception: it cannot be decoded; the type is one of `errors_of_pyarrow`.
        """


class FileGroups(NamedTuple):
    """The row groups of a file that have rows.

    Attributes:
        file: decodes them.
        size_bytes, mtime_ns: of the file.
        rows: of each.
        numbers: of each, among all of the file's.
        begins, lengths: the extents of each.
        decoded: memory of each when decoded, about.
    """

    file: TableFile
    size_bytes: int
    mtime_ns: int
    rows: list[int]
    numbers: list[int]
    begins: list[list[int]]
    lengths: list[list[int]]
    decoded: list[int]


@dataclass(eq=False, repr=False)
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

    @classmethod
    def of_files(cls, paths: list[str], found: Sequence[FileGroups]) -> TableIndex:
        """Return the index of files with these row groups.

        Raises:
            ValueError: the files have unlike columns.
        """
        fields = [tuple(column.field for column in one.file.columns) for one in found]
        for path, other in zip(paths, fields, strict=True):
            check_alike(fields[0], other, (paths[0], path))
        rows = _joined(one.rows for one in found)
        most = max((len(extents) for one in found for extents in one.begins), default=0)
        return cls(
            paths=paths,
            size_bytes=np.array([one.size_bytes for one in found], np.int64),
            mtime_ns=np.array([one.mtime_ns for one in found], np.int64),
            first_sample=first_samples([sum(one.rows) for one in found]),
            fields=fields[0],
            group_first_row=first_samples(rows),
            group_file=np.repeat(np.arange(len(found), dtype=np.int32), [len(one.rows) for one in found]),
            group_number=_joined(one.numbers for one in found),
            group_begin=np.zeros(len(rows), np.int64),
            group_rows=rows,
            # Nested columns of some files may be stored as more columns than those of others.
            begin_bytes=_joined([*one, *one[:1] * (most - len(one))] for file in found for one in file.begins).reshape(
                len(rows), most
            ),
            length_bytes=_joined([*one, *[0] * (most - len(one))] for file in found for one in file.lengths).reshape(
                len(rows), most
            ),
            decoded_bytes=_joined(one.decoded for one in found),
            files=_sharing(found),
        )

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
            ValueError: nulls among numbers, or times of type INT96 that nanoseconds cannot count.
        """
        file = self.files[self.group_file[group]]
        path = self.paths[self.group_file[group]]
        number, size_bytes = int(self.group_number[group]), int(self.size_bytes[self.group_file[group]])
        rows = int(self.group_rows[group])
        values: list[Values] = []
        try:
            table = file.decoded(number, self.begin_bytes[group].tolist(), stored, size_bytes)
            places = places_in(table.schema)
            for column in file.columns:
                name = column.field.name
                values.append(values_of_column(table, column, places[name]))
                if len(values[-1]) != rows:
                    raise self._corrupt(group, f"column {name!r} has {len(values[-1])} rows and should have {rows}")
        except CorruptData:
            raise
        except HasNulls:
            raise nulls_among_numbers(path, column) from None
        except TimesBeyond as named:
            raise ValueError(
                f"{self.name_of(group)}: column {str(named)!r} has times of Parquet's type INT96 before 1677 or after "
                f"2262, which nanoseconds in int64 cannot count: write it as microseconds (pyarrow.parquet.read_table "
                f'reads it with coerce_int96_timestamp_unit="us"), or leave it out (columns=)'
            ) from None
        except TooLarge as reason:
            raise ValueError(
                f"{self.name_of(group)}: column {column.field.name!r}: {reason}: write smaller ones, or leave the "
                f"column out (columns=)"
            ) from None
        except OtherShape:
            raise ValueError(
                f"{path}: column {name!r} has arrays of another shape than the {column.field.shape} that its type "
                f"says: write them with one shape, or leave it out (columns=)"
            ) from None
        except errors_of_pyarrow() as error:
            raise self._corrupt(group, f"it cannot be decoded ({line_of(error)})") from error
        return values

    def _corrupt(self, group: int, reason: str) -> CorruptData:
        begin = int(self.begin_bytes[group].min())
        length = int((self.begin_bytes[group] + self.length_bytes[group]).max()) - begin
        message = (
            f"{self.name_of(group)}, at bytes {begin} to {begin + length}, is damaged: {reason}; write or copy it again"
        )
        return CorruptData(message, self.paths[self.group_file[group]], begin, length)


def index_tables(
    paths: list[str],
    wanted: Sequence[str] | None,
    look: Callable[[str, Sequence[str] | None], FileGroups],
    threads: int,
    only_if_slow: bool = False,
) -> TableIndex:
    """Return the index of files, each of which ``look`` returns by its path and wanted columns.

    The first file says which members the structs among ``wanted`` have.

    Args:
        paths: of the files.
        wanted: columns; None: all.
        look: see above.
        threads, only_if_slow: as of `of_each`, for all files but the first.

    Raises:
        ValueError: the files have unlike columns.
        Exception: what ``look`` raises.
    """
    first = look(paths[0], wanted)
    names = wanted and tuple(column.field.name for column in first.file.columns)
    others = of_each(lambda path: look(path, names), paths[1:], threads, only_if_slow)
    return TableIndex.of_files(paths, [first, *others])


def _joined(lists: Iterable[list[int]]) -> np.ndarray:
    return np.array(list(itertools.chain.from_iterable(lists)), np.int64)


def _sharing(found: Sequence[FileGroups]) -> tuple[Any, ...]:
    """Return the files; equal parts are one object, because a thousand files may have them."""
    known: dict[Any, Any] = {}
    return tuple(type(file)(*(known.setdefault(part, part) for part in file)) for file in (one.file for one in found))


def errors_of_pyarrow() -> tuple[type[Exception], ...]:
    """Return the exceptions that pyarrow raises for damaged data."""
    arrow = arrow_module()
    return arrow.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError


def unknown_schema(path: str, error: Exception) -> ValueError:
    """Return the error for a sound file whose schema has a type that pyarrow lacks.

    Polars has integers of 128 bits, for one.
    """
    version = arrow_module().__version__
    return ValueError(
        f"{path}: its schema has what pyarrow {version} does not read ({line_of(error)}): cast that column to another "
        "type and write the file again, or update pyarrow"
    )


def line_of(error: Exception) -> str:
    """Return the first line of what an error says."""
    return next(iter(str(error).splitlines()), type(error).__name__)

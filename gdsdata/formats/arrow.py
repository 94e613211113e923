"""Arrow IPC, as files and as streams. Hugging Face ``datasets`` writes streams.

A row is a sample, and a column is a field.

Record batches that are not compressed have each column's values in one stretch of the file. So
indexing reads the batches' metadata and the offsets of strings and lists, and leaves the values to
the engine (`arrow_rows`). If values have another form in a batch than in the file, record batches
are decoded (`arrow_batches`).

pyarrow reads the schema. The batches' metadata are read here, because pyarrow would decompress what
it reads, and a size that lies must not become memory.

Source of the format: https://arrow.apache.org/docs/format/Columnar.html, "Serialization and
Interprocess Communication (IPC)". ``format/Message.fbs`` of https://github.com/apache/arrow has the
tables, which are FlatBuffers (https://flatbuffers.dev/internals).
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np

from gdsdata.errors import CorruptData
from gdsdata.formats.arrow_batches import find_batches
from gdsdata.formats.arrow_messages import Read, record_batches, schema_of
from gdsdata.formats.arrow_rows import find_rows, lie_in_place
from gdsdata.formats.columns import FillNull, check_alike, checked_fill, checked_names, columns_of
from gdsdata.formats.extents import ExtentsBuilder
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.index import first_samples
from gdsdata.formats.parsers import magics
from gdsdata.formats.parsers.damage import damaged
from gdsdata.formats.partitions import warn_of_partitions
from gdsdata.formats.tables import FileGroups, TableIndex, index_tables
from gdsdata.storage.opened import Opened, of_each, open_file

# Files indexed at a time if the storage is slow. In memory, threads take turns and gain nothing.
_READERS = 8


@dataclass(frozen=True)
class Arrow:
    """Arrow IPC files and streams. Hugging Face's ``save_to_disk`` writes them.

    - Numbers, booleans, dates and times (as integers) are tensors ``(B,)``. Decimals are float64.
      Fixed-size lists and binaries, fixed-shape tensors and the arrays of ``datasets`` (Array2D)
      are ``(B, *shape)``.
    - Strings, binaries and lists of numbers are fields whose size differs from sample to sample.
      Null is a field that the sample does not have. A batch has it as empty.
    - Lists of lists of numbers, and lists of binaries, are a `gdsdata.Ragged` whose values are a
      `gdsdata.Ragged`.
    - A struct's members are columns: ``image.bytes``. A null struct has null members.
    - Lists of structs or of strings, and maps, are JSON text for each sample, UTF-8
      (`gdsdata.formats.json_rows.json_rows` says how): decode them with ``"json"``.
    - Nulls among numbers are refused, unless ``fill_null`` says what takes their place.
    - Dictionaries of plain values are decoded, in lists too. Those of lists, unions, intervals,
      list views and run ends are refused.

    If all wanted columns are numbers, strings, bytes, and lists of numbers, rows are read by
    themselves. Else record batches are read and decoded as a whole, as Parquet's row groups are
    (`gdsdata.RowGroups`). That is so for booleans, decimals, dictionaries, JSON, lists of lists,
    arrays of ``datasets``, compressed files, any column of views, and with ``fill_null``.

    Args:
        columns: names of those that are wanted; a struct's means all members that it has in the
            first file. None: all.
        fill_null: takes the place of nulls among numbers. One number is for every column whose
            dtype has it; a mapping is by column, as in ``{"label": -100}``. None: they are refused.

    Raises:
        ValueError: ``columns`` is empty, a string, or names one twice; ``fill_null`` is no number.
    """

    columns: tuple[str, ...] | None = None
    fill_null: FillNull = None
    decoded_on_cpu: ClassVar[bool] = True  # if some column needs it

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", checked_names(self.columns, self))
        object.__setattr__(self, "fill_null", checked_fill(self.fill_null, "Arrow"))

    def index(self, paths: list[str]) -> FieldIndex | TableIndex:
        """Read the schema and the record batches' metadata of each of ``paths``.

        A file may hold no rows. Files that ``datasets`` leaves beside them are passed over.

        Raises:
            CorruptData: metadata lie, or a file ends before its end mark.
            ValueError: a type that is refused, nulls among numbers, big-endian values, a column
                that is not there, or files with unlike columns. A record batch takes more than
                4 GiB when it is decompressed and decoded.
            ImportError: pyarrow is not installed.
            FileNotFoundError, IoError: a file is not available.
        """
        paths = [path for path in paths if not magics.is_beside_data(path)] or paths
        index = index_files(paths, self.columns, self.fill_null)
        if self.columns is None:
            warn_of_partitions(paths, index.fields)
        return index


# Returns where a file or stream of Arrow lies in a file: begin and length in bytes.
Placing: TypeAlias = "Callable[[Opened], tuple[int, int]]"


def index_files(
    paths: list[str],
    wanted: Sequence[str] | None,
    fill_null: FillNull,
    place_of: Placing = lambda file: (0, file.size_bytes),
) -> FieldIndex | TableIndex:
    """Return the index of files with Arrow in them: of rows that lie in place, or record batches.

    Args:
        paths: of the files.
        wanted, fill_null: as of `Arrow`.
        place_of: returns where Arrow lies in each.

    Raises:
        Exception: as `Arrow.index`, and what ``place_of`` raises.
    """
    in_place = _index_rows(paths, wanted, place_of) if fill_null is None else None
    if in_place is not None:
        return in_place
    # The page cache has the first file by now: the second one shows how slow the storage is.
    look = partial(_index_batches, fill_null=fill_null, place_of=place_of)
    return index_tables(paths, wanted, look, _READERS, only_if_slow=True)


def _index_rows(paths: list[str], wanted: Sequence[str] | None, place_of: Placing) -> FieldIndex | None:
    """Return the index of rows that lie in place; None: those of a file have to be decoded."""
    size_bytes, mtime_ns = np.empty(len(paths), np.int64), np.empty(len(paths), np.int64)
    counts, extents = [], ExtentsBuilder()
    first = _index_file(paths[0], wanted, place_of)
    if first is None:
        return None
    fields = first.fields
    wanted = wanted and tuple(field.name for field in fields)
    index_file = partial(_index_file, wanted=wanted, place_of=place_of)
    others = of_each(index_file, paths[1:], _READERS, only_if_slow=True)
    for i, (path, found) in enumerate(zip(paths, itertools.chain([first], others), strict=True)):
        if found is None:
            return None
        check_alike(fields, found.fields, (paths[0], path))
        size_bytes[i], mtime_ns[i] = found.size_bytes, found.mtime_ns
        counts.append(len(found.begin_bytes))
        extents.add(found.begin_bytes, found.length_bytes)
    return FieldIndex(
        paths=paths,
        size_bytes=size_bytes,
        mtime_ns=mtime_ns,
        first_sample=first_samples(counts),
        fields=fields,
        extents=extents.extents(),
    )


class _Found(NamedTuple):
    fields: tuple[Field, ...]
    begin_bytes: np.ndarray
    length_bytes: np.ndarray
    size_bytes: int
    mtime_ns: int


def _index_file(path: str, wanted: Sequence[str] | None, place_of: Placing) -> _Found | None:
    with open_file(path) as file, _places_named(place_of(file)) as (begin, length):
        read = partial(_read, file, begin)
        if not _lie_in_place(read, length, wanted, path):
            return None
        fields, begins, lengths = find_rows(read, length, wanted, path)
        return _Found(fields, begins + begin, lengths, file.size_bytes, file.mtime_ns)


@contextlib.contextmanager
def _places_named(place: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Have errors in the block say from where their bytes are counted. Yields ``place``."""
    try:
        yield place
    except CorruptData as error:
        if not place[0]:
            raise
        said = f"{error} (bytes are counted from {place[0]}, where Arrow begins)"
        raise CorruptData(said, error.path, place[0] + error.offset, error.length) from error


def _lie_in_place(read: Read, size_bytes: int, wanted: Sequence[str] | None, path: str) -> bool:
    """Return whether the rows of a file are read without decoding.

    Files may differ in that, though their columns are alike to a reader: decimals and float64.
    """
    messages = record_batches(read, size_bytes, path)
    first = next(messages)
    schema = schema_of(first, path)
    is_compressed = False
    with contextlib.suppress(struct.error):  # reported when the batch is indexed
        is_compressed = any(message.header.table(3) is not None for message in itertools.islice(messages, 1))
    return not is_compressed and lie_in_place(schema, columns_of(schema, wanted, path), first.is_old)


def _index_batches(path: str, wanted: Sequence[str] | None, fill_null: FillNull, place_of: Placing) -> FileGroups:
    with open_file(path) as file, _places_named(place_of(file)) as (begin, length):
        found = find_batches(partial(_read, file, begin), (length, file.mtime_ns), wanted, fill_null, path)
    begins = [[begin + one for one in begins] for begins in found.begins]
    return found._replace(begins=begins, size_bytes=file.size_bytes)


def _read(file: Opened, begin: int, offset: int, count: int) -> bytes:
    """Return bytes of Arrow, which begins in a file at ``begin``.

    Raises:
        CorruptData: they are not there. It counts from ``begin``: see `_places_named`.
    """
    data = file.read(begin + offset, count)
    if len(data) < count:
        raise damaged(file.path, offset, count, "the file has become shorter while it was indexed")
    return data

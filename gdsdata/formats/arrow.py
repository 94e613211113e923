"""Arrow IPC, as files and as streams. Hugging Face ``datasets`` writes streams.

A row is a sample, and a column is a field.

Record batches that are not compressed have each column's values in one stretch of the file. So
indexing reads the batches' metadata and the offsets of strings and lists, and leaves the values to
the engine.

pyarrow reads the schema. The batches' metadata are read here, because pyarrow would decompress what
it reads, and a size that lies must not become memory.

Source of the format: https://arrow.apache.org/docs/format/Columnar.html, "Serialization and
Interprocess Communication (IPC)". ``format/Message.fbs`` of https://github.com/apache/arrow has the
tables, which are FlatBuffers (https://flatbuffers.dev/internals).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from gdsdata.formats.arrow_rows import find_rows
from gdsdata.formats.columns import check_alike, checked_names
from gdsdata.formats.extents import ExtentsBuilder
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.index import first_samples
from gdsdata.formats.parsers import magics
from gdsdata.formats.parsers.damage import damaged
from gdsdata.storage.opened import Opened, of_each, open_file


@dataclass(frozen=True)
class Arrow:
    """Arrow IPC files and streams, not compressed.

    Hugging Face's ``save_to_disk`` writes them.

    - Numbers, dates and times (as integers) are tensors ``(B,)``. Fixed-size lists and binaries,
      and fixed-shape tensors, are ``(B, *shape)``. A column of them that has nulls is refused: fill
      them (``fill_null``).
    - Strings, binaries and lists of numbers are fields whose size differs from sample to sample.
      Null is a field that the sample does not have. A batch has it as empty.
    - A struct's members are columns: ``image.bytes``. A null struct has null members.
    - Booleans (which are bits), dictionaries, decimals, lists of lists or structs and unions are
      refused.

    Args:
        columns: names of those that are wanted; a struct's means all its members. None: all.

    Raises:
        ValueError: ``columns`` is empty, a string, or names one twice.
    """

    columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", checked_names(self.columns, self))

    def index(self, paths: list[str]) -> FieldIndex:
        """Read the schema and the record batches' metadata of each of ``paths``.

        A file may hold no rows. JSON that ``datasets`` leaves beside its files is passed over.

        Raises:
            CorruptData: metadata lie, or a file ends before its end mark.
            ValueError: a type that is refused, nulls among numbers, compressed buffers, big-endian
                values, a column that is not there, or files with unlike columns.
            ImportError: pyarrow is not installed.
            FileNotFoundError, IoError: a file is not available.
        """
        paths = [path for path in paths if not magics.is_beside_arrow(path)] or paths
        size_bytes, mtime_ns = np.empty(len(paths), np.int64), np.empty(len(paths), np.int64)
        counts, extents = [], ExtentsBuilder()
        first = _index_file(paths[0], self.columns)
        fields = first.fields
        wanted = self.columns and tuple(field.name for field in fields)
        others = of_each(partial(_index_file, wanted=wanted), paths[1:])
        for i, (path, found) in enumerate(zip(paths, itertools.chain([first], others), strict=True)):
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


def _index_file(path: str, wanted: Sequence[str] | None) -> _Found:
    with open_file(path) as file:
        found = find_rows(partial(_read, file), file.size_bytes, wanted, path)
        return _Found(*found, file.size_bytes, file.mtime_ns)


def _read(file: Opened, offset: int, count: int) -> bytes:
    data = file.read(offset, count)
    if len(data) < count:
        raise damaged(file.path, offset, count, "the file has become shorter while it was indexed")
    return data

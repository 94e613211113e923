"""MosaicML Streaming's shards of text: a line of JSON a sample, or values between separators.

A shard is read as a whole, as Parquet's row groups are, and its lines are decoded in steps. The
``.meta`` file beside it, with the samples' offsets, is not read: index.json has the number of
samples, and what ends a line.

Source of the format: https://github.com/mosaicml/streaming, ``streaming/base/format/json`` and
``xsv`` (version 2).
"""

from __future__ import annotations

import codecs
import json
import reprlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gdsdata.errors import CorruptData
from gdsdata.formats.columns import Column, arrow_module, value_bytes
from gdsdata.formats.fields import Field
from gdsdata.formats.shard_lists import checked, member
from gdsdata.formats.shards import Shard, stat_shards
from gdsdata.formats.tables import FileGroups, TableIndex

if TYPE_CHECKING:
    import pyarrow

FORMATS = ("json", "csv", "tsv", "xsv")
_SEPARATORS = {"csv": ",", "tsv": "\t"}
_DTYPES = {"int": np.dtype("<i8"), "float": np.dtype("<f8"), "str": None}
# A text is decoded in steps of so many bytes: Python's objects are those of a step alone.
_STEP_BYTES = 2**16
# They take at most about so many times the step: 34 of a CSV with two integers, 45 of lists within
# lists (measured with Python 3.11). A line that is longer than a step is a step by itself.
_OBJECTS_TIMES = 48
_LARGEST_BYTES = 2**32


class TextFile(NamedTuple):
    """How the lines of shards are decoded: a `TableFile`.

    Attributes:
        columns: of the samples.
        newline: ends a line.
        separator: stands between the values of a line; "": a line is a JSON object.
    """

    columns: tuple[Column, ...]
    newline: str
    separator: str

    def decoded(
        self, number: int, begins: Sequence[int], stored: Sequence[memoryview], size_bytes: int
    ) -> pyarrow.Table:
        names = [column.field.name for column in self.columns]
        chunks: list[list[pyarrow.Array]] = [[] for _ in names]
        needs_names = bool(self.separator)
        for lines in _lines_in_steps(stored[0], self.newline):
            if needs_names and lines.pop(0).split(self.separator) != names:
                break
            needs_names = False
            values = self._of_lines(lines) if self.separator else self._of_json(lines)
            for i, column in enumerate(self.columns):
                chunks[i].append(_array(values[i], column.field))
        if needs_names:
            raise ValueError(f"its first line has not the columns {names}")
        arrow = arrow_module()
        kinds = [_kind(column.field) for column in self.columns]
        return arrow.table(list(map(arrow.chunked_array, chunks, kinds)), names=names)

    def _of_json(self, lines: list[str]) -> list[list[Any]]:
        """Return the values of each column. Numbers are numbers."""
        values: list[list[Any]] = [[] for _ in self.columns]
        places = [(column.field.name, values[i].append) for i, column in enumerate(self.columns)]
        try:
            for line in lines:
                sample = json.loads(line)
                for name, append in places:
                    append(sample[name])
        except KeyError as error:
            raise ValueError(f"a line has no {error}") from error
        except RecursionError as error:
            raise ValueError("a line is nested too deeply") from error
        return values

    def _of_lines(self, lines: list[str]) -> list[list[str]]:
        """Return the texts of each column's values."""
        count = len(self.columns)
        texts: list[str] = []
        for line in lines:
            row = line.split(self.separator)
            if len(row) != count:
                raise ValueError(f"a line has not {count} values")
            texts += row
        return [texts[i::count] for i in range(count)]

    @property
    def least_bytes(self) -> int:
        """Bytes that the shortest line takes."""
        return len(self.separator) * (len(self.columns) - 1) + len(self.newline)


def _lines_in_steps(stored: memoryview, newline: str) -> Iterator[list[str]]:
    """Yield the lines of a text, those of about `_STEP_BYTES` at a time.

    Raises:
        ValueError: it is not UTF-8, or its last line has no end.
    """
    decode = codecs.getincrementaldecoder("utf-8")().decode
    begin, rest = 0, ""
    while begin < len(stored):
        end = begin + max(_STEP_BYTES, len(rest))  # a long line is searched few times
        *lines, rest = (rest + decode(stored[begin:end], end >= len(stored))).split(newline)
        begin = end
        if lines:
            yield lines
    if rest:
        raise ValueError(f"its last line does not end with {newline!r}")


def _kind(field: Field) -> pyarrow.DataType:
    arrow = arrow_module()
    return arrow.large_string() if field.dtype is None else arrow.from_numpy_dtype(field.dtype)


def _array(values: list[Any], field: Field) -> pyarrow.Array:
    """Return values, numbers or their texts, as an array without nulls."""
    arrow, kind = arrow_module(), _kind(field)
    if kind == arrow.int64() and bool in set(map(type, values)):  # JSONWriter takes them for integers
        values = [int(value) if isinstance(value, bool) else value for value in values]
    is_text = not values or isinstance(values[0], str)
    array = arrow.array(values, arrow.large_string()).cast(kind) if is_text else arrow.array(values, kind)
    if array.null_count:
        raise ValueError(f"column {field.name!r} has null")
    return array


def text_file(record: dict[str, Any], path: str) -> TextFile:
    """Return how the lines of a shard are decoded, as index.json at ``path`` says.

    Raises:
        CorruptData: what it says makes no sense.
        ValueError: an encoding that is not known, or a newline that may stand in JSON.
    """
    format = record["format"]
    newline = member(record, "newline", str, path)
    separator = _SEPARATORS.get(format) or ("" if format == "json" else member(record, "separator", str, path))
    if format == "json":
        declared = list(member(record, "columns", dict, path).items())
    else:
        names = member(record, "column_names", list, path)
        declared = list(zip(names, member(record, "column_encodings", list, path), strict=False))
        if len(declared) != len(names) or len({repr(name) for name in names}) < len(names):
            declared = []
    if not declared or not newline or (format == "xsv" and not separator) or separator == newline:
        said = f"columns {reprlib.repr(declared)}, newline {newline!r} and separator {separator!r}"
        raise CorruptData(f"{path}: a shard has {said}, which make no sense; write it again", path)
    if format == "json" and any(one >= " " for one in newline):
        raise ValueError(
            f"{path}: lines end with {newline!r}, which may stand within JSON: write the shards with newline='\\n'"
        )
    columns = []
    for i, (name, encoding) in enumerate(declared):
        name, encoding = checked(name, str, path, "a column's name"), checked(encoding, str, path, "its encoding")
        if encoding not in _DTYPES:
            raise ValueError(
                f"{path}: column {name!r} has the encoding {reprlib.repr(encoding)}; what can be read is "
                f"{', '.join(_DTYPES)}"
            )
        dtype = _DTYPES[encoding]
        columns.append(Column(Field(name) if dtype is None else Field(name, dtype, ()), (i,)))
    return TextFile(tuple(columns), newline, separator)


def index_text(shards: Sequence[Shard], files: Sequence[TextFile]) -> TableIndex:
    """Return the index of shards, each of which is decoded by one of ``files``.

    Raises:
        CorruptData: a shard has another size, or is too short for its samples.
        ValueError: shards of unlike columns, or that are too large to decode.
        ImportError: pyarrow is not installed.
        FileNotFoundError, IoError: a file is not available.
    """
    arrow_module()
    found = []
    least_bytes = min(file.least_bytes for file in files)
    size_bytes, mtime_ns = stat_shards(shards, lambda shard: shard.samples * least_bytes)
    for shard, file, size, mtime in zip(shards, files, size_bytes.tolist(), mtime_ns.tolist(), strict=True):
        a_row = sum(value_bytes(column.field) + 8 for column in file.columns)
        # A shard's longest line is not known; this takes it to be as long as the others.
        step_bytes = min(size, max(_STEP_BYTES, size // max(1, shard.samples)))
        decoded_bytes = shard.samples * a_row + size + _OBJECTS_TIMES * step_bytes
        if decoded_bytes > _LARGEST_BYTES:
            raise ValueError(
                f"{shard.path}: its {shard.samples} samples may take {decoded_bytes} bytes when decoded, and the most "
                f"is {_LARGEST_BYTES}: write smaller shards (size_limit=)"
            )
        groups = ([shard.samples], [0], [[0]], [[size]], [decoded_bytes]) if shard.samples else ([], [], [], [], [])
        found.append(FileGroups(file, size, mtime, *groups))
    return TableIndex.of_files([shard.path for shard in shards], found)

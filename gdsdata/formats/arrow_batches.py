"""Record batches of Arrow IPC files that have to be decoded: they are the row groups of a table.

The buffers of the wanted columns are read, and become pyarrow's arrays as they are. So a batch's
other columns are neither read nor looked at. With them are read the dictionaries of these columns,
as they stand where the record batch lies in the file.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from gdsdata.formats.arrow_arrays import LARGEST_BATCH_BYTES, Array, Batch, Buffers, DictionaryPart
from gdsdata.formats.arrow_layout import Placed, is_read_dictionary, placed_types
from gdsdata.formats.arrow_messages import (
    DICTIONARY,
    Message,
    Read,
    batches_and_dictionaries,
    late_dictionaries,
    parsed,
    schema_of,
)
from gdsdata.formats.columns import Column, FillNull, arrow_module, columns_of, value_bytes
from gdsdata.formats.parsers.damage import damaged
from gdsdata.formats.tables import FileGroups

if TYPE_CHECKING:
    import pyarrow

_Kind = TypeVar("_Kind", Placed, Array)

# JSON text and wide offsets take about so many times what is stored.
_DECODED_TIMES = 4
# Messages with the values of one dictionary that a record batch uses: all are read with each batch.
_MOST_PARTS = 64


class ArrowFile(NamedTuple):
    """The schema of a file, by which record batches are decoded: a `TableFile`.

    Attributes:
        frame: the metadata of its schema.
        columns: that are wanted.
    """

    frame: bytes
    columns: tuple[Column, ...]

    def decoded(
        self, number: int, begins: Sequence[int], stored: Sequence[memoryview], size_bytes: int
    ) -> pyarrow.Table:
        """Return the columns of a record batch.

        The first extent is its metadata. Then come the columns, and then metadata and values of
        each part of their dictionaries. Extents without bytes fill up.
        """
        arrow = arrow_module()
        schema, kinds = _schema_of(self.frame)
        places = _top_places(self.columns)
        first = 1 + len(places)
        try:
            batch = Batch.of(_parsed(begins[0], stored[0]), kinds)
            dictionaries = _dictionaries(begins[first:], stored[first:], dict(_dictionaries_of(kinds, places)))
        except struct.error as error:
            raise ValueError(f"the metadata of the record batch lie ({error})") from error
        arrays, fields = [], []
        for place, begin, content in zip(places, begins[1:first], stored[1:first], strict=True):
            array = batch.columns[place].made(Buffers(begin - batch.body_at, content, batch.codec), dictionaries)
            array.validate(full=True)
            arrays.append(array)
            fields.append(arrow.field(schema.field(place).name, array.type))
        return arrow.Table.from_arrays(arrays, schema=arrow.schema(fields))


@functools.lru_cache(maxsize=64)  # of the files that are decoded now
def _schema_of(frame: bytes) -> tuple[pyarrow.Schema, tuple[Placed, ...]]:
    schema = arrow_module("pyarrow.ipc").read_schema(arrow_module().py_buffer(frame))
    return schema, placed_types(parsed(frame, 0, len(frame)), schema)


def _parsed(begin: int, stored: memoryview) -> Message:
    frame = bytes(stored)
    return parsed(frame, begin, begin + len(frame))


def _dictionaries(
    begins: Sequence[int], stored: Sequence[memoryview], kinds: dict[int, Placed]
) -> dict[int, pyarrow.Array]:
    """Return the values of dictionaries by their ids.

    Args:
        begins, stored: of metadata and values of each part, in turns.
        kinds: types by id.
    """
    found: dict[int, list[pyarrow.Array]] = {}
    for at in range(0, len(begins) - 1, 2):
        if not stored[at]:
            continue
        part = DictionaryPart.of(_parsed(begins[at], stored[at]), kinds)
        if part is not None:
            values = part.values.made(Buffers(begins[at + 1] - part.body_at, stored[at + 1], part.codec), {})
            values.validate(full=True)
            found.setdefault(part.id, []).append(values)
    return {one: arrow_module().concat_arrays(values) for one, values in found.items()}


def _top_places(columns: Sequence[Column]) -> list[int]:
    """Return the places in the schema of columns, or of the structs around them."""
    return list(dict.fromkeys(column.places[0] for column in columns))


def _dictionaries_of(kinds: Sequence[Placed], places: Sequence[int]) -> list[tuple[int, Placed]]:
    """Return id and type of the dictionaries in the columns at some places."""
    return [found for place in places for found in kinds[place].dictionaries()]


def find_batches(
    read: Read, said: tuple[int, int], wanted: Sequence[str] | None, fill_null: FillNull, path: str
) -> FileGroups:
    """Return where the record batches of a file lie, and their dictionaries.

    The extents of each are those of `ArrowFile.decoded`.

    Args:
        read: gives the file's bytes.
        said: size in bytes and mtime in ns of the file.
        wanted: columns.
        fill_null: as of `gdsdata.formats.Arrow`.
        path: named in errors.

    Raises:
        CorruptData, ValueError: as `Arrow.index`.
    """
    messages = batches_and_dictionaries(read, said[0], path)
    first = next(messages)
    schema = schema_of(first, path)
    columns = columns_of(schema, wanted, path, fill_null)
    try:
        kinds = placed_types(first, schema)
    except struct.error as error:
        raise damaged(path, first.at, len(first.frame), f"the schema lies: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    of_columns = [_column_at(kinds, column.places) for column in columns]
    for column, kind in zip(columns, of_columns, strict=True):
        _refuse_unread_dictionaries(kind, column, path)
    places = _top_places(columns)
    of_dictionaries = dict(_dictionaries_of(kinds, places))
    known = _Known(of_dictionaries, read)
    late = late_dictionaries(read, said[0], path) if of_dictionaries else []
    found = FileGroups(ArrowFile(first.frame, columns), *said, [], [], [], [], [])
    number = 0
    for message in itertools.chain(late, messages):
        try:
            if message.kind == DICTIONARY:
                known.take(message)
                continue
            batch = Batch.of(message, kinds)
            arrays = [batch.columns[place] for place in places]
            unpacked_bytes = sum(_unpacked_bytes(array, batch.codec, message, read) for array in arrays)
            by_dictionary = known.parts_of(arrays)
            parts = list(itertools.chain.from_iterable(by_dictionary))
            parts_bytes = sum(part.unpacked_bytes for part in parts)
            extents = [array.extent() for array in arrays]
            read_bytes = sum(length for _, length in extents) + sum(part.lengths[1] for part in parts)
            wanted_bytes = sum(_wanted_bytes(batch.columns, column, known) for column in columns)
        except (struct.error, ValueError) as error:
            raise damaged(path, message.at, len(message.frame), f"the record batch here lies: {error}") from error
        unpacked_bytes += parts_bytes
        # Buffers of a column may lie far from each other: what is between them is read too.
        decoded_bytes = wanted_bytes + _DECODED_TIMES * unpacked_bytes + max(0, read_bytes - unpacked_bytes)
        place = f"{path}: the record batch of {batch.rows} rows at byte {message.at}"
        _check_bounds(place, decoded_bytes, _DECODED_TIMES * parts_bytes)
        _check_parts(place, by_dictionary)
        if batch.rows:
            found.rows.append(batch.rows)
            found.numbers.append(number)
            found.begins.append([message.at, *(batch.body_at + begin for begin, _ in extents)])
            found.lengths.append([len(message.frame), *(length for _, length in extents)])
            for part in parts:
                found.begins[-1] += part.begins
                found.lengths[-1] += part.lengths
            found.decoded.append(decoded_bytes)
        number += 1
    return found


def _check_bounds(place: str, decoded_bytes: int, dictionary_bytes: int) -> None:
    """Check what a record batch takes.

    Args:
        place: names the batch.
        decoded_bytes: of the batch and its dictionaries.
        dictionary_bytes: of the dictionaries.

    Raises:
        ValueError: that is too much.
    """
    if decoded_bytes > LARGEST_BATCH_BYTES:
        remedy = "write smaller ones (max_chunksize=)"
        if dictionary_bytes > decoded_bytes // 2:
            remedy = f"dictionaries take {dictionary_bytes} of them: cast the columns to their values' type"
        raise ValueError(
            f"{place} may take {decoded_bytes} bytes when decoded, and the most is {LARGEST_BATCH_BYTES}: {remedy}, or "
            f"name the columns that are wanted (columns=)"
        )


def _check_parts(place: str, by_dictionary: Sequence[Sequence[_Part]]) -> None:
    if max(map(len, by_dictionary), default=0) > _MOST_PARTS:
        raise ValueError(
            f"{place} uses a dictionary that lies in more than {_MOST_PARTS} messages (deltas): write it with one "
            f"dictionary (Table.unify_dictionaries), or cast the columns to their values' type"
        )


def _wanted_bytes(arrays: Sequence[Array], column: Column, known: _Known) -> int:
    """Return the bytes of a column's values, besides those of its buffers."""
    array = _column_at(arrays, column.places)
    is_json = column.field.dtype is None and bool(array.inner)
    named = ((one.length, one.dictionary) for one in array.arrays() if one.dictionary is not None)
    named_bytes = sum(length * known.bytes_of_a_value(dictionary) for length, dictionary in named)
    own_bytes = array.length * (value_bytes(column.field) + 8) + (array.json_bytes() if is_json else 0)
    return own_bytes + named_bytes * (_DECODED_TIMES if is_json else 1)


class _Part(NamedTuple):
    """Where a part of a dictionary lies: its metadata, and its values."""

    begins: tuple[int, int]
    lengths: tuple[int, int]
    values: int
    unpacked_bytes: int


class _Known:
    """The dictionaries of wanted columns, as they are at a place of the file.

    Args:
        kinds: the types of their values, by id.
        read: gives the file's bytes.
    """

    def __init__(self, kinds: dict[int, Placed], read: Read) -> None:
        self._kinds, self._read = kinds, read
        self._parts: dict[int, list[_Part]] = {}

    def take(self, message: Message) -> None:
        """Note a dictionary: from here on it is this one, or has these values too.

        Raises:
            ValueError, struct.error: the metadata lie.
        """
        part = DictionaryPart.of(message, self._kinds)
        if part is None:
            return
        begin, length = part.values.extent()
        new = _Part(
            (message.at, part.body_at + begin),
            (len(message.frame), length),
            part.values.length,
            _unpacked_bytes(part.values, part.codec, message, self._read),
        )
        if not part.is_delta:
            self._parts[part.id] = []
        self._parts.setdefault(part.id, []).append(new)

    def parts_of(self, arrays: Sequence[Array]) -> list[list[_Part]]:
        """Return the parts of each dictionary of some arrays.

        Raises:
            ValueError: there is no such dictionary.
        """
        ids = dict.fromkeys(one.dictionary for array in arrays for one in array.arrays() if one.dictionary is not None)
        for one in ids:
            if one not in self._parts:
                raise ValueError(f"its dictionary {one} does not lie before it")
        return [self._parts[one] for one in ids]

    def bytes_of_a_value(self, dictionary: int) -> int:
        """Return the bytes of a dictionary's value, on the average."""
        parts = self._parts[dictionary]
        return sum(part.unpacked_bytes for part in parts) // max(1, sum(part.values for part in parts))


def _unpacked_bytes(array: Array, codec: str | None, message: Message, read: Read) -> int:
    return array.unpacked_bytes(codec, lambda begin, count: read(message.body_at + begin, count))


def _column_at(kinds: Sequence[_Kind], places: Sequence[int]) -> _Kind:
    """Return the type or the array of a column, or of the member of a struct."""
    kind = kinds[places[0]]
    for place in places[1:]:
        kind = kind.inner[place]
    return kind


def _refuse_unread_dictionaries(kind: Placed, column: Column, path: str) -> None:
    if arrow_module("pyarrow.types").is_dictionary(kind.kind) and not is_read_dictionary(kind.kind):
        raise ValueError(
            f"{path}: column {column.field.name!r} is a dictionary of {kind.kind.value_type}: cast it to that type, or "
            f"leave it out (columns=)"
        )
    for inner in kind.inner:
        _refuse_unread_dictionaries(inner, column, path)

"""Record batches of Arrow IPC files that have to be decoded: they are the row groups of a table.

The buffers of the wanted columns are read, and become pyarrow's arrays as they are. So a batch's
other columns are neither read nor looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gdsdata.formats.arrow_messages import Message, Read, parsed, record_batches, schema_of
from gdsdata.formats.columns import (
    Column,
    FillNull,
    arrow_module,
    columns_of,
    is_bytes,
    is_view,
    storage_of,
    value_bytes,
)
from gdsdata.formats.parsers.damage import damaged
from gdsdata.formats.tables import FileGroups

if TYPE_CHECKING:
    import pyarrow

# A record batch may take so much when it is decoded: a number that lies must not become memory.
_LARGEST_BATCH_BYTES = 2**32
_CODECS = {0: "lz4", 1: "zstd"}
# JSON text and wide offsets take about so many times what is stored.
_DECODED_TIMES = 4
# Values in the lists of a compressed record batch.
_MOST_COMPRESSED = 2**27


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
        """Return the columns of a record batch, of which the first extent is its metadata."""
        arrow = arrow_module()
        schema = arrow_module("pyarrow.ipc").read_schema(arrow.py_buffer(self.frame))
        frame = bytes(stored[0])
        try:
            batch = Batch.of(parsed(frame, begins[0], begins[0] + len(frame)), schema)
        except struct.error as error:
            raise ValueError(f"the metadata of the record batch lie ({error})") from error
        places = _top_places(self.columns)
        extents = {place: (begin, one) for place, begin, one in zip(places, begins[1:], stored[1:], strict=True)}
        arrays, fields = [], []
        for place, (begin, content) in extents.items():
            array = batch.columns[place].array(_Buffers(begin - batch.body_at, content, batch.codec))
            array.validate(full=True)
            arrays.append(array)
            fields.append(arrow.field(schema.field(place).name, array.type))
        return arrow.Table.from_arrays(arrays, schema=arrow.schema(fields))


def _has_dictionaries(kind: pyarrow.DataType, places: Sequence[int] = ()) -> bool:
    """Return whether a type, or the member of a struct at ``places``, has dictionaries in it."""
    kind = storage_of(kind)
    for place in places:
        kind = storage_of(kind.field(place).type)
    if arrow_module("pyarrow.types").is_dictionary(kind):
        return True
    return any(_has_dictionaries(kind.field(i).type) for i in range(kind.num_fields))


def _top_places(columns: Sequence[Column]) -> list[int]:
    """Return the places in the schema of columns, or of the structs around them."""
    return list(dict.fromkeys(column.places[0] for column in columns))


def find_batches(
    read: Read, said: tuple[int, int], wanted: Sequence[str] | None, fill_null: FillNull, path: str
) -> FileGroups:
    """Return where the record batches of a file lie.

    The extents of each are its metadata, then the buffers of each column.

    Args:
        read: gives the file's bytes.
        said: size in bytes and mtime in ns of the file.
        wanted: columns.
        fill_null: as of `gdsdata.formats.Arrow`.
        path: named in errors.

    Raises:
        CorruptData, ValueError: as `Arrow.index`.
    """
    messages = record_batches(read, said[0], path)
    first = next(messages)
    schema = schema_of(first, path)
    columns = columns_of(schema, wanted, path, fill_null)
    for column in columns:
        if _has_dictionaries(schema.field(column.places[0]).type, column.places[1:]):
            raise ValueError(
                f"{path}: column {column.field.name!r} is a dictionary: cast it to its values' type, or leave it out "
                f"(columns=)"
            )
    found = FileGroups(ArrowFile(first.frame, columns), *said, [], [], [], [], [])
    for number, message in enumerate(messages):
        try:
            batch = Batch.of(message, schema)
            extents = [batch.columns[place].extent() for place in _top_places(columns)]
        except (struct.error, ValueError) as error:
            raise damaged(path, message.at, len(message.frame), f"the record batch here lies: {error}") from error
        decoded_bytes = batch.rows * sum(value_bytes(column.field) + 8 for column in columns)
        decoded_bytes += _DECODED_TIMES * sum(length for _, length in extents)
        if decoded_bytes > _LARGEST_BATCH_BYTES:
            raise ValueError(
                f"{path}: a record batch of {batch.rows} rows at byte {message.at} may take {decoded_bytes} bytes when "
                f"decoded, and the most is {_LARGEST_BATCH_BYTES}: write smaller ones (max_chunksize=), or name the "
                f"columns that are wanted (columns=)"
            )
        if batch.rows:
            found.rows.append(batch.rows)
            found.numbers.append(number)
            found.begins.append([message.at, *(batch.body_at + begin for begin, _ in extents)])
            found.lengths.append([len(message.frame), *(length for _, length in extents)])
            found.decoded.append(decoded_bytes)
    return found


class _Buffers(NamedTuple):
    """Buffers of a column.

    Attributes:
        begin: of the column's extent in the batch's body.
        content: of the extent.
        codec: by which each buffer is compressed; None: none is.
    """

    begin: int
    content: memoryview
    codec: str | None

    def buffer(self, place: tuple[int, int]) -> pyarrow.Buffer | None:
        """Return a buffer, which begins on a multiple of 8; None if it is empty."""
        arrow = arrow_module()
        begin, length = place
        if not length:
            return None
        content = self.content[begin - self.begin : begin - self.begin + length]
        if self.codec is not None:
            (unpacked_bytes,) = struct.unpack_from("<q", content)
            if not -1 <= unpacked_bytes <= _LARGEST_BATCH_BYTES:
                raise ValueError(f"a buffer would have {unpacked_bytes} bytes when decompressed")
            content = content[8:]
            if unpacked_bytes >= 0:
                return arrow.decompress(content, unpacked_bytes, codec=self.codec)
        buffer = arrow.py_buffer(content)
        return buffer if buffer.address % 8 == 0 else arrow.py_buffer(bytes(content))


class _Array(NamedTuple):
    """An array of a record batch: its type, without extensions, and its parts.

    Attributes:
        kind: its type.
        length: its values.
        buffers: offset in the body and length of each: with validity first, if the type has one.
        inner: those in it.
    """

    kind: pyarrow.DataType
    length: int
    buffers: tuple[tuple[int, int], ...]
    inner: tuple[_Array, ...]

    def extent(self) -> tuple[int, int]:
        """Return offset in the body and length of the stretch that has all buffers."""
        places = [place for place in self._places() if place[1]]
        if not places:
            return 0, 0
        begin = min(begin for begin, _ in places)
        return begin, max(begin + length for begin, length in places) - begin

    def _places(self) -> Iterator[tuple[int, int]]:
        yield from self.buffers
        for one in self.inner:
            yield from one._places()

    def array(self, buffers: _Buffers) -> pyarrow.Array:
        """Return pyarrow's array."""
        arrow = arrow_module()
        if arrow.types.is_null(self.kind):
            return arrow.nulls(self.length)
        inner = [one.array(buffers) for one in self.inner]
        found = [buffers.buffer(place) for place in self.buffers]
        empty = arrow.py_buffer(bytes(8))  # of offsets or values that are none
        found[1:] = [empty if one is None else one for one in found[1:]]
        return arrow.Array.from_buffers(self.kind, self.length, found, children=inner)


class Batch(NamedTuple):
    """The metadata of a record batch.

    Attributes:
        rows: that it has.
        columns: of its schema.
        codec: by which its buffers are compressed; None: they are not.
        body_at: offset of its body.
    """

    rows: int
    columns: tuple[_Array, ...]
    codec: str | None
    body_at: int

    @classmethod
    def of(cls, message: Message, schema: pyarrow.Schema) -> Batch:
        """Return a batch of a message.

        Raises:
            ValueError, struct.error: the metadata lie, or a type cannot be passed over.
        """
        rows, compression = message.header.integer(0, "q"), message.header.table(3)
        codec = None if compression is None else _CODECS.get(compression.integer(0, "b"))
        if compression is not None and codec is None:
            raise ValueError("it is compressed by a codec that does not exist")
        take = _Taking(message, codec is not None)
        columns = tuple(take.array(field.type, rows) for field in schema)
        return cls(rows, columns, codec, message.body_at)


class _Taking:
    """Takes the nodes and buffers of a record batch in their order."""

    def __init__(self, message: Message, is_compressed: bool) -> None:
        self._nodes = iter(message.header.int64s(1, 2).tolist())
        self._buffers = iter(message.header.int64s(2, 2).tolist())
        self._views = iter(message.header.int64s(4, 1).tolist())
        self._body_bytes = message.body_bytes
        # Each value takes a bit of some buffer, but nulls take none: a number that lies must not
        # become memory.
        self._most_in_lists = max(8 * message.body_bytes, _MOST_COMPRESSED if is_compressed else 0)

    def array(self, kind: pyarrow.DataType, rows: int | None = None) -> _Array:
        """Return the next array, of ``rows`` values if that is known."""
        types = arrow_module("pyarrow.types")
        kind = storage_of(kind)
        length, nulls = self._next(self._nodes, "nodes")
        if length < 0 or nulls < 0 or (rows is not None and length != rows):
            raise ValueError(f"a column has {length} values with {nulls} nulls")
        if rows is None and length > self._most_in_lists:
            raise ValueError(f"lists have {length} values in {self._body_bytes} bytes")
        buffers = [self._buffer() for _ in range(_buffers_of(kind))]
        if is_view(kind):
            (count,) = self._next(self._views, "counts of buffers")
            if not 0 <= count <= self._body_bytes:
                raise ValueError(f"a column of views has {count} buffers")
            buffers += [self._buffer() for _ in range(count)]
        below = length if types.is_struct(kind) else None
        fields = [] if types.is_dictionary(kind) else [kind.field(i) for i in range(kind.num_fields)]
        inner = tuple(self.array(field.type, below) for field in fields)
        if types.is_dictionary(kind) or types.is_union(kind):  # of no wanted column
            return _Array(arrow_module().null(), length, (), ())
        return _Array(_plain_type(kind, inner), length, tuple(buffers), inner)

    def _buffer(self) -> tuple[int, int]:
        begin, length = self._next(self._buffers, "buffers")
        if begin < 0 or length < 0 or begin + length > self._body_bytes:
            raise ValueError(f"a buffer of {length} bytes at {begin} is not in its {self._body_bytes}")
        return begin, length

    @staticmethod
    def _next(numbers: Iterator[list[int]], name: str) -> list[int]:
        found = next(numbers, None)
        if found is None:
            raise ValueError(f"it has too few {name}")
        return found


def _buffers_of(kind: pyarrow.DataType) -> int:
    """Return how many buffers an array has, without those of views' values and inner arrays."""
    types = arrow_module("pyarrow.types")
    if types.is_null(kind):
        return 0
    if types.is_union(kind):
        return 1 if kind.mode == "sparse" else 2
    if is_bytes(kind) and not is_view(kind):
        return 3
    if types.is_struct(kind) or types.is_fixed_size_list(kind):
        return 1
    is_known = kind.num_fields == 0 or types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind)
    if not is_known and not types.is_dictionary(kind):
        raise ValueError(f"a column is of the type {kind}, which this reader cannot pass over")
    return 2


def _plain_type(kind: pyarrow.DataType, inner: tuple[_Array, ...]) -> pyarrow.DataType:
    """Return a type with the types of its inner arrays, which have no extensions."""
    arrow, types = arrow_module(), arrow_module("pyarrow.types")
    fields = [kind.field(i).with_type(one.kind) for i, one in enumerate(inner)]
    makers: list[tuple[Callable[[pyarrow.DataType], bool], Callable[[], pyarrow.DataType]]] = [
        (types.is_struct, lambda: arrow.struct(fields)),
        (types.is_list, lambda: arrow.list_(fields[0])),
        (types.is_large_list, lambda: arrow.large_list(fields[0])),
        (types.is_fixed_size_list, lambda: arrow.list_(fields[0], kind.list_size)),
        (types.is_map, lambda: arrow.map_(fields[0].type.field(0), fields[0].type.field(1), kind.keys_sorted)),
    ]
    return next((make() for asked, make in makers if asked(kind)), kind)

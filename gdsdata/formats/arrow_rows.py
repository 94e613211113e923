"""The places of the rows of an Arrow IPC file or stream, from its messages."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gdsdata.formats.columns import (
    Column,
    arrow_module,
    columns_of,
    is_bytes,
    is_list,
    nulls_among_numbers,
    storage_of,
    value_bytes,
)
from gdsdata.formats.field import Field
from gdsdata.formats.parsers import magics
from gdsdata.formats.parsers.damage import damaged

if TYPE_CHECKING:
    import pyarrow

_STREAM_AT = 8  # in a file: behind the magic, on a multiple of 8
_FRAME = struct.Struct("<Ii")
# Schemas of thousands of columns take far less; a length that lies must not become memory.
_LONGEST_METADATA_BYTES = 2**26

_SCHEMA, _DICTIONARY, _RECORDS = 1, 2, 3  # types of messages

# Exactly so many bytes from an offset.
Read = Callable[[int, int], bytes]


def find_rows(
    read: Read, size_bytes: int, wanted: Sequence[str] | None, path: str
) -> tuple[tuple[Field, ...], np.ndarray, np.ndarray]:
    """Return where the values of each row lie.

    Args:
        read: gives the file's bytes.
        size_bytes: of the file.
        wanted: columns.
        path: named in errors.

    Returns:
        The K fields, then offset and length in bytes of each of the N rows: int64 (N, K) each.

    Raises:
        CorruptData, ValueError: as `Arrow.index`.
    """
    begins, lengths = [], []
    columns: tuple[_Placed, ...] | None = None
    for message in _messages(read, size_bytes, path):
        if message.kind == _SCHEMA and columns is None:
            columns = _placed_columns(message, wanted, path)
            shape = (0, len(columns))
            begins, lengths = [np.empty(shape, np.int64)], [np.empty(shape, np.int64)]
        elif message.kind == _RECORDS and columns is not None:
            extents = _extents_of(message, columns, read, path)
            begins.append(np.stack([begin for begin, _ in extents], 1))
            lengths.append(np.stack([length for _, length in extents], 1))
        elif message.kind != _DICTIONARY or columns is None:
            raise damaged(path, message.at, 0, f"a message of type {message.kind} stands where none belongs")
    if columns is None:
        raise damaged(path, 0, size_bytes, "it has no schema")
    fields = tuple(placed.column.field for placed in columns)
    return fields, np.concatenate(begins), np.concatenate(lengths)


# ------------------------------------------------------------------------------------------------------- messages


class _Table(NamedTuple):
    """A table of a FlatBuffer: reads beyond its bytes are a struct.error."""

    data: bytes
    at: int

    def number(self, code: str, at: int) -> int:
        """Return the integer of a struct's ``code`` at a place."""
        if at < 0:
            raise struct.error("a place before the beginning")
        return struct.unpack_from(f"<{code}", self.data, at)[0]

    def place(self, member: int) -> int | None:
        """Return the place of the table's n-th member; None if it has none."""
        names = self.at - self.number("i", self.at)
        slot = 4 + 2 * member
        offset = self.number("H", names + slot) if slot < self.number("H", names) else 0
        return self.at + offset if offset else None

    def integer(self, member: int, code: str) -> int:
        place = self.place(member)
        return 0 if place is None else self.number(code, place)

    def table(self, member: int) -> _Table | None:
        place = self.place(member)
        return None if place is None else _Table(self.data, place + self.number("I", place))

    def pairs(self, member: int) -> np.ndarray:
        """Return a vector of structs of two int64: (n, 2)."""
        place = self.place(member)
        if place is None:
            return np.empty((0, 2), np.int64)
        vector = place + self.number("I", place)
        count = self.number("I", vector)
        if vector + 4 + 16 * count > len(self.data):
            raise struct.error(f"a vector of {count} does not fit")
        return np.frombuffer(self.data, "<i8", 2 * count, vector + 4).reshape(-1, 2)


class _Message(NamedTuple):
    """A message at an offset of its file.

    Attributes:
        at: offset of the message.
        frame: its metadata, with the frame before them.
        kind: type of the message.
        header: in the metadata.
        body_at, body_bytes: extent of its body in the file.
    """

    at: int
    frame: bytes
    kind: int
    header: _Table
    body_at: int
    body_bytes: int


def _messages(read: Read, size_bytes: int, path: str) -> Iterator[_Message]:
    """Yield the messages of a stream, or of a file, which has the same stream in it."""
    is_file = size_bytes >= len(magics.ARROW) and read(0, len(magics.ARROW)) == magics.ARROW
    at = _STREAM_AT if is_file else 0
    if is_file and read(max(0, size_bytes - len(magics.ARROW)), len(magics.ARROW)) != magics.ARROW:
        raise damaged(path, 0, size_bytes, "it does not end with the magic of an Arrow file: it was cut short")
    while True:
        if at + _FRAME.size > size_bytes:
            reason = "the file ends without an end mark: it was cut short, or its writer was not closed"
            raise damaged(path, at, size_bytes - at, reason)
        prefix = read(at, _FRAME.size)
        continues, metadata_bytes = _FRAME.unpack(prefix)
        body_at = at + _FRAME.size + metadata_bytes
        is_sound = continues == magics.ARROW_CONTINUES and 0 <= metadata_bytes <= _LONGEST_METADATA_BYTES
        if not is_sound or body_at > size_bytes:
            raise damaged(path, at, _FRAME.size, f"no message begins here (its metadata would have {metadata_bytes})")
        if metadata_bytes == 0:
            break
        frame = prefix + read(at + _FRAME.size, metadata_bytes)
        try:
            message = _parsed(frame, at, body_at)
        except struct.error as error:
            raise damaged(path, at, len(frame), f"the metadata of a message lie ({error})") from error
        if not 0 <= message.body_bytes <= size_bytes - body_at:
            reason = f"a message has {message.body_bytes} bytes by its metadata, and {size_bytes - body_at} are left"
            raise damaged(path, body_at, size_bytes - body_at, reason)
        yield message
        at = body_at + message.body_bytes
    if not is_file and body_at < size_bytes:
        raise damaged(path, body_at, size_bytes - body_at, "more follows the stream's end mark")


def _parsed(frame: bytes, at: int, body_at: int) -> _Message:
    root = _Table(frame, _FRAME.size + struct.unpack_from("<I", frame, _FRAME.size)[0])
    header = root.table(2)
    if header is None:
        raise struct.error("a message without a header")
    return _Message(at, frame, root.integer(1, "B"), header, body_at, root.integer(3, "q"))


# --------------------------------------------------------------------------------------------------------- schema


class _Placed(NamedTuple):
    """Where a column stands among the nodes and buffers of each record batch.

    Attributes:
        column: what it is.
        above: node and buffer of validity, of it and of the structs around it. Any of them can make
            it null.
        inner: nodes of the values in its lists, and how many of them a row has (0: as its offsets
            say).
        offsets: the buffer of a list's or string's offsets, and their dtype; None: its values are
            of one size.
        values: the buffer of its values.
    """

    column: Column
    above: tuple[tuple[int, int], ...]
    inner: tuple[tuple[int, int], ...]
    offsets: tuple[int, np.dtype] | None
    values: int


def _placed_columns(message: _Message, wanted: Sequence[str] | None, path: str) -> tuple[_Placed, ...]:
    arrow, ipc = arrow_module(), arrow_module("pyarrow.ipc")
    try:
        schema = ipc.read_schema(arrow.py_buffer(message.frame))
        is_big_endian = message.header.integer(0, "h") != 0
    except (arrow.ArrowException, OSError, ValueError, KeyError, struct.error, MemoryError) as error:
        raise damaged(path, message.at, len(message.frame), f"the schema cannot be read ({error})") from error
    if is_big_endian:
        raise ValueError(f"{path} was written with big-endian values: write it again on a little-endian machine")
    columns = {column.places: column for column in columns_of(schema, wanted, path)}
    placed: dict[tuple[int, ...], _Placed] = {}
    node = buffer = 0
    for place, field in enumerate(schema):
        node, buffer = _walk(field, (place,), (), node, buffer, columns, placed, path)
    return tuple(placed[places] for places in columns)


def _walk(
    field: pyarrow.Field,
    places: tuple[int, ...],
    above: tuple[tuple[int, int], ...],
    node: int,
    buffer: int,
    columns: dict[tuple[int, ...], Column],
    placed: dict[tuple[int, ...], _Placed],
    path: str,
) -> tuple[int, int]:
    """Count nodes and buffers of a column, and note those that are wanted.

    Returns:
        The next node and buffer.
    """
    types = arrow_module("pyarrow.types")
    kind = storage_of(field.type)
    if types.is_struct(kind):
        above = (*above, (node, buffer))
        node, buffer = node + 1, buffer + 1
        for i in range(kind.num_fields):
            node, buffer = _walk(kind.field(i), (*places, i), above, node, buffer, columns, placed, path)
        return node, buffer
    if places in columns:
        placed[places] = _place(columns[places], kind, (*above, (node, buffer)), path)
    nodes, buffers = _spanned(kind, field.name, path)
    return node + nodes, buffer + buffers


def _place(column: Column, kind: pyarrow.DataType, above: tuple[tuple[int, int], ...], path: str) -> _Placed:
    """Place a column whose own node and first buffer are the last of ``above``."""
    types = arrow_module("pyarrow.types")
    node, buffer = above[-1]
    name = column.field.name
    inner: list[tuple[int, int]] = []
    offsets: tuple[int, np.dtype] | None = None
    values = buffer + 1
    if is_bytes(kind) or is_list(kind):
        is_large = types.is_large_string(kind) or types.is_large_binary(kind) or types.is_large_list(kind)
        offsets = buffer + 1, np.dtype("<i8" if is_large else "<i4")
        values = buffer + 2
        if is_list(kind):
            inner.append((node + 1, 0))
            values = buffer + 3
    count = 1
    while types.is_fixed_size_list(kind):
        count *= kind.list_size
        kind = storage_of(kind.value_type)
        inner.append((node + len(inner) + 1, count))
        values += 1
    if types.is_dictionary(kind):
        raise ValueError(f"{path}: column {name!r} is a dictionary: cast it to its values' type")
    if column.field.dtype == np.dtype(bool):
        raise ValueError(f"{path}: column {name!r} has booleans, which Arrow stores as bits: cast it to uint8")
    return _Placed(column, above, tuple(inner), offsets, values)


def _spanned(kind: pyarrow.DataType, name: str, path: str) -> tuple[int, int]:
    """Return how many nodes and buffers a column of some type has in a record batch."""
    types = arrow_module("pyarrow.types")
    kind = storage_of(kind)
    if types.is_null(kind):
        return 1, 0
    if types.is_dictionary(kind) or types.is_primitive(kind) or types.is_fixed_size_binary(kind):
        return 1, 2
    if types.is_decimal(kind) or types.is_interval(kind):
        return 1, 2
    if is_bytes(kind):
        return 1, 3
    if types.is_fixed_size_list(kind) or types.is_struct(kind):
        own = 1
    elif is_list(kind) or types.is_map(kind):
        own = 2
    elif types.is_union(kind):
        own = 1 if kind.mode == "sparse" else 2
    else:
        raise ValueError(f"{path}: column {name!r} is of the type {kind}, which this reader cannot pass over: cast it")
    nodes, buffers = 1, own
    for i in range(kind.num_fields):
        more_nodes, more_buffers = _spanned(kind.field(i).type, name, path)
        nodes, buffers = nodes + more_nodes, buffers + more_buffers
    return nodes, buffers


# -------------------------------------------------------------------------------------------------- record batches


def _extents_of(
    message: _Message, columns: tuple[_Placed, ...], read: Read, path: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return offset and length in bytes of each column's values in a record batch.

    They are int64 (n,) each.
    """
    try:
        is_compressed = message.header.table(3) is not None
        rows = message.header.integer(0, "q")
        batch = _Batch(message, rows, message.header.pairs(1), message.header.pairs(2), read, path)
    except struct.error as error:
        raise damaged(path, message.at, len(message.frame), f"the metadata of a record batch lie ({error})") from error
    if is_compressed:
        raise ValueError(
            f"{path}: its record batches are compressed, so values cannot be read by themselves: write it with "
            f"pyarrow.ipc.IpcWriteOptions(compression=None), or as Parquet"
        )
    return [
        batch.fixed(placed) if placed.offsets is None else batch.varying(placed, *placed.offsets) for placed in columns
    ]


class _Batch(NamedTuple):
    """A record batch's metadata.

    Nodes are (length, nulls), and buffers are (offset in the body, length): int64 (n, 2).
    """

    message: _Message
    rows: int
    nodes: np.ndarray
    buffers: np.ndarray
    read: Read
    path: str

    def fixed(self, placed: _Placed) -> tuple[np.ndarray, np.ndarray]:
        """Return extents of values of one size."""
        self._check_nodes(placed)
        name, size = placed.column.field.name, value_bytes(placed.column.field)
        if any(self._node(node)[1] for node, _ in placed.above):
            raise nulls_among_numbers(self.path, name)
        begin, length = self._buffer(placed.values)
        self._check(self.rows * size <= length, f"{self.rows} values of column {name!r} have {length} bytes")
        return begin + size * np.arange(self.rows, dtype=np.int64), np.full(self.rows, size, np.int64)

    def varying(self, placed: _Placed, number: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Return extents of values whose size differs; null has a length of -1.

        Args:
            placed: the column.
            number: of the buffer of its offsets.
            dtype: of these offsets.
        """
        self._check_nodes(placed)
        element_bytes = value_bytes(placed.column.field)
        if self.rows == 0:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        offsets_at, offsets_bytes = self._buffer(number)
        needed = (self.rows + 1) * dtype.itemsize
        self._check(needed <= offsets_bytes, f"{self.rows} rows have {offsets_bytes} bytes of offsets")
        offsets = np.frombuffer(self.read(offsets_at, needed), dtype).astype(np.int64)
        begin, length = self._buffer(placed.values)
        fits = offsets[0] >= 0 and (offsets[1:] >= offsets[:-1]).all() and offsets[-1] <= length // element_bytes
        self._check(bool(fits), f"the offsets of column {placed.column.field.name!r} lie")
        lengths = np.diff(offsets) * element_bytes
        for node, buffer in placed.above:
            if self._node(node)[1]:
                lengths[~self._validity(buffer)] = -1
        return begin + offsets[:-1] * element_bytes, lengths

    def _check_nodes(self, placed: _Placed) -> None:
        """Check the numbers of values and nulls.

        Nodes of whole rows have as many values as the batch. Nodes within lists have enough of
        them, and no nulls.
        """
        self._check(self.rows >= 0, f"it has {self.rows} rows")
        for node, _ in placed.above:
            length, nulls = self._node(node)
            is_whole = length == self.rows and 0 <= nulls <= length
            self._check(is_whole, f"a column has {length} values with {nulls} nulls")
        for node, a_row in placed.inner:
            length, nulls = self._node(node)
            is_enough = length >= self.rows * a_row and nulls >= 0
            self._check(is_enough, f"its lists have {length} values with {nulls} nulls")
            if nulls:
                raise nulls_among_numbers(self.path, placed.column.field.name)

    def _node(self, number: int) -> tuple[int, int]:
        self._check(number < len(self.nodes), f"it has {len(self.nodes)} nodes")
        length, nulls = self.nodes[number].tolist()
        return length, nulls

    def _buffer(self, number: int) -> tuple[int, int]:
        """Return offset in the file and length of a buffer."""
        self._check(number < len(self.buffers), f"it has {len(self.buffers)} buffers")
        begin, length = self.buffers[number].tolist()
        is_inside = begin >= 0 and length >= 0 and begin + length <= self.message.body_bytes
        self._check(is_inside, f"a buffer of {length} bytes at {begin} is not in its {self.message.body_bytes}")
        return self.message.body_at + begin, length

    def _validity(self, number: int) -> np.ndarray:
        """Return which rows have a value: bool (rows,)."""
        begin, length = self._buffer(number)
        needed = -(-self.rows // 8)
        self._check(needed <= length, f"{self.rows} rows have {length} bytes of validity")
        bits = np.frombuffer(self.read(begin, needed), np.uint8)
        return np.unpackbits(bits, count=self.rows, bitorder="little").view(bool)

    def _check(self, is_true: bool, reason: str) -> None:
        if not is_true:
            raise damaged(self.path, self.message.at, len(self.message.frame), f"the record batch here lies: {reason}")

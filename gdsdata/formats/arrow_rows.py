"""The places of the rows of an Arrow IPC file or stream, from its messages."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gdsdata.formats.arrow_layout import lost_validity, spanned
from gdsdata.formats.arrow_messages import Message, Read, record_batches, schema_of
from gdsdata.formats.columns import (
    Column,
    arrow_module,
    columns_of,
    is_bytes,
    is_list,
    is_view,
    nulls_among_numbers,
    storage_of,
    value_bytes,
)
from gdsdata.formats.field import Field
from gdsdata.formats.parsers.damage import damaged

if TYPE_CHECKING:
    import pyarrow


def lie_in_place(schema: pyarrow.Schema, columns: Sequence[Column], is_old: bool) -> bool:
    """Return whether each value of these columns is a stretch of bytes as it is in a batch.

    Then `find_rows` finds them. Else record batches have to be decoded.

    Args:
        schema: of the file.
        columns: that are wanted.
        is_old: see `Message`.
    """
    types = arrow_module("pyarrow.types")
    for column in columns:
        kind = schema.field(column.places[0]).type
        for place in column.places[1:]:
            kind = storage_of(kind).field(place).type
        kind, field = storage_of(kind), column.field
        is_stretch = field.shape is not None or (is_bytes(kind) if field.dtype is None else is_list(kind))
        while is_list(kind) or types.is_fixed_size_list(kind):
            is_stretch = is_stretch and not (is_list(kind) and field.shape is not None)
            kind = storage_of(kind.value_type)
        is_stored_so = field.element_dtype.kind != "b" and not types.is_decimal(kind) and not types.is_dictionary(kind)
        if not is_stretch or not is_stored_so or field.depth > 1 or field.row_shape:
            return False
    return all(_is_spanned(field.type, is_old) for field in schema)


def _is_spanned(kind: pyarrow.DataType, is_old: bool) -> bool:
    """Return whether `spanned` knows the buffers of a type: of views, each batch says how many."""
    kind = storage_of(kind)
    if is_view(kind) or (is_old and lost_validity(kind)):
        return False
    return all(_is_spanned(kind.field(i).type, is_old) for i in range(kind.num_fields))


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
    found = record_batches(read, size_bytes, path)
    columns = _placed_columns(next(found), wanted, path)
    begins, lengths = [np.empty((0, len(columns)), np.int64)], [np.empty((0, len(columns)), np.int64)]
    for message in found:
        extents = _extents_of(message, columns, read, path)
        begins.append(np.stack([begin for begin, _ in extents], 1))
        lengths.append(np.stack([length for _, length in extents], 1))
    fields = tuple(placed.column.field for placed in columns)
    return fields, np.concatenate(begins), np.concatenate(lengths)


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


def _placed_columns(message: Message, wanted: Sequence[str] | None, path: str) -> tuple[_Placed, ...]:
    schema = schema_of(message, path)
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
        placed[places] = _place(columns[places], kind, (*above, (node, buffer)))
    try:
        nodes, buffers = spanned(kind)
    except ValueError as reason:
        raise ValueError(f"{path}: column {field.name!r}: {reason}") from None
    return node + nodes, buffer + buffers


def _place(column: Column, kind: pyarrow.DataType, above: tuple[tuple[int, int], ...]) -> _Placed:
    """Place a column whose own node and first buffer are the last of ``above``."""
    types = arrow_module("pyarrow.types")
    node, buffer = above[-1]
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
    return _Placed(column, above, tuple(inner), offsets, values)


# -------------------------------------------------------------------------------------------------- record batches


def _extents_of(
    message: Message, columns: tuple[_Placed, ...], read: Read, path: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return offset and length in bytes of each column's values in a record batch.

    They are int64 (n,) each.
    """
    try:
        is_compressed = message.header.table(3) is not None
        rows = message.header.integer(0, "q")
        batch = _Batch(message, rows, message.header.int64s(1, 2), message.header.int64s(2, 2), read, path)
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

    message: Message
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
            raise nulls_among_numbers(self.path, placed.column)
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
                raise nulls_among_numbers(self.path, placed.column)

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

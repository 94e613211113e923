"""The values of a decoded column, as batches are gathered from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from gdsdata.formats import dictionaries
from gdsdata.formats.columns import Column, arrow_module, element_of, flattened, is_bytes, is_list, storage_of
from gdsdata.formats.field import Field
from gdsdata.formats.json_rows import json_rows, stored

if TYPE_CHECKING:
    import pyarrow

# The values that a row group has of a column: an array (rows, *shape); or, if they differ in size,
# an array of pyarrow: large_binary, or as many large_lists within each other as `Field.depth` says.
Values: TypeAlias = "np.ndarray | pyarrow.Array"


class HasNulls(Exception):
    """Numbers of a column are null, and nothing is to take their place."""


class TimesBeyond(Exception):
    """A column, which it names, has times that 64 bits of nanoseconds cannot have."""


class OtherShape(Exception):
    """An array of a column has another shape than the column's type says."""


def values_of_column(table: pyarrow.Table, column: Column, places: Sequence[int]) -> Values:
    """Return the values of a column of a table that was decoded.

    Args:
        table: has the column.
        column: which.
        places: where it is, by `places_in`.

    Raises:
        HasNulls: see there.
        OtherShape: see there.
        TooLarge: a dictionary's values (see `dictionaries`).
        Exception: the table is damaged; the type is one of `errors_of_pyarrow`.
    """
    arrow, types = arrow_module(), arrow_module("pyarrow.types")
    chunks = _out_of_structs(table, places)
    kind, field = chunks.type, column.field
    if types.is_dictionary(kind):
        plain = [dictionaries.decoded(chunk) for chunk in chunks.chunks]
        chunks = arrow.chunked_array(plain, plain[0].type if plain else storage_of(kind.value_type))
        kind = chunks.type
    if types.is_null(kind):
        return _whole(chunks.cast(arrow.large_binary()))
    if field.dtype is None and not is_bytes(kind):
        return _whole(arrow.chunked_array(map(json_rows, chunks.chunks), arrow.large_binary()))
    array = _whole(chunks.cast(_wide(kind, arrow.string())).cast(_wide(kind, arrow.float64())))
    if field.shape is not None:
        return _dense(array, field.shape, field.element_dtype, column.fill).reshape(len(array), *field.shape)
    if field.row_shape and field.depth == 1 and types.is_large_list(array.type.value_type):
        return _rows_of_shape(array, field, column.fill)
    return _without_nulls(array, field, column.fill)


def elements_of(array: pyarrow.Array, field: Field) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the elements of ragged values, and the lengths of their lists.

    Args:
        array: `Values` of pyarrow, at least one.
        field: what they are.

    Returns:
        The elements of all values, one dimension; then, from the outermost lists inward, the length
        of each list: int64, `Field.depth` arrays.
    """
    types, lengths = arrow_module("pyarrow.types"), []
    for _ in range(field.depth):
        offsets = np.zeros(1, np.int64)
        if len(array):
            offsets = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
        lengths.append(np.diff(offsets))
        if types.is_large_binary(array.type):
            elements = np.frombuffer(array.buffers()[2] or b"", np.uint8)
            return elements[int(offsets[0]) : int(offsets[-1])], lengths
        array = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    return _dense(array, field.row_shape, field.element_dtype, 0).reshape(-1), lengths


def _out_of_structs(table: pyarrow.Table, places: Sequence[int]) -> pyarrow.ChunkedArray:
    """Return a column as it is stored. A null struct has null members."""
    arrow = arrow_module()
    chunks = table.column(places[0])
    for place in places[1:]:
        kind = storage_of(chunks.type).field(place).type
        # So nulls of the struct are the member's.
        chunks = arrow.chunked_array([stored(chunk).flatten()[place] for chunk in chunks.chunks], kind)
    return arrow.chunked_array([stored(chunk) for chunk in chunks.chunks], storage_of(chunks.type))


def places_in(schema: pyarrow.Schema) -> dict[str, tuple[int, ...]]:
    """Return the places of a decoded table's columns, and of its structs' members, by their names.

    They are not `Column.places`: such tables have the columns and members that are wanted alone.
    """
    places: dict[str, tuple[int, ...]] = {}
    for names, _, found in flattened(schema, (), ()):
        places.setdefault(".".join(names), found)
    return places


def _whole(chunks: pyarrow.ChunkedArray) -> pyarrow.Array:
    array = chunks.combine_chunks()
    return arrow_module().concat_arrays(array.chunks) if isinstance(array, arrow_module().ChunkedArray) else array


def _wide(kind: pyarrow.DataType, of_decimals: pyarrow.DataType) -> pyarrow.DataType:
    """Return the one type to which columns are cast that differ in no value.

    Offsets have 64 bits. Decimals become float64 by way of strings: pyarrow rounds those correctly,
    and decimals not (seen with 26.0: 2481.95 became 2481.9500000000003). Dates and times become
    their integers. Fixed sizes stay as they are, unless lists of varying sizes lie within them.
    """
    arrow, types = arrow_module(), arrow_module("pyarrow.types")
    kind = storage_of(kind)
    if is_bytes(kind):
        return arrow.large_binary()
    if types.is_decimal(kind):
        return of_decimals
    if types.is_temporal(kind):
        return arrow.int32() if kind.bit_width == 32 else arrow.int64()
    if not is_list(kind) and not types.is_fixed_size_list(kind):
        return kind
    inner = _wide(element_of(kind), of_decimals)
    if is_list(kind) or types.is_large_list(inner) or types.is_large_binary(inner):
        return arrow.large_list(inner)
    return arrow.list_(inner, kind.list_size)


def _dense(array: pyarrow.Array, shape: tuple[int, ...], dtype: np.dtype, fill: float | None) -> np.ndarray:
    """Return values of one size, without nulls: (len(array), their elements)."""
    types, width = arrow_module("pyarrow.types"), math.prod(shape)
    if array.null_count:
        if fill is None:
            raise HasNulls
        filled = np.full((len(array), width), fill, dtype)
        filled[array.is_valid().to_numpy(zero_copy_only=False)] = _dense(array.drop_null(), shape, dtype, fill)
        return filled
    if types.is_fixed_size_list(array.type):
        below = (width // array.type.list_size,)
        return _dense(array.flatten(), below, dtype, fill).reshape(len(array), width)
    if types.is_large_list(array.type):
        if (array.value_lengths().to_numpy() != shape[0]).any():
            raise OtherShape
        return _dense(array.flatten(), shape[1:], dtype, fill).reshape(len(array), width)
    if types.is_boolean(array.type):
        return array.to_numpy(zero_copy_only=False).reshape(len(array), width)
    is_byte = dtype.kind == "b"  # any but 0 is true
    stored_dtype = np.dtype(np.int8) if is_byte else dtype
    values = np.frombuffer(array.buffers()[1], stored_dtype) if len(array) else np.empty(0, stored_dtype)
    values = values[array.offset * width : (array.offset + len(array)) * width].reshape(len(array), width)
    return values != 0 if is_byte else values


def _rows_of_shape(array: pyarrow.Array, field: Field, fill: float | None) -> pyarrow.Array:
    """Return lists of arrays of one shape (stored as lists) as lists of their elements."""
    arrow, kind = arrow_module(), array.type
    rows = _dense(array.flatten(), field.row_shape, field.element_dtype, fill).reshape(-1)
    offsets = np.cumsum(np.append(0, array.value_lengths().fill_null(0).to_numpy()), dtype=np.int64)
    while arrow.types.is_large_list(kind):
        kind = kind.value_type
    fixed = arrow.FixedSizeListArray.from_arrays(_of_numpy(rows, kind, len(rows)), math.prod(field.row_shape))
    return arrow.LargeListArray.from_arrays(arrow.array(offsets), fixed)


def _without_nulls(array: pyarrow.Array, field: Field, fill: float | None) -> pyarrow.Array:
    """Return ragged values whose numbers have no nulls. Null lists and bytes are empty."""
    types, leaf = arrow_module("pyarrow.types"), array
    while types.is_large_list(leaf.type):
        leaf = leaf.flatten()
    if types.is_large_binary(leaf.type) or not _has_nulls(leaf):
        return array
    if fill is None:
        raise HasNulls
    return _filled(array, field, fill)


def _has_nulls(array: pyarrow.Array) -> bool:
    while not array.null_count and arrow_module("pyarrow.types").is_fixed_size_list(array.type):
        array = array.flatten()
    return array.null_count > 0


def _filled(array: pyarrow.Array, field: Field, fill: float) -> pyarrow.Array:
    arrow = arrow_module()
    if not arrow.types.is_large_list(array.type):
        elements = _dense(array, field.row_shape, field.element_dtype, fill).reshape(-1)
        return _of_numpy(elements, array.type, len(array))
    inner = _filled(array.values, field, fill)
    return arrow.Array.from_buffers(
        array.type, len(array), array.buffers()[:2], array.null_count, array.offset, children=[inner]
    )


def _of_numpy(elements: np.ndarray, kind: pyarrow.DataType, count: int) -> pyarrow.Array:
    """Return ``count`` values of one size, of a type that stores their elements as they are."""
    arrow = arrow_module()
    if arrow.types.is_fixed_size_list(kind):
        inner = _of_numpy(elements, kind.value_type, count * kind.list_size)
        return arrow.Array.from_buffers(kind, count, [None], children=[inner])
    if arrow.types.is_boolean(kind):
        return arrow.array(elements, kind)
    return arrow.Array.from_buffers(kind, count, [None, arrow.py_buffer(np.ascontiguousarray(elements))])

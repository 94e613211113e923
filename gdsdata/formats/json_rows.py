"""Nested values as JSON text: structs, maps, lists of texts, and what contains them."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from gdsdata.formats import dictionaries
from gdsdata.formats.columns import arrow_module, is_bytes, is_text, scalar_dtype

if TYPE_CHECKING:
    import pyarrow

_encode = json.JSONEncoder(ensure_ascii=False).encode


def json_rows(array: pyarrow.Array) -> pyarrow.Array:
    """Return a text for each value: large_binary, UTF-8, without nulls.

    - A struct is an object, a list an array, a map an array of pairs; null is ``null``.
    - Numbers, booleans and texts are JSON's. NaN and infinities are Python's ``NaN`` and
      ``Infinity``, which JSON lacks. Decimals are numbers, rounded to float64.
    - Dates and times are the integers that tensors have of them. Bytes are text in base64.
    """
    return arrow_module().array([_encode(value).encode() for value in _plain(array)], arrow_module().large_binary())


def stored(array: pyarrow.Array) -> pyarrow.Array:
    """Return an extension array's storage; other arrays as they are."""
    return getattr(array, "storage", array)


def _plain(array: pyarrow.Array) -> list[Any]:
    """Return values as what `json` writes."""
    arrow, types = arrow_module(), arrow_module("pyarrow.types")
    if scalar_dtype(array.type) == np.bool_:  # bool8 too, which is stored as numbers
        return [None if value is None else bool(value) for value in stored(array).to_pylist()]
    array = stored(array)
    kind = array.type
    if types.is_dictionary(kind):
        return _plain(dictionaries.decoded(array))
    if types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        members = [_plain(member) for member in array.flatten()]
        return [
            dict(zip(names, values, strict=True)) if is_there else None
            for is_there, *values in zip(_validity(array), *members, strict=True)
        ]
    if types.is_map(kind):
        pairs = list(map(list, zip(_plain(array.keys), _plain(array.items), strict=True)))
        offsets = array.offsets.to_pylist()
        return _cut(pairs, offsets[:-1], offsets[1:], _validity(array))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        lengths = array.value_lengths().fill_null(0).to_numpy()
        ends = np.cumsum(lengths)
        return _cut(_plain(array.flatten()), (ends - lengths).tolist(), ends.tolist(), _validity(array))
    if types.is_decimal(kind):
        array = array.cast(arrow.string()).cast(arrow.float64())  # rounds correctly
    elif types.is_float16(kind):
        array = array.cast(arrow.float32())
    elif types.is_temporal(kind):
        array = array.view(arrow.int32() if kind.bit_width == 32 else arrow.int64())
    elif types.is_fixed_size_binary(kind) or (is_bytes(kind) and not is_text(kind)):
        return [None if value is None else base64.b64encode(value).decode() for value in array.to_pylist()]
    return array.to_pylist()


def _validity(array: pyarrow.Array) -> list[bool]:
    return array.is_valid().to_pylist()


def _cut(values: list[Any], begins: list[int], ends: list[int], validity: list[bool]) -> list[Any]:
    return [
        values[begin:end] if is_there else None for begin, end, is_there in zip(begins, ends, validity, strict=True)
    ]

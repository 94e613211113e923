"""Columns of Arrow's types as fields, which `arrow` and `parquet` share.

Source of the types: https://arrow.apache.org/docs/format/Columnar.html.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gdsdata.errors import CorruptData
from gdsdata.formats.fields import Field

if TYPE_CHECKING:
    import pyarrow

_FLOATS = {"halffloat": "f2", "float": "f4", "double": "f8"}


class Column(NamedTuple):
    """A column that is wanted.

    Attributes:
        field: as samples have it; the name of a member of a struct stands behind the struct's, as
            in ``image.bytes``.
        places: of the column in its schema, then of the member in each struct.
    """

    field: Field
    places: tuple[int, ...]


def arrow_module(name: str = "pyarrow") -> ModuleType:
    """Import pyarrow, or a module of it.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"Arrow and Parquet files need pyarrow ({error}): pip install 'gdsdata[tables]'") from error


def checked_names(columns: Sequence[str] | None, owner: object) -> tuple[str, ...] | None:
    """Return ``columns`` of a format as a tuple, which can be compared and hashed.

    Raises:
        ValueError: it is empty, a string, or names one twice.
    """
    if columns is None:
        return None
    if isinstance(columns, str) or not columns or len(set(columns)) < len(columns):
        raise ValueError(f'{owner}: columns names columns, each once, as in ("tokens", "label")')
    return tuple(columns)


def storage_of(kind: pyarrow.DataType) -> pyarrow.DataType:
    """Return the type that an extension type is stored as; other types as they are."""
    return getattr(kind, "storage_type", kind)


def scalar_dtype(kind: pyarrow.DataType) -> np.dtype | None:
    """Return the dtype of numbers, booleans, dates or times; None: another type.

    Dates and times are their integers.
    """
    types = arrow_module("pyarrow.types")
    if types.is_boolean(kind):
        return np.dtype(bool)
    if types.is_integer(kind):
        return np.dtype(f"<{'i' if types.is_signed_integer(kind) else 'u'}{kind.bit_width // 8}")
    if types.is_floating(kind):
        return np.dtype(f"<{_FLOATS[str(kind)]}")
    if types.is_temporal(kind) and not types.is_interval(kind):
        return np.dtype(f"<i{kind.bit_width // 8}")
    return None


def is_bytes(kind: pyarrow.DataType) -> bool:
    """Return whether its values are strings or bytes of a length of their own."""
    types = arrow_module("pyarrow.types")
    return any(
        asked(kind) for asked in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    )


def is_list(kind: pyarrow.DataType) -> bool:
    """Return whether its values are lists of a length of their own."""
    types = arrow_module("pyarrow.types")
    return types.is_list(kind) or types.is_large_list(kind)


def field_of(name: str, kind: pyarrow.DataType) -> Field | None:
    """Return a column of one type as a field.

    None: no field has that type (structs, lists of lists, decimals and others).
    """
    types = arrow_module("pyarrow.types")
    shape = list(kind.shape) if str(getattr(kind, "extension_name", "")) == "arrow.fixed_shape_tensor" else None
    if shape is not None and kind.permutation not in (None, list(range(len(shape)))):
        return None
    kind = storage_of(kind)
    if types.is_dictionary(kind):
        kind = kind.value_type
    if is_bytes(kind):
        return Field(name)
    if is_list(kind):
        dtype = scalar_dtype(storage_of(kind.value_type))
        return None if dtype is None else Field(name, dtype)
    if types.is_fixed_size_binary(kind) and not types.is_decimal(kind):
        return Field(name, np.dtype(np.uint8), (kind.byte_width,))
    sizes = []
    while types.is_fixed_size_list(kind):
        sizes.append(kind.list_size)
        kind = storage_of(kind.value_type)
    dtype = scalar_dtype(kind)
    if dtype is None or 0 in sizes:
        return None
    return Field(name, dtype, tuple(sizes if shape is None else shape))


def columns_of(schema: pyarrow.Schema, wanted: Sequence[str] | None, path: str) -> tuple[Column, ...]:
    """Return the fields of a file's samples.

    They are in the order of ``wanted``, or of the schema if that is None.

    Raises:
        ValueError: a name that is wanted is none or is there twice, or no field has a column's
            type.
        CorruptData: a name is not UTF-8.
    """
    try:
        return _columns_of(schema, wanted, path)
    except UnicodeDecodeError as error:  # pyarrow looks at names when they are asked for
        raise CorruptData(f"{path}: the name of a column is damaged: {error}", path) from error


def _columns_of(schema: pyarrow.Schema, wanted: Sequence[str] | None, path: str) -> tuple[Column, ...]:
    found: dict[str, tuple[pyarrow.DataType, tuple[int, ...]]] = {}
    for name, kind, places in _flattened(schema, (), ()):
        if name in found and (wanted is None or name in wanted):
            raise ValueError(f"{path} has two columns {name!r}: leave them out (columns=), or rename one")
        found[name] = kind, places
    if not found:
        raise ValueError(f"{path} has no columns")
    names = tuple(found) if wanted is None else _expanded(wanted, tuple(found), path)
    columns = []
    for name in names:
        kind, places = found[name]
        field = field_of(name, kind)
        if field is None or (field.shape and 0 in field.shape):
            raise ValueError(
                f"{path}: column {name!r} is of the type {kind}, which is no tensor and no list of numbers: cast it, "
                f"or leave it out, as with columns={tuple(other for other in names if other != name)}"
            )
        columns.append(Column(field, places))
    return tuple(columns)


def _flattened(
    fields: Sequence[pyarrow.Field], names: tuple[str, ...], places: tuple[int, ...]
) -> Iterator[tuple[str, pyarrow.DataType, tuple[int, ...]]]:
    """Yield name, type and places of all columns; a struct is its members."""
    is_struct = arrow_module("pyarrow.types").is_struct
    for place, field in enumerate(fields):
        here = (*names, field.name), field.type, (*places, place)
        stored = storage_of(field.type)
        if is_struct(stored):
            yield from _flattened([stored.field(i) for i in range(stored.num_fields)], here[0], here[2])
        else:
            yield ".".join(here[0]), field.type, here[2]


def _expanded(wanted: Sequence[str], names: tuple[str, ...], path: str) -> tuple[str, ...]:
    """Return ``wanted`` with the names of all members in the place of a struct's name."""
    expanded: dict[str, None] = {}
    for name in wanted:
        members = [other for other in names if other == name or other.startswith(f"{name}.")]
        if not members:
            raise ValueError(f"{path} has no column {name!r}: it has {', '.join(map(repr, names))}")
        expanded.update(dict.fromkeys(members))
    return tuple(expanded)


def value_bytes(field: Field) -> int:
    """Return the bytes of a value, if all are of one size; else of an element."""
    return field.element_dtype.itemsize * math.prod(field.shape or ())


def nulls_among_numbers(path: str, name: str) -> ValueError:
    """Return the error for nulls among values of one size, or in lists."""
    return ValueError(
        f"{path}: column {name!r} has nulls, which a tensor has no value for: fill them (fill_null) or leave it out"
    )


def check_alike(first: Sequence[Field], other: Sequence[Field], paths: tuple[str, str]) -> None:
    """Check that two files' samples have the same fields.

    Raises:
        ValueError: they have not.
    """
    if tuple(first) != tuple(other):
        said = [
            ", ".join(f"{one.name}: {one.dtype or 'bytes'}{one.shape or ''}" for one in fields)
            for fields in (first, other)
        ]
        raise ValueError(
            f"{paths[0]} has the columns ({said[0]}), and {paths[1]} ({said[1]}): read them as separate datasets, or "
            "name what they share with columns="
        )

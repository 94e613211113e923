"""Columns of Arrow's types as fields, which `arrow` and `parquet` share.

Source of the types: https://arrow.apache.org/docs/format/Columnar.html.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from gdsdata.errors import CorruptData
from gdsdata.formats import partitions
from gdsdata.formats.field import are_names
from gdsdata.formats.fields import Field

if TYPE_CHECKING:
    import pyarrow

_FLOATS = {"halffloat": "f2", "float": "f4", "double": "f8"}
# `datasets` writes arrays of this type as lists of lists; the type's own metadata have the shape.
_HF_ARRAYS = "datasets.features.features.Array"
_TENSOR, _BOOLEAN = "arrow.fixed_shape_tensor", "arrow.bool8"  # Arrow's own; this boolean takes a byte
_NAME, _METADATA = b"ARROW:extension:name", b"ARROW:extension:metadata"

# In the place of a unit: the type says that all values are null, or all lists empty.
_NO_VALUES = "no values"

# The value that takes the place of nulls among numbers: in all columns, or in those that are named.
FillNull: TypeAlias = "float | Mapping[str, float] | tuple[tuple[str, float], ...] | None"


class Column(NamedTuple):
    """A column that is wanted.

    Attributes:
        field: as samples have it; the name of a member of a struct stands behind the struct's, as
            in ``image.bytes``.
        places: of the column in its schema, then of the member in each struct.
        fill: takes the place of nulls among its numbers; None: they are an error.
        unfit: was meant to take their place in all columns, and is no value of this one.
    """

    field: Field
    places: tuple[int, ...]
    fill: float | None = None
    unfit: float | None = None


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
        ValueError: it is empty, a string, no names at all, or names one twice.
    """
    if columns is None:
        return None
    if not are_names(columns):
        raise ValueError(f'{owner}: columns names columns, each once, as in ("tokens", "label")')
    return tuple(columns)


def checked_fill(fill_null: FillNull, owner: str) -> FillNull:
    """Return ``fill_null`` of a format as what can be compared and hashed.

    Raises:
        ValueError: it is no number, and no mapping of columns to numbers.
    """
    fill_null = _plain(fill_null)
    if fill_null is None or isinstance(fill_null, (int, float)):
        return fill_null
    by_name = dict(fill_null) if isinstance(fill_null, (Mapping, tuple)) else {"": None}
    by_name = {name: _plain(value) for name, value in by_name.items()}
    if not all(isinstance(name, str) and isinstance(value, (int, float)) for name, value in by_name.items()):
        raise ValueError(f"{owner}(fill_null={fill_null!r}): it is a number, or a mapping of columns' names to numbers")
    return tuple((name, value) for name, value in by_name.items() if value is not None)


def _plain(value: Any) -> Any:
    """Return a number of numpy as Python's; other values as they are."""
    return value.item() if isinstance(value, np.generic) else value


def storage_of(kind: pyarrow.DataType) -> pyarrow.DataType:
    """Return the type that an extension type is stored as; other types as they are."""
    return getattr(kind, "storage_type", kind)


def scalar_dtype(kind: pyarrow.DataType) -> np.dtype | None:
    """Return the dtype of numbers, booleans, dates or times; None: another type.

    Dates and times are their integers, and decimals are float64.
    """
    types = arrow_module("pyarrow.types")
    if types.is_boolean(kind) or _extension(kind) == _BOOLEAN:
        return np.dtype(bool)
    if types.is_integer(kind):
        return np.dtype(f"<{'i' if types.is_signed_integer(kind) else 'u'}{kind.bit_width // 8}")
    if types.is_floating(kind):
        return np.dtype(f"<{_FLOATS[str(kind)]}")
    if types.is_decimal(kind):
        return np.dtype("<f8")
    if types.is_temporal(kind) and not types.is_interval(kind):
        return np.dtype(f"<i{kind.bit_width // 8}")
    return None


def is_view(kind: pyarrow.DataType) -> bool:
    """Return whether its values are strings or bytes that lie in several buffers."""
    types = arrow_module("pyarrow.types")
    return types.is_string_view(kind) or types.is_binary_view(kind)


def is_text(kind: pyarrow.DataType) -> bool:
    """Return whether its values are strings."""
    types = arrow_module("pyarrow.types")
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def is_bytes(kind: pyarrow.DataType) -> bool:
    """Return whether its values are strings or bytes of a length of their own."""
    types = arrow_module("pyarrow.types")
    return is_text(kind) or is_view(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def is_list(kind: pyarrow.DataType) -> bool:
    """Return whether its values are lists of a length of their own."""
    types = arrow_module("pyarrow.types")
    return types.is_list(kind) or types.is_large_list(kind)


def _extension(kind: pyarrow.DataType) -> str | None:
    """Return `_TENSOR` or `_BOOLEAN`, whose storage does not say all of it; None: another type."""
    name = str(getattr(kind, "extension_name", ""))
    return name if name in (_TENSOR, _BOOLEAN) else None


def _is_permuted(kind: pyarrow.DataType) -> bool:
    """Return whether its values are tensors that are stored in another order, or lists of them."""
    if _extension(kind) == _TENSOR:
        return kind.permutation not in (None, list(range(len(kind.shape))))
    kind = storage_of(kind)
    types = arrow_module("pyarrow.types")
    return (is_list(kind) or types.is_fixed_size_list(kind)) and _is_permuted(kind.value_type)


def is_json(kind: pyarrow.DataType) -> bool:
    """Return whether its values can be written as JSON."""
    types = arrow_module("pyarrow.types")
    if _is_permuted(kind):
        return False
    kind = storage_of(kind)
    if types.is_dictionary(kind):
        return is_json(kind.value_type)
    if types.is_struct(kind) and len({kind.field(i).name for i in range(kind.num_fields)}) < kind.num_fields:
        return False  # an object of JSON has one member of a name
    if types.is_struct(kind) or types.is_map(kind) or is_list(kind) or types.is_fixed_size_list(kind):
        return all(is_json(kind.field(i).type) for i in range(kind.num_fields))
    is_plain = is_bytes(kind) or types.is_fixed_size_binary(kind) or types.is_null(kind)
    return is_plain or scalar_dtype(kind) is not None


def field_of(name: str, kind: pyarrow.DataType, said: Sequence[int | None] | None = None) -> Field | None:
    """Return a column of one type as a field.

    Args:
        name: of the column.
        kind: its type.
        said: the shape of its arrays, if they are stored as lists of lists; an axis may vary.

    Returns:
        None: no field has that type (unions, intervals and others). Bytes of another type than
        `is_bytes` are JSON.
    """
    types = arrow_module("pyarrow.types")
    if _is_permuted(kind):
        return None
    kind = kind if _extension(kind) else storage_of(kind)
    if types.is_dictionary(kind):
        kind = kind.value_type
    if is_bytes(kind) or types.is_null(kind):
        return Field(name)
    sizes, inner = _levels(kind)
    dtype = scalar_dtype(inner)
    if types.is_fixed_size_binary(inner) and not types.is_decimal(inner):
        sizes, dtype = [*sizes, inner.byte_width], np.dtype(np.uint8)
    elif sizes and dtype is None and is_bytes(inner) and not is_text(inner):
        sizes, dtype = [*sizes, None], np.dtype(np.uint8)
    if dtype is None:
        return Field(name) if (sizes or types.is_map(kind)) and is_json(kind) else None
    if 0 in sizes:
        return None
    if said is not None and None not in said[1:] and (None not in sizes or len(sizes) == len(said)):
        below = tuple(size for size in said[1:] if size is not None)
        return Field(name, dtype, None, below) if said[0] is None else Field(name, dtype, (said[0], *below))
    depth = max((i + 1 for i, size in enumerate(sizes) if size is None), default=0)
    fixed = tuple(size for size in sizes[depth:] if size is not None)
    return Field(name, dtype, None, fixed, depth=depth) if depth else Field(name, dtype, fixed)


def _levels(kind: pyarrow.DataType) -> tuple[list[int | None], pyarrow.DataType]:
    """Return the sizes of lists within lists (None: they vary), and the type of their elements."""
    types = arrow_module("pyarrow.types")
    sizes: list[int | None] = []
    while True:
        if _extension(kind) == _TENSOR:
            sizes += kind.shape
        elif is_list(kind) or types.is_fixed_size_list(kind):
            sizes.append(None if is_list(kind) else kind.list_size)
        else:
            return sizes, kind
        kind = kind.value_type if _extension(kind.value_type) else element_of(kind)


def element_of(kind: pyarrow.DataType) -> pyarrow.DataType:
    """Return the type of a list's elements; of a dictionary of numbers, that of the numbers."""
    kind = storage_of(kind.value_type)
    is_of_numbers = arrow_module("pyarrow.types").is_dictionary(kind) and not is_bytes(storage_of(kind.value_type))
    return storage_of(kind.value_type) if is_of_numbers else kind


def _units_of(kind: pyarrow.DataType, name: str) -> Iterator[tuple[str, str]]:
    """Yield what the integers in a type count, with the place of each: `Field.units`."""
    types = arrow_module("pyarrow.types")
    kind = storage_of(kind)
    if types.is_dictionary(kind):
        kind = storage_of(kind.value_type)
    if types.is_integer(kind):
        yield name, ""
    elif types.is_date(kind):
        yield name, "days" if types.is_date32(kind) else "ms"
    elif types.is_temporal(kind):
        yield name, kind.unit
    for member in (kind.field(i) for i in range(kind.num_fields)):
        yield from _units_of(member.type, f"{name}.{member.name}")


def _has_no_values(kind: pyarrow.DataType) -> bool:
    """Return whether a type is null, or lists of it: writers choose it if they saw no value."""
    return bool(arrow_module("pyarrow.types").is_null(_levels(storage_of(kind))[1]))


def _said_shape(field: pyarrow.Field) -> list[int | None] | None:
    """Return the shape that `datasets` notes of a column of arrays; None: it is no such column."""
    metadata = field.metadata or {}
    if str(getattr(field.type, "extension_name", "")).startswith(_HF_ARRAYS):
        shape = list(field.type.shape)
    elif metadata.get(_NAME, b"").startswith(_HF_ARRAYS.encode()):
        try:
            shape = json.loads(metadata.get(_METADATA, b""))[0]
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
    else:
        return None
    is_shape = isinstance(shape, list) and all(size is None or (type(size) is int and size > 0) for size in shape)
    return shape if is_shape and shape and math.prod(size or 1 for size in shape) < 2**32 else None


def columns_of(
    schema: pyarrow.Schema, wanted: Sequence[str] | None, path: str, fill_null: FillNull = None
) -> tuple[Column, ...]:
    """Return the fields of a file's samples.

    They are in the order of ``wanted``, or of the schema if that is None.

    Raises:
        ValueError: a name that is wanted is none or is there twice, no field has a column's type,
            or ``fill_null`` names no column, or has a value that the column cannot have.
        CorruptData: a name is not UTF-8.
    """
    try:
        return _columns_of(schema, wanted, path, fill_null)
    except UnicodeDecodeError as error:  # pyarrow looks at names when they are asked for
        raise CorruptData(f"{path}: the name of a column is damaged: {error}", path) from error


def _columns_of(
    schema: pyarrow.Schema, wanted: Sequence[str] | None, path: str, fill_null: FillNull
) -> tuple[Column, ...]:
    found: dict[str, tuple[pyarrow.Field, tuple[int, ...]]] = {}
    called: dict[str, set[str]] = {}  # the names that each is wanted by: its own, and those of the structs around it
    for names_to_it, member, places in flattened(schema, (), ()):
        *around, name = itertools.accumulate(names_to_it, "{}.{}".format)
        called[name] = {name, *around} | called.get(name, set())
        if name in found and (wanted is None or not called[name].isdisjoint(wanted)):
            raise ValueError(f"{path} has two columns {name!r}: leave them out (columns=), or rename one")
        found[name] = member, places
    if not found:
        raise ValueError(f"{path} has no columns")
    names = tuple(found) if wanted is None else _expanded(wanted, called, path)
    columns = []
    for name in names:
        member, places = found[name]
        field = field_of(name, member.type, _said_shape(member))
        if field is None or (field.shape and 0 in field.shape):
            others = tuple(other for other in names if other != name)
            remedy = f"cast it, or leave it out, as with columns={others}" if others else "cast it"
            raise ValueError(
                f"{path}: column {name!r} is of the type {member.type}, which has no form in a batch: {remedy}"
            )
        units = ((name, _NO_VALUES),) if _has_no_values(member.type) else tuple(_units_of(member.type, name))
        field = dataclasses.replace(field, units=units)
        columns.append(_filled(Column(field, places), fill_null, path))
    unknown = [name for name, _ in fill_null if name not in names] if isinstance(fill_null, tuple) else []
    if unknown:
        raise ValueError(
            f"{path} has no column {unknown[0]!r}, which fill_null names: it has {', '.join(map(repr, names))}"
        )
    return tuple(columns)


def _filled(column: Column, fill_null: FillNull, path: str) -> Column:
    """Return a column with what takes the place of its nulls.

    Raises:
        ValueError: the column is named, and its dtype has no such value.
    """
    field = column.field
    is_named = isinstance(fill_null, (tuple, Mapping))
    value = dict(fill_null).get(field.name) if isinstance(fill_null, (tuple, Mapping)) else fill_null
    if value is None or field.dtype is None or _has_value(field.dtype, value):
        return column._replace(fill=value)
    if not is_named:  # it is meant for other columns, if this one has no nulls
        return column._replace(unfit=value)
    raise ValueError(f"{path}: fill_null has {value!r} for column {field.name!r}, which {field.dtype} has no value for")


def _has_value(dtype: np.dtype, value: float) -> bool:
    """Return whether numbers of a dtype can have a value; floats have the nearest one."""
    if dtype.kind == "f":
        return value != value or abs(value) == math.inf or abs(value) <= float(np.finfo(dtype).max)
    if value != value or value in (math.inf, -math.inf) or int(value) != value:
        return False
    return value in (0, 1) if dtype.kind == "b" else np.iinfo(dtype).min <= value <= np.iinfo(dtype).max


def flattened(
    fields: Sequence[pyarrow.Field], names: tuple[str, ...], places: tuple[int, ...]
) -> Iterator[tuple[tuple[str, ...], pyarrow.Field, tuple[int, ...]]]:
    """Yield names, field and places of all columns; a struct is its members."""
    is_struct = arrow_module("pyarrow.types").is_struct
    for place, field in enumerate(fields):
        here = (*names, field.name), (*places, place)
        stored = storage_of(field.type)
        if is_struct(stored):
            yield from flattened([stored.field(i) for i in range(stored.num_fields)], *here)
        else:
            yield here[0], field, here[1]


def _expanded(wanted: Sequence[str], called: Mapping[str, Collection[str]], path: str) -> tuple[str, ...]:
    """Return ``wanted`` with the names of all members in the place of a struct's name."""
    expanded: dict[str, None] = {}
    members_of: dict[str, list[str]] = {}
    for member, names in called.items():
        for name in names:
            members_of.setdefault(name, []).append(member)
    for name in wanted:
        members = members_of.get(name)
        if not members:
            has = ", ".join(map(repr, called))
            raise ValueError(f"{path} has no column {name!r}: it has {has}{partitions.hint_about(name, path)}")
        expanded.update(dict.fromkeys(members))
    return tuple(expanded)


def value_bytes(field: Field) -> int:
    """Return the bytes of a value, if all are of one size; else of an element."""
    return field.element_dtype.itemsize * math.prod(field.shape or ())


def nulls_among_numbers(path: str, column: Column) -> ValueError:
    """Return the error for nulls among values of one size, or in lists."""
    name = column.field.name
    if column.unfit is not None:
        return ValueError(
            f"{path}: column {name!r} has nulls, and fill_null={column.unfit!r} is no value of {column.field.dtype}: "
            f"pass one that is, as in fill_null={{{name!r}: 0}}, or leave the column out (columns=)"
        )
    # pandas writes NaN as null.
    one, other = ("float('nan')",) * 2 if column.field.element_dtype.kind == "f" else ("0", "-100")
    return ValueError(
        f"{path}: column {name!r} has nulls, which a tensor has no value for: say what takes their place, as in "
        f"fill_null={one} or fill_null={{{name!r}: {other}}}, an argument of gdsdata.formats.Arrow, Parquet and "
        f"LitData, or leave it out (columns=)"
    )


def _refuse_no_values(first: Sequence[Field], other: Sequence[Field], paths: tuple[str, str]) -> None:
    """Refuse a column that has numbers in one file, and by its type no values in the other one.

    Raises:
        ValueError: there is one.
    """
    others = {field.name: field for field in other}
    for one, two in ((field, others.get(field.name, field)) for field in first):
        for lacking, known, path in ((one, two, paths[0]), (two, one, paths[1])):
            if (one.name, _NO_VALUES) in lacking.units and known.dtype is not None:
                raise ValueError(
                    f"{path}: column {one.name!r} has only nulls or empty lists, so its type says none of its values. "
                    f"It is {known.dtype} in the other file, {paths[path == paths[0]]}: write it with that type, or "
                    "leave it out (columns=)"
                )


def check_alike(first: Sequence[Field], other: Sequence[Field], paths: tuple[str, str]) -> None:
    """Check that two files' samples have the same fields, whose integers count the same.

    Raises:
        ValueError: they have not.
    """
    if tuple(first) != tuple(other):
        _refuse_no_values(first, other, paths)
        said = [
            ", ".join(f"{one.name}: {one.dtype or 'bytes'}{one.shape or ''}" for one in fields)
            for fields in (first, other)
        ]
        raise ValueError(
            f"{paths[0]} has the columns ({said[0]}), and {paths[1]} ({said[1]}): read them as separate datasets, or "
            "name what they share with columns="
        )
    known = dict(itertools.chain.from_iterable(field.units for field in first))
    for name, unit in itertools.chain.from_iterable(field.units for field in other):
        expected = known.get(name, unit)
        if expected != unit:
            bare = "integers without a unit"
            raise ValueError(
                f"{paths[0]} counts column {name!r} in {expected or bare}, and {paths[1]} in {unit or bare}: cast "
                f"it to one type, read them as separate datasets, or leave it out (columns=)"
            )

"""How many nodes and buffers Arrow's types have in a record batch, and the ids of dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gdsdata.formats.arrow_messages import Message, Table
from gdsdata.formats.columns import arrow_module, is_bytes, is_list, is_view, scalar_dtype, storage_of

if TYPE_CHECKING:
    import pyarrow

# Members of the tables of FlatBuffers (``format/Schema.fbs``).
_SCHEMA_FIELDS, _FIELD_DICTIONARY, _FIELD_CHILDREN, _DICTIONARY_ID = 1, 4, 5, 0


def lost_validity(kind: pyarrow.DataType) -> bool:
    """Return whether arrays of a type have a buffer of validity in metadata before V5 alone."""
    types = arrow_module("pyarrow.types")
    return bool(types.is_union(kind) or types.is_run_end_encoded(kind))


def buffers_of(kind: pyarrow.DataType, is_old: bool = False) -> int:
    """Return how many buffers an array has, without those of views' values and inner arrays.

    Args:
        kind: its type.
        is_old: see `Message`.

    Raises:
        ValueError: this reader does not know the type.
    """
    types = arrow_module("pyarrow.types")
    kind = storage_of(kind)
    if types.is_null(kind):
        return 0
    if lost_validity(kind):
        own = 0 if types.is_run_end_encoded(kind) else 1 if kind.mode == "sparse" else 2
        return own + is_old
    if (is_bytes(kind) and not is_view(kind)) or _is_list_view(kind):
        return 3
    if types.is_struct(kind) or types.is_fixed_size_list(kind):
        return 1
    if kind.num_fields == 0 or is_list(kind) or types.is_map(kind) or types.is_dictionary(kind):
        return 2
    raise ValueError(f"a column is of the type {kind}, which this reader cannot pass over: cast it")


def _is_list_view(kind: pyarrow.DataType) -> bool:
    types = arrow_module("pyarrow.types")
    return types.is_list_view(kind) or types.is_large_list_view(kind)


def inner_types(kind: pyarrow.DataType) -> list[pyarrow.DataType]:
    """Return the types of an array's inner arrays. A dictionary's values lie elsewhere."""
    kind = storage_of(kind)
    if arrow_module("pyarrow.types").is_dictionary(kind):
        return []
    return [kind.field(i).type for i in range(kind.num_fields)]


def spanned(kind: pyarrow.DataType) -> tuple[int, int]:
    """Return how many nodes and buffers a column of a type without views has in a record batch.

    The metadata are V5.

    Raises:
        ValueError: this reader does not know the type.
    """
    nodes, buffers = 1, buffers_of(kind)
    for inner in inner_types(kind):
        more_nodes, more_buffers = spanned(inner)
        nodes, buffers = nodes + more_nodes, buffers + more_buffers
    return nodes, buffers


def is_read_dictionary(kind: pyarrow.DataType) -> bool:
    """Return whether a type is a dictionary that is read: of plain values."""
    types = arrow_module("pyarrow.types")
    if not types.is_dictionary(kind):
        return False
    values = storage_of(kind.value_type)
    return values.num_fields == 0 and not types.is_dictionary(values)


def plain_type(kind: pyarrow.DataType) -> pyarrow.DataType:
    """Return a type without extensions, except for bool8, whose storage does not say all of it.

    Null stands for types that are not read: unions, dictionaries of lists, list views and run ends.
    """
    arrow, types = arrow_module(), arrow_module("pyarrow.types")
    if scalar_dtype(kind) == np.bool_:
        return kind
    kind = storage_of(kind)
    if is_read_dictionary(kind):
        return arrow.dictionary(kind.index_type, plain_type(kind.value_type), kind.ordered)
    if types.is_union(kind) or types.is_dictionary(kind) or types.is_run_end_encoded(kind) or _is_list_view(kind):
        return arrow.null()
    fields = [kind.field(i).with_type(plain_type(inner)) for i, inner in enumerate(inner_types(kind))]
    makers: list[tuple[Callable[[pyarrow.DataType], bool], Callable[[], pyarrow.DataType]]] = [
        (types.is_struct, lambda: arrow.struct(fields)),
        (types.is_list, lambda: arrow.list_(fields[0])),
        (types.is_large_list, lambda: arrow.large_list(fields[0])),
        (types.is_fixed_size_list, lambda: arrow.list_(fields[0], kind.list_size)),
        (types.is_map, lambda: arrow.map_(fields[0].type.field(0), fields[0].type.field(1), kind.keys_sorted)),
    ]
    return next((make() for asked, make in makers if asked(kind)), kind)


class Need(NamedTuple):
    """How many bytes the values of an array take in a buffer.

    Attributes:
        bits: of a value.
        more: values that count besides: offsets are one more than values.
    """

    bits: int
    more: int = 0

    def bytes_of(self, length: int) -> int:
        """Return the bytes of so many values."""
        return -(-(length + self.more) * self.bits // 8)


def _needs_of(kind: pyarrow.DataType) -> list[Need]:
    """Return the needs of an array's first buffers, as far as they follow from its length."""
    types = arrow_module("pyarrow.types")
    validity = Need(1)
    if types.is_dictionary(kind):
        return [validity, Need(kind.index_type.bit_width)]
    if is_view(kind):
        return [validity, Need(128)]
    if is_bytes(kind) or is_list(kind) or types.is_map(kind):
        is_large = types.is_large_string(kind) or types.is_large_binary(kind) or types.is_large_list(kind)
        return [validity, Need(64 if is_large else 32, 1)]
    if kind.num_fields or types.is_struct(kind) or types.is_null(kind) or types.is_union(kind):
        return [validity]
    return [validity, Need(kind.bit_width)]


class Placed(NamedTuple):
    """A type as record batches have it. Each batch asks for it, so all is known in advance.

    Attributes:
        kind: the type, without an extension.
        dictionary: id of its dictionary; None: it is none.
        inner: of its inner arrays.
        plain: what `plain_type` returns of the type.
        needs: of its buffers, without those of views' values; None: the buffer itself says it.
        has_views, is_struct, is_null: what kind it is, and whether ``plain`` is null.
        is_bare: values without nulls take no bytes: nulls, and structs and fixed sizes of them.
    """

    kind: pyarrow.DataType
    dictionary: int | None
    inner: tuple[Placed, ...]
    plain: pyarrow.DataType
    needs: tuple[Need | None, ...]
    has_views: bool
    is_struct: bool
    is_null: bool
    is_bare: bool

    @classmethod
    def of(
        cls,
        kind: pyarrow.DataType,
        dictionary: int | None = None,
        inner: tuple[Placed, ...] = (),
        is_old: bool = False,
    ) -> Placed:
        """Return a type with the id of its dictionary, and the types in it.

        Args:
            kind: the type.
            dictionary, inner: attributes.
            is_old: see `Message`.

        Raises:
            ValueError: this reader does not know the type.
        """
        types = arrow_module("pyarrow.types")
        plain, kind = plain_type(kind), storage_of(kind)
        count = buffers_of(kind, is_old)
        needs = [*_needs_of(kind)[:count], *[None] * count][:count]
        is_null = types.is_null(plain)
        takes_bits = any(need is None or need.bits for need in needs[1:])
        is_bare = is_null or (not takes_bits and all(one.is_bare for one in inner))
        return cls(kind, dictionary, inner, plain, tuple(needs), is_view(kind), types.is_struct(kind), is_null, is_bare)

    def dictionaries(self) -> Iterator[tuple[int, Placed]]:
        """Yield id and type of the values of each dictionary that is read."""
        if self.dictionary is not None and is_read_dictionary(self.kind):
            yield self.dictionary, Placed.of(self.kind.value_type)
        for one in self.inner:
            yield from one.dictionaries()


def placed_types(message: Message, schema: pyarrow.Schema) -> tuple[Placed, ...]:
    """Return the types of a schema's columns.

    Args:
        message: of the schema.
        schema: the same, which pyarrow has read and checked.

    Raises:
        struct.error, ValueError: the message is not that of the schema, or this reader does not
            know a type.
    """
    return _placed([field.type for field in schema], message.header.tables(_SCHEMA_FIELDS), message.is_old)


def _placed(kinds: Sequence[pyarrow.DataType], fields: Sequence[Table], is_old: bool) -> tuple[Placed, ...]:
    placed = []
    for kind, field in zip(kinds, fields, strict=True):
        encoding = field.table(_FIELD_DICTIONARY)
        dictionary = None if encoding is None else encoding.integer(_DICTIONARY_ID, "q")
        kinds_in_it = inner_types(kind)
        inner = _placed(kinds_in_it, field.tables(_FIELD_CHILDREN), is_old) if kinds_in_it else ()
        placed.append(Placed.of(kind, dictionary, inner, is_old))
    return tuple(placed)

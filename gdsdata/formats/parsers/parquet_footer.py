"""The row groups in a Parquet footer: the rows of each, and its columns' places.

A pure parser of the needed part of ``FileMetaData``; all else (schema, statistics, ...) is stepped
over. pyarrow gives the same, but ends the whole process if a column's metadata are damaged.

Sources: ``parquet.thrift`` of https://github.com/apache/parquet-format, and of Thrift's compact
protocol https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gdsdata.formats.parsers.damage import damaged

# Kinds of values in the compact protocol; of a field, and of a list's elements.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = range(1, 14)
_WIDTHS = {_BYTE: 1, _DOUBLE: 8, _UUID: 16}
# FileMetaData has at most ten structs, lists and maps within one another.
_MOST_DEEP = 32
# 64 bits take ten bytes of seven.
_LONGEST_VARINT_BYTES = 10


class StoredColumn(NamedTuple):
    """A column of a row group, as its footer has it.

    Nothing is compared with the file or the schema.

    Attributes:
        values: its number, of those of lists and of nulls too.
        compressed_bytes, uncompressed_bytes: of all its pages, with their headers.
        data_page_offset: in the file, of the first.
        dictionary_page_offset: the same, or None.
        file_path: the other file that has the column; as a rule "".
        is_encrypted: what else is said of it may be missing then, and is 0.
    """

    values: int
    compressed_bytes: int
    uncompressed_bytes: int
    data_page_offset: int
    dictionary_page_offset: int | None
    file_path: str
    is_encrypted: bool


class RowGroup(NamedTuple):
    """A row group, as its footer has it.

    Attributes:
        rows: its number.
        columns: in the order of the schema's leaves, if the footer is sound.
    """

    rows: int
    columns: list[StoredColumn]


def row_groups_of(footer: bytes, footer_at: int, path: str) -> list[RowGroup]:
    """Return the row groups of a footer.

    Args:
        footer: begins with a ``FileMetaData``; what is behind it does not matter.
        footer_at: where it begins in the file at ``path``, which is not read.

    Raises:
        CorruptData: it is damaged, or was cut short.
    """
    try:
        fields, _ = _struct(footer, 0, 0, _FILE)
        return fields[_ROW_GROUPS]
    except IndexError as error:
        raise damaged(path, footer_at, len(footer), "by what it says, its footer is longer") from error
    except KeyError as error:
        reason = f"its footer lacks a field that it must have (number {error.args[0] >> 4})"
        raise damaged(path, footer_at, len(footer), reason) from error
    except ValueError as error:
        raise damaged(path, footer_at, len(footer), f"its footer cannot be read ({error})") from error


# Reads a value that begins at a place, so deep within others; gives it, and the place behind it. An
# IndexError, or a ValueError: there is none. Places never decrease, so whatever the bytes say, each
# is seen once.
_Reader = Callable[[bytes, int, int], tuple[Any, int]]


def _struct(data: bytes, at: int, depth: int, wanted: Mapping[int, _Reader]) -> tuple[dict[int, Any], int]:
    """Return the fields that are ``wanted``, by ``number << 4 | kind``.

    A field of another kind is not the one that is meant.
    """
    values = {}
    number = 0
    while header := data[at]:
        at += 1
        kind = header & 15
        if header > 15:
            number += header >> 4
        else:
            number, at = _integer(data, at)
        key = number << 4 | kind
        if key in wanted:
            values[key], at = wanted[key](data, at, depth + 1)
        elif _I16 <= kind <= _I64:  # most are; as in `_varint`
            begin = at
            while data[at] > 127:
                at += 1
            at += 1
            if at - begin > _LONGEST_VARINT_BYTES:
                raise ValueError(f"an integer of {at - begin} bytes")
        elif kind > _FALSE:  # those two are their own values
            at = _behind(data, at, kind, depth + 1)
    return values, at + 1


def _behind(data: bytes, at: int, kind: int, depth: int) -> int:
    """Return the place behind a value of that kind."""
    if kind == _BINARY:
        size_bytes, at = _varint(data, at)
        return at + size_bytes
    if kind == _STRUCT:
        _check_depth(depth)
        return _struct(data, at, depth, {})[1]
    if kind in (_LIST, _SET):
        _check_depth(depth)
        count, kind, at = _list_head(data, at)
        return _behind_all(data, at, (kind,), count, depth)
    if kind == _MAP:
        _check_depth(depth)
        count, at = _varint(data, at)
        if not count:
            return at
        return _behind_all(data, at + 1, (data[at] >> 4, data[at] & 15), count, depth)
    if _I16 <= kind <= _I64:
        return _varint(data, at)[1]
    if kind in _WIDTHS:
        return at + _WIDTHS[kind]
    raise ValueError(f"a value of the kind {kind}, which there is not")


def _behind_all(data: bytes, at: int, kinds: tuple[int, ...], count: int, depth: int) -> int:
    """Return the place behind so many values, or pairs of them."""
    _check_count(data, at, count * len(kinds))
    for _ in range(count):
        for kind in kinds:
            at = at + 1 if kind <= _FALSE and kind else _behind(data, at, kind, depth + 1)  # here a boolean is a byte
    return at


def _list_head(data: bytes, at: int) -> tuple[int, int, int]:
    """Return how many elements a list has, their kind, and the place of the first."""
    header = data[at]
    count, at = _varint(data, at + 1) if header >= 0xF0 else (header >> 4, at + 1)
    return count, header & 15, at


def _check_count(data: bytes, at: int, count: int) -> None:
    if count > len(data) - at:  # each takes a byte at least
        raise ValueError(f"{count} values in {len(data) - at} bytes")


def _check_depth(depth: int) -> None:
    if depth > _MOST_DEEP:
        raise ValueError(f"more than {_MOST_DEEP} values within one another")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read an unsigned integer, of seven bits a byte, the lowest first."""
    octet = data[at]
    if octet < 128:
        return octet, at + 1
    value, shift = octet & 127, 7
    while True:
        at += 1
        octet = data[at]
        value |= (octet & 127) << shift
        if octet < 128:
            break
        shift += 7
        if shift >= 7 * _LONGEST_VARINT_BYTES:
            raise ValueError(f"an integer of more than {_LONGEST_VARINT_BYTES} bytes")
    if value >> 64:
        raise ValueError("an integer of more than 64 bits")
    return value, at + 1


def _integer(data: bytes, at: int, _: int = 0) -> tuple[int, int]:
    """Read a signed integer: the lowest bit is the sign's."""
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _text(data: bytes, at: int, _: int) -> tuple[str, int]:
    size_bytes, at = _varint(data, at)
    return data[at : at + size_bytes].decode(), at + size_bytes  # beyond the end: no struct's end follows


def _is_there(kind: int) -> _Reader:
    return lambda data, at, depth: (True, _behind(data, at, kind, depth))


def _structs(read: _Reader) -> _Reader:
    """Return the reader of a list of structs that ``read`` reads."""

    def structs(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
        count, kind, at = _list_head(data, at)
        if kind != _STRUCT and count:
            raise ValueError(f"a list of the kind {kind} in place of structs")
        _check_count(data, at, count)
        values = []
        for _ in range(count):
            value, at = read(data, at, depth + 1)
            values.append(value)
        return values, at

    return structs


# ------------------------------------------------------------------------------------ the structs of parquet.thrift


# The first five attributes of a `StoredColumn`.
_Sizes = tuple[int, int, int, int, int | None]


def _column(data: bytes, at: int, depth: int) -> tuple[StoredColumn, int]:
    fields, at = _struct(data, at, depth, _CHUNK)
    is_encrypted = _CRYPTO in fields or _ENCRYPTED in fields
    stored: _Sizes = fields.get(_METADATA, _NOTHING) if is_encrypted else fields[_METADATA]
    return StoredColumn(*stored, fields.get(_FILE_PATH, ""), is_encrypted), at


def _metadata(data: bytes, at: int, depth: int) -> tuple[_Sizes, int]:
    fields, at = _struct(data, at, depth, _COLUMN)
    values, compressed, uncompressed, data_page_offset = (fields[key] for key in _SIZES)
    return (values, compressed, uncompressed, data_page_offset, fields.get(_DICTIONARY_PAGE_OFFSET)), at


def _row_group(data: bytes, at: int, depth: int) -> tuple[RowGroup, int]:
    fields, at = _struct(data, at, depth, _GROUP)
    return RowGroup(fields[_ROWS], fields[_COLUMNS]), at


# ColumnMetaData
_VALUES, _UNCOMPRESSED, _COMPRESSED, _DATA_PAGE_OFFSET, _DICTIONARY_PAGE_OFFSET = (
    number << 4 | _I64 for number in (5, 6, 7, 9, 11)
)
_SIZES = (_VALUES, _COMPRESSED, _UNCOMPRESSED, _DATA_PAGE_OFFSET)
_NOTHING: _Sizes = (0, 0, 0, 0, None)
_COLUMN = dict.fromkeys((*_SIZES, _DICTIONARY_PAGE_OFFSET), _integer)
# ColumnChunk
_FILE_PATH, _METADATA, _CRYPTO, _ENCRYPTED = 1 << 4 | _BINARY, 3 << 4 | _STRUCT, 8 << 4 | _STRUCT, 9 << 4 | _BINARY
_CHUNK = {_FILE_PATH: _text, _METADATA: _metadata, _CRYPTO: _is_there(_STRUCT), _ENCRYPTED: _is_there(_BINARY)}
# RowGroup
_COLUMNS, _ROWS = 1 << 4 | _LIST, 3 << 4 | _I64
_GROUP = {_COLUMNS: _structs(_column), _ROWS: _integer}
# FileMetaData
_ROW_GROUPS = 4 << 4 | _LIST
_FILE = {_ROW_GROUPS: _structs(_row_group)}

"""The messages of Arrow IPC files and streams: their metadata, which are FlatBuffers."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gdsdata.formats.columns import arrow_module
from gdsdata.formats.parsers import magics
from gdsdata.formats.parsers.damage import damaged

if TYPE_CHECKING:
    import pyarrow

_STREAM_AT = 8  # in a file: behind the magic, on a multiple of 8
_FRAME = struct.Struct("<Ii")
_OLD_FRAME_BYTES = 4  # before Arrow 0.15
# Schemas of thousands of columns take far less; a length that lies must not become memory.
_LONGEST_METADATA_BYTES = 2**26
# The root of a message lies in its first bytes.
_BEGIN_BYTES = 256

SCHEMA, DICTIONARY, RECORDS = 1, 2, 3  # types of messages
_METADATA_V5 = 4  # as messages have it; Arrow 1.0 (2020) and later ones write it
DICTIONARY_IS_DELTA = 2  # the member of a dictionary's header

# Exactly so many bytes from an offset.
Read = Callable[[int, int], bytes]


class Table(NamedTuple):
    """A table of a FlatBuffer: reads beyond its bytes are a struct.error.

    Attributes:
        data: the whole buffer.
        at: place of the table in it.
    """

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

    def table(self, member: int) -> Table | None:
        place = self.place(member)
        return None if place is None else Table(self.data, place + self.number("I", place))

    def tables(self, member: int) -> list[Table]:
        """Return a vector of tables."""
        place = self.place(member)
        if place is None:
            return []
        vector = place + self.number("I", place)
        count = self.number("I", vector)
        if vector + 4 + 4 * count > len(self.data):
            raise struct.error(f"a vector of {count} does not fit")
        slots = range(vector + 4, vector + 4 + 4 * count, 4)
        return [Table(self.data, slot + self.number("I", slot)) for slot in slots]

    def int64s(self, member: int, a_row: int) -> np.ndarray:
        """Return a vector of int64, or of structs of ``a_row`` of them: (n, a_row)."""
        place = self.place(member)
        if place is None:
            return np.empty((0, a_row), np.int64)
        vector = place + self.number("I", place)
        count = self.number("I", vector)
        if vector + 4 + 8 * a_row * count > len(self.data):
            raise struct.error(f"a vector of {count} does not fit")
        return np.frombuffer(self.data, "<i8", a_row * count, vector + 4).reshape(-1, a_row)


class Message(NamedTuple):
    """A message at an offset of its file.

    Attributes:
        at: offset of the message.
        frame: its metadata, with the frame before them.
        is_old: its metadata are of a version before V5.
        kind: type of the message.
        header: in the metadata.
        body_at, body_bytes: extent of its body in the file.
    """

    at: int
    frame: bytes
    is_old: bool
    kind: int
    header: Table
    body_at: int
    body_bytes: int


def messages(read: Read, size_bytes: int, path: str) -> Iterator[Message]:
    """Yield the messages of a stream, or of a file, which has the same stream in it."""
    is_file = _is_file(read, size_bytes)
    at = _STREAM_AT if is_file else 0
    if is_file and read(max(0, size_bytes - len(magics.ARROW)), len(magics.ARROW)) != magics.ARROW:
        raise damaged(path, 0, size_bytes, "it does not end with the magic of an Arrow file: it was cut short")
    while True:
        if at + _FRAME.size > size_bytes:
            reason = "the file ends without an end mark: it was cut short, or its writer was not closed"
            raise damaged(path, at, size_bytes - at, reason)
        prefix = read(at, _FRAME.size)
        continues, metadata_bytes = _FRAME.unpack(prefix)
        if is_file and at == _STREAM_AT and continues != magics.ARROW_CONTINUES and _is_schema(read, at, size_bytes):
            schema, others_at = _by_footer(read, size_bytes, path)
            yield schema
            if others_at is None:
                return
            at = others_at
            continue
        body_at = at + _FRAME.size + metadata_bytes
        is_sound = continues == magics.ARROW_CONTINUES and 0 <= metadata_bytes <= _LONGEST_METADATA_BYTES
        if not is_sound or body_at > size_bytes:
            if at <= _STREAM_AT and _is_schema(read, at + _OLD_FRAME_BYTES, size_bytes):
                raise ValueError(
                    f"{path} is in the format of Arrow before version 0.15 (2019), which is not read: read it with "
                    f"pyarrow.ipc, and write it again"
                )
            raise damaged(path, at, _FRAME.size, f"no message begins here (its metadata would have {metadata_bytes})")
        if metadata_bytes == 0:
            break
        frame = prefix + read(at + _FRAME.size, metadata_bytes)
        try:
            message = parsed(frame, at, body_at)
        except struct.error as error:
            raise damaged(path, at, len(frame), f"the metadata of a message lie ({error})") from error
        if not 0 <= message.body_bytes <= size_bytes - body_at:
            reason = f"a message has {message.body_bytes} bytes by its metadata, and {size_bytes - body_at} are left"
            raise damaged(path, body_at, size_bytes - body_at, reason)
        yield message
        at = body_at + message.body_bytes
    if not is_file and body_at < size_bytes:
        raise damaged(path, body_at, size_bytes - body_at, "more follows the stream's end mark")


def _is_schema(read: Read, at: int, size_bytes: int) -> bool:
    """Return whether the metadata of a schema begin at a place.

    Polars 2.1 writes those of a file's first message without a frame.
    """
    begin = read(at, max(0, min(size_bytes - at, _BEGIN_BYTES)))
    try:
        return Table(begin, struct.unpack_from("<I", begin)[0]).integer(1, "B") == SCHEMA
    except struct.error:
        return False


def _by_footer(read: Read, size_bytes: int, path: str) -> tuple[Message, int | None]:
    """Return the message of the schema in a file's footer, and where the other messages begin.

    Raises:
        CorruptData: the footer lies.
    """
    length_at = size_bytes - len(magics.ARROW) - 4
    footer_bytes = int.from_bytes(read(length_at, 4), "little")
    footer_at = length_at - footer_bytes
    if footer_at < _STREAM_AT or footer_bytes > _LONGEST_METADATA_BYTES:
        raise damaged(path, length_at, 4, f"its schema has no frame, and its footer has {footer_bytes} bytes")
    footer = read(footer_at, footer_bytes)
    try:
        root = Table(footer, struct.unpack_from("<I", footer)[0])
        schema, blocks = root.table(1), [*root.int64s(2, 3)[:, 0].tolist(), *root.int64s(3, 3)[:, 0].tolist()]
        if schema is None or not all(_STREAM_AT < begin < footer_at for begin in blocks):
            raise struct.error("no schema, or messages that are not before it")
        # A message is its root's place, the places of its members, and these: its header's place,
        # its version (V5) and its header's type. The header is in the footer, which follows.
        header = 12 + schema.at
        message = struct.pack("<I6HiIHBx4x", 16, 12, 12, 8, 10, 4, 0, 12, header, 4, SCHEMA) + footer
        frame = _FRAME.pack(magics.ARROW_CONTINUES, len(message)) + message
        return parsed(frame, footer_at, length_at), min(blocks, default=None)
    except struct.error as error:
        raise damaged(
            path, footer_at, footer_bytes, f"its schema has no frame, and its footer lies ({error})"
        ) from error


def parsed(frame: bytes, at: int, body_at: int) -> Message:
    """Return the message of a frame with its metadata.

    Raises:
        struct.error: the metadata lie.
    """
    root = Table(frame, _FRAME.size + struct.unpack_from("<I", frame, _FRAME.size)[0])
    header = root.table(2)
    if header is None:
        raise struct.error("a message without a header")
    is_old = root.integer(0, "h") < _METADATA_V5
    return Message(at, frame, is_old, root.integer(1, "B"), header, body_at, root.integer(3, "q"))


def schema_of(message: Message, path: str) -> pyarrow.Schema:
    """Return the schema of a message.

    Raises:
        CorruptData: it cannot be read.
        ValueError: its values are big-endian, or it has a type that pyarrow lacks.
    """
    arrow, ipc = arrow_module(), arrow_module("pyarrow.ipc")
    try:
        schema = ipc.read_schema(arrow.py_buffer(message.frame))
        is_big_endian = message.header.integer(0, "h") != 0
    except NotImplementedError as error:
        from gdsdata.formats.tables import unknown_schema  # late: this is for an error

        raise unknown_schema(path, error) from error
    except (arrow.ArrowException, OSError, ValueError, KeyError, struct.error, MemoryError) as error:
        raise damaged(path, message.at, len(message.frame), f"the schema cannot be read ({error})") from error
    if is_big_endian:
        raise ValueError(f"{path} was written with big-endian values: write it again on a little-endian machine")
    return schema


def record_batches(read: Read, size_bytes: int, path: str) -> Iterator[Message]:
    """Yield the message of the schema, then those of the record batches.

    Raises:
        CorruptData: metadata lie, or the file ends before its end mark.
    """
    return (message for message in batches_and_dictionaries(read, size_bytes, path) if message.kind != DICTIONARY)


def batches_and_dictionaries(read: Read, size_bytes: int, path: str) -> Iterator[Message]:
    """Yield the message of the schema, then those of dictionaries and record batches.

    It raises what `record_batches` does.
    """
    has_schema = False
    for message in messages(read, size_bytes, path):
        if message.kind not in ((RECORDS, DICTIONARY) if has_schema else (SCHEMA,)):
            raise damaged(path, message.at, 0, f"a message of type {message.kind} stands where none belongs")
        has_schema = True
        yield message
    if not has_schema:
        raise damaged(path, 0, size_bytes, "it has no schema")


def late_dictionaries(read: Read, size_bytes: int, path: str) -> list[Message]:
    """Return a file's whole dictionaries that follow a record batch, which may use them already.

    A stream has none. It raises what `record_batches` does.
    """
    if not _is_file(read, size_bytes):
        return []
    found = batches_and_dictionaries(read, size_bytes, path)
    late = itertools.dropwhile(lambda message: message.kind != RECORDS, found)
    try:
        return [one for one in late if one.kind == DICTIONARY and not one.header.integer(DICTIONARY_IS_DELTA, "B")]
    except struct.error as error:
        raise damaged(path, 0, size_bytes, f"the metadata of a dictionary lie ({error})") from error


def _is_file(read: Read, size_bytes: int) -> bool:
    return size_bytes >= len(magics.ARROW) and read(0, len(magics.ARROW)) == magics.ARROW

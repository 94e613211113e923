"""Arrays of record batches and dictionaries of Arrow IPC: what metadata say, and their making."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gdsdata.formats.arrow_layout import Placed
from gdsdata.formats.arrow_messages import DICTIONARY_IS_DELTA, Message, Table
from gdsdata.formats.columns import arrow_module

if TYPE_CHECKING:
    import pyarrow

# A record batch may take so much when it is decoded: a number that lies must not become memory.
LARGEST_BATCH_BYTES = 2**32
_CODECS = {0: "lz4", 1: "zstd"}
_PREFIX = struct.Struct("<q")  # of a compressed buffer: its length when decompressed
# Values in the lists of a compressed record batch, and of a type whose values take no bytes.
_MOST_IN_LISTS = 2**27
# Writers may write more of a buffer than its values take.
_SPARE_TIMES, _SPARE_BYTES = 2, 4096
# Python's object of a value and its text in JSON take about so many bytes.
_OBJECT_BYTES = 64


class Buffers(NamedTuple):
    """Buffers of a column.

    Attributes:
        begin: of the column's extent in the batch's body.
        content: of the extent.
        codec: by which each buffer is compressed; None: none is.
    """

    begin: int
    content: memoryview
    codec: str | None

    def buffer(self, place: Place) -> pyarrow.Buffer | None:
        """Return a buffer, which begins on a multiple of 8; None if it is empty."""
        arrow = arrow_module()
        if not place.length:
            return None
        content = self.content[place.begin - self.begin : place.begin - self.begin + place.length]
        if self.codec is not None:
            unpacked_bytes = place.unpacked_bytes(content)
            if len(content) < _PREFIX.size or _PREFIX.unpack_from(content)[0] >= 0:
                return _decompressed(content[_PREFIX.size :], unpacked_bytes, self.codec)
            content = content[_PREFIX.size :]
        buffer = arrow.py_buffer(content)
        return buffer if buffer.address % 8 == 0 else arrow.py_buffer(bytes(content))


def _decompressed(content: memoryview, unpacked_bytes: int, codec: str) -> pyarrow.Buffer:
    """Return a buffer that was compressed, without its prefix.

    Raises:
        ValueError: it has more or fewer bytes than ``unpacked_bytes``.
        OSError: it is damaged.
    """
    arrow = arrow_module()
    if codec != "lz4":
        return arrow.decompress(content, unpacked_bytes, codec=codec)
    # For LZ4, pyarrow's decompress does not check that it filled its output (seen with 26.0).
    with arrow.CompressedInputStream(arrow.BufferReader(content), codec) as stream:
        found = stream.read_buffer(unpacked_bytes + 1)
    if found.size != unpacked_bytes:
        count = "more" if found.size > unpacked_bytes else found.size
        raise ValueError(f"a buffer should have {unpacked_bytes} bytes when decompressed, and has {count}")
    return found


class Place(NamedTuple):
    """The place of a buffer in a body.

    Attributes:
        begin, length: of its bytes there, in bytes.
        needed: bytes that its values take; None: the buffer itself says it.
    """

    begin: int
    length: int
    needed: int | None

    def unpacked_bytes(self, prefix: bytes | memoryview) -> int:
        """Return the length of a compressed buffer when it is decompressed.

        Args:
            prefix: its first 8 bytes, or more.

        Raises:
            ValueError: it cannot be so long.
        """
        if self.length < _PREFIX.size:
            raise ValueError(f"a compressed buffer has {self.length} bytes")
        (said,) = _PREFIX.unpack_from(prefix)
        unpacked_bytes = self.length - _PREFIX.size if said == -1 else said  # -1: it is not compressed
        most = LARGEST_BATCH_BYTES if self.needed is None else _SPARE_TIMES * self.needed + _SPARE_BYTES
        if not 0 <= unpacked_bytes <= most:
            raise ValueError(f"a buffer would have {unpacked_bytes} bytes when decompressed, and the most is {most}")
        return unpacked_bytes


class Array(NamedTuple):
    """An array: its type, as `plain_type` returns it, and its parts.

    Attributes:
        kind: its type.
        length: its values.
        buffers: with validity first, if the type has one.
        inner: those in it.
        dictionary: id of its dictionary; None: it has none.
    """

    kind: pyarrow.DataType
    length: int
    buffers: tuple[Place, ...]
    inner: tuple[Array, ...]
    dictionary: int | None = None

    def extent(self) -> tuple[int, int]:
        """Return offset in the body and length of the stretch that has all buffers."""
        places = [place for place in self._places() if place.length]
        if not places:
            return 0, 0
        begin = min(place.begin for place in places)
        return begin, max(place.begin + place.length for place in places) - begin

    def unpacked_bytes(self, codec: str | None, read: Callable[[int, int], bytes]) -> int:
        """Return the bytes of all buffers when they are decompressed.

        Args:
            codec: by which they are compressed; None: they are not.
            read: gives bytes of the body: from an offset, so many.

        Raises:
            ValueError: a buffer lies about its length.
        """
        places = [place for place in self._places() if place.length]
        if codec is None:
            return sum(place.length for place in places)
        return sum(
            place.unpacked_bytes(read(place.begin, min(place.length, _PREFIX.size)))
            if place.needed is None
            else place.needed
            for place in places
        )

    def _places(self) -> Sequence[Place]:
        return [place for one in self.arrays() for place in one.buffers] if self.inner else self.buffers

    def arrays(self) -> tuple[Array, ...]:
        """Return this array, and all that are in it."""
        return (self, *(found for one in self.inner for found in one.arrays())) if self.inner else (self,)

    def json_bytes(self) -> int:
        """Return the least memory of the values as JSON: of their objects, and members' names."""
        return sum(one.length * (_OBJECT_BYTES + one._name_bytes()) for one in self.arrays())

    def _name_bytes(self) -> int:
        if not arrow_module("pyarrow.types").is_struct(self.kind):
            return 0
        return sum(len(self.kind.field(i).name.encode()) for i in range(self.kind.num_fields))

    def made(self, buffers: Buffers, dictionaries: Mapping[int, pyarrow.Array]) -> pyarrow.Array:
        """Return pyarrow's array.

        Raises:
            KeyError: its dictionary is not among ``dictionaries``.
            Exception: the buffers are damaged.
        """
        arrow = arrow_module()
        if not self.length or arrow.types.is_null(self.kind):  # buffers of no values may have those of other batches
            return arrow.nulls(self.length, self.kind)
        inner = [one.made(buffers, dictionaries) for one in self.inner]
        found = [buffers.buffer(place) for place in self.buffers]
        empty = arrow.py_buffer(bytes(8))  # of offsets or values that are none
        found[1:] = [empty if one is None else one for one in found[1:]]
        if self.dictionary is not None:
            values = dictionaries[self.dictionary]
            if not len(values):  # indices behind nulls of a struct are 0
                values = arrow.nulls(1, values.type)
            return arrow.DictionaryArray.from_buffers(self.kind, self.length, found, values)
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
    columns: tuple[Array, ...]
    codec: str | None
    body_at: int

    @classmethod
    def of(cls, message: Message, kinds: Sequence[Placed]) -> Batch:
        """Return the batch of a message; ``kinds`` are its columns' types.

        Raises:
            ValueError, struct.error: the metadata lie, or a type cannot be passed over.
        """
        rows, codec = message.header.integer(0, "q"), _codec_of(message.header)
        take = _Taking(message.header, message.body_bytes, codec is not None)
        columns = tuple(take.array(kind, rows) for kind in kinds)
        return cls(rows, columns, codec, message.body_at)


class DictionaryPart(NamedTuple):
    """The metadata of a message with values of a dictionary.

    Attributes:
        id: of the dictionary.
        is_delta: the values follow those of earlier messages; else they take their place.
        values: the array.
        codec: by which its buffers are compressed; None: they are not.
        body_at: offset of its body.
    """

    id: int
    is_delta: bool
    values: Array
    codec: str | None
    body_at: int

    @classmethod
    def of(cls, message: Message, kinds: Mapping[int, Placed]) -> DictionaryPart | None:
        """Return the values of a message; None: ``kinds``, types by id, has no such dictionary.

        Raises:
            ValueError, struct.error: the metadata lie.
        """
        found, data = message.header.integer(0, "q"), message.header.table(1)
        if found not in kinds:
            return None
        if data is None:
            raise struct.error("a dictionary without values")
        codec = _codec_of(data)
        take = _Taking(data, message.body_bytes, codec is not None)
        values = take.array(kinds[found])
        return cls(found, message.header.integer(DICTIONARY_IS_DELTA, "B") != 0, values, codec, message.body_at)


def _codec_of(header: Table) -> str | None:
    compression = header.table(3)
    if compression is None:
        return None
    codec = _CODECS.get(compression.integer(0, "b"))
    if codec is None:
        raise ValueError("it is compressed by a codec that does not exist")
    return codec


class _Taking:
    """Takes the nodes and buffers of a record batch in their order."""

    def __init__(self, header: Table, body_bytes: int, is_compressed: bool) -> None:
        self._nodes = iter(header.int64s(1, 2).tolist())
        self._buffers = iter(header.int64s(2, 2).tolist())
        self._views = iter(header.int64s(4, 1).tolist())
        self._body_bytes = body_bytes
        # Other values take a bit of some buffer: a number that lies must not become memory.
        self._most_in_lists = max(8 * body_bytes, _MOST_IN_LISTS if is_compressed else 0)

    def array(self, placed: Placed, rows: int | None = None) -> Array:
        """Return the next array, of ``rows`` values if that is known."""
        length, nulls = self._next(self._nodes, "nodes")
        if length < 0 or nulls < 0 or (rows is not None and length != rows):
            raise ValueError(f"a column has {length} values with {nulls} nulls")
        if rows is None and length > (_MOST_IN_LISTS if placed.is_bare else self._most_in_lists):
            raise ValueError(f"lists have {length} values in {self._body_bytes} bytes")
        buffers = [self._buffer(None if need is None else need.bytes_of(length)) for need in placed.needs]
        if placed.has_views:
            (count,) = self._next(self._views, "counts of buffers")
            if not 0 <= count <= self._body_bytes:
                raise ValueError(f"a column of views has {count} buffers")
            buffers += [self._buffer(None) for _ in range(count)]
        inner = tuple(self.array(one, length if placed.is_struct else None) for one in placed.inner)
        if placed.is_null:  # also for what is in no wanted column
            return Array(placed.plain, length, (), ())
        return Array(placed.plain, length, tuple(buffers), inner, placed.dictionary)

    def _buffer(self, needed: int | None) -> Place:
        begin, length = self._next(self._buffers, "buffers")
        if begin < 0 or length < 0 or begin + length > self._body_bytes:
            raise ValueError(f"a buffer of {length} bytes at {begin} is not in its {self._body_bytes}")
        return Place(begin, length, needed)

    @staticmethod
    def _next(numbers: Iterator[list[int]], name: str) -> list[int]:
        found = next(numbers, None)
        if found is None:
            raise ValueError(f"it has too few {name}")
        return found

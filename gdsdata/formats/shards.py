"""MDS's and LitData's shards, listed in an index.json: offsets, then samples.

A shard is u32 N; u32 offset[N + 1], from the file's start, the last one its end; then N samples. A
sample is the u32 size of each of its columns that carries one; then the columns. All numbers are
little endian.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from gdsdata.distinct import distinct
from gdsdata.errors import CorruptData
from gdsdata.formats.extents import Extents
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.index import first_samples
from gdsdata.formats.parsers.magics import SHARDS_INDEX
from gdsdata.formats.shard_lists import LARGEST_BYTES
from gdsdata.formats.stretch_reader import StretchReader
from gdsdata.storage.heads import read_heads, sizes_of
from gdsdata.storage.opened import of_each

# numpy's and torch's own limit.
MOST_AXES = 64
# Read of an array's head at first: up to 16 axes of MDS's usual widths, 8 of LitData's.
_ARRAY_HEAD_BYTES = 40
# Tables of shards that are in memory together. `read_heads` reads the first files one by one, so it
# needs many of them to have several threads wait for slow storage.
_TABLES_AT_ONCE_BYTES = 2**26
# Threads that look at samples of slow storage. They wait for opens and reads.
_READERS = 8


class Shard(NamedTuple):
    """A shard as index.json has it.

    Attributes:
        path: of the shard; of a compressed one, its path once it is unpacked.
        size_bytes: of this file.
        samples: that it holds.
        listed_in: path of index.json.
        packed: path of the file that is there, if the shard was compressed as a whole.
        compression: how ``packed`` was written ("zstd:7").
        packed_bytes: size of ``packed``; None: index.json does not say it.
        hashes: of the unpacked bytes, by algorithm, as far as index.json has them.
    """

    path: str
    size_bytes: int
    samples: int
    listed_in: str
    packed: str | None = None
    compression: str = ""
    packed_bytes: int | None = None
    hashes: Mapping[str, str] = MappingProxyType({})

    def is_one_of(self, paths: Sequence[str]) -> bool:
        """Return whether one of ``paths`` is the file that is there, or the unpacked one."""
        return self.path in paths or self.packed in paths


class ArrayHeads(NamedTuple):
    """The heads of n arrays. A head is ``axes_at`` bytes, then the sizes of its axes."""

    dtype_code: np.ndarray  # int64 (n,)
    axes: np.ndarray  # int64 (n,)
    axis_bytes: np.ndarray  # int64 (n,): 1, 2, 4 or 8, that each size takes
    big_endian: np.ndarray  # bool (n,): the sizes
    axes_at: int

    @property
    def bytes(self) -> np.ndarray:
        """int64 (n,), length of each head."""
        return self.axes_at + self.axes * self.axis_bytes


class ArrayFormat(NamedTuple):
    """How arrays are written whose shape, or dtype too, stands before their values."""

    dtypes: Mapping[int, np.dtype]  # by code
    parse: Callable[[np.ndarray], ArrayHeads]  # of uint8 (n, at least `_ARRAY_HEAD_BYTES`)


class ArrayKind(NamedTuple):
    """Arrays of one dtype and number of axes: least and greatest size of each axis."""

    dtype: np.dtype
    least: tuple[int, ...]
    greatest: tuple[int, ...]


class Column(NamedTuple):
    """One of the columns of every sample, as its format declares it."""

    field: Field
    size_bytes: int | None  # None: a sample's own
    carries_size: bool  # at the sample's start
    array: ArrayFormat | None = None


# --- index.json ------------------------------------------------------------------------------------------------------


def parse_table(head: bytes, shard: Shard) -> np.ndarray:
    """Return where the samples of a shard lie, and where the last one ends.

    int64 (N + 1,), from the file's start.

    Args:
        head: the file's first ``4 * (N + 2)`` bytes or more.
        shard: what index.json says of it.

    Raises:
        CorruptData: the table is cut short, counts other samples than ``shard``, or leaves the
            file.
    """
    table_bytes = table_size(shard.samples)
    if len(head) < table_bytes:
        raise _corrupt(shard.path, f"its table of offsets takes {table_bytes} bytes, but it ends before", 0, len(head))
    check_count(head, shard)
    offsets = np.frombuffer(head, "<u4", shard.samples + 1, 4).astype(np.int64)
    wrong = np.flatnonzero(np.diff(offsets) < 0)
    if len(wrong):
        i = int(wrong[0])
        reason = f"sample {i} would start at {offsets[i]} and end before, at {offsets[i + 1]}"
        raise _corrupt(shard.path, reason, 4 * (i + 1), 8)
    if offsets[0] < table_bytes:
        raise _corrupt(shard.path, f"its first sample would start within the table, at {offsets[0]}", 4, 4)
    if offsets[-1] != shard.size_bytes:
        reason = f"its last sample would end at {offsets[-1]}, and the file ends at {shard.size_bytes}"
        raise _corrupt(shard.path, reason, 4 * (shard.samples + 1), 4)
    return offsets


def check_count(head: bytes, shard: Shard) -> None:
    """Check that a shard's first four bytes count as many samples as index.json.

    Raises:
        CorruptData: they do not.
    """
    count = int.from_bytes(head[:4], "little")
    if count != shard.samples:
        raise _corrupt(shard.path, f"it says that it holds {count} samples, and {SHARDS_INDEX} {shard.samples}", 0, 4)


def table_size(samples: int) -> int:
    """Return the bytes that the count and the table of offsets take."""
    return 4 * (samples + 2)


def place_columns(
    offsets: np.ndarray,
    columns: Sequence[Column],
    path: str,
    read: Callable[[np.ndarray, int], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Return where each column of each sample of a shard lies.

    They are begin and length in bytes, int64 (n, K) each. If only one column's size is not known
    beforehand, it is what the others leave of the sample. The sizes that the samples carry are read
    only otherwise.

    Args:
        offsets: int64 (n + 1,), of the samples (`parse_table`).
        columns: the K columns, in the order of their bytes.
        path: named in errors.
        read: gives so many bytes from each of some offsets on: uint8 (n, count).

    Raises:
        CorruptData: sizes that do not make up the samples, or of no whole number of elements.
    """
    carried = [place for place, column in enumerate(columns) if column.carries_size]
    varying = [place for place, column in enumerate(columns) if column.size_bytes is None]
    head_bytes = 4 * len(carried)
    starts = offsets[:-1]
    length = np.tile(np.array([column.size_bytes or 0 for column in columns], np.int64), (len(starts), 1))
    room = np.diff(offsets) - head_bytes - length.sum(axis=1)
    _require(room >= 0, path, starts, np.diff(offsets), "the sample is too short for its columns of fixed size")
    if len(varying) == 1:
        length[:, varying[0]] = room
    elif varying:
        sizes = read(starts, head_bytes).view("<u4").astype(np.int64)
        known = [place not in varying for place in carried]
        same = (sizes == length[:, carried])[:, known].all(axis=1)
        _require(same, path, starts, np.diff(offsets), "the sample carries another size for a column of fixed size")
        length[:, carried] = sizes
        room -= length[:, varying].sum(axis=1)
    if len(varying) != 1:
        _require(room == 0, path, starts, np.diff(offsets), "the sizes of its columns do not make up the sample")
    begin = starts[:, None] + head_bytes + length.cumsum(axis=1) - length
    for place, column in enumerate(columns):
        if column.field.dtype is not None and column.array is None:
            reason = f"column {column.field.name!r} is no whole number of {column.field.dtype.str}"
            _require(
                length[:, place] % column.field.dtype.itemsize == 0, path, begin[:, place], length[:, place], reason
            )
    return begin, length


def parse_arrays(
    heads: np.ndarray, begin: np.ndarray, length: np.ndarray, array: ArrayFormat, path: str
) -> tuple[np.ndarray, set[ArrayKind]]:
    """Return lengths of n arrays' heads (int64 (n,), bytes), and the arrays' kinds.

    Args:
        heads: uint8 (n, w), the first bytes of each, whole heads among them unless they are absurd.
        begin, length: int64 (n,), of each array with its head, in bytes.
        array: how they are written.
        path: named in errors.

    Raises:
        CorruptData: a head makes no sense, or does not fit the array's length.
    """
    said = array.parse(heads)
    _require(length >= said.axes_at, path, begin, length, "an array ends within its head")
    _require(np.isin(said.dtype_code, list(array.dtypes)), path, begin, length, "an array's dtype is not known")
    _require(said.axes <= MOST_AXES, path, begin, length, f"an array has more than {MOST_AXES} axes")
    _require(said.bytes <= length, path, begin, length, "an array ends within its head")
    kinds = set()
    # Heads of one form are read as one matrix; an axis takes up to 8 bytes, and there are up to 64
    # of them.
    form_of = (said.dtype_code << 13) | (said.axes << 5) | (said.big_endian << 4) | said.axis_bytes
    for form in distinct(form_of).tolist():
        rows = np.flatnonzero(form_of == form)
        dtype, axes, order, axis_bytes = array.dtypes[form >> 13], (form >> 5) & 0xFF, "<>"[form >> 4 & 1], form & 0xF
        sizes = heads[rows, said.axes_at : said.axes_at + axes * axis_bytes]
        sizes = np.ascontiguousarray(sizes).view(f"{order}u{axis_bytes}").astype(np.uint64)
        values_bytes = _product(sizes) * np.uint64(dtype.itemsize)
        fits = values_bytes == (length[rows] - said.bytes[rows]).astype(np.uint64)
        _require(fits, path, begin[rows], length[rows], "an array's shape does not fit its length")
        kinds.add(ArrayKind(dtype, *(tuple(map(int, size)) for size in (sizes.min(axis=0), sizes.max(axis=0)))))
    return said.bytes, kinds


def decode_array(data: bytes, array: ArrayFormat) -> np.ndarray:
    """Return the array that ``data`` is, head and values; a view of it.

    Raises:
        CorruptData: the head makes no sense, or does not fit the length.
    """
    heads = np.frombuffer(bytes(data).ljust(_ARRAY_HEAD_BYTES, b"\0"), np.uint8)[None]
    head_bytes, kinds = parse_arrays(heads, np.zeros(1, np.int64), np.array([len(data)]), array, "an array")
    (kind,) = kinds
    return np.frombuffer(data, kind.dtype, offset=int(head_bytes[0])).reshape(kind.least)


def _product(sizes: np.ndarray) -> np.ndarray:
    """Return the product of each row of uint64 (n, axes): uint64 (n,).

    `LARGEST_BYTES` stands for any greater number.
    """
    largest = np.uint64(LARGEST_BYTES)
    product = np.ones(len(sizes), np.uint64)
    for size in np.minimum(sizes, largest).T:
        product = np.minimum(product * size, largest)
    return product


def _require(good: np.ndarray, path: str, begin: np.ndarray, length: np.ndarray, reason: str) -> None:
    """Raise `CorruptData` for the first of n extents that is not ``good``."""
    if not good.all():
        i = int(np.flatnonzero(~good)[0])
        raise _corrupt(path, reason, int(begin[i]), int(length[i]))


def _corrupt(path: str, reason: str, offset: int, length: int) -> CorruptData:
    message = f"{path}: damaged at bytes {offset} to {offset + length}: {reason}; write the shard again"
    return CorruptData(message, path, offset, length)


# --- files -----------------------------------------------------------------------------------------------------------


def refuse_no_shards(shards: Sequence[Shard], paths: Sequence[str]) -> None:
    """Check that there are shards.

    Raises:
        ValueError: the index.json files ``paths`` list none.
    """
    if not shards:
        raise ValueError(f"{', '.join(map(repr, paths))}: no shards are listed: write some samples first")


def stat_shards(shards: Sequence[Shard], least_bytes: Callable[[Shard], int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the shards' sizes (bytes) and modification times (ns): int64 (F,) each.

    They are as index.json has them. So the numbers of samples are known to be sound before anything
    is allocated for them.

    Args:
        shards: at least one.
        least_bytes: returns the bytes that a shard of so many samples has at least.

    Raises:
        CorruptData: a file is of another size, too short for its samples, or listed twice.
        FileNotFoundError, IoError: a file is not available.
    """
    seen: set[str] = set()
    for shard in shards:
        if shard.path in seen:
            raise CorruptData(f"{shard.path} is listed twice in its {SHARDS_INDEX}; write it again", shard.path)
        seen.add(shard.path)
    with missing_shards_named(shards):
        size_bytes, mtime_ns = sizes_of([shard.path for shard in shards])
    for shard, size in zip(shards, size_bytes.tolist(), strict=True):
        if size != shard.size_bytes:
            reason = f"{SHARDS_INDEX} says {shard.size_bytes} bytes, and it has {size}"
            raise _corrupt(shard.path, reason, min(size, shard.size_bytes), abs(size - shard.size_bytes))
        if least_bytes(shard) > size:
            reason = f"{SHARDS_INDEX} says {shard.samples} samples, which take more than the {size} bytes that it has"
            raise _corrupt(shard.path, reason, 0, size)
    return size_bytes, mtime_ns


@contextlib.contextmanager
def missing_shards_named(shards: Sequence[Shard]) -> Iterator[None]:
    """Have a `FileNotFoundError` of one of ``shards`` say which index.json lists it."""
    try:
        yield
    except FileNotFoundError as error:
        listed_in = {name: shard.listed_in for shard in shards for name in (shard.path, shard.packed)}
        if error.filename not in listed_in:
            raise
        reason = f"{error.strerror}, but {listed_in[error.filename]} lists it: fetch this shard, or write all again"
        raise FileNotFoundError(error.errno, reason, error.filename) from None


def index_shards(shards: Sequence[Shard], columns: Sequence[Column]) -> FieldIndex:
    """Find each column of each sample of ``shards``.

    Arrays whose shape stands before them (`Column.array`) become a field of their values alone, if
    all have one dtype and one shape, or one axis. Otherwise they become a field of bytes, with the
    heads. A field of one axis has a shape if all its lengths are the same.

    Raises:
        CorruptData: a shard is not what index.json, its table or its samples' heads say.
        FileNotFoundError, IoError: a file is not available.
    """
    a_sample = sum(4 * column.carries_size + (column.size_bytes or 0) for column in columns)
    size_bytes, mtime_ns = stat_shards(shards, lambda shard: table_size(shard.samples) + shard.samples * a_sample)
    places = _Places(shards, columns)
    varying = [column for column in columns if column.size_bytes is None]
    looks_at_samples = len(varying) > 1 or any(column.array for column in varying)
    kinds: list[set[ArrayKind]] = [set() for _ in columns]
    for head_of in _heads(shards):
        look = partial(places.find, head_of)
        each = of_each(look, [*head_of], _READERS, only_if_slow=True) if looks_at_samples else map(look, head_of)
        for of_shard in each:
            for of_column, found in zip(kinds, of_shard, strict=True):
                of_column |= found
    fields = []
    for place, column in enumerate(columns):
        fields.append(_result(column, places.length[:, place], kinds[place]))
        if column.array is not None and fields[-1].dtype is not None:
            places.begin[:, place] += places.array_head[:, place]
            places.length[:, place] -= places.array_head[:, place]
    paths, extents = [shard.path for shard in shards], Extents.of(places.begin, places.length)
    return FieldIndex(paths, size_bytes, mtime_ns, places.first_sample, tuple(fields), extents)


class _Places:
    """Where each column of each sample lies. Several threads may find those of different shards.

    Attributes:
        first_sample: of each shard.
        begin, length, array_head: int64 (N, K), in bytes. ``array_head`` is 0 without one.
    """

    def __init__(self, shards: Sequence[Shard], columns: Sequence[Column]) -> None:
        self.first_sample = first_samples([shard.samples for shard in shards])
        self.begin = np.empty((int(self.first_sample[-1]), len(columns)), np.int64)
        self.length, self.array_head = np.empty_like(self.begin), np.zeros_like(self.begin)
        self._shards, self._columns = shards, columns
        self._numbers = {shard.path: number for number, shard in enumerate(shards)}

    def find(self, head_of: Mapping[str, bytes], path: str) -> list[set[ArrayKind]]:
        """Find the columns of one shard's samples, and return the kinds of arrays of each column.

        Args:
            head_of: the first bytes of shards, by path.
            path: of the shard.

        Raises as `index_shards` does.
        """
        number = self._numbers[path]
        offsets = parse_table(head_of[path], self._shards[number])
        rows = slice(self.first_sample[number], self.first_sample[number + 1])
        kinds: list[set[ArrayKind]] = [set() for _ in self._columns]
        with StretchReader(path) as reader:
            self.begin[rows], self.length[rows] = place_columns(offsets, self._columns, path, reader.read)
            for place, column in enumerate(self._columns):
                if column.array is not None:
                    extents = self.begin[rows, place], self.length[rows, place]
                    heads = _read_array_heads(reader, extents[0], column.array)
                    self.array_head[rows, place], kinds[place] = parse_arrays(heads, *extents, column.array, path)
        return kinds


def _heads(shards: Sequence[Shard]) -> Iterator[dict[str, bytes]]:
    """Yield the shards' first bytes by path, with the offsets of their samples, in parts."""
    for some in _fitting(shards):
        paths = [shard.path for shard in some]
        heads, _, _ = read_heads(paths, max(table_size(shard.samples) for shard in some))
        yield dict(zip(paths, heads, strict=True))


def _fitting(shards: Sequence[Shard]) -> Iterator[Sequence[Shard]]:
    """Yield parts of shards whose tables fit in memory together, at least one a part."""
    first, longest_bytes = 0, 0
    for end, shard in enumerate(shards):
        longest_bytes = max(longest_bytes, table_size(shard.samples))
        # So much is read of each, whatever its own table takes.
        if end > first and (end + 1 - first) * longest_bytes > _TABLES_AT_ONCE_BYTES:
            yield shards[first:end]
            first, longest_bytes = end, table_size(shard.samples)
    yield shards[first:]


def _read_array_heads(reader: StretchReader, begin: np.ndarray, array: ArrayFormat) -> np.ndarray:
    """Return the first bytes of arrays: uint8 (n, w). All but absurd heads are whole."""
    heads = reader.read(begin, _ARRAY_HEAD_BYTES)
    said = array.parse(heads)
    longest = int(said.bytes[said.axes <= MOST_AXES].max(initial=0))
    return heads if longest <= _ARRAY_HEAD_BYTES else reader.read(begin, longest)


def _result(column: Column, length: np.ndarray, kinds: Iterable[ArrayKind]) -> Field:
    """Return a column's field, by all its lengths (int64 (N,), bytes) and arrays."""
    name, dtype, shape = column.field.name, column.field.dtype, column.field.shape
    if column.array is not None:
        return _common(name, list(kinds))
    if dtype is not None and shape is None and len(length) and (length == length[0]).all():
        return Field(name, dtype, (int(length[0]) // dtype.itemsize,))
    return column.field


def _common(name: str, kinds: list[ArrayKind]) -> Field:
    """Return the field of arrays of these kinds."""
    if len({(kind.dtype, len(kind.least)) for kind in kinds}) != 1:
        return Field(name)
    dtype, shape, _ = kinds[0]
    if all(kind.least == kind.greatest == shape for kind in kinds):
        return Field(name, dtype, shape)
    return Field(name, dtype) if len(shape) == 1 else Field(name)

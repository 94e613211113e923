"""`Extents`: where the fields of samples lie, in few bytes a sample.

A sample's row is a column for the begin and the length of each field, in the fields' order in the
files. A begin is counted from the end of the field before it, rounded up to ``alignment``, in units
of ``alignment``. A column counts from its least value, and has as many bytes as its greatest value
needs. So a column takes nothing if all its values are equal: the begin of a tar's second member is
always 512 bytes behind the first one's last page of 512.

Nothing is assumed of the files: rows that are regular take few bytes, and others up to 16 a field.
All arithmetic is modulo 2**64, so every begin and length comes out as it went in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from gdsdata.fork_safe import cached_property
from gdsdata.io import engine

_AT_ONCE = 2**16  # samples whose wide form stays in the processor's cache
_PACKED_FROM = 4 * _AT_ONCE  # samples that are kept in their wide form until then
_MOST_ALIGNMENT = 4096


class Wide(NamedTuple):
    """Begins and lengths in bytes: int64 (m, K) each, of K fields of m samples.

    A length of -1: the sample does not have the field. The begin then means nothing.
    """

    begin: np.ndarray
    length: np.ndarray


@dataclass(frozen=True, eq=False)
class Extents:
    """Where K fields of N samples lie in the samples' files.

    Attributes:
        rows: uint8 (N, R), one row a sample, as the module's docstring says.
        widths: bytes of each of the 2K columns of a row.
        least: int64 (2K,), what each column counts from.
        order: the fields, as they follow each other in the files.
        alignment: of all begins in bytes, a power of two.
        has_gaps: whether a sample lacks a field.
    """

    rows: np.ndarray
    widths: tuple[int, ...]
    least: np.ndarray
    order: tuple[int, ...]
    alignment: int
    has_gaps: bool

    @classmethod
    def of(cls, begin_bytes: np.ndarray, length_bytes: np.ndarray) -> Extents:
        """Return these extents; the arguments are as `Wide` has them."""
        wide = Wide(begin_bytes, length_bytes)
        samples, fields = begin_bytes.shape
        return _packed(samples, fields, lambda: _blocks(samples, lambda some: Wide(*(one[some] for one in wide))))

    @classmethod
    def joined(cls, parts: Iterable[Extents]) -> Extents:
        """Return the extents of all samples of parts, at least one, with the same fields."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        count = sum(map(len, parts))
        return _packed(count, len(parts[0].order), lambda: (block for part in parts for block in part.blocks()))

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rows)

    def __getitem__(self, some: slice) -> Extents:
        """Return the extents of some neighboring samples, without a copy."""
        return replace(self, rows=self.rows[some])

    def take(self, samples: np.ndarray) -> Wide:
        """Return the extents of samples: int64 (m,)."""
        return Wide(*engine.unpack_extents(self.rows, samples, *self._columns, self.alignment))

    def blocks(self) -> Iterator[Wide]:
        """Yield the extents of all samples, of some at a time."""
        return _blocks(len(self), lambda some: self[some].wide())

    def wide(self) -> Wide:
        """Return the extents of all samples, which take 16 bytes for each field."""
        return self.take(np.arange(len(self)))

    def sample_bytes(self) -> Iterator[np.ndarray]:
        """Yield the bytes of all samples, int64 (m,), of some samples at a time."""
        begins = [*accumulate(self.widths, initial=0)]
        for at in range(0, len(self), _AT_ONCE):
            rows = self.rows[at : at + _AT_ONCE]
            of_all = np.zeros(len(rows), np.int64)
            for column in range(1, len(self.widths), 2):
                length = _column(rows, begins[column], self.widths[column])
                length += self.least[column]
                of_all += np.maximum(length, 0) if self.has_gaps else length
            yield of_all

    @cached_property
    def _columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.array(self.widths, np.int64), self.least, np.array(self.order, np.int64)

    def lacks_everywhere(self, field: int) -> bool:
        """Return whether no sample has a field."""
        column = 2 * self.order.index(field) + 1
        return self.widths[column] == 0 and int(self.least[column]) < 0


class ExtentsBuilder:
    """Collects the extents of file after file, and keeps them in few bytes."""

    def __init__(self) -> None:
        self._parts: list[Extents] = []
        self._wide: list[Wide] = []
        self._wide_samples = 0

    def add(self, begin_bytes: np.ndarray, length_bytes: np.ndarray) -> None:
        """Add the extents of more samples, as `Wide` has them."""
        self._wide.append(Wide(begin_bytes, length_bytes))
        self._wide_samples += len(begin_bytes)
        if self._wide_samples >= _PACKED_FROM:
            self._pack()

    def extents(self) -> Extents:
        """Return the extents of all samples that were added, at least one."""
        if self._wide:
            self._pack()
        return Extents.joined(self._parts)

    def _pack(self) -> None:
        self._parts.append(Extents.of(*map(np.concatenate, zip(*self._wide, strict=True))))
        self._wide, self._wide_samples = [], 0


def _blocks(count: int, wide_of: Callable[[slice], Wide]) -> Iterator[Wide]:
    return (wide_of(slice(at, at + _AT_ONCE)) for at in range(0, count, _AT_ONCE))


def _packed(samples: int, fields: int, blocks: Callable[[], Iterator[Wide]]) -> Extents:
    """Return the extents that ``blocks()`` yields, which is called several times."""
    alignment, order, has_gaps = _common_of(blocks(), fields)
    least, greatest = np.full(2 * fields, 2**63 - 1), np.full(2 * fields, -(2**63))
    for block in blocks():
        for i, (values, there) in enumerate(_columns_of(block, order, alignment)):
            least[i] = np.min(values, where=there, initial=least[i])
            greatest[i] = np.max(values, where=there, initial=greatest[i])
    widths = []
    for i, (low, high) in enumerate(zip(least.tolist(), greatest.tolist(), strict=True)):
        widths.append((max(0, high - low).bit_length() + 7) // 8)
        if widths[i] > 6 or low > high:  # counted from 0, no difference overflows
            widths[i], least[i] = (8, 0) if low <= high else (0, 0)
    rows = np.empty((samples, sum(widths)), np.uint8)
    first = 0
    for block in blocks():
        at, some = 0, rows[first : first + len(block.begin)]
        for i, (values, there) in enumerate(_columns_of(block, order, alignment)):
            if widths[i]:
                counted = np.where(there, values - least[i], 0).astype("<i8").view(np.uint8).reshape(-1, 8)
                some[:, at : at + widths[i]] = counted[:, : widths[i]]
                at += widths[i]
        first += len(some)
    return Extents(rows, tuple(widths), least, order, alignment, has_gaps)


def _common_of(blocks: Iterator[Wide], fields: int) -> tuple[int, tuple[int, ...], bool]:
    """Return the alignment of all begins, the order of the fields, and whether one is lacking."""
    bits, order, has_gaps = _MOST_ALIGNMENT, tuple(range(fields)), False
    is_ordered = False
    for begin, length in blocks:
        there = length >= 0
        bits |= int(np.bitwise_or.reduce(begin[there]))
        has_gaps |= not there.all()
        if not is_ordered and len(whole := np.flatnonzero(there.all(axis=1))):
            order, is_ordered = tuple(np.argsort(begin[whole[0]], kind="stable").tolist()), True
    return bits & -bits, order, has_gaps


def _columns_of(block: Wide, order: tuple[int, ...], alignment: int) -> Iterator[tuple[np.ndarray, np.ndarray | bool]]:
    """Yield the values of the columns, and which of them count: bool, of each or of all."""
    end: np.ndarray | None = None
    for field in order:
        begin, length = block.begin[:, field].astype(np.int64), block.length[:, field].astype(np.int64)
        there = length >= 0
        yield (begin if end is None else begin - _aligned(end, alignment)) // alignment, there
        yield length, True
        end = _end_of(begin, length, end, True)


def _end_of(begin: np.ndarray, length: np.ndarray, before: np.ndarray | None, has_gaps: bool) -> np.ndarray:
    """Return where fields end. If a field is not there, that is where the one before it ends."""
    end = begin + length
    return np.where(length < 0, 0 if before is None else before, end) if has_gaps else end


def _aligned(end: np.ndarray, alignment: int) -> np.ndarray:
    return end if alignment == 1 else (end + (alignment - 1)) & -alignment


def _column(rows: np.ndarray, at: int, width: int) -> np.ndarray:
    """Return the column of ``width`` bytes at ``at`` of each row: int64 (m,)."""
    parts = [part for part in (8, 4, 2, 1) if width & part]
    if not parts:
        return np.zeros(len(rows), np.int64)
    values, end = _part(rows, at, parts[0]), at + parts[0]
    for part in parts[1:]:
        values |= _part(rows, end, part) << 8 * (end - at)
        end += part
    return values


def _part(rows: np.ndarray, at: int, width: int) -> np.ndarray:
    return rows[:, at : at + width].view(f"<u{width}")[:, 0].astype(np.int64)

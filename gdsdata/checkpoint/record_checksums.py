"""Checksums of records: which are compared, and `RecordParts` for loads that want less than one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from gdsdata.checkpoint.extents import Extents
from gdsdata.checkpoint.stored import Record, Stored, bytes_of, view_in
from gdsdata.checkpoint.tree import Path, name_of
from gdsdata.errors import CorruptData
from gdsdata.io import engine

# Tensors that are not read in place pass through at most this much memory at a time, or through the
# memory of one larger tensor.
MOST_OWN_BYTES = 1 << 30

Take = Callable[[torch.Tensor], object]  # called with the bytes that were read: uint8, one dimension


def is_compared(record: Record) -> bool:
    """Return whether ``verify`` compares a checksum of a record, for which all of it is read."""
    return record.crc32 is not None


def compare(extents: Extents, checksums: Sequence[int]) -> None:
    """Compare the checksums of extents with those of their records.

    A warning says it if a record has none.

    Args:
        extents: of a record that has a checksum, they are all of it, one behind the other.
        checksums: of the bytes that were read for each.

    Raises:
        CorruptData: one differs.
    """
    unknown: dict[str, Path] = {}  # a name for each file
    first = known_bytes = joined = 0  # of the record that extent ``first`` begins
    for i, found in enumerate(checksums):
        record, size_bytes = extents.records[i], extents.sizes_bytes[i]
        if not is_compared(record):
            if not record.is_compared_by_caller:
                unknown.setdefault(record.path, extents.names[i])
            continue
        if known_bytes == 0:
            first, joined = i, found
        else:
            joined = engine.crc32_joined(joined, found, size_bytes)
        is_next = extents.offsets[i] == record.offset + known_bytes and record == extents.records[first]
        known_bytes += size_bytes
        assert is_next and known_bytes <= record.size_bytes, "a part of a record has no checksum"
        if known_bytes == record.size_bytes:
            known_bytes = 0
            if joined != record.crc32:
                raise _differs(record, extents.names[first], joined)
    assert known_bytes == 0, "the end of a record was not read"
    if unknown:
        _warn_of(unknown, {record.path for record in extents.records if is_compared(record)})


def _differs(record: Record, name: Path, found: int) -> CorruptData:
    return CorruptData(
        f"{name_of(name)} in '{record.path}', {record.size_bytes} bytes from offset {record.offset} on, "
        f"has the checksum {found:08x} and not {record.crc32:08x}: the file was changed since it was written",
        record.path,
        record.offset,
        record.size_bytes,
    )


def _warn_of(unknown: dict[str, Path], known: set[str]) -> None:
    """Warn of files that have records without checksums.

    Other records of ``known`` files have one.
    """
    for path, name in sorted(unknown.items()):
        of_file = os.path.basename(path)
        if path in known:
            words = "though others have: verify=True does not compare it. The file was changed since it was written"
            engine.warn_once(f"{name_of(name)} in '{of_file}' has no checksum, {words}")
        else:
            warn_of_none(path)


def warn_of_none(path: str) -> None:
    """Warn that a file was written without checksums."""
    engine.warn_once(f"'{os.path.basename(path)}' has no checksums: verify=True compares nothing in such files")


class Part(NamedTuple):
    """A part of a record, of which a tensor gets the values.

    Attributes:
        offset, size_bytes: where it lies in the record, with gaps between its values.
        name: the path of the tensor, for errors.
        take: copies it.
        target: memory without gaps that the part may be read into instead; None: it is copied.
    """

    offset: int
    size_bytes: int
    name: Path
    take: Take
    target: torch.Tensor | None = None


def copy_bytes(target: torch.Tensor, offset: int, record: torch.Tensor) -> None:
    """Fill a tensor without gaps from the memory of a whole record."""
    part = record[offset : offset + target.nbytes]
    if part.data_ptr() != target.data_ptr():  # tied weights are filled once
        bytes_of(target.detach()).copy_(part)


def copy_values(target: torch.Tensor, stored: Stored, record: torch.Tensor) -> None:
    """Fill a tensor with the values that a stored one has in the memory of its record."""
    if record.storage_offset() % stored.dtype.itemsize:  # it lies within a tensor of smaller elements
        record = record.clone()
    target.copy_(view_in(record.untyped_storage(), -int(record.storage_offset()), stored))


class Stretch(NamedTuple):
    """Bytes of a record that are read as one.

    Attributes:
        offset, size_bytes: where they lie in the record.
        name: the path of a tensor, for errors.
        target: where they are read to; None: to the record's own memory, from ``place`` on.
    """

    offset: int
    size_bytes: int
    name: Path
    target: torch.Tensor | None
    place: int = 0


class PartsOfRecord:
    """The parts of one record that one device gets. The record is read from ``begin`` to ``end``.

    That is all of it if its checksum is compared.

    Attributes:
        record, device, begin, end: as given.
        parts: that are wanted.
        whole: a tensor that is read anyway, and whose memory has the record; None if there is none.
        takes: copy the parts that are not read in place, from ``whole`` or from own memory. Set by
            `plan`, as is ``own_bytes``.
        own_bytes: the size of the own memory. If any part is copied, it has a place for each byte
            from ``begin`` to ``end``; otherwise for those that no tensor gets.
    """

    def __init__(self, record: Record, device: torch.device, begin: int, end: int) -> None:
        self.record, self.device, self.begin, self.end = record, device, begin, end
        self.parts: list[Part] = []
        self.whole: torch.Tensor | None = None
        self.takes: list[Take] = []
        self.own_bytes = 0
        self._in_place: list[Part] = []

    def plan(self, whole: torch.Tensor | None, may_split: bool) -> None:
        """Choose the parts that are read in place.

        Args:
            whole: becomes the attribute.
            may_split: a record may be read as several extents.
        """
        self.whole = whole
        self._in_place = _alone(self.parts) if whole is None and may_split else []
        read = set(map(id, self._in_place))
        self.takes = [part.take for part in self.parts if id(part) not in read]
        size_bytes = self.end - self.begin
        left_bytes = size_bytes - sum(part.size_bytes for part in self._in_place)
        self.own_bytes = 0 if whole is not None else size_bytes if self.takes else left_bytes

    def stretches(self) -> Iterator[Stretch]:
        """Yield the stretches of the record, one behind the other."""
        end, gaps_bytes = self.begin, 0
        name = self.parts[0].name
        for part in [*self._in_place, None]:
            begin = self.end if part is None else part.offset
            if begin > end:
                yield Stretch(end, begin - end, name, None, end - self.begin if self.takes else gaps_bytes)
                gaps_bytes += begin - end
            if part is not None:
                yield Stretch(begin, part.size_bytes, part.name, part.target)
                end = begin + part.size_bytes


def _alone(parts: Sequence[Part]) -> list[Part]:
    """Return the parts that may be read in place, in order: no other part has bytes of them."""
    ordered, found = sorted(parts, key=lambda part: part.offset), list[Part]()
    end = 0
    for part, following in itertools.zip_longest(ordered, ordered[1:]):
        part_end = part.offset + part.size_bytes
        is_last = following is None or following.offset >= part_end
        if part.target is not None and part.offset >= end and is_last:
            found.append(part)
        end = max(end, part_end)
    return found


class RecordParts:
    """Collects the parts of records that a load wants.

    A checksum needs all bytes of its record. So a record is read once: parts that share no bytes
    with others go to their tensors, and the rest to memory from which the other parts are copied.
    Or all are copied from a tensor that has all of the record, as tied weights may be.
    """

    def __init__(self) -> None:
        self._of_records: dict[tuple[Record, torch.device], PartsOfRecord] = {}
        self._whole: dict[tuple[Record, torch.device], torch.Tensor] = {}
        self._spans: list[PartsOfRecord] = []

    def add(self, record: Record, device: torch.device, part: Part) -> None:
        """Have a part of a record read into memory of ``device``, or copied from there."""
        if (parts := self._of_records.get((record, device))) is None:
            parts = self._of_records[record, device] = PartsOfRecord(record, device, 0, record.size_bytes)
        parts.parts.append(part)

    def add_span(self, parts: PartsOfRecord) -> None:
        """Have parts copied from a span of a record whose checksum is not compared."""
        self._spans.append(parts)

    def note_whole(self, record: Record, target: torch.Tensor) -> bool:
        """Note that a tensor without gaps is filled with a whole record.

        Returns:
            Whether it is the first one, from which all others are copied.
        """
        known = len(self._whole)
        self._whole.setdefault((record, target.device), target)
        return len(self._whole) > known

    def rounds(self, may_split: bool) -> Iterator[list[PartsOfRecord]]:
        """Yield the records in rounds of at most `MOST_OWN_BYTES`, or of one larger record.

        If there are none, there is one empty round.

        Args:
            may_split: a record may be read as several extents.
        """
        round_, size_bytes = list[PartsOfRecord](), 0
        for parts in [*self._of_records.values(), *self._spans]:
            parts.plan(self._whole.get((parts.record, parts.device)), may_split)
            if round_ and size_bytes + parts.own_bytes > MOST_OWN_BYTES:
                yield round_
                round_, size_bytes = [], 0
            round_.append(parts)
            size_bytes += parts.own_bytes
        yield round_

    def clear(self) -> None:
        self._of_records.clear()
        self._whole.clear()
        self._spans.clear()

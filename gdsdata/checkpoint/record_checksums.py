"""Checksums of records: which are compared, and `RecordParts` for loads that want less than one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from gdsdata.checkpoint.extents import Extents
from gdsdata.checkpoint.stored import Record
from gdsdata.checkpoint.tree import Path, name_of
from gdsdata.errors import CorruptData
from gdsdata.io import engine

# Tensors that are not read in place pass through at most this much memory at a time, or through the
# memory of one larger tensor.
MOST_OWN_BYTES = 1 << 30

Take = Callable[[torch.Tensor], object]  # called with all bytes of a record: uint8, one dimension


def is_compared(record: Record) -> bool:
    """Return whether ``verify`` compares a checksum of a record, for which all of it is read."""
    return record.crc32 is not None


def compare(extents: Extents, checksums: Sequence[int]) -> None:
    """Compare the checksums of extents with those of their records.

    A warning says it if a record has none.

    Args:
        extents: each is a whole record, if that has a checksum.
        checksums: of the bytes that were read for each.

    Raises:
        CorruptData: one differs.
    """
    unknown: dict[str, Path] = {}  # a name for each file
    for i, found in enumerate(checksums):
        record, name = extents.records[i], extents.names[i]
        if not is_compared(record):
            if not record.is_compared_by_caller:
                unknown.setdefault(record.path, name)
            continue
        assert extents.sizes_bytes[i] == record.size_bytes, "a part of a record has no checksum"
        if found != record.crc32:
            raise CorruptData(
                f"{name_of(name)} in '{record.path}', {record.size_bytes} bytes from offset {record.offset} on, "
                f"has the checksum {found:08x} and not {record.crc32:08x}: the file was changed since it was "
                "written",
                record.path,
                record.offset,
                record.size_bytes,
            )
    if unknown:
        _warn_of(unknown, {record.path for record in extents.records if is_compared(record)})


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


@dataclass
class PartsOfRecord:
    """The parts of one record that one device gets.

    Attributes:
        record: it is read as a whole.
        device: of the memory that it is read to.
        name: the path of one of the parts, for errors.
        takes: copy each part from that memory.
        whole: a tensor that is read anyway, and whose memory has the record; None if there is none.
    """

    record: Record
    device: torch.device
    name: Path
    takes: list[Take] = field(default_factory=list)
    whole: torch.Tensor | None = None


class RecordParts:
    """Collects the parts of records that a load wants.

    A checksum needs all bytes of its record. So a record is read once, into memory of its own, and
    its parts are copied from there. Or they are copied from a tensor that has all of the record, as
    tied weights may be.
    """

    def __init__(self) -> None:
        self._of_records: dict[tuple[Record, torch.device], PartsOfRecord] = {}
        self._whole: dict[tuple[Record, torch.device], torch.Tensor] = {}

    def add(self, record: Record, device: torch.device, name: Path, take: Take) -> None:
        """Have ``take`` called when all bytes of a record are in memory of ``device``."""
        if (parts := self._of_records.get((record, device))) is None:
            parts = self._of_records[record, device] = PartsOfRecord(record, device, name)
        parts.takes.append(take)

    def note_whole(self, record: Record, target: torch.Tensor) -> None:
        """Note that a tensor without gaps is filled with a whole record."""
        self._whole[record, target.device] = target

    def rounds(self) -> Iterator[list[PartsOfRecord]]:
        """Yield the records in rounds of at most `MOST_OWN_BYTES`, or of one larger record.

        If there are none, there is one empty round.
        """
        round_, size_bytes = list[PartsOfRecord](), 0
        for key, parts in self._of_records.items():
            parts.whole = self._whole.get(key)
            own_bytes = parts.record.size_bytes if parts.whole is None else 0
            if round_ and size_bytes + own_bytes > MOST_OWN_BYTES:
                yield round_
                round_, size_bytes = [], 0
            round_.append(parts)
            size_bytes += own_bytes
        yield round_

    def clear(self) -> None:
        self._of_records.clear()
        self._whole.clear()

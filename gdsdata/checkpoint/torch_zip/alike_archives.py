"""Archives of one tensor each, of which only the first of each kind is parsed.

`torch.save` makes the same bytes of two tensors of one dtype and shape, but for the elements,
checksums, times and an identifier.
"""

from __future__ import annotations

import struct
from operator import itemgetter
from typing import Any, NamedTuple

from gdsdata.checkpoint.stored import Record, Stored
from gdsdata.checkpoint.torch_zip.archive import checksum_of
from gdsdata.checkpoint.torch_zip.archive_reader import open_tensor
from gdsdata.checkpoint.torch_zip.file_slice import FileSlice
from gdsdata.formats.parsers.zip_directory import (
    ENTRY_STAMP_AT,
    LOCAL_BYTES,
    LOCAL_STAMP_AT,
    STAMP_BYTES,
    content_offsets,
    read_directory,
)

_CHECKSUM = struct.Struct("<I")  # the end of a stamp
_MOST_KINDS = 8  # of archives of one size


class _Kind(NamedTuple):
    """The parts that archives have in common.

    Attributes:
        parsed: takes from the ends of an archive what its parsing depends on.
        parts: what it takes from each archive of the kind.
        checksum_at: where the tensor's checksum stands in the ends.
        tensor: of the first archive.
        begin: where its elements begin in the archive, in bytes.
    """

    parsed: itemgetter[Any]
    parts: tuple[bytes, ...]
    checksum_at: int
    tensor: Stored
    begin: int

    def tensor_in(self, archive: FileSlice, ends: bytes) -> Stored:
        (crc32,) = _CHECKSUM.unpack_from(ends, self.checksum_at)
        size_bytes = self.tensor.record.size_bytes
        record = Record(archive.file, archive.begin + self.begin, size_bytes, checksum_of(crc32, size_bytes))
        return self.tensor._replace(record=record)


class AlikeArchives:
    """Opens archives that are much alike."""

    def __init__(self) -> None:
        self._kinds: dict[int, list[_Kind]] = {}  # by the size of the archive

    def open(self, archive: FileSlice) -> Stored:
        """Return where the one plain tensor of an archive lies.

        Raises:
            NotPlain, CorruptData: as `open_tensor` does.
        """
        kinds = self._kinds.setdefault(archive.size_bytes, [])
        ends = archive.ends()
        for kind in kinds:
            if kind.parsed(ends) == kind.parts:
                return kind.tensor_in(archive, ends)
        tensor = open_tensor(archive)
        new = _kind_of(archive, tensor) if len(kinds) < _MOST_KINDS else None
        if new is not None:
            kinds.append(new)
        return tensor


def _kind_of(archive: FileSlice, tensor: Stored) -> _Kind | None:
    """Return the kind of an archive; None if a part of it lies between its ends."""
    directory, members = read_directory(archive.at, archive.path, archive.size_bytes)
    headers = archive.at_each([member.header_offset for member in members], LOCAL_BYTES)
    begin = tensor.record.offset - archive.begin
    spans, done, checksum = [], directory.offset, None
    for member, content in zip(members, content_offsets(headers, members, directory, archive.path), strict=True):
        header, stamp = member.header_offset, member.entry_offset + ENTRY_STAMP_AT
        spans += [(header, header + LOCAL_STAMP_AT), (header + LOCAL_STAMP_AT + STAMP_BYTES, header + LOCAL_BYTES)]
        spans.append((done, stamp))
        done = stamp + STAMP_BYTES
        if member.name.endswith(("/data.pkl", "/byteorder")):
            spans += [(content, content + member.size_bytes), (stamp, done)]
        if content == begin:
            checksum = archive.within_ends(done - _CHECKSUM.size, done)
    slices = [archive.within_ends(*span) for span in (*spans, (done, archive.size_bytes))]
    if checksum is None or None in slices:
        return None
    parsed = itemgetter(*slices)
    return _Kind(parsed, parsed(archive.ends()), checksum.start, tensor, begin)

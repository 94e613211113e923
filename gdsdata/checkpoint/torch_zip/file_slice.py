"""A part of an open file that is a file by itself.

One tensor's archive in a file of DCP is such a part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from gdsdata.checkpoint.open_file import OpenFile

# An archive of one tensor has everything but the tensor within this many bytes of its beginning and
# of its end.
ENDS_BYTES = 1024


class FileSlice:
    """Bytes of an open file that are a file by themselves.

    It keeps its first and last bytes once they are read.

    Args:
        file: the file.
        begin: the offset in the file at which the slice begins, in bytes.
        size_bytes: the size of the slice.
        ends_bytes: how many bytes are read at each end.
    """

    def __init__(self, file: OpenFile, begin: int, size_bytes: int, ends_bytes: int = ENDS_BYTES) -> None:
        self.file, self.path, self.begin, self.size_bytes = file, file.path, begin, size_bytes
        self._ends_bytes = ends_bytes
        self._tail_offset = max(size_bytes - ends_bytes, 0)
        self._head = self._tail = b""  # until they are read

    @staticmethod
    def read_ends(slices: Iterable[FileSlice]) -> None:
        """Read both ends of many slices.

        All reads are submitted before the first is waited for.

        Raises:
            IoError: the storage refuses a read.
        """
        in_order = sorted(slices, key=lambda one: (one.path, one._ends_bytes, one.begin))
        for (_, ends_bytes), grouped in itertools.groupby(in_order, key=lambda one: (one.path, one._ends_bytes)):
            of_file = list(grouped)
            offsets = [at for one in of_file for at in (one.begin, one.begin + one._tail_offset)]
            found = of_file[0].file.read_each(offsets, ends_bytes)
            for one, at in zip(of_file, itertools.count(0, 2 * ends_bytes)):
                count = min(ends_bytes, one.size_bytes)
                one._head, one._tail = found[at : at + count], found[at + ends_bytes : at + ends_bytes + count]

    def ends(self) -> bytes:
        """Return the first and last bytes, joined; they may overlap."""
        if not self._head:
            self.read_ends([self])
        return self._head + self._tail

    def within_ends(self, begin: int, end: int) -> slice | None:
        """Return where bytes of the slice are in `ends`; None if they are not all there."""
        if end <= len(self._head):
            return slice(begin, end)
        if not self._is_kept(begin, end):
            return None
        shift = len(self._head) - self._tail_offset
        return slice(begin + shift, end + shift)

    def at_each(self, offsets: Sequence[int], size_bytes: int) -> bytes:
        """Return ``size_bytes`` from each of these offsets in the slice, joined.

        See `engine.read_each`. Nothing is read if all of them lie at the ends.
        """
        if all(self._is_kept(offset, offset + size_bytes) for offset in offsets):
            return b"".join(self.at(offset, size_bytes) for offset in offsets)
        return self.file.read_each([self.begin + offset for offset in offsets], size_bytes)

    def _is_kept(self, begin: int, end: int) -> bool:
        is_in_tail = len(self._tail) > 0 and self._tail_offset <= begin and end <= self.size_bytes
        return 0 <= begin and end <= len(self._head) or is_in_tail

    def at(self, offset: int, size_bytes: int) -> bytes:
        """Return ``size_bytes`` from an offset in the slice.

        They are fewer if the slice ends, and none outside it.
        """
        end = min(offset + size_bytes, self.size_bytes)
        if not 0 <= offset < end:
            return b""
        if not self._head:
            self.read_ends([self])
        if end <= len(self._head):
            return self._head[offset:end]
        if self._is_kept(offset, end):
            return self._tail[offset - self._tail_offset : end - self._tail_offset]
        return self.at_each([offset], end - offset)

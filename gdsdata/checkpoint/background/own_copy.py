"""`OwnCopy`: the copy in memory of a rank's own file, made while the file is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import wait
from typing import Protocol

from gdsdata.checkpoint.background.copies import Generation
from gdsdata.checkpoint.background.memory_folder import MemoryCopy, MemoryFolder
from gdsdata.checkpoint.file_writer import Extent
from gdsdata.checkpoint.threads import DaemonThreads


class PieceWriter(Protocol):
    """Writes a file piece by piece. See `FileWriter` for each method."""

    def write(self, extents: Sequence[Extent]) -> list[int]: ...

    def write_bytes(self, parts: Iterable[tuple[int, bytes]]) -> None: ...

    def commit(self) -> None: ...


class NoCopy:
    """Stands for the copy of a save that gets none."""

    def beside(self, writer: PieceWriter, size_bytes: int) -> PieceWriter:
        return writer


NO_COPY = NoCopy()


class OwnCopy:
    """The copy of this rank's own file. An error never reaches the save.

    Several threads may call `write`; the other methods belong to one thread.

    Args:
        folder: of the copies.
        generation: the save.
        older: the save whose copies stay until this one is complete; None: none do.
        rank: of this process.
        threads: copy while the file is written.

    Attributes:
        generation: the save.
        error: why there will be no copy; None: there is no such reason.
        size_bytes: of the copy; 0 before `beside`.
    """

    def __init__(
        self,
        folder: MemoryFolder,
        generation: Generation,
        older: Generation | None,
        rank: int,
        threads: DaemonThreads,
    ) -> None:
        self.generation, self.threads = generation, threads
        self._folder, self._older, self._rank = folder, older, rank
        self._copy: MemoryCopy | None = None
        self.error: str | None = "its file was not written"
        self.size_bytes = 0

    def beside(self, writer: PieceWriter, size_bytes: int) -> PieceWriter:
        """Begin the copy, and return a writer of both.

        First everything that earlier processes have left is removed from memory.

        Args:
            writer: of the file.
            size_bytes: the size that the file will have.
        """
        self.error, self.size_bytes = None, size_bytes
        with self._errors_noted():
            self._folder.keep_only(self.generation, self._older)
            self._copy = self._folder.begin(self.generation, self._rank, size_bytes)
        if self._copy is None:
            return writer
        return _CopyingWriter(writer, self)

    def write(self, extents: Iterable[Extent]) -> None:
        """Copy extents of the file."""
        with self._errors_noted():
            for offset, tensor in extents:
                self._put(offset, tensor.cpu().numpy())

    def write_bytes(self, parts: Iterable[tuple[int, bytes]]) -> None:
        """Copy parts of the file."""
        with self._errors_noted():
            for offset, content in parts:
                self._put(offset, content)

    def end(self, error: BaseException | None) -> None:
        """Complete the copy, or remove it.

        Args:
            error: of the save; None: the file is on storage.
        """
        if error is not None:
            self.error = f"the save failed: {error}"
        if self._copy is None:
            return
        with self._errors_noted():
            if self.error is None:
                self._copy.occupy()
                self._copy.complete()
        self._copy.abandon()

    def _put(self, offset: int, content: object) -> None:
        if self.error is None and self._copy is not None:
            self._copy.write(offset, content)

    @contextlib.contextmanager
    def _errors_noted(self) -> Iterator[None]:
        """Have an error in the block, of whatever kind, end the copy and not the save."""
        try:
            yield
        except Exception as error:
            self.error = str(error) or repr(error)


class _CopyingWriter:
    """Writes a file and its copy.

    Args:
        writer: of the file.
        copy: in memory.
    """

    def __init__(self, writer: PieceWriter, copy: OwnCopy) -> None:
        self._writer, self._copy = writer, copy

    def write(self, extents: Sequence[Extent]) -> list[int]:
        copying = self._copy.threads.submit(lambda: self._copy.write(extents))
        try:
            return self._writer.write(extents)
        finally:
            wait([copying])  # the caller uses the memory for other bytes

    def write_bytes(self, parts: Iterable[tuple[int, bytes]]) -> None:
        parts = list(parts)
        self._copy.write_bytes(parts)
        self._writer.write_bytes(parts)

    def commit(self) -> None:
        self._writer.commit()

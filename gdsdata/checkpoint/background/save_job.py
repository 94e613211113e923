"""A state on its way from the thread that saves it to the threads that write it."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from gdsdata.checkpoint.background.own_copy import NO_COPY, NoCopy, OwnCopy, PieceWriter
from gdsdata.checkpoint.background.save_content import SaveContent, TensorsLayout
from gdsdata.checkpoint.background.save_counts import SaveCounts
from gdsdata.checkpoint.background.staging import (
    NO_SOURCES,
    Column,
    Part,
    Piece,
    Snapshot,
    Snapshots,
    Sources,
    Staged,
    pieces,
)
from gdsdata.checkpoint.background.staging_memory import Staging
from gdsdata.checkpoint.file_writer import Extent, FileWriter, crc32_of_all
from gdsdata.checkpoint.threads import DaemonThreads, results_of
from gdsdata.checkpoint.torch_zip.gathering import SHORT_BYTES
from gdsdata.checkpoint.torch_zip.state_layout import StateLayout
from gdsdata.errors import SaveAborted
from gdsdata.io import engine
from gdsdata.io.captures import beside_captures
from gdsdata.io.options import EngineOptions

# Pieces that are written at a time: storage works on others while Python gets to the next one. In
# the background of a Python loop, 2 pieces had 0.86 and 0.80 of the raw write, 4 had 0.89 and 0.83,
# 8 no more than noise above that (H200).
PIECES_AT_A_TIME = 4
# If a GPU copies so many bytes a storage, staging seldom needs the GIL.
_LONG_STORAGE_BYTES = 1 << 20
_MOST_COPIED_ON_CPU = 1 / 16  # of a state that a GPU copies


class SaveJob:
    """The state of one save. One thread calls `stage`, another one `write`.

    Args:
        step: the step.
        content: what is saved.
        staging: the host memory that the state passes through.
        snapshots: copies the state on its devices if there is room.
        counts: counts the bytes that are staged and written; None: nothing does.

    Attributes:
        step: the step.
        size_bytes: the size of all tensors' memory.
        is_copied: the state has been copied on its devices, so its owner may change it before it
            has been staged.
    """

    def __init__(
        self,
        step: int,
        content: SaveContent,
        staging: Staging,
        snapshots: Snapshots,
        counts: SaveCounts | None = None,
    ) -> None:
        self.step, self._counts = step, counts or SaveCounts()
        self._sources, self._layout = content
        self.size_bytes = int(self._layout.storages.sizes_bytes.sum())
        count = len(self._layout.storages)
        self._checksums = np.zeros(count, np.uint32)
        self._has_header = np.zeros(count, np.bool_)  # written with the storage
        self._staging = staging
        self._staged: queue.SimpleQueue[Staged | BaseException | None] = queue.SimpleQueue()  # None: the end
        self._cancelled = threading.Event()  # what is staged will not be written
        # Writing begins when the state is staged, or finds no room: two threads that ask for the
        # GIL slow each other. It begins at once if a GPU copies.
        self._may_write = threading.Event()
        if is_copied_by_gpus(self._sources.is_on_cpu, self._layout.storages.sizes_bytes):
            self._may_write.set()
        self._snapshot: Snapshot | None = None
        if snapshots.makes_any:
            self._snapshot = snapshots.take([self._sources.bytes_of(storage) for storage in range(count)])
        self.is_copied = self._snapshot is not None
        if self._snapshot is not None:
            self._sources = Sources.of(self._snapshot.storages)

    @beside_captures()
    def stage(self) -> None:
        """Copy the state to the host, as fast as there is room.

        Ends early if `write` has failed.
        """
        copied: dict[torch.device, torch.cuda.Event] = {}  # for each GPU, the end of all copies from it
        try:
            try:
                with self._snapshot.streams() if self._snapshot else contextlib.nullcontext():
                    self._stage_pieces(copied)
            finally:
                for event in copied.values():
                    event.synchronize()
        except BaseException as error:
            self._staged.put(error)
            raise
        finally:
            self._sources = NO_SOURCES
            if self._snapshot:
                self._snapshot.release()
            if self._cancelled.is_set():
                self.cancel()
            self._staged.put(None)
            self._may_write.set()

    def abandon(self, error: BaseException) -> None:
        """End the wait of `write` for the rest of the state. May be called after `stage`, too.

        Ctrl-C may come before `stage` begins, or at any call in it.
        """
        self._staged.put(error)
        self._may_write.set()

    def _stage_pieces(self, copied: dict[torch.device, torch.cuda.Event]) -> None:
        self._staging.expect(self._layout.end, self._sources.first_gpu, hurries=not self.is_copied)
        records = self._layout.storages
        for piece in pieces(records.offsets, records.sizes_bytes, self._staging.piece_bytes):
            memory = self._staging.take(self._cancelled.is_set, self._may_write.set)
            if memory is None:
                return
            staged = Staged(piece, memory)
            try:
                staged.copy_from(self._sources)
                self._counts.staged(piece.size_bytes)
            finally:
                copied |= staged.copied
                self._staged.put(staged)

    def check(self) -> None:
        """Raise the error that keeps this save from beginning: there is none."""

    def write(self, path: str, writers: DaemonThreads, options: EngineOptions, copy: OwnCopy | NoCopy = NO_COPY) -> int:
        """Write the file; it is on storage when this returns.

        Args:
            path: of the file.
            writers: write pieces.
            options: of the engine.
            copy: gets all bytes too.

        Returns:
            Its size in bytes.

        Raises:
            IoError: the file cannot be written, or the disk is full.
        """
        layout = self._layout
        parts_of: dict[int, list[tuple[int, int, int]]] = {}  # of each storage: begin, CRC-32, size
        with FileWriter(path, layout.end, options) as file:
            writer = copy.beside(file, layout.end)
            written = []
            try:
                for staged in self._staged_pieces():
                    written.append(writers.submit(functools.partial(self._write_piece, writer, staged)))
            finally:
                wait(written)
            for checksums in results_of(written):
                for part, checksum in checksums:
                    parts_of.setdefault(part.storage, []).append((part.begin, checksum, part.size_bytes))
            for storage, parts in parts_of.items():
                self._checksums[storage] = crc32_of_all(*(part[1:] for part in sorted(parts)))
            writer.write_bytes(layout.around(np.flatnonzero(~self._has_header).tolist(), self._checksums))
            writer.commit()
        return self._layout.end

    def cancel(self) -> None:
        """Release what is staged and not written.

        The same happens to what is staged from now on.
        """
        self._cancelled.set()
        with contextlib.suppress(queue.Empty):
            while True:
                staged = self._staged.get_nowait()
                if isinstance(staged, Staged):
                    self._release(staged)

    def _staged_pieces(self) -> Iterator[Staged]:
        self._may_write.wait()
        while (staged := self._staged.get()) is not None:
            if isinstance(staged, BaseException):
                raise RuntimeError(f"the state could not be copied: {staged!r}") from staged
            if self._cancelled.is_set():
                self._release(staged)
            else:
                yield staged

    def _release(self, staged: Staged) -> None:
        staged.wait()
        self._staging.release(staged.memory)

    def _write_piece(self, writer: PieceWriter, staged: Staged) -> list[tuple[Part, int]]:
        """Write a piece.

        Returns:
            The checksums of the parts that were not written with their headers.
        """
        try:
            staged.wait()
            if self._cancelled.is_set():
                return []
            if isinstance(self._layout, TensorsLayout):
                writer.write([staged.whole])
                parts, checksums = [], []
            else:
                runs, others = self._runs_of(self._layout, staged.piece)
                whole = [self._with_headers(self._layout, staged, first, last) for first, last in runs]
                parts = staged.piece.parts_of(others)
                checksums = writer.write([*whole, *((part.file_offset, staged.bytes_of(part)) for part in parts)])
                del checksums[: len(whole)]
            self._counts.written(staged.piece.size_bytes)
            return list(zip(parts, checksums, strict=True))
        except BaseException:
            self._cancelled.set()
            raise
        finally:
            self._staging.release(staged.memory)

    @staticmethod
    def _runs_of(layout: StateLayout, piece: Piece) -> tuple[list[tuple[int, int]], list[int]]:
        """Divide the storages of a piece into two.

        Returns:
            Runs of short storages of which the piece has all, the headers included: where each run
            begins and ends. And the other storages.
        """
        records, within = layout.storages, slice(piece.first, piece.last)
        is_whole = (piece.sizes_bytes == records.sizes_bytes[within]) & (piece.sizes_bytes < SHORT_BYTES)
        is_whole &= records.header_offsets[within] >= piece.file_begin
        cuts = np.flatnonzero(np.diff(is_whole, prepend=False, append=False)) + piece.first
        others = np.flatnonzero(~is_whole) + piece.first
        return list(zip(cuts[::2].tolist(), cuts[1::2].tolist(), strict=True)), others.tolist()

    def _with_headers(self, layout: StateLayout, staged: Staged, first: int, last: int) -> Extent:
        """Put headers between the storages of a run, and return where the run goes in the file."""
        records, file_begin, run = layout.storages, staged.piece.file_begin, slice(first, last)
        places = records.offsets[run] - file_begin
        self._checksums[run] = engine.crc32_of_parts(staged.memory, places, records.sizes_bytes[run])
        layout.stamp(staged.memory.numpy(), file_begin, first, last, self._checksums)
        self._has_header[run] = True
        begin, end = int(records.header_offsets[first]), int(records.offsets[last - 1] + records.sizes_bytes[last - 1])
        return begin, staged.memory[begin - file_begin : end - file_begin]


def is_copied_by_gpus(is_on_cpu: NDArray[np.bool_], sizes_bytes: Column) -> bool:
    """Return whether GPUs copy nearly all of a state, in long storages.

    Args:
        is_on_cpu, sizes_bytes: of each storage.
    """
    copied, all_bytes = int(sizes_bytes[~is_on_cpu].sum()), int(sizes_bytes.sum())
    is_long = copied >= max(1, len(sizes_bytes)) * _LONG_STORAGE_BYTES
    return is_long and all_bytes - copied <= _MOST_COPIED_ON_CPU * all_bytes


class FailedJob:
    """A save that cannot begin on this rank.

    It takes part, so that the other ranks learn the reason.
    """

    def __init__(self, step: int, error: BaseException) -> None:
        self.step = step
        self._error = error if isinstance(error, Exception) else SaveAborted(f"the save was interrupted: {error!r}")

    def check(self) -> None:
        raise self._error

    def write(self, path: str, writers: DaemonThreads, options: EngineOptions, copy: OwnCopy | NoCopy) -> NoReturn:
        raise self._error

    def cancel(self) -> None:
        pass

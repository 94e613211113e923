"""A state on its way from the thread that saves it to the threads that write it."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any, NoReturn

import torch

from gdsdata.checkpoint.background.staging import Part, Snapshots, Staged, pieces
from gdsdata.checkpoint.background.staging_memory import Staging
from gdsdata.checkpoint.file_writer import FileWriter, crc32_of_all
from gdsdata.checkpoint.gc_pause import collector_paused
from gdsdata.checkpoint.stored import bytes_of_storage
from gdsdata.checkpoint.threads import DaemonThreads
from gdsdata.checkpoint.torch_zip.archive_writer import Layout
from gdsdata.checkpoint.torch_zip.pickling import pickle_with_storages
from gdsdata.io.options import EngineOptions


class SaveJob:
    """The state of one save. One thread calls `stage`, another one `write`.

    Args:
        step: the step.
        state: what is saved, by name.
        staging: the host memory that the state passes through.
        snapshots: copies the state on its devices if there is room.

    Attributes:
        step: the step.
        size_bytes: the size of all storages.
        is_copied: the state has been copied on its devices, so its owner may change it before it
            has been staged.
    """

    @collector_paused()
    def __init__(self, step: int, state: dict[str, Any], staging: Staging, snapshots: Snapshots) -> None:
        self.step = step
        pickled, storages = pickle_with_storages(state)
        self._storages = [bytes_of_storage(storage) for storage in storages]
        sizes_bytes = [one.nbytes for one in self._storages]
        self.size_bytes = sum(sizes_bytes)
        self._layout = Layout(pickled, sizes_bytes)
        self._staging = staging
        self._staged: queue.SimpleQueue[Staged | BaseException | None] = queue.SimpleQueue()  # None: the end
        self._cancelled = threading.Event()  # what is staged will not be written
        # Writing begins when the state is staged, or finds no room: two threads that ask for the
        # GIL slow each other.
        self._may_write = threading.Event()
        self._snapshot = snapshots.take(self._storages)
        self.is_copied = self._snapshot is not None
        if self._snapshot is not None:
            self._storages = self._snapshot.storages

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
            self._storages = []
            if self._snapshot:
                self._snapshot.release()
            if self._cancelled.is_set():
                self.cancel()
            self._staged.put(None)
            self._may_write.set()

    def _stage_pieces(self, copied: dict[torch.device, torch.cuda.Event]) -> None:
        sizes = [one.nbytes for one in self._storages]
        gpus = (one.device for one in self._storages if one.device.type == "cuda")
        self._staging.expect(self._layout.end, next(gpus, None), hurries=not self.is_copied)
        for piece in pieces(self._layout.offsets, sizes, self._staging.piece_bytes):
            memory = self._staging.take(self._cancelled.is_set, self._may_write.set)
            if memory is None:
                return
            staged = Staged(piece, memory)
            try:
                staged.copy_from(self._storages)
            finally:
                copied |= staged.copied
                self._staged.put(staged)

    def check(self) -> None:
        """Raise the error that keeps this save from beginning: there is none."""

    def write(self, path: str, writers: DaemonThreads, options: EngineOptions) -> int:
        """Write the file; it is on storage when this returns.

        Returns:
            Its size in bytes.

        Raises:
            IoError: the file cannot be written, or the disk is full.
        """
        parts_of: list[list[tuple[int, int, int]]] = [[] for _ in self._layout.offsets]  # begin, CRC-32, size
        with FileWriter(path, self._layout.end, options) as writer:
            written = []
            try:
                for staged in self._staged_pieces():
                    written.append(writers.submit(functools.partial(self._write_piece, writer, staged)))
            finally:
                wait(written)
            for one in written:
                for part, checksum in one.result():
                    parts_of[part.storage].append((part.begin, checksum, part.size_bytes))
            checksums = [crc32_of_all(*(part[1:] for part in sorted(parts))) for parts in parts_of]
            writer.write_bytes(self._layout.frame(checksums))
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

    def _write_piece(self, writer: FileWriter, staged: Staged) -> list[tuple[Part, int]]:
        try:
            staged.wait()
            parts = staged.piece.parts
            if self._cancelled.is_set():
                return []
            checksums = writer.write([(part.file_offset, staged.bytes_of(part)) for part in parts])
            return list(zip(parts, checksums, strict=True))
        except BaseException:
            self._cancelled.set()
            raise
        finally:
            self._staging.release(staged.memory)


class FailedJob:
    """A save that cannot begin on this rank.

    It takes part, so that the other ranks learn the reason.
    """

    def __init__(self, step: int, error: Exception) -> None:
        self.step, self._error = step, error

    def check(self) -> None:
        raise self._error

    def write(self, path: str, writers: DaemonThreads, options: EngineOptions) -> NoReturn:
        raise self._error

    def cancel(self) -> None:
        pass

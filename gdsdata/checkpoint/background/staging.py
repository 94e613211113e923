"""States on their way to files: in pieces, or copied on their devices first.

The memory of the host that pieces are in is `staging_memory.Staging`.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gdsdata.checkpoint.partial_pages import PAGE_BYTES
from gdsdata.checkpoint.stored import bytes_of_storage
from gdsdata.io import engine

Column = NDArray[np.int64]

# torch copies longer parts with several threads. A call of it takes as long as copying 64 KiB.
_COPIED_ALONE_BYTES = 64 << 10
_MOST_COPIED_ON_CPU_BYTES = 16 << 20  # enough for counters and generators beside tensors on GPUs


class Part(NamedTuple):
    """Consecutive bytes of a storage in a piece.

    Attributes:
        storage: the index of the storage.
        begin: the offset of the first byte in the storage.
        file_offset: the offset of the first byte in the file.
        size_bytes: how many bytes.
    """

    storage: int
    begin: int
    file_offset: int
    size_bytes: int


@dataclass(frozen=True)
class Piece:
    """A range of the file that is staged in one buffer.

    Attributes:
        file_begin: where it begins: at a whole page of the file.
        first: the index of the first storage that has bytes in the range.
        begins, file_offsets, sizes_bytes: for that storage and the following ones, the columns of
            their `Part`.
    """

    file_begin: int
    first: int
    begins: Column
    file_offsets: Column
    sizes_bytes: Column

    @property
    def last(self) -> int:
        """The index after the last storage."""
        return self.first + len(self.begins)

    @property
    def size_bytes(self) -> int:
        """How many bytes of storages it has."""
        return int(self.sizes_bytes.sum())

    @property
    def places(self) -> Column:
        """Where the parts lie in the buffer."""
        return self.file_offsets - self.file_begin

    @property
    def parts(self) -> list[Part]:
        """All that the range has of storages."""
        return self.parts_of(range(self.first, self.last))

    def parts_of(self, storages: Iterable[int]) -> list[Part]:
        """Return what the range has of some storages."""
        rows = [(storage, storage - self.first) for storage in storages]
        columns = self.begins, self.file_offsets, self.sizes_bytes
        parts = [Part(storage, *(int(column[row]) for column in columns)) for storage, row in rows]
        return [part for part in parts if part.size_bytes > 0]


def pieces(offsets: Sequence[int] | Column, sizes_bytes: Sequence[int] | Column, most_bytes: int) -> Iterator[Piece]:
    """Divide storages into pieces.

    Args:
        offsets: where the storages lie in the file, rising.
        sizes_bytes: their sizes.
        most_bytes: the size of a piece.
    """
    begin_of, size_of = np.asarray(offsets, np.int64), np.asarray(sizes_bytes, np.int64)
    end_of = begin_of + size_of
    at = 0  # everything before it is in pieces
    with_bytes = np.flatnonzero(size_of)
    while (found := np.searchsorted(end_of[with_bytes], at, side="right")) < len(with_bytes):
        first = int(with_bytes[found])
        at = max(at, int(begin_of[first]))
        file_begin = at // PAGE_BYTES * PAGE_BYTES
        end = file_begin + most_bytes
        last = int(np.searchsorted(begin_of, end, side="left"))
        file_offsets = np.maximum(begin_of[first:last], at)
        sizes = np.maximum(np.minimum(end_of[first:last], end) - file_offsets, 0)
        yield Piece(file_begin, first, file_offsets - begin_of[first:last], file_offsets, sizes)
        at = end


@dataclass(frozen=True)
class Sources:
    """The storages of a state, which are to be staged.

    Attributes:
        storages: each as a storage, or as a tensor (uint8, one dimension).
        addresses: where they lie in memory.
        is_on_cpu: which of them lie on the CPU.
    """

    storages: Sequence[torch.UntypedStorage | torch.Tensor]
    addresses: NDArray[np.uint64]
    is_on_cpu: NDArray[np.bool_]

    def bytes_of(self, storage: int) -> torch.Tensor:
        """Return the bytes of a storage as a tensor (uint8, one dimension)."""
        found = self.storages[storage]
        return found if isinstance(found, torch.Tensor) else bytes_of_storage(found)

    @property
    def first_gpu(self) -> torch.device | None:
        """The GPU of the first storage that lies on one; None if there is none."""
        devices = (self.storages[i].device for i in np.flatnonzero(~self.is_on_cpu).tolist())
        return next((device for device in devices if device.type == "cuda"), None)

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Sources:
        """Return tensors (uint8, one dimension) as sources."""
        addresses = np.array([one.data_ptr() for one in tensors], np.uint64)
        return Sources(tensors, addresses, np.array([one.is_cpu for one in tensors], np.bool_))


NO_SOURCES = Sources.of([])


@dataclass
class Staged:
    """A piece in a buffer.

    Attributes:
        piece: the piece.
        memory: the buffer: uint8, one dimension, at least as long as the piece.
        copied: for each GPU, an event after which the piece's bytes are there.
    """

    piece: Piece
    memory: torch.Tensor
    copied: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)

    def wait(self) -> None:
        """Wait until the copies from GPUs are complete."""
        for event in self.copied.values():
            event.synchronize()

    def bytes_of(self, part: Part) -> torch.Tensor:
        """Return the bytes of a part."""
        first = part.file_offset - self.piece.file_begin
        return self.memory[first : first + part.size_bytes]

    @property
    def whole(self) -> tuple[int, torch.Tensor]:
        """Where the piece goes in a file without gaps, and its bytes."""
        offsets = self.piece.file_offsets
        first, end = int(offsets[0]), int(offsets[-1] + self.piece.sizes_bytes[-1])
        return first, self.memory[first - self.piece.file_begin : end - self.piece.file_begin]

    def copy_from(self, sources: Sources) -> None:
        """Copy the parts from their storages.

        Args:
            sources: all storages.

        Stream semantics: copies from a GPU come after the current work of its current stream.
        `wait` waits for them.
        """
        piece, within = self.piece, slice(self.piece.first, self.piece.last)
        is_together = sources.is_on_cpu[within] & (piece.sizes_bytes < _COPIED_ALONE_BYTES)
        addresses = sources.addresses[within] + piece.begins.astype(np.uint64)
        engine.copy_parts(
            addresses[is_together], piece.sizes_bytes[is_together], self.memory, piece.places[is_together]
        )
        alone = piece.parts_of((np.flatnonzero(~is_together) + piece.first).tolist())
        try:
            for part in alone:
                source = sources.bytes_of(part.storage)[part.begin : part.begin + part.size_bytes]
                self.bytes_of(part).copy_(source, non_blocking=source.device.type == "cuda")
        finally:  # after an error, the copies before it are still in progress
            for device in dict.fromkeys(sources.storages[part.storage].device for part in alone):
                if device.type == "cuda":
                    self.copied[device] = torch.cuda.current_stream(device).record_event()


class Snapshot:
    """Copies of storages on their own devices.

    Its owner releases it when they have been staged.

    Attributes:
        storages: the copies; on each GPU they come after the work that its current stream had when
            this was made.
    """

    def __init__(self, storages: list[torch.Tensor], on_release: Callable[[], object]) -> None:
        self.storages, self._on_release = storages, on_release
        devices = dict.fromkeys(one.device for one in storages if one.device.type == "cuda")
        self._made = {device: torch.cuda.current_stream(device).record_event() for device in devices}

    @contextlib.contextmanager
    def streams(self) -> Iterator[None]:
        """For ``with``: work on each GPU in a new stream, which follows the copies."""
        with contextlib.ExitStack() as current:
            for device, event in self._made.items():
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_event(event)
                current.enter_context(torch.cuda.stream(stream))
            yield

    def release(self) -> None:
        """Free the copies, which nothing may read any more."""
        self.storages = []
        self._on_release()


class Snapshots:
    """Makes snapshots within a bound of memory. Any thread may call it.

    Args:
        most_bytes: on each GPU, for all snapshots that have not been released; 0: none is made.

    Attributes:
        makes_any: whether ``most_bytes`` allows any.
    """

    def __init__(self, most_bytes: int) -> None:
        self.makes_any = most_bytes > 0
        self._most = most_bytes
        self._taken: collections.Counter[torch.device] = collections.Counter()
        self._lock = threading.Lock()  # guards _taken

    def take(self, storages: Sequence[torch.Tensor]) -> Snapshot | None:
        """Copy storages (uint8, one dimension).

        Returns:
            None if they do not fit, or if more than 16 MiB of them are on the CPU.
        """
        sizes: collections.Counter[torch.device] = collections.Counter()
        for one in storages:
            sizes[one.device] += one.nbytes
        with self._lock:
            if not all(self._taken[device] + size <= self._most_on(device) for device, size in sizes.items()):
                return None
            self._taken += sizes
        try:
            return Snapshot([one.clone() for one in storages], lambda: self._return(sizes))
        except torch.OutOfMemoryError:
            self._return(sizes)
            engine.warn_once(
                "a GPU has no memory for a state's copy, which device_staging_bytes allows: save() waits instead"
            )
            return None
        except BaseException:
            self._return(sizes)
            raise

    def _most_on(self, device: torch.device) -> int:
        return self._most if device.type == "cuda" else min(self._most, _MOST_COPIED_ON_CPU_BYTES)

    def _return(self, sizes: collections.Counter[torch.device]) -> None:
        with self._lock:
            self._taken -= sizes

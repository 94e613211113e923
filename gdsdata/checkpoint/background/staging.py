"""States on their way to files: in pieces, or copied on their devices first.

The memory of the host that pieces are in is `staging_memory.Staging`.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from gdsdata.checkpoint.partial_pages import PAGE_BYTES
from gdsdata.io.engine import warn_once

_MOST_COPIED_ON_CPU_BYTES = 16 << 20  # enough for counters and generators beside tensors on GPUs


@dataclass(frozen=True)
class Part:
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
        parts: all that the range has of storages.
    """

    file_begin: int
    parts: list[Part]


def pieces(offsets: Sequence[int], sizes_bytes: Sequence[int], most_bytes: int) -> Iterator[Piece]:
    """Divide storages into pieces.

    Args:
        offsets: where the storages lie in the file, rising.
        sizes_bytes: their sizes.
        most_bytes: the size of a piece.
    """
    piece: Piece | None = None
    for storage, (offset, size_bytes) in enumerate(zip(offsets, sizes_bytes, strict=True)):
        begin = 0
        while begin < size_bytes:
            at = offset + begin
            if piece is None or at >= piece.file_begin + most_bytes:
                if piece is not None:
                    yield piece
                piece = Piece(at // PAGE_BYTES * PAGE_BYTES, [])
            count = min(size_bytes - begin, piece.file_begin + most_bytes - at)
            piece.parts.append(Part(storage, begin, at, count))
            begin += count
    if piece is not None:
        yield piece


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

    def copy_from(self, storages: Sequence[torch.Tensor]) -> None:
        """Copy the parts from their storages (uint8, one dimension).

        Stream semantics: copies from a GPU come after the current work of its current stream.
        `wait` waits for them.
        """
        try:
            for part in self.piece.parts:
                source = storages[part.storage][part.begin : part.begin + part.size_bytes]
                self.bytes_of(part).copy_(source, non_blocking=source.device.type == "cuda")
        finally:  # after an error, the copies before it are still in progress
            devices = dict.fromkeys(storages[part.storage].device for part in self.piece.parts)
            for device in devices:
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
    """

    def __init__(self, most_bytes: int) -> None:
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
            warn_once("a GPU has no memory for a state's copy, which device_staging_bytes allows: save() waits instead")
            return None
        except BaseException:
            self._return(sizes)
            raise

    def _most_on(self, device: torch.device) -> int:
        return self._most if device.type == "cuda" else min(self._most, _MOST_COPIED_ON_CPU_BYTES)

    def _return(self, sizes: collections.Counter[torch.device]) -> None:
        with self._lock:
            self._taken -= sizes

"""Host memory of a fixed size that states pass through on their way to files, so that training can go on."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from gdsdata.checkpoint.writing import PAGE_BYTES

_PIECE_BYTES = 32 << 20  # several are under way to storage, and a small state does not take much


@dataclass(frozen=True)
class Part:
    """Consecutive bytes of a storage in a piece.

    Attributes:
        storage: its index.
        begin: of the first byte in the storage.
        file_offset: of it in the file.
        size_bytes: how many.
    """

    storage: int
    begin: int
    file_offset: int
    size_bytes: int


@dataclass(frozen=True)
class Piece:
    """A range of the file that is staged at once: it begins at a whole page of the file, and has only these parts."""

    file_begin: int
    parts: list[Part]


def pieces(offsets: Sequence[int], sizes_bytes: Sequence[int], most_bytes: int) -> Iterator[Piece]:
    """Storages of these sizes, which lie at these offsets of the file in rising order, in pieces of ``most_bytes``."""
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
    """A piece in staging memory.

    Attributes:
        piece: which.
        memory: of it: uint8, as long as a piece at most.
        copied: an event of each GPU, behind which it is there.
    """

    piece: Piece
    memory: torch.Tensor
    copied: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)

    def wait(self) -> None:
        for event in self.copied.values():
            event.synchronize()

    def bytes_of(self, part: Part) -> torch.Tensor:
        first = part.file_offset - self.piece.file_begin
        return self.memory[first : first + part.size_bytes]

    def copy_from(self, storages: Sequence[torch.Tensor]) -> None:
        """From storages (uint8, one dimension); on a GPU behind what its current stream has been given. See `wait`."""
        try:
            for part in self.piece.parts:
                source = storages[part.storage][part.begin : part.begin + part.size_bytes]
                self.bytes_of(part).copy_(source, non_blocking=source.device.type == "cuda")
        finally:  # what was asked for before an error, too
            devices = dict.fromkeys(storages[part.storage].device for part in self.piece.parts)
            for device in devices:
                if device.type == "cuda":
                    self.copied[device] = torch.cuda.current_stream(device).record_event()


class Staging:
    """Buffers for pieces: made when they are first needed, kept until `free`, never more than ``most_bytes`` of them.

    Args:
        most_bytes: of all of them; one page at least.
    """

    def __init__(self, most_bytes: int) -> None:
        self.piece_bytes = min(_PIECE_BYTES, max(most_bytes // 2 // PAGE_BYTES, 1) * PAGE_BYTES)
        self._most = max(most_bytes // self.piece_bytes, 1)
        self._made = 0
        self._spare: list[torch.Tensor] = []
        self._changed = threading.Condition()

    def take(self, is_off: Callable[[], bool], before_waiting: Callable[[], object]) -> torch.Tensor | None:
        """A buffer, as soon as there is one; None as soon as ``is_off()``."""
        with self._changed:
            while not is_off():
                if self._spare:
                    return self._spare.pop()
                if self._made < self._most:
                    self._made += 1
                    break
                before_waiting()
                self._changed.wait(0.05)
            else:
                return None
        try:
            return _make_buffer(self.piece_bytes)
        except BaseException:
            with self._changed:
                self._made -= 1
            raise

    def give_back(self, buffer: torch.Tensor) -> None:
        with self._changed:
            self._spare.append(buffer)
            self._changed.notify()

    @property
    def size_bytes(self) -> int:
        return self._made * self.piece_bytes


def _make_buffer(size_bytes: int) -> torch.Tensor:
    """On whole pages. Pinned where there may be tensors on a GPU."""
    if torch.cuda.is_initialized():
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

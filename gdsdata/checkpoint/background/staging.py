"""Memory of a fixed size that states pass through on their way to files, so that training can go on: the host's, and
the devices' own, from which they are staged behind the program.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from gdsdata.checkpoint.pages import PAGE_BYTES
from gdsdata.io.engine import warn_once
from gdsdata.io.memory import anonymous_memory

_PIECE_BYTES = 32 << 20  # several are under way to storage, and a small state does not take much
_MOST_COPIED_ON_CPU_BYTES = 16 << 20  # counters and generators, beside tensors on GPUs


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


class Snapshot:
    """Copies of storages where these are. Hold it until they have been staged, and `release` it then.

    Attributes:
        storages: the copies, on each GPU behind what its current stream had been given when they were asked for.
    """

    def __init__(self, storages: list[torch.Tensor], given_back: Callable[[], object]) -> None:
        self.storages, self._given_back = storages, given_back
        devices = dict.fromkeys(one.device for one in storages if one.device.type == "cuda")
        self._made = {device: torch.cuda.current_stream(device).record_event() for device in devices}

    @contextlib.contextmanager
    def streams(self) -> Iterator[None]:
        """Of each GPU the current one is nobody else's, and behind the copies."""
        with contextlib.ExitStack() as current:
            for device, event in self._made.items():
                stream = torch.cuda.Stream(device)
                stream.wait_event(event)
                current.enter_context(torch.cuda.stream(stream))
            yield

    def release(self) -> None:
        """When nothing reads the copies any more."""
        self.storages = []
        self._given_back()


class Snapshots:
    """Makes them, where there is room.

    Args:
        most_bytes: on each GPU, of all that have not been released; 0: none is made.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._taken: collections.Counter[torch.device] = collections.Counter()
        self._lock = threading.Lock()

    def take(self, storages: Sequence[torch.Tensor]) -> Snapshot | None:
        """Of these (uint8, one dimension). None where they do not fit, or much of them is on the CPU."""
        sizes: collections.Counter[torch.device] = collections.Counter()
        for one in storages:
            sizes[one.device] += one.nbytes
        with self._lock:
            if not all(self._taken[device] + size <= self._most_on(device) for device, size in sizes.items()):
                return None
            self._taken += sizes
        try:
            return Snapshot([one.clone() for one in storages], lambda: self._give_back(sizes))
        except torch.OutOfMemoryError:
            self._give_back(sizes)
            warn_once("a GPU has no memory for a state's copy, which device_staging_bytes allows: save() waits instead")
            return None
        except BaseException:
            self._give_back(sizes)
            raise

    def _most_on(self, device: torch.device) -> int:
        return self._most if device.type == "cuda" else min(self._most, _MOST_COPIED_ON_CPU_BYTES)

    def _give_back(self, sizes: collections.Counter[torch.device]) -> None:
        with self._lock:
            self._taken -= sizes


def _make_buffer(size_bytes: int) -> torch.Tensor:
    """On whole pages. Pinned where there may be tensors on a GPU."""
    if torch.cuda.is_initialized():
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(anonymous_memory(size_bytes, prefer_huge_pages=True))

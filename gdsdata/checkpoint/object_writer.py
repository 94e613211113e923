"""`ObjectWriter`: writes tensors into an object, which appears when it is complete."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gdsdata.checkpoint.file_writer import Extent
from gdsdata.checkpoint.gc_pause import collector_resumed
from gdsdata.checkpoint.partial_pages import PAGE_BYTES
from gdsdata.checkpoint.threads import CallThreads, results_of
from gdsdata.checkpoint.urls import store_and_name
from gdsdata.io import engine
from gdsdata.io.memory import paged_memory, pinned_memory
from gdsdata.progress_bars import current

if TYPE_CHECKING:
    from gdsdata.storage.store import Upload

# A smaller object is one request. S3 takes no part below 5 MiB but the last one.
PUT_BYTES = 8 << 20
# Parts on their way at a time. S3's user guide counts 85 to 90 MB/s a connection (performance
# design patterns), so these fill a link of 5 Gbit/s. SeaweedFS on the same machine takes as much
# from 4 (0.05 GB/s on 2 busy cores, 2026-11-26).
PARTS_AT_A_TIME = 8


@dataclass
class _Part:
    """A part of the object that is put together in memory.

    Attributes:
        memory: its bytes: uint8, one dimension.
        arrived: how many of them have arrived.
    """

    memory: torch.Tensor
    arrived: int = 0


class ObjectWriter:
    """Writes an object, in parts if it is large. Its methods are those of `FileWriter`.

    Used by ``with``. Without `commit`, the parts are deleted, and the URL has what was there
    before. One thread at a time may call it. It owns the upload, and the threads that send parts.

    Memory: `PARTS_AT_A_TIME` parts on their way, and those that wait for a header whose checksum is
    not known yet: the one at the object's beginning, and one for each end of the storage in
    progress. Whole parts of a tensor on the CPU are sent from where they lie. Others pass through
    memory, which is pinned if they come from a GPU.

    Args:
        url: of the object.
        size_bytes: the size that it will have.

    Raises:
        FileNotFoundError: there is no such bucket.
        PermissionError, IoError: the store refuses the upload, or the URL names a folder.
    """

    def __init__(self, url: str, size_bytes: int) -> None:
        self._store, self._key = store_and_name(url)
        self._size_bytes = self._left_bytes = size_bytes
        self._upload = self._store.upload(self._key, size_bytes) if size_bytes > PUT_BYTES else None
        self._part_bytes = size_bytes if self._upload is None else self._upload.part_bytes
        self._parts: dict[int, _Part] = {}  # that are not complete, by number
        self._spare: list[torch.Tensor] = []  # memory of parts that were sent
        self._threads = CallThreads(PARTS_AT_A_TIME, "gdsdata-upload")
        self._sends: set[Future[None]] = set()  # on their way
        self._is_complete = False
        self._bar = current()
        self._bar.expect(size_bytes)

    def __enter__(self) -> ObjectWriter:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with collector_resumed():
                self._threads.shutdown()
        finally:
            if self._upload is not None and not self._is_complete:
                self._upload.abort()

    def write_in_batches(
        self, extents: Iterable[Extent], places: Sequence[tuple[int, int]] | None = None
    ) -> Generator[int, None, None]:
        """Take extents, and yield the CRC-32 of each.

        Few parts wait in memory if extents rise, and if headers are written when the CRC-32 that
        they contain has been yielded.

        Stream semantics: bytes on a GPU are read after the current work of its current stream.
        """
        for offset, tensor in extents:
            yield self._take(offset, tensor)

    def write_bytes(self, parts: Iterable[tuple[int, bytes]]) -> None:
        for offset, content in parts:
            if content:
                self._take(offset, torch.from_numpy(np.frombuffer(bytearray(content), np.uint8)))

    def commit(self) -> None:
        """Send what is left, and make the object appear.

        Raises:
            PermissionError, IoError: the store refuses it.
        """
        assert self._left_bytes == 0  # the layout has no gaps
        with collector_resumed():
            if self._upload is None:
                memory = self._parts[0].memory[: self._size_bytes]
                self._store.put(self._key, memory.numpy().data)
            else:
                self._wait_for_room(0)
                self._upload.complete()
        self._is_complete = True

    def _take(self, offset: int, tensor: torch.Tensor) -> int:
        """Take bytes, and return their CRC-32."""
        crc32 = done = 0
        while done < tensor.nbytes:
            number, begin = divmod(offset + done, self._part_bytes)
            count = min(self._part_bytes - begin, tensor.nbytes - done)
            of_piece = self._take_piece(number, begin, tensor[done : done + count])
            crc32 = engine.crc32_joined(crc32, of_piece, count)
            done += count
        return crc32

    def _take_piece(self, number: int, begin: int, piece: torch.Tensor) -> int:
        """Take bytes of one part, and return their CRC-32."""
        self._left_bytes -= piece.nbytes
        if piece.is_cpu and piece.nbytes == self._size_of(number) and self._upload is not None:
            self._send(number, piece)
            return _crc32(piece)
        if number not in self._parts:
            self._parts[number] = _Part(self._memory(piece.device))
        part = self._parts[number]
        target = part.memory[begin : begin + piece.nbytes]
        target.copy_(piece, non_blocking=piece.device.type == "cuda")
        if piece.device.type == "cuda":
            torch.cuda.current_stream(piece.device).record_event().synchronize()
        crc32 = _crc32(target)
        part.arrived += piece.nbytes
        if part.arrived == self._size_of(number) and self._upload is not None:
            self._send(number, self._parts.pop(number).memory, is_spare=True)
        return crc32

    def _size_of(self, number: int) -> int:
        return min(self._part_bytes, self._size_bytes - number * self._part_bytes)

    def _memory(self, device: torch.device) -> torch.Tensor:
        """Return memory for a part, with arbitrary content."""
        if self._spare:
            return self._spare.pop()
        size_bytes = -(-self._part_bytes // PAGE_BYTES) * PAGE_BYTES
        return pinned_memory(size_bytes, device) if device.type == "cuda" else paged_memory(size_bytes, 0)

    def _send(self, number: int, memory: torch.Tensor, is_spare: bool = False) -> None:
        """Send a complete part. Waits if as many are on their way as may be.

        Args:
            number: of the part.
            memory: its bytes, and perhaps more behind them.
            is_spare: use the memory again when it was sent.

        Raises:
            PermissionError, IoError: the store has refused an earlier part.
        """
        assert self._upload is not None
        self._wait_for_room(PARTS_AT_A_TIME - 1)
        body = memory[: self._size_of(number)].detach().numpy().data
        call = functools.partial(self._send_part, self._upload, number, body)
        sending = self._threads.submit(call)
        if is_spare:
            sending.add_done_callback(lambda _: self._spare.append(memory))
        self._sends.add(sending)

    def _send_part(self, upload: Upload, number: int, body: memoryview) -> None:
        upload.send(number, body)
        self._bar.add(len(body))

    def _wait_for_room(self, most: int) -> None:
        """Wait until at most so many parts are on their way, and raise the error of one."""
        while len(self._sends) > most:
            with collector_resumed():
                ended, self._sends = wait(self._sends, return_when=FIRST_COMPLETED)
            for _ in results_of([ended.pop() for _ in range(len(ended))]):
                pass


def _crc32(memory: torch.Tensor) -> int:
    ends = np.array([0], np.int64), np.array([memory.nbytes], np.int64)
    return int(engine.crc32_of_parts(memory, *ends)[0])

"""Host memory for batches of many sizes, used again when no view of it is left."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque

import numpy as np
import torch

from gdsdata.io import engine

_PAGE_BYTES = 4096


class MemoryPool:
    """Buffers that return to the pool when the last tensor that views them is freed.

    Any thread may call it.

    The kernel zeroes new pages before a process may use them. That takes about as long as filling
    them, so the pool keeps buffers.

    Two kinds of memory stay outside. `checkpoint.background.staging_memory` has a fixed budget and
    makes its caller wait, and its buffers are pinned and returned when a file has them.
    `data.batches.pieces` needs files in memory, because the engine reads from them too.

    Args:
        most_kept: free buffers that the pool keeps; those in use are not counted.
        least_bytes: smaller buffers are torch's own: malloc has them at hand, and a user may keep
            very many.
    """

    def __init__(self, most_kept: int, least_bytes: int = 1 << 20) -> None:
        self._least_bytes = max(least_bytes, 1)
        self._spare: deque[np.ndarray] = deque(maxlen=most_kept)

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return memory with arbitrary content.

        Returns:
            uint8 ``(size_bytes,)``. If it has ``least_bytes``, it begins at a page.
        """
        if size_bytes < self._least_bytes:
            return torch.empty(size_bytes, dtype=torch.uint8)
        buffer = self._fitting(size_bytes)
        view = buffer[:size_bytes]  # an object of its own: it is freed with the tensors, and the buffer is not
        weakref.finalize(view, self._spare.append, buffer).atexit = False
        return torch.from_numpy(view)

    def _fitting(self, size_bytes: int) -> np.ndarray:
        """Return the last buffer that was released, and free smaller ones.

        It may still be in the processor's caches.
        """
        with contextlib.suppress(IndexError):
            while True:
                buffer = self._spare.pop()
                if len(buffer) >= size_bytes:
                    return buffer
        return anonymous_memory(size_bytes + size_bytes // 4)  # the next batch may be somewhat larger


def anonymous_memory(size_bytes: int) -> np.ndarray:
    """Return new memory on whole pages: uint8, at least ``size_bytes``.

    Pages that are never written take no memory.
    """
    whole = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
    memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint8)


def paged_memory(size_bytes: int, touched_bytes: int) -> torch.Tensor:
    """Return new memory in huge pages, if the system has them.

    Pages that are never written take no memory.

    Args:
        size_bytes: its size; whole pages.
        touched_bytes: how many bytes of it get their pages now. The GIL is released meanwhile.

    Returns:
        uint8 ``(size_bytes,)``, on whole pages.
    """
    memory = torch.frombuffer(engine.PageMemory(cuda_ordinal=-1, bytes=size_bytes), dtype=torch.uint8)
    if touched_bytes > 0:
        engine.touch(memory[:touched_bytes])
    return memory


def pinned_memory(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Return new memory that is pinned, for copies from and to every GPU.

    It is near one GPU. Pages are allocated first and then registered. That takes a third of the
    time of ``cudaHostAlloc``, and several threads allocate pages at the same time. While the driver
    registers, it serves no other thread. The GIL is released meanwhile.

    It is unpinned when it is freed; no copy may use it then. A forked child does not have it.

    Args:
        size_bytes: its size; whole pages.
        device: the GPU, with its index.

    Returns:
        uint8 ``(size_bytes,)``, on whole pages.

    Raises:
        DeviceError: it cannot be registered.
        BackendUnavailable: there is no such GPU.
    """
    memory = engine.PageMemory(cuda_ordinal=engine.cuda_ordinal(device), bytes=size_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8)

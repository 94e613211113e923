"""Memory of the CPU for batches of many sizes, given out again when nobody has a view of it any more."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque

import numpy as np
import torch

_PAGE_BYTES = 4096
_LEAST_BYTES = 1 << 20  # less is torch's own: malloc has it at hand, and a user may keep very many


class LentMemory:
    """What is new to a process has to be zeroed by the kernel first, page by page: about as dear as filling it.

    Args:
        most: buffers that are kept for later; those that are in use are not counted.
    """

    def __init__(self, most: int) -> None:
        self._spare: deque[np.ndarray] = deque(maxlen=most)

    def take(self, size_bytes: int) -> torch.Tensor:
        """uint8 ``(size_bytes,)`` with whatever is in it; one of 1 MiB or more begins at a page.

        Its memory is given out again when the last tensor that views it has gone, in whatever thread.
        """
        if size_bytes < _LEAST_BYTES:
            return torch.empty(size_bytes, dtype=torch.uint8)
        buffer = self._fitting(size_bytes)
        view = buffer[:size_bytes]  # an object of its own: it goes with the tensors, and the buffer stays
        weakref.finalize(view, self._spare.append, buffer).atexit = False
        return torch.from_numpy(view)

    def _fitting(self, size_bytes: int) -> np.ndarray:
        """The one that came back last, for it may still be in the processor's caches; one that is too small goes."""
        with contextlib.suppress(IndexError):
            while True:
                buffer = self._spare.pop()
                if len(buffer) >= size_bytes:
                    return buffer
        return _make_buffer(size_bytes + size_bytes // 4)  # the next batch may be somewhat larger


def _make_buffer(size_bytes: int) -> np.ndarray:
    """What of it is never written takes no memory."""
    whole = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
    return np.frombuffer(mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)

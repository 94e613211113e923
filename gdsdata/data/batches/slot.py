"""`SlotBatches`: the batches that share a slot of the ring, on a GPU."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from gdsdata.io import engine


class SlotBatches:
    """Cuts the tensor of a slot into its batches, and hands them out.

    They are views of one storage, each with a version counter of its own, so that a batch may be
    changed in place while another is needed for a backward pass.

    Args:
        ring: the slots are its own.
        device: of the batches, a GPU.
    """

    def __init__(self, ring: engine.Batches, device: torch.device) -> None:
        self._ring, self._device = ring, device
        self._batches: deque[torch.Tensor] = deque()
        self._stream = 0  # on which the slot was taken

    def add(self, slot: torch.Tensor, sizes: np.ndarray) -> None:
        """Add the batches of a slot that was taken on the current stream.

        Args:
            slot: that has them.
            sizes: int64 (batches,), their samples.
        """
        self._batches.extend(torch.unsafe_split_with_sizes(slot, sizes.tolist()))
        self._stream = engine.stream_of(self._device)
        self._ring.note_taken(self._stream)

    def next(self) -> torch.Tensor:
        """Return the next batch, for the current stream."""
        batch = self._batches.popleft()
        if engine.stream_of(self._device) != self._stream:
            self._take_to_current_stream(batch)
        return batch

    def _take_to_current_stream(self, batch: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(self._device)
        self._ring.wait_until_taken(stream.cuda_stream)
        engine.record_stream(batch, stream)

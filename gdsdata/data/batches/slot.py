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
        device: of the batches, a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._batches: deque[torch.Tensor] = deque()
        self._stream = 0  # on which the slot was taken
        self._taken: torch.cuda.Event | None = None

    def add(self, slot: torch.Tensor, sizes: np.ndarray) -> None:
        """Add the batches of a slot that was taken on the current stream.

        Args:
            slot: that has them.
            sizes: int64 (batches,), their samples.
        """
        self._batches.extend(torch.unsafe_split_with_sizes(slot, sizes.tolist()))
        self._stream = engine.stream_of(self._device)
        self._taken = torch.cuda.current_stream(self._device).record_event(self._taken)

    def next(self) -> torch.Tensor:
        """Return the next batch, for the current stream."""
        batch = self._batches.popleft()
        if engine.stream_of(self._device) != self._stream:
            self._take_to_current_stream(batch)
        return batch

    def _take_to_current_stream(self, batch: torch.Tensor) -> None:
        assert self._taken is not None  # by `add`
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._taken)
        engine.record_stream(batch, stream)

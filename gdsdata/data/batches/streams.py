"""`record_stream`: batches that are used on several streams of a GPU."""

from __future__ import annotations

from typing import Any

import torch

from gdsdata.data.batches.ragged import tensors_of
from gdsdata.io import engine


def record_stream(batch: Any, stream: torch.cuda.Stream) -> None:
    """Note that a batch is used on ``stream`` too.

    This is needed if ``stream`` was not the current one when the batch came. Call it before you
    drop the last reference to the batch. Its memory is not written again until ``stream`` has
    completed the work that it has then. Batches that are not ``zero_copy`` are torch's own memory,
    and this calls ``Tensor.record_stream`` for them.

    Args:
        batch: a tensor, or a batch with fields. Its tensors that are not on a GPU are passed over.
        stream: of the GPU.

    Raises:
        ValueError: no tensor of ``batch`` is on a CUDA device.
    """
    tensors = [one.values() if one.is_nested else one for one in tensors_of(batch)]
    on_gpu = [one for one in tensors if one.device.type == "cuda"]
    if not on_gpu:
        none = f"a {type(batch).__name__} of no tensors"
        place = f"on {tensors[0].device}, which has no streams" if tensors else none
        raise ValueError(f"record_stream: the batch is {place}")
    for one in on_gpu:
        engine.record_stream(one, stream)

"""Batches for NVIDIA DALI's pipelines, without a copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.dlpack import to_dlpack

from gdsdata.data.batches.ragged import Ragged
from gdsdata.data.dataset import GDSDataset

__all__ = ["source"]


def source(dataset: GDSDataset, fields: str | Sequence[str] | None = None, prefetch_queue_depth: int = 2) -> Source:
    """Return a source of a data set's batches for ``nvidia.dali.fn.external_source``.

    Pass ``batch=True`` and ``no_copy=True`` to that, and ``num_outputs`` if ``fields`` is a
    sequence::

        fields = Fields(decode={"jpg": "encoded", "cls": "cls"})
        data = GDSDataset("shards/*.tar", 256, fields=fields)

        @pipeline_def(batch_size=256, num_threads=8, device_id=0, prefetch_queue_depth=2)
        def pipeline(source):
            jpegs, classes = fn.external_source(source, num_outputs=2, batch=True, no_copy=True)
            return fn.decoders.image(jpegs, device="mixed"), classes

        pipe = pipeline(dali.source(data, ["jpg", "cls"]))

    The pipeline's ``batch_size`` is at least the data set's. DALI's image decoders need
    ``nvidia-nvimgcodec-cu13`` (or ``-cu12``) beside ``nvidia-dali-cuda130``. Nothing is copied:

    - A field with a tensor for each sample is passed as views of the batch's host memory. These are
      encoded images (``decode={"jpg": "encoded"}``), or any field whose size differs if the data
      set is on the CPU. Encoded images are in pinned memory if the data set's device is a GPU.
    - A tensor ``(B, ...)`` is passed as a whole. On a GPU it needs ``device="gpu"``, and so an
      `external_source` of its own. The source waits for the current stream first, because DALI uses
      streams of its own.

    The views are DLPack's, and own what they show. A batch's host memory is kept until DALI has
    released the last view of it. A GPU may still read memory that DALI has released, so the source
    keeps a batch on a GPU for ``prefetch_queue_depth`` more batches. By DALI's own rule its memory
    is not used after that.

    Args:
        dataset: its batches are a dict of fields, or (with ``fields=None``) one tensor.
        fields: the name of one, or the names of several in the order of the outputs.
        prefetch_queue_depth: the pipeline's. If it has one for the CPU and one for the GPU, pass
            their product.

    Returns:
        A callable without arguments. It returns the next batch, and raises StopIteration after the
        last one of an epoch. When the pipeline is reset (``pipe.reset()``, or ``auto_reset=True``
        of DALI's iterators), the next epoch follows.
    """
    return Source(dataset, fields, prefetch_queue_depth)


class Source:
    """The source of batches that `source` returns."""

    def __init__(self, dataset: GDSDataset, fields: str | Sequence[str] | None, prefetch_queue_depth: int) -> None:
        self._dataset, self._fields = dataset, fields
        self._on_gpu: deque[list[torch.Tensor]] = deque(maxlen=prefetch_queue_depth + 1)
        self._batches: Iterator[Any] | None = None

    def __call__(self) -> Any:
        """Return the next batch: of each field a DLPack capsule, or a list of them.

        Raises:
            StopIteration: the epoch is over; the next call begins another one.
            KeyError: batches have no such field.
            ValueError: DALI cannot take a field.
        """
        if self._batches is None:
            self._batches = iter(self._dataset)
        batch = next(self._batches, None)
        if batch is None:
            self._batches = None
            raise StopIteration
        fields = self._fields
        is_one = fields is None or isinstance(fields, str)
        names: Sequence[str | None] = [fields] if fields is None or isinstance(fields, str) else fields
        values = [_as_dali_takes_it(batch if name is None else batch[name], name) for name in names]
        self._on_gpu.append([value for value in values if isinstance(value, torch.Tensor) and value.is_cuda])
        for tensor in self._on_gpu[-1]:
            torch.cuda.current_stream(tensor.device).synchronize()
        given = [list(map(to_dlpack, one)) if isinstance(one, list) else to_dlpack(one) for one in values]
        return given[0] if is_one else tuple(given)


def _as_dali_takes_it(value: Any, field: str | None) -> torch.Tensor | list[torch.Tensor]:
    kind = type(value).__name__
    if isinstance(value, Ragged):
        kind = f"a Ragged on {value.device}"
        value = value.as_list()
    if isinstance(value, torch.Tensor) and not value.is_nested:
        return value.contiguous()
    if isinstance(value, list) and all(isinstance(one, torch.Tensor) and not one.is_cuda for one in value):
        return value
    name = "the batch" if field is None else f"field {field!r}"
    raise ValueError(
        f"DALI cannot take {name} ({kind}) as it is: it takes a tensor (B, ...), or for each sample a tensor in host "
        f"memory, as encoded images are with decode={{{field!r}: 'encoded'}}"
    )

"""Batches for NVIDIA DALI's pipelines, which take them where they lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.dlpack import to_dlpack

from gdsdata.data.batches.ragged import Ragged
from gdsdata.data.dataset import GDSDataset


def source(dataset: GDSDataset, fields: str | Sequence[str] | None = None, prefetch_queue_depth: int = 2) -> Source:
    """What ``nvidia.dali.fn.external_source`` takes batches of a data set from.

    Give it ``batch=True`` and ``no_copy=True``, and ``num_outputs`` where ``fields`` is a
    sequence::

        data = GDSDataset("shards/*.tar", 256, fields=Fields(decode={"jpg": "encoded", "cls": "cls"}))

        @pipeline_def(batch_size=256, num_threads=8, device_id=0, prefetch_queue_depth=2)
        def pipeline(source):
            jpegs, classes = fn.external_source(source, num_outputs=2, batch=True, no_copy=True)
            return fn.decoders.image(jpegs, device="mixed"), classes

        pipe = pipeline(dali.source(data, ["jpg", "cls"]))

    The pipeline's ``batch_size`` is the data set's at least; DALI's image decoders need
    ``nvidia-nvimgcodec-cu13`` (or ``-cu12``) beside ``nvidia-dali-cuda130``. Nothing is copied for
    it:

    - Encoded images (``decode={"jpg": "encoded"}``, or any field whose size differs, from a data
    set on the CPU) go to
      DALI as views of the batch's host memory, one a sample, which is pinned where the data set's
      device is a GPU.
    - A tensor ``(B, ...)`` goes as a whole. One on a GPU needs ``device="gpu"`` there, and so an
    `external_source` of
      its own. What its streams were given for it is waited for first, because DALI uses streams of
      its own.

    Views are DLPack's, which own what they show: a batch's host memory stays as it is until DALI
    has let go of the last of them, however many batches ahead it works. A GPU may still read what
    DALI has let go of, so batches there are kept for ``prefetch_queue_depth`` more of them: by
    DALI's own rule their memory is then no longer used.

    Args:
        dataset: whose batches are a dict of fields, or (with ``fields=None``) one tensor.
        fields: the name of one, or the names of several in the order of the outputs.
        prefetch_queue_depth: the pipeline's; where it has one for the CPU and one for the GPU,
            their product.

    Returns:
        A callable without arguments that returns the next batch, and raises StopIteration behind
        the last one of an epoch. When the pipeline is reset (``pipe.reset()``, or
        ``auto_reset=True`` of DALI's iterators), the next epoch follows.
    """
    return Source(dataset, fields, prefetch_queue_depth)


class Source:
    """What `source` returns."""

    def __init__(self, dataset: GDSDataset, fields: str | Sequence[str] | None, prefetch_queue_depth: int) -> None:
        self._dataset, self._fields = dataset, fields
        self._on_gpu: deque[list[torch.Tensor]] = deque(maxlen=prefetch_queue_depth + 1)
        self._batches: Iterator[Any] | None = None

    def __call__(self) -> Any:
        """The next batch, as DLPack capsules: of each field one, or a list with one for each
        sample.

        Raises:
            StopIteration: the epoch is over; the next call begins another one.
            KeyError: batches have no such field.
            ValueError: a field is nothing that DALI takes.
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
        kind = f"a Ragged on {value.values.device}"
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

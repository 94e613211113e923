"""Batches for NVIDIA DALI's pipelines, which take them where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.dlpack import to_dlpack

from gdsdata.dataset import GDSDataset
from gdsdata.field_batches import Ragged


def source(dataset: GDSDataset, fields: str | Sequence[str] | None = None) -> Source:
    """What ``nvidia.dali.fn.external_source`` takes batches of a data set from.

    Give it ``batch=True`` and ``no_copy=True``, and ``num_outputs`` where ``fields`` is a sequence::

        data = GDSDataset("shards/*.tar", 256, decode={"jpg": "encoded", "cls": "cls"})

        @pipeline_def(batch_size=256, num_threads=8, device_id=0, prefetch_queue_depth=2)
        def pipeline(source):
            jpegs, classes = fn.external_source(source, num_outputs=2, batch=True, no_copy=True)
            return fn.decoders.image(jpegs, device="mixed"), classes

        pipe = pipeline(dali.source(data, ["jpg", "cls"]))

    The pipeline's ``batch_size`` is the data set's at least. Nothing is copied for it:

    - Encoded images (``decode={"jpg": "encoded"}``, or any field whose size differs, from a data set on the CPU) go to
      DALI as views of the batch's host memory, one a sample, which is pinned where the data set's device is a GPU.
    - A tensor ``(B, ...)`` goes as a whole. One on a GPU needs ``device="gpu"`` there, and so an `external_source` of
      its own. What its streams were given for it is waited for first, because DALI uses streams of its own.

    Views are DLPack's, which own what they show: a batch's memory stays as it is until DALI has let go of the last of
    them, however many batches ahead its ``prefetch_queue_depth`` reaches. That many batches are in memory besides those
    that the data set reads ahead.

    Args:
        dataset: whose batches are a dict of fields, or (with ``fields=None``) one tensor.
        fields: the name of one, or the names of several in the order of the outputs.

    Returns:
        A callable without arguments that returns the next batch, and raises StopIteration behind the last one of an epoch.
        When the pipeline is reset (``auto_reset=True`` of DALI's iterators, or ``pipe.reset()``), the next epoch follows.
    """
    return Source(dataset, fields)


class Source:
    """What `source` returns."""

    def __init__(self, dataset: GDSDataset, fields: str | Sequence[str] | None) -> None:
        self._dataset, self._fields = dataset, fields
        self._batches: Iterator[Any] | None = None

    def __call__(self) -> Any:
        """The next batch, as DLPack capsules: of each field one, or a list with one for each sample.

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
        if self._fields is None or isinstance(self._fields, str):
            return _handed_over(batch, self._fields)
        return tuple(_handed_over(batch, field) for field in self._fields)


def _handed_over(batch: Any, field: str | None) -> Any:
    value = batch if field is None else batch[field]
    if isinstance(value, Ragged) and value.values.device.type == "cpu":
        value = value.as_list()
    if isinstance(value, torch.Tensor) and not value.is_nested:
        if value.device.type == "cuda":
            torch.cuda.current_stream(value.device).synchronize()
        return to_dlpack(value.contiguous())
    if isinstance(value, list) and all(isinstance(one, torch.Tensor) and one.device.type == "cpu" for one in value):
        return [to_dlpack(one) for one in value]
    raise ValueError(
        f"DALI cannot take {'the batch' if field is None else f'field {field!r}'}, which is {_kind_of(value)}, as it is: "
        "it takes a tensor (B, ...), or a tensor in host memory for each sample; encoded images come as such with "
        f"decode={{{field!r}: 'encoded'}}"
    )


def _kind_of(value: Any) -> str:
    return f"a Ragged on {value.values.device}" if isinstance(value, Ragged) else f"a {type(value).__name__}"

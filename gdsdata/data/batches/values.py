"""`FieldValues` makes batches of fields' bytes: it decodes, shapes, collates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from gdsdata.data.batches.ragged import RAGGED_AS, Ragged, moved
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.decoders import Image, Threads, Undecodable, keep_encoded, runs_ahead
from gdsdata.formats.field import Field
from gdsdata.formats.fields import FieldIndex
from gdsdata.formats.sample import torch_equivalent
from gdsdata.formats.tables import TableIndex


class FieldBytes(NamedTuple):
    """The bytes of the K fields of B samples.

    Attributes:
        samples: int64 (B,), ids.
        length_bytes: int64 (B, K), at least 0.
        flat: of each field, by its number, its bytes sample after sample: uint8 of one dimension.
        is_there: bool (B, K), which fields the samples have; None: all.
        lists: of each field of lists of lists, by its number, the length of each list, from the
            outermost ones inward: `Field.depth` arrays, int64.
    """

    samples: np.ndarray
    length_bytes: np.ndarray
    flat: Mapping[int, torch.Tensor]
    is_there: np.ndarray | None = None
    lists: Mapping[int, Sequence[np.ndarray]] = MappingProxyType({})

    @classmethod
    def joined(cls, parts: Sequence[FieldBytes]) -> FieldBytes:
        """Return the bytes of all samples of several batches without lists of lists, in order."""
        there = [part.is_there for part in parts if part.is_there is not None]
        return cls(
            np.concatenate([part.samples for part in parts]),
            np.concatenate([part.length_bytes for part in parts]),
            {k: torch.cat([part.flat[k] for part in parts]) for k in parts[0].flat},
            np.concatenate(there) if there else None,
        )


class FieldValues:
    """Makes batches of the bytes of their fields.

    Args:
        index: of the samples.
        settings: of the batches.
        device: of the values.

    Attributes:
        ahead: numbers of the fields that are decoded by threads, before the batch is taken.
    """

    def __init__(self, index: FieldIndex | TableIndex, settings: BatchSettings, device: torch.device) -> None:
        self._index, self._fields, self._device = index, index.fields, device
        self._ragged_as = RAGGED_AS[settings.ragged]
        self._decode, self._collate = settings.decode, settings.collate
        self.ahead = [
            k for k, field in enumerate(self._fields) if field.name in self._decode and self._runs_ahead(field.name)
        ]
        self._threads = Threads(settings.prefetch + 2)  # they begin with the first image

    def _runs_ahead(self, name: str) -> bool:
        return runs_ahead(self._decode[name])

    @property
    def wants_presence(self) -> bool:
        """Whether `FieldBytes.is_there` makes a difference."""
        return self._collate is not None

    def batch(self, read: FieldBytes, decoded: Mapping[int, Any]) -> Any:
        """Return a batch as its user gets it.

        Args:
            read: its bytes.
            decoded: of fields that were decoded ahead, by their numbers, the values.
        """
        if self._collate is not None:
            return moved(self._collate(self._samples_of(read, decoded)), self._device)
        return {
            field.name: self._decoded(read, k, decoded)
            if field.name in self._decode
            else values_of(field, read.flat[k], read.length_bytes[:, k], self._ragged_as, read.lists.get(k))
            for k, field in enumerate(self._fields)
        }

    def check(self, read: FieldBytes, decoded: Mapping[int, Any]) -> None:
        """Decode what `batch` would.

        Raises:
            CorruptData: a sample cannot be decoded.
        """
        for k, field in enumerate(self._fields):
            if field.name in self._decode:
                self._decoded(read, k, decoded)

    def decode(self, read: FieldBytes, k: int) -> Any:
        """Return what the decoder of field ``k`` makes of it, on the device.

        Raises:
            CorruptData: a sample cannot be decoded.
        """
        name, wanted = self._fields[k].name, self._decoded_samples(read, k)
        sizes = read.length_bytes[:, k].tolist()
        of_all = read.flat[k].split(sizes)  # type: ignore[no-untyped-call]  # torch does not annotate it
        try:
            return self._made_of(name, [of_all[i] for i in wanted]) if len(wanted) else []
        except Undecodable as error:
            place = wanted[error.sample]
            why = self._other_file(read, k, place) or str(error).rstrip(" .")
            reason = f"cannot be decoded: {why}"
            if isinstance(self._index, TableIndex) and not sizes[place]:
                reason = f'is null or empty, which {reason}. Pass on_error="skip", or a function as the decoder'
            else:
                reason = f'{reason}. Write the sample again, or pass on_error="skip", which leaves such samples out'
            raise self._index.damaged(int(read.samples[place]), k, reason) from error

    def _other_file(self, read: FieldBytes, k: int, place: int) -> str | None:
        """Return why a field is empty, a clause: `datasets` keeps the path of a file in its place.

        None: it is no such field.
        """
        around, _, member = self._fields[k].name.rpartition(".")
        names = [field.name for field in self._fields]
        beside = f"{around}.path"
        if member != "bytes" or read.length_bytes[place, k] > 0 or beside not in names:
            return None
        if read.length_bytes[place, names.index(beside)] <= 0:
            return None
        return f"{beside!r} names a file, which is not read: write its bytes into the table, as save_to_disk does"

    def _made_of(self, name: str, samples: Sequence[torch.Tensor]) -> Any:
        decoder = self._decode[name]
        if isinstance(decoder, Image):
            return decoder.decode(samples, self._device, self._threads)
        return decoder(samples) if decoder is keep_encoded else moved(decoder(samples), self._device)

    def _decoded(self, read: FieldBytes, k: int, decoded: Mapping[int, Any]) -> Any:
        return decoded[k] if k in decoded else self.decode(read, k)

    def _decoded_samples(self, read: FieldBytes, k: int) -> Sequence[int]:
        """Return the places in the batch whose field a decoder gets.

        They are all, or with ``collate`` those that have the field.
        """
        if self._collate is None or read.is_there is None:
            return range(len(read.samples))
        return np.flatnonzero(read.is_there[:, k]).tolist()

    def _samples_of(self, read: FieldBytes, decoded: Mapping[int, Any]) -> list[dict[str, Any]]:
        """Return a dict for each sample, of the fields that it has."""
        samples: list[dict[str, Any]] = [{} for _ in read.samples]
        for k, field in enumerate(self._fields):
            there = self._decoded_samples(read, k)
            if field.name in self._decode:
                values = self._decoded(read, k, decoded)
                if not hasattr(values, "__len__") or len(values) != len(there):
                    raise ValueError(
                        f"collate= gets samples one by one, but the decoder of field {field.name!r} made "
                        f"{type(values).__name__} of {len(there)} of them: have it return a value for each"
                    )
            else:
                of_all = values_of(field, read.flat[k], read.length_bytes[:, k], Ragged.as_list, read.lists.get(k))
                values = [of_all[i] for i in there]
            for i, value in zip(there, values, strict=True):
                samples[i][field.name] = value
        return samples

    def close(self, wait: bool) -> None:
        """End the threads that decode images."""
        self._threads.close(wait=wait)


def values_of(
    field: Field,
    flat: torch.Tensor,
    lengths: np.ndarray,
    ragged_as: Callable[[Ragged], Any],
    lists: Sequence[np.ndarray] | None = None,
) -> Any:
    """Return the values of a field, in the form that a batch has them.

    Args:
        field: what they are.
        flat: uint8 of one dimension, their bytes as they are stored.
        lengths: int64 (B,), the bytes of each sample.
        ragged_as: the form of values that differ in size.
        lists: of lists of lists, as `FieldBytes.lists` has them.
    """
    dtype = field.element_dtype
    if dtype.newbyteorder("=") != dtype:
        width = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        flat = flat.view(-1, width).flip(1).view(-1)
    typed = flat.view(field.view_as or torch_equivalent(dtype))
    if field.shape is not None and field.fortran_order:
        backwards = typed.view(len(lengths), *reversed(field.shape))
        return backwards.permute(0, *range(len(field.shape), 0, -1))
    if field.shape is not None:
        return typed.view(len(lengths), *field.shape)
    row_bytes = dtype.itemsize * math.prod(field.row_shape)
    values: Any = typed.view(-1, *field.row_shape)
    for sizes in reversed(lists or [lengths // row_bytes]):
        values = Ragged(values, torch.from_numpy(np.cumsum(np.append(0, sizes))))
    return ragged_as(values)

"""`Layout`: what a batch's tensors are, so that parts of it can be joined again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gdsdata.data.batches.ragged import Ragged

# The part of a ragged field has room up to a multiple of it, because NCCL copies whole words
# faster.
_ROOM_BYTES = 64


class Leaf(NamedTuple):
    """One tensor of a batch.

    Attributes:
        name: of the field; None: the batch is this tensor.
        dtype: of its elements.
        row_shape: of a sample, or of a row of a sample's value.
        is_ragged: samples have different numbers of rows.
    """

    name: str | None
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    is_ragged: bool

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.row_shape)


class Part(NamedTuple):
    """A peer's part of a batch.

    Attributes:
        samples: how many it has.
        tensors: the bytes of each leaf, uint8 of one dimension.
        rows: int64 (R, samples), the rows of each sample, of the R ragged leaves.
    """

    samples: int
    tensors: list[torch.Tensor]
    rows: np.ndarray


class Layout(NamedTuple):
    """The tensors of a batch, the same in all batches."""

    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, batch: Any) -> Layout:
        """Return the layout of a batch.

        Raises:
            TypeError: it has values that are no tensors.
        """
        leaves = []
        for name, value in _values_of(batch):
            tensor = value.values if isinstance(value, Ragged) else value
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"share_reads=True: the field {name!r} of a batch is a {type(value).__name__}, and tensors alone "
                    "can be gathered: make it in transform=, which gets the whole batch"
                )
            leaves.append(Leaf(name, tensor.dtype, tuple(tensor.shape[1:]), isinstance(value, Ragged)))
        return cls(tuple(leaves))

    @property
    def ragged_leaves(self) -> int:
        return sum(leaf.is_ragged for leaf in self.leaves)

    def part_of(self, batch: Any) -> Part:
        """Return the bytes of a batch.

        Raises:
            TypeError: it has values that are no tensors.
            ValueError: it has another layout.
        """
        if (found := Layout.of(batch)) != self:
            raise ValueError(
                f"share_reads=True: batches have the tensors {found.leaves} and {self.leaves}, and those that are "
                "gathered have one dtype and shape: make them alike in transform=, or leave share_reads out"
            )
        tensors, rows, samples = [], [], 0
        for _, value in _values_of(batch):
            tensor = value
            if isinstance(value, Ragged):
                tensor, samples = value.values, len(value.offsets) - 1
                rows.append(value.offsets.diff().numpy())
            else:
                samples = len(value)
            tensors.append(tensor.contiguous().view(-1).view(torch.uint8))
        return Part(samples, tensors, np.array(rows, np.int64).reshape(len(rows), samples))

    def empty_part(self, device: torch.device) -> Part:
        """Return the part of a peer that has no samples."""
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        return Part(0, [nothing] * len(self.leaves), np.empty((self.ragged_leaves, 0), np.int64))

    def joined(self, wholes: Sequence[torch.Tensor], gathered: Gathered, ragged_as: Callable[[Ragged], Any]) -> Any:
        """Return the batch, as its user gets it.

        Args:
            wholes: of each leaf the parts of all peers, uint8 of one dimension.
            gathered: what is in them.
            ragged_as: the form of values that differ in size.
        """
        values: dict[str | None, Any] = {}
        ragged = 0
        for k, (leaf, whole) in enumerate(zip(self.leaves, wholes, strict=True)):
            flat = _without_gaps(whole, gathered.part_bytes[k], gathered.room_bytes[k])
            rows = flat.view(leaf.dtype).view(gathered.rows_of(k), *leaf.row_shape)
            if not leaf.is_ragged:
                values[leaf.name] = rows
                continue
            offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(gathered.sample_rows[ragged])]))
            values[leaf.name] = ragged_as(Ragged(rows, offsets))
            ragged += 1
        return values.get(None, values)


class Gathered:
    """How large the parts of a batch are.

    Args:
        layout: of the batch.
        samples: int64 (P,), of each peer's part.
        rows: int64 (P, R, most samples of a part), the rows of each sample; more follow unused.
        most_samples: that a part of this batch may have.

    Attributes:
        part_bytes: int64 (leaves, P).
        room_bytes: of each leaf, that each part takes.
        sample_rows: of each ragged leaf, int64 (samples of all,).
    """

    def __init__(self, layout: Layout, samples: np.ndarray, rows: np.ndarray, most_samples: int) -> None:
        self.sample_rows = [
            np.concatenate([of_peer[r, :count] for of_peer, count in zip(rows, samples.tolist(), strict=True)])
            for r in range(layout.ragged_leaves)
        ]
        self._part_rows, self.room_bytes, ragged = [], [], 0
        for leaf in layout.leaves:
            if leaf.is_ragged:
                counts = zip(rows, samples.tolist(), strict=True)
                self._part_rows.append(np.array([int(of_peer[ragged, :count].sum()) for of_peer, count in counts]))
                most_bytes = int(self._part_rows[-1].max()) * leaf.row_bytes
                self.room_bytes.append(-(-most_bytes // _ROOM_BYTES) * _ROOM_BYTES)
                ragged += 1
            else:
                self._part_rows.append(samples)
                self.room_bytes.append(most_samples * leaf.row_bytes)
        self.part_bytes = [
            part_rows * leaf.row_bytes for part_rows, leaf in zip(self._part_rows, layout.leaves, strict=True)
        ]

    def rows_of(self, k: int) -> int:
        """Return the rows of a leaf in the whole batch."""
        return int(self._part_rows[k].sum())

    def padded(self, part: Part) -> list[torch.Tensor]:
        """Return the tensors of a part, each with all of its room."""
        return [_padded(tensor, room) for tensor, room in zip(part.tensors, self.room_bytes, strict=True)]


def _values_of(batch: Any) -> list[tuple[str | None, Any]]:
    return list(batch.items()) if isinstance(batch, dict) else [(None, batch)]


def _padded(tensor: torch.Tensor, room_bytes: int) -> torch.Tensor:
    if len(tensor) == room_bytes:
        return tensor
    padded = tensor.new_empty(room_bytes)
    padded[: len(tensor)] = tensor
    return padded


def _without_gaps(whole: torch.Tensor, part_bytes: np.ndarray, room_bytes: int) -> torch.Tensor:
    """Return the parts one behind the other: a view if no gap is between them."""
    total = int(part_bytes.sum())
    filled = np.flatnonzero(part_bytes)
    if not len(filled) or (filled[-1] * room_bytes + part_bytes[filled[-1]] == total):
        return whole[:total]
    sizes = part_bytes.tolist()
    return torch.cat([whole[place * room_bytes : place * room_bytes + size] for place, size in enumerate(sizes)])

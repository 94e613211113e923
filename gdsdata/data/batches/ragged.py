"""`Ragged`: values of samples that differ in size, and their forms in a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch

RaggedAs = Literal["flat", "nested", "padded", "list"]


class Ragged(NamedTuple):
    """Values of B samples, one behind the other.

    Attributes:
        values: of all samples. It has one dimension, or more if samples are rows of a shape
            (`Field.row_shape`). For lists of lists it is a `Ragged`: the inner lists, one behind
            the other.
        offsets: int64 (B + 1,), on the CPU: sample i has ``values[offsets[i] : offsets[i + 1]]``.
    """

    values: torch.Tensor | Ragged
    offsets: torch.Tensor

    @property
    def device(self) -> torch.device:
        """The device that the values are on."""
        return self.values.device

    def as_list(self) -> list[Any]:
        """Return a view of each sample's values; of lists of lists, a list of views."""
        if isinstance(self.values, Ragged):
            inner = self.values.as_list()
            return [inner[begin:end] for begin, end in itertools.pairwise(self.offsets.tolist())]
        sizes = self.offsets.diff().tolist()
        return list(self.values.split(sizes))  # type: ignore[no-untyped-call]  # torch does not annotate it

    def as_nested(self) -> torch.Tensor:
        """Return a nested tensor (jagged layout) of the same memory.

        Raises:
            ValueError: they are lists of lists.
        """
        if isinstance(self.values, Ragged):
            raise ValueError(
                'ragged="nested": a nested tensor has one dimension that varies, and lists of lists have more: use '
                '"flat", "padded" or "list"'
            )
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets.to(self.values.device))

    def as_padded(self) -> torch.Tensor:
        """Return ``(B, longest, ...)``, with zeros behind each sample's values.

        Lists of lists become ``(B, most lists, longest, ...)``.
        """
        if isinstance(self.values, Ragged):
            return Ragged(self.values.as_padded(), self.offsets).as_padded()
        if len(self.offsets) == 1:  # the inner lists of samples that are all empty: pad_sequence refuses none
            return self.values.new_empty(0, *self.values.shape)
        return torch.nn.utils.rnn.pad_sequence(self.as_list(), batch_first=True)


RAGGED_AS: dict[str, Callable[[Ragged], Any]] = {
    "flat": lambda ragged: ragged,
    "nested": Ragged.as_nested,
    "padded": Ragged.as_padded,
    "list": Ragged.as_list,
}


def check_ragged_as(ragged: object) -> None:
    """Check the form that a data set was asked for.

    Raises:
        ValueError: there is no such form.
    """
    if not isinstance(ragged, str) or ragged not in RAGGED_AS:
        raise ValueError(f"ragged={ragged!r}: it is one of {', '.join(map(repr, RAGGED_AS))}")


def moved(value: Any, device: torch.device) -> Any:
    """Return a batch with its values on ``device``; offsets stay on the CPU."""
    if isinstance(value, Ragged):
        return Ragged(moved(value.values, device), value.offsets)
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {name: moved(one, device) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        values = [moved(one, device) for one in value]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    return value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a batch."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(one)

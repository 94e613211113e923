"""Tensors that are more, or less, than the elements in their memory."""

from __future__ import annotations

from typing import Any

import torch

from gdsdata import torch_private
from gdsdata.checkpoint.nests import name_of, places


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape, strides and a storage's bytes are all there is to say of it."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.__dict__
    return plain and has_own_memory(tensor) and not (tensor.is_conj() or tensor.is_neg())


def dispatches(tensor: torch.Tensor) -> bool:
    """Whether its class has operators of its own, and so may have its elements anywhere."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in memory of its own: writing there is enough to change them.

    Wrapper subclasses and DTensors hold other tensors instead, sparse and nested tensors hold indices as well, and
    quantized ones a scale.
    """
    if dispatches(tensor) or isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        return False
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return False
    return not torch_private.is_zero_tensor(tensor)


def check_has_values(state: Any) -> None:
    """Raises ValueError for a tensor on the meta device, of which nothing could be restored."""
    for place in places(state):
        if isinstance(place.leaf, torch.Tensor) and place.leaf.is_meta:
            raise ValueError(
                f"{name_of(place.path)} is on the meta device and has no values to save: leave it out of the state, or "
                "make it by to_empty(device=...) and give it values"
            )


def are_of_one_kind(one: Any, other: Any) -> bool:
    """Whether these are two tensors without memory of their own, and one may take the place of the other."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    if has_own_memory(one) or has_own_memory(other) or type(one) is not type(other):
        return False
    if (one.layout, one.dtype, one.is_meta) != (other.layout, other.dtype, other.is_meta):
        return False
    shapes = _shape_of(one), _shape_of(other)
    return None in shapes or shapes[0] == shapes[1]


def takes_copy_of(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether `Tensor.copy_` works, tried with a clone of ``target``."""
    try:
        target.detach().clone().copy_(source.detach())
    except Exception:  # each kind has reasons of its own
        return False
    return True


@torch.no_grad()
def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)  # itself: a sparse tensor that is detached would take the new elements alone


def _shape_of(tensor: torch.Tensor) -> torch.Size | None:
    """None if it has none that can be compared."""
    unshaped = tensor.is_nested or isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)
    return None if unshaped else tensor.shape

"""Kinds of tensors: which ones are more, or less, than elements in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gdsdata import torch_private
from gdsdata.checkpoint.tree import any_leaf, leaves, name_of

# A remedy, in messages.
AS_IT_WAS = "make the model as it was when it was saved, for example by the same quantize_() of torchao"

_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether dtype, shape, strides and bytes describe the tensor fully."""
    plain = type(tensor) in _PLAIN_CLASSES and not tensor.__dict__
    return plain and has_own_memory(tensor) and not (tensor.is_conj() or tensor.is_neg())


def dispatches(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's class has operators of its own.

    Such a tensor may keep its elements anywhere.
    """
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie in its own memory.

    Then writing there is enough to change them.

    Wrapper subclasses and DTensors hold other tensors instead. Sparse and nested tensors also hold
    indices, and quantized ones a scale.
    """
    if type(tensor) not in _PLAIN_CLASSES and (dispatches(tensor) or _is_uninitialized(tensor)):
        return False
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return False
    return not torch_private.is_zero_tensor(tensor)


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that have a tensor's elements in their own memory.

    They are the tensor itself, or those that a wrapper subclass holds. It is empty if they are not
    known.
    """
    if not dispatches(tensor):
        return [tensor] if has_own_memory(tensor) or tensor.is_quantized else []
    if not hasattr(tensor, "__tensor_flatten__"):
        return []
    held = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for one in held if isinstance(one, torch.Tensor) for part in plain_parts(one)]


def check_has_values(state: Any) -> None:
    """Check that no tensor of a state is on the meta device, and that the memory of none was freed.

    It would have nothing to save.

    Raises:
        ValueError: a tensor is so; the message has its name.
    """
    if any_leaf(state, is_on_meta):
        for one in leaves(state):
            if is_on_meta(one.value):
                raise ValueError(
                    f"{name_of(one.path)} is on the meta device and has no values to save: leave it out of the state, "
                    "or make it by to_empty(device=...) and give it values"
                )
    check_not_freed(state)


def check_tensors_are_real(verb: str) -> None:
    """Check that this thread does not make fake tensors, whose addresses are none.

    Raises:
        RuntimeError: `FakeTensorMode` is active.
    """
    if torch_private.makes_fake_tensors():
        raise RuntimeError(
            f"FakeTensorMode is active, in which tensors have no memory to {verb}: {verb} outside of it, or call "
            f"torch.{verb}"
        )


def check_not_freed(tree: Any, verb: str = "save") -> None:
    """Check that the memory of no tensor of a tree was freed.

    Raises:
        ValueError: that of a tensor was; the message has its name.
    """
    if not any_leaf(tree, _is_freed):
        return
    name = next(name_of(one.path) for one in leaves(tree) if _is_freed(one.value)) or "the tensor"
    raise ValueError(freed(name, verb))


def freed(name: str, verb: str) -> str:
    """Return the message for a tensor whose memory was freed."""
    remedy = "take the state by torch.distributed.checkpoint.state_dict.get_model_state_dict"
    return f"{name} has a shape and no memory to {verb}, because its storage was freed, as FSDP frees it: {remedy}"


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements, and its storage was resized to nothing.

    FSDP does so between two uses of a parameter. A read or write would go beyond the memory.
    """
    try:
        if tensor.untyped_storage().nbytes() > 0:
            return False
    except (NotImplementedError, RuntimeError, ValueError):  # it has no storage
        return False
    return tensor.numel() > 0 and has_own_memory(tensor)


def _is_freed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_freed(value)


def is_on_meta(value: Any) -> bool:
    """Return whether a value is a tensor on the meta device, which has no memory."""
    return isinstance(value, torch.Tensor) and value.is_meta


def are_of_one_kind(one: Any, other: Any) -> bool:
    """Return whether a tensor may take the place of another one.

    Both must have no memory of their own, and be of one kind.
    """
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    if has_own_memory(one) or has_own_memory(other) or type(one) is not type(other):
        return False
    if (one.layout, one.dtype, one.is_meta) != (other.layout, other.dtype, other.is_meta):
        return False
    shapes = _shape_of(one), _shape_of(other)
    return None in shapes or shapes[0] == shapes[1]


def takes_copy_of(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether `Tensor.copy_` works; it is tried with a copy of ``target``."""
    try:
        _copied(target.detach()).copy_(source.detach())
    except Exception:  # each kind raises its own types
        return False
    return True


def _copied(tensor: torch.Tensor) -> Any:
    """Return a tensor of the same kind in new memory.

    Some classes have ``copy_``, and not ``clone``: the states of torchao's optimizers do. Such a
    tensor is made of copies of those that it holds.

    Raises:
        Exception: whatever the class raises that permits neither.
    """
    try:
        return tensor.clone()
    except Exception:
        if not hasattr(tensor, "__tensor_flatten__"):
            raise
    names, context = tensor.__tensor_flatten__()
    held = {name: getattr(tensor, name) for name in names}
    copies = {name: _copied(one) if isinstance(one, torch.Tensor) else one for name, one in held.items()}
    return type(tensor).__tensor_unflatten__(copies, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values into a tensor of any kind, outside automatic differentiation."""
    with torch.no_grad():  # as a decorator, it would cost each start 0.1 ms
        if source.is_neg():  # torch 2.15 copies one element of float32 to float16 without its sign
            source = source.resolve_neg()
        target.copy_(source)  # not into target.detach(): of a sparse tensor, that would replace the elements alone


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter's tensor, which requires no gradient.

    Tensors of other classes are returned themselves.
    """
    needs_it = tensor.requires_grad and type(tensor) is torch.Tensor
    return tensor.detach() if needs_it or type(tensor) is torch.nn.Parameter else tensor


def _shape_of(tensor: torch.Tensor) -> torch.Size | None:
    """Return a tensor's shape; None if it has none that can be compared."""
    return None if tensor.is_nested or _is_uninitialized(tensor) else tensor.shape


def _is_uninitialized(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)  # type: ignore[attr-defined]


def kind_in_words(value: Any) -> str:
    """Return words for the type of a value that is no plain tensor."""
    return "an array of numpy" if isinstance(value, np.ndarray) else f"of type {type(value).__name__}"

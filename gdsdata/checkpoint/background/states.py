"""States that `AsyncCheckpointer` saves and restores.

They are objects with a ``state_dict``, or plain values, by name.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from gdsdata.checkpoint.dtensors import has_dtensors, with_dtensors
from gdsdata.checkpoint.tensor_kinds import AS_IT_WAS, dispatches
from gdsdata.checkpoint.tree import any_leaf
from gdsdata.torch_private import init_optimizer_state


def check_state(state: Any, kind: type) -> None:
    """Check that a state is of this kind of mapping.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(state, kind):
        raise TypeError(
            f"state is of type {type(state).__name__}: give a dict, with a name for each thing to save, as "
            '{"model": model, "optim": optim}'
        )


def state_of(one: Any) -> Any:
    """Return what is saved of an object: its ``state_dict()``, or itself."""
    return one.state_dict() if hasattr(one, "state_dict") else one


def target_of(one: Any) -> Any:
    """Return what a checkpoint is read into.

    Its tensors are those that ``one`` uses, if ``one`` exposes them.

    An optimizer of DTensors that has no state yet gets one: only the optimizer knows how to make it
    of DTensors.
    """
    if isinstance(one, torch.optim.Optimizer) and not one.state and has_dtensors(one.param_groups):
        init_optimizer_state(one)
    return state_of(one)


def restored(target: Any, found: Any) -> Any:
    """Return ``target`` with the values of ``found``.

    If ``target`` is no dict or list, return ``found``. Dicts and lists are changed where they are.

    Tensors of ``target`` have been filled before, and stand in ``found`` themselves.
    """
    if is_open_ended(target, found):
        if isinstance(target, list):
            target[:] = found
        elif isinstance(target, dict):
            target.update(found)
        return found if isinstance(target, tuple) else target
    if type(target) in (dict, collections.OrderedDict, list):
        for key in list(target) if isinstance(target, dict) else range(len(target)):
            if found[key] is not target[key]:
                target[key] = restored(target[key], found[key])
        return target
    return found


def is_open_ended(target: Any, found: Any) -> bool:
    """Return whether a container takes all that was saved, however many entries that has.

    Such are a list or tuple without tensors if its length differs, and an empty dict.
    """
    if type(target) in (list, tuple) and type(found) is type(target):
        return len(target) != len(found) and not any_leaf(target, lambda leaf: isinstance(leaf, torch.Tensor))
    return type(target) in (dict, collections.OrderedDict) and type(found) is type(target) and not target


def load_states(
    state: MutableMapping[str, Any],
    targets: Mapping[str, Any],
    parts: Mapping[str, Any],
    found: Mapping[str, Any],
    place: str,
) -> None:
    """Give each object what was found for it, and replace the plain values.

    Args:
        state: objects and plain values, by name.
        targets, parts, found: of each, as of `with_dtensors`.
        place: words for the checkpoint.

    Raises:
        ValueError: a part of a DTensor has another shape. Nothing was changed then.
        Exception: as `load_state` does.
    """
    whole = {name: with_dtensors(targets[name], parts[name], found[name]) for name in targets}
    for name, one in list(state.items()):
        if hasattr(one, "load_state_dict"):
            load_state(name, one, whole[name], place)
        else:
            state[name] = restored(one, whole[name])


def load_state(name: str, one: Any, found: Any, place: str) -> None:
    """Give an object with a ``load_state_dict`` what was found for it.

    Args:
        name: of the object in the state, for errors.
        one: the object.
        found: its part of the checkpoint.
        place: words for the checkpoint.

    Raises:
        ValueError: a module has other names or shapes, or an optimizer other parameters or groups.
        Exception: whatever its ``load_state_dict`` raises.
    """
    try:
        one.load_state_dict(found)
    except ValueError as error:
        if not isinstance(one, torch.optim.Optimizer) or not str(error).startswith("loaded state dict"):
            raise
        remedy = "make the optimizer with the parameters and groups that it had, frozen ones included"
        raise ValueError(f"{place} does not fit {name!r}: {error}: {remedy}") from error
    except RuntimeError as error:
        if not isinstance(one, torch.nn.Module) or not str(error).startswith("Error(s) in loading state_dict"):
            raise
        other = _of_another_kind(one, found)
        why = str(error) if other is None else f"{other}: {AS_IT_WAS}. {error}"
        raise ValueError(f"{place} does not fit {name!r}: {why}") from error


def _of_another_kind(module: torch.nn.Module, found: Any) -> str | None:
    """Return words for the first tensor of a module that was saved as another kind of tensor.

    For example, one of them is quantized. None if there is none.
    """
    for key, tensor in module.state_dict().items():
        saved = found.get(key)
        if isinstance(saved, torch.Tensor) and (dispatches(saved) or dispatches(tensor)):
            kinds = type(saved).__name__, type(tensor).__name__
            if kinds[0] != kinds[1]:
                return f"{key} was saved as a {kinds[0]} and is a {kinds[1]} here"
    return None


def is_counted(one: Any) -> bool:
    """Return whether `Preparation` counts a value without its ``state_dict``."""
    return isinstance(one, (torch.nn.Module, torch.optim.Optimizer)) or not hasattr(one, "state_dict")

"""States that `AsyncCheckpointer` saves and restores.

They are objects with a ``state_dict``, or plain values, by name. Lists, tuples and dicts of plain
values may contain such objects.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch

from gdsdata.checkpoint.dtensors import has_dtensors, with_dtensors
from gdsdata.checkpoint.tensor_kinds import AS_IT_WAS, dispatches
from gdsdata.checkpoint.tree import Path, any_leaf, leaves, map_leaves, name_of
from gdsdata.torch_private import init_optimizer_state

_WITHOUT_STATE = frozenset({torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None)})  # most values


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


class PlainValues(NamedTuple):
    """The part of a state that no ``load_state_dict`` takes. Its names must be those of the file.

    Attributes:
        names: in the state.
        objects: the paths of objects within them, which have a ``load_state_dict``.
    """

    names: frozenset[str]
    objects: frozenset[Path]

    def has(self, place: Path) -> bool:
        """Return whether a path is that of a plain value."""
        if place[0] not in self.names:
            return False
        return not self.objects or self.objects.isdisjoint(place[:length] for length in range(1, len(place) + 1))


def plain_values(state: Mapping[str, Any]) -> PlainValues:
    """Return which values of a state are plain."""
    plain = {name: one for name, one in state.items() if not hasattr(one, "load_state_dict")}
    within = (one.path for one in leaves(plain) if has_own_state(one.value)) if _has_objects(plain) else ()
    return PlainValues(frozenset(plain), frozenset(within))


def has_own_state(one: Any) -> bool:
    """Return whether an object has a state of its own: ``state_dict`` and ``load_state_dict``.

    Some dicts and configurations have an attribute of any name, which is no function.
    """
    return not isinstance(one, type) and all(
        callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict")
    )


def _has_objects(tree: Any) -> bool:
    try:
        return any_leaf(tree, has_own_state, _WITHOUT_STATE)
    except RecursionError:  # a container that contains itself is pickled as it is
        return False


def state_of(one: Any) -> Any:
    """Return what is saved of an object: its ``state_dict()``, or itself.

    In a list, tuple or dict, the states of objects take their places.
    """
    if hasattr(one, "state_dict"):
        return one.state_dict()
    if not _has_objects(one):
        return one
    return map_leaves(one, lambda path, leaf: leaf.state_dict() if has_own_state(leaf) else leaf)


def target_of(one: Any) -> Any:
    """Return what a checkpoint is read into.

    Its tensors are those that ``one`` uses, if ``one`` exposes them.

    An optimizer of DTensors that has no state yet gets one: only the optimizer knows how to make it
    of DTensors.
    """
    for optimizer in _optimizers_of(one):
        if not optimizer.state and has_dtensors(optimizer.param_groups):
            init_optimizer_state(optimizer)
    return state_of(one)


def _optimizers_of(one: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(one, torch.optim.Optimizer):
        yield one
    elif not hasattr(one, "state_dict") and _has_objects(one):
        yield from (leaf.value for leaf in leaves(one) if isinstance(leaf.value, torch.optim.Optimizer))


def _restored(target: Any, found: Any, place: Path, where: str) -> Any:
    """Return ``target`` with the values of ``found``.

    If ``target`` is no dict or list, return ``found``. Dicts and lists are changed where they are.
    Objects in them get their states.

    Tensors of ``target`` have been filled before, and stand in ``found`` themselves.

    Args:
        target, found: of a plain value.
        place: its path in the state.
        where: words for the checkpoint.
    """
    if has_own_state(target):
        load_state(name_of(place), target, found, where)
        return target
    if is_open_ended(target, found) and not _has_objects(target):
        if isinstance(target, list) and found is not None:
            target[:] = found
            return target
        if isinstance(target, dict) and found is not None:
            target.update(found)
            return target
        return found
    if type(target) is tuple and _has_objects(target):
        return tuple(_restored(one, found[i], (*place, i), where) for i, one in enumerate(target))
    if type(target) in (dict, collections.OrderedDict, list):
        for key in list(target) if isinstance(target, dict) else range(len(target)):
            if found[key] is not target[key]:
                target[key] = _restored(target[key], found[key], (*place, key), where)
        return target
    return found


def is_open_ended(target: Any, found: Any) -> bool:
    """Return whether a value takes all that was saved, however many entries that has.

    Such are a list or tuple without tensors if its length differs, an empty dict, and None. If None
    was saved, it takes the place of anything.
    """
    if target is None or found is None:
        return True
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
            state[name] = _restored(one, whole[name], (name,), place)


def load_state(name: str, one: Any, found: Any, place: str) -> None:
    """Give an object with a ``load_state_dict`` what was found for it.

    Args:
        name: of the object in the state, for errors.
        one: the object.
        found: its part of the checkpoint.
        place: words for the checkpoint.

    Raises:
        ValueError: a module has other names or shapes, or an optimizer other parameters or groups.
            Or None was saved.
        Exception: whatever its ``load_state_dict`` raises.
    """
    try:
        one.load_state_dict(found)
    except (TypeError, AttributeError) as error:
        if found is not None:
            raise
        kind = type(one).__name__
        message = f"{place} has None for {name!r}, which is a {kind} here: restore into what was saved"
        raise ValueError(message) from error
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
    """Return whether `Preparation` counts a value without a ``state_dict`` that may do anything."""
    if isinstance(one, (torch.nn.Module, torch.optim.Optimizer)):
        return True
    return not hasattr(one, "state_dict") and not any_leaf(
        one, lambda leaf: has_own_state(leaf) and not is_counted(leaf)
    )

"""Trees of dicts, lists and tuples, such as a ``state_dict()``, and their leaves.

A leaf's path is the keys on the way to it; a value that is no container is a leaf whose path is ().
Its name is for people: two leaves with different paths may have the same name.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

_CONTAINERS = (dict, collections.OrderedDict, list, tuple)

LEFT_OUT = object()  # what `map_leaves` leaves out

Path = tuple[Any, ...]


def name_of(path: Path) -> str:
    """Return the keys joined by dots: "optimizer.state.0.exp_avg"."""
    return ".".join(map(str, path))


class Leaf(NamedTuple):
    """A value that is no container.

    Attributes:
        path: the keys on the way to it.
        value: the value.
    """

    path: Path
    value: Any


def leaves(tree: Any, path: Path = ()) -> Iterator[Leaf]:
    """Yield the leaves of a tree in order.

    Args:
        tree: a container, or any other value: a tree of one leaf.
        path: of the tree, in a larger one.
    """
    if not _is_container(tree):
        yield Leaf(path, tree)
        return
    for key, value in _items(tree):
        if _is_container(value):
            yield from leaves(value, (*path, key))
        else:
            yield Leaf((*path, key), value)


def empty_containers(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of containers in which there is nothing."""
    if _is_container(tree):
        if len(tree) == 0:
            yield path
        for key, value in _items(tree):
            yield from empty_containers(value, (*path, key))


def has_place(tree: Any, path: Path) -> bool:
    """Return whether a tree has something at a path."""
    for key in path:
        if not _is_container(tree) or key not in (tree if isinstance(tree, dict) else range(len(tree))):
            return False
        tree = tree[key]
    return True


def any_leaf(tree: Any, holds: Callable[[Any], bool], but: Collection[type] = ()) -> bool:
    """Return whether something holds for a leaf of a tree.

    It is faster than `leaves`, because it makes no paths.

    Args:
        tree: as of `leaves`.
        holds: called with a leaf.
        but: types of leaves for which it does not hold.
    """
    if not _is_container(tree):
        return type(tree) not in but and holds(tree)
    for value in tree.values() if isinstance(tree, dict) else tree:
        kind = type(value)
        if any_leaf(value, holds, but) if kind in _CONTAINERS else kind not in but and holds(value):
            return True
    return False


def with_leaves(tree: Any, values: Mapping[Path, Any]) -> Any:
    """Return a tree with other values in the place of some leaves.

    Dicts and lists are changed where they are. A tuple is made anew; what else it has stays the
    same objects.
    """
    if not values or () in values:
        return values.get((), tree)
    below: dict[Any, dict[Path, Any]] = {}
    for (key, *rest), value in values.items():
        below.setdefault(key, {})[tuple(rest)] = value
    changed = {key: with_leaves(tree[key], those) for key, those in below.items()}
    if isinstance(tree, tuple):
        return tuple(changed.get(i, value) for i, value in enumerate(tree))
    for key, value in changed.items():
        tree[key] = value
    return tree


def map_leaves(tree: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a tree with ``change(path, value)`` in the place of each leaf.

    Leaves that become `LEFT_OUT` are left out, and so are containers that have only such leaves. An
    OrderedDict keeps its attributes: modules read the versions in a state's ``_metadata``.
    """
    if not _is_container(tree):
        return change(path, tree)
    changed = [(key, map_leaves(value, change, (*path, key))) for key, value in _items(tree)]
    kept = [(key, value) for key, value in changed if value is not LEFT_OUT]
    if changed and not kept:
        return LEFT_OUT
    if not isinstance(tree, dict):
        return type(tree)(value for _, value in kept)
    made = type(tree)(kept)
    if isinstance(tree, collections.OrderedDict):
        made.__dict__.update(tree.__dict__)
    return made


def _is_container(value: Any) -> bool:
    return type(value) in _CONTAINERS


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(container.items()) if isinstance(container, dict) else enumerate(container)


def first_device(tree: Any) -> torch.device:
    """Return the device of a tree's first tensor; the CPU if it has none."""
    for one in leaves(tree):
        if isinstance(one.value, torch.Tensor):
            return one.value.device
    return torch.device("cpu")

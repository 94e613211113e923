"""Nests: dicts, lists and tuples in one another, and the leaves that they hold in the end.

A leaf's path is the keys on the way to it; what is no nest itself is a leaf of the path (). Its name is for people: two
leaves of different paths may have the same.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_NESTS = (dict, collections.OrderedDict, list, tuple)

LEFT_OUT = object()

Path = tuple[Any, ...]


def name_of(path: Path) -> str:
    """The keys joined by dots: "optimizer.state.0.exp_avg"."""
    return ".".join(map(str, path))


class Place(NamedTuple):
    """Where a leaf is: ``holder[path[-1]]``; ``holder`` is None for what is no nest itself."""

    path: Path
    holder: Any
    leaf: Any

    def replace(self, leaf: Any) -> None:
        """Nothing happens in a tuple, nor where there is no holder."""
        if isinstance(self.holder, (dict, list)):
            self.holder[self.path[-1]] = leaf


def places(nest: Any, path: Path = (), holder: Any = None) -> Iterator[Place]:
    """Of every leaf, in order."""
    if not _is_nest(nest):
        yield Place(path, holder, nest)
        return
    for key, value in _children(nest):
        if _is_nest(value):
            yield from places(value, (*path, key), nest)
        else:
            yield Place((*path, key), nest, value)


def mapped(nest: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """A nest of the same kinds with each leaf changed. Left out are leaves that become `LEFT_OUT`, and nests that have
    nothing but those."""
    if not _is_nest(nest):
        return change(path, nest)
    changed = [(key, mapped(value, change, (*path, key))) for key, value in _children(nest)]
    kept = [(key, value) for key, value in changed if value is not LEFT_OUT]
    if changed and not kept:
        return LEFT_OUT
    return type(nest)(kept) if isinstance(nest, dict) else type(nest)(value for _, value in kept)


def _is_nest(value: Any) -> bool:
    return type(value) in _NESTS


def _children(nest: Any) -> Iterator[tuple[Any, Any]]:
    return iter(nest.items()) if isinstance(nest, dict) else enumerate(nest)

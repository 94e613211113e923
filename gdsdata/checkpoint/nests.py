"""Nests: dicts, lists and tuples in one another, and what they hold in the end, by name.

A name is the keys on the way, joined by dots: "optimizer.state.0.exp_avg". What is no nest itself has the name "".
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_NESTS = (dict, collections.OrderedDict, list, tuple)

LEFT_OUT = object()


@dataclass(frozen=True)
class Place:
    """Where a leaf is: ``holder[key]``; ``holder`` is None for what is no nest itself."""

    name: str
    holder: Any
    key: Any
    leaf: Any

    def replace(self, leaf: Any) -> None:
        """Nothing happens in a tuple, nor where there is no holder."""
        if isinstance(self.holder, (dict, list)):
            self.holder[self.key] = leaf


def places(nest: Any) -> Iterator[Place]:
    """Of every leaf, in order."""
    if not _is_nest(nest):
        yield Place("", None, None, nest)
        return
    for key, value in _children(nest):
        if _is_nest(value):
            for inner in places(value):
                yield Place(f"{key}.{inner.name}", inner.holder, inner.key, inner.leaf)
        else:
            yield Place(str(key), nest, key, value)


def mapped(nest: Any, change: Callable[[str, Any], Any], prefix: str = "") -> Any:
    """A nest of the same kinds with each leaf changed. Left out are leaves that become `LEFT_OUT`, and nests that have
    nothing but those."""
    if not _is_nest(nest):
        return change(prefix.removesuffix("."), nest)
    changed = [(key, mapped(value, change, f"{prefix}{key}.")) for key, value in _children(nest)]
    kept = [(key, value) for key, value in changed if value is not LEFT_OUT]
    if changed and not kept:
        return LEFT_OUT
    return type(nest)(kept) if isinstance(nest, dict) else type(nest)(value for _, value in kept)


def _is_nest(value: Any) -> bool:
    return type(value) in _NESTS


def _children(nest: Any) -> Iterator[tuple[Any, Any]]:
    return iter(nest.items()) if isinstance(nest, dict) else enumerate(nest)

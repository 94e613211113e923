"""`Frozen` and `Value`: bases of the dataclasses that each start makes.

Python writes and compiles each method that `dataclasses` adds: 0.05 to 0.1 ms, and a frozen class
has up to six. These have them as functions. Derived classes are ``@dataclass(eq=False,
repr=False)``. Formats are no such classes, because users may derive frozen ones from them.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from operator import itemgetter
from typing import TYPE_CHECKING, Any

_VALUES_OF: dict[type, Any] = {}


class Frozen:
    """A dataclass whose attributes are set once, by its ``__init__``, as with ``frozen=True``."""

    if not TYPE_CHECKING:  # a type checker would then allow each attribute

        def __setattr__(self, name: str, value: Any) -> None:
            if name in self.__dict__ or name not in self.__dataclass_fields__:
                raise FrozenInstanceError(f"cannot assign to field {name!r}")
            self.__dict__[name] = value

        def __delattr__(self, name: str) -> None:
            raise FrozenInstanceError(f"cannot delete field {name!r}")


class Value(Frozen):
    """One that is compared, hashed and shown by its attributes."""

    def _values(self) -> Any:
        kind = type(self)
        if kind not in _VALUES_OF:
            _VALUES_OF[kind] = itemgetter(*(one.name for one in fields(self)))  # type: ignore[arg-type]
        return _VALUES_OF[kind](self.__dict__)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value) or type(other) is not type(self):
            return NotImplemented
        return bool(self._values() == other._values())

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        said = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__qualname__}({', '.join(said)})"

"""Packages whose names are imported when they are first used.

`gdsdata` does the same without this module, so that importing it imports no module.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, home_of: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its name.
        home_of: for each of its names, the module of the package that has it or is it.
    """

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(f"{package}.{home_of[name]}")
        if name == home_of[name]:
            return home
        found = getattr(home, name)
        setattr(sys.modules[package], name, found)  # the next use does not come here
        return found

    return get, lambda: sorted({*vars(sys.modules[package]), *home_of})

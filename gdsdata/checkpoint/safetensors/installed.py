"""`install`, `uninstall`, `installed`: gdsdata's functions under the names of `safetensors`."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from gdsdata.checkpoint.safetensors.files import load_file, save_file
from gdsdata.checkpoint.safetensors.opened import safe_open
from gdsdata.checkpoint.safetensors.stock import stock
from gdsdata.io import engine
from gdsdata.storage.fork_safe import ForkSafeLock

_changing = ForkSafeLock()  # guards what follows, and the names that are replaced
_users = 0


# Objects of their own: `uninstall` must not replace what a program has imported from gdsdata.
class _SafeOpen(safe_open):
    pass


_SafeOpen.__name__ = _SafeOpen.__qualname__ = safe_open.__name__


@functools.wraps(load_file)
def _load_file(*arguments: Any, **named: Any) -> Any:
    return load_file(*arguments, **named)


@functools.wraps(save_file)
def _save_file(*arguments: Any, **named: Any) -> Any:
    return save_file(*arguments, **named)


def install() -> None:
    """Put `safe_open`, `load_file` and `save_file` in the place of those of `safetensors`.

    They are replaced in all modules that have them, under whatever name. So other libraries
    (transformers, peft, accelerate, diffusers) and `safetensors.torch.load_model` and `save_model`
    use gdsdata's. `uninstall` undoes one call. This holds for all threads of the process.

    Raises:
        NotInstalled: the package `safetensors` is not installed.
    """
    global _users
    its = stock("install")
    with _changing:
        _users += 1
        if _users == 1:
            _replace([(its.safe_open, _SafeOpen), (its.load_file, _load_file), (its.save_file, _save_file)])


def uninstall() -> None:
    """Undo one `install`. The last one puts the functions of `safetensors` back."""
    global _users
    its = stock("uninstall")
    with _changing:
        if _users == 0:
            raise RuntimeError("uninstall() without an install() before")
        _users -= 1
        if _users == 0:
            _replace([(_SafeOpen, its.safe_open), (_load_file, its.load_file), (_save_file, its.save_file)])


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`install` for the time of a ``with`` block. It may be nested."""
    install()
    try:
        yield
    finally:
        uninstall()


def _replace(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Replace functions in the names of all modules but gdsdata's own."""
    dictionaries = {}  # each once: a module may be there under several names
    for name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if type(names) is dict and name != "gdsdata" and not name.startswith("gdsdata."):
            dictionaries[id(names)] = names
    # By the extension: in Python it took 100 ms with the modules of transformers (H200's machine).
    for names, name, place in engine.find_names(list(dictionaries.values()), [old for old, _ in pairs]):
        names[name] = pairs[place][1]

"""`install`, `uninstall`, `installed`: gdsdata's functions under the names of `safetensors`."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gdsdata.checkpoint.hooks_report import COUNTS
from gdsdata.checkpoint.safetensors.files import load_file, save_file
from gdsdata.checkpoint.safetensors.opened import OPENED, SafeSlice, safe_open
from gdsdata.checkpoint.safetensors.stock import stock
from gdsdata.fork_safe import fork_safe_lock
from gdsdata.io import engine

_changing = fork_safe_lock()  # guards what follows, and the names that are replaced
_users: set[object] = set()  # blocks of `installed`, and an `_Install` for each call of `install`


# Objects of their own: they are counted, and `uninstall` must not replace what a program has
# imported from gdsdata.
class CountedSlice(SafeSlice):
    """A slice whose reads `torch_hooks` report."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        with COUNTS.timed(OPENED, calls=0) as sizes_bytes:
            found = super().__getitem__(index)
            sizes_bytes.append(found.nbytes)
        return found


class CountedOpen(safe_open):
    """A `safe_open` that `torch_hooks` report, with all that is read from it."""

    def __new__(cls, *arguments: Any, **named: Any) -> CountedOpen:
        with COUNTS.watched(OPENED):
            return super().__new__(cls, *arguments, **named)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        with COUNTS.timed(OPENED):
            super().__init__(*arguments, **named)

    def get_tensor(self, name: str) -> torch.Tensor:
        with COUNTS.timed(OPENED, calls=0) as sizes_bytes:
            found = super().get_tensor(name)
            sizes_bytes.append(found.nbytes)
        return found

    def get_tensors(self) -> dict[str, torch.Tensor]:
        with COUNTS.timed(OPENED, calls=0) as sizes_bytes:
            found = super().get_tensors()
            sizes_bytes += [one.nbytes for one in found.values()]
        return found

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(name, self._stored(name), self._opened(), self._device, self._options)


CountedOpen.__name__ = CountedOpen.__qualname__ = safe_open.__name__


@functools.wraps(load_file)
def _load_file(*arguments: Any, **named: Any) -> Any:
    with COUNTS.timed("safetensors.load_file") as sizes_bytes:
        found = load_file(*arguments, **named)
        sizes_bytes += [one.nbytes for one in found.values()]
    return found


@functools.wraps(save_file)
def _save_file(tensors: Any, *arguments: Any, **named: Any) -> Any:
    with COUNTS.timed("safetensors.save_file") as sizes_bytes:
        save_file(tensors, *arguments, **named)
        sizes_bytes += [one.nbytes for one in tensors.values()]


def install() -> None:
    """Put `safe_open`, `load_file` and `save_file` in the place of those of `safetensors`.

    They are replaced in all modules that have them, under whatever name. So other libraries
    (transformers, peft, accelerate, diffusers) and `safetensors.torch.load_model` and `save_model`
    use gdsdata's. `uninstall` undoes one call. This holds for all threads of the process.

    Raises:
        NotInstalled: the package `safetensors` is not installed.
    """
    stock("install")
    user = _Install()
    try:
        _begin(user)
    except BaseException:  # such as Ctrl-C
        _end(user)
        raise


def uninstall() -> None:
    """Undo one `install`. The last one puts the functions of `safetensors` back."""
    stock("uninstall")
    user = next((one for one in list(_users) if isinstance(one, _Install)), None)
    if user is None:
        raise RuntimeError("uninstall() without an install() before")
    _end(user)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`install` for the time of a ``with`` block. It may be nested."""
    stock("installed")
    user = object()
    try:
        _begin(user)
        yield
    finally:
        try:
            _end(user)
        except BaseException:  # Ctrl-C may come as the call begins
            _end(user)
            raise


class _Install:
    """A call of `install`."""


def _begin(user: object) -> None:
    """Replace the functions, if nobody has. If this raises, `_end` puts them back."""
    with _changing:
        _users.add(user)
        if len(_users) == 1:
            _replace(_ours())


def _end(user: object) -> None:
    """Put the functions back, if nobody else uses gdsdata's. May be called again."""
    with _changing:
        _users.discard(user)
        if not _users:
            theirs = [(new, old) for old, new in _ours()]
            try:
                _replace(theirs)
            except BaseException:  # such as Ctrl-C
                _replace(theirs)
                raise


def _ours() -> list[tuple[Any, Any]]:
    its = stock("install")
    return [(its.safe_open, CountedOpen), (its.load_file, _load_file), (its.save_file, _save_file)]


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

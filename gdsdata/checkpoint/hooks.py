"""`torch_hooks`, `install_torch_hooks`: torch's functions on gdsdata's engine."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import torch

from gdsdata import torch_private
from gdsdata.checkpoint.explanations import empty_file
from gdsdata.checkpoint.gc_pause import collector_paused
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.checkpoint.torch_zip import archive_reader, archive_writer, torch_config
from gdsdata.checkpoint.torch_zip.archive import open_archive
from gdsdata.checkpoint.torch_zip.unpickling import NotPlain, SavedStorage
from gdsdata.errors import CorruptData, NotReplaceable
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions

_torch_save, _torch_load = torch.serialization.save, torch.serialization.load
_changing = threading.Lock()  # guards what follows, and the functions of torch that are replaced
_users = 0
_replaced: list[tuple[Any, str, Any]] = []  # the module, the name in it, and torch's own function


@contextlib.contextmanager
def torch_hooks() -> Iterator[None]:
    """Have torch's own checkpoint functions work through gdsdata; for ``with``.

    They are `torch.save`, `torch.load` and torch.distributed.checkpoint.

        with gdsdata.torch_hooks():
            trainer.fit()

    This holds for all threads of the process, and for torch.distributed.checkpoint if it gets a
    ``checkpoint_id`` and no storage of its own. It may be nested.

    Files are the same, and so are the results. A saved file is on storage when the call returns,
    and replaces the old one as a whole. If no new file can replace it (a bind-mounted file, a
    folder that is not writable), torch overwrites it in place, with one warning.

    torch does the work if gdsdata would behave differently:

    - file objects, links, old files and damaged files
    - a ``pickle_module``, ``mmap=True``, or a function as ``map_location``
    - devices other than CPU and CUDA
    - a switch of `torch.utils.serialization.config` that gdsdata does not follow

    Stream semantics: as `gdsdata.save` and `gdsdata.load`.
    """
    _begin()
    try:
        yield
    finally:
        _end()


def install_torch_hooks() -> None:
    """Install `torch_hooks` for the rest of the program."""
    _begin()


def _begin() -> None:
    global _users
    with _changing:
        _users += 1
        if _users == 1:
            for module, name, instead in _replacements():
                _replaced.append((module, name, getattr(module, name)))
                setattr(module, name, instead)


def _end() -> None:
    global _users
    with _changing:
        _users -= 1
        while _users == 0 and _replaced:
            setattr(*_replaced.pop())


def _replacements() -> list[tuple[Any, str, Any]]:
    found: list[tuple[Any, str, Any]] = [(module, "save", _save) for module in (torch, torch.serialization)]
    found += [(module, "load", _load) for module in (torch, torch.serialization)]
    if torch.distributed.is_available():
        from gdsdata.checkpoint.dcp.storage_reader import GDSStorageReader
        from gdsdata.checkpoint.dcp.storage_writer import GDSStorageWriter

        storage_utils = torch_private.dcp_storage_utils()
        found += [
            (storage_utils, "FileSystemWriter", GDSStorageWriter),
            (storage_utils, "FileSystemReader", GDSStorageReader),
        ]
    return found


@functools.wraps(_torch_save)
def _save(
    obj: Any,
    f: Any,
    pickle_module: Any = pickle,
    pickle_protocol: int = torch.serialization.DEFAULT_PROTOCOL,
    *others: Any,
    **named: Any,
) -> None:
    is_plain = pickle_module is pickle and pickle_protocol == torch.serialization.DEFAULT_PROTOCOL
    is_plain = is_plain and torch_private.writes_usual_zip(*others, **named) and torch_config.is_alignment_served()
    if is_plain and _is_writable_name(f) and not torch_private.moves_no_values():
        try:
            with collector_paused():
                return archive_writer.save(obj, os.path.abspath(f), EngineOptions())
        except NotReplaceable as why:
            engine.warn_once(f"{why}. torch.save writes over it in place instead, and a crash meanwhile damages it")
    return _torch_save(obj, f, pickle_module, pickle_protocol, *others, **named)


@functools.wraps(_torch_load)
def _load(
    f: Any,
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    **pickle_load_args: Any,
) -> Any:
    def by_torch() -> Any:
        with _path_noted(f):
            return _torch_load(f, map_location, pickle_module, weights_only=weights_only, mmap=mmap, **pickle_load_args)

    is_mapped = torch_config.is_mapped(mmap)
    plain = pickle_module is None and not (is_mapped or pickle_load_args or callable(map_location))
    plain = (
        plain and _is_name_of_file(f) and not os.fsdecode(f).endswith(".safetensors")
    )  # torch reads those differently
    if not plain or torch_private.moves_no_values() or _is_told_by_environment():
        return by_torch()
    try:
        with collector_paused():
            file = OpenFile(os.fsdecode(f))
            archive = open_archive(file)
    except (NotPlain, CorruptData):
        return by_torch()

    def device_of(storage: SavedStorage) -> torch.device:
        return _device_for(storage.location, map_location)

    reader = TensorReader(EngineOptions(), verify=False)
    with _path_noted(f):
        try:
            with collector_paused():
                return archive_reader.read(archive, reader, device_of, map_location, weights_only)
        except (NotPlain, _NotOurs):
            pass
        except CorruptData:
            file.check_unchanged()
    return by_torch()  # raises torch's own errors for damaged files


@contextlib.contextmanager
def _path_noted(f: Any) -> Iterator[None]:
    """Note the file's path below errors, from Python 3.11 on.

    Their types and words stay those of torch.
    """
    try:
        yield
    except Exception as error:
        if isinstance(f, (str, os.PathLike)) and hasattr(error, "add_note"):
            path = os.fsdecode(f)
            is_empty = os.path.isfile(path) and os.path.getsize(path) == 0
            error.add_note(str(empty_file(path)) if is_empty else f"torch.load was reading '{path}'")
        raise


class _NotOurs(Exception):
    """Only torch can do this."""


def _device_for(location: str, map_location: Any) -> torch.device:
    """Return where torch would put a storage that was saved from ``location``.

    Raises:
        _NotOurs: only torch knows.
    """
    if isinstance(map_location, dict):
        location = map_location.get(location, location)
    elif map_location is not None:
        location = str(map_location) if isinstance(map_location, torch.device) else map_location
    if not isinstance(location, str):
        raise _NotOurs
    try:
        device = torch.device(location)
    except RuntimeError as error:
        raise _NotOurs from error
    if device.type == "cpu" and location != "cpu":  # torch knows no "cpu:0"
        raise _NotOurs
    if not engine.reaches(device) or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        raise _NotOurs
    return engine.resolved(device)


def _is_name_of_file(f: Any) -> bool:
    """Return whether ``f`` names a file, and is no link to one."""
    return isinstance(f, (str, os.PathLike)) and not os.path.islink(f) and os.path.isfile(f)


def _is_writable_name(f: Any) -> bool:
    """Return whether ``f`` names a writable file, or a new one in a folder.

    torch refuses other names.
    """
    if _is_name_of_file(f):
        return os.access(f, os.W_OK, effective_ids=True)
    is_new = isinstance(f, (str, os.PathLike)) and not os.path.lexists(f)
    return is_new and os.path.isdir(os.path.dirname(os.path.abspath(f)))


def _is_told_by_environment() -> bool:
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_SERIALIZATION_DEBUG")
    return any(name in os.environ for name in names)

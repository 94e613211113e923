"""The parts of torch.distributed.checkpoint that `torch_hooks` replaces, and their replacements.

`FileSystemWriter` and `FileSystemReader` become gdsdata's subclasses while they are made. So it
does not matter by which name a program knows these classes, and isinstance() holds.
"""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from concurrent.futures import Future
from enum import Enum
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from gdsdata import torch_private
from gdsdata.checkpoint.dcp.object_file_system import place_of
from gdsdata.checkpoint.dcp.storage_reader import GDSStorageReader
from gdsdata.checkpoint.dcp.storage_writer import GDSStorageWriter
from gdsdata.checkpoint.hooks_report import COUNTS
from gdsdata.io.options import EngineOptions

_make_writer, _make_reader = FileSystemWriter.__init__, FileSystemReader.__init__
_execute_save = {executor: executor.execute_save for executor in torch_private.dcp_async_executors()}
_of_writer, _of_reader = inspect.signature(_make_writer), inspect.signature(_make_reader)

# Arguments of torch's classes that gdsdata does not serve unless they are the default. It follows
# the others, or they only say how torch writes: gdsdata syncs files, and has threads of its own.
_NOT_SERVED = ("single_file_per_rank", "_extensions", "serialization_format", "_extension_registry")

# Why writers that were made under hooks stayed torch's.
_reasons: weakref.WeakKeyDictionary[FileSystemWriter, str] = weakref.WeakKeyDictionary()


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what is replaced: the module or class, the name in it, and its replacement."""
    storage_utils = torch_private.dcp_storage_utils()
    found: list[tuple[Any, str, Any]] = [
        (FileSystemWriter, "__init__", _init_writer),
        (FileSystemReader, "__init__", _init_reader),
        # These are asked first which ids they take: torch's classes take no URL.
        (storage_utils, "FileSystemWriter", HookedStorageWriter),
        (storage_utils, "FileSystemReader", HookedStorageReader),
    ]
    for executor, its in _execute_save.items():
        found.append((executor, "execute_save", _with_our_writer(executor, its)))
    return found


class HookedStorageWriter(GDSStorageWriter):
    """A `FileSystemWriter` that was made under hooks."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        with COUNTS.timed("dcp.save") as sizes_bytes:
            written = super().write_data(plan, planner)
            sizes_bytes += [one.size_in_bytes for one in written.value()]
        return written


class HookedStorageReader(GDSStorageReader):
    """A `FileSystemReader` that was made under hooks."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        with COUNTS.timed("dcp.load") as sizes_bytes:
            plan = self._own_plan(plan)
            read = super().read_data(plan, planner)
            sizes_bytes += [self.storage_data[index].length for index in {one.storage_index for one in plan.items}]
        return read


@functools.wraps(_make_writer)
def _init_writer(self: Any, *arguments: Any, **named: Any) -> None:
    _make_writer(self, *arguments, **named)
    if reason := _why_not(self, FileSystemWriter, _of_writer, arguments, named):
        if type(self) is FileSystemWriter:
            _reasons[self] = reason
        COUNTS.left("dcp.FileSystemWriter", reason, self.path)
    elif type(self) is FileSystemWriter:
        self.__class__ = HookedStorageWriter
        _take_over(self, arguments, named, _of_writer)


@functools.wraps(_make_reader)
def _init_reader(self: Any, *arguments: Any, **named: Any) -> None:
    _make_reader(self, *arguments, **named)
    if reason := _why_not(self, FileSystemReader, _of_reader, arguments, named):
        COUNTS.left("dcp.FileSystemReader", reason, self.path)
    elif type(self) is FileSystemReader:
        self.__class__ = HookedStorageReader
        _take_over(self, arguments, named, _of_reader)


def _why_not(
    made: Any, of_torch: type, signature: inspect.Signature, arguments: tuple[Any, ...], named: dict[str, Any]
) -> str:
    """Return why an object stays one of torch's; "" if it is, or becomes, one of gdsdata's."""
    if isinstance(made, (GDSStorageWriter, GDSStorageReader)):
        return ""
    if type(made) is not of_torch:
        return f"a class of its own: {type(made).__name__}"
    given = signature.bind(made, *arguments, **named).arguments
    for name in _NOT_SERVED:
        if name in given and given[name] != signature.parameters[name].default:
            return f"{name}={given[name]!r:.60}" if isinstance(given[name], (bool, Enum)) else f"{name}=..."
    return ""


def _why_torchs(writer: Any) -> str:
    """Return why a storage writer that was given to a save is not one of gdsdata's."""
    if writer is None:
        return "it has no checkpoint_id"
    if type(writer) is not FileSystemWriter:
        return f"a class of its own: {type(writer).__name__}"
    return _reasons.get(writer, "its storage writer was made before the hooks")


def _take_over(made: Any, arguments: tuple[Any, ...], named: dict[str, Any], signature: inspect.Signature) -> None:
    """Give an object that torch's class has made what gdsdata's class needs."""
    made.fs, made.path = place_of(signature.bind(made, *arguments, **named).arguments["path"])
    made.options = EngineOptions()
    made.verify = False  # a reader does not compare checksums, as torch's does not


def _with_our_writer(executor: type, its: Any) -> Any:
    """Return `execute_save` for saves in the background, which may end after the hooks are gone.

    The writer is made now, and not by the thread or process that saves. A new process has no hooks,
    but it unpickles the writer.
    """
    in_process = torch_private.saves_in_process(executor)

    @functools.wraps(its)
    def execute_save(
        self: Any, staged: Any, *, checkpoint_id: Any = None, storage_writer: Any = None, **named: Any
    ) -> Any:
        if storage_writer is None and checkpoint_id and HookedStorageWriter.validate_checkpoint_id(checkpoint_id):
            storage_writer = HookedStorageWriter(checkpoint_id)
        begin_s = time.perf_counter()
        future = its(self, staged, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **named)
        if in_process and isinstance(storage_writer, HookedStorageWriter):
            future.add_done_callback(functools.partial(_count, begin_s=begin_s))
        elif in_process and not isinstance(storage_writer, GDSStorageWriter):
            COUNTS.left("dcp.async_save (process)", _why_torchs(storage_writer), checkpoint_id)
        return future

    return execute_save


def _count(saved: Future[Metadata], begin_s: float) -> None:
    if saved.cancelled() or saved.exception() is not None:
        return
    infos = (saved.result().storage_data or {}).values()
    COUNTS.served("dcp.async_save (process)", sum(info.length for info in infos), time.perf_counter() - begin_s)

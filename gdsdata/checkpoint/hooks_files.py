"""The functions that torch.save and torch.load call, as `torch_hooks` replaces them.

torch.save opens a zip writer and calls a function that saves into it; torch.load does the reverse.
torch looks these functions up when it needs them. So a program may have imported torch.save and
torch.load by any name before, and torch still checks their arguments and makes its own errors.

`PendingWriter` and `PendingReader` stand for torch's writer and reader until it is known who does
the work. If anybody asks them for more than gdsdata knows, they open torch's own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gdsdata import torch_private
from gdsdata.checkpoint.deferred import deferred_for
from gdsdata.checkpoint.explanations import empty_file
from gdsdata.checkpoint.gc_pause import collector_paused
from gdsdata.checkpoint.hooks_file_objects import InPlaceWriter, NotServed, check_writable, open_again, plain_file
from gdsdata.checkpoint.hooks_report import COUNTS
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.checkpoint.torch_zip import archive_reader, archive_writer, torch_config
from gdsdata.checkpoint.torch_zip.archive import Archive, open_archive
from gdsdata.checkpoint.torch_zip.mapped_storages import read_mapped
from gdsdata.checkpoint.torch_zip.torch_unpickling import is_own
from gdsdata.checkpoint.torch_zip.unpickling import NotPlain, SavedStorage
from gdsdata.checkpoint.writers import writer_of
from gdsdata.errors import CorruptData, NotReplaceable
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions

# torch's own functions, by the names in `torch_private`. Those that torch lacks are not replaced.
_of_torch = torch_private.serialization_seams()


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what is replaced: the module, the name in it, and its replacement."""
    torch_private.warn_if_newer()
    instead: dict[str, Callable[..., Any]] = {}
    if all(name in _of_torch for name in torch_private.SAVE_SEAMS):
        instead |= {
            torch_private.OPEN_ZIP_WRITER: PendingWriter,
            torch_private.SAVE_ZIP: _save,
            torch_private.SAVE_LEGACY: _save_legacy,
        }
    if all(name in _of_torch for name in torch_private.LOAD_SEAMS):
        instead |= {
            torch_private.OPEN_ZIP_READER: PendingReader,
            torch_private.LOAD_ZIP: _load,
            torch_private.LOAD_LEGACY: _load_legacy,
        }
    missing = sorted({*torch_private.SAVE_SEAMS, *torch_private.LOAD_SEAMS} - instead.keys())
    if missing:
        engine.warn_once(
            f"this torch lacks functions that torch_hooks replaces, so that torch's own do the work of {missing}: "
            "update gdsdata"
        )
    return [(torch.serialization, name, function) for name, function in instead.items()]


# --- torch.save -------------------------------------------------------------------------------------------------------


class PendingWriter:
    """Stands for the zip writer of a path or file object.

    Args:
        place: what torch.save was given: a path, or a file object.
    """

    def __init__(self, place: Any) -> None:
        self.place = place
        self._opened = contextlib.ExitStack()
        self._writer: Any = None

    def __enter__(self) -> PendingWriter:
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._opened.__exit__(*error)

    def by_torch(self) -> Any:
        """Return torch's writer."""
        if self._writer is None:
            self._writer = self._opened.enter_context(_of_torch[torch_private.OPEN_ZIP_WRITER](self.place))
        return self._writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.by_torch(), name)


def _save(value: Any, writer: Any, pickle_module: Any, pickle_protocol: int, *others: Any, **named: Any) -> None:
    its = _of_torch[torch_private.SAVE_ZIP]
    if not isinstance(writer, PendingWriter):
        return its(value, writer, pickle_module, pickle_protocol, *others, **named)
    place = writer.place
    try:
        _check_usual_pickle(pickle_module, pickle_protocol, *others, *named.values())
        if isinstance(place, (str, os.PathLike)):
            path = os.fsdecode(place)
            return _save_to_name(value, path if os.path.isabs(path) else os.path.join(os.getcwd(), path))
        return _save_to_file(value, plain_file(place), place)
    except NotServed as why:
        COUNTS.left("torch.save", str(why), _shown(place))
    return its(value, writer.by_torch(), pickle_module, pickle_protocol, *others, **named)


def _check_usual_pickle(pickle_module: Any, pickle_protocol: int, *others: Any) -> None:
    if pickle_module is not pickle or pickle_protocol != torch.serialization.DEFAULT_PROTOCOL:
        raise NotServed("a pickle_module or pickle_protocol of its own")
    if any(others):
        raise NotServed("a file without its byte order")
    if not torch_config.is_alignment_served():
        raise NotServed("config.save.storage_alignment")
    if torch_private.moves_no_values():
        raise NotServed("skip_data, or fake tensors")


def _save_to_name(value: Any, path: str) -> None:
    if os.path.islink(path):
        raise NotServed("the path is a symbolic link")
    if os.path.isfile(path):
        if not os.access(path, os.W_OK, effective_ids=True):
            raise NotServed("the file is not writable")
    elif os.path.lexists(path) or not os.path.isdir(os.path.dirname(path)):
        raise NotServed("the path names no file, and no new one in a folder")
    deferred = deferred_for(path)
    try:
        with COUNTS.timed("torch.save") as sizes_bytes, collector_paused():
            if deferred is not None:
                sizes_bytes.append(deferred.save_state(value, path))
            else:
                sizes_bytes.append(archive_writer.write(value, lambda size: writer_of(path, size, EngineOptions())))
    except NotReplaceable as why:
        engine.warn_once(f"{why}. torch.save writes over it in place instead, and a crash meanwhile damages it")
        raise NotServed("no new file can replace it") from why


def _save_to_file(value: Any, file: Any, given: Any) -> None:
    check_writable(file)
    with COUNTS.timed("torch.save") as sizes_bytes, collector_paused():
        sizes_bytes.append(archive_writer.write(value, lambda size: InPlaceWriter(file, size, EngineOptions())))
    given.flush()  # as torch does


def _save_legacy(value: Any, file: Any, *others: Any, **named: Any) -> Any:
    COUNTS.left("torch.save", "the format of torch 1.5 and before", _shown(file))
    return _of_torch[torch_private.SAVE_LEGACY](value, file, *others, **named)


# --- torch.load -------------------------------------------------------------------------------------------------------


class PendingReader:
    """Stands for the zip reader of an open file.

    Args:
        file: the file object that torch.load opened, or was given.

    Attributes:
        archive: the archive, if gdsdata can read it; else None.
        reason: why there is no archive.
    """

    def __init__(self, file: Any) -> None:
        self.file = file
        self.archive: Archive | None = None
        self.reason = ""
        self._reader: Any = None
        try:
            with collector_paused():
                self.archive = open_archive(open_again(plain_file(file)))
        except NotServed as why:
            self.reason = str(why)
        except NotPlain as why:
            self.reason = f"the file: {why}"
        except CorruptData:
            self.reason = "the file is damaged"

    def __enter__(self) -> PendingReader:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def by_torch(self) -> Any:
        """Return torch's reader."""
        if self._reader is None:
            with _path_noted(self.file):
                self._reader = _of_torch[torch_private.OPEN_ZIP_READER](self.file).__enter__()
        return self._reader

    def get_all_records(self) -> list[str]:
        """Return the names of the records, of which torch knows what kind of archive it is."""
        return list(self.by_torch().get_all_records() if self.archive is None else self.archive.records)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.by_torch(), name)


def _load(
    reader: Any,
    map_location: Any,
    pickle_module: Any,
    pickle_file: str = torch_private.PICKLE_RECORD,
    overall_storage: Any = None,
    *others: Any,
    **named: Any,
) -> Any:
    def by_torch() -> Any:
        its_reader = reader.by_torch() if isinstance(reader, PendingReader) else reader
        given = (map_location, pickle_module, pickle_file, overall_storage, *others)
        return _of_torch[torch_private.LOAD_ZIP](its_reader, *given, **named)

    if not isinstance(reader, PendingReader) or is_own(map_location):
        return by_torch()
    weights_only = pickle_module is torch_private.weights_only_pickle_module()
    with _path_noted(reader.file):
        try:
            archive = reader.archive
            if archive is None:
                raise NotServed(reader.reason)
            if overall_storage is not None:
                raise NotServed("mmap=True")
            if others or pickle_file != torch_private.PICKLE_RECORD:
                raise NotServed("arguments that this version of gdsdata does not know")
            _check_usual_unpickling(pickle_module, weights_only, named)
            with COUNTS.timed("torch.load") as sizes_bytes:
                found = _read(archive, map_location, weights_only)
                assert archive.file is not None
                sizes_bytes.append(archive.file.size_bytes)
            return found
        except NotServed as why:
            COUNTS.left("torch.load", str(why), _shown(reader.file))
        except pickle.UnpicklingError:
            # torch adds its advice to the error that its own unpickler raises.
            if not weights_only:
                raise
        return by_torch()


def _check_usual_unpickling(pickle_module: Any, weights_only: bool, named: dict[str, Any]) -> None:
    if not weights_only and pickle_module is not pickle:
        raise NotServed("a pickle_module of its own")
    # Newer versions of torch also say whether it is weights_only. This is torch's default encoding.
    if {"weights_only": weights_only} | named != {"weights_only": weights_only, "encoding": "utf-8"}:
        raise NotServed("arguments for the unpickler")
    if torch_private.moves_no_values():
        raise NotServed("skip_data, or fake tensors")
    if "TORCH_SERIALIZATION_DEBUG" in os.environ:
        raise NotServed("TORCH_SERIALIZATION_DEBUG")


def _read(archive: Archive, map_location: Any, weights_only: bool) -> Any:
    """Read an archive.

    Raises:
        NotServed: torch does it, or raises its own error for a damaged file.
        CorruptData: the file was changed meanwhile.
        pickle.UnpicklingError: ``weights_only`` forbids something in it.
    """

    def device_of(storage: SavedStorage) -> torch.device:
        return _device_for(storage.location, map_location)

    assert archive.file is not None
    try:
        with collector_paused():
            if callable(map_location):
                return read_mapped(archive, map_location, weights_only, EngineOptions())
            reader = TensorReader(EngineOptions(), verify=False)
            return archive_reader.read(archive, reader, device_of, map_location, weights_only)
    except NotPlain as why:
        raise NotServed(f"the file: {why}") from why
    except CorruptData as why:
        archive.file.check_unchanged()
        raise NotServed("the file is damaged") from why


def _device_for(location: str, map_location: Any) -> torch.device:
    """Return where torch would put a storage that was saved from ``location``.

    Raises:
        NotServed: only torch knows.
    """
    if isinstance(map_location, dict):
        location = map_location.get(location, location)
    elif map_location is not None:
        location = str(map_location) if isinstance(map_location, torch.device) else map_location
    not_served = NotServed(f"a map_location other than the CPU and CUDA devices ({location!r:.40})")
    if not isinstance(location, str):
        raise not_served
    try:
        device = torch.device(location)
    except RuntimeError as error:
        raise not_served from error
    if device.type == "cpu" and location != "cpu":  # torch knows no "cpu:0"
        raise not_served
    if not engine.reaches(device) or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        raise not_served
    return engine.resolved(device)


def _load_legacy(file: Any, map_location: Any, *others: Any, **named: Any) -> Any:
    with _path_noted(file):
        COUNTS.left("torch.load", "the file is no zip: older than torch 1.6, or damaged", _shown(file))
        return _of_torch[torch_private.LOAD_LEGACY](file, map_location, *others, **named)


@contextlib.contextmanager
def _path_noted(file: Any) -> Iterator[None]:
    """Note the file's path below errors, from Python 3.11 on.

    Their types and words stay those of torch.
    """
    try:
        yield
    except Exception as error:
        path = _path_of(file)
        if path and hasattr(error, "add_note"):
            is_empty = os.path.isfile(path) and os.path.getsize(path) == 0
            note = str(empty_file(path)) if is_empty else f"torch.load was reading '{path}'"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


def _path_of(place: Any) -> str:
    """Return the path of a path or file object; "" if it has none."""
    path = place if isinstance(place, (str, bytes, os.PathLike)) else getattr(place, "name", "")
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""


def _shown(place: Any) -> str:
    """Return the path of a path or file object, or else its type, for the report."""
    return _path_of(place) or f"a {type(place).__name__}"

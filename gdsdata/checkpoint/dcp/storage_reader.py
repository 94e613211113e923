"""`GDSStorageReader`: torch.distributed.checkpoint reads by gdsdata's engine.

It reads what `GDSStorageWriter` and torch's `FileSystemWriter` write. Source:
torch.distributed.checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from gdsdata.checkpoint.dcp.data_files import INCOMPLETE, DataFiles, check_size
from gdsdata.checkpoint.dcp.metadata_checks import check_covered, check_form, check_placed, check_shape
from gdsdata.checkpoint.dcp.metadata_checksum import without_checksum
from gdsdata.checkpoint.dcp.noted_place import noted_place
from gdsdata.checkpoint.dcp.object_file_system import place_of
from gdsdata.checkpoint.dcp.packed_plan import PackedPlan, packed_plan
from gdsdata.checkpoint.explanations import torch_errors_explained
from gdsdata.checkpoint.gc_pause import collector_paused
from gdsdata.checkpoint.open_file import OpenFile, missing
from gdsdata.checkpoint.stored import Record, Stored
from gdsdata.checkpoint.tensor_kinds import freed, is_freed
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.checkpoint.threads import without_traceback
from gdsdata.checkpoint.tree import first_device
from gdsdata.checkpoint.urls import folder_name, is_url, last_part
from gdsdata.errors import CorruptData, GdsdataError, RankLost
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions, options_of
from gdsdata.progress_bars import bar

if TYPE_CHECKING:
    from gdsdata.collective.transfers import SharedReads

_LOOKED_AT_ITEMS = 64  # of a plan, for its size


class _CheckedPickles:
    """A file system whose pickles are checked before torch unpickles them.

    Pickles of `GDSStorageWriter` have a checksum. In others, a few damaged bytes can claim
    gigabytes of memory.
    """

    def __init__(self, file_system: Any) -> None:
        self._file_system = file_system
        self.has_checksum = False  # of the last pickle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file_system, name)

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.BytesIO]:
        with self._file_system.create_stream(path, mode) as stream:
            stored = stream.read()
        content = without_checksum(stored)
        self.has_checksum = len(content) < len(stored)
        if engine.pickle_claims_too_much(content):
            raise pickle.UnpicklingError("it claims to have more than its bytes")
        yield io.BytesIO(content)


class GDSStorageReader(FileSystemReader):
    """Reads DCP checkpoints straight into the tensors that the load plan names.

        reader = gdsdata.GDSStorageReader("step-100")
        torch.distributed.checkpoint.load(state, storage_reader=reader)

    Only the part of a stored tensor that the plan wants is read, unless ``verify`` is set: its
    rows, with gaps of less than a page between them. Values that lie in the file as in memory are
    read in place. Others pass through memory of their own: at most 1 GiB (or one tensor) at a time.
    If only torch can read a value (extensions, quantized tensors), `FileSystemReader` reads it, and
    a warning says so. No file stays open between two loads.

    Tensors are read side by side: a planner's ``resolve_tensor`` is called for many items before
    its ``commit_tensor`` is called for the first of them, with the tensor of that item.

    With ``planner=gdsdata.GDSLoadPlanner(read_once=True)``, ranks read once what several of them
    want.

    Args:
        path: of the folder, or its URL.
        verify: compare the CRC-32 of every stored tensor and other value that is read. If the plan
            wants parts of a stored tensor, all of it is read once, as `gdsdata.load` does. A file
            without checksums is loaded with a warning.
        options: of the engine; None: the defaults.

    A load raises these on every rank, within DCP's `CheckpointException`:
        FileNotFoundError, PermissionError, IoError: a file cannot be opened or read.
        CorruptData: ``.metadata`` has not all parts of a tensor, a file is shorter than it says, an
            archive is damaged, or a checksum differs.
        ValueError: a tensor to fill has another shape than the plan says.
        RankLost: with ``read_once``, another rank has ended or is silent. A warning says it at
            once: torch raises an error of its own if the rank does not come back.

    Stream semantics: the bytes are in place when `read_data` returns, for every stream.
    """

    _sent_plan: LoadPlan | None = None
    _error_of_all: Exception | None = None  # why the metadata of all ranks could not be read

    def __init__(
        self, path: str | os.PathLike[str], *, verify: bool = False, options: EngineOptions | None = None
    ) -> None:
        path = folder_name("path", path, ", or a URL")
        super().__init__(path)
        self.fs, self.path = place_of(path)
        self.verify = verify
        self.options = options_of(options)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self.fs, self.path = place_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_url(str(checkpoint_id)) or super().validate_checkpoint_id(checkpoint_id)

    @collector_paused()
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file_system, checked = self.fs, _CheckedPickles(self.fs)
        self.fs = checked  # type: ignore[assignment]
        try:
            with self._errors_of_metadata(kwargs.get("rank")):
                metadata = super().read_metadata(*args, **kwargs)
                if not isinstance(getattr(metadata, "state_dict_metadata", None), dict):
                    raise pickle.UnpicklingError("it describes no state")
                if not checked.has_checksum:
                    check_form(metadata)
                return metadata
        except (GdsdataError, OSError, ImportError, AttributeError) as error:
            if kwargs.get("rank") is None:
                self._error_of_all = without_traceback(error)
            elif isinstance(error, FileNotFoundError) and self._error_of_all is not None:
                # torch looks for metadata of this rank alone, which few checkpoints have. The first
                # error says what is wrong.
                raise self._error_of_all from error
            raise
        finally:
            self.fs = file_system

    def _metadata_path(self, rank: int | None) -> str:
        return os.path.join(self.path, ".metadata" if rank is None else f"__{rank}.metadata")

    @contextlib.contextmanager
    def _errors_of_metadata(self, rank: int | None) -> Iterator[None]:
        path = self._metadata_path(rank)
        try:
            with torch_errors_explained(path, f"'{path}'", 0, weights_only=False):
                yield
        except FileNotFoundError as error:
            message = f"there is no file '{path}', so no checkpoint in that folder: its save did not complete, or"
            raise missing(path, f"{message} the path is another one") from error
        except (GdsdataError, OSError, MemoryError, ImportError, AttributeError):
            raise
        except Exception as error:  # damaged pickles raise many kinds
            said = str(error).removeprefix(f"'{path}': ")
            raise CorruptData(f"'{path}' cannot be unpickled: {said}. {INCOMPLETE}", path) from error

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, *args, **kwargs)
        self._tensors_of_metadata = metadata.state_dict_metadata
        self._metadata_file = self._metadata_path(None if self.use_collectives else self.rank)

    @collector_paused()
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        self._sent_plan = packed_plan(plan)
        return self._sent_plan

    @collector_paused()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything that a plan wants; it is in place when this returns."""
        plan = self._own_plan(plan)
        with bar(f"loading {last_part(os.fspath(self.path))}"):
            if (group := getattr(planner, "read_once", False)) is False:
                self._read(plan, planner, None)
            else:
                from gdsdata.collective.transfers import reads_together

                group, call = "auto" if group is True else group, {"call": "dcp.load", "verify": self.verify}
                once = getattr(planner, "once", None)
                try:
                    with reads_together(group, once, call, self.options.stall_timeout_s) as together:
                        self._read(plan, planner, together)
                except RankLost as error:  # torch exchanges it, and the lost rank takes no part in that
                    engine.warn_once(f"{error}. torch now waits for that rank, for the timeout of the process group")
                    raise
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _own_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan that was sent, whose items are there, if it came back unchanged."""
        sent, self._sent_plan = self._sent_plan, None
        return sent if sent is not None and isinstance(plan, PackedPlan) and plan.is_unchanged(sent) else plan

    def _read(self, plan: LoadPlan, planner: LoadPlanner, together: SharedReads | None) -> None:
        check_covered(plan, planner, self._tensors_of_metadata, self._metadata_file)
        check_placed(plan, self.storage_data, self._metadata_file)
        reader = TensorReader(self.options, self.verify, together)
        reader.expect(self._bytes_of(plan), first_device(getattr(planner, "state_dict", None)))
        files = DataFiles(self.path)
        left_to_torch = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                info = self.storage_data[item.storage_index]
                if info.transform_descriptors:
                    left_to_torch.append(item)
                else:
                    self._read_bytes(item, info, files[info.relative_path], planner, reader)
        for item, stored in self._tensors(plan, files):
            if stored is None:
                left_to_torch.append(item)
                continue
            if item.lengths != stored.shape:
                check_shape(item, stored, self._tensors_of_metadata, self._metadata_file)
            _read_tensor(item, stored, planner, reader)
            reader.run_if_full()
        reader.run()
        if left_to_torch:
            names = ", ".join(item.storage_index.fqn for item in left_to_torch[:5])
            for item in left_to_torch if self.verify else ():
                info = self.storage_data[item.storage_index]
                file = files[info.relative_path]
                _check_records(file.read(info.offset, info.length), file, _place_of(item, info, file))
            place = f"one of {len(left_to_torch)} values in '{self.path}' that torch reads ({names})"
            with torch_errors_explained(str(self.path), place, 0, weights_only=None):
                super().read_data(LoadPlan(left_to_torch, plan.storage_data, plan.planner_data), planner)

    def _bytes_of(self, plan: LoadPlan) -> int:
        """Return about how many bytes a plan reads, as far as its first items show."""
        items = itertools.islice(plan.items, _LOOKED_AT_ITEMS)
        size_bytes = sum(self.storage_data[item.storage_index].length for item in items)
        return size_bytes * len(plan.items) // max(1, min(len(plan.items), _LOOKED_AT_ITEMS))

    def _tensors(self, plan: LoadPlan, files: DataFiles) -> Iterator[tuple[ReadItem, Stored | None]]:
        """Yield where each tensor of a plan lies; None if only torch can find out.

        Tensors with a noted place come first: they are read while the archives of the others are
        opened.
        """
        others = []
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                info = self.storage_data[item.storage_index]
                noted = None if info.transform_descriptors else noted_place(info, files[info.relative_path])
                if noted is None:
                    others.append(item)
                else:
                    yield item, noted
        if others:
            # Not imported for what gdsdata saved, whose places are noted: that takes 4 ms.
            from gdsdata.checkpoint.dcp.archived_tensors import ArchivedTensors

            archived = ArchivedTensors(
                str(self.path), self.storage_data, files, [item.storage_index for item in others]
            )
            for item in others:
                yield item, archived.stored(item.storage_index)

    def _read_bytes(
        self, item: ReadItem, info: Any, file: OpenFile, planner: LoadPlanner, reader: TensorReader
    ) -> None:
        check_size(item.storage_index, info, file)
        content = torch.empty(info.length, dtype=torch.uint8)
        record = Record(file, info.offset, info.length, is_compared_by_caller=True)  # by `load`
        reader.bytes_into(content, record, 0, (item.storage_index.fqn,))

        def load() -> None:
            place = _place_of(item, info, file)
            if self.verify:
                _check_records(content.numpy().data, file, place)
            with torch_errors_explained(file.path, place, info.length, offset=info.offset, weights_only=False):
                planner.load_bytes(item, io.BytesIO(content.numpy().data))

        reader.afterwards(load)


def _place_of(item: ReadItem, info: Any, file: OpenFile) -> str:
    return f"{item.storage_index.fqn} in '{file.path}', {info.length} bytes from offset {info.offset} on,"


def _check_records(content: bytes | memoryview, file: OpenFile, place: str) -> None:
    from gdsdata.checkpoint.torch_zip.archive import check_records  # late: as `archived_tensors`

    check_records(io.BytesIO(content), file.path, place)


def _read_tensor(item: ReadItem, stored: Stored, planner: LoadPlanner, reader: TensorReader) -> None:
    target = planner.resolve_tensor(item).detach()
    box = stored.box(item.storage_offsets, item.lengths)
    name = item.storage_index.fqn
    if target.shape != item.lengths:
        raise ValueError(f"{name}: a part of {tuple(item.lengths)} was to fill a tensor of {tuple(target.shape)}")
    if is_freed(target):
        raise ValueError(freed(name, "fill"))
    reader.tensor_into(target, box, (name,))
    reader.afterwards(functools.partial(planner.commit_tensor, item, target))

"""torch.distributed.checkpoint on gdsdata's engine: `GDSStorageWriter` and `GDSStorageReader`.

The files are DCP's own: ``.metadata``, a pickle, and data files in which each tensor is an archive of torch's. What
is written here, torch's `FileSystemReader` reads, and the other way round. Source: torch.distributed.checkpoint.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import io
import math
import os
import pickle
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gdsdata.checkpoint import safetensors_file
from gdsdata.checkpoint.explanations import torch_errors_explained
from gdsdata.checkpoint.open_file import OpenFile, missing, most_kept_files
from gdsdata.checkpoint.pause import collector_paused
from gdsdata.checkpoint.reading import Reading, Record, Stored, bytes_of
from gdsdata.checkpoint.tensor_kinds import has_own_memory
from gdsdata.checkpoint.torch_zip.archive import is_zip
from gdsdata.checkpoint.torch_zip.archive_reader import open_tensor
from gdsdata.checkpoint.torch_zip.archive_writer import Layout, write_archives
from gdsdata.checkpoint.torch_zip.file_slice import FileSlice
from gdsdata.checkpoint.torch_zip.pickling import pickle_tensor
from gdsdata.checkpoint.torch_zip.unpickling import NotPlain
from gdsdata.checkpoint.writing import Extent, Writing, get_ready, reached, sync_folder
from gdsdata.errors import CorruptData
from gdsdata.formats.parsers import safetensors_header
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions
from gdsdata.torch_private import dcp_storage_info

StorageInfo = dcp_storage_info()

# ------------------------------------------------------------------------------------------------ writing


class GDSStorageWriter(FileSystemWriter):
    """Writes DCP checkpoints: one file a rank, laid out first and then written by the engine in one go.

        torch.distributed.checkpoint.save(state, storage_writer=gdsdata.GDSStorageWriter("step-100"))
        future = torch.distributed.checkpoint.async_save(state, storage_writer=gdsdata.GDSStorageWriter("step-100"))

    Each file is on storage, whole and under its name, before its rank says that it has written; ``.metadata`` comes
    last, by one rename. So a folder has the old checkpoint or the new one, at any moment: a new one's files never have
    the names of files that ``.metadata`` knows, for where there is one they get a random number in theirs. What
    belongs to the old checkpoint, and what saves that failed have left, goes when the new ``.metadata`` is on storage:
    so only one save at a time into one folder. Without ``.metadata`` there is no checkpoint, and nothing loads.

    An error of any rank is raised on every rank, by DCP (`CheckpointException`), and then no ``.metadata`` is written.

    Tensors are written from where they are, on a GPU behind what the current stream has been given before; the CRC-32
    of each is in its archive. Those with gaps between their elements are copied first.

    Args:
        path: of the folder, made where it is missing.
        overwrite: False: an existing checkpoint in the folder is an error.
        cache_staged_state_dict: for `async_save`, as in `FileSystemWriter`.
        options: of the engine.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        cache_staged_state_dict: bool = False,
        options: EngineOptions | None = None,
    ) -> None:
        super().__init__(path, overwrite=overwrite, cache_staged_state_dict=cache_staged_state_dict)
        self.options = options or EngineOptions()

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(*args, **kwargs)
        get_ready(self.options)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        folder = Path(self.path)
        made = [one for one in (folder, *folder.parents) if not one.exists()]
        plan = super().prepare_local_plan(plan)
        for one in made:
            sync_folder(str(one.parent))
        return plan

    @collector_paused()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}{self._number()}.distcp"
        archives: list[tuple[Layout, list[torch.Tensor]]] = []
        plain: list[tuple[StorageInfo, torch.Tensor]] = []  # what is in them
        others: list[Extent] = []
        results = []
        begin = end = 0
        for item in plan.items:
            data = planner.resolve_data(item)
            info = StorageInfo(name, begin, 0)
            if item.type != WriteItemType.BYTE_IO and _is_plain(data):
                tensor = _without_gaps(data.detach())
                pickled = pickle_tensor(tensor.dtype, tuple(tensor.shape), tensor.stride())
                layout = Layout(pickled, [tensor.nbytes], begin)
                archives.append((layout, [reached(bytes_of(tensor))]))
                plain.append((info, tensor))
                end = layout.end
            else:
                content = data if item.type == WriteItemType.BYTE_IO else _saved_by_torch(item.index.fqn, data)
                end = begin + content.getbuffer().nbytes
                if end > begin:
                    others.append((begin, torch.frombuffer(content.getbuffer(), dtype=torch.uint8)))
            info.length = end - begin
            results.append(WriteResult(index=item.index, size_in_bytes=info.length, storage_data=info))
            begin = end
        if results:
            path = os.path.join(self.path, name)
            checksums = write_archives(path, archives, others, self.options)
            for (info, tensor), (layout, _), (crc32,) in zip(plain, archives, checksums, strict=True):
                _note_place(info, layout.offsets[0], crc32, tensor, end)
        return _done(results)

    @collector_paused()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {one.index: one.storage_data for of_rank in results for one in of_rank}
        metadata.storage_meta = self.storage_meta()
        content = pickle.dumps(metadata)
        with Writing(os.path.join(self.path, self._metadata_name), len(content), self.options) as writing:
            writing.write_bytes([(0, content)])
            writing.commit()
        self._remove_all_but({info.relative_path for info in metadata.storage_data.values()})

    def _number(self) -> str:
        """What tells this save's files from those of the checkpoint that is there."""
        names = {".metadata", self._metadata_name}
        there = any(os.path.exists(os.path.join(self.path, name)) for name in names)
        return uuid.uuid4().hex if there else "0"

    @property
    def _is_of_one_rank(self) -> bool:
        """Each rank has metadata of its own: a save without collectives."""
        return self.rank is not None and not self.use_collectives

    @property
    def _metadata_name(self) -> str:
        return f"__{self.rank}.metadata" if self._is_of_one_rank else ".metadata"

    def _remove_all_but(self, kept: set[str]) -> None:
        if self._is_of_one_rank and os.path.exists(os.path.join(self.path, ".metadata")):
            return  # which may know files of this rank
        of_data = f"__{self.rank if self._is_of_one_rank else '*'}_*.distcp"
        for name in os.listdir(self.path):
            patterns = (of_data, f"{of_data}.*.tmp", f"{self._metadata_name}.*.tmp")
            if name not in kept and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                with contextlib.suppress(OSError):  # the checkpoint is there; the next save tries again
                    os.unlink(os.path.join(self.path, name))


def _is_plain(data: torch.Tensor) -> bool:
    return type(data) in (torch.Tensor, torch.nn.Parameter) and has_own_memory(data)


def _without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """In its own order of dimensions where nothing lies between its elements, else a contiguous copy."""
    tensor = tensor.resolve_conj().resolve_neg()
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and step != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def _saved_by_torch(name: str, data: torch.Tensor) -> io.BytesIO:
    """Of kinds that torch alone knows.

    Raises:
        NotImplementedError: no reader of DCP's, torch's own included, gives it back.
    """
    if data.is_meta or data.layout is not torch.strided:
        raise NotImplementedError(
            f"{name} is a tensor of {data.layout} on {data.device}, which torch.distributed.checkpoint cannot load: "
            "save its parts as tensors of their own, or the state by torch.save"
        )
    content = io.BytesIO()
    torch.save(data.detach().cpu(), content)
    return content


_PLACE = "gdsdata_place"  # an attribute more of what ``.metadata`` has of a tensor, which others do not look at


def _note_place(info: StorageInfo, offset: int, crc32: int, tensor: torch.Tensor, file_bytes: int) -> None:
    """Of a tensor's bytes in a file of that size, so that its archive is not to be taken apart for them."""
    place = (offset - info.offset, crc32, tensor.dtype, tuple(tensor.shape), tensor.stride(), file_bytes)
    setattr(info, _PLACE, place)


def _noted_place(info: StorageInfo, file: OpenFile) -> Stored | None:
    """None where it is not noted, or lies, or is of another file than the one that is there now."""
    try:
        begin, crc32, dtype, shape, stride, file_bytes = getattr(info, _PLACE)
        size_bytes = math.prod(shape) * dtype.itemsize
        record = Record(file, info.offset + begin, size_bytes, crc32)
        stored = Stored(record, 0, dtype, shape, stride)
        lies_within = 0 <= begin <= begin + size_bytes <= info.length and stored.span_bytes == size_bytes
    except (AttributeError, TypeError, ValueError):
        return None
    return stored if lies_within and file_bytes == file.size_bytes else None


def _done(value):  # type: ignore[no-untyped-def]
    future: Future = Future()
    future.set_result(value)
    return future


# ------------------------------------------------------------------------------------------------ reading

_INCOMPLETE = "The checkpoint is incomplete: copy all of its folder, or load another one"
# Tensors that are not read in place go by way of so much memory at a time (and one of them).
_OWN_BYTES = 1 << 30


class _Files:
    """The files of a folder, by name: each is opened when it is first asked for."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = folder
        self._opened: dict[str, OpenFile] = {}

    def __getitem__(self, name: str) -> OpenFile:
        if name not in self._opened:
            path = os.path.join(self._folder, name)
            try:
                self._opened[name] = OpenFile(path, keep=len(self._opened) < most_kept_files())
            except FileNotFoundError as error:
                raise missing(path, f"there is no file '{path}', which '.metadata' names. {_INCOMPLETE}") from error
        return self._opened[name]


class GDSStorageReader(FileSystemReader):
    """Reads DCP checkpoints by byte ranges, straight into the tensors that the load plan names.

        torch.distributed.checkpoint.load(state, storage_reader=gdsdata.GDSStorageReader("step-100"))

    Of a stored tensor only the part that the plan wants is read: its rows, and what lies between them where that is
    less than a page. What lies in the file as in memory is read in place; the rest goes by way of memory of its own, at
    most 1 GiB (or one tensor) at a time. What only torch can read (extensions, quantized tensors) is left to
    `FileSystemReader`, with a warning.

    Args:
        path: of the folder.
        verify: compare the CRC-32 of each tensor that is read as a whole.
        options: of the engine.

    Raises on load, on every rank (within DCP's `CheckpointException`):
        FileNotFoundError, IoError: a file is not to be had.
        CorruptData: a file is shorter than ``.metadata`` says, an archive is damaged, or a checksum differs.
        ValueError: a tensor to fill has another shape than the plan says.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, verify: bool = False, options: EngineOptions | None = None
    ) -> None:
        super().__init__(path)
        self.verify = verify
        self.options = options or EngineOptions()

    @collector_paused()
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self._errors_of_metadata(kwargs.get("rank")):
            return super().read_metadata(*args, **kwargs)

    @contextlib.contextmanager
    def _errors_of_metadata(self, rank: int | None) -> Iterator[None]:
        path = os.path.join(self.path, ".metadata" if rank is None else f"__{rank}.metadata")
        try:
            with torch_errors_explained(path, f"'{path}'", 0, weights_only=False):
                yield
        except FileNotFoundError as error:
            message = f"there is no file '{path}', so no checkpoint in that folder: its save did not complete, or"
            raise missing(path, f"{message} the path is another one") from error
        except (pickle.UnpicklingError, ValueError, KeyError, IndexError, TypeError) as error:  # what damage makes
            raise CorruptData(f"'{path}' cannot be unpickled: {error}. {_INCOMPLETE}", path) from error

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._headers: dict[tuple[str, int], dict[str, Stored]] = {}  # of safetensors files

    @collector_paused()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        reading = Reading(self.options, self.verify)
        files = _Files(self.path)
        left_to_torch = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                info = self.storage_data[item.storage_index]
                if info.transform_descriptors:
                    left_to_torch.append(item)
                else:
                    self._read_bytes(item, info, files[info.relative_path], planner, reading)
        for item, stored in self._tensors(plan, files):
            if stored is None:
                left_to_torch.append(item)
                continue
            _read_tensor(item, stored, planner, reading)
            if reading.own_bytes >= _OWN_BYTES:
                reading.run()
                reading = Reading(self.options, self.verify)
        reading.run()
        self._headers.clear()  # whose records keep files open
        if left_to_torch:
            names = ", ".join(item.storage_index.fqn for item in left_to_torch[:5])
            place = f"one of {len(left_to_torch)} values in '{self.path}' that torch reads ({names})"
            with torch_errors_explained(str(self.path), place, 0, weights_only=None):
                super().read_data(LoadPlan(left_to_torch, plan.storage_data, plan.planner_data), planner)
        return _done(None)

    def _tensors(self, plan: LoadPlan, files: _Files) -> Iterator[tuple[ReadItem, Stored | None]]:
        """Where each lies; None: torch has to find out. Those of which it is noted come first, and are read while
        the archives of the others are opened."""
        others = []
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                info = self.storage_data[item.storage_index]
                noted = None if info.transform_descriptors else _noted_place(info, files[info.relative_path])
                if noted is None:
                    others.append(item)
                else:
                    yield item, noted
        archives = self._archives(dict.fromkeys(item.storage_index for item in others), files)
        stored: dict[MetadataIndex, Stored | None] = {}
        for item in others:
            index = item.storage_index
            if index not in stored:
                stored[index] = self._stored_tensor(index, archives[index])
            yield item, stored[index]

    def _archives(self, indices: Iterable[MetadataIndex], files: _Files) -> dict[MetadataIndex, FileSlice]:
        archives = {}
        for index in indices:
            info = self.storage_data[index]
            file = files[info.relative_path]
            _check_size(index, info, file)
            archives[index] = FileSlice(file, info.offset, info.length)
        FileSlice.read_ends(archives.values())
        return archives

    def _read_bytes(
        self, item: ReadItem, info: StorageInfo, file: OpenFile, planner: LoadPlanner, reading: Reading
    ) -> None:
        _check_size(item.storage_index, info, file)
        content = torch.empty(info.length, dtype=torch.uint8)
        reading.bytes_into(content, Record(file, info.offset, info.length), 0, item.storage_index.fqn)

        def load() -> None:
            place = f"{item.storage_index.fqn} in '{file.path}', {info.length} bytes from offset {info.offset} on,"
            with torch_errors_explained(file.path, place, info.length, offset=info.offset, weights_only=False):
                planner.load_bytes(item, io.BytesIO(content.numpy()))

        reading.afterwards(load)

    def _stored_tensor(self, index: MetadataIndex, archive: FileSlice) -> Stored | None:
        if self.storage_data[index].transform_descriptors:
            return None
        try:
            if is_zip(archive.at(0, 4)) or not _is_in_safetensors(archive):
                return open_tensor(archive)
            return self._in_safetensors(index, archive.file)
        except NotPlain as why:
            engine.warn_once(f"some tensors in '{self.path}' are read by torch.load: {why}")
            return None

    def _in_safetensors(self, index: MetadataIndex, file: OpenFile) -> Stored:
        """Those that `FileSystemWriter` wrote in this format all have the beginning of their file for a place."""
        info = self.storage_data[index]
        path, here = file.path, (info.relative_path, info.offset)
        if here not in self._headers:
            self._headers[here] = safetensors_file.read_header(file, info.offset)
            there = Counter(at.fqn for at, one in self.storage_data.items() if (one.relative_path, one.offset) == here)
            lost = [fqn for fqn, count in there.items() if count > 1 and fqn in self._headers[here]]
            if lost:
                raise ValueError(
                    f"'{path}', a safetensors file, has one part of each tensor, and '.metadata' more than one of "
                    f"{lost[0]}: they were lost when it was saved; save without SerializationFormat.SAFETENSORS"
                )
        if index.fqn not in self._headers[here]:
            raise CorruptData(f"'{path}' has no tensor {index.fqn!r}, which '.metadata' says it has", path, info.offset)
        return self._headers[here][index.fqn]


def _is_in_safetensors(archive: FileSlice) -> bool:
    """Whether it is a safetensors file, whose length ``.metadata`` does not say."""
    return safetensors_header.recognises(archive.file.read(archive.begin, 9))


def _check_size(index: MetadataIndex, info: StorageInfo, file: OpenFile) -> None:
    if info.offset + info.length > file.size_bytes:
        raise CorruptData(
            f"'{file.path}' has {file.size_bytes} bytes, but '.metadata' has {index.fqn} there from {info.offset} on, "
            f"of {info.length} bytes: the file was cut, or is of another checkpoint. {_INCOMPLETE}",
            file.path,
            info.offset,
            info.length,
        )


def _read_tensor(item: ReadItem, stored: Stored, planner: LoadPlanner, reading: Reading) -> None:
    target = planner.resolve_tensor(item).detach()
    box = stored.box(item.storage_offsets, item.lengths)
    name = item.storage_index.fqn
    if target.shape != item.lengths:
        raise ValueError(f"{name}: a part of {tuple(item.lengths)} was to fill a tensor of {tuple(target.shape)}")
    reading.tensor_into(target, box, name)
    reading.afterwards(functools.partial(planner.commit_tensor, item, target))

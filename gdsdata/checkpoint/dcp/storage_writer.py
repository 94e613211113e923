"""`GDSStorageWriter`: torch.distributed.checkpoint writes by gdsdata's engine.

The files are DCP's own: ``.metadata``, a pickle, and data files in which each tensor is an archive
of `torch.save`. torch's `FileSystemReader` reads them. Source: torch.distributed.checkpoint.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import pickle
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gdsdata.checkpoint.dcp.metadata_checksum import with_checksum
from gdsdata.checkpoint.dcp.noted_place import note_place
from gdsdata.checkpoint.dcp.object_file_system import names_in, place_of, remove
from gdsdata.checkpoint.file_writer import Extent, prepare_engine
from gdsdata.checkpoint.gc_pause import collector_paused
from gdsdata.checkpoint.synced_folders import sync_folder
from gdsdata.checkpoint.tensor_kinds import freed, has_own_memory, is_freed
from gdsdata.checkpoint.torch_zip.tensor_archives import TensorArchive, archive_of, write_archives
from gdsdata.checkpoint.urls import folder_name, is_url, last_part
from gdsdata.checkpoint.writers import writer_of
from gdsdata.io.options import EngineOptions, options_of
from gdsdata.progress_bars import Bar, bar
from gdsdata.torch_private import dcp_storage_info

StorageInfo = dcp_storage_info()


class GDSStorageWriter(FileSystemWriter):
    """Writes DCP checkpoints: one file a rank.

    The file is laid out first, and then written in few calls of the engine.

        writer = gdsdata.GDSStorageWriter("step-100")
        torch.distributed.checkpoint.save(state, storage_writer=writer)  # or async_save

    Each rank's file is complete and on storage before the rank reports that it has written.
    ``.metadata`` comes last, by one rename. So the folder has the old checkpoint or the new one at
    any moment. Without ``.metadata`` there is no checkpoint, and nothing loads.

    If the folder has a checkpoint, new files have a random number in their names, so they never
    replace a file that ``.metadata`` names. When the new ``.metadata`` is on storage, the files of
    the old checkpoint and of failed saves are removed. So only one save at a time may write into a
    folder.

    The folder may be a URL, as ``s3://bucket/run/step-100``. Each file is then an object, and every
    name has a random number: objects that an earlier attempt has left, or is still sending, replace
    none of this save. An object appears when it is complete, and ``.metadata`` comes last.

    If a rank fails, DCP raises the error on every rank (`CheckpointException`), and no
    ``.metadata`` is written.

    Tensors are written from where they lie. Those with gaps between their elements are copied when
    they are due, so few copies are in memory at a time. The archive of each has its CRC-32.

    Args:
        path: of the folder, or its URL; a folder is made if it does not exist.
        overwrite: False: an existing checkpoint in the folder is an error.
        cache_staged_state_dict: for `async_save`, as in `FileSystemWriter`.
        options: of the engine; None: the defaults.

    Stream semantics: tensors on a GPU are read after all work that the current stream of that GPU
    has when DCP calls `write_data`.
    """

    _data_files = "__*_*.distcp"  # names of the ranks' files

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        cache_staged_state_dict: bool = False,
        options: EngineOptions | None = None,
    ) -> None:
        path = folder_name("path", path, ", or a URL")
        super().__init__(path, overwrite=overwrite, cache_staged_state_dict=cache_staged_state_dict)
        self.fs, self.path = place_of(path)
        self.options = options_of(options)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self.fs, self.path = place_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_url(str(checkpoint_id)) or super().validate_checkpoint_id(checkpoint_id)

    @property
    def _is_remote(self) -> bool:
        return is_url(os.fspath(self.path))

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(*args, **kwargs)
        if not self._is_remote:
            prepare_engine(self.options)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Have torch make the folder, and sync the names of new folders."""
        if self._is_remote:
            return super().prepare_local_plan(plan)
        folder = Path(self.path)
        made = [one for one in (folder, *folder.parents) if not one.exists()]
        plan = super().prepare_local_plan(plan)
        for one in made:
            sync_folder(str(one.parent))
        return plan

    @collector_paused()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; it is on storage when this returns."""
        name = f"{plan.storage_data.prefix}{self._number()}.distcp"
        future: Future[list[WriteResult]] = Future()
        with self._bar():
            future.set_result(self.write_items(name, ((item, planner.resolve_data(item)) for item in plan.items)))
        return future

    def _bar(self) -> contextlib.AbstractContextManager[Bar | None]:
        """Return a progress bar; none in a thread of `async_save`, which nobody waits for."""
        if threading.current_thread() is not threading.main_thread():
            return contextlib.nullcontext()
        return bar(f"saving {last_part(os.fspath(self.path))}")

    def write_items(self, name: str, items: Iterable[tuple[WriteItem, Any]]) -> list[WriteResult]:
        """Write a file of items, if there are any; it is on storage when this returns.

        Args:
            name: of the file in the folder.
            items: of a plan, and their data: tensors, or `io.BytesIO` objects.

        Raises:
            IoError: the file cannot be written, or the disk is full.
        """
        archives: list[TensorArchive] = []
        infos = []  # the storage info of each archive
        others: list[Extent] = []
        results = []
        begin = end = 0
        for item, data in items:
            info = StorageInfo(name, begin, 0)
            if isinstance(data, torch.Tensor) and _is_plain(data):
                archives.append(archive_of(data.detach(), begin))
                infos.append(info)
                end = archives[-1].end
            else:
                content = _saved_by_torch(item.index.fqn, data) if isinstance(data, torch.Tensor) else data
                end = begin + content.getbuffer().nbytes
                if end > begin:
                    others.append((begin, torch.frombuffer(content.getbuffer(), dtype=torch.uint8)))
            info.length = end - begin
            results.append(WriteResult(index=item.index, size_in_bytes=info.length, storage_data=info))
            begin = end
        if results:
            path = os.path.join(self.path, name)
            checksums = write_archives(path, archives, others, self.options)
            for info, archive, crc32 in zip(infos, archives, checksums, strict=True):
                note_place(info, archive.offset, crc32, archive.tensor, archive.stride, end)
        return results

    @collector_paused()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint by writing its metadata, and remove what it replaces."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {one.index: one.storage_data for of_rank in results for one in of_rank}
        metadata.storage_meta = self.storage_meta()
        content = with_checksum(pickle.dumps(metadata))
        with writer_of(os.path.join(self.path, self._metadata_name), len(content), self.options) as writer:
            writer.write_bytes([(0, content)])
            writer.commit()
        self._remove_all_but({info.relative_path for info in metadata.storage_data.values()})

    def _number(self) -> str:
        """Return the part of file names that distinguishes this save.

        No file of an existing checkpoint has it.
        """
        if self._is_remote:
            return uuid.uuid4().hex
        names = {".metadata", self._metadata_name}
        there = any(os.path.exists(os.path.join(self.path, name)) for name in names)
        return uuid.uuid4().hex if there else "0"

    @property
    def _is_of_one_rank(self) -> bool:
        """Whether each rank has metadata of its own, as in a save without collectives."""
        return self.rank is not None and not self.use_collectives

    @property
    def _metadata_name(self) -> str:
        return f"__{self.rank}.metadata" if self._is_of_one_rank else ".metadata"

    def _remove_all_but(self, kept: set[str]) -> None:
        if self._is_of_one_rank and self.fs.exists(os.path.join(self.path, ".metadata")):
            return  # it may name files of this rank
        of_data = f"__{self.rank}_*.distcp" if self._is_of_one_rank else self._data_files
        patterns = (of_data, f"{of_data}.*.tmp", f"{self._metadata_name}.*.tmp")
        with contextlib.suppress(OSError):  # the checkpoint is complete all the same; the next save tries again
            for name in names_in(self.path):
                if name not in kept and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                    with contextlib.suppress(OSError):
                        remove(self.path, name)


def _is_plain(data: torch.Tensor) -> bool:
    """Return whether the engine can write a tensor from its own memory."""
    return type(data) in (torch.Tensor, torch.nn.Parameter) and has_own_memory(data) and not is_freed(data)


def _saved_by_torch(name: str, data: torch.Tensor) -> io.BytesIO:
    """Return what torch.save writes for a tensor of a kind that only torch knows.

    Raises:
        NotImplementedError: no reader of DCP, torch's own included, can load it.
        ValueError: its memory was freed.
    """
    if is_freed(data):
        raise ValueError(freed(name, "save"))
    if data.is_meta or data.layout is not torch.strided:
        raise NotImplementedError(
            f"{name} is a tensor of {data.layout} on {data.device}, which torch.distributed.checkpoint cannot load: "
            "save its parts as tensors of their own, or the state by torch.save"
        )
    content = io.BytesIO()
    torch.save(data.detach().cpu(), content)
    return content

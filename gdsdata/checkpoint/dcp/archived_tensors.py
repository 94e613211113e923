"""Tensors of a DCP checkpoint whose archives must be opened: torch's own, or safetensors files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex

from gdsdata.checkpoint import safetensors_file
from gdsdata.checkpoint.dcp.data_files import DataFiles, check_size
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.stored import Stored
from gdsdata.checkpoint.torch_zip.alike_archives import AlikeArchives
from gdsdata.checkpoint.torch_zip.archive import is_zip
from gdsdata.checkpoint.torch_zip.file_slice import FileSlice
from gdsdata.checkpoint.torch_zip.unpickling import NotPlain
from gdsdata.errors import CorruptData
from gdsdata.formats.parsers import safetensors_header
from gdsdata.io import engine


class ArchivedTensors:
    """Finds out where tensors lie in their archives.

    Args:
        folder: of the checkpoint, for messages.
        storage_data: what ``.metadata`` says of each tensor's archive.
        files: the checkpoint's files.
        indices: of the tensors. The ends of all their archives are read at once.
    """

    def __init__(
        self,
        folder: str,
        storage_data: Mapping[MetadataIndex, Any],
        files: DataFiles,
        indices: Iterable[MetadataIndex],
    ) -> None:
        self._folder, self._storage_data = folder, storage_data
        self._found: dict[MetadataIndex, Stored | None] = {}
        self._headers: dict[tuple[str, int], dict[str, Stored]] = {}  # of safetensors files, by name and offset
        self._archives: dict[MetadataIndex, FileSlice] = {}
        self._alike = AlikeArchives()
        for index in dict.fromkeys(indices):
            info = storage_data[index]
            file = files[info.relative_path]
            check_size(index, info, file)
            self._archives[index] = FileSlice(file, info.offset, info.length)
        FileSlice.read_ends(self._archives.values())

    def stored(self, index: MetadataIndex) -> Stored | None:
        """Return where a tensor lies; None if only torch can find out."""
        if index not in self._found:
            self._found[index] = self._stored_in(index, self._archives[index])
        return self._found[index]

    def _stored_in(self, index: MetadataIndex, archive: FileSlice) -> Stored | None:
        if self._storage_data[index].transform_descriptors:
            return None
        try:
            if is_zip(archive.at(0, 4)) or not _is_in_safetensors(archive):
                return self._alike.open(archive)
            return self._in_safetensors(index, archive.file)
        except NotPlain as why:
            engine.warn_once(f"some tensors in '{self._folder}' are read by torch.load: {why}")
            return None

    def _in_safetensors(self, index: MetadataIndex, file: OpenFile) -> Stored:
        """Return a tensor of a safetensors file that `FileSystemWriter` wrote.

        ``.metadata`` gives all tensors of such a file the same place: the file's beginning.
        """
        info = self._storage_data[index]
        path, here = file.path, (info.relative_path, info.offset)
        if here not in self._headers:
            self._headers[here] = safetensors_file.read_header(file, info.offset)
            there = Counter(at.fqn for at, one in self._storage_data.items() if (one.relative_path, one.offset) == here)
            lost = [fqn for fqn, count in there.items() if count > 1 and fqn in self._headers[here]]
            if lost:
                raise ValueError(
                    f"'{path}', a safetensors file, has one part of each tensor, and '.metadata' more than one of "
                    f"{lost[0]}: the others were lost in the save. Save without SerializationFormat.SAFETENSORS"
                )
        if index.fqn not in self._headers[here]:
            raise CorruptData(f"'{path}' has no tensor {index.fqn!r}, which '.metadata' says it has", path, info.offset)
        return self._headers[here][index.fqn]


def _is_in_safetensors(archive: FileSlice) -> bool:
    """Return whether the slice begins a safetensors file.

    ``.metadata`` does not have the length of such a file.
    """
    return safetensors_header.recognises(archive.file.read(archive.begin, 9))

"""The data files of a DCP checkpoint, as a load opens them."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex

from gdsdata.checkpoint.open_file import OpenFile, missing, most_kept_files
from gdsdata.checkpoint.open_object import open_path
from gdsdata.errors import CorruptData

INCOMPLETE = "The checkpoint is incomplete: copy all of its folder, or load another one"


class DataFiles:
    """The files of a folder by name. Each is opened when it is first needed."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = folder
        self._opened: dict[str, OpenFile] = {}

    def __getitem__(self, name: str) -> OpenFile:
        if name not in self._opened:
            path = os.path.join(self._folder, name)
            try:
                self._opened[name] = open_path(path, keep=len(self._opened) < most_kept_files())
            except FileNotFoundError as error:
                message = f"there is no file '{path}', which '.metadata' names"
                again = "If a save has replaced it meanwhile, load it again"
                raise missing(path, f"{message}. {INCOMPLETE}. {again}") from error
        return self._opened[name]


def check_size(index: MetadataIndex, info: Any, file: OpenFile) -> None:
    """Check that a file is long enough for what its storage info says.

    Raises:
        CorruptData: it is not.
    """
    if info.offset + info.length > file.size_bytes:
        raise CorruptData(
            f"'{file.path}' has {file.size_bytes} bytes, but '.metadata' has {index.fqn} there from {info.offset} on, "
            f"of {info.length} bytes: the file was cut, or is of another checkpoint. {INCOMPLETE}",
            file.path,
            info.offset,
            info.length,
        )

"""A folder of objects, as torch.distributed.checkpoint sees file systems.

Source: torch.distributed.checkpoint.filesystem.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any, NoReturn, cast

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase

from gdsdata.checkpoint.open_object import open_path
from gdsdata.checkpoint.urls import is_url, joined, plain_path, store_and_key

Path = str | os.PathLike[str]


def place_of(path: Path) -> tuple[Any, Path]:
    """Return the file system of a folder's path or URL, and the folder as that wants it."""
    path = plain_path(os.fspath(path))
    file_system: FileSystemBase = ObjectFileSystem() if is_url(path) else FileSystem()
    return file_system, file_system.init_path(path)


def names_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder, or of the objects in the folder at a URL."""
    if not is_url(os.fspath(folder)):
        return os.listdir(folder)
    store, key = store_and_key(joined(os.fspath(folder), ""))
    names = [_key_of(one.url).removeprefix(key) for one in store.list(key) if not isinstance(one, str)]
    return [name for name in names if "/" not in name]  # the others are in folders below


def remove(folder: Path, name: str) -> None:
    """Remove a file from a folder, or an object."""
    place_of(folder)[0].rm_file(os.path.join(folder, name))


def _key_of(url: str) -> str:
    return store_and_key(url)[1]


class ObjectFileSystem(FileSystemBase):
    """Objects below a URL, read by torch's methods. gdsdata writes them by itself."""

    @contextlib.contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[io.IOBase]:
        if mode != "rb":
            self._refuse(path)
        with open_path(os.fspath(path)).reader() as reader:
            yield cast(io.IOBase, reader)

    def concat_path(self, path: Path, suffix: str) -> str:
        return joined(os.fspath(path), suffix)

    def init_path(self, path: Path) -> str:
        return os.fspath(path).rstrip("/")

    def rename(self, path: Path, new_path: Path) -> NoReturn:
        self._refuse(path)

    def mkdir(self, path: Path) -> None:
        """Do nothing: a store has no folders."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return is_url(str(checkpoint_id))

    def exists(self, path: Path) -> bool:
        store, key = store_and_key(os.fspath(path))
        try:
            store.head(key)
        except FileNotFoundError:
            return False
        return True

    def rm_file(self, path: Path) -> None:
        store, key = store_and_key(os.fspath(path))
        store.delete([key])

    def _refuse(self, path: Path) -> NoReturn:
        raise NotImplementedError(f"{path}: objects are written by gdsdata.GDSStorageWriter alone")

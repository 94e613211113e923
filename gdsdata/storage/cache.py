"""The local cache of remote objects: blocks of them in a folder that all processes share."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdsdata.io import engine
from gdsdata.io.remote_access import BLOCK_BYTES, make_cache_folder
from gdsdata.storage.settings import size_bytes_of

_STATE = "cache.state"  # as csrc/base/cache_totals.cpp has it


@dataclass(frozen=True)
class CachedObject:
    """One version of an object in a cache.

    Attributes:
        name: of its files.
        url: without a query; "" if its description was lost.
        tag: the ETag, or Last-Modified.
        held_bytes: of its content.
        last_use_s: since 1970.
        is_in_use: a process has it open, so it is not evicted.
    """

    name: str
    url: str
    tag: str
    size_bytes: int
    held_bytes: int
    last_use_s: float
    is_in_use: bool


class Cache:
    """The cache in a folder. Thread-safe, and shared with all other processes that open it."""

    def __init__(self, folder: str | os.PathLike[str], most_bytes: int | str | None = None) -> None:
        """Open a cache, or make one.

        Args:
            folder: on a disk of this machine. It is created, for this user alone.
            most_bytes: the space that it may take, as a number or as "500GiB". Without it, this
                process only reads the cache, or keeps to the bound that it gave before.

        Raises:
            ValueError: the folder has other data, or its file system has no locks.
            OSError: the folder cannot be used.
        """
        most = None if most_bytes is None else size_bytes_of(most_bytes)
        path = make_cache_folder(os.fspath(folder))
        self.blocks = engine.BlockCache(path, most, BLOCK_BYTES)

    @property
    def folder(self) -> str:
        """Its absolute path."""
        return self.blocks.folder

    def statistics(self) -> dict[str, int]:
        """Return its space and bound, and what this process filled, evicted and found damaged."""
        return self.blocks.statistics()

    def objects(self) -> list[CachedObject]:
        """Return what it holds, the object that was used last first."""
        found = []
        for name, about, size_bytes, held_bytes, last_use_ns, is_in_use in self.blocks.objects():
            said = _description(about)
            url, tag = str(said.get("location", "")), str(said.get("tag", ""))
            found.append(CachedObject(name, url, tag, size_bytes, held_bytes, last_use_ns / 1e9, is_in_use))
        return sorted(found, key=lambda one: one.last_use_s, reverse=True)

    def verify(self, name: str) -> tuple[int, int]:
        """Compare an object's blocks with their checksums, and drop those that are wrong.

        Returns:
            How many are right, and how many were wrong.
        """
        return self.blocks.verify(name) or (0, 0)

    def evict(self, name: str) -> bool:
        """Remove an object. Returns false if it is in use, or not there."""
        return self.blocks.evict(name)


def is_cache(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder has a cache."""
    return (Path(folder) / _STATE).is_file()


def _description(text: bytes) -> dict[str, Any]:
    """Return an object's description. A crash of the machine may have damaged it."""
    try:
        said = json.loads(text.decode(errors="replace"))
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}

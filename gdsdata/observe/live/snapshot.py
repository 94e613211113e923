"""`Snapshots`: the numbers of this process, as JSON has them."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed
from torch.utils.data import get_worker_info

from gdsdata.errors import EngineClosed
from gdsdata.io import engine, remote_access
from gdsdata.observe import counted
from gdsdata.version import __version__

# It rises when a field is removed or means something else. New fields do not change it.
VERSION = 1


class Snapshots:
    """Takes snapshots of this process. One thread calls it. Nothing here changes what it reads."""

    def __init__(self) -> None:
        self._started_s = time.time()
        self._cache: engine.BlockCache | None = None

    def take(self) -> dict[str, Any]:
        """Return a snapshot: see docs/guide/top.md."""
        rank, world_size = _rank()
        worker = get_worker_info()
        return {
            "version": VERSION,
            "gdsdata": __version__,
            "pid": os.getpid(),
            "parent_pid": os.getppid(),
            "host": socket.gethostname(),
            "program": _program(),
            "rank": rank,
            "world_size": world_size,
            "loader_worker": None if worker is None else worker.id,
            "started_s": self._started_s,
            "time_s": time.time(),
            "clock_s": time.monotonic(),
            "data_sets": [_without_secrets(one) for one in counted.data_sets.snapshot()],
            "engines": [_of_engine(*one) for one in engine.engines_here()],
            "saves": counted.saves.snapshot(),
            "cache": self._of_cache(),
            "network": _of_network(),
            "stores": counted.store_requests.snapshot(),
        }

    def _of_cache(self) -> dict[str, Any] | None:
        path = remote_access.folder_in_use()
        if path is None:
            self._cache = None
            return None
        try:
            if self._cache is None or self._cache.folder != os.path.realpath(path):
                self._cache = engine.BlockCache(path, None, remote_access.BLOCK_BYTES)
            return {"folder": self._cache.folder, **self._cache.statistics()}
        except (OSError, ValueError):  # it was removed
            return None


def _program() -> str:
    """Return the program's name without its arguments, which may have secrets."""
    folder, name = os.path.split(sys.argv[0] if sys.argv else "")
    return (os.path.basename(folder) if name == "__main__.py" else name) or "python"


def _rank() -> tuple[int | None, int | None]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    said = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    rank, world_size = (int(one) if one.isdecimal() else None for one in said)
    return rank, world_size


def _of_engine(device: str, one: engine.Engine) -> dict[str, Any]:
    about = {"device": device, "backend": one.backend, "device_backend": one.device_backend, "workers": one.workers}
    return {"id": id(one), **about, **one.statistics()}


def _of_network() -> dict[str, int]:
    try:
        return engine.http_statistics()
    except EngineClosed:  # the program ends
        return {}


def _without_secrets(one: dict[str, Any]) -> dict[str, Any]:
    """Return a data set's part without a user and a password in its URL."""
    return {**one, "source": re.sub(r"^(\w+://)[^/@]*@", r"\1", one["source"])}

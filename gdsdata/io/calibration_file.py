"""The user's file of calibrations, and the lock of the process that measures."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gdsdata.io import engine
from gdsdata.user_cache import user_cache

VERSION = 1  # of the file; if a file has another version, calibration measures again


def kept_entries() -> dict[str, dict[str, Any]]:
    """Return the file's dicts, by device and file system; empty if it cannot be read."""
    try:
        kept = json.loads(cache_path().read_text())
        if kept.pop("version") == VERSION and all(isinstance(one, dict) for one in kept.values()):
            return kept
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}


def change_entry(kind: str, key: str, value: Any) -> None:
    """Set one entry. The file is replaced as a whole, with all other entries."""
    try:
        path = cache_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with _changing():
            kept = kept_entries()
            kept.setdefault(kind, {})[key] = value
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            try:
                with os.fdopen(descriptor, "w") as file:
                    json.dump({"version": VERSION, **kept}, file, indent=1)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
    except OSError as error:
        engine.warn_once(f"calibration could not be kept and will be measured again: {error}")


@contextlib.contextmanager
def _changing() -> Iterator[None]:
    """Let one process and thread change the file at a time.

    Without file locks all may change it at once. An entry can then be lost, and is measured again.
    """
    with open(cache_folder() / "calibration.change.lock", "a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lock_of_node(wait: bool = False) -> int:
    """Take this node's lock, which allows to measure.

    Returns:
        A descriptor. Closing it releases the lock.

    Raises:
        BlockingIOError: another process has the lock, and ``wait`` is False.
        OSError: there is no cache folder, it cannot be written, or its file system has no locks.
    """
    cache_folder().mkdir(parents=True, exist_ok=True)
    path = cache_folder() / f"calibration.{socket.gethostname()}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        error.filename = str(path)
        raise
    return descriptor


def cache_folder() -> Path:
    return cache_path().parent


def cache_path() -> Path:
    return Path(user_cache()) / "gdsdata" / "calibration.json"

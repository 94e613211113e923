"""Make folders, and sync them and files that other code has written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from gdsdata.errors import IoError
from gdsdata.storage.paths import absolute


def make_folder(path: str) -> None:
    """Make a folder and those above it. They are on storage when this returns.

    Raises:
        NotADirectoryError: something above it is a file.
        IoError: the system refuses it, as on a full disk.
    """
    if os.path.isdir(path):
        return
    above = os.path.dirname(absolute(path))
    make_folder(above)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        sync_folder(above)
    except NotADirectoryError:
        raise
    except OSError as error:
        message = f"could not make the folder '{path}': {error.strerror}; mend that, or choose another folder"
        raise IoError.caused_by(error, message, path) from error


def sync_folder(path: str) -> None:
    """Sync a folder: the names in it are on storage when this returns."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


@contextlib.contextmanager
def synced_below(folder: str) -> Iterator[None]:
    """For ``with``: sync all files below a folder that the block writes, and the folders.

    No time is compared with this machine's clock, which may be set meanwhile.
    """
    before = _files_below(folder)
    yield
    for path, _ in _files_below(folder) - before:
        sync_file(path)
    for directory, _, _ in os.walk(folder):
        sync_folder(directory)
    sync_folder(os.path.dirname(absolute(folder)))


def _files_below(folder: str) -> set[tuple[str, tuple[int, int, int]]]:
    """Return the files below a folder, and for each what differs once it is written."""
    paths = [os.path.join(directory, name) for directory, _, names in os.walk(folder) for name in names]
    found = [(path, os.stat(path)) for path in paths if os.path.isfile(path)]
    return {(path, (status.st_ino, status.st_mtime_ns, status.st_size)) for path, status in found}


def sync_file(path: str) -> None:
    """Sync a file that others have written."""
    _sync(path, os.O_RDONLY)


def _sync(path: str, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

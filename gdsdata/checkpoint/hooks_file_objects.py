"""Which files Python's file objects are open on, for `torch_hooks`.

A file object is served only if its methods do nothing but read or write a regular file. An object
of another class may count, compress or send what passes through it.
"""

from __future__ import annotations

import fcntl
import io
import os
import stat
from typing import Any

from gdsdata.checkpoint.file_writer import FileWriter
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.io.options import EngineOptions

# Classes that pass everything on to a file object: the module, and the attribute that has it.
_WRAPPERS = {"tempfile": "file", "fsspec.implementations.local": "f"}


class NotServed(Exception):
    """torch does this call itself; the message says why."""


def plain_file(given: Any) -> Any:
    """Return the file object of Python's own that does the work of ``given``, at offset 0.

    Raises:
        NotServed: there is none, or it is not a regular file's.
    """
    attribute = _WRAPPERS.get(type(given).__module__)
    file: Any = given if attribute is None else getattr(given, attribute, None)
    raw = (
        getattr(file, "raw", None) if type(file) in (io.BufferedReader, io.BufferedWriter, io.BufferedRandom) else file
    )
    if type(file) is io.BytesIO:
        raise NotServed("it is in memory (io.BytesIO): pass a path, or with Lightning use GDSCheckpointIO")
    if type(raw) is not io.FileIO:
        raise NotServed(f"a file object of type {type(given).__name__}")
    if raw.closed or not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
        raise NotServed("it is no regular file")
    if file.tell() != 0:
        raise NotServed("the file object is not at the file's beginning")
    return file


def open_again(file: Any) -> OpenFile:
    """Open the file of a file object for the engine.

    Raises:
        NotServed: the file has no name any more, or may not be opened again.
    """
    descriptor = file.fileno()
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        opened = OpenFile(path)
    except (OSError, ValueError) as error:
        raise NotServed("the file cannot be opened by its name again") from error
    own, other = os.fstat(descriptor), os.fstat(opened.file().descriptor)
    if (own.st_dev, own.st_ino) != (other.st_dev, other.st_ino):
        raise NotServed("the file cannot be opened by its name again")
    return opened


def check_writable(file: Any) -> None:
    """Check that a file object's file can be written in place.

    It must be empty, and open for writing at its beginning.

    Raises:
        NotServed: it cannot.
    """
    descriptor = file.fileno()
    file.flush()
    if not file.writable() or fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
        raise NotServed("the file object is not open for writing, or it appends")
    if os.fstat(descriptor).st_size != 0:
        raise NotServed("the file object's file is not empty")
    if not os.access(f"/proc/self/fd/{descriptor}", os.R_OK | os.W_OK, effective_ids=True):
        raise NotServed("the file cannot be opened by its name again")


class InPlaceWriter(FileWriter):
    """Writes the empty file of a file object in place, and puts the object at the file's end.

    After an error, the file is empty again.

    Args:
        file: see `check_writable`.
        size_bytes: the size that the file will have.
        options: of the engine.

    Raises:
        IoError: the file cannot be opened again, or the disk is full.
    """

    def __init__(self, file: Any, size_bytes: int, options: EngineOptions) -> None:
        self._file, self._is_complete = file, False
        path = os.readlink(f"/proc/self/fd/{file.fileno()}")
        try:
            super().__init__(path, size_bytes, options, descriptor=file.fileno())
        except BaseException:
            self._empty()
            raise

    def __enter__(self) -> InPlaceWriter:
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if not self._is_complete:
            self._empty()

    def commit(self) -> None:
        """Write what is left. The file is not synced, as torch does not."""
        super().commit()
        self._file.seek(self._size_bytes)
        self._is_complete = True

    def _empty(self) -> None:
        os.ftruncate(self._file.fileno(), 0)

"""numpy's npz as data: rows of its arrays, or each file one sample. A zip (`zip_directory`) of npy files (`npy`).

Source of the format: https://numpy.org/doc/stable/reference/generated/numpy.savez.html.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from gdsdata.errors import CorruptData, IoError
from gdsdata.formats import npy
from gdsdata.formats.arrays import Array, ArrayFile, Kind, checked_names, index_arrays
from gdsdata.formats.fields import FieldIndex
from gdsdata.formats.index import Index
from gdsdata.formats.zip_directory import (
    LOCAL_BYTES,
    LONGEST_END_BYTES,
    USUAL_END_BYTES,
    Directory,
    Member,
    content_offset,
    find_directory,
    parse_directory,
)

_NPY = ".npy"
# Of an npy header as numpy writes it, and with a zip's local header before it, whose name is short.
_NPY_HEAD_BYTES = 128
_HEAD_BYTES = 256
# Files that storage is asked for side by side.
_FILES_AT_ONCE = 64


@dataclass(frozen=True)
class Npz:
    """Arrays of npz files that are not compressed (``numpy.savez``), of every version, order and byte order.

    Args:
        mode: ``"rows"``: each row of an array, along its first axis, is a sample. ``"file"``: each file is one.
        array: names, as `Safetensors` has those of tensors; ``arr_0`` is what numpy calls the first one without a name.

    Raises:
        ValueError: there is no such mode, rows without a name, or a name comes twice.
    """

    mode: Literal["rows", "file"] = "file"
    array: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "array", checked_names(self.mode, self.array, "array"))

    def index(self, paths: list[str]) -> Index | FieldIndex:
        """Read the directories of ``paths``, and the npy headers of the arrays that are wanted.

        Raises:
            CorruptData: a directory or header is damaged or lies, or a file was cut short.
            ValueError: an array is compressed, a pickle, of a dtype that torch lacks, missing, in Fortran order or
                without enough rows where rows are wanted, or unlike that of the same name in another file.
            FileNotFoundError, IoError: a file is not to be had.
        """
        wanted = {self.array} if isinstance(self.array, str) else self.array and set(self.array)
        return index_arrays(_read_files(paths, wanted), self.mode, self.array)


def recognises(head: bytes, path: str) -> bool:
    """Whether a file that begins so is one: torch's files and others are zips too, so the name decides."""
    return head.startswith(b"PK") and path.endswith(".npz")


def _read_files(paths: list[str], wanted: set[str] | None) -> Iterator[ArrayFile]:
    """Each of the files, with the arrays of these names that it has; None: with all."""
    for first in range(0, len(paths), _FILES_AT_ONCE):
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(_File(path)) for path in paths[first : first + _FILES_AT_ONCE]]
            for file in files:
                file.ask_for(file.size_bytes - USUAL_END_BYTES, USUAL_END_BYTES)
            found = [(file, *_wanted_members(file, wanted)) for file in files]
            for file, directory, members in found:
                arrays = {
                    member.name.removesuffix(_NPY): _read_array(file, member, directory) for member in members
                }
                yield ArrayFile(file.path, file.size_bytes, file.mtime_ns, arrays)


def _wanted_members(file: _File, wanted: set[str] | None) -> tuple[Directory, list[Member]]:
    """The directory of a file, and those of its arrays that are wanted, whose headers storage is asked for."""
    tail = file.read(max(0, file.size_bytes - USUAL_END_BYTES), USUAL_END_BYTES)
    directory = find_directory(tail, file.path, file.size_bytes)
    if directory is None:
        tail = file.read(max(0, file.size_bytes - LONGEST_END_BYTES), LONGEST_END_BYTES)
        directory = find_directory(tail, file.path, file.size_bytes)
    tail_offset = file.size_bytes - len(tail)
    if directory.offset >= tail_offset:
        data = tail[directory.offset - tail_offset :][: directory.length_bytes]
    else:
        data = file.read(directory.offset, directory.length_bytes)
    members = [member for member in parse_directory(data, directory, file.path) if member.name.endswith(_NPY)]
    if wanted is not None:
        members = [member for member in members if member.name.removesuffix(_NPY) in wanted]
    for member in members:
        file.ask_for(member.header_offset, _HEAD_BYTES)
    return directory, members


def _read_array(file: _File, member: Member, directory: Directory) -> Array:
    """What the npy header of a member says."""
    if member.hindrance:
        raise ValueError(
            f"{file.path}: no bytes of {member.name!r} lie there as they are, for {member.hindrance}, as "
            f"numpy.savez_compressed leaves it: save it once more with numpy.savez"
        )
    head = file.read(member.header_offset, _HEAD_BYTES)
    begin = content_offset(head[:LOCAL_BYTES], member, directory, file.path)
    head = head[begin - member.header_offset :][: member.size_bytes]
    if len(head) < min(_NPY_HEAD_BYTES, member.size_bytes):
        head = file.read(begin, min(_NPY_HEAD_BYTES, member.size_bytes))
    header = _parse_header(head, file, member, begin)
    if header.data_offset + header.data_bytes > member.size_bytes:
        raise CorruptData(
            f"{file.path}: the npy header of {member.name!r} says {header.data_bytes} bytes of data behind "
            f"{header.data_offset}, and all of it has {member.size_bytes}; write the file again",
            file.path,
            begin,
            member.size_bytes,
        )
    return Array(_kind(header), begin + header.data_offset)


def _parse_header(head: bytes, file: _File, member: Member, begin: int) -> npy.Header:
    """The npy header that begins with ``head`` at ``begin`` of the file."""
    who = f"{file.path}, {member.name!r} at {begin}"
    try:
        head_bytes = npy.header_bytes(head, who)
        if len(head) < head_bytes:
            head = file.read(begin, min(head_bytes, member.size_bytes))
        return npy.parse_header(head, who)
    except CorruptData as error:
        raise CorruptData(str(error), file.path, begin + error.offset, error.length) from None


@lru_cache(maxsize=4096)  # equal kinds are one object, which is soon compared
def _kind(header: npy.Header) -> Kind:
    return Kind(header.dtype, header.shape, header.fortran_order)


class _File:
    """A file that is read here and there, by a plain descriptor (see `index.read_heads`).

    Raises:
        FileNotFoundError: as the system raises it.
        IoError: any other refusal.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> _File:
        with self._explained(0, 0):
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            status = os.fstat(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead behind each
        self.size_bytes, self.mtime_ns = status.st_size, status.st_mtime_ns
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def ask_for(self, offset: int, length: int) -> None:
        """Has storage bring what lies there, and waits for nothing."""
        with contextlib.suppress(OSError):  # a hint: what does not come now is waited for later
            os.posix_fadvise(self._descriptor, max(offset, 0), length, os.POSIX_FADV_WILLNEED)

    def read(self, offset: int, length: int) -> bytes:
        """Fewer bytes only where the file ends."""
        with self._explained(offset, length):
            return os.pread(self._descriptor, length, offset)

    @contextlib.contextmanager
    def _explained(self, offset: int, length: int) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            message = f"indexing {self.path}: reading {length} bytes at {offset} failed: {error.strerror}"
            raise IoError(error.errno, message, self.path, offset, length) from error

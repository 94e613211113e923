"""numpy's npz as data: rows of its arrays, or each file one sample.

A file is a zip (`zip_directory`) of npy files (`npy`).

Source of the format: https://numpy.org/doc/stable/reference/generated/numpy.savez.html.
"""

from __future__ import annotations

import resource
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from gdsdata.errors import CorruptData
from gdsdata.formats import npy
from gdsdata.formats.arrays import Array, ArrayFile, Kind, checked_names, index_arrays, no_such_array
from gdsdata.formats.fields import FieldIndex
from gdsdata.formats.index import Index
from gdsdata.formats.parsers.zip_directory import (
    ENTRY_STAMP_AT,
    LOCAL_STAMP_AT,
    STAMP_BYTES,
    USUAL_END_BYTES,
    Directory,
    Member,
    content_offset,
    read_directory,
)
from gdsdata.storage.opened import Opened, open_files

_NPY = ".npy"
# Bytes of an npy header as numpy writes it; and with a zip's local header before it, whose name is
# short.
_NPY_HEAD_BYTES = 128
_HEAD_BYTES = 256
# Members are read in such pieces for their checksums.
_VERIFIED_AT_ONCE_BYTES = 2**20
# Files that storage is asked for side by side, at most, and the part of the limit of open files
# that they take. Data sets keep half of it.
_FILES_AT_ONCE, _PART_OF_LIMIT = 64, 8


@dataclass(frozen=True)
class Npz:
    """Arrays of npz files that are not compressed (``numpy.savez``).

    Versions, orders and byte orders of all kinds are read.

    Args:
        mode: ``"rows"``: each row of an array, along its first axis, is a sample. ``"file"``: each
            file is one.
        array: names, as `Safetensors` has those of tensors; ``arr_0`` is what numpy calls the first
            one without a name.
        verify: when indexing, read all of the arrays that are wanted, and compare them with the
            zip's checksums: about 1 GB/s a processor.

    Raises:
        ValueError: there is no such mode, rows without a name, or a name comes twice.
    """

    mode: Literal["rows", "file"] = "file"
    array: str | tuple[str, ...] | None = None
    verify: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "array", checked_names(self.mode, self.array, "array"))

    def index(self, paths: list[str]) -> Index | FieldIndex:
        """Read the directories of ``paths``, and the npy headers of wanted arrays.

        Raises:
            CorruptData: a directory or header is damaged or lies, a file was cut short, or
                (``verify``) an array has another checksum.
            ValueError: an array is compressed, a pickle, of a dtype that torch lacks, missing, or
                unlike that of the same name in another file; or with ``mode="rows"``, in Fortran
                order or without enough rows.
            FileNotFoundError, IoError: a file is not available.
        """
        wanted = (self.array,) if isinstance(self.array, str) else self.array
        return index_arrays(_read_files(paths, wanted, self.verify), self.mode, self.array)


def _read_files(paths: list[str], wanted: Sequence[str] | None, verify: bool) -> Iterator[ArrayFile]:
    """Yield each file, with those of the named arrays that it has; None: with all."""
    known = _Layout([], {}, -1)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = limit == resource.RLIM_INFINITY
    at_once = _FILES_AT_ONCE if is_unlimited else max(1, min(_FILES_AT_ONCE, limit // _PART_OF_LIMIT))
    for first in range(0, len(paths), at_once):
        with open_files(paths[first : first + at_once], at_random=True) as files:
            for file in files:
                file.ask_for(file.size_bytes - USUAL_END_BYTES, USUAL_END_BYTES)
                for stretch in known.stretches:
                    file.ask_for(stretch.offset, stretch.length)
            # An equal file has other checksums.
            found = [None if known.is_of(file) and not verify else _wanted_members(file, wanted) for file in files]
            for file, parsed in zip(files, found, strict=True):
                arrays = known.arrays if parsed is None else _read_arrays(file, parsed)
                if verify and parsed is not None:
                    _verify(file, parsed, arrays)
                yield ArrayFile(file.path, file.size_bytes, file.mtime_ns, arrays)
            if parsed is not None:  # the others may be like this one
                known = _layout(file, parsed, arrays)


class _Parsed(NamedTuple):
    """The directory of a file, its entries, and those of arrays that are wanted."""

    directory: Directory
    entries: list[Member]
    wanted: list[Member]


class _Stretch(NamedTuple):
    """Bytes of a file without times and checksums, which say nothing of its layout."""

    offset: int
    length: int
    stamps: list[int]  # where these begin, from ``offset`` on
    rest: list[bytes]

    @classmethod
    def of(cls, file: Opened, offset: int, end: int, stamps: list[int]) -> _Stretch:
        return cls(offset, end - offset, stamps, _without(stamps, file.read(offset, end - offset)))

    def is_in(self, file: Opened) -> bool:
        return _without(self.stamps, file.read(self.offset, self.length)) == self.rest


class _Layout(NamedTuple):
    """The layout of a file, and of all that have its size and these stretches.

    Samples are mostly saved alike, and comparing takes six tenths of the time of parsing.
    """

    stretches: list[_Stretch]
    arrays: dict[str, Array]
    size_bytes: int

    def is_of(self, file: Opened) -> bool:
        return file.size_bytes == self.size_bytes and all(stretch.is_in(file) for stretch in self.stretches)


def _without(stamps: list[int], data: bytes) -> list[bytes]:
    begins = [0, *(at + STAMP_BYTES for at in stamps)]
    return [data[begin:end] for begin, end in zip(begins, [*stamps, len(data)], strict=True)]


def _layout(file: Opened, parsed: _Parsed, arrays: dict[str, Array]) -> _Layout:
    directory = parsed.directory
    stamps = [entry.entry_offset + ENTRY_STAMP_AT - directory.offset for entry in parsed.entries]
    stretches = [_Stretch.of(file, directory.offset, file.size_bytes, stamps)]
    for member, array in zip(parsed.wanted, arrays.values(), strict=True):
        stretches.append(_Stretch.of(file, member.header_offset, array.begin_bytes, [LOCAL_STAMP_AT]))
    return _Layout(stretches, arrays, file.size_bytes)


def _wanted_members(file: Opened, wanted: Sequence[str] | None) -> _Parsed:
    """Return a file's directory, and request the headers of wanted members.

    Raises:
        ValueError: it has not all of them.
    """
    directory, entries = read_directory(file.read, file.path, file.size_bytes)
    members = [entry for entry in entries if entry.name.endswith(_NPY)]
    if wanted is not None:
        by_name = {member.name.removesuffix(_NPY): member for member in members}
        for name in wanted:
            if name not in by_name:
                raise no_such_array(file.path, name, by_name)
        chosen = set(wanted)
        members = [member for name, member in by_name.items() if name in chosen]
    for member in members:
        file.ask_for(member.header_offset, _HEAD_BYTES)
    return _Parsed(directory, entries, members)


def _read_arrays(file: Opened, parsed: _Parsed) -> dict[str, Array]:
    return {member.name.removesuffix(_NPY): _read_array(file, member, parsed.directory) for member in parsed.wanted}


def _verify(file: Opened, parsed: _Parsed, arrays: dict[str, Array]) -> None:
    """Compare each member with the checksum that the directory has of it.

    Raises:
        CorruptData: one differs, or the file has become shorter.
    """
    for member, array in zip(parsed.wanted, arrays.values(), strict=True):
        end = array.begin_bytes + array.kind.bytes
        begin, checksum = end - member.size_bytes, 0
        for at in range(begin, end, _VERIFIED_AT_ONCE_BYTES):
            checksum = zlib.crc32(file.read(at, min(_VERIFIED_AT_ONCE_BYTES, end - at)), checksum)
        if checksum != member.crc32:
            raise CorruptData(
                f"{file.path}: {member.name!r} of {member.size_bytes} bytes at offset {begin} has the checksum "
                f"{checksum:08x}, and {member.crc32:08x} by the directory; write or copy the file again",
                file.path,
                begin,
                member.size_bytes,
            )


def _read_array(file: Opened, member: Member, directory: Directory) -> Array:
    """Return the array that the npy header of a member describes."""
    if member.hindrance:
        raise ValueError(
            f"{file.path}: no bytes of {member.name!r} lie there as they are, for {member.hindrance}, as "
            f"numpy.savez_compressed leaves it: save it once more with numpy.savez"
        )
    head = file.read(member.header_offset, _HEAD_BYTES)
    begin = content_offset(head, member, directory, file.path)
    head = head[begin - member.header_offset :][: member.size_bytes]
    if len(head) < min(_NPY_HEAD_BYTES, member.size_bytes):
        head = file.read(begin, min(_NPY_HEAD_BYTES, member.size_bytes))
    header = _parse_header(head, file, member, begin)
    if header.data_offset + header.data_bytes != member.size_bytes:
        raise CorruptData(
            f"{file.path}: the npy header of {member.name!r} says {header.data_bytes} bytes of data behind "
            f"{header.data_offset}, and all of it has {member.size_bytes}; write the file again",
            file.path,
            begin,
            member.size_bytes,
        )
    return Array(_kind(header), begin + header.data_offset)


def _parse_header(head: bytes, file: Opened, member: Member, begin: int) -> npy.Header:
    """Return the npy header that begins with ``head`` at ``begin`` of the file."""
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

"""WebDataset's tar shards: a sample is the neighbouring members whose paths are equal up to the first dot of the name.

One pass follows the headers of a file and leaves the payloads alone. Headers are the truth: index files that other
projects left beside the data only say where to read ahead (DALI's wds2idx has written wrong offsets for pax headers,
https://github.com/NVIDIA/DALI/pull/4226), and what this module keeps of a pass is used while size and mtime are the same.

Sources of the format: POSIX.1-2024 (pax, "ustar Interchange Format"); GNU tar's manual, "Basic Tar Format"; webdataset
``tariterators.py`` (keys, extensions, names that are left out); Megatron-Energon ``itar.py``; DALI ``wds2idx.py``.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import struct
import warnings
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from gdsdata.errors import CorruptData, IoError
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.index import first_samples

# Reads up to ``length`` bytes at ``offset``: fewer only where the file ends.
Read = Callable[[int, int], bytes]

_RECORD_BYTES = 512
_END = bytes(_RECORD_BYTES)
# name, size, checksum, type, magic, prefix
_HEADER = struct.Struct("100s 24x 12s 12x 8s c 100x 6s 82x 155s 12x")
_POSIX_MAGIC = b"ustar\0"  # GNU's is "ustar ", and what lies at its prefix is something else
_CHECKSUM_AT = slice(148, 156)
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*")

_REGULAR = b"0\0007"
_PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_LINK = b"x", b"g", b"L", b"K"
_EXTENDED = _PAX + _PAX_GLOBAL + _LONG_NAME + _LONG_LINK
_WITHOUT_PAYLOAD = b"123456"  # links, devices, folders, pipes: their size field, if any, means something else
_REFUSED = {b"S": "a sparse member", b"M": "the continuation of a member that began in another volume"}
# Names and attributes take far less; a length that lies must not become memory.
_LONGEST_EXTENDED_BYTES = 2**20
# Other keywords (mtime, uid, ...), which are most of what is written, change nothing here.
_PAX_MATTERS = re.compile(rb"path=|size=|GNU\.sparse\.")
_PAX_LENGTH = re.compile(rb"([0-9]{1,7}) ")
_MOST_DIGITS = 19  # of 2**63

_METADATA = re.compile(rb"__[^/]*__($|/)")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}

# Of fields=None: the samples that are asked, and what they may have. A table of more is a mistake in the names.
_FIRST_SAMPLES = 100
_MOST_FIELDS = 64


class Members(NamedTuple):
    """The M members of a tar that belong to a sample, as they lie there.

    Attributes:
        extensions: of all members, each once, in lower case.
        sample: int64 (M,), which sample of the file; rises by 0 or 1.
        extension: int64 (M,), a place in ``extensions``.
        begin_bytes: int64 (M,), offset of the payload.
        length_bytes: int64 (M,), of the payload.
    """

    extensions: tuple[str, ...]
    sample: np.ndarray
    extension: np.ndarray
    begin_bytes: np.ndarray
    length_bytes: np.ndarray

    @property
    def samples(self) -> int:
        """How many samples the members are."""
        return int(self.sample[-1]) + 1 if len(self.sample) else 0


@dataclass(frozen=True)
class Tar:
    """Tar shards as webdataset has them: ustar, GNU and pax, not compressed. A field is a member's bytes.

    A member's path up to the first dot of its name is the key, the rest is the field's name, in lower case:
    ``train/0001.seg.png`` is the field ``seg.png`` of the sample ``train/0001``. Members next to each other with equal
    keys are one sample. Left out are: what is no regular file, names without a dot or with one in front, and paths
    that begin with a part like ``__meta__``.

    Args:
        fields: the extensions that are wanted; others are passed over. None: all that the first 100 samples have.
        index_cache: where the index of each file is kept for the next time: the path of a folder; ``"beside"``: a
            hidden file beside the data; ``"user"``: ``~/.cache/gdsdata/tar`` (``XDG_CACHE_HOME`` moves it); None: nowhere.

    Raises:
        ValueError: ``fields`` is empty, a string, or names one twice.
    """

    fields: tuple[str, ...] | None = None
    index_cache: str | None = "user"

    def __post_init__(self) -> None:
        if self.fields is None:
            return
        if isinstance(self.fields, str) or not self.fields or len(set(self.fields)) < len(self.fields):
            raise ValueError(f'{self}: fields names extensions, each once, as in ("jpg", "cls")')
        object.__setattr__(self, "fields", tuple(self.fields))  # a list becomes what can be compared and hashed

    def index(self, paths: list[str]) -> FieldIndex:
        """Follow the headers of ``paths``, or take what was kept of them.

        A field that a sample lacks has the length -1. That no sample of any file has a field is an error.

        Raises:
            CorruptData: a header is damaged or lies, a file was cut short, a name has a part "..", or a sample has a
                field twice.
            ValueError: a compressed file, a sparse member, no samples, a field that no sample has, or (``fields=None``)
                more fields than samples have.
            FileNotFoundError, IoError: a file is not to be had.
        """
        size_bytes, mtime_ns = np.empty(len(paths), np.int64), np.empty(len(paths), np.int64)
        names, counts, tables = self.fields, [], []
        extensions: dict[str, None] = {}  # that some sample has, for the error
        for i, path in enumerate(paths):
            members, size_bytes[i], mtime_ns[i] = _members_of(path, self.index_cache)
            counts.append(members.samples)
            if members.samples:
                names = names or first_extensions(members, path)
                tables.append(field_table(members, names))
                extensions.update(dict.fromkeys(members.extensions[:_MOST_FIELDS]))
        if not tables:
            raise ValueError(f"no samples in {paths[0]} (of {len(paths)} files): a sample's file has a name with a dot")
        begin_bytes, length_bytes = map(np.concatenate, zip(*tables, strict=True))
        for name, lengths in zip(names, length_bytes.T, strict=True):
            if lengths.max() < 0:
                raise ValueError(
                    f"no sample of {paths[0]} (of {len(paths)} files) has the field {name!r}: they have "
                    f"{', '.join(map(repr, extensions))}"
                )
        return FieldIndex(
            paths=paths,
            size_bytes=size_bytes,
            mtime_ns=mtime_ns,
            first_sample=first_samples(counts),
            fields=tuple(map(Field, names)),
            begin_bytes=begin_bytes,
            length_bytes=length_bytes,
        )


# ------------------------------------------------------------------------------------ from members to samples: pure


def first_extensions(members: Members, path: str) -> tuple[str, ...]:
    """What the first samples have, in the order in which it comes.

    Raises:
        ValueError: more than samples have; the names have dots where a key should not end.
    """
    first = members.extension[: np.searchsorted(members.sample, _FIRST_SAMPLES)]
    found = [members.extensions[i] for i in dict.fromkeys(first.tolist())]
    if len(found) > _MOST_FIELDS:
        raise ValueError(
            f"{path}: its first {_FIRST_SAMPLES} samples have {len(found)} fields ({found[0]!r}, {found[1]!r}, ...): a "
            f"sample's key ends at the first dot of the name; name the fields that are wanted, or write other names"
        )
    return tuple(found)


def field_table(members: Members, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Offset and length of the fields ``names`` of every sample, in bytes: int64 (samples, K) each; length -1: lacks it."""
    begin_bytes = np.zeros((members.samples, len(names)), np.int64)
    length_bytes = np.full_like(begin_bytes, -1)
    column_of = {name: column for column, name in enumerate(names)}
    columns = np.array([column_of.get(extension, -1) for extension in members.extensions], np.int64)
    column = columns[members.extension]
    wanted = column >= 0
    place = members.sample[wanted], column[wanted]
    begin_bytes[place], length_bytes[place] = members.begin_bytes[wanted], members.length_bytes[wanted]
    return begin_bytes, length_bytes


def read_members(read: Read, size_bytes: int, path: str) -> Members:
    """Follow the headers of a tar of ``size_bytes`` and group its members. ``path`` is named in errors.

    Raises:
        CorruptData, ValueError: as `Tar.index`.
    """
    ids: dict[str, int] = {}
    columns = sample, extension, begin_bytes, length_bytes = array("q"), array("q"), array("q"), array("q")
    key, count = None, 0
    for name, begin, length in _regular_members(read, size_bytes, path):
        base = name.rfind(b"/") + 1
        dot = name.find(b".", base)
        if dot <= base or (name.startswith(b"__") and _METADATA.match(name)):
            continue
        if key != name[:dot]:
            key = name[:dot]
            count += 1
        sample.append(count - 1)
        extension.append(_id_of(name[dot + 1 :], ids))
        begin_bytes.append(begin)
        length_bytes.append(length)
    members = Members(tuple(ids), *(np.frombuffer(column, np.int64) for column in columns))
    _refuse_duplicates(members, path)
    return members


def _id_of(extension: bytes, ids: dict[str, int]) -> int:
    return ids.setdefault(_lower(extension), len(ids))


@lru_cache(maxsize=1024)
def _lower(extension: bytes) -> str:
    return extension.decode("utf8", "surrogateescape").lower()


def _refuse_duplicates(members: Members, path: str) -> None:
    place = members.sample * len(members.extensions) + members.extension
    order = np.argsort(place, kind="stable")
    again = np.flatnonzero(np.diff(place[order]) == 0)
    if not len(again):
        return
    second = order[again[0] + 1]
    begin = int(members.begin_bytes[second])
    extension = members.extensions[members.extension[second]]
    reason = f"sample {members.sample[second]} of the file has the field {extension!r} a second time"
    raise _corrupt(path, begin - _RECORD_BYTES, reason)


# ------------------------------------------------------------------------------------- from bytes to members: pure


class _Window:
    """A few KiB of the file: a small member and the headers around it come with one read."""

    BYTES = 4096

    def __init__(self, read: Read) -> None:
        self._read = read
        self._begin, self._bytes = 0, b""

    def __call__(self, length: int, offset: int) -> bytes:
        begin = offset - self._begin
        if not 0 <= begin <= len(self._bytes) - length:
            self._begin, self._bytes, begin = offset, self._read(max(length, self.BYTES), offset), 0
        return self._bytes[begin : begin + length]


def _regular_members(read: Read, size_bytes: int, path: str) -> Iterator[tuple[bytes, int, int]]:
    """Name, offset of the payload and its length in bytes, of every regular file in order."""
    read = _Window(read)
    offset = 0
    # What extended headers said of the next member, and of all that follow.
    own: dict[bytes, bytes] = {}
    common: dict[bytes, bytes] = {}
    while (header := read(_RECORD_BYTES, offset)) != _END:
        if len(header) < _RECORD_BYTES:
            raise _no_header(path, offset, header, f"the file ends at {size_bytes}, without the zeros that end a tar")
        name, size_field, checksum, kind, magic, prefix = _HEADER.unpack(header)
        # Adler-32's low half is the sum that tar asks for, modulo 65521, and takes a twentieth of Python's time.
        if zlib.adler32(header) & 0xFFFF != _low_adler(checksum) and not _signed_sum_matches(header):
            raise _no_header(path, offset, header, "its checksum differs")
        if (length := _number(size_field)) is None:
            raise _corrupt(path, offset, f"its size is {size_field!r}, which is no number")
        begin = offset + _RECORD_BYTES

        if kind in _EXTENDED:
            if length > min(_LONGEST_EXTENDED_BYTES, size_bytes - begin):
                raise _corrupt(path, offset, f"it says that {length} bytes of names follow, in a file of {size_bytes}")
            payload = read(length, begin)
            if kind == _LONG_NAME:
                own[b"path"] = payload.partition(b"\0")[0]
            elif kind != _LONG_LINK and _PAX_MATTERS.search(payload):
                (own if kind == _PAX else common).update(_pax_records(payload, path, offset))
        elif kind in _REFUSED:
            raise ValueError(f"{path}: {_REFUSED[kind]} (at offset {offset}) does not lie there as it is: write it plainly")
        else:
            name = name.partition(b"\0")[0]
            if magic == _POSIX_MAGIC and prefix[0]:
                name = prefix.partition(b"\0")[0] + b"/" + name
            if own or common:
                name, length = _overridden(name, length, {**common, **own}, path, offset)
                own = {}
            if kind in _WITHOUT_PAYLOAD or (kind == b"\0" and name.endswith(b"/")):  # a folder of before POSIX
                length = 0
            if length > size_bytes - begin:
                raise _corrupt(
                    path, offset, f"it says that {_shown(name)} has {length} bytes, but the file ends at {size_bytes}"
                )
            if kind in _REGULAR:
                if b".." in name and b".." in name.split(b"/"):
                    raise _corrupt(path, offset, f"the name {_shown(name)} leads out of its folder")
                yield name, begin, length
        offset = begin + -(-length // _RECORD_BYTES) * _RECORD_BYTES
    if own:
        raise _corrupt(path, offset, "the tar ends where the member of an extended header should be")


def _overridden(name: bytes, length: int, said: dict[bytes, bytes], path: str, offset: int) -> tuple[bytes, int]:
    """Name and length of a member whose own header says ``name`` and ``length``, and extended headers ``said``."""
    name = said.get(b"path") or name  # an empty value takes back what was said before
    if b"\0" in name:
        raise _corrupt(path, offset, f"the name {_shown(name)} has a zero byte in it")
    if digits := said.get(b"size"):
        if not digits.isdigit() or len(digits) > _MOST_DIGITS:
            raise _corrupt(path, offset, f"its pax header says size={digits[:40]!r}, which makes no sense")
        length = int(digits)
    return name, length


def _pax_records(payload: bytes, path: str, offset: int) -> dict[bytes, bytes]:
    """The records ``LENGTH keyword=value\\n`` of a pax header, of which the length counts every byte."""
    records = {}
    at = 0
    while at < len(payload) and payload[at]:
        match = _PAX_LENGTH.match(payload, at)
        end = at + int(match[1]) if match else 0
        record = payload[match.end() : end] if match else b""
        keyword, equals, value = record[:-1].partition(b"=")
        if not equals or record[-1:] != b"\n" or end > len(payload):
            raise _corrupt(path, offset, f"its pax record {payload[at : at + 40]!r} is none")
        if keyword.startswith(b"GNU.sparse."):
            raise ValueError(f"{path}: {_REFUSED[b'S']} (at offset {offset}) does not lie there as it is: write it plainly")
        records[keyword] = value
        at = end
    return records


@lru_cache(maxsize=4096)
def _number(field: bytes) -> int | None:
    """A number in octal, or, with the first bit set, in base 256; None: it is neither, or negative."""
    if field[0] & 0x80:
        return None if field[0] & 0x40 else int.from_bytes(bytes([field[0] & 0x3F]) + field[1:], "big")
    digits = _OCTAL.fullmatch(field)
    return int(digits[1] or b"0", 8) if digits else None


@lru_cache(maxsize=4096)
def _low_adler(checksum: bytes) -> int:
    """The low half of the Adler-32 of a header that has this checksum field; -1: of none."""
    total = _number(checksum)
    return -1 if total is None else (1 + total - len(checksum) * ord(" ") + sum(checksum)) % 65521


def _signed_sum_matches(header: bytes) -> bool:
    """Some old programs summed signed bytes."""
    signed = np.frombuffer(header, np.int8).astype(np.int64)
    checksum = header[_CHECKSUM_AT]
    return _number(checksum) == int(signed.sum() - signed[_CHECKSUM_AT].sum()) + len(checksum) * ord(" ")


def _no_header(path: str, offset: int, header: bytes, reason: str) -> Exception:
    """What to raise where a header should be and is not."""
    compression = next((name for magic, name in _COMPRESSED.items() if header.startswith(magic)), None)
    if offset == 0 and compression:
        return ValueError(
            f"{path} is compressed ({compression}), so that no sample's bytes lie in it as they are: decompress it once"
        )
    return _corrupt(path, offset, reason)


def _corrupt(path: str, offset: int, reason: str) -> CorruptData:
    message = f"{path}: its tar header at offset {offset} is damaged: {reason}; write the file again"
    return CorruptData(message, path, offset, _RECORD_BYTES)


def _shown(name: bytes) -> str:
    return repr(name if len(name) <= 100 else name[:40] + b"..." + name[-40:])[1:]


# ------------------------------------------------------------------------------------------------------------ files


def _members_of(path: str, index_cache: str | None) -> tuple[Members, int, int]:
    """The members of a file, its size in bytes and its last modification in ns."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            members = read_members(_Reader(descriptor, path, status.st_size).read, status.st_size, path)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise IoError(error.errno, f"indexing {path}: reading its headers failed: {error.strerror}", path) from error
    return members, status.st_size, status.st_mtime_ns


class _Reader:
    def __init__(self, fd, path, size):
        self.fd = fd
    def read(self, length, offset):
        return os.pread(self.fd, length, offset)

"""WebDataset's tar shards: a sample is the neighbouring members whose paths are equal up to the first dot of the name.

One pass follows the headers of a file and leaves the payloads alone. Headers are the truth: index files that other
projects left beside the data only say where to read ahead (DALI's wds2idx has written wrong offsets for pax headers,
https://github.com/NVIDIA/DALI/pull/4226). What is kept of a pass is used while size and mtime of the file are the same.

Sources of the format: POSIX.1-2024 (pax, "ustar Interchange Format"); GNU tar's manual, "Basic Tar Format"; webdataset
``tariterators.py`` (keys, extensions, names that are left out); Megatron-Energon ``itar.py``; DALI ``wds2idx.py``.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
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
# name, size, checksum, magic, prefix
_HEADER = struct.Struct("100s 24x 12s 12x 8s 101x 6s 82x 155s 12x")
_POSIX_MAGIC = b"ustar\0"  # GNU's is "ustar ", and what lies at its prefix is something else
_CHECKSUM_AT = slice(148, 156)
_WINDOW_BYTES = 4096

_KIND_AT = 156
_REGULAR = b"0\0007"
_OLD_REGULAR = 0
_EXTENDED = _PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_LINK = b"xgLK"
_WITHOUT_PAYLOAD = b"123456"  # links, devices, folders, pipes: their size field, if any, means something else
_REFUSED = {ord("S"): "a sparse member", ord("M"): "the continuation of a member that began in another volume"}
# Names and attributes take far less; a length that lies must not become memory.
_LONGEST_EXTENDED_BYTES = 2**20
# Other keywords (mtime, uid, ...), which are most of what is written, change nothing here.
_PAX_MATTERS = re.compile(rb"path=|size=|GNU\.sparse\.")
_PAX_LENGTH = re.compile(rb"([0-9]{1,7}) ")
_MOST_DIGITS = 19  # of 2**63

_METADATA = re.compile(rb"__[^/]*__($|/)")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}

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
        index_cache: where the index of each file is kept for the next time. ``"user"``: in ``~/.cache/gdsdata/tar``
            (``XDG_CACHE_HOME`` moves it); ``"beside"``: in a hidden file beside the data; else in the folder of this
            path; None: nowhere.

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

        A field that a sample lacks has the length -1. That no sample of any file has a field is an error. Indexes of
        other projects (``.idx``) among them are passed over.

        Raises:
            CorruptData: a header is damaged or lies, a file was cut short, a name has a part "..", or a sample has a
                field twice.
            ValueError: a compressed file, a sparse member, no samples, a field that no sample has, or (``fields=None``)
                more fields than samples have.
            FileNotFoundError, IoError: a file is not to be had.
        """
        paths = [path for path in paths if not path.endswith(".idx")] or paths
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
    """Offset and length of each sample's fields ``names`` in bytes (int64 (samples, K) each); length -1: lacks it."""
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
    extensions: dict[str, int] = {}
    ids: dict[bytes, int] = {}  # the same, of extensions as they are written
    columns = sample, extension, begin_bytes, length_bytes = array("q"), array("q"), array("q"), array("q")
    key, current = None, -1
    for name, begin, length in _regular_members(read, size_bytes, path):
        base = name.rfind(b"/") + 1
        dot = name.find(b".", base)
        if dot <= base or (name.startswith(b"__") and _METADATA.match(name)):
            continue
        if name[:dot] != key:
            key = name[:dot]
            current += 1
        written = name[dot + 1 :]
        if written not in ids:
            ids[written] = extensions.setdefault(written.decode("utf8", "surrogateescape").lower(), len(extensions))
        sample.append(current)
        extension.append(ids[written])
        begin_bytes.append(begin)
        length_bytes.append(length)
    members = Members(tuple(extensions), *(np.frombuffer(column, np.int64) for column in columns))
    _refuse_duplicates(members, path)
    return members


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


def _regular_members(read: Read, size_bytes: int, path: str) -> Iterator[tuple[bytes, int, int]]:
    """Name, offset of the payload and its length in bytes, of every regular file in order."""
    offset = 0
    # A few KiB of the file: a small member and the headers around it come with one read.
    window, window_begin = b"", 0
    # What extended headers said of the next member, and of all that follow.
    own: dict[bytes, bytes] = {}
    common: dict[bytes, bytes] = {}
    while True:
        at = offset - window_begin
        record = window[at : at + _RECORD_BYTES]
        if len(record) < _RECORD_BYTES:
            window, window_begin, at = read(_WINDOW_BYTES, offset), offset, 0
            record = window[:_RECORD_BYTES]
            if len(record) < _RECORD_BYTES:
                reason = f"the file ends at {size_bytes}, without the zeros that end a tar"
                raise _no_header(path, offset, record, reason)
        if record == _END:
            break
        begin = offset + _RECORD_BYTES
        kind = record[_KIND_AT]
        # One writer's extended headers are the same bytes again and again, for their names do not matter.
        name, length, wrong = _parse_again(record) if kind in _EXTENDED else _parse(record)
        if wrong:
            raise _no_header(path, offset, record, wrong)

        if kind in _EXTENDED:
            if length > min(_LONGEST_EXTENDED_BYTES, size_bytes - begin):
                raise _corrupt(path, offset, f"it says that {length} bytes of names follow, in a file of {size_bytes}")
            payload = window[at + _RECORD_BYTES : at + _RECORD_BYTES + length]
            if len(payload) < length:
                payload = read(length, begin)
            if kind == _LONG_NAME:
                own[b"path"] = payload.partition(b"\0")[0]
            elif kind != _LONG_LINK and _PAX_MATTERS.search(payload):
                (own if kind == _PAX else common).update(_pax_records(payload, path, offset))
        elif kind in _REFUSED:
            raise _refused(path, offset, kind)
        else:
            if own or common:
                name, length = _overridden(name, length, {**common, **own}, path, offset)
                own = {}
            if kind in _WITHOUT_PAYLOAD or (kind == _OLD_REGULAR and name.endswith(b"/")):  # a folder of before POSIX
                length = 0
            if length > size_bytes - begin:
                reason = f"it says that {_shown(name)} has {length} bytes, but the file ends at {size_bytes}"
                raise _corrupt(path, offset, reason)
            if kind in _REGULAR:
                if b".." in name and b".." in name.split(b"/"):
                    raise _corrupt(path, offset, f"the name {_shown(name)} leads out of its folder")
                yield name, begin, length
        offset = begin + length + -length % _RECORD_BYTES
    if own:
        raise _corrupt(path, offset, "the tar ends where the member of an extended header should be")


def _parse(record: bytes) -> tuple[bytes, int, str]:
    """Name and length of the payload as a header has them; and why it is no header, or ""."""
    name, size, checksum, magic, prefix = _HEADER.unpack(record)
    # Adler-32's low half is the sum that tar asks for, modulo 65521, and takes a twentieth of Python's time.
    if zlib.adler32(record) & 0xFFFF != _low_adler(checksum) and not _signed_sum_matches(record):
        return name, 0, f"it starts with {record[:16]!r} and its checksum differs"
    if (length := _number(size)) < 0:
        return name, 0, f"its size is {size!r}, which is no number"
    name = name.partition(b"\0")[0]
    if magic == _POSIX_MAGIC and prefix[0]:
        name = prefix.partition(b"\0")[0] + b"/" + name
    return name, length, ""


_parse_again = lru_cache(maxsize=256)(_parse)


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
            raise _refused(path, offset, ord("S"))
        records[keyword] = value
        at = end
    return records


def _number(field: bytes) -> int:
    """A number in octal or, with the first bit set, in base 256; -1: it is neither, or negative."""
    if field[0] & 0x80:
        return -1 if field[0] & 0x40 else int.from_bytes(bytes([field[0] & 0x3F]) + field[1:], "big")
    digits = field.strip(b" \0")
    if not digits.isdigit():
        return -1 if digits else 0
    try:
        return int(digits, 8)
    except ValueError:  # an 8 or a 9
        return -1


@lru_cache(maxsize=4096)
def _low_adler(checksum: bytes) -> int:
    """The low half of the Adler-32 of a header that has this checksum field; -1: of none."""
    total = _number(checksum)
    return -1 if total < 0 else (1 + total - len(checksum) * ord(" ") + sum(checksum)) % 65521


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


def _refused(path: str, offset: int, kind: int) -> ValueError:
    return ValueError(f"{path}: {_REFUSED[kind]} (at offset {offset}) does not lie there as it is: write it plainly")


def _shown(name: bytes) -> str:
    return repr(name if len(name) <= 100 else name[:40] + b"..." + name[-40:])[1:]


# ---------------------------------------------------------------------------------- what is kept of a pass: pure


# Magic with the version, and CRC-32 of all that follows: size in bytes and mtime in ns of the tar, number of members,
# bytes of the extensions, these (JSON), and the members' columns.
_KEPT = struct.Struct("<16s I 4x 4q")
_KEPT_MAGIC = b"gdsdata tar v1\r\n"
_KEPT_CHECKED = 24  # where the bytes begin that the checksum covers
_KEPT_COLUMNS = 4


def pack_members(members: Members, size_bytes: int, mtime_ns: int) -> bytes:
    """What `unpack_members` reads: ``members`` of a tar of this size and last modification."""
    names = json.dumps(members.extensions).encode()
    columns = np.stack(members[1:]).astype("<i8").tobytes()
    said = (size_bytes, mtime_ns, len(members.sample), len(names))
    checksum = zlib.crc32(_KEPT.pack(b"", 0, *said)[_KEPT_CHECKED:] + names + columns)
    return _KEPT.pack(_KEPT_MAGIC, checksum, *said) + names + columns


def unpack_members(kept: bytes, size_bytes: int, mtime_ns: int) -> Members | None:
    """What was kept of a tar of this size and last modification; None: ``kept`` is of another, or damaged."""
    if len(kept) < _KEPT.size or not kept.startswith(_KEPT_MAGIC):
        return None
    _, checksum, size, mtime, count, names_bytes = _KEPT.unpack_from(kept)
    if (size, mtime) != (size_bytes, mtime_ns) or checksum != zlib.crc32(memoryview(kept)[_KEPT_CHECKED:]):
        return None
    columns_at = _KEPT.size + names_bytes
    if min(count, names_bytes) < 0 or len(kept) != columns_at + count * _KEPT_COLUMNS * 8:
        return None
    try:
        extensions = tuple(json.loads(kept[_KEPT.size : columns_at]))
    except (ValueError, TypeError, RecursionError):
        return None
    columns = np.frombuffer(kept, "<i8", offset=columns_at).reshape(_KEPT_COLUMNS, count)
    return Members(extensions, *columns.astype(np.int64, copy=False))


# ----------------------------------------------------------------------------------- other projects' indexes: pure


def energon_offsets(index: bytes) -> np.ndarray:
    """Energon's ``.tar.idx``: where each sample's first header lies, then where the last one ends (int64, bytes)."""
    return np.frombuffer(index[: len(index) // 8 * 8], "<u8").astype(np.int64)


def dali_offsets(index: bytes) -> np.ndarray:
    """DALI's index, text: where each payload lies (int64, bytes); none where it is of another kind.

    A line ``v1.2 N``, then one a sample, with extension, offset, size and name of each member; ``v1.1`` has no names.
    """
    version, *_ = index[:5].split(b" ")
    if version not in _DALI_MEMBER_WORDS:
        return np.empty(0, np.int64)
    words = (line.split()[1 :: _DALI_MEMBER_WORDS[version]] for line in index.splitlines()[1:])
    # A name with a blank in it shifts the words of its line: what is no offset is left out.
    return np.array([int(word) for line in words for word in line if word.isdigit() and len(word) < 19], np.int64)


_DALI_MEMBER_WORDS = {b"v1.1": 3, b"v1.2": 4}


# ------------------------------------------------------------------------------------------------------------ files


def _members_of(path: str, index_cache: str | None) -> tuple[Members, int, int]:
    """The members of a file, its size in bytes and its last modification in ns."""
    try:
        with _opened(path) as descriptor:
            status = os.fstat(descriptor)
            kept_at = _kept_at(path, index_cache)
            members = _kept_members(kept_at, status)
            if members is None:
                reader = _Reader(descriptor, path, status.st_size)
                members = read_members(reader.read, status.st_size, path)
                _refuse_changed(path, status, os.fstat(descriptor))
                _keep(kept_at, pack_members(members, status.st_size, status.st_mtime_ns))
    except FileNotFoundError:
        raise
    except OSError as error:
        if isinstance(error, IoError):
            raise
        raise IoError(error.errno, f"indexing {path}: reading its headers failed: {error.strerror}", path) from error
    return members, status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _refuse_changed(path: str, before: os.stat_result, after: os.stat_result) -> None:
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise CorruptData(f"{path} changed while it was indexed: index it when it is complete", path, 0, after.st_size)


# Of file systems that do not know RWF_NOWAIT.
_CANNOT_SAY = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class _Reader:
    """Reads headers: page cache first; where that misses, storage is told what will be wanted before the read waits.

    From header to header alone, each would wait for the one before it: 1.1 s for a cold tar of 270 MB in small members,
    where reading ahead takes 0.3, and reading ahead at the offsets of another project's index 0.2.
    """

    _SMALL_BYTES = 256 * 1024  # members this small are had sooner by reading all than by waiting for each header
    _AHEAD_BYTES = 8 * 2**20
    _REQUEST_BYTES = 2**20  # the kernel cuts longer ones
    _HINTED = 1024  # headers asked for at a time
    _AROUND_BYTES = 4096  # of a hint: the headers lie in front of a payload's offset, or behind a sample's

    def __init__(self, descriptor: int, path: str, size_bytes: int) -> None:
        self._descriptor, self._path, self._size_bytes = descriptor, path, size_bytes
        self._reads = 0
        self._asked_until = 0
        self._hints: np.ndarray | None = None
        self._buffers = [bytearray(_WINDOW_BYTES)]
        self._knows_cached = True
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # readahead is this class's business

    def read(self, length: int, offset: int) -> bytes:
        """`Read`, of the file."""
        self._reads += 1
        if self._knows_cached and length == _WINDOW_BYTES:
            try:
                if os.preadv(self._descriptor, self._buffers, offset, os.RWF_NOWAIT) == length:
                    return bytes(self._buffers[0])
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno not in _CANNOT_SAY:
                    raise
                self._knows_cached = False
        self._ask_ahead(offset)
        return os.pread(self._descriptor, length, offset)

    def _ask_ahead(self, offset: int) -> None:
        if self._hints is None:
            self._hints = _foreign_hints(self._path, self._size_bytes)
        if len(self._hints):
            self._ask_for_hints(offset)
        elif offset < self._reads * self._SMALL_BYTES:
            until = min(offset + self._AHEAD_BYTES, self._size_bytes)
            for begin in range(max(offset, self._asked_until), until, self._REQUEST_BYTES):
                os.posix_fadvise(self._descriptor, begin, self._REQUEST_BYTES, os.POSIX_FADV_WILLNEED)
                self._asked_until = begin + self._REQUEST_BYTES

    def _ask_for_hints(self, offset: int) -> None:
        first, last = np.searchsorted(self._hints, (max(offset, self._asked_until), self._size_bytes))
        for hint in self._hints[first : min(last, first + self._HINTED)].tolist():
            begin = max(hint - self._AROUND_BYTES, 0)
            os.posix_fadvise(self._descriptor, begin, 2 * self._AROUND_BYTES, os.POSIX_FADV_WILLNEED)
            self._asked_until = hint + 1


def _foreign_hints(path: str, size_bytes: int) -> np.ndarray:
    """Where the headers of ``path`` may lie (int64, bytes, ascending), as Energon or DALI wrote it down; or none."""
    folder, name = os.path.split(path)
    for index_path, parse in (
        (f"{path}.idx", energon_offsets),
        (os.path.join(folder, name[:1] + name[1:].split(".")[0] + ".idx"), dali_offsets),
    ):
        with contextlib.suppress(OSError), _opened(index_path) as descriptor:
            # No index is longer than its tar; a hundred bytes a header are plenty.
            if os.fstat(descriptor).st_size <= size_bytes:
                with os.fdopen(os.dup(descriptor), "rb") as file:
                    return np.sort(parse(file.read(size_bytes)))
    return np.empty(0, np.int64)


# -------------------------------------------------------------------------------------------- the index that is kept


def _kept_at(path: str, index_cache: str | None) -> str | None:
    """Where the index of ``path`` is kept."""
    if index_cache is None:
        return None
    folder, name = os.path.split(os.path.abspath(path))
    if index_cache == "beside":
        return os.path.join(folder, f".{name}.gdsdata-index")  # hidden: a folder's other files are data
    if index_cache == "user":
        above = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        index_cache = os.path.join(above, "gdsdata", "tar")
    digest = hashlib.sha256(os.fsencode(os.path.join(folder, name))).hexdigest()[:32]
    return os.path.join(index_cache, f"{digest}.gdsdata-index")


def _kept_members(kept_at: str | None, status: os.stat_result) -> Members | None:
    if kept_at is None:
        return None
    try:
        with open(kept_at, "rb") as file:
            kept = file.read(_KEPT.size + status.st_size)  # a member takes more of its tar than of its index
            return unpack_members(kept, status.st_size, status.st_mtime_ns)
    except OSError:
        return None


def _keep(kept_at: str | None, kept: bytes) -> None:
    """Under its name as a whole or not at all. Not synced: after a crash its checksum tells, and it is made again."""
    if kept_at is None:
        return
    temporary = f"{kept_at}.{secrets.token_hex(4)}.tmp"
    try:
        os.makedirs(os.path.dirname(kept_at), exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(kept)
            os.replace(temporary, kept_at)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        folder = os.path.dirname(kept_at)
        message = f"the index of tar files cannot be kept in {folder}, and will be made again: {error.strerror}"
        warnings.warn(message, stacklevel=4)

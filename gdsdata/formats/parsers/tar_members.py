"""The members of a tar's samples, from its ustar, GNU and pax headers.

Sources of the format: POSIX.1-2024 (pax, "ustar Interchange Format"); GNU tar's manual, "Basic Tar
Format"; webdataset ``tariterators.py`` (keys, extensions, names that are left out).
"""

from __future__ import annotations

import re
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from gdsdata.errors import CorruptData

# Reads up to ``length`` bytes at ``offset``: fewer only at the file's end.
Read = Callable[[int, int], bytes]

RECORD_BYTES = 512
_END = bytes(RECORD_BYTES)
# name, size, checksum, magic, prefix
_HEADER = struct.Struct("100s 24x 12s 12x 8s 101x 6s 82x 155s 12x")
_POSIX_MAGIC = b"ustar\0"  # GNU's is "ustar ", and what lies at its prefix is something else
_CHECKSUM_AT = slice(148, 156)
WINDOW_BYTES = 4096
# So many zeros behind a tar are its padding: tar's own records have 10 KiB, and no more than 256
# blocks.
_LOOKED_AT_BYTES = 2**17

_KIND_AT = 156
_MAGIC, _PREFIX_AT = slice(257, 263), 345
# The field whose value is the sample's key.
KEY = "__key__"
_REGULAR = b"0\0007"
_OLD_REGULAR = 0
_EXTENDED = _PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_LINK = b"xgLK"
_WITHOUT_PAYLOAD = b"123456"  # links, devices, folders, pipes: their size field, if any, means something else
_REFUSED = {ord("S"): "a sparse member", ord("M"): "the continuation of a member that began in another volume"}
# Names and attributes take far less; a length that lies must not become memory.
_LONGEST_EXTENDED_BYTES = 2**20
# Other keywords (mtime, uid, ...), which are most of what is written, change nothing here.
_PAX_MATTERS = re.compile(rb"path=|size=|GNU\.sparse\.")
_OVERRIDE = (b"path", b"size")
_PAX_LENGTH = re.compile(rb"([0-9]{1,7}) ")
_MOST_DIGITS = 19  # of 2**63
# A global header's name is every member's, so that a long one would cost each of them.
_LONGEST_NAME_BYTES = 2**14

_METADATA = re.compile(rb"__[^/]*__($|/)")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_UNPACKED_BY = {"gzip": "gunzip", "bzip2": "bunzip2", "xz": "unxz", "zstd": "unzstd", "lz4": "unlz4"}


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


def read_members(
    read: Read, size_bytes: int, path: str, with_keys: bool = False, key_hashes: array[int] | None = None
) -> Members:
    """Follow the headers of a tar of ``size_bytes`` and group its members.

    Args:
        read: gives the file's bytes.
        size_bytes: of the file.
        path: named in errors.
        with_keys: samples have the member `KEY` too, whose payload is their key in a header.
        key_hashes: gets a number for the key of each sample.

    Raises:
        CorruptData, ValueError: as `Tar.index`.
    """
    extensions: dict[str, int] = {}
    ids: dict[bytes, int] = {}  # the same, of extensions as they are written
    columns = sample, extension, begin_bytes, length_bytes = array("q"), array("q"), array("q"), array("q")
    key, current = None, -1
    for name, begin, length, name_at in _regular_members(read, size_bytes, path):
        base = name.rfind(b"/") + 1
        dot = name.find(b".", base)
        if dot <= base or (name.startswith(b"__") and _METADATA.match(name)):
            continue
        if name[:dot] != key:
            key = name[:dot]
            current += 1
            if key_hashes is not None:
                key_hashes.append(hash(key))
            if with_keys:
                if name_at < 0:
                    raise _divided(path, name)
                sample.append(current)
                extension.append(extensions.setdefault(KEY, len(extensions)))
                begin_bytes.append(name_at)
                length_bytes.append(dot)
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


def refuse_torn_samples(members: Members, key_hashes: array[int], read: Read, path: str) -> None:
    """Refuse a tar whose members do not stand in the order of their names.

    Each would be a sample that lacks the others' fields. That is so if most samples are parts of
    others: they have a key together, and no field twice.

    Args:
        members: of this tar.
        key_hashes: of its samples.
        read, path: as of `read_members`.

    Raises:
        ValueError: says how to pack it.
    """
    is_field = np.array([name != KEY for name in members.extensions], bool)
    fields = is_field[members.extension]
    counts = np.bincount(members.extension[fields])
    # If most samples are parts, no field is in three quarters of them: the rest takes a sort.
    if len(counts) < 2 or counts.max() * 4 >= members.samples * 3:
        return
    _, key, parts = np.unique(np.frombuffer(key_hashes, np.int64), return_inverse=True, return_counts=True)
    place = key[members.sample[fields]] * len(members.extensions) + members.extension[fields]
    places, times = np.unique(place, return_counts=True)
    parts[places[times > 1] // len(members.extensions)] = 1
    torn = parts[key] > 1
    if 2 * np.count_nonzero(torn) <= members.samples:
        return
    first = members.begin_bytes[fields][torn[members.sample[fields]]][0]
    name = _parse(read(RECORD_BYTES, int(first) - RECORD_BYTES))[0]
    raise ValueError(
        f"{path}: the sample of {_shown(name)} has other members, and they are not beside it, as in most samples: "
        f"pack the files by their names, as with tar --sort=name -cf train.tar FOLDER"
    )


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
    raise _corrupt(path, begin - RECORD_BYTES, reason)


# ------------------------------------------------------------------------------------- from bytes to members: pure


def _regular_members(read: Read, size_bytes: int, path: str) -> Iterator[tuple[bytes, int, int, int]]:
    """Yield name, payload offset, payload length (bytes) and name's offset of each regular file.

    The last one is -1 if the name does not lie in one piece.
    """
    offset = 0
    # A few KiB of the file: a small member and the headers around it come with one read.
    window, window_begin = b"", 0
    # Records of extended headers: for the next member, and for all that follow.
    own: dict[bytes, bytes] = {}
    common: dict[bytes, bytes] = {}
    own_at = common_at = -1  # offset of the path in them
    while True:
        at = offset - window_begin
        record = window[at : at + RECORD_BYTES]
        if len(record) < RECORD_BYTES:
            window, window_begin, at = read(WINDOW_BYTES, offset), offset, 0
            record = window[:RECORD_BYTES]
            if len(record) < RECORD_BYTES:
                reason = f"the file ends at {size_bytes}, without the zeros that end a tar"
                raise _no_header(path, offset, record, reason)
        if record == _END:
            _refuse_what_follows(read, offset + RECORD_BYTES, size_bytes, path)
            break
        begin = offset + RECORD_BYTES
        kind = record[_KIND_AT]
        # One writer's extended headers are the same bytes again and again, because their names do
        # not matter.
        name, length, wrong = _parse_again(record) if kind in _EXTENDED else _parse(record)
        if wrong:
            raise _no_header(path, offset, record, wrong)

        if kind in _EXTENDED:
            if length > min(_LONGEST_EXTENDED_BYTES, size_bytes - begin):
                raise _corrupt(path, offset, f"it says that {length} bytes of names follow, in a file of {size_bytes}")
            payload = window[at + RECORD_BYTES : at + RECORD_BYTES + length]
            if len(payload) < length:
                payload = read(length, begin)
            if kind == _LONG_NAME:
                own[b"path"], own_at = payload.partition(b"\0")[0], begin
            elif kind != _LONG_LINK and _PAX_MATTERS.search(payload):
                records = _pax_records(payload, path, offset)
                (own if kind == _PAX else common).update(records)
                if b"path" in records:
                    path_at = begin + payload.rfind(b" path=" + records[b"path"] + b"\n") + len(b" path=")
                    own_at, common_at = (path_at, common_at) if kind == _PAX else (own_at, path_at)
        elif kind in _REFUSED:
            raise _refused(path, offset, kind)
        else:
            name_at = -1 if record[_PREFIX_AT] and record[_MAGIC] == _POSIX_MAGIC else offset
            if own or common:
                if b"path" in own:
                    name_at = own_at if own[b"path"] else name_at  # an empty value takes back what was said before
                elif common.get(b"path"):
                    name_at = common_at
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
                yield name, begin, length, name_at
        offset = begin + length + -length % RECORD_BYTES
    if own:
        raise _corrupt(path, offset, "the tar ends where the member of an extended header should be")


def _refuse_what_follows(read: Read, offset: int, size_bytes: int, path: str) -> None:
    """Refuse members behind the zeros that end a tar, from ``offset`` on.

    Other readers drop them in silence.

    Zeros may go on to the file's end, of which so many are looked at. Behind one block alone
    nothing may follow at all.
    """
    for at in range(offset, min(size_bytes, offset + _LOOKED_AT_BYTES), WINDOW_BYTES):
        window = read(WINDOW_BYTES, at)
        if not window.strip(b"\0"):
            continue
        start = (len(window) - len(window.lstrip(b"\0"))) // RECORD_BYTES * RECORD_BYTES
        record = read(RECORD_BYTES, at + start)
        if at + start == offset:
            reason = f"a lone block of zeros stands before it, and {size_bytes - offset} bytes follow"
            raise _corrupt(path, offset - RECORD_BYTES, reason)
        if len(record) == RECORD_BYTES and not _parse(record)[2]:
            reason = (
                f"zeros end the tar there, and another one begins at {at + start}, whose members would be lost: join "
                f"tars with tar --concatenate, or keep them apart"
            )
            raise _corrupt(path, offset - RECORD_BYTES, reason)
        return


def _parse(record: bytes) -> tuple[bytes, int, str]:
    """Return a header's name and payload length, and why it is no header, or ""."""
    name, size, checksum, magic, prefix = _HEADER.unpack(record)
    # Adler-32's low half is the sum that tar asks for, modulo 65521, and takes a twentieth of
    # Python's time.
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
    """Return name and length of a member, after extended headers.

    Args:
        name, length: as its own header has them.
        said: the records of extended headers.
        path, offset: of its header, for errors.
    """
    name = said.get(b"path") or name  # an empty value takes back what was said before
    if b"\0" in name:
        raise _corrupt(path, offset, f"the name {_shown(name)} has a zero byte in it")
    if len(name) > _LONGEST_NAME_BYTES:
        raise _corrupt(path, offset, f"the name {_shown(name)} of {len(name)} bytes is absurd")
    if digits := said.get(b"size"):
        if not digits.isdigit() or len(digits) > _MOST_DIGITS:
            raise _corrupt(path, offset, f"its pax header says size={digits[:40]!r}, which makes no sense")
        length = int(digits)
    return name, length


def _pax_records(payload: bytes, path: str, offset: int) -> dict[bytes, bytes]:
    """Return path and size, as far as a pax header has them.

    Records are ``LENGTH keyword=value\\n``, whose length is of all.
    """
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
        if keyword in _OVERRIDE:
            records[keyword] = value
        at = end
    return records


def _number(field: bytes) -> int:
    """Parse a number in octal or, if the first bit is set, base 256; -1: neither."""
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
    """Return the low half of Adler-32 of a header with this checksum field; -1: none."""
    total = _number(checksum)
    return -1 if total < 0 else (1 + total - len(checksum) * ord(" ") + sum(checksum)) % 65521


def _signed_sum_matches(header: bytes) -> bool:
    """Return whether the sum of signed bytes matches: some old programs computed it."""
    signed = np.frombuffer(header, np.int8).astype(np.int64)
    checksum = header[_CHECKSUM_AT]
    return _number(checksum) == int(signed.sum() - signed[_CHECKSUM_AT].sum()) + len(checksum) * ord(" ")


def _no_header(path: str, offset: int, header: bytes, reason: str) -> Exception:
    """Return the error for a place at which a header should be and is not."""
    compression = next((name for magic, name in _COMPRESSED.items() if header.startswith(magic)), None)
    if offset == 0 and compression:
        return ValueError(
            f"{path} is compressed ({compression}), so that no sample's bytes lie in it as they are: decompress it "
            f"once, as with {_UNPACKED_BY[compression]} FILE"
        )
    return _corrupt(path, offset, reason)


def _corrupt(path: str, offset: int, reason: str) -> CorruptData:
    message = f"{path}: its tar header at offset {offset} is damaged: {reason}; write the file again"
    return CorruptData(message, path, offset, RECORD_BYTES)


def _divided(path: str, name: bytes) -> ValueError:
    return ValueError(
        f"{path}: the name {_shown(name)} stands in two parts of its tar header, so that its key cannot be read as it "
        f"is: write the file with pax or GNU headers, as webdataset does, or leave {KEY!r} out of fields"
    )


def _refused(path: str, offset: int, kind: int) -> ValueError:
    return ValueError(f"{path}: {_REFUSED[kind]} (at offset {offset}) does not lie there as it is: write it plainly")


def _shown(name: bytes) -> str:
    return repr(name if len(name) <= 100 else name[:40] + b"..." + name[-40:])[1:]

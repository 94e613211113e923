"""The members of a zip and their places, from the directory at its end.

npz files and torch's files are zips.

Source of the format: PKWARE's APPNOTE.TXT, 4.3 (the structures), 4.4 (their fields), 4.5.3 (64-bit
sizes and offsets).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gdsdata.errors import CorruptData

# Flags, method, checksum, the two sizes, lengths of name, extra field and comment, offset of the
# local header.
_ENTRY = struct.Struct("<4s4xHH4xIII HHH8xI")
# Lengths of name and extra field.
_LOCAL = struct.Struct("<4s22xHH")
# Entries, the directory's size and offset, length of the comment.
_END = struct.Struct("<4s6xHIIH")
_LOCATOR64 = struct.Struct("<4s4xQ4x")
_END64 = struct.Struct("<4s28xQQQ")
_EXTRA = struct.Struct("<HH")
_ENTRY_MAGIC, _LOCAL_MAGIC, _END_MAGIC = b"PK\1\2", b"PK\3\4", b"PK\5\6"
_LOCATOR64_MAGIC, _END64_MAGIC = b"PK\6\7", b"PK\6\6"

LOCAL_BYTES = _LOCAL.size
# Where time, date and checksum stand in a local header and in an entry, and how many bytes they
# take.
LOCAL_STAMP_AT, ENTRY_STAMP_AT, STAMP_BYTES = 10, 12, 8
# Bytes of the structures behind the directory: with the longest comment, and more than they take
# without one.
LONGEST_END_BYTES = _END64.size + _LOCATOR64.size + _END.size + 0xFFFF
USUAL_END_BYTES = 1024
# A directory of some million members with long names, as torch writes them; a length that lies must
# not become memory.
_LONGEST_DIRECTORY_BYTES = 2**28
_ENCRYPTED, _NAME_IS_UTF8 = 1, 1 << 11
_STORED = 0
_METHODS = {8: "deflated", 12: "bzip2", 14: "LZMA", 93: "zstd"}
_ZIP64, _MOST_32 = 1, 0xFFFFFFFF


class Directory(NamedTuple):
    """Where the directory lies in its file, and how many entries it has."""

    offset: int
    length_bytes: int
    entries: int


class Member(NamedTuple):
    """An entry of the directory.

    Attributes:
        name: as text, and as the bytes that the file has.
        size_bytes: of its content.
        crc32: of its content, as the entry says.
        header_offset: of its local header, behind which the content follows.
        entry_offset: of the entry itself.
        hindrance: why the content does not lie there as it is ("it is deflated"), or "".
    """

    name: str
    name_bytes: bytes
    size_bytes: int
    crc32: int
    header_offset: int
    entry_offset: int
    hindrance: str


def read_directory(read: Callable[[int, int], bytes], path: str, size_bytes: int) -> tuple[Directory, list[Member]]:
    """Return the directory of a file of ``size_bytes``, and its entries.

    Args:
        read: gives bytes of the file, by offset and length; fewer only at its end.
        path: named in errors.
        size_bytes: of the file.

    Raises:
        CorruptData: as `find_directory` and `parse_directory` do, or the file has become shorter.
    """
    for most_bytes in (USUAL_END_BYTES, LONGEST_END_BYTES):
        tail_offset = max(0, size_bytes - most_bytes)
        tail = read(tail_offset, size_bytes - tail_offset)
        directory = find_directory(tail, path, size_bytes)
        if directory is not None:
            break
    else:
        reason = "the file has become shorter while it was read"
        raise _corrupt(path, reason, tail_offset, size_bytes - tail_offset)
    if directory.offset >= tail_offset:
        data = tail[directory.offset - tail_offset :][: directory.length_bytes]
    else:
        data = read(directory.offset, directory.length_bytes)
    return directory, parse_directory(data, directory, path)


def find_directory(tail: bytes, path: str, size_bytes: int) -> Directory | None:
    """Find the directory by the last bytes of a file of ``size_bytes``.

    None: these bytes are too few, and `LONGEST_END_BYTES` of them may show it.

    Raises:
        CorruptData: the file does not end as a zip does, or the directory would not lie where its
            end says.
    """
    tail_offset = size_bytes - len(tail)
    at = tail.rfind(_END_MAGIC)
    while at >= 0 and not _ends_with(tail, at):
        at = tail.rfind(_END_MAGIC, 0, at)
    if at < _END64.size + _LOCATOR64.size and len(tail) < min(size_bytes, LONGEST_END_BYTES):
        return None
    if at < 0:
        raise _corrupt(path, "it does not end as a zip does, so it was cut short", tail_offset, len(tail))
    _, entries, length, offset, _ = _END.unpack_from(tail, at)
    end = tail_offset + at
    if tail[:at][-_LOCATOR64.size :].startswith(_LOCATOR64_MAGIC):
        end, entries, length, offset = _find_end64(tail, at - _LOCATOR64.size, path, tail_offset)
    if offset + length != end or entries * _ENTRY.size > length or length > _LONGEST_DIRECTORY_BYTES:
        reason = f"its directory cannot be {entries} entries in {length} bytes at {offset}, for that ends at {end}"
        raise _corrupt(path, reason, end, size_bytes - end)
    return Directory(offset, length, entries)


def _ends_with(tail: bytes, at: int) -> bool:
    """Return whether the end of a directory, with its comment, is at ``at``."""
    return at + _END.size <= len(tail) and at + _END.size + _END.unpack_from(tail, at)[-1] == len(tail)


def _find_end64(tail: bytes, locator_at: int, path: str, tail_offset: int) -> tuple[int, int, int, int]:
    """Find the 64-bit end; return its place, and directory's entries, length, offset.

    ``locator_at`` is the place of the structure that leads there.
    """
    _, end = _LOCATOR64.unpack_from(tail, locator_at)
    if 0 <= end - tail_offset <= locator_at - _END64.size:
        magic, *said = _END64.unpack_from(tail, end - tail_offset)
        if magic == _END64_MAGIC:
            return end, *said
    raise _corrupt(path, "the 64-bit end of its directory is not there", tail_offset + locator_at, _LOCATOR64.size)


def parse_directory(data: bytes, directory: Directory, path: str) -> list[Member]:
    """Return the entries of a directory, whose bytes are ``data``.

    Raises:
        CorruptData: an entry is none, lies before the file's begin or behind the directory's, or
            has a name that leads out of a folder; or two have one name.
    """
    members: list[Member] = []
    at = 0
    for _ in range(directory.entries):
        if at + _ENTRY.size > len(data) or not data.startswith(_ENTRY_MAGIC, at):
            raise _corrupt(path, f"entry {len(members)} of its directory is none", directory.offset + at, _ENTRY.size)
        _, flags, method, crc32, packed_bytes, size_bytes, name_bytes, extra_bytes, comment_bytes, header_offset = (
            _ENTRY.unpack_from(data, at)
        )
        name_at = at + _ENTRY.size
        extra_at = name_at + name_bytes
        end = extra_at + extra_bytes + comment_bytes
        if end > len(data):
            reason = f"entry {len(members)} would end behind its directory"
            raise _corrupt(path, reason, directory.offset + at, len(data) - at)
        if _MOST_32 in (packed_bytes, size_bytes, header_offset):
            size_bytes, packed_bytes, header_offset = _longer(
                data[extra_at : extra_at + extra_bytes], size_bytes, packed_bytes, header_offset
            )
        raw_name = data[name_at:extra_at]
        name = raw_name.decode("utf-8", "replace") if flags & _NAME_IS_UTF8 else raw_name.decode("cp437")
        if header_offset + LOCAL_BYTES + name_bytes + packed_bytes > directory.offset:
            reason = f"{packed_bytes} bytes of {name!r} cannot follow its header at {header_offset}"
            raise _corrupt(path, reason, directory.offset + at, end - at)
        if "\0" in name or name[:1] == "/" or (".." in name and ".." in name.split("/")):
            raise _corrupt(path, f"the name {name[:80]!r} leads out of a folder", directory.offset + at, end - at)
        hindrance = _hindrance(flags, method) if flags & _ENCRYPTED or method != _STORED else ""
        if not hindrance and size_bytes != packed_bytes:
            reason = f"{name!r} of {size_bytes} bytes is stored in {packed_bytes}"
            raise _corrupt(path, reason, directory.offset + at, end - at)
        members.append(Member(name, raw_name, size_bytes, crc32, header_offset, directory.offset + at, hindrance))
        at = end
    if at != len(data):
        raise _corrupt(path, "its directory is longer than its entries", directory.offset + at, len(data) - at)
    if len({member.name for member in members}) < len(members):
        raise _corrupt(path, "its directory has a name twice", directory.offset, directory.length_bytes)
    return members


def _longer(extra: bytes, *said: int) -> list[int]:
    """Return the numbers that are ``said``.

    Those that 32 bits do not hold stand in the extra field, in this order.
    """
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, length = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == _ZIP64:
            words = iter(struct.unpack_from(f"<{min(length, len(extra) - at) // 8}Q", extra, at))
            return [next(words, one) if one == _MOST_32 else one for one in said]
        at += length
    return list(said)  # of exactly 4 GiB - 1, or lies, which do not fit


def _hindrance(flags: int, method: int) -> str:
    return "it is encrypted" if flags & _ENCRYPTED else f"it is {_METHODS.get(method, f'packed by method {method}')}"


def content_offset(local: bytes, member: Member, directory: Directory, path: str) -> int:
    """Return where the content of a member begins.

    Args:
        local: its local header (`LOCAL_BYTES`), and as much of its name as follows.
        member: which.
        directory: that has it.
        path: named in errors.

    Raises:
        CorruptData: that is no local header, or another member's, or the content would reach into
            the directory.
    """
    named = member.name_bytes.startswith(local[LOCAL_BYTES:][: len(member.name_bytes)])
    if len(local) < LOCAL_BYTES or not named:
        raise _no_header(member, path)
    return content_offsets(local[:LOCAL_BYTES], [member], directory, path)[0]


def content_offsets(locals_: bytes, members: Sequence[Member], directory: Directory, path: str) -> list[int]:
    """Do the same for many, with their local headers (`LOCAL_BYTES` each) joined.

    Raises:
        CorruptData: as `content_offset` does.
    """
    begins = []
    for member, (magic, name_bytes, extra_bytes) in zip(members, _LOCAL.iter_unpack(locals_), strict=True):
        begin = member.header_offset + LOCAL_BYTES + name_bytes + extra_bytes
        is_its_own = magic == _LOCAL_MAGIC and name_bytes == len(member.name_bytes)
        if not is_its_own or begin + member.size_bytes > directory.offset:
            raise _no_header(member, path)
        begins.append(begin)
    return begins


def _no_header(member: Member, path: str) -> CorruptData:
    reason = f"there is no header of {member.name!r} and of its {member.size_bytes} bytes"
    return _corrupt(path, reason, member.header_offset, LOCAL_BYTES)


def _corrupt(path: str, reason: str, offset: int, length: int) -> CorruptData:
    message = f"{path}: damaged at bytes {offset} to {offset + length}: {reason}; write the file again"
    return CorruptData(message, path, offset, length)

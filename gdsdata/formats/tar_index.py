"""The kept index of a tar, so that its headers are followed once.

It has the tar's members, and is used while size and mtime of the tar are the same.
"""

from __future__ import annotations

import json
import os
import struct
import zlib

import numpy as np

from gdsdata.formats import caches
from gdsdata.formats.parsers.tar_members import RECORD_BYTES, Members
from gdsdata.storage.regular import regular
from gdsdata.user_cache import NoHomeFolder
from gdsdata.warn import warn

# Magic with the version, and CRC-32 of all that follows: size in bytes and mtime in ns of the tar,
# number of members, bytes of the extensions, these (JSON), and the members' columns.
_KEPT = struct.Struct("<16s I 4x 4q")
_KEPT_MAGIC = b"gdsdata tar v2\r\n"
_KEPT_CHECKED = 24  # where the bytes begin that the checksum covers
_KEPT_COLUMNS = 4


def pack_members(members: Members, size_bytes: int, mtime_ns: int) -> bytes:
    """Return bytes for `unpack_members`: the members of a tar of this size and mtime."""
    names = json.dumps(members.extensions).encode()
    columns = np.stack(members[1:]).astype("<i8").tobytes()
    said = (size_bytes, mtime_ns, len(members.sample), len(names))
    checksum = zlib.crc32(_KEPT.pack(b"", 0, *said)[_KEPT_CHECKED:] + names + columns)
    return _KEPT.pack(_KEPT_MAGIC, checksum, *said) + names + columns


def unpack_members(kept: bytes, size_bytes: int, mtime_ns: int) -> Members | None:
    """Return the kept members of a tar of this size and last modification.

    None: ``kept`` is of another tar, or damaged.
    """
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
    members = Members(extensions, *columns.astype(np.int64, copy=False))
    return members if _can_be_of(members, size_bytes) else None


def _can_be_of(members: Members, size_bytes: int) -> bool:
    """Return whether a tar of this size can have them.

    Beside the data, another program may have written an index with its checksum.
    """
    names, sample, extension, begin, length = members
    steps = np.diff(sample, prepend=-1)
    return bool(
        all(type(name) is str for name in names)
        and ((steps == 0) | (steps == 1)).all()
        and (sample >= 0).all()
        and ((extension >= 0) & (extension < len(names))).all()
        and ((length >= 0) & (length <= size_bytes) & (begin >= RECORD_BYTES) & (begin <= size_bytes - length)).all()
    )


def place_of(path: str, index_cache: str | None) -> str | None:
    """Return the place of the kept index of ``path``; None: none is kept."""
    if index_cache is None or caches.has_no_version(path):
        return None
    try:
        return caches.place_of(path, index_cache, "tar", "gdsdata-index")
    except NoHomeFolder as error:
        warn(f"gdsdata: the index of tar files cannot be kept: {error.strerror}. It will be made again", UserWarning)
        return None


def kept_members(kept_at: str | None, size_bytes: int, mtime_ns: int) -> Members | None:
    """Return the members that `keep` wrote there for a tar of this size and mtime."""
    if kept_at is None:
        return None
    try:
        with open(kept_at, "rb", opener=regular) as file:
            # A member takes more of its tar than of its index. `read` allocates what it is asked
            # for.
            most_bytes = min(_KEPT.size + size_bytes, os.fstat(file.fileno()).st_size)
            return unpack_members(file.read(most_bytes), size_bytes, mtime_ns)
    except OSError:
        return None


def keep(kept_at: str | None, kept: bytes) -> None:
    """Write the index under its name as a whole or not at all.

    It is not synced: after a crash its checksum differs, and it is made again.
    """
    if kept_at is None:
        return
    try:
        with caches.written(kept_at) as file:
            file.write(kept)
    except OSError as error:
        folder = os.path.dirname(kept_at)
        message = f"gdsdata: the index of tar files cannot be kept in {folder}: {error.strerror}. It will be made again"
        warn(message, UserWarning)

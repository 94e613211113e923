"""A checksum behind the pickle in ``.metadata``. Other readers ignore bytes behind a pickle."""

from __future__ import annotations

import pickle
import zlib

_MARK = b"gdsdata-crc32:"
_DIGITS = 8  # hexadecimal


def with_checksum(content: bytes) -> bytes:
    return content + _MARK + f"{zlib.crc32(content):0{_DIGITS}x}".encode()


def without_checksum(content: bytes) -> bytes:
    """Return a pickle without its checksum, if it has one.

    Raises:
        UnpicklingError: the checksum is another one.
    """
    end = len(content) - len(_MARK) - _DIGITS
    if not content.startswith(_MARK, max(0, end)):
        return content
    if with_checksum(content[:end]) != content:
        raise pickle.UnpicklingError("its bytes differ from its checksum")
    return content[:end]

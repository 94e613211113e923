"""The error for bytes of a file that are not as they should be."""

from __future__ import annotations

from gdsdata.errors import CorruptData


def damaged(
    path: str, offset: int, length: int, reason: str, what: str = "it", remedy: str = "write or copy it again"
) -> CorruptData:
    """Return the error for damaged bytes: cause, place and remedy.

    Args:
        path: of the file.
        offset, length: of the damaged bytes, in bytes.
        reason: a clause that says what is wrong.
        what: the damaged part ("its npy header"); "it" is the file.
        remedy: a clause that says what helps.
    """
    place = f"bytes {offset} to {offset + length}"
    where = f"{path} is damaged at {place}" if what == "it" else f"{path}: {what} ({place}) is damaged"
    return CorruptData(f"{where}: {reason}; {remedy}", path, offset, length)

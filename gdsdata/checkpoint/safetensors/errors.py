"""Errors that code written for `safetensors` catches, and that also are gdsdata's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdsdata.errors import CorruptData, IoError

if TYPE_CHECKING:

    class SafetensorError(Exception):
        """The error of `safetensors`."""

else:
    try:
        from safetensors import SafetensorError
    except ImportError:

        class SafetensorError(Exception):
            """The error of `safetensors`, which is not installed."""


class DamagedFile(CorruptData, SafetensorError):
    """A file's header is damaged, or contradicts the size of the file."""


class NotWritten(IoError, SafetensorError):
    """A file cannot be written."""


class NotInstalled(ImportError):
    """Only the package `safetensors` can do this, and it is not installed."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} needs the package safetensors: pip install safetensors")

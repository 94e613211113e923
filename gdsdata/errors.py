"""The exceptions of gdsdata.

A wrong argument is a plain ``ValueError`` and a missing file a plain ``FileNotFoundError``;
everything else is one of these. A message says what was tried, on which path, offset and length,
what happened, and what to do.

Each argument after the message has a default, because Python rebuilds a pickled exception from its
message and then sets attributes. torch rebuilds a DataLoader worker's from the message alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from errno import EIO
from typing import Any


class GdsdataError(Exception):
    """Base of the errors below: catches what gdsdata itself raises, and nothing else."""


class BackendUnavailable(GdsdataError, RuntimeError):
    """A backend or device that was requested by name is not available.

    ``reasons`` has the result of each probe, a sentence each.
    """

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class IoError(GdsdataError, OSError):
    """The system could not move bytes ``[offset, offset + length)`` of ``path``.

    ``errno`` is the system's number of the error: EIO if only a message is known. ``str()`` is the
    message alone, without the ``[Errno N]`` of ``OSError``.
    """

    def __init__(
        self, errno: int | str, message: str | None = None, path: str = "", offset: int = 0, length: int = 0
    ) -> None:
        if message is None:  # torch knows no number
            errno, message = EIO, str(errno)
        super().__init__(errno, message, path)
        self.path = path
        self.offset = offset
        self.length = length

    @classmethod
    def caused_by(cls, error: OSError, message: str, path: str = "", offset: int = 0, length: int = 0) -> IoError:
        """Return one with the number of ``error``, or with EIO if it has none."""
        return cls(error.errno or EIO, message, path, offset, length)

    def __str__(self) -> str:
        return self.strerror or ""


class NotReplaceable(IoError):
    """No new file can replace ``path``, so it cannot be saved atomically.

    It is a mount point (a single file that is bind-mounted into a container), its folder accepts no
    new file, or its file system takes files only from their beginning to their end.
    """


class CorruptData(GdsdataError, ValueError):
    """Bytes ``[offset, offset + length)`` of ``path`` contradict the format or index.

    The file is shorter than its index says, a header is wrong, or a checksum differs.
    """

    def __init__(self, message: str, path: str = "", offset: int = 0, length: int = 0) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.length = length


class DeviceError(GdsdataError):
    """The accelerator's driver failed; the message has the driver's name for it."""


class StallError(GdsdataError):
    """No awaited byte moved in the time allowed.

    A data set puts its ``stats()`` into ``statistics``. If the storage answers later, memory that
    was being read into or written from may still be accessed.
    """

    def __init__(self, message: str, statistics: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.statistics = dict(statistics or {})


class EngineClosed(GdsdataError):
    """The engine was closed before this call, or during it."""


ITERATOR_CLOSED = "the data set's iterator was closed"  # of an `EngineClosed`


class SaveAborted(GdsdataError):
    """Another rank kept a checkpoint from being saved: ``rank``, or -1 if unknown."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class RankLost(GdsdataError):
    """A process that works together with this one has ended, or was silent for too long."""

"""`Store`: what a scheme's module knows of its servers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from gdsdata.storage.location import Location
from gdsdata.storage.secret import NotPickled, Secret


@dataclass(frozen=True)
class ObjectInfo:
    """One version of an object.

    Attributes:
        url: as users write it.
        size_bytes: of its content.
        tag: its ETag, or the value of Last-Modified if it has none: see `version`.
    """

    url: str
    size_bytes: int
    tag: str

    @property
    def version(self) -> int:
        """63 bits that identify the version: what an index keeps in `mtime_ns`."""
        from gdsdata.io import engine  # late: a data set of local files never asks

        return engine.object_version(self.tag)


@dataclass(frozen=True)
class Access(NotPickled):
    """Everything that GET requests for ranges of one object need.

    It contains secrets: the engine keeps it, and no error, state or log shows it.

    Attributes:
        url: http or https, percent-encoded, signed in its query if the store signs so.
        headers: to send with each request, such as Authorization.
        lifetime_s: for how long it is valid from now on.
    """

    url: str = field(repr=False)
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    lifetime_s: float = 3600.0


class Store(Protocol):
    """The objects of one bucket (or host), reached with one set of credentials. Thread-safe.

    Each method raises ``FileNotFoundError`` if there is no such object or bucket,
    ``PermissionError`` if the credentials do not allow it, and `IoError` for anything else, after
    retries. Messages name the URL without its query, the status and the request id of the server,
    and the remedy.
    """

    def list(self, prefix: str, delimiter: str = "") -> Iterator[ObjectInfo | str]:
        """Yield the objects whose keys begin with ``prefix``, in the order of their keys.

        With ``delimiter``, yields the common prefixes up to it as strings, in place of the objects
        behind them. Pages are requested as they are needed.
        """

    def head(self, key: str) -> ObjectInfo:
        """Return an object's size and tag."""

    def access(self, key: str) -> Access:
        """Return what requests for the object need. Makes no request to the store itself."""

    def doubt_secret(self, age_s: float) -> None:
        """Renew the secret before the next signature, because the server refused an access.

        Args:
            age_s: how long ago `access` returned it. A secret that was fetched later is kept.
        """

    def address(self, key: str) -> str:
        """Return the http(s) URL of an object, without what signs it."""

    def secret(self) -> Secret:
        """Return what requests are signed with now."""

    def put(self, key: str, body: bytes | memoryview) -> ObjectInfo:
        """Write a small object whole, with a checksum that the server verifies."""

    def upload(self, key: str, size_bytes: int) -> Upload:
        """Begin to write a large object in parts. It appears when it is completed."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. It is no error if one does not exist."""


class Upload(Protocol):
    """An object that is written in parts. Parts may be sent by several threads, in any order."""

    part_bytes: int
    """The size of each part but the last one."""

    def send(self, number: int, body: memoryview) -> None:
        """Send part ``number``, counted from 0, with a checksum that the server verifies.

        ``body`` is not used after the call. Retries are inside.
        """

    def complete(self) -> ObjectInfo:
        """Make the object appear, with all parts that were sent."""

    def abort(self) -> None:
        """Delete the parts. Raises nothing."""


__all__ = ["Access", "Location", "ObjectInfo", "Store", "Upload"]

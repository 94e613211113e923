"""URLs of objects: where a path may stand, one of these may."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from gdsdata.errors import IoError

# As csrc/base/remote_object.cpp has it: a path of another kind is a file of this machine.
_URL = re.compile(r"(?:s3|gs|az|https?)://")
SCHEMES = ("s3", "gs", "az", "http", "https")
_KNOWN = tuple(f"{scheme}://" for scheme in SCHEMES)
# Names that other programs have for these schemes, and a place that they have a scheme for.
_OTHER_NAMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "wasb": "az", "wasbs": "az"}
_OF_HUB = "https://huggingface.co/datasets/USER/NAME/resolve/main/FILE"
_ANY_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# As pathlib writes a URL: it takes the second slash for a superfluous one.
_SHORTENED = re.compile(r"(s3|gs|az|https?|file):/(?!/)")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` names an object on a server, and no file."""
    return isinstance(path, str) and _URL.match(path) is not None


def local_path(path: str | os.PathLike[str]) -> str:
    """Return ``path`` as a string; of a ``file://`` URL, the path that it names.

    Raises:
        ValueError: a ``file://`` URL of another host, a URL with a scheme that is not known, or one
            that pathlib has shortened.
    """
    text = os.fspath(path)
    if text.startswith(_KNOWN):
        return text
    if shortened := _SHORTENED.match(text):
        whole = f"{shortened[1]}:{'///' if shortened[1] == 'file' else '//'}{text[shortened.end() :]}"
        raise ValueError(
            f"{text!r} is a URL without its second slash, as pathlib writes it: give the string {whole!r}. A local "
            f"path of this name is written './{text}'"
        )
    if not text.startswith("file://"):
        if _ANY_URL.match(text):
            raise _unknown(text)
        return text
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"{text}: names the host {parts.netloc!r}, but file:// reads this one's files: write file:///")
    return unquote(parts.path)


def local_folder(name: str, folder: str | os.PathLike[str], remedy: str = "") -> str:
    """Return the path of a folder that must be on this machine.

    Args:
        name: of the argument, for the error.
        folder: its path, or a ``file://`` URL.
        remedy: words for what else to give, as ", and ...".

    Raises:
        ValueError: it is another URL.
    """
    text = os.fspath(folder)
    if _ANY_URL.match(text) and not text.startswith("file://"):
        raise ValueError(f"{name}={text!r} is a URL: give a local folder{remedy}")
    return local_path(text)


def not_a_folder(name: str, folder: str) -> IoError:
    """Return the error for an argument that names a file, or something below one.

    Args:
        name: of the argument.
        folder: what was given.
    """
    file = folder
    while not os.path.lexists(file) and os.path.dirname(file) not in ("", file):
        file = os.path.dirname(file)
    message = f"{name}={folder!r} cannot be used, because '{file}' is a file: give the path of a folder"
    return IoError(errno.ENOTDIR, message, folder)


@dataclass(frozen=True)
class Location:
    """An object of a store with buckets: ``scheme://bucket/key``.

    Attributes:
        scheme: one of `SCHEMES`.
        bucket: for ``az``, ``container`` or ``container@account``; for ``http``, the host with its
            port.
        key: of the object, as users write it (not percent-encoded), without the slash in front.
    """

    scheme: str
    bucket: str
    key: str

    @property
    def url(self) -> str:
        """The location as users write it."""
        return f"{self.scheme}://{self.bucket}/{self.key}"


def location_of(url: str) -> Location:
    """Return the parts of an object's URL.

    ``az://container/key`` takes the account from AZURE_STORAGE_ACCOUNT or the store's options, as
    adlfs and obstore do. ``az://container@account.blob.core.windows.net/key`` names it.

    Raises:
        ValueError: ``url`` has no known scheme or no bucket.
    """
    match = _URL.match(url)
    if match is None:
        raise _unknown(url)
    scheme = match.group()[:-3]
    bucket, _, key = url[match.end() :].partition("/")
    if not bucket:
        raise ValueError(f"{url!r} names no bucket: write {scheme}://bucket/key")
    return Location(scheme, bucket, key)


def _unknown(url: str) -> ValueError:
    shown, known = url.partition("?")[0], ", ".join(_KNOWN)
    scheme, _, rest = shown.partition("://")
    own = _OTHER_NAMES.get(scheme.lower(), scheme.lower())
    advice = f". Write {own}://{rest}" if own in SCHEMES else ""
    if scheme.lower() == "hf":
        advice = f". A file of the Hugging Face Hub is {_OF_HUB}"
    return ValueError(
        f"{shown!r} has no scheme that gdsdata knows: give a path, or a URL of {known} or file://{advice}"
    )

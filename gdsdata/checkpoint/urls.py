"""URLs in the place of a checkpoint's path."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdsdata.errors import IoError
    from gdsdata.storage.store import Store

# Imports below are late: a program that names no URL imports nothing of `gdsdata.storage`.


def is_url(path: str) -> bool:
    """Return whether ``path`` names an object on a server, and no file."""
    if "://" not in path:
        return False
    from gdsdata.storage import location

    return location.is_url(path)


def plain_path(path: str) -> str:
    """Return the path of a ``file://`` URL, and everything else as it is.

    Raises:
        ValueError: the URL is of another host, or its scheme is not known.
    """
    if ":/" not in path:
        return path
    from gdsdata.storage.location import local_path

    return local_path(path)


def folder_name(name: str, folder: Any, also: str = "") -> str:
    """Return what a user gave for a folder as str.

    Args:
        name: of the argument, for the error.
        folder: its value.
        also: words for what else it may be, as ", or a URL".

    Raises:
        TypeError: it is no path.
        ValueError: it is empty.
    """
    if not isinstance(folder, (str, bytes, os.PathLike)):
        shown = f"{name}={folder!r:.100}"
        raise TypeError(f"{shown} is of type {type(folder).__name__}: give the path of a folder{also}")
    if not (found := os.fsdecode(folder)):
        raise ValueError(f"{name}='' is empty: give the path of a folder (the current one is '.'){also}")
    return found


def local_folder(name: str, folder: str | os.PathLike[str], remedy: str = "") -> str:
    """Return the path of a folder that must be on this machine: see `location.local_folder`."""
    path = os.fsdecode(folder)
    if ":/" not in path:
        return path
    from gdsdata.storage import location

    return location.local_folder(name, path, remedy)


def not_a_folder(name: str, folder: str) -> IoError:
    """Return the error for an argument that names a file: see `location.not_a_folder`."""
    from gdsdata.storage import location

    return location.not_a_folder(name, folder)


def store_and_key(url: str) -> tuple[Store, str]:
    """Return the store of an object's URL, and the object's key.

    Raises:
        ValueError: the URL, or the settings of its store, are wrong.
    """
    from gdsdata.storage.stores import store_of

    store, location = store_of(url)
    return store, location.key


def store_and_name(url: str) -> tuple[Store, str]:
    """Return the store of a URL that names one object, and the object's key.

    Raises:
        IoError: it names a bucket or a folder. A request for it would change or read these.
        ValueError: as `store_and_key`.
    """
    store, key = store_and_key(url)
    is_folder = not key or key.endswith("/")
    if is_folder and not url.startswith("http"):  # a web server may have something there
        from gdsdata.errors import IoError

        what = "folder" if key else "bucket"
        message = f"'{url}' names a {what}, and no object in it: add a name, as '{joined(url, 'model.pt')}'"
        raise IoError(errno.EISDIR, message, url)
    return store, key


def joined(url: str, *names: str) -> str:
    """Return the URL of something below a folder."""
    return "/".join([url.rstrip("/"), *names])


def last_part(path: str) -> str:
    """Return the last part of a path or URL, without a query, which may have secrets."""
    return os.path.basename((path.partition("?")[0] if is_url(path) else path).rstrip("/"))

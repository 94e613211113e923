"""Cached files: their places. They are written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import BinaryIO

from gdsdata.storage.paths import absolute
from gdsdata.storage.urls import is_remote
from gdsdata.user_cache import NoHomeFolder, user_cache
from gdsdata.whole_numbers import shown


def folder_of(where: str | os.PathLike[str], kind: str) -> str:
    """Return the folder that ``where`` means.

    ``"user"`` is ``~/.cache/gdsdata/KIND``; ``XDG_CACHE_HOME`` moves it.

    Raises:
        ValueError: it is a URL.
        NoHomeFolder: ``"user"``, and there is none.
    """
    return _given(where) if where != "user" else os.path.join(user_cache(), "gdsdata", kind)


def check_place(name: str, where: object) -> None:
    """Refuse an argument of a format that names no place for kept files.

    Args:
        name: of the argument, for the error.
        where: its value.

    Raises:
        TypeError: it is of another type.
        ValueError: it is empty.
    """
    places = "'user', 'beside', the path of a folder, or None"
    if where is not None and not isinstance(where, (str, os.PathLike)):
        raise TypeError(f"{name}={shown(where)} must be {places}")
    if where == "":
        raise ValueError(f"{name}='' is empty: give {places}")


def place_of(path: str, where: str, kind: str, ending: str) -> str:
    """Return the place of a kept file that belongs to ``path``.

    It is in a folder (`folder_of`), or ``"beside"`` the file. For a URL, ``"beside"`` and
    ``"user"`` mean the cache of objects, if there is one.
    """
    if is_remote(path):  # beside an object nothing is kept: it is another's
        digest = hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:32]
        return os.path.join(folder_of_objects(where, kind), f"{digest}.{ending}")
    folder, name = os.path.split(absolute(path))
    if where == "beside":
        return os.path.join(folder, f".{name}.{ending}")  # hidden: a folder's other files are data
    digest = hashlib.sha256(os.fsencode(os.path.join(folder, name))).hexdigest()[:32]
    return os.path.join(folder_of(where, kind), f"{digest}.{ending}")


def has_no_version(path: str) -> bool:
    """Return whether ``path`` is an object whose server names no version: nothing of it is kept."""
    if not is_remote(path):
        return False
    from gdsdata.storage import objects

    return objects.identity_of(path).version == objects.no_version()


def folder_of_objects(where: str | os.PathLike[str], kind: str) -> str:
    """Return the folder that ``where`` means for what is made of objects."""
    if where not in ("user", "beside"):
        return _given(where)
    from gdsdata.storage.settings import folder_of_derived

    return folder_of_derived(kind) or folder_of("user", kind)


def _given(where: str | os.PathLike[str]) -> str:
    folder = os.fspath(where)
    if ":/" not in folder:
        return folder
    from gdsdata.storage.location import local_folder

    return local_folder("cache", folder)


def make_folder(folder: str) -> None:
    """Make a folder for cached files. Below ``~/.cache`` it is this user's alone, as XDG wants it.

    Raises:
        OSError: it cannot be made.
    """
    is_users = False
    with contextlib.suppress(NoHomeFolder):
        is_users = os.path.abspath(folder).startswith(os.path.abspath(folder_of("user", "")) + os.sep)
    os.makedirs(folder, 0o700 if is_users else 0o777, exist_ok=True)


def lock_opener(path: str, flags: int) -> int:
    """Open a file that is only locked.

    A link in its place, which another user may have made, is not followed.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


@contextlib.contextmanager
def written(path: str) -> Iterator[BinaryIO]:
    """Yield a file to write, which has the name ``path`` after the block.

    An exception in the block deletes it.

    Raises:
        OSError: of any step, and nothing is left.
    """
    make_folder(os.path.dirname(path))
    temporary = f"{path}.{os.urandom(4).hex()}.tmp"
    try:
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise

"""The index.json of MDS and LitData: found, read, and its members checked."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, overload

from gdsdata.errors import CorruptData
from gdsdata.formats.parsers.magics import SHARDS_INDEX
from gdsdata.storage.opened import read_whole
from gdsdata.whole_numbers import shown

# Offsets have 32 bits, so nothing in a shard is longer.
LARGEST_BYTES = 2**32 - 1
# Half a million shards have some 200 MB of it.
LONGEST_JSON_BYTES = 2**30

T = TypeVar("T")


def checked_paths(name: str, paths: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return an argument that lists paths of shards as strings.

    Raises:
        TypeError: it does not.
    """
    try:
        if not isinstance(paths, (str, bytes)):
            return tuple(os.fspath(path) for path in paths)
    except TypeError:
        pass
    raise TypeError(f"{name}={shown(paths)} must be a list of the shards' paths")


def index_files(paths: Sequence[str], reader: str) -> list[str]:
    """Return the ``paths`` called index.json; the error names the format ``reader``.

    Raises:
        ValueError: none is.
    """
    found = [path for path in paths if os.path.basename(path) == SHARDS_INDEX]
    if not found:
        raise ValueError(
            f"{reader}: none of the {len(paths)} files such as {paths[0] if paths else None} is called {SHARDS_INDEX}, "
            f"which says what shards there are: pass the folder that has it, or its own path"
        )
    return found


def read_json(path: str) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        CorruptData: it is no JSON, or no object.
        FileNotFoundError, IoError: it is not available.
    """
    text = read_whole(path, LONGEST_JSON_BYTES).tobytes()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as reason:  # ValueError: no JSON, no Unicode, a number of 5000 digits
        raise CorruptData(f"{path} is no JSON: {reason}; write it again", path, 0, len(text)) from None
    return checked(value, dict, path, "it")


@overload
def checked(value: object, kind: type[T], path: str, what: str) -> T: ...


@overload
def checked(value: object, kind: tuple[type, ...], path: str, what: str) -> Any: ...


def checked(value: object, kind: type | tuple[type, ...], path: str, what: str) -> Any:
    """Return ``value`` if it has exactly one of these types: true is no number.

    Raises:
        CorruptData: it is not; the error says ``what`` of ``path`` it is.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:
        names = " or ".join(one.__name__ for one in kinds)
        raise CorruptData(f"{path}: {what} is {reprlib.repr(value)}, not of type {names}; write it again", path)
    return value


@overload
def member(record: dict[str, Any], key: str, kind: type[T], path: str) -> T: ...


@overload
def member(record: dict[str, Any], key: str, kind: tuple[type, ...], path: str) -> Any: ...


def member(record: dict[str, Any], key: str, kind: type | tuple[type, ...], path: str) -> Any:
    """Return ``record[key]`` of one of these types (`checked`); None if it is missing."""
    return checked(record.get(key), kind, path, key)


def count_member(record: dict[str, Any], key: str, path: str) -> int:
    """Return ``record[key]``, a number of bytes or samples.

    Raises:
        CorruptData: it is none, or absurd.
    """
    count = member(record, key, int, path)
    if not 0 <= count <= LARGEST_BYTES:
        raise CorruptData(f"{path}: {key} is {reprlib.repr(count)}, not in 0 to {LARGEST_BYTES}; write it again", path)
    return count


def shard_path(said: object, index_path: str) -> str:
    """Return the path of a shard in index.json, which lies in its folder or below.

    Raises:
        CorruptData: it is no such name: an index.json from elsewhere must not make one read other
            files.
    """
    name = checked(said, str, index_path, "a shard's name")
    if not name or "\0" in name or os.path.isabs(name) or ".." in name.split("/") or not _is_encodable(name):
        raise CorruptData(
            f"{index_path}: a shard is called {reprlib.repr(name)}, which is no path below this folder", index_path
        )
    return os.path.join(os.path.dirname(index_path), name)


def _is_encodable(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True

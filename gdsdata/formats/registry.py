"""Find the format of files."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from gdsdata.formats.catalog import FORMATS, Entry
from gdsdata.formats.index import Format
from gdsdata.formats.parsers import magics
from gdsdata.formats.parsers.magics import HEAD_BYTES
from gdsdata.storage.heads import read_heads

_LONGEST_JSON_BYTES = 2**20
_MOST_SPLITS = 20  # that an error names
_MOST_ENDINGS = 20  # of files that are looked at for an error


class Recogniser:
    """A format that is known by a file.

    Args:
        name: of the format, for errors.
        ``recognises``: called with the first `HEAD_BYTES` of a file (fewer if it is shorter) and
            its path.
        make: returns the format with its defaults.
    """

    def __init__(self, name: str, recognises: Callable[[bytes, str], bool], make: Callable[[], Format]) -> None:
        self.name, self.recognises, self.make = name, recognises, make


def _default_of(entry: Entry) -> Format:
    """Import a format of the catalog, and return it with its defaults."""
    return getattr(importlib.import_module(f".{entry.module}", __package__), entry.name)()


# Asked in this order.
_recognisers = [
    Recogniser(entry.title, getattr(magics, entry.recogniser), partial(_default_of, entry))
    for entry in FORMATS
    if entry.recogniser
]
_OWN = len(_recognisers)


def register(name: str, recognises: Callable[[bytes, str], bool], make: Callable[[], Format]) -> None:
    """Have data sets recognize your own format; see ``examples/own_format.py``.

    ``recognises`` is called with the first 512 bytes of a file (fewer if it is shorter) and its
    path. It returns whether the file has this format. The format that was registered last is asked
    first. A known name is replaced.

    Args:
        name: of the format, for errors.
        make: returns the format with its defaults: an object with the method of
            `gdsdata.formats.index.Format`.
    """
    _recognisers[:] = [one for one in _recognisers if one.name != name]
    _recognisers.insert(0, Recogniser(name, recognises, make))


def default_named(name: str) -> Format | None:
    """Return the package's own format of this name, unless other formats are asked before it."""
    if len(_recognisers) > _OWN:
        return None
    return next((_default_of(entry) for entry in FORMATS if entry.name == name and entry.recogniser), None)


def _refuse_no_data(paths: Sequence[str]) -> NoReturn:
    """Refuse files that stand beside data, and are none themselves.

    Raises:
        ValueError: says where the data may be.
    """
    folder = os.path.dirname(paths[0])
    for path in paths:
        if os.path.basename(path) == magics.DATASET_DICT:
            splits = _splits_in(path)
            names = ", ".join(map(repr, splits)) or "none that it names"
            example = splits[0] if splits else "train"
            raise ValueError(
                f"{folder} is a DatasetDict, whose splits are folders of their own ({names}): pass the name of one, as "
                f"in split={example!r}, or its folder as the source, as in {f'{folder}/{example}'!r}"
            )
    raise ValueError(
        f"{folder} has no files with data, only {', '.join(map(os.path.basename, paths))}: name the folder below it "
        f"that has them, or a glob, as in {f'{folder}/**/*.parquet'!r}"
    )


def refuse_another_kind(path: str, paths: Sequence[str]) -> None:
    """Refuse a file whose name and bytes are of another kind or format than the first file's.

    Args:
        path: of a file that the format of the first file calls damaged.
        paths: all files.

    Raises:
        ValueError: says what to do.
    """
    ending = os.path.splitext(path)[1]
    if not ending[1:].isalpha() or ending == os.path.splitext(paths[0])[1] or any(map(_is_index, paths)):
        return  # it may be data: a.tfrecord-00001-of-00002, or a shard of an index
    (head,), _, _ = read_heads([path], HEAD_BYTES)
    kind = _kind_of(head, path)
    if kind is None:
        _refuse_another_kind(head, path, paths)
        return
    first = next(itertools.filterfalse(magics.is_beside_data, paths))
    (head,), _, _ = read_heads([first], HEAD_BYTES)
    kind_of_first = _kind_of(head, first)
    if kind_of_first is not None and kind_of_first is not kind:
        raise ValueError(
            f"{path} is {kind.name}, and {first} is {kind_of_first.name}: a data set has files of one format, so name "
            f"those, as in {os.path.join(os.path.dirname(path), f'*{ending}')!r}"
        )


def refuse_other_format(path: str, format: Format) -> None:
    """Refuse a file that shows another format than the one that the caller named.

    Args:
        path: of a file that ``format`` calls damaged.

    Raises:
        ValueError: says what to do.
    """
    if not any(entry.recogniser and entry.name == type(format).__name__ for entry in FORMATS):
        return  # records, and formats of callers: their files may begin with anything
    (head,), _, _ = read_heads([path], HEAD_BYTES)
    kind = _kind_of(head, path)
    if kind is None:
        _refuse_another_kind(head, path, [path])
        return
    its, given = type(kind.make()).__name__, type(format).__name__
    if its != given:
        raise ValueError(
            f"{path} is {kind.name}, and format={given}(...) reads other files: leave format= out, or pass {its}(...)"
        )


def _kind_of(head: bytes, path: str) -> Recogniser | None:
    return next((known for known in _recognisers if known.recognises(head, path)), None)


def _refuse_another_kind(head: bytes, path: str, paths: Sequence[str]) -> None:
    """Refuse a file of a kind that is known and not read, or beside files that are.

    Raises:
        ValueError: says what to do.
    """
    from gdsdata.formats.other_kinds import advice_about

    folder = os.path.dirname(path)
    by_ending = {os.path.splitext(one)[1]: one for one in reversed(paths)}
    for ending, other in list(by_ending.items())[:_MOST_ENDINGS]:
        (head_of_other,), _, _ = read_heads([other], HEAD_BYTES)
        if other != path and (known := _kind_of(head_of_other, other)) is not None:
            folder_of_other, name = os.path.split(other)
            where = f"{name} beside it" if folder_of_other == folder else other
            raise ValueError(
                f"{path} is no data, and {where} is {known.name}: name the files that are, as in "
                f"{os.path.join(folder_of_other, f'*{ending}') if ending else other!r}"
            )
    if (advice := advice_about(head, path)) is not None:
        raise ValueError(f"{path} {advice}")


def _splits_in(path: str) -> list[str]:
    from gdsdata.storage.opened import open_file  # late: this is for an error

    with open_file(path) as file, contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        splits = json.loads(file.read(0, min(file.size_bytes, _LONGEST_JSON_BYTES)))["splits"]
        return [name for name in splits if isinstance(name, str)][:_MOST_SPLITS]
    return []


_INDEX_ENDINGS = (magics.SHARDS_INDEX, ".idx")


def _is_index(path: str) -> bool:
    """Return whether the file says what the files beside it are."""
    return os.path.basename(path) == magics.SHARDS_INDEX or path.endswith(".idx")


def recognise(paths: Sequence[str]) -> Format:
    """Return the format of ``paths``, by the magic of an index or else of the first.

    Raises:
        TypeError: it is one path, and no list of paths.
        ValueError: there are no paths, or no format has its magic. Bare tokens and records cannot
            be recognized by their bytes.
        FileNotFoundError, IoError: the file is not available.
    """
    if isinstance(paths, str):
        raise TypeError(f"paths={paths!r} is one path: give a list, as [{paths!r}]")
    if not paths:
        raise ValueError("paths is empty: name at least one file")
    joined = "\0".join(paths)  # one search in all names: 0.1 s for a million, which take 0.7 s one by one
    if any(name in joined for name in magics.BESIDE_DATA):
        paths = list(itertools.filterfalse(magics.is_beside_data, paths)) or paths
    index = other = paths[0]
    if any(name in joined for name in _INDEX_ENDINGS):
        index = next(filter(_is_index, paths), paths[0])
        other = next(itertools.filterfalse(_is_index, paths), paths[0])  # if no format here has such an index
    for path in dict.fromkeys((index, other)):
        (head,), _, _ = read_heads([path], HEAD_BYTES)
        if (known := _kind_of(head, path)) is not None:
            return known.make()
    if magics.is_beside_data(paths[0]):
        _refuse_no_data(paths)
    _refuse_another_kind(head, path, paths)
    if not head:
        raise ValueError(f"{path} is empty (0 bytes), and does not show its format: write it again, or remove it")
    hint = "it has no npy magic, so it may be bare tokens; " if path.endswith(".npy") else ""
    names = ", ".join(known.name for known in _recognisers)
    raise ValueError(
        f"{path} does not show its format (it starts with {head[:8]!r}, as none of {names} does): {hint}pass "
        f'format=Tokens("uint16", seq_len=...), Records(dtype, shape) or Npy(mode)'
    )

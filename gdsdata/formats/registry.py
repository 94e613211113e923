"""Find the files that a user's sources name, and the files' format."""

from __future__ import annotations

import glob
import importlib
import itertools
import os
import stat
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from gdsdata.errors import IoError
from gdsdata.formats.catalog import FORMATS, Entry
from gdsdata.formats.index import Format, read_heads
from gdsdata.formats.parsers import magics
from gdsdata.formats.parsers.magics import HEAD_BYTES

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def list_files(source: Source) -> list[str]:
    """Return the files that ``source`` means: absolute paths, each once, sorted.

    The order is the same on every machine, so that the same seed shuffles alike everywhere.

    Args:
        source: a file; a directory (its own files, without hidden ones); a glob, where ``**``
            crosses directories; or a sequence of these.

    Raises:
        FileNotFoundError: one of them means no file.
        IoError: a directory cannot be listed.
        ValueError: an empty sequence.
    """
    sources = [source] if isinstance(source, (str, os.PathLike)) else source
    if not sources:
        raise ValueError("source is an empty list: name at least one file, directory or glob")
    return sorted({os.path.abspath(file) for one in sources for file in _expand(os.fspath(one))})


def _expand(source: str) -> list[str]:
    try:
        mode = os.stat(source).st_mode  # before glob, because a name may have brackets
    except OSError:
        mode = 0
    if stat.S_ISDIR(mode):
        try:
            files = [entry.path for entry in os.scandir(source) if entry.is_file() and not entry.name.startswith(".")]
        except OSError as error:
            message = f"listing the directory {source} failed: {error.strerror}"
            raise IoError.caused_by(error, message, source) from error
    elif mode:
        files = [source]
    else:
        files = [path for path in glob.glob(source, recursive=True) if os.path.isfile(path)]
    if not files:
        raise FileNotFoundError(f"{source} (from {os.getcwd()}) is no file, no directory with files and no glob of any")
    return files


class Recogniser(NamedTuple):
    """A format that is known by a file.

    Attributes:
        name: of the format, for errors.
        ``recognises``: called with the first `HEAD_BYTES` of a file (fewer if it is shorter) and
            its path.
        make: returns the format with its defaults.
    """

    name: str
    recognises: Callable[[bytes, str], bool]
    make: Callable[[], Format]


def _default_of(entry: Entry) -> Format:
    """Import a format of the catalog, and return it with its defaults."""
    return getattr(importlib.import_module(f".{entry.module}", __package__), entry.name)()


# Asked in this order.
_recognisers = [
    Recogniser(entry.title, getattr(magics, entry.recogniser), partial(_default_of, entry))
    for entry in FORMATS
    if entry.recogniser
]


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


def _tells(path: str) -> bool:
    """Return whether the file says what the files beside it are."""
    return os.path.basename(path) == magics.SHARDS_INDEX or path.endswith(".idx")


def recognise(paths: Sequence[str]) -> Format:
    """Return the format of ``paths``, by the magic of an index or else of the first.

    Raises:
        ValueError: no format has its magic. Bare tokens and records cannot be recognized by their
            bytes.
        FileNotFoundError, IoError: the file is not available.
    """
    paths = list(itertools.filterfalse(magics.is_beside_arrow, paths)) or paths
    telling = next(filter(_tells, paths), paths[0])
    other = next(itertools.filterfalse(_tells, paths), paths[0])  # if no format here has such an index
    for path in dict.fromkeys((telling, other)):
        (head,), _, _ = read_heads([path], HEAD_BYTES)
        for known in _recognisers:
            if known.recognises(head, path):
                return known.make()
    hint = "it has no npy magic, so it may be bare tokens; " if path.endswith(".npy") else ""
    names = ", ".join(known.name for known in _recognisers)
    raise ValueError(
        f"{path} does not tell its format (it starts with {head[:8]!r}, as none of {names} does): {hint}pass "
        f'format=Tokens("uint16", seq_len=...), Records(dtype, shape) or Npy(mode)'
    )

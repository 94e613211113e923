"""Folders of the package `datasets`: which of their files have the rows, and in which order.

`save_to_disk` lists these files in state.json, and `load_from_disk` reads them in that order. When
the data set is mapped, filtered, sorted or shuffled, the package leaves results of that beside
them: `cache-HASH.arrow`. Its own folders of data sets that it has downloaded or built have such
files too, beside dataset_info.json and without state.json.

Versions before 1.18 did not apply the choice and the order of rows (`select`, `shuffle`) when they
saved: an index file has them. Versions before 1.2 may list parts of files. Both are refused.

Source: https://github.com/huggingface/datasets, ``src/datasets/arrow_dataset.py`` (versions 1.1.3,
1.6.2, 1.18.4, 2.0.0, 4.7.0 and 5.2.0).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gdsdata.errors import CorruptData
from gdsdata.formats.parsers import magics

# A million files have 70 MB of it.
_LONGEST_JSON_BYTES = 2**27
# Results, files that are being written, and locks.
_LEFT = re.compile(r"cache-.*\.arrow|tmp[a-z0-9_]{8}|.*\.lock", re.DOTALL)
_OF_INDICES = ("_indices_data_files", "_indices_files")
_SAVE_AGAIN = "load it with the version of datasets that wrote it, and save what flatten_indices() returns"


class Chosen(NamedTuple):
    """Files that are data.

    Attributes:
        files: in any order.
        lists: files that have an order, one list a folder.
        states: every state.json that was read.
    """

    files: list[str]
    lists: list[list[str]]
    states: list[str]


def data_of(files: list[str], found: Sequence[str]) -> Chosen:
    """Leave out what `datasets` says, or is known, to be no data.

    Args:
        files: that may be data; paths or URLs.
        found: all files of their folders, ``files`` among them.

    Raises:
        FileNotFoundError: a state.json lists a file that is not in its folder.
        ValueError: it lists what cannot be read by whole files.
        IoError: it cannot be read.
    """
    joined = "\0".join(found)  # one search in all names is faster
    if not any(f"/{name}" in joined for name in (magics.SAVED_STATE, magics.DATASET_INFO)):
        return Chosen(files, [], [])
    beside = _by_folder(found)
    lists: list[list[str]] = []
    states: list[str] = []
    kept: list[str] = []
    for folder, some in _by_folder(files).items():
        names = {os.path.basename(path): path for path in beside[folder]}
        listed = None
        if magics.SAVED_STATE in names:
            states.append(names[magics.SAVED_STATE])
            listed = _listed_in(names[magics.SAVED_STATE], names)
        if listed is not None:
            lists.append(listed)
            some = list(set(listed).intersection(some))
        elif magics.DATASET_INFO in names:
            some = [path for path in some if not _LEFT.fullmatch(os.path.basename(path))]
        kept += some
    are_data = any(not magics.is_beside_data(path) for path in kept)
    return Chosen(kept if are_data else files, lists, states)


def in_order(paths: Iterable[str], lists: Iterable[list[str]]) -> list[str]:
    """Return paths in the order of names; those of a list in its order, at the places they have."""
    ordered = sorted(paths)
    for listed in lists:
        if listed != sorted(listed):
            members = set(listed)
            places = [place for place, path in enumerate(ordered) if path in members]
            there = {ordered[place] for place in places}
            for place, path in zip(places, [path for path in listed if path in there], strict=True):
                ordered[place] = path
    return ordered


def _by_folder(files: Iterable[str]) -> dict[str, list[str]]:
    folders: dict[str, list[str]] = {}
    for path in files:
        folders.setdefault(os.path.dirname(path), []).append(path)
    return folders


def _listed_in(path: str, names: dict[str, str]) -> list[str] | None:
    """Return the files that a state.json lists; None if another program wrote it.

    Args:
        path: of state.json.
        names: of the files in its folder, with their paths.

    Raises:
        FileNotFoundError, ValueError, IoError: as `data_of`.
    """
    from gdsdata.storage.opened import read_whole  # late: few folders need it

    try:
        state = json.loads(read_whole(path, _LONGEST_JSON_BYTES).tobytes())
    except (CorruptData, ValueError, RecursionError):  # ValueError: no JSON, no Unicode, a number of 5000 digits
        return None
    entries = state.get("_data_files") if isinstance(state, dict) else None
    if not isinstance(entries, list) or not entries:
        return None
    if not all(isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in entries):
        return None
    for key in _OF_INDICES:
        if state.get(key):
            raise ValueError(
                f"{path} lists index files ({key}), which choose and order the rows of a data set, and are not read: "
                f"{_SAVE_AGAIN}"
            )
    listed: dict[str, None] = {}
    for entry in entries:
        name = entry["filename"]
        if name not in names:
            raise FileNotFoundError(
                f"{path} lists {name!r}, which is not in its folder: fetch the file, or save the data set again"
            )
        if entry.get("skip") is not None or entry.get("take") is not None:
            raise ValueError(
                f"{path} lists a part of {name!r} (skip, take), and only whole files are read: {_SAVE_AGAIN}"
            )
        if names[name] in listed:
            raise ValueError(f"{path} lists {name!r} twice, and each file is read once: {_SAVE_AGAIN}")
        listed[names[name]] = None
    return list(listed)

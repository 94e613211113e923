"""Folders of the package `datasets`: which of their files have the rows, and in which order.

`save_to_disk` lists these files in state.json, and `load_from_disk` reads them in that order. When
the data set is mapped, filtered, sorted or shuffled, the package leaves results of that beside
them: `cache-HASH.arrow`. Its own folders of data sets that it has downloaded or built have such
files too, beside dataset_info.json and without state.json.

Versions as old as 1.6 did not apply the choice and the order of rows (`select`, `shuffle`) when
they saved: an index file has them. Version 1.1 may list parts of files. Both are refused.

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
_LEFT = re.compile(r"(cache-.*\.arrow|tmp[a-z0-9_]{8}|.*\.lock)\Z", re.DOTALL)
_SAYING = (f"/{magics.SAVED_STATE}", f"/{magics.DATASET_INFO}")
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
    if not any(name in joined for name in _SAYING):
        return Chosen(files, [], [])
    saying = {path for path in found if path.endswith(_SAYING)}
    beside = _by_folder(found)
    lists: list[list[str]] = []
    states: list[str] = []
    kept: list[str] = []
    for folder, some in (beside if files is found else _by_folder(files)).items():
        listed = None
        if (state := f"{folder}/{magics.SAVED_STATE}") in saying:
            states.append(state)
            listed = _listed_in(state, beside[folder])
        if listed is not None:
            lists.append(listed)
            some = list(set(listed).intersection(some))
        elif f"{folder}/{magics.DATASET_INFO}" in saying:
            others = [path for path in some if not _LEFT.match(path, len(folder) + 1)]
            some = some if all(map(magics.is_beside_data, others)) else others
        kept += some
    return Chosen(kept or files, lists, states)


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
        folders.setdefault(path.rpartition("/")[0], []).append(path)
    return folders


def _listed_in(path: str, beside: list[str]) -> list[str] | None:
    """Return the files that a state.json lists; None if another program wrote it.

    Args:
        path: of state.json.
        beside: all files of its folder.

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
    names = {os.path.basename(one): one for one in beside}
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

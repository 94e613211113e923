"""Find the files of a split by their names: ``split="train"``.

The conventions are those of the Hugging Face Hub, of ``save_to_disk``, and of the folders that MDS
and LitData have for splits. Each file gets one label:

1. Beside ``dataset_dict.json``, it is the name of the folder.
2. If the folder ``data`` has files such as ``data/NAME-00000-of-00002.parquet``, these alone have
   labels: NAME.
3. Otherwise it is the name of a folder above the file that has a word for a split (`_WORDS`), or
   else the file's own name without numbers and ending, if that has such a word.
4. A file without such a word has the name of its outermost folder (not ``data``), or its own.

A split has the files whose label is its very name. If there are none, it has those whose label is
another word for it. If there are none either, it has those whose label contains such a word
(``imdb-train``), but under the rules 1 and 2 names are exact. If no label contains a word, all
files are ``train``, or what the folder itself is called.

Source of the Hub's conventions: https://github.com/huggingface/datasets,
``src/datasets/data_files.py`` (version 4.7).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from gdsdata.formats.parsers import magics
from gdsdata.storage.urls import without_query

_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SPLIT_OF = {word: split for split, words in _WORDS.items() for word in words}
_BETWEEN = "-._ 0-9/"  # what separates words in labels
_WORD = re.compile(rf"(?<![^{_BETWEEN}])(?:{'|'.join(SPLIT_OF)})(?![^{_BETWEEN}])")
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}.*\..+", re.ASCII)
_NAME_OF_SHARDS = re.compile(r"\w+(\.\w+)*")
# Endings of files that stand beside data in a project, as in train.py.
_NO_DATA = (".py", ".ipynb", ".sh", ".md", ".yaml", ".yml", ".toml", ".log")
_MOST_NAMED = 20  # splits that an error names
_LONGEST_README_BYTES = 2**20


class Labels(NamedTuple):
    """The files of a folder by their labels.

    Attributes:
        in_folders: files that have the label from a folder.
        by_name: files that have it from their own name.
        are_exact: a split has exactly its name here (the rules 1 and 2).
    """

    in_folders: Mapping[str, list[str]]
    by_name: Mapping[str, list[str]]
    are_exact: bool

    def all(self) -> set[str]:
        """Return the labels."""
        return {*self.in_folders, *self.by_name}

    def files(self) -> list[str]:
        """Return all files that have a label."""
        return [path for paths in (*self.in_folders.values(), *self.by_name.values()) for path in paths]

    def has_words(self) -> bool:
        """Return whether any label has a word for a split."""
        return any(splits_in(label) for label in self.all())

    def named(self) -> list[str]:
        """Return the labels that may be splits: not the names of any files."""
        files = (label for label, paths in self.by_name.items() if splits_in(label) or _are_shards(paths))
        return sorted({*self.in_folders, *files})


def files_of_split(split: str, root: str, files: Iterable[str]) -> list[str]:
    """Return the files of a split.

    Args:
        split: its name.
        root: the folder that has the files, whose names count from there on.
        files: all files below it, or those that are meant; paths or URLs.

    Raises:
        ValueError: there is no such split, or the names do not say which files it has.
    """
    files = list(files)
    labels = labels_of(root, files)
    if chosen := _labels_of_split(split, labels, root):
        found = _of_one_kind(split, labels, chosen)
        if not labels.are_exact and len({os.path.dirname(path) for path in found}) > 1:
            _refuse_configurations(split, root, files)
        return _outermost(found)
    declared, own = declared_in(root, files), os.path.basename(root.rstrip("/"))
    has_declared = declared is not None and declared.has_files
    names = labels.named()
    if not labels.are_exact and not labels.has_words():
        names = [own] if own in SPLIT_OF else names
        everything = own if own in SPLIT_OF or own == split else "train"
        is_meant = split == everything or _is_same(split, everything)
        if is_meant and not has_declared and (found := labels.files()):
            return _outermost(found)
    remedy = "name the folder or the files that are meant as the source, without split="
    if declared and has_declared:
        remedy = f"{declared.path} declares files of splits, which is not read: {remedy}"
    if names and names != [split]:
        shown = ", ".join(map(repr, names[:_MOST_NAMED])) + (", ..." if len(names) > _MOST_NAMED else "")
        raise ValueError(f"split={split!r}: {root} has no such split, only {shown}: pass one of these, or {remedy}")
    raise ValueError(f"split={split!r}: no file or folder of {root} is named for a split: {remedy}")


def labels_of(root: str, files: Collection[str]) -> Labels:
    """Return the label of each file; files without one are left out."""
    parts = {path: _parts(path, root) for path in files}
    if any(names == [magics.DATASET_DICT] for names in parts.values()):
        return Labels(_grouped((names[0], path) for path, names in parts.items() if len(names) > 1), {}, True)
    shards = [
        (match[1], path)
        for path, names in parts.items()
        if len(names) == 2 and names[0] == "data" and (match := _SHARD.fullmatch(names[1]))
    ]
    if shards and all(_NAME_OF_SHARDS.fullmatch(name) for name, _ in shards):
        return Labels({}, _grouped(shards), True)
    in_folders, by_name = [], []
    for path, names in parts.items():
        *folders, name = names
        if magics.is_beside_data(name) or name.endswith(_NO_DATA) or any(map(_is_no_data, folders)):
            continue
        folder, own = _folder_label(folders), _own_label(name)
        if folder is not None and (splits_in(folder) or not splits_in(own)):
            in_folders.append((folder, path))
        else:
            by_name.append((own, path))
    return Labels(_grouped(in_folders), _grouped(by_name), False)


def common_folder(files: Sequence[str]) -> str:
    """Return the folder that all files have in common."""
    plain = [without_query(path) for path in files]
    first, last = min(plain).split("/")[:-1], max(plain).split("/")[:-1]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "/".join(part for part, _ in same)


def _parts(path: str, root: str) -> list[str]:
    """Return the parts of a path from a folder on."""
    return without_query(path)[len(root) :].strip("/").split("/")


def _ending(path: str) -> str:
    return os.path.splitext(without_query(path))[1]


def _is_no_data(folder: str) -> bool:
    return folder.startswith("__") or folder in magics.FOLDERS_BESIDE_DATA


def _grouped(labelled: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for label, path in labelled:
        found.setdefault(label, []).append(path)
    return found


def splits_in(label: str) -> set[str]:
    """Return the splits that a label has words for."""
    return {SPLIT_OF[word] for word in _WORD.findall(label)}


def _is_same(split: str, other: str) -> bool:
    """Return whether both are words for the same split."""
    return split in SPLIT_OF and SPLIT_OF[split] == SPLIT_OF.get(other)


def _folder_label(folders: Sequence[str]) -> str | None:
    """Return the folder that says the split; if several say different ones, all of them.

    Folders that are such a word themselves are preferred.
    """
    saying = [name for name in folders if name in SPLIT_OF] or [name for name in folders if splits_in(name)]
    if len(set().union(*map(splits_in, saying))) > 1:
        return "/".join(saying)
    return next((name for name in saying or folders if name != "data"), None)


def _own_label(name: str) -> str:
    """Return a file's name without its ending and the numbers before that."""
    shard = _SHARD.fullmatch(name)
    stem = shard[1] if shard else os.path.splitext(name)[0]
    return stem.rstrip("-._ 0123456789") or stem


def _are_shards(paths: Sequence[str]) -> bool:
    return any(_SHARD.fullmatch(os.path.basename(path)) for path in paths)


def _labels_of_split(split: str, labels: Labels, root: str) -> list[str]:
    """Return the labels whose files a split has.

    Raises:
        ValueError: several might be meant.
    """
    every = labels.all()
    if split in every:
        return [split]
    if split not in SPLIT_OF:
        return []
    same = sorted(label for label in every if _is_same(split, label))
    if len(same) > 1:
        raise ValueError(f"split={split!r}: {root} has {' and '.join(map(repr, same))}: pass the one that is meant")
    if same or labels.are_exact:
        return same
    worded = sorted(label for label in every if SPLIT_OF[split] in splits_in(label))
    for label in worded:
        if len(splits_in(label)) > 1:
            raise ValueError(
                f"split={split!r}: {label!r} in {root} has words for several splits: name the files that are meant as "
                f"the source, without split="
            )
    return worded


def _of_one_kind(split: str, labels: Labels, chosen: Sequence[str]) -> list[str]:
    """Return the files in folders with these labels, or else those that are named so themselves.

    Raises:
        ValueError: there are both, with the same ending.
    """
    in_folders = [path for label in chosen for path in labels.in_folders.get(label, ())]
    by_name = [path for label in chosen for path in labels.by_name.get(label, ())]
    endings = set(map(_ending, in_folders))
    if same := [path for path in by_name if _ending(path) in endings]:
        raise ValueError(
            f"split={split!r} could be the folder with {in_folders[0]} or the file {same[0]}: name the one that is "
            f"meant as the source, without split="
        )
    return in_folders or by_name


def _outermost(files: Iterable[str]) -> list[str]:
    """Leave out what lies below the folder of an index.json, which says what its data are."""
    found = list(files)
    tops = {os.path.dirname(path) for path in found if os.path.basename(path) == magics.SHARDS_INDEX}
    if not tops:
        return found
    return [path for path in found if not any(above in tops for above in _folders_above(os.path.dirname(path)))]


def _folders_above(folder: str) -> Iterable[str]:
    while "/" in folder:
        folder = folder.rpartition("/")[0]
        yield folder


# ------------------------------------------------------------------------------------------------------- README.md


class Declared(NamedTuple):
    """Metadata of a data set's README.md that are about splits.

    Attributes:
        path: of README.md.
        has_files: they say which files are a split's.
        configurations: their names.
    """

    path: str
    has_files: bool
    configurations: list[str]


def declared_in(root: str, files: Iterable[str]) -> Declared | None:
    """Return what README.md declares, if there is one. Its YAML is searched, not parsed."""
    path = next((one for one in files if _parts(one, root) == ["README.md"]), None)
    if path is None:
        return None
    from gdsdata.storage.opened import open_file  # late: few names need it

    text = ""
    with contextlib.suppress(OSError), open_file(path) as file:
        text = file.read(0, min(file.size_bytes, _LONGEST_README_BYTES)).decode(errors="replace")
    lines = iter(text.splitlines())
    if next(lines, "").rstrip() != "---":
        return None
    metadata = itertools.takewhile(lambda line: line.rstrip() != "---", lines)
    members = [line.lstrip(" -").partition(":")[::2] for line in metadata]
    names = {value.strip() for key, value in members if key == "config_name"}
    return Declared(path, any(key == "data_files" for key, _ in members), sorted(names))


def _refuse_configurations(split: str, root: str, files: Iterable[str]) -> None:
    """Refuse files of several folders if README.md says that a data set is one of them.

    Raises:
        ValueError: it does.
    """
    declared = declared_in(root, files)
    if declared and declared.has_files and len(declared.configurations) > 1:
        names = ", ".join(map(repr, declared.configurations[:_MOST_NAMED]))
        raise ValueError(
            f"split={split!r}: {declared.path} declares several data sets ({names}), and files of this split lie in "
            f"several folders: name the folder or the files of one as the source"
        )

"""Choose the data among the files of a folder, a glob or a prefix of objects."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from gdsdata.formats.expansion import top_of
from gdsdata.formats.parsers import magics
from gdsdata.storage.urls import without_query


def refuse_tables(source: str, files: Sequence[str], logs: Iterable[tuple[str, str]], asked: set[str]) -> None:
    """Refuse a folder or glob that means files of a table with a log: not all of them are current.

    Args:
        source: the folder or glob.
        files: that it means.
        logs: folders that were read, with the name of a folder in each that may be a log.
        asked: folders that were asked for logs; those around ``source`` are added.

    Raises:
        ValueError: some of the files are of a table.
    """
    top = top_of(source)
    for folder, log in {*logs, *_logs_around(top, asked)}:
        below = os.path.join(folder, "")
        is_meant = any(path.startswith(below) for path in files) if files else folder == top
        if is_meant and (log != magics.ICEBERG_LOG or _has_iceberg_log(folder)):
            from gdsdata.formats import other_kinds  # late: this is for an error

            other_kinds.refuse_table(folder, log)


def _logs_around(folder: str, asked: set[str]) -> Iterator[tuple[str, str]]:
    """Yield a folder and those above it that have what may be a log, with its name."""
    while folder not in asked:
        asked.add(folder)
        yield from ((folder, log) for log in magics.LOGS_OF_TABLES if os.path.isdir(os.path.join(folder, log)))
        folder = os.path.dirname(folder)


def _has_iceberg_log(folder: str) -> bool:
    try:
        return any(map(magics.is_of_iceberg, os.listdir(os.path.join(folder, magics.ICEBERG_LOG))))
    except OSError:  # a link that leads nowhere, or a folder of another user
        return False


def has_dataset(files: list[str]) -> bool:
    """Return whether there are files that `datasets` leaves in its folders."""
    joined = "\0".join(files)  # one search in all names is faster
    return f"/{magics.SAVED_STATE}" in joined or f"/{magics.DATASET_INFO}" in joined


def without_beside(files: list[str]) -> list[str]:
    """Leave out files that stand beside data, unless there are no others."""
    joined = "\0".join(files)  # one search in all names is faster
    if not any(name in joined for name in magics.BESIDE_DATA):
        return files
    return [path for path in files if not magics.is_beside_data(path)] or files


def names_endings(source: str) -> bool:
    """Return whether a file's path, a URL or a glob says which ending the files have."""
    return bool(_ending_of(without_query(source)))


def refuse_unlike_endings(paths: Sequence[str], named: Collection[str], format: object) -> None:
    """Refuse files of unlike endings for a format that takes any bytes for samples.

    Writers of tokens and records leave an index, a vocabulary or a note in the same folder.

    Args:
        paths: all files.
        named: those of them that the caller chose by name or ending.
        format: of the files.

    Raises:
        ValueError: other files have more than one ending.
    """
    if len({path.rpartition(".")[2] for path in paths}) == 1:  # 0.1 s for a million, which take 0.6 s one by one
        return
    first_of: dict[str, str] = {}
    counts = Counter[str]()
    for path in paths:
        if path not in named:
            ending = _ending_of(without_query(path)).lower()
            first_of.setdefault(ending, path)
            counts[ending] += 1
    if len(first_of) < 2:
        return
    from gdsdata.formats.other_kinds import KINDS  # late: this is for an error

    known = {ending for kind in KINDS for ending in kind.endings}  # of files that are likely no data
    ending, other = sorted(counts, key=lambda one: (f".{one}" in known, -counts[one], not one))[:2]
    first = first_of[ending]
    example = os.path.join(os.path.dirname(first), f"*.{_ending_of(without_query(first))}") if ending else [first]
    raise ValueError(
        f"{first_of[other]} and {first} have unlike endings. Bare files are known by nothing else, and "
        f"{type(format).__name__} would read both: name the files that have samples, as in {example!r}"
    )


def _ending_of(path: str) -> str:
    """Return the ending of a name, without numbers behind it; "" if it has no letters alone."""
    name = os.path.basename(path)
    while (parts := name.rpartition("."))[2].isdigit() and parts[1]:
        name = parts[0]
    return parts[2] if parts[0] and parts[2].isalpha() else ""

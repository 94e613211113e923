"""Choose the data among the files of a folder, a glob or a prefix of objects."""

from __future__ import annotations

import os

from gdsdata.formats.parsers import magics


def refuse_table(folder: str) -> None:
    """Refuse a directory that is a table with a log, whose files are not all current.

    Raises:
        ValueError: it is one.
    """
    for log in magics.LOGS_OF_TABLES:
        if os.path.isdir(os.path.join(folder, log)):
            from gdsdata.formats import other_kinds  # late: this is for an error

            other_kinds.refuse_table(folder, log)


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

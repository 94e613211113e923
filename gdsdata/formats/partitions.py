"""Columns that stand in the names of folders alone, as in ``label=3/part-0.parquet``.

pandas (``partition_cols``), Spark (``partitionBy``), DuckDB and Polars write them so. They are not
read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gdsdata.formats.field import Field
from gdsdata.warn import warn

_FOLDER = re.compile(r"/([^/=]+)=([^/]*)(?=/)")


def hint_about(name: str, path: str) -> str:
    """Return what an error about a column that a file lacks says besides; "": nothing."""
    if f"/{name}=" not in path:
        return ""
    return f". {name!r} stands in the names of folders, which are not read: write it into the files"


def warn_of_partitions(paths: Sequence[str], fields: Sequence[Field]) -> None:
    """Warn if folders of files have values of a column that the files do not have."""
    first, known = _FOLDER.findall(paths[0]), {field.name for field in fields}
    lacking = [name for name, _ in first if name not in known]
    if lacking and any(_FOLDER.findall(path) != first for path in paths[1:]):
        names = ", ".join(map(repr, lacking))
        warn(
            f"{paths[0]} and other files are in folders named by columns ({names}), which are not read, and missing "
            f"in batches: write them into the files, or name the columns that are wanted (columns=)"
        )

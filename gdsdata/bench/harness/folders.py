"""The folder of a run's files."""

import contextlib
import os
import re
import tempfile
from pathlib import Path

from gdsdata.bench.data.made import alive, make_folder, remove

PREFIX = "gdsdata-bench"


@contextlib.contextmanager
def temporary_folder(folder, name):
    """Make a folder of one run below `folder`, which its end removes.

    Folders that killed runs of this name left there are removed too, and nothing else: the names
    have the number of the run's process.
    """
    make_folder(Path(folder))
    for entry in os.scandir(folder):
        run = re.fullmatch(rf"{PREFIX}-{name}-(\d+)-\w+", entry.name)
        if run and not alive(run[1]) and entry.is_dir(follow_symlinks=False):
            remove(Path(entry))
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}-{name}-{os.getpid()}-", dir=folder) as made:
        yield Path(made)

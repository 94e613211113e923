"""Folders of a run's files: a temporary one, or the bench's own with a marker."""

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
from pathlib import Path

from gdsdata.bench.data.made import DataError, alive, data_folder

MARKER = ".gdsdata-bench"
# Files that the bench makes there, and those that the engine and the peers write before they rename
# them to one of these.
OWN = re.compile(r"(tensor-[\w-]+\.bin|limit-\d+\.bin)(\.[\w-]+\.tmp)?")
NAMED = 5  # strangers, in an error


@contextlib.contextmanager
def temporary_folder(settings, prefix):
    """Make a folder below `data.folder` that the end, and SIGTERM too, removes."""
    folder = data_folder(settings)
    folder.mkdir(parents=True, exist_ok=True)
    with ended_in_order(), tempfile.TemporaryDirectory(prefix=f"{prefix}-", dir=folder) as made:
        yield made


@contextlib.contextmanager
def ended_in_order():
    """Turn SIGTERM, as `timeout` sends it, into SystemExit, so that files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class OwnFolder:
    """A folder of the bench's files and a marker alone, which is left as it was found.

    It removes what a killed run left, by its names. It never touches other files.

    Raises (on entering):
        DataError: the folder has other files, or another run uses it.
    """

    def __init__(self, path):
        self.path, self.made = Path(path), False
        self.strangers = []  # files of others that came while it was entered, and stayed

    def __enter__(self):
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise DataError(f"{self.path} is a link or a file, and no folder of the bench's: choose data.folder=")
        self.made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.made:
            self.take_over()
        try:
            with open(self.path / MARKER, "x") as marker:
                json.dump({"made_by": "the bench of gdsdata", "pid": os.getpid()}, marker)
        except FileExistsError:
            raise DataError(f"{self.path}: another run has just begun there: choose data.folder=") from None
        return self

    def take_over(self):
        """Remove what an earlier run left in a folder with its marker; refuse any other."""
        marker, entries = self.path / MARKER, sorted(os.scandir(self.path), key=lambda entry: entry.name)
        is_marked = marker.is_file() and not marker.is_symlink()
        strangers = [entry.name for entry in entries if not (is_marked and is_own(entry))]
        if strangers:
            named = ", ".join(strangers[:NAMED]) + (f" and {len(strangers) - NAMED} more" if strangers[NAMED:] else "")
            raise DataError(
                f"{self.path} has files that are not the bench's: {named}. Nothing was removed: move them, or choose "
                "another folder with data.folder="
            )
        pid = pid_in(marker) if is_marked else None
        if pid is not None and alive(pid):
            raise DataError(f"{self.path}: another run (process {pid}) is at work there: choose data.folder=")
        if is_marked:
            self.made = True  # by the run that left it
            self.clear()

    def clear(self):
        """Remove its own files, the marker last: after a kill the others are still known."""
        for entry in os.scandir(self.path):
            if is_own(entry) and entry.name != MARKER:
                os.unlink(entry)
        (self.path / MARKER).unlink(missing_ok=True)

    def __exit__(self, *_):
        self.clear()
        self.strangers = sorted(os.listdir(self.path))
        if self.made and not self.strangers:
            self.path.rmdir()

    def noted_in(self, results):
        """Return the results, with a note about files of others that keep the folder."""
        if self.strangers:
            results["notes"].append(f"{self.path} stays: others put {', '.join(self.strangers)} there meanwhile.")
        return results


@contextlib.contextmanager
def own_folder(settings, name):
    """Enter the OwnFolder of that name below `data.folder`; SIGTERM empties it too."""
    folder = data_folder(settings)
    folder.mkdir(parents=True, exist_ok=True)
    with ended_in_order(), OwnFolder(folder / name) as own:
        yield own


def is_own(entry):
    """By name, and never a folder or a link."""
    return (entry.name == MARKER or OWN.fullmatch(entry.name) is not None) and entry.is_file(follow_symlinks=False)


def pid_in(marker):
    try:
        return int(json.loads(marker.read_text())["pid"])
    except (ValueError, KeyError, TypeError):
        return None

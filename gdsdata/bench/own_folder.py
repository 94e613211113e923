"""A folder that holds nothing but what the bench made, says so by a marker file, and is left as it was found."""

import json
import os
import re
from pathlib import Path

from gdsdata.bench import data

MARKER = ".gdsdata-bench"
# What the bench makes there, and what the engine and the peers write before they rename it over one
# of these.
OWN = re.compile(r"(tensor-[\w-]+\.bin|limit-\d+\.bin)(\.[\w-]+\.tmp)?")
NAMED = 5  # strangers, in an error


class OwnFolder:
    """`path` while this is entered. Files in it that are not its own are never touched: where there are any, it
    refuses.

    What a killed run left is removed, by its names; a run that is still there is not disturbed.

    Raises (on entering):
        data.DataError: the folder has other files, or another run is at work in it.
    """

    def __init__(self, path):
        self.path, self.made = Path(path), False
        self.strangers = []  # that came while it was entered, and stayed

    def __enter__(self):
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise data.DataError(f"{self.path} is a link or a file, and no folder of the bench's: choose data.folder=")
        self.made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.made:
            self.take_over()
        try:
            with open(self.path / MARKER, "x") as marker:
                json.dump({"made_by": "gdsdata.bench", "pid": os.getpid()}, marker)
        except FileExistsError:
            raise data.DataError(f"{self.path}: another run has just begun there: choose data.folder=") from None
        return self

    def take_over(self):
        """Removes what an earlier run left in a folder with its marker; refuses any other."""
        marker, entries = self.path / MARKER, sorted(os.scandir(self.path), key=lambda entry: entry.name)
        is_marked = marker.is_file() and not marker.is_symlink()
        strangers = [entry.name for entry in entries if not (is_marked and is_own(entry))]
        if strangers:
            named = ", ".join(strangers[:NAMED]) + (f" and {len(strangers) - NAMED} more" if strangers[NAMED:] else "")
            raise data.DataError(
                f"{self.path} has files that are not the bench's: {named}. Nothing was removed: move them, or choose "
                "another folder with data.folder="
            )
        if not is_marked:
            return
        pid = pid_in(marker)
        if pid is not None and data.alive(pid):
            raise data.DataError(f"{self.path}: another run (process {pid}) is at work there: choose data.folder=")
        self.made = True  # by the run that left it
        self.clear()

    def clear(self):
        """Removes its own files, the marker last: what a kill leaves meanwhile is still known for the bench's."""
        for entry in os.scandir(self.path):
            if is_own(entry) and entry.name != MARKER:
                os.unlink(entry)
        (self.path / MARKER).unlink(missing_ok=True)

    def __exit__(self, *_):
        self.clear()
        self.strangers = sorted(os.listdir(self.path))
        if self.made and not self.strangers:
            self.path.rmdir()


def is_own(entry):
    """By name, and never a folder or a link."""
    return (entry.name == MARKER or OWN.fullmatch(entry.name) is not None) and entry.is_file(follow_symlinks=False)


def pid_in(marker):
    try:
        return int(json.loads(marker.read_text())["pid"])
    except (ValueError, KeyError, TypeError):
        return None

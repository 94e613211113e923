"""Find the files in folders and of globs, and note the folders that they were found in."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

from gdsdata.errors import IoError
from gdsdata.formats.parsers import magics
from gdsdata.storage.paths import absolute

_MAGIC = frozenset("*?[")
_LOGS = frozenset(magics.LOGS_OF_TABLES)


class Folder(NamedTuple):
    """A folder whose entries were looked at. Another entry changes its modification time."""

    path: str
    inode: int
    mtime_ns: int


def folder_now(path: str) -> Folder | None:
    """Return the folder as it is now; None: there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return Folder(path, status.st_ino, status.st_mtime_ns) if stat.S_ISDIR(status.st_mode) else None


def _is_pattern(part: str) -> bool:
    return not _MAGIC.isdisjoint(part)


def top_of(source: str) -> str:
    """Return the folder that a source is, or that lies above all folders of a glob."""
    if os.path.isdir(source):
        return absolute(source)
    plain = itertools.takewhile(lambda part: not _is_pattern(part), source.split(os.sep)[:-1])
    return absolute(os.sep.join([*plain, ""]) or os.curdir)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link that leads nowhere
        return False


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _status_of_new(folder: str, above: tuple[os.stat_result, ...]) -> os.stat_result | None:
    """Return a folder's status; None: it was removed, or a link led back to one ``above`` it."""
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return None if any(os.path.samestat(status, one) for one in above) else status


class Expansion:
    """Finds the files of folders and globs, and notes each folder before it reads it.

    A glob means what it means to `glob.glob`, but ``**`` follows no link that leads back to a
    folder above it. The names that `glob.glob` gives would have to be asked for their type one by
    one: they have lost what the folder said of it.
    """

    def __init__(self) -> None:
        self.folders: dict[str, Folder] = {}
        self.logs: set[tuple[str, str]] = set()  # folders with a folder that may be the log of a table, and its name

    def files(self, source: str) -> list[str]:
        """Return absolute paths."""
        if os.path.isdir(source):  # before the glob, because a name may have brackets
            folder = absolute(source)
            return [entry.path for entry in self._entries(folder, must_list=True) if _is_file(entry)]
        return self._globbed(source) if _is_pattern(source) else []

    def files_below(self, source: str) -> list[str]:
        """Return absolute paths; a folder means its files and those of all folders below it."""
        return list(self._below(absolute(source), ())) if os.path.isdir(source) else self.files(source)

    def _below(self, folder: str, above: tuple[os.stat_result, ...]) -> Iterator[str]:
        status = _status_of_new(folder, above)
        if status is None:
            return
        for entry in self._entries(folder, must_list=not above):
            if _is_file(entry):
                yield entry.path
            elif _is_folder(entry):
                yield from self._below(entry.path, (*above, status))

    def _globbed(self, pattern: str) -> list[str]:
        *above, last = pattern.split(os.sep)
        if last in ("", "."):
            return []  # a folder is meant
        plain = list(itertools.takewhile(lambda part: not _is_pattern(part), above))
        top = os.sep.join([*plain, ""]) or os.curdir
        folders = [absolute(top)] if os.path.isdir(top) else []
        for part in above[len(plain) :]:
            folders = [path for folder in folders for path in self._folders_in(folder, part)]
        if last == "**":
            every = [path for folder in folders for path in self._folders_in(folder, "**")]
            return [entry.path for folder in every for entry in self._entries(folder) if _is_file(entry)]
        if _is_pattern(last):
            return [entry.path for folder in folders for entry in self._matching(folder, last) if _is_file(entry)]
        noted = filter(self._note, folders)  # where the file is lacking, it may appear
        return [path for folder in noted if os.path.isfile(path := os.path.join(folder, last))]

    def _folders_in(self, folder: str, part: str) -> Iterator[str]:
        """Yield the folders in ``folder`` that a part of a pattern means."""
        if part in ("", "."):
            yield folder
        elif part == "**":
            yield from self._folders_below(folder, ())
        elif _is_pattern(part):
            yield from (entry.path for entry in self._matching(folder, part) if _is_folder(entry))
        elif os.path.isdir(path := os.path.join(folder, part)):
            yield path
        else:
            self._note(folder)  # it may appear

    def _folders_below(self, folder: str, above: tuple[os.stat_result, ...]) -> Iterator[str]:
        """Yield a folder, and all folders below it."""
        status = _status_of_new(folder, above)
        if status is None:
            return
        yield folder
        for entry in self._entries(folder):
            if _is_folder(entry):
                yield from self._folders_below(entry.path, (*above, status))

    def _matching(self, folder: str, part: str) -> list[os.DirEntry[str]]:
        matches = re.compile(fnmatch.translate(part)).match
        hidden = part.startswith(".")
        return [entry for entry in self._entries(folder, hidden) if matches(entry.name)]

    def _entries(self, folder: str, hidden: bool = False, must_list: bool = False) -> list[os.DirEntry[str]]:
        """Return what is in a folder, which may not be there; hidden entries only if asked for."""
        if not self._note(folder) and not must_list:
            return []
        try:
            with os.scandir(folder) as entries:
                found = list(entries)
            self.logs.update((folder, one.name) for one in found if one.name in _LOGS and _is_folder(one))
            return [entry for entry in found if hidden or not entry.name.startswith(".")]
        except OSError as error:
            if not must_list:
                return []
            message = f"listing the directory {folder} failed: {error.strerror}"
            raise IoError.caused_by(error, message, folder) from error

    def _note(self, folder: str) -> bool:
        if folder not in self.folders:
            now = folder_now(folder)
            if now is None:
                return False
            self.folders[folder] = now
        return True

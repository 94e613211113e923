"""Find the files that a user's sources mean, and the folders that they were found in."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gdsdata.errors import IoError
from gdsdata.formats.parsers import magics
from gdsdata.storage.heads import statuses_of
from gdsdata.storage.paths import absolute, absolutes, contain
from gdsdata.storage.urls import have_urls, is_remote

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_MAGIC = frozenset("*?[")
_KIND_BITS = 0o170000  # of st_mode: S_IFMT


class Folder(NamedTuple):
    """A folder whose entries were looked at. Another entry changes its modification time."""

    path: str
    inode: int
    mtime_ns: int


class Listing(NamedTuple):
    """The files that a source means.

    Attributes:
        paths: absolute paths and URLs, each once, ordered by name; those that a state.json lists,
            in its order (`saved_datasets`).
        folders: as they were before they were read.
        states: every state.json that was read. While these and the folders are the same, so are the
            paths.
    """

    paths: Sequence[str]
    folders: list[Folder]
    states: Sequence[str] = ()


def listing_of(source: Source, split: str | None = None) -> Listing:
    """Return the files that ``source`` means.

    The order is the same on every machine, so that the same seed shuffles alike everywhere.

    Args:
        source: a file; a directory (its own files, without hidden ones); a glob, where ``**``
            crosses directories; or a sequence of these. Each may be a URL. A prefix that ends in a
            slash is a directory of objects. Braces mean several names, as in
            ``train-{0000..0146}.tar`` or ``{train,val}/*.tar``.
            Directories and globs leave out files that stand beside data, as README.md. Directories
            that `datasets` wrote have the files that `saved_datasets.data_of` chooses.
        split: the files of this split alone (`named_splits`): of each directory, with those below
            it, and of all other files together.

    Raises:
        FileNotFoundError: one of them means no file, or a file that state.json lists is missing.
        IoError: a path cannot be looked at, a directory not be listed, or a state.json not be read.
        ValueError: an empty sequence, or there is no such split, or a state.json lists what cannot
            be read, or a directory is a table with a log.
    """
    sources = sources_of(source)
    if not sources:
        raise ValueError("source is an empty list: name at least one file, directory or glob")
    of_urls = _files_of_urls(sources, split is not None)
    local = [one for one in sources if one not in of_urls] if of_urls else sources
    modes, _, _ = statuses_of(local)
    are_files = (modes != 0) & (modes & _KIND_BITS != stat.S_IFDIR)
    found = set(absolutes(list(itertools.compress(local, are_files.tolist()))))
    in_folders: dict[str, list[str]] = {}
    for url, objects in of_urls.items():
        if not objects:
            raise FileNotFoundError(f"{url} is no object, no prefix with objects and no glob of any")
        if objects[0].startswith(f"{url.rstrip('/')}/"):
            in_folders[url] = objects
        else:
            found.update(_without_beside(objects))
    expansion = _Expansion()
    for one in itertools.compress(local, (~are_files).tolist()):
        files = expansion.files(one) if split is None else expansion.files_below(one)
        if not files:
            _check_reachable(one)
            from gdsdata.formats.other_kinds import no_files_in  # late: this is for an error

            raise FileNotFoundError(f"{one} {no_files_in(one)}")
        if os.path.isdir(one):
            _refuse_table(one)
            in_folders[absolute(one)] = files
        else:
            found.update(_without_beside(files))
    chosen = in_folders
    if split is not None:
        chosen, found = _of_split(split, in_folders, found)
    if not any(map(_has_dataset, in_folders.values())):
        found.update(path for files in chosen.values() for path in _without_beside(files))
        return Listing(sorted(found), list(expansion.folders.values()))
    from gdsdata.formats.saved_datasets import data_of, in_order  # late: few folders need it

    data = [data_of(files, in_folders[root]) for root, files in chosen.items()]
    found.update(path for one in data for path in _without_beside(one.files))
    ordered = in_order(found, [listed for one in data for listed in one.lists])
    return Listing(ordered, list(expansion.folders.values()), tuple(path for one in data for path in one.states))


def _check_reachable(path: str) -> None:
    """Raise `IoError` if the system does not say what is there, as in a folder of another user."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: it contains a NUL
        pass
    except OSError as error:
        raise IoError.caused_by(error, f"{path} cannot be looked at: {error.strerror}", path) from error


def _refuse_table(folder: str) -> None:
    for log in magics.LOGS_OF_TABLES:
        if os.path.isdir(os.path.join(folder, log)):
            from gdsdata.formats.other_kinds import refuse_table  # late: this is for an error

            refuse_table(folder, log)


def _of_split(split: str, in_folders: dict[str, list[str]], others: set[str]) -> tuple[dict[str, list[str]], set[str]]:
    """Return the files of a split: of each folder, and of the local and the remote others."""
    from gdsdata.formats.named_splits import common_folder, files_of_split

    found: set[str] = set()
    for some in ([one for one in others if is_remote(one) is kind] for kind in (False, True)):
        if some:
            found.update(_without_beside(files_of_split(split, common_folder(some), some)))
    return {root: files_of_split(split, root, files) for root, files in in_folders.items()}, found


def _has_dataset(files: list[str]) -> bool:
    """Return whether there are files that `datasets` leaves in its folders."""
    joined = "\0".join(files)  # one search in all names is faster
    return f"/{magics.SAVED_STATE}" in joined or f"/{magics.DATASET_INFO}" in joined


def _without_beside(files: list[str]) -> list[str]:
    """Leave out files that stand beside data, unless there are no others."""
    joined = "\0".join(files)  # one search in all names is faster
    if not any(name in joined for name in magics.BESIDE_DATA):
        return files
    return [path for path in files if not magics.is_beside_data(path)] or files


def _files_of_urls(sources: list[str], is_deep: bool) -> dict[str, list[str]]:
    """Return what those of the sources mean that are URLs: see `remote_listing.files_of_urls`."""
    if not have_urls(sources):
        return {}
    from gdsdata.formats.remote_listing import files_of_urls

    return files_of_urls([one for one in sources if is_remote(one)], is_deep)


def sources_of(source: Source) -> list[str]:
    """Return the sources by themselves, as strings, without braces; ``file://`` URLs as paths.

    Raises:
        ValueError: an empty path, a ``file://`` URL of another host, or braces that mean too many
            names.
    """
    sources = [os.fspath(one) for one in ([source] if isinstance(source, (str, os.PathLike)) else source)]
    if not all(sources):
        raise ValueError("source has an empty path, '': name a file, a directory, a glob or a URL")
    if contain(sources, ":/"):
        from gdsdata.storage.location import local_path

        sources = [local_path(one) for one in sources]
    if contain(sources, "{"):
        from gdsdata.formats.braces import expanded

        sources = [name for one in sources for name in expanded(one)]
    return sources


def folder_now(path: str) -> Folder | None:
    """Return the folder as it is now; None: there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return Folder(path, status.st_ino, status.st_mtime_ns) if stat.S_ISDIR(status.st_mode) else None


def _is_pattern(part: str) -> bool:
    return not _MAGIC.isdisjoint(part)


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


class _Expansion:
    """Finds the files of folders and globs, and notes each folder before it reads it.

    A glob means what it means to `glob.glob`, but ``**`` follows no link that leads back to a
    folder above it. The names that `glob.glob` gives would have to be asked for their type one by
    one: they have lost what the folder said of it.
    """

    def __init__(self) -> None:
        self.folders: dict[str, Folder] = {}

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
                return [entry for entry in entries if hidden or not entry.name.startswith(".")]
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

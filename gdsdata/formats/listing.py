"""Find the files that a user's sources mean; `expansion` finds those in folders and of globs."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from gdsdata.errors import IoError
from gdsdata.storage.heads import statuses_of
from gdsdata.storage.paths import absolute, absolutes, contain
from gdsdata.storage.urls import have_urls, is_remote

if TYPE_CHECKING:
    from gdsdata.formats.expansion import Folder

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_KIND_BITS = 0o170000  # of st_mode: S_IFMT


class Listing:
    """The files that a source means.

    Args:
        paths: absolute paths and URLs, each once, ordered by name; those that a state.json lists,
            in its order (`saved_datasets`).
        folders: as they were before they were read.
        states: every state.json that was read. While these and the folders are the same, so are the
            paths.
        named: those of the paths that the source names, or whose ending it names, as in "*.bin".
    """

    def __init__(
        self,
        paths: Sequence[str],
        folders: list[Folder],
        states: Sequence[str] = (),
        named: Collection[str] = (),
    ) -> None:
        self.paths, self.folders, self.states, self.named = paths, folders, states, named


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
    if are_files.all() and not of_urls and split is None:
        return Listing(sorted(found), [], named=found)
    # late: files by name need none
    from gdsdata.formats.data_files import has_dataset, names_endings, refuse_tables, without_beside

    named = set(found)

    in_folders: dict[str, list[str]] = {}
    for url, objects in of_urls.items():
        if not objects:
            raise FileNotFoundError(f"{url} is no object, no prefix with objects and no glob of any")
        if objects[0].startswith(f"{url.rstrip('/')}/"):
            in_folders[url] = objects
        else:
            found.update(without_beside(objects))
            named.update(objects if names_endings(url) else ())
    folders: list[Folder] = []
    if not are_files.all():
        from gdsdata.formats.expansion import Expansion  # late: a file needs none

        expansion, asked = Expansion(), set[str]()
        for one in itertools.compress(local, (~are_files).tolist()):
            files = expansion.files(one) if split is None else expansion.files_below(one)
            refuse_tables(one, files, expansion.logs, asked)
            if not files:
                _check_reachable(one)
                from gdsdata.formats.other_kinds import no_files_in  # late: this is for an error

                raise FileNotFoundError(f"{one} {no_files_in(one)}")
            if os.path.isdir(one):
                in_folders[absolute(one)] = files
            else:
                found.update(without_beside(files))
                named.update(files if names_endings(one) else ())
        folders = list(expansion.folders.values())
    chosen = in_folders
    if split is not None:
        chosen, found = _of_split(split, in_folders, found)
    if not any(map(has_dataset, in_folders.values())):
        found.update(path for files in chosen.values() for path in without_beside(files))
        return Listing(sorted(found), folders, named=named)
    from gdsdata.formats.saved_datasets import data_of, in_order  # late: few folders need it

    data = [data_of(files, in_folders[root]) for root, files in chosen.items()]
    found.update(path for one in data for path in without_beside(one.files))
    ordered = in_order(found, [listed for one in data for listed in one.lists])
    return Listing(ordered, folders, tuple(path for one in data for path in one.states))


def _check_reachable(path: str) -> None:
    """Raise `IoError` if the system does not say what is there, as in a folder of another user."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: it contains a NUL
        pass
    except OSError as error:
        raise IoError.caused_by(error, f"{path} cannot be looked at: {error.strerror}", path) from error


def _of_split(split: str, in_folders: dict[str, list[str]], others: set[str]) -> tuple[dict[str, list[str]], set[str]]:
    """Return the files of a split: of each folder, and of the local and the remote others."""
    from gdsdata.formats.data_files import without_beside
    from gdsdata.formats.named_splits import common_folder, files_of_split

    found: set[str] = set()
    for some in ([one for one in others if is_remote(one) is kind] for kind in (False, True)):
        if some:
            found.update(without_beside(files_of_split(split, common_folder(some), some)))
    return {root: files_of_split(split, root, files) for root, files in in_folders.items()}, found


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

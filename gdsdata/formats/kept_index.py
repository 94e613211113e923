"""The index of a source, kept for the next start if it took long, and made once per machine.

A kept index is used while these are as they were:

- the folders that were listed: inode and modification time;
- the files that the index was made from, but that have no samples (every state.json that was read,
  too): size and modification time;
- of the files with samples, as many as a quarter of a second allows, at least 256;
- all objects of URLs, whose sizes and versions a list says. Without versions, no index is kept.

If another file has changed, the reader refuses it, because it compares each file with its index.
Then the kept index is deleted (`KeptIndex.drop`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gdsdata.formats import caches
from gdsdata.formats.catalog import FORMATS
from gdsdata.formats.index import Format, SampleIndex
from gdsdata.formats.listing import Listing, Source, sources_of
from gdsdata.io.engine import unsigned_url, warn_once
from gdsdata.storage.paths import absolute, absolutes
from gdsdata.storage.urls import have_urls, is_remote
from gdsdata.warn import warn

KIND = "index"
WORTH_S = 0.5  # an index that took less is made again faster than it is checked
# A change this soon after another may have the same modification time.
SETTLED_NS = 2 * 10**9
UNUSED_S = 30 * 24 * 3600.0
# They are kept beside an index by `KeptIndex.keep`.
_FACTS = ("paths", "folders", "others", "format")
_LOCK_POLL_S, _SAID_AFTER_S = 0.02, 30.0
# A kept index, its lock, or what `caches.written` has not finished.
_OURS = r"[0-9a-f]{32}\.gdsdata-index(\.lock|\.[0-9a-f]{8}\.tmp)?"


class KeptIndex:
    """The place of a source's index.

    Args:
        source: as of `listing.listing_of`.
        format: as the user gave it. An index is kept only for the package's own formats, whose
            arguments can be compared.
        where: a folder, or ``"user"`` (see `caches.folder_of`).
        version: of the package. Another one makes its indexes anew.
        split: as of `listing.listing_of`.
    """

    def __init__(
        self,
        source: Source,
        format: Format | None,
        where: str | os.PathLike[str],
        version: str,
        split: str | None = None,
    ) -> None:
        sources = sources_of(source)
        are_remote = have_urls(sources)
        if are_remote:
            sources = [unsigned_url(one) if is_remote(one) else absolute(one) for one in sources]
        else:
            sources = absolutes(sources)
        folder_of = caches.folder_of_objects if are_remote else caches.folder_of
        self._folder = folder_of(where, KIND)
        said = "\0".join([version, repr(format), repr(split), *sources])
        digest = hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()[:32]
        self._place = os.path.join(self._folder, f"{digest}.gdsdata-index")
        self._is_used = False  # found or written by this process

    def find(self, listing: Listing | None = None) -> tuple[Sequence[str], str, SampleIndex] | None:
        """Return what is kept; None if there is nothing, or the files are not as they were.

        Args:
            listing: of the source now, if it names URLs.

        Returns:
            The files that the source means, their format's name, and the index.
        """
        if not os.path.exists(self._place):
            return None
        # Late, because few starts find an index, and `stored_index` imports every kind of one.
        from gdsdata.formats import index_checks, stored_index

        try:
            stored = stored_index.read(self._place)
            index = stored.index
            paths, folders, others, format_name = (stored.facts[name] for name in _FACTS)
        except (OSError, stored_index.Damaged, KeyError):
            return None
        paths = paths or index.paths
        if listing is not None and list(paths) != listing.paths:
            signed = _signed_now(list(paths), listing.paths)
            if signed is None:
                return None
            index, others = _renamed(index, others, signed)
            paths = listing.paths
        if not index_checks.are_as_they_were(index, folders, others):
            return None
        self._is_used = True
        with contextlib.suppress(OSError):
            os.utime(self._place)  # `_sweep` spares it
        return paths, format_name, index

    def keep(
        self, listing: Listing, format: Format, index: SampleIndex, begun_ns: int
    ) -> tuple[Sequence[str], SampleIndex]:
        """Keep an index, unless its files may still be changing.

        Returns:
            The files that the source means and the index, in memory that all processes share. They
            are as given if the index was not kept.

        Args:
            listing: of the source, made before the index.
            format: that made the index.
            index: of all files of ``listing``.
            begun_ns: time of the clock (`time.time_ns`) when listing began.
        """
        from gdsdata.formats import index_checks, stored_index  # late, because few indexes are kept

        others = index_checks.others_of(listing, format, index)
        if index_checks.newest_ns(listing, index, others) > begun_ns - SETTLED_NS:
            return listing.paths, index
        if index_checks.have_no_version(index, others):
            return listing.paths, index
        names = _names_of(listing.paths)
        if names is None or not names.keys() >= _signed([*index.paths, *(path for path, _, _ in others)]):
            return listing.paths, index
        kept, kept_others = _renamed(index, others, names) if names else (index, others)
        paths = [names.get(path, path) for path in listing.paths] if names else listing.paths
        facts = {
            "paths": [] if list(kept.paths) == paths else paths,
            "folders": [[*folder] for folder in listing.folders],
            "others": [[*other] for other in kept_others],
            "format": type(format).__name__,
        }
        try:
            with caches.written(self._place) as file:
                stored_index.write(file, stored_index.Stored(kept, facts))
                file.flush()
                os.fsync(file.fileno())
            self._is_used = True
            self._sweep()
            stored = stored_index.read(self._place)
            if names:
                return listing.paths, dataclasses.replace(stored.index, paths=index.paths)
            return stored.facts["paths"] or stored.index.paths, stored.index
        except (stored_index.CannotBeStored, stored_index.Damaged):
            return listing.paths, index
        except OSError as error:
            warn_once(f"the index cannot be kept in {self._folder}, and will be made again: {error.strerror}")
            return listing.paths, index

    def drop(self) -> None:
        """Delete the kept index: a file was not as it says."""
        if self._is_used:
            with contextlib.suppress(OSError):
                os.unlink(self._place)

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Wait while another process of this machine makes the index, and yield whether none did.

        Without file locks none waits.
        """
        try:
            caches.make_folder(self._folder)
            lock = caches.lock_opener(f"{self._place}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError:
            yield True
            return
        try:
            yield not _waited_for(lock, self._place)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._place}.lock")  # those who wait for it have it open
            os.close(lock)

    def _sweep(self) -> None:
        """Delete kept indexes that nobody has used for a month, and what a crash left behind.

        A user's other files may be in the folder: they stay.
        """
        with os.scandir(self._folder) as entries:
            for entry in filter(lambda entry: re.fullmatch(_OURS, entry.name), entries):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat().st_mtime > UNUSED_S:
                        os.unlink(entry.path)


def _signed(paths: Sequence[str]) -> set[str]:
    """Return the URLs that are signed."""
    return {path for path in paths if unsigned_url(path) != path} if have_urls(paths) else set()


def _names_of(paths: Sequence[str]) -> dict[str, str] | None:
    """Return the signed URLs of ``paths`` with their names, which have no signature.

    None: two paths have one name.
    """
    names = {path: unsigned_url(path) for path in _signed(paths)}
    is_clear = not names or len({names.get(path, path) for path in paths}) == len(paths)
    return names if is_clear else None


def _signed_now(names: list[str], paths: Sequence[str]) -> dict[str, str] | None:
    """Return the URLs of ``names`` as they are signed now. None: ``paths`` have other names."""
    signed = _names_of(paths)
    if not signed or [signed.get(path, path) for path in paths] != names:
        return None
    return {name: path for path, name in signed.items()}


def _renamed(
    index: SampleIndex, others: Sequence[Sequence[Any]], names: Mapping[str, str]
) -> tuple[SampleIndex, list[list[Any]]]:
    """Return an index and other files (`index_checks.Other`) whose paths have other names."""
    renamed = dataclasses.replace(index, paths=[names.get(path, path) for path in index.paths])
    return renamed, [[names.get(path, path), *rest] for path, *rest in others]


def is_kept_format(format: Format | None) -> bool:
    """Return whether an index of this format can be kept: it is one of the package's own."""
    return format is None or (type(format).__module__, type(format).__name__) in {
        (f"{__package__}.{entry.module}", entry.name) for entry in FORMATS
    }


def _waited_for(lock: int, place: str) -> bool:
    """Take a lock, and return whether another process held it."""
    begun, waited, said = time.monotonic(), False, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return waited
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                return False  # the file system has no locks
        waited = True
        if not said and time.monotonic() - begun > _SAID_AFTER_S:
            said = True
            message = f"gdsdata: waiting for the process that holds {place}.lock and makes this index"
            warn(message)
        time.sleep(_LOCK_POLL_S)

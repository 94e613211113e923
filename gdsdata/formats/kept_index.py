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
import errno
import fcntl
import hashlib
import math
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from gdsdata.distinct import distinct
from gdsdata.formats import caches
from gdsdata.formats.catalog import FORMATS
from gdsdata.formats.index import Format, SampleIndex
from gdsdata.formats.listing import Folder, Listing, Source, folder_now, sources_of
from gdsdata.io.engine import warn_once
from gdsdata.storage.heads import statuses_of
from gdsdata.storage.paths import absolute, absolutes, chosen, joined
from gdsdata.storage.urls import have_urls, is_remote
from gdsdata.warn import warn

KIND = "index"
WORTH_S = 0.5  # an index that took less is made again faster than it is checked
LEAST_CHECKED, CHECK_S = 256, 0.25
_CHECKED_AT_ONCE = 1024  # behind the first ones
# A change this soon after another may have the same modification time.
SETTLED_NS = 2 * 10**9
UNUSED_S = 30 * 24 * 3600.0
_LOCK_POLL_S, _SAID_AFTER_S = 0.02, 30.0
# A kept index, its lock, or what `caches.written` has not finished.
_OURS = r"[0-9a-f]{32}\.gdsdata-index(\.lock|\.[0-9a-f]{8}\.tmp)?"


@runtime_checkable
class HasSideFiles(Protocol):
    """A format that reads more files than those that are named, or that have samples."""

    def side_files(self, paths: list[str]) -> list[str]:
        """Return the files beside ``paths`` that say what the samples are."""


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
        sources = [one if is_remote(one) else absolute(one) for one in sources] if are_remote else absolutes(sources)
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
        from gdsdata.formats import stored_index  # it imports every kind of index

        try:
            stored = stored_index.read(self._place)
        except (OSError, stored_index.Damaged):
            return None
        facts = stored.facts
        if listing is not None and list(facts["paths"] or stored.index.paths) != listing.paths:
            return None
        if not _are_as_they_were(stored.index, facts["folders"], facts["others"]):
            return None
        self._is_used = True
        with contextlib.suppress(OSError):
            os.utime(self._place)  # `_sweep` spares it
        return facts["paths"] or stored.index.paths, facts["format"], stored.index

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
        beside = format.side_files(list(listing.paths)) if isinstance(format, HasSideFiles) else []
        without_samples = dict.fromkeys([*listing.paths, *listing.states, *beside]).keys() - set(index.paths)
        others = list(zip(sorted(without_samples), *_stats_of(sorted(without_samples)), strict=True))
        times = [folder.mtime_ns for folder in listing.folders]
        times += [mtime_ns for path, _, mtime_ns in others if not is_remote(path)]
        times.append(int(index.mtime_ns[~_are_urls(index.paths)].max(initial=0)))
        if max(times) > begun_ns - SETTLED_NS or _have_no_version(index, others):
            return listing.paths, index
        from gdsdata.formats import stored_index

        facts = {
            "folders": [[*folder] for folder in listing.folders],
            "others": [[*other] for other in others],
            "paths": [] if list(index.paths) == listing.paths else listing.paths,
            "format": type(format).__name__,
        }
        try:
            with caches.written(self._place) as file:
                stored_index.write(file, stored_index.Stored(index, facts))
                file.flush()
                os.fsync(file.fileno())
            self._is_used = True
            self._sweep()
            stored = stored_index.read(self._place)
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


def _are_as_they_were(index: SampleIndex, folders: list[list], others: list[list]) -> bool:
    if any(folder_now(path) != Folder(path, *rest) for path, *rest in folders):
        return False
    paths, *said = zip(*others, strict=True) if others else ((), (), ())
    if _stats_of(paths) != said:
        return False
    are_urls = _are_urls(index.paths)
    if are_urls.any():
        from gdsdata.storage.objects import sizes_and_versions

        sizes, versions = sizes_and_versions([index.paths[place] for place in np.flatnonzero(are_urls).tolist()])
        is_other = (sizes != index.size_bytes[are_urls]) | (versions != index.mtime_ns[are_urls])
        if is_other.any():
            return False
    begun = time.monotonic()
    files = np.flatnonzero(~are_urls)
    files = files[_in_any_order(len(files))]
    checked = 0
    while checked < len(files) and (checked < LEAST_CHECKED or time.monotonic() - begun <= CHECK_S):
        some = files[checked : checked + (_CHECKED_AT_ONCE if checked else max(1, LEAST_CHECKED))]
        _, sizes, times = statuses_of(chosen(index.paths, some))
        if (sizes != index.size_bytes[some]).any() or (times != index.mtime_ns[some]).any():
            return False
        checked += len(some)
    return True


def _have_no_version(index: SampleIndex, others: list[tuple]) -> bool:
    """Return whether an object was read whose server names no version."""
    versions = [mtime_ns for path, _, mtime_ns in others if is_remote(path)]
    versions += distinct(index.mtime_ns[_are_urls(index.paths)]).tolist()
    if not versions:
        return False
    from gdsdata.storage.objects import no_version

    return no_version() in versions


def _in_any_order(count: int) -> np.ndarray:
    """Return 0 .. count - 1, in an order that differs from time to time: int64 (count,)."""
    own = random.Random()  # a program's own stream stays as it is; numpy.random takes 5 ms to import
    first, stride = (own.randrange(max(1, count)) for _ in range(2))
    while math.gcd(stride, count) > 1:
        stride += 1
    return (first + stride * np.arange(count, dtype=np.int64)) % max(1, count)


def _are_urls(paths: Sequence[str]) -> np.ndarray:
    """Return which of the paths are URLs: bool (F,)."""
    if b"://" not in joined(paths).tobytes():
        return np.zeros(len(paths), bool)
    return np.fromiter(map(is_remote, paths), bool, len(paths))


def _stats_of(paths: Sequence[str]) -> list[tuple[int, ...]]:
    """Return sizes in bytes, and modification times in ns or versions; -1 and 0 if lacking."""
    sizes, times = np.zeros(len(paths), np.int64), np.zeros(len(paths), np.int64)
    are_urls = np.fromiter(map(is_remote, paths), bool, len(paths))
    urls, files = np.flatnonzero(are_urls).tolist(), np.flatnonzero(~are_urls).tolist()
    _, sizes[files], times[files] = statuses_of([paths[place] for place in files])
    if urls:
        from gdsdata.storage.objects import sizes_and_versions

        sizes[urls], times[urls] = sizes_and_versions([paths[place] for place in urls])
    return [tuple(sizes.tolist()), tuple(times.tolist())]

"""The files and folders of a kept index: as they are when it is made, and whether they still are.

`kept_index` says what is compared.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from gdsdata.distinct import distinct
from gdsdata.formats.expansion import Folder, folder_now
from gdsdata.formats.index import Format, SampleIndex
from gdsdata.formats.listing import Listing
from gdsdata.storage.heads import statuses_of
from gdsdata.storage.paths import chosen, joined
from gdsdata.storage.urls import is_remote

LEAST_CHECKED, CHECK_S = 256, 0.25
_CHECKED_AT_ONCE = 1024  # behind the first ones

Other = tuple[str, int, int]  # a file's path, its size in bytes, and its modification time in ns or version


@runtime_checkable
class HasSideFiles(Protocol):
    """A format that reads more files than those that are named, or that have samples."""

    def side_files(self, paths: list[str]) -> list[str]:
        """Return the files beside ``paths`` that say what the samples are."""


def others_of(listing: Listing, format: Format, index: SampleIndex) -> list[Other]:
    """Return the files that an index was made from, but that have no samples, as they are now.

    Args:
        listing: of the source.
        format: that made the index.
        index: of all files of ``listing``.
    """
    beside = format.side_files(list(listing.paths)) if isinstance(format, HasSideFiles) else []
    without_samples = dict.fromkeys([*listing.paths, *listing.states, *beside]).keys() - set(index.paths)
    return list(zip(sorted(without_samples), *_stats_of(sorted(without_samples)), strict=True))


def newest_ns(listing: Listing, index: SampleIndex, others: list[Other]) -> int:
    """Return the newest modification time of the folders and files, in ns; objects have none."""
    times = [folder.mtime_ns for folder in listing.folders]
    times += [mtime_ns for path, _, mtime_ns in others if not is_remote(path)]
    times.append(int(index.mtime_ns[~_are_urls(index.paths)].max(initial=0)))
    return max(times)


def are_as_they_were(index: SampleIndex, folders: list[list], others: list[list]) -> bool:
    """Return whether these folders and files, and files with samples, are as they were."""
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


def have_no_version(index: SampleIndex, others: list[Other]) -> bool:
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

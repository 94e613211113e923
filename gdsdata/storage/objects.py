"""Which version of each object this process reads: its size and its tag.

A list says both, and so costs no request an object. Other objects are asked for, many at a time.
Identities are kept until a source is listed anew, so a data set reads one version of each object.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from gdsdata.storage.store import ObjectInfo
from gdsdata.storage.stores import store_of

# Requests in flight: each waits for the server, and for nothing of this machine.
REQUESTS_AT_ONCE = 64


class Identity(NamedTuple):
    """A version of an object: see `ObjectInfo`."""

    size_bytes: int
    tag: str

    @property
    def version(self) -> int:
        """63 bits that identify it: the ``mtime_ns`` of an index."""
        return _version_of(self.tag)


@functools.lru_cache(maxsize=4096)
def _version_of(tag: str) -> int:
    return ObjectInfo("", 0, tag).version


def no_version() -> int:
    """Return the version of objects whose server names none: nothing tells theirs apart."""
    return _version_of("")


_known: dict[str, Identity] = {}
# Prefixes that were listed, and whether folders below them were, too: what is not known there is
# not there.
_listed: dict[str, bool] = {}


def note(prefix: str, is_deep: bool, infos: Iterable[ObjectInfo]) -> None:
    """Take what a list says.

    Args:
        prefix: the begin of all URLs in it.
        is_deep: it has the objects of folders below, too.
        infos: all of its objects.
    """
    note_each(infos)
    _listed[prefix] = is_deep


def note_each(infos: Iterable[ObjectInfo]) -> None:
    """Take what is said of these objects, and not of others."""
    _known.update((info.url, Identity(info.size_bytes, info.tag)) for info in infos)


def forget(*prefixes: str) -> None:
    """Forget all objects whose URLs begin with one of ``prefixes``, and which are not there."""
    for url in [url for url in list(_known) if url.startswith(prefixes)]:
        _known.pop(url, None)
    for listed in list(_listed):
        if listed.startswith(prefixes) or any(prefix.startswith(listed) for prefix in prefixes):
            _listed.pop(listed, None)


def identities(urls: Sequence[str]) -> list[Identity]:
    """Return the versions of objects, which keep them for this process.

    Raises:
        FileNotFoundError: one is not there; its ``filename`` is the URL.
        PermissionError, IoError: as the store raises them.
    """
    _ask_for_unknown(urls)
    for url in urls:
        if url not in _known:
            raise missing(url)
    return [_known[url] for url in urls]


def identity_of(url: str) -> Identity:
    """Return the version of one object: see `identities`."""
    return identities([url])[0]


def newest(url: str) -> Identity:
    """Return the version that the store has now. It is not kept.

    Raises:
        FileNotFoundError, PermissionError, IoError: as the store raises them.
    """
    store, location = store_of(url)
    info = store.head(location.key)
    return Identity(info.size_bytes, info.tag)


def sizes_and_versions(urls: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes in bytes and versions of objects, int64 each; -1 and 0 of one that is not there.

    Raises:
        PermissionError, IoError: as the store raises them.
    """
    _ask_for_unknown(urls)
    said = [(one.size_bytes, one.version) if (one := _known.get(url)) else (-1, 0) for url in urls]
    sizes, versions = np.array(said, np.int64).reshape(-1, 2).T.copy()
    return sizes, versions


def missing(url: str) -> FileNotFoundError:
    """Return the error for an object that is not there."""
    return FileNotFoundError(errno.ENOENT, "there is no such object", url)


def _ask_for_unknown(urls: Sequence[str]) -> None:
    unknown = [url for url in dict.fromkeys(urls) if url not in _known]
    for url, found in zip(unknown, _headed(unknown), strict=True):
        if found is not None:
            _known[url] = found


def _headed(urls: Sequence[str]) -> Iterable[Identity | None]:
    if len(urls) < 2:
        return [_head(url) for url in urls]
    with ThreadPoolExecutor(min(REQUESTS_AT_ONCE, len(urls)), "gdsdata-objects") as threads:
        return list(threads.map(_head, urls))


def _is_known_to_lack(url: str) -> bool:
    return any(
        url.startswith(prefix) and (is_deep or "/" not in url[len(prefix) :])
        for prefix, is_deep in list(_listed.items())
    )


def _head(url: str) -> Identity | None:
    if _is_known_to_lack(url):
        return None
    try:
        return newest(url)
    except FileNotFoundError:
        return None

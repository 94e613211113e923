"""Ranges of objects, read beside the batches: headers, directories, indexes."""

from __future__ import annotations

import http.client
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple
from urllib.parse import urlsplit

from gdsdata.errors import CorruptData, IoError
from gdsdata.storage.objects import REQUESTS_AT_ONCE, Identity
from gdsdata.storage.stores import store_of


class Range(NamedTuple):
    """Bytes of one version of an object: at least one, and all within its size."""

    url: str
    identity: Identity
    offset: int
    length: int


_lock = threading.Lock()
_threads: tuple[int, ThreadPoolExecutor] | None = None  # with its process


def begin(wanted: Range) -> Future[bytes]:
    """Begin to read a range. The result has exactly its length.

    It raises `CorruptData` if the object was replaced, ``FileNotFoundError`` if it was deleted,
    and `IoError` for other failures.
    """
    return _pool().submit(_get, wanted)


def read_many(wanted: Sequence[Range]) -> list[bytes]:
    """Read ranges, many at a time: see `begin`."""
    if len(wanted) == 1:
        return [_get(wanted[0])]
    begun = [begin(one) for one in wanted]
    try:
        return [one.result() for one in begun]
    finally:
        for one in begun:
            one.cancel()


def _pool() -> ThreadPoolExecutor:
    global _threads
    with _lock:
        if _threads is None or _threads[0] != os.getpid():
            _threads = os.getpid(), ThreadPoolExecutor(REQUESTS_AT_ONCE, "gdsdata-ranges")
        return _threads[1]


def _get(wanted: Range) -> bytes:
    url, identity, offset, length = wanted
    store, location = store_of(url)
    access = store.access(location.key)
    parts = urlsplit(access.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=60)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        said = {**access.headers, "Range": f"bytes={offset}-{offset + length - 1}"}
        connection.request("GET", target, headers=said)
        response = connection.getresponse()
        data = response.read(length + 1)
    except (OSError, http.client.HTTPException) as error:
        message = f"indexing {url}: reading {length} bytes at {offset} failed: {error}"
        raise IoError(getattr(error, "errno", None) or 5, message, url, offset, length) from None
    finally:
        connection.close()
    if response.status == 404:
        raise FileNotFoundError(2, "there is no such object", url)
    tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
    if response.status in (412, 416) or (response.status in (200, 206) and tag.strip('"') != identity.tag.strip('"')):
        raise CorruptData(f"{url} was replaced while it was read: index it anew", url, offset, length)
    if response.status != 206 or len(data) != length:
        message = f"indexing {url}: {length} bytes at {offset} were answered with {response.status}, {len(data)} bytes"
        raise IoError(5, message, url, offset, length)
    return data

"""Fetch whole objects into the local cache."""

from __future__ import annotations

import errno
import posixpath
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from gdsdata.errors import CorruptData, IoError
from gdsdata.io import engine
from gdsdata.progress_bars import Bar, bar
from gdsdata.storage import objects, transport, web_urls
from gdsdata.storage.cache import Cache
from gdsdata.storage.failures import shown_text, shown_url
from gdsdata.storage.store import ObjectInfo, Store
from gdsdata.storage.stores import store_of
from gdsdata.storage.urls import is_remote

_REQUESTS = 16  # in flight
_LOOKS_AGAIN_S = 0.05
_STALL_TIMEOUT_S = 10.0  # as HttpOptions in csrc/backend/http_client.h has it
_MOST_QUOTED = 200  # characters of a header, in an error

_clock = time.monotonic
_sleep = time.sleep


class Fetched(NamedTuple):
    """The bytes of an object that were missing, by what became of them.

    Attributes:
        fetched_bytes: are in the cache now.
        refused_bytes: the cache had no room for them.
        held_bytes: another process claimed them and did not fetch them, perhaps because it is
            stopped.
    """

    fetched_bytes: int
    refused_bytes: int
    held_bytes: int = 0


def fetch(urls: Sequence[str], cache: Cache, progress: Callable[[ObjectInfo, Fetched], None] | None = None) -> bool:
    """Fetch the missing blocks of objects.

    Args:
        urls: of the objects, in the versions that `objects` knows of them.
        progress: called after each object.

    Returns:
        Whether all blocks are in the cache now.

    Raises:
        FileNotFoundError, PermissionError, IoError: as `Store` says.
        CorruptData: an object was replaced in the meantime.
        ValueError: one of them is no URL.
    """
    if local := [url for url in urls if not is_remote(url)]:
        raise ValueError(f"'{local[0]}' is a local file, which no cache keeps: give the URL of objects")
    complete = True
    known = objects.identities(urls)
    with ThreadPoolExecutor(_REQUESTS) as threads:
        for url, one in zip(urls, known, strict=True):
            info = ObjectInfo(url, one.size_bytes, one.tag)
            with bar(f"fetching {posixpath.basename(shown_url(url))}", info.size_bytes) as shown:
                counts = _fetch_object(info, cache, threads, shown)
            complete = complete and not counts.refused_bytes and not counts.held_bytes
            if progress is not None:
                progress(info, counts)
    return complete


def _fetch_object(info: ObjectInfo, cache: Cache, threads: ThreadPoolExecutor, shown: Bar) -> Fetched:
    if info.version == objects.no_version():
        url = shown_url(info.url)
        message = f"{url}: the server names no version (no ETag, no Last-Modified), and no cache keeps such an object"
        raise IoError(errno.ENOTSUP, f"{message}: serve it with one of them, or copy it to a local disk", url)
    cached = cache.blocks.object(info.url, info.version, info.size_bytes, info.tag)
    if cached is None:
        return Fetched(0, info.size_bytes)
    store, location = store_of(info.url)

    def length_of(number: int) -> int:
        return min(cached.block_bytes, info.size_bytes - number * cached.block_bytes)

    def block(number: int) -> Fetched | None:
        """Fetch a block if it is missing; None: another process has claimed it."""
        length = length_of(number)
        claim = cached.claim(number)
        if claim == "elsewhere":
            return None
        shown.add(length)
        if claim != "claimed":
            return Fetched(0, length if claim == "no room" else 0)
        try:
            body = _read_range(store, location.key, info, number * cached.block_bytes, length)
        except BaseException:
            cached.release(number)
            raise
        return Fetched(length, 0) if cached.fill(number, body) else Fetched(0, length)

    counts, left, changed_s = [], list(range(cached.block_count)), _clock()
    while True:
        done = list(threads.map(block, left))
        counts += [one for one in done if one is not None]
        if any(done):
            changed_s = _clock()
        left = [number for number, one in zip(left, done, strict=True) if one is None]
        if not left or _clock() - changed_s >= _STALL_TIMEOUT_S:
            break
        _sleep(_LOOKS_AGAIN_S)  # a lock of another process ends without an event
    return Fetched(
        sum(one.fetched_bytes for one in counts),
        sum(one.refused_bytes for one in counts),
        sum(map(length_of, left)),
    )


def _read_range(store: Store, key: str, info: ObjectInfo, begin: int, length: int) -> bytes:
    """Return bytes of the version that ``info`` has."""
    wanted = {"Range": f"bytes={begin}-{begin + length - 1}", "Accept-Encoding": "identity"}
    first = transport.Request("GET", store.address(key), wanted, b"", info.url)

    def with_access(request: transport.Request) -> transport.Request:
        access = store.access(key)  # at each attempt: it may have expired
        url = access.url if request is first else request.url
        if not web_urls.have_one_origin(url, access.url):  # a redirect leads to any host
            return request
        return replace(request, url=url, headers={**access.headers, **request.headers})

    response = transport.send(
        first,
        with_access,
        accept=(416,),
        moved=web_urls.redirected,
        renew=lambda: store.doubt_secret(0.0),
        most_bytes=length + 1,  # so that a longer body is seen as such
        may_be_cut=True,
    )
    if error := _wrong_answer(response, info, begin, length):
        raise error
    return response.body


def _wrong_answer(response: transport.Response, info: ObjectInfo, begin: int, length: int) -> Exception | None:
    """Return what is wrong with a range, as csrc/backend/range_verdict.cpp judges it."""
    shown = shown_url(info.url)
    place = f"{shown}, offset {begin}, length {length}"

    def replaced(how: str) -> CorruptData:
        return CorruptData(f"{place}: the object was replaced meanwhile ({how}). Fetch it again.", shown, begin, length)

    def wrong(sent: str) -> IoError:
        message = f"{place}: the server sent {sent}. Check endpoint_url and proxies."
        return IoError(errno.EIO, message, shown, begin, length)

    if response.status == 416:
        return replaced("it is shorter now")
    part, said = response.content_range, response.headers.get("content-range", "")
    if said and part is None:
        return wrong(f'the range "{shown_text(said, _MOST_QUOTED)}"')
    if part and part.total not in (None, info.size_bytes):
        return replaced(f"{info.size_bytes} bytes then, {part.total} now")
    if part and (part.first, part.last) != (begin, begin + length - 1):
        return wrong(f"the bytes {part.first} to {part.last} instead, the last one included")
    if part is None and response.status != 206 and length != info.size_bytes:
        return wrong("the whole object: it does not serve ranges")
    tag = response.headers.get("etag") or response.headers.get("last-modified", "")
    if tag and engine.object_version(tag) != info.version:
        return replaced(f"its tag is {shown_text(tag, _MOST_QUOTED)} now")
    if len(response.body) > length:
        return wrong(f"more than {length} bytes")
    if len(response.body) < length:
        return wrong(f"{len(response.body)} bytes instead of {length}")
    return None

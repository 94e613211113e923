"""Pages of a list, and what a server may not put into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import format_datetime

from gdsdata.errors import CorruptData
from gdsdata.storage.store import ObjectInfo

# A page may be empty (of deleted versions), but not forever.
_MOST_EMPTY_PAGES = 1000


@dataclass
class Page:
    """One page of a list.

    Attributes:
        objects: (key, size in bytes, tag) of each.
        prefixes: the common prefixes.
        next_page: the marker to ask with, or "" at the end.
    """

    objects: list[tuple[str, int, str]] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    next_page: str = ""


def entries(url: str, prefix: str, page_after: Callable[[str], Page]) -> Iterator[ObjectInfo | str]:
    """Yield what pages have, in the order of keys.

    Args:
        url: of the bucket, with a slash at its end: what stands before a key.
        page_after: returns the page at a marker, "" for the first one.

    Raises:
        CorruptData: a page has a key that is not below ``prefix``, or pages do not end.
    """
    marker, empty_pages = "", 0
    while True:
        page = page_after(marker)
        for key in [*page.prefixes, *(key for key, _, _ in page.objects)]:
            check_key(url, prefix, key)
        found: list[tuple[str, ObjectInfo | str]] = [(key, key) for key in page.prefixes]
        found += [(key, ObjectInfo(url + key, size_bytes, tag)) for key, size_bytes, tag in page.objects]
        for _, entry in sorted(found, key=lambda pair: pair[0]):
            yield entry
        empty_pages = 0 if found else empty_pages + 1
        if not page.next_page:
            return
        if page.next_page == marker or empty_pages > _MOST_EMPTY_PAGES:
            raise CorruptData(f"{url}{prefix}: the server's list does not end. Check endpoint_url.", url + prefix)
        marker = page.next_page


def unreadable(url: str, reason: ValueError) -> CorruptData:
    """Return the error for a page of a list that has not the form of one.

    Args:
        url: of the prefix.
    """
    return CorruptData(f"{url}: the server's list {reason}. Check endpoint_url.", url)


def check_key(url: str, prefix: str, key: str) -> None:
    """Raise CorruptData if a server lists a key outside ``prefix``, or one that leaves a folder."""
    if not key.startswith(prefix) or not is_plain(key):
        shown = ascii(key[:200])
        raise CorruptData(
            f"{url}{prefix}: the server lists the key {shown}, which is not below this prefix. Check endpoint_url.",
            url + prefix,
        )


def is_plain(key: str) -> bool:
    """Return whether a key names one object wherever it is used.

    Clients would resolve parts that are ``.`` or ``..``, and a NUL ends a path in an index.
    """
    return "\0" not in key and not {".", ".."} & set(key.split("/"))


def http_date(iso: str) -> str:
    """Return a time of a list as Last-Modified has it, or "" if it is no time."""
    try:
        return format_datetime(datetime.fromisoformat(iso.replace("Z", "+00:00")).astimezone(timezone.utc), usegmt=True)
    except (ValueError, OverflowError):
        return ""

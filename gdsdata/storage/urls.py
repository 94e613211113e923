"""Tell URLs of objects from paths of files, in 30 ns a path: there may be a million."""

from __future__ import annotations

from collections.abc import Sequence

from gdsdata.storage.paths import contain


def is_remote(path: str) -> bool:
    """Return whether ``path`` is the URL of an object: see `location.is_url`."""
    if "://" not in path:
        return False
    from gdsdata.storage.location import is_url  # late: a program that names no URL needs none of it

    return is_url(path)


def have_urls(paths: Sequence[str]) -> bool:
    """Return whether one of them is the URL of an object."""
    return contain(paths, "://") and any(map(is_remote, paths))


def without_query(url: str) -> str:
    """Return a URL without its query. A key of a store has none: it may have any character."""
    return url.partition("?")[0] if url.startswith(("http://", "https://")) else url

"""Find the objects that URLs mean: as `listing` finds files, by lists of their store.

A list says size and version of each object, so that indexing asks for none of them.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from gdsdata.formats.parsers import magics
from gdsdata.storage import objects
from gdsdata.storage.location import location_of
from gdsdata.storage.store import ObjectInfo
from gdsdata.storage.stores import store_of
from gdsdata.storage.urls import without_query

_MAGIC = re.compile(r"[*?\[]")


def files_of_urls(urls: Sequence[str], is_deep: bool = False) -> dict[str, list[str]]:
    """Return the objects that each URL means, if any.

    A URL names an object, a prefix that ends in a slash (its own objects, without those whose name
    begins with a dot), or a glob that means what it means for files. Without a slash at its end, a
    prefix is meant if there is no such object. A name that could be a glob is one if there is
    neither an object nor a prefix with this very name. URLs of http and https are no globs. Those
    whose path ends in ``.txt`` are files with the URLs that are meant.

    Args:
        urls: of any stores.
        is_deep: a prefix means all objects below it, without those whose name or folder begins with
            a dot.

    Raises:
        PermissionError, IoError: a store does not list them, or does not say their sizes.
    """
    objects.forget(*{_folder_of(url) for url in urls})
    plain = [url for url in urls if not (_is_glob(url) or _is_folder(url) or _is_index_file(url))]
    sizes, _ = objects.sizes_and_versions(plain)
    are_there = {url for url, size_bytes in zip(plain, sizes.tolist(), strict=True) if size_bytes >= 0}
    found = {}
    for url in urls:
        if _is_glob(url):
            found[url] = _globbed(url, is_deep)
        elif _is_index_file(url):
            found[url] = _in_index_file(url)
        elif url in are_there:
            found[url] = [url]
        else:
            found[url] = _in_folder(url, is_deep)
    return found


def _is_glob(url: str) -> bool:
    return not url.startswith("http") and _MAGIC.search(url) is not None


def _is_index_file(url: str) -> bool:
    return url.startswith("http") and without_query(url).endswith(".txt")


def _is_folder(url: str) -> bool:
    return url.endswith("/") or not location_of(url).key


def _folder_of(url: str) -> str:
    """Return the literal part of a URL, up to its last slash."""
    literal = _literal_of(url) if _is_glob(url) else url
    if not location_of(literal).key:
        return f"{literal.rstrip('/')}/"
    return literal[: literal.rfind("/") + 1]


def _literal_of(url: str) -> str:
    match = _MAGIC.search(url)
    return url[: match.start()] if match else url


def _in_index_file(url: str) -> list[str]:
    store, location = store_of(url)
    listed = [one for one in store.list(location.key) if isinstance(one, ObjectInfo)]
    objects.note_each(listed)
    return [info.url for info in listed]


def _in_folder(url: str, is_deep: bool) -> list[str]:
    store, location = store_of(url)
    if location.scheme.startswith("http") and not url.endswith("/"):
        return []
    prefix = location.key.rstrip("/") + "/" if location.key else ""
    every = list(store.list(prefix, "" if is_deep else "/"))
    listed = [one for one in every if isinstance(one, ObjectInfo)]
    begin = f"{url.rstrip('/')}/"
    found = _noted(begin, is_deep, listed, lambda info: all(map(_is_shown, info.url[len(begin) :].split("/"))))
    _refuse_tables(begin, every, found)
    return found


def _refuse_tables(folder: str, every: Iterable[ObjectInfo | str], found: Sequence[str]) -> None:
    """Refuse objects of a table with a log: not all of them are current.

    Args:
        folder: the URL of the folder that was listed, with its slash.
        every: the objects and prefixes in it.
        found: the URLs of those that are meant.

    Raises:
        ValueError: some are of a table.
    """
    key = location_of(folder).key
    names = [one.url[len(folder) :] if isinstance(one, ObjectInfo) else one[len(key) :] for one in every]
    joined = "/".join(["", *names])  # one search in all names is faster
    if not any(f"/{log}/" in joined for log in magics.LOGS_OF_TABLES):
        return
    for name in names:
        *above, last = name.split("/")
        for place, log in enumerate(above):
            if log not in magics.LOGS_OF_TABLES or (log == magics.ICEBERG_LOG and not magics.is_of_iceberg(last)):
                continue
            table = folder + "".join(f"{part}/" for part in above[:place])
            if any(url.startswith(table) for url in found) or table == folder:
                from gdsdata.formats.other_kinds import refuse_table  # late: this is for an error

                refuse_table(table, log)


def _globbed(url: str, is_deep: bool) -> list[str]:
    """Return the objects that a glob means.

    An object or a folder that has this very name is meant alone.
    """
    folder, literal = _folder_of(url), _literal_of(url)
    parts = url[len(folder) :].split("/")
    if parts[-1] == "":
        return _in_folder(url, is_deep)  # its name may have brackets
    if parts[-1] == ".":
        return []
    store, location = store_of(url)
    is_flat = len(parts) == 1 and parts[0] != "**"
    matches = _matcher(parts)
    every = list(store.list(location_of(literal).key, "/" if is_flat else ""))
    listed = [one for one in every if isinstance(one, ObjectInfo)]
    if any(info.url == url for info in listed):
        return _noted(literal, not is_flat, listed, lambda info: info.url == url)
    if f"{location.key}/" in every or any(info.url.startswith(f"{url}/") for info in listed):
        return _in_folder(url, is_deep)
    found = _noted(literal, not is_flat, listed, lambda info: matches(info.url[len(folder) :].split("/")))
    _refuse_tables(folder, every, found)
    return found


def _noted(prefix: str, is_deep: bool, listed: list[ObjectInfo], is_meant: Callable[[ObjectInfo], bool]) -> list[str]:
    """Return the URLs of those that are meant. All are known from now on, for formats that ask."""
    objects.note(prefix, is_deep, listed)
    return [info.url for info in listed if is_meant(info) and not info.url.endswith("/")]


def _is_shown(name: str) -> bool:
    return bool(name) and not name.startswith(".")


def _matcher(parts: Sequence[str]) -> Callable[[Sequence[str]], bool]:
    """Return a function that says whether names, part by part, match a glob's parts."""
    tests = [None if part == "**" else _test_of(part) for part in parts]

    last = len(tests) - 1

    def with_skipped(places: set[int]) -> Iterator[int]:
        for place in places:
            yield place
            while place < last and tests[place] is None:  # ** may stand for no folder
                place += 1
                yield place

    def match(names: Sequence[str]) -> bool:
        # The tests that may come next. No recursion: a server's key may have any number of parts.
        places = {0}
        for name in names:
            following: set[int] = set()
            for place in set(with_skipped(places)) - {last + 1}:
                one = tests[place]
                if one is not None:
                    following.update({place + 1} if one(name) else ())
                elif _is_shown(name):  # the last ** stands for all files below
                    following.update({place, last + 1} if place == last else {place})
            places = following
        return last + 1 in places

    return match


def _test_of(part: str) -> Callable[[str], bool]:
    if _MAGIC.search(part) is None:
        return part.__eq__
    matches, finds_hidden = re.compile(fnmatch.translate(part)).match, part.startswith(".")
    return lambda name: bool(name) and matches(name) is not None and (finds_hidden or not name.startswith("."))

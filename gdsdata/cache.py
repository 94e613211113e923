"""``python -m gdsdata.cache [PATH] [--verify] [--prefetch URL] [--empty]``."""

from __future__ import annotations

import argparse
import functools
import sys
import time

from gdsdata import command_output

if __name__ == "__main__":
    command_output.leave_if_interrupted()  # the imports below take a while

from gdsdata.formats.listing import listing_of
from gdsdata.io.remote_access import CACHE_VARIABLE
from gdsdata.progress_bars import show_progress
from gdsdata.storage import prefetch
from gdsdata.storage.cache import Cache, CachedObject, is_cache
from gdsdata.storage.failures import shown_url
from gdsdata.storage.settings import cache_folder
from gdsdata.storage.store import ObjectInfo

_write = functools.partial(command_output.write, "gdsdata.cache")

_DESCRIPTION = """List, verify, warm and empty a local cache of remote objects. Exit status: 0 if everything was
done, 1 if blocks were wrong or not everything could be fetched or removed, 2 for a wrong argument, or a report that
cannot be written, 130 if it was interrupted."""


def main(arguments: list[str] | None = None) -> int:
    """Do what the arguments say, print it, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gdsdata.cache", description=_DESCRIPTION)
    parser.add_argument("path", nargs="?", help=f"the cache folder (default: {CACHE_VARIABLE} of the environment)")
    parser.add_argument("--verify", action="store_true", help="compare every block with its checksum, drop wrong ones")
    parser.add_argument("--prefetch", metavar="URL", help="fetch the objects that this URL means as a source of data")
    parser.add_argument(
        "--cache-bytes", metavar="SIZE", help='the bound for --prefetch, as "500GiB" (default: the last)'
    )
    parser.add_argument("--no-progress", action="store_true", help="draw no progress bars on a terminal")
    parser.add_argument("--empty", action="store_true", help="remove every object that is not in use")
    given = parser.parse_args(arguments)
    if given.cache_bytes is not None and not given.prefetch:
        parser.error("--cache-bytes is for --prefetch")
    if given.no_progress:
        show_progress(False)
    try:
        folder = cache_folder(given.path)
    except ValueError as error:
        parser.error(str(error))
    if folder is None:
        parser.error(f"name the cache folder, or set {CACHE_VARIABLE}")
    if not is_cache(folder) and not given.prefetch:
        parser.error(f"there is no cache in '{folder}'")
    try:
        cache = _open(folder, given)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        return _do(cache, given)
    except KeyboardInterrupt:
        print("gdsdata.cache: interrupted; the cache keeps the blocks that are complete", file=sys.stderr)
        return command_output.INTERRUPTED


def _do(cache: Cache, given: argparse.Namespace) -> int:
    status = 0
    if given.empty:
        status = max(status, _empty(cache))
    if given.prefetch:
        status = max(status, _prefetch(cache, given.prefetch))
    if given.verify:
        status = max(status, _verify(cache))
    _list(cache)
    return status


def _open(folder: str, given: argparse.Namespace) -> Cache:
    if not given.prefetch:
        return Cache(folder)
    if given.cache_bytes is not None:
        return Cache(folder, given.cache_bytes)
    most = Cache(folder).statistics()["most_bytes"] if is_cache(folder) else 0
    if not most:
        raise ValueError(f"'{folder}' has no bound yet: give --cache-bytes SIZE")
    return Cache(folder, most)


def _list(cache: Cache) -> None:
    counted, objects = cache.statistics(), cache.objects()
    bound = f" of at most {_gb(counted['most_bytes'])}" if counted["most_bytes"] else ""
    plural = "" if len(objects) == 1 else "s"
    _write(
        f"{cache.folder}: {len(objects)} object{plural}, {_gb(counted['used_bytes'])}{bound}, "
        f"blocks of {counted['block_bytes'] >> 10} KiB"
    )
    if objects:
        _write(f"{'held':>12} {'size':>12}  {'last use':19}  in use  URL, version")
    for one in objects:
        last_use = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.last_use_s))
        in_use = "yes" if one.is_in_use else "no"
        _write(f"{_gb(one.held_bytes):>12} {_gb(one.size_bytes):>12}  {last_use}  {in_use:6}  {_shown(one)}")


def _verify(cache: Cache) -> int:
    right = wrong = 0
    for one in cache.objects():
        right_here, wrong_here = cache.verify(one.name)
        if wrong_here:
            _write(f"wrong: {wrong_here} blocks of {_shown(one)}; they will be fetched again")
        right, wrong = right + right_here, wrong + wrong_here
    _write(f"verified: {right} blocks are right, {wrong} were wrong and are dropped")
    return 1 if wrong else 0


def _empty(cache: Cache) -> int:
    status = 0
    for one in cache.objects():
        if not cache.evict(one.name):
            _write(f"kept: {_shown(one)}, which is in use")
            status = 1
    return status


def _prefetch(cache: Cache, url: str) -> int:
    def said(info: ObjectInfo, counts: prefetch.Fetched) -> None:
        lacking = f", no room for {_gb(counts.refused_bytes)}" if counts.refused_bytes else ""
        if counts.held_bytes:
            lacking += f", {_gb(counts.held_bytes)} held by another process, which may be stopped"
        _write(f"fetched: {_gb(counts.fetched_bytes)} of {_gb(info.size_bytes)}{lacking}: {shown_url(info.url)}")

    try:
        return 0 if prefetch.fetch(listing_of(url).paths, cache, said) else 1
    except (OSError, ValueError) as error:
        print(f"not fetched: {error}", file=sys.stderr)
        return 1


def _shown(one: CachedObject) -> str:
    """Return a name for people: control characters of a key are escaped."""
    return f"{one.url or one.name}, {one.tag}".encode("unicode_escape").decode("ascii")


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.3f} MB"


if __name__ == "__main__":
    sys.exit(command_output.status_of(main))

"""Answer the engine's requests for access to objects: signed URLs and tokens, renewed in time."""

from __future__ import annotations

import atexit
import errno
import importlib
import os
import re
import threading
from collections.abc import Mapping

from gdsdata.fork_safe import fork_safe_lock
from gdsdata.io import engine

# Resolved by name when the first URL is read: local data needs none of it.
_STORES = ".storage.stores"
_LOCATION = ".storage.location"
_MOST_AT_ONCE = 256
# RFC 9110, 5.1 and 5.5: a name is a token; a value has no control characters but tabs.
_NO_NAME = re.compile(r"[^!#$%&'*+.^_`|~0-9A-Za-z-]")
_NO_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_PATIENCE_S = 0.5  # how often the thread looks whether the program ends

CACHE_VARIABLE = "GDSDATA_CACHE"
# Blocks of a new cache. One request fetches it, and it is read whole for one record of it.
BLOCK_BYTES = 2**20
_NO_NEW_BOUND = 2**64 - 1

_starting = fork_safe_lock()
_thread: threading.Thread | None = None
_process = 0
_folder: str | None = None
_most_bytes: int | None = None
_ends = threading.Event()


def serve() -> None:
    """Have a thread of this process answer, from the first call on.

    Raises:
        BackendUnavailable: there is no libcurl.
    """
    global _thread, _process
    with _starting:
        if _thread is not None and _process == os.getpid():
            return
        stores = importlib.import_module(_STORES, "gdsdata")
        if _folder is not None:  # a forked child: the engine there has no cache yet
            use_cache(_folder, _most_bytes)
        elif _thread is None and (folder := os.environ.get(CACHE_VARIABLE)):
            use_cache(folder, None)
        _thread, _process = (
            threading.Thread(target=_answer, args=(stores,), name="gdsdata-access", daemon=True),
            os.getpid(),
        )
        _thread.start()


def local_path(path: str) -> str:
    """Return a path or URL as `gdsdata.storage.location.local_path` does."""
    if ":/" not in path:
        return path
    found: str = importlib.import_module(_LOCATION, "gdsdata").local_path(path)
    return found


def use_cache(folder: str | None, most_bytes: int | None) -> None:
    """Keep objects that are opened from now on in a folder.

    Args:
        folder: None: objects are not kept.
        most_bytes: of the cache at most. None: the bound stays as it is.

    Raises:
        ValueError: the folder is a URL.
        IoError: the folder cannot be used.
    """
    global _folder, _most_bytes
    if folder is not None:
        folder = make_cache_folder(folder)
    engine.use_cache(folder, _NO_NEW_BOUND if most_bytes is None else most_bytes, BLOCK_BYTES)
    _folder, _most_bytes = folder, most_bytes


def make_cache_folder(folder: str) -> str:
    """Make the folder of a cache for this user alone: it has copies of what credentials protect.

    Users who share a cache make its folder themselves, with the mode that they want.

    Returns:
        Its path.

    Raises:
        ValueError: it is the URL of objects.
        OSError: it cannot be made.
    """
    location = importlib.import_module(_LOCATION, "gdsdata")
    path: str = location.local_folder("cache", folder)
    try:
        os.makedirs(path, 0o700, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise location.not_a_folder("cache", path) from error
    return path


def folder_in_use() -> str | None:
    """Return the folder of the cache that this process has opened; None if there is none."""
    return _folder if _process in (0, os.getpid()) else None


def table_of(url: str) -> engine.FileTable:
    """Return a table of the newest version of an object, which the store is asked for.

    Raises:
        FileNotFoundError, PermissionError, IoError: as the store raises them.
    """
    objects = importlib.import_module(".storage.objects", "gdsdata")
    identity = objects.newest(url)
    return engine.table_of([url], [(identity.size_bytes, identity.version)], [None])


def header_lines(headers: Mapping[str, str]) -> list[str]:
    """Return headers as libcurl takes them.

    libcurl sends them as they are, so a line break in one would begin another header.

    Raises:
        ValueError: a name or a value has a character that no header has. It may be a secret, and is
            not shown.
    """
    for name, value in headers.items():
        if _NO_NAME.search(name) or not name or _NO_VALUE.search(value):
            what = "name is empty, or" if value.isprintable() else "value"
            raise ValueError(
                f"the header {name[:40]!r}: its {what} has a line break or another character that no header may have. "
                "Check headers= and credentials, such as a token that was read from a file with its line's end"
            )
    # To libcurl, "name:" means not to send the header.
    return [f"{name}: {value}" if value else f"{name};" for name, value in headers.items()]


def _answer(stores: object) -> None:
    while not _ends.is_set():
        for wanted in engine.take_access_requests(_MOST_AT_ONCE, _PATIENCE_S):
            try:
                store, location = stores.store_of(wanted.location)  # type: ignore[attr-defined]
                if (age_s := wanted.refused_age_s) is not None:
                    # Perhaps the secret has ended, and nothing had said when it would.
                    store.doubt_secret(age_s)
                access = store.access(location.key)
                wanted.grant(access.url, header_lines(access.headers), access.lifetime_s)
            except FileNotFoundError as error:
                wanted.refuse("not_found", str(error), errno.ENOENT)
            except ValueError as error:
                wanted.refuse("invalid_argument", str(error), errno.EINVAL)
            except BaseException as error:  # a request that is not answered would wait for ever
                number = getattr(error, "errno", None) or errno.EACCES
                wanted.refuse("io", f"{wanted.location}: no access to it: {error}", number)


@atexit.register
def _end() -> None:
    _ends.set()
    if _thread is not None and _process == os.getpid():
        _thread.join(2 * _PATIENCE_S)

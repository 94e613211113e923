"""Answer the engine's requests for access to objects: signed URLs and tokens, renewed in time."""

from __future__ import annotations

import atexit
import errno
import importlib
import os
import threading
import time

from gdsdata.io import engine

# Resolved by name when the first URL is read: local data needs none of it.
_STORES = ".storage.stores"
_MOST_AT_ONCE = 256
_PATIENCE_S = 0.5  # how often the thread looks whether the program ends

CACHE_VARIABLE = "GDSDATA_CACHE"
# Blocks of a new cache. One request fetches it, and it is read whole for one record of it.
BLOCK_BYTES = 2**20
_NO_NEW_BOUND = 2**64 - 1

_starting = threading.Lock()
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


def use_cache(folder: str | None, most_bytes: int | None) -> None:
    """Keep objects that are opened from now on in a folder.

    Args:
        folder: None: objects are not kept.
        most_bytes: of the cache at most. None: the bound stays as it is.

    Raises:
        IoError: the folder cannot be used.
    """
    global _folder, _most_bytes
    if folder is not None:
        os.makedirs(folder, exist_ok=True)
    engine.use_cache(folder, _NO_NEW_BOUND if most_bytes is None else most_bytes, BLOCK_BYTES)
    _folder, _most_bytes = folder, most_bytes


def table_of(url: str) -> engine.FileTable:
    """Return a table of the newest version of an object, which the store is asked for.

    Raises:
        FileNotFoundError, PermissionError, IoError: as the store raises them.
    """
    objects = importlib.import_module(".storage.objects", "gdsdata")
    objects.renew(url)
    identity = objects.identity_of(url)
    return engine.table_of([url], [(identity.size_bytes, identity.version)], [None])


def _answer(stores: object) -> None:
    while not _ends.is_set():
        for wanted in engine.take_access_requests(_MOST_AT_ONCE, _PATIENCE_S):
            try:
                store, location = stores.store_of(wanted.location)  # type: ignore[attr-defined]
                if (age_s := wanted.refused_age_s) is not None:
                    # Perhaps the secret has ended, and nothing had said when it would.
                    store.doubt_secret(time.time() - age_s)
                access = store.access(location.key)
                headers = [f"{name}: {value}" for name, value in access.headers.items()]
                wanted.grant(access.url, headers, access.lifetime_s)
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

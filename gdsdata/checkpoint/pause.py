"""Python's collector of cyclic garbage, held off while a checkpoint's many small objects are made."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_lock = threading.RLock()  # a signal handler may save, too
_pausing: set[int] = set()  # threads
_was_enabled = False


def collector_paused() -> contextlib._GeneratorContextManager[None]:
    """Used by ``with`` or as a decorator, in any number of threads at once.

    A full collection looks through every object of the process, 100 to 200 ms where torch is loaded, and the objects
    of some thousand tensors bring it on: of loads of 3000 tensors, 150 ms each, every third had one. None of those
    objects is garbage. `Reading` and `Writing` let it collect while they wait for storage.
    """
    return _while(pausing=True)


def collector_resumed() -> contextlib._GeneratorContextManager[None]:
    """Within `collector_paused`, while its thread waits for storage: others may train, and make garbage, meanwhile."""
    return _while(pausing=False)


@contextlib.contextmanager
def _while(pausing: bool) -> Iterator[None]:
    thread = threading.get_ident()
    before = thread in _pausing
    try:
        _set(thread, pausing)
        yield
    finally:
        _set(thread, before)


def _set(thread: int, pausing: bool) -> None:
    """In such an order that Ctrl-C at a call in it does not leave the collector off."""
    global _was_enabled
    with _lock:
        if pausing:
            if not _pausing:
                _was_enabled = gc.isenabled()
            _pausing.add(thread)
            gc.disable()
        elif thread in _pausing:
            try:
                _pausing.remove(thread)
            finally:
                if not _pausing and _was_enabled:
                    gc.enable()


def _resume_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    if _pausing and _was_enabled:
        gc.enable()
    _pausing.clear()


os.register_at_fork(after_in_child=_resume_in_child)

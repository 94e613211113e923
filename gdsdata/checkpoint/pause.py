"""Python's collector of cyclic garbage, held off while a checkpoint's many small objects are made."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_pausing = 0
_was_enabled = False


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Used by ``with`` or as a decorator, in any number of threads at once.

    A collection looks through every object of the process: 100 ms where torch is loaded, which is as long as a load of
    GiBs takes, and some thousand new objects bring it on. None of them is garbage here.
    """
    global _pausing, _was_enabled
    with _lock:
        if _pausing == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pausing += 1
    try:
        yield
    finally:
        with _lock:
            _pausing -= 1
            if _pausing == 0 and _was_enabled:
                gc.enable()


def _resume_in_child() -> None:
    global _lock, _pausing
    _lock = threading.Lock()
    if _pausing and _was_enabled:
        gc.enable()
    _pausing = 0


os.register_at_fork(after_in_child=_resume_in_child)

"""Python's collector of cyclic garbage, held off while a checkpoint's many small objects are made."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator

_lock = threading.RLock()  # a signal handler may save, too
_pausing: set[object] = set()  # threads, and each `LongPause`
_was_enabled = False


def collector_paused() -> contextlib._GeneratorContextManager[None]:
    """Used by ``with`` or as a decorator, in any number of threads at once.

    A full collection looks through every object of the process, 100 to 200 ms where torch is loaded, and the objects
    of some thousand tensors bring it on: of loads of 3000 tensors, 150 ms each, every third had one. None of those
    objects is garbage. `Reading` and `Writing` let it collect while they wait for storage.
    """
    return _while(pausing=True)


def collector_resumed() -> contextlib._GeneratorContextManager[None]:
    """Within `collector_paused`, while its thread waits for storage: others may train, and make garbage, meanwhile.

    The youngest objects, those of the pause, are looked through at once: else the next object would bring on the full
    collection that was held off, in this thread, and before it has asked storage for anything.
    """
    return _while(pausing=False)


class LongPause:
    """A pause from one call of a library to another, which does not come where the library has failed in between."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None
        self._ends_at_s = 0.0

    def begin(self, most_s: float) -> None:
        """It ends by itself after so many seconds. One that has begun goes on for so long from now."""
        ends_at_s = time.monotonic() + most_s
        with _lock:  # which the timer needs: it cannot end what has not begun
            before, is_sooner = self._timer, ends_at_s < self._ends_at_s
            self._ends_at_s = ends_at_s
            if before is None or is_sooner:
                if before is not None:
                    before.cancel()
                self._start_timer(most_s)  # first: what is paused without it might stay so
            _set(self, True)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None  # it has a lock, and what has one cannot be pickled
        _set(self, False)

    def _start_timer(self, after_s: float) -> None:
        self._timer = threading.Timer(after_s, self._end_if_due)
        self._timer.daemon = True
        self._timer.start()

    def _end_if_due(self) -> None:
        with _lock:
            if threading.current_thread() is not self._timer:
                return
            left_s = self._ends_at_s - time.monotonic()
            if left_s > 0:  # it was begun again meanwhile
                self._start_timer(left_s)
            else:
                self.end()


@contextlib.contextmanager
def _while(pausing: bool) -> Iterator[None]:
    thread = threading.get_ident()
    before = thread in _pausing
    if before and not pausing:
        gc.collect(0)
    try:
        _set(thread, pausing)
        yield
    finally:
        _set(thread, before)


def _set(who: object, pausing: bool) -> None:
    """In such an order that Ctrl-C at a call in it does not leave the collector off."""
    global _was_enabled
    with _lock:
        if pausing:
            if not _pausing:
                _was_enabled = gc.isenabled()
            _pausing.add(who)
            gc.disable()
        elif who in _pausing:
            try:
                _pausing.remove(who)
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

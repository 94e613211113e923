"""Python's collector of cyclic garbage, held off while a checkpoint's many small objects are made.

It is held off by its threshold, and not by `gc.disable`: so what a program says by `gc.disable` and `gc.enable`
meanwhile is kept, and a threshold that it sets is told from ours.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_PAUSED = 2_147_480_011  # a number of new objects that no program has, and that no program would choose
_lock = threading.RLock()  # a signal handler may save, too
_pausing: set[int] = set()  # threads
_usual = gc.get_threshold()[0]  # the program's own, while the threshold is `_PAUSED`


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Used by ``with`` or as a decorator, in any number of threads at once.

    A full collection looks through every object of the process, 100 to 200 ms where torch is loaded, and the objects
    of some thousand tensors bring it on: of loads of 3000 tensors, 150 ms each, every third had one. None of those
    objects is garbage. `Reading` and `Writing` let it collect while they wait for storage.

    At the end the youngest objects, those of the pause, are looked through: else the next object would bring on the
    full collection that was held off, in this thread.
    """
    yield from _while(pausing=True)


@contextlib.contextmanager
def collector_resumed() -> Iterator[None]:
    """Within `collector_paused`, while its thread waits for storage: others may train, and make garbage, meanwhile.

    The youngest objects are looked through at once, as at a pause's end, before the thread asks storage for anything.
    """
    yield from _while(pausing=False)


def _while(pausing: bool) -> Iterator[None]:
    thread = threading.get_ident()
    before = thread in _pausing
    if before and not pausing:
        _look_through_the_youngest()
    try:
        _set(thread, pausing)
        yield
        if pausing and not before:
            _look_through_the_youngest()
    finally:
        _set(thread, before)


def _look_through_the_youngest() -> None:
    if gc.isenabled() and _usual > 0:  # else the program wants no collections
        gc.collect(0)


def _set(thread: int, pausing: bool) -> None:
    """In such an order that Ctrl-C at a call in it does not leave the collector off."""
    global _usual
    with _lock:
        if pausing:
            now = gc.get_threshold()[0]
            if now != _PAUSED:  # the first of the threads; or the program has set another one since
                _usual = now
            _pausing.add(thread)
            gc.set_threshold(_PAUSED)
        elif thread in _pausing:
            try:
                _pausing.remove(thread)
            finally:
                try:
                    _end_if_nobody_pauses()
                except BaseException:
                    _end_if_nobody_pauses()
                    raise


def _end_if_nobody_pauses() -> None:
    if not _pausing and gc.get_threshold()[0] == _PAUSED:
        gc.set_threshold(_usual)


def _resume_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    _pausing.clear()
    _end_if_nobody_pauses()


os.register_at_fork(after_in_child=_resume_in_child)

"""Pauses of Python's garbage collector while a checkpoint's objects are made.

A pause sets the collector's threshold, and does not call `gc.disable`. So a program may call
`gc.disable` and `gc.enable` meanwhile, and a threshold that the program sets can be distinguished
from ours.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_PAUSED = 2_147_480_011  # a threshold that no program reaches, and that no program would choose
_lock = threading.RLock()  # guards what follows; reentrant because a signal handler may save, too
_pausing: set[int] = set()  # the threads that pause the collector
_usual = gc.get_threshold()[0]  # the program's own threshold, while the threshold is `_PAUSED`


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector, in any number of threads at once.

    For ``with``, or as a decorator.

    A full collection looks at every object of the process: 100 to 200 ms if torch is loaded. The
    objects of a few thousand tensors cause one, and none of them is garbage. Every third load of
    3000 tensors, which takes 150 ms, would have a full collection. `TensorReader` and `FileWriter`
    resume the collector while they wait for storage.

    If a collection is due at the end, the objects of the pause are collected, and the middle
    generation in its turn. Otherwise the next object would cause the full collection that the pause
    has held off, in this thread.
    """
    yield from _while(pausing=True)


@contextlib.contextmanager
def collector_resumed() -> Iterator[None]:
    """Resume the collector within `collector_paused` while waiting for storage.

    Other threads may train meanwhile, and make garbage. If a collection is due, the youngest
    generation is collected at once, before this thread asks storage for anything.
    """
    yield from _while(pausing=False)


def _while(pausing: bool) -> Iterator[None]:
    thread = threading.get_ident()
    before = thread in _pausing
    if before and not pausing:
        _collect_if_due(oldest=0)
    try:
        _set(thread, pausing)
        yield
        if pausing and not before:
            _collect_if_due(oldest=1)
    finally:
        try:
            _set(thread, before)
        except BaseException:  # Ctrl-C may come as the call begins
            _set(thread, before)
            raise


def _collect_if_due(oldest: int) -> None:
    """Do what the next object would cause, but for generations older than ``oldest``.

    A collection resets the count of new objects. So one that is not due would put off the turn of
    the older generations, for good in a program that saves or loads all the time.
    """
    if gc.isenabled() and _usual > 0:  # else the program wants no collections
        new_objects, young_collections, _ = gc.get_count()
        if new_objects > _usual:
            gc.collect(min(oldest, int(young_collections > gc.get_threshold()[1])))


def _set(thread: int, pausing: bool) -> None:
    """Begin or end the pause of a thread.

    Ctrl-C at any call in it must not leave the collector off.
    """
    global _usual
    with _lock:
        if pausing:
            now = gc.get_threshold()[0]
            if now != _PAUSED:  # this thread is the first one, or the program has set another threshold since
                _usual = now
            _pausing.add(thread)
            gc.set_threshold(_PAUSED)
        elif thread in _pausing:
            try:
                _pausing.remove(thread)
            finally:
                try:
                    _resume_if_unpaused()
                except BaseException:
                    _resume_if_unpaused()
                    raise


def _resume_if_unpaused() -> None:
    if not _pausing and gc.get_threshold()[0] == _PAUSED:
        gc.set_threshold(_usual)


def _resume_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    _pausing.clear()
    _resume_if_unpaused()


os.register_at_fork(after_in_child=_resume_in_child)

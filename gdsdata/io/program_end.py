"""Close quickly what a program leaves open when it ends, while Python still works.

The end has three steps:

1. Python joins the threads of executors. They would complete everything that was submitted, but
   `stop_at_exit` has them drop it.
2. Python calls exit handlers. The engine cancels what waits for storage, and `end_at_exit` closes
   iterators.
3. Python tears modules down. Nothing happens to what is closed by then.

Python does not join daemon threads. It ends one when the thread next acquires the GIL. torch
acquires it while it frees tensors, and a thread that is ended there aborts the process. So a daemon
thread inside an iterator is made to leave it, and is joined, before modules are torn down.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 (its hook is called behind the one below, which is registered later)
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Protocol

    class Stoppable(Protocol):
        """An object whose executor has threads that work ahead."""

        def stop(self) -> None:
            """Drop what has not begun, and end all waits for storage. Does not block."""


class Ending:
    """A function that runs once. Later calls are safe, also at the program's end.

    Args:
        call: frees what an iterator holds.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


_stoppable: weakref.WeakSet[Stoppable] = weakref.WeakSet()
_endings: weakref.WeakKeyDictionary[Generator[Any, None, None], Ending] = weakref.WeakKeyDictionary()
_is_ending = False
_leaving: set[threading.Thread] = set()
# For all daemon threads together. Their waits have been broken off, so they need milliseconds.
_MOST_JOIN_S = 1.0


def stop_at_exit(one: Stoppable) -> None:
    """Stop ``one`` before Python joins its threads; now if the program ends already."""
    _stoppable.add(one)
    if _is_ending:
        one.stop()


def end_at_exit(iterator: Generator[Any, None, None], ending: Ending) -> None:
    """Call ``ending`` when the program ends, if the iterator is still open.

    If a thread is inside the iterator, the iterator ends by itself.
    """
    _endings[iterator] = ending


def leave_if_daemon() -> None:
    """End this thread by SystemExit, if it is a daemon thread of a program that ends."""
    if _is_ending and threading.current_thread().daemon:
        _leaving.add(threading.current_thread())
        raise SystemExit


def _stop_all() -> None:
    global _is_ending
    _is_ending = True
    for one in list(_stoppable):
        one.stop()


def _end_all() -> None:
    joined_until = time.monotonic() + _MOST_JOIN_S
    for iterator, ending in list(_endings.items()):
        while iterator.gi_running and time.monotonic() < joined_until:  # type: ignore[attr-defined]  # of a `def`
            time.sleep(0.001)
        if not iterator.gi_running:  # type: ignore[attr-defined]
            with contextlib.suppress(Exception):  # no caller is left to handle it
                ending()
    for thread in list(_leaving):
        thread.join(max(0.0, joined_until - time.monotonic()))


def _forget_all() -> None:
    """Forget everything in a forked child, which has no threads of its parent."""
    _stoppable.clear()
    _endings.clear()


# Not public, but since Python 3.9 the only hook before threads are joined; concurrent.futures uses
# it too. Without it a program ends later, when its executors have completed everything.
with contextlib.suppress(RuntimeError):  # the program ends while this is imported
    getattr(threading, "_register_atexit", atexit.register)(_stop_all)
atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)

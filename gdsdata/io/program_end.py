"""What a program leaves open when it ends: it is closed while Python still works, and quickly.

The end has three steps. First, Python joins the threads of executors, which otherwise complete all
that was submitted; `stop_at_exit` has them drop it. Then it calls exit handlers; `end_at_exit`
closes iterators there. Last, it tears modules down; what is closed by then does nothing any more.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 (its hook is called behind the one below, which is registered later)
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any, Protocol


class Stoppable(Protocol):
    """Something that has threads of an executor work ahead."""

    def stop(self) -> None:
        """Drop what has not begun, and have no thread wait for storage any more. Does not wait."""


class Ending:
    """A call that is made once, however often it is asked for: also when modules are torn down.

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


def stop_at_exit(one: Stoppable) -> None:
    """Stop it when the program ends, before Python waits for its threads; at once if the program ends already."""
    _stoppable.add(one)
    if _is_ending:
        one.stop()


def end_at_exit(iterator: Generator[Any, None, None], ending: Ending) -> None:
    """Make the call when the program ends, if the iterator is still open; one that a thread is in ends by itself."""
    _endings[iterator] = ending


def is_ending_daemon() -> bool:
    """Whether this is a daemon thread of a program that ends: it may go at any moment, and in silence."""
    return _is_ending and threading.current_thread().daemon


def _stop_all() -> None:
    global _is_ending
    _is_ending = True
    for one in list(_stoppable):
        one.stop()


def _end_all() -> None:
    for iterator, ending in list(_endings.items()):
        if not iterator.gi_running:  # type: ignore[attr-defined]  # a generator of a `def` has it
            with contextlib.suppress(Exception):  # nobody is left to be told
                ending()


def _forget_all() -> None:
    """In a forked child, which has no threads of its parent's."""
    _stoppable.clear()
    _endings.clear()


# Not public, but since 3.9 the only hook before threads are joined: concurrent.futures has its own
# there. Without it a program ends later, when its executors have completed everything.
with contextlib.suppress(RuntimeError):  # of a program that ends while this is imported
    getattr(threading, "_register_atexit", atexit.register)(_stop_all)
atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)

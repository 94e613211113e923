"""Calls that are made beside the caller, also while the program ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def begin_beside(threads: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    """In one of the threads; here and now where the program ends and there are no more: in an `atexit` handler."""
    try:
        return threads.submit(call)
    except RuntimeError:
        done: Future[T] = Future()
        done.set_result(call())
        return done

"""Calls in other threads, also while the interpreter ends.

Executors accept no more calls then.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def submit_or_call(executor: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    """Submit a call to an executor.

    Call it here and now if the executor accepts none (in an `atexit` handler).
    """
    try:
        return executor.submit(call)
    except RuntimeError:
        done: Future[T] = Future()
        done.set_result(call())
        return done


def results_of(futures: list[Future[T]]) -> Iterator[T]:
    """Wait for calls in turn, yield their results, and remove them from the list.

    A future keeps its error, whose traceback keeps the frames that it passed. If one of these had
    the future, all that they have, such as a state, would be kept until garbage is collected.
    """
    while futures:
        future = futures.pop(0)
        try:
            yield future.result()
        finally:
            del future


class DaemonThreads:
    """Threads that make calls until `close`, or until the interpreter has ended.

    Any thread may submit a call.

    Args:
        count: how many threads.
        name: of each.
    """

    def __init__(self, count: int, name: str) -> None:
        calls: _Calls = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=_make_calls, args=(calls,), name=name, daemon=True).start()
        self._calls = calls
        self.close = weakref.finalize(self, _end, calls, count)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have a thread make a call; calls begin in the order of submission."""
        result: Future[T] = Future()
        self._calls.put((result, call))
        return result


def _end(calls: _Calls, count: int) -> None:
    for _ in range(count):
        calls.put(None)


def _make_calls(calls: _Calls) -> None:
    while (one := calls.get()) is not None:
        result, call = one
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)
        del one, result, call  # they may hold tensors

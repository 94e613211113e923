"""Calls in other threads, also while the interpreter ends.

Executors accept no more calls then.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from gdsdata.errors import IoError
from gdsdata.io.captures import stay_beside_captures

T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound=BaseException)

_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class CallThreads:
    """Threads for the calls of one save or load, started when they are needed.

    One thread submits. Unlike those of executors, these share no lock with others. So a signal
    handler may save or load while it interrupts another save or load.

    Args:
        most: how many threads there are at most.
        name: of each.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._calls: _Calls = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._close = weakref.finalize(self, _end, self._calls, most)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have a thread make a call.

        Make it here and now if no thread can start, or after `shutdown`.
        """
        result: Future[T] = Future()
        if len(self._threads) < self._most:
            thread = threading.Thread(target=_make_calls, args=(self._calls,), name=self._name, daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends, or a limit is reached
                thread.start()
                self._threads.append(thread)
        if self._threads:
            self._calls.put((result, call))
        else:
            result.set_result(call())
        return result

    def shutdown(self) -> None:
        """Cancel calls that have not begun, and wait for those that have."""
        with contextlib.suppress(queue.Empty):
            while (one := self._calls.get_nowait()) is not None:
                one[0].cancel()
        self._close()
        self._most, threads = 0, self._threads
        self._threads = []
        for thread in threads:
            thread.join()


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

    Raises:
        IoError: no thread can start.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        self.close = weakref.finalize(self, _end, self._calls, count)  # first: Ctrl-C may come as a thread starts
        with refusal_explained():
            for _ in range(count):
                threading.Thread(target=_make_calls, args=(self._calls,), name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have a thread make a call; calls begin in the order of submission."""
        result: Future[T] = Future()
        self._calls.put((result, call))
        return result


def saving_thread() -> ThreadPoolExecutor:
    """Return a thread that saves. The interpreter's end waits for it.

    It starts here. If the first call started it and it could not start, the executor would keep the
    call, and make it when a later one starts the thread. If Ctrl-C came as it starts, the executor
    would not know it, and `shutdown` would not wait for it.

    Raises:
        IoError: no thread can start.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="gdsdata-save")
    with refusal_explained():
        thread.submit(bool)
    return thread


@contextlib.contextmanager
def refusal_explained() -> Iterator[None]:
    """Raise `IoError` if a limit keeps a thread from starting."""
    try:
        yield
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        message = "could not start a thread; raise the limit of processes (ulimit -u, or pids.max of the container)"
        raise IoError(errno.EAGAIN, f"{message} or of memory") from error


def _end(calls: _Calls, count: int) -> None:
    for _ in range(count):
        calls.put(None)


def _make_calls(calls: _Calls) -> None:
    while (one := calls.get()) is not None:
        stay_beside_captures()
        result, call = one
        del one
        # The call may hold tensors. When its result is known, the program may end, and a thread
        # that frees a tensor then aborts it.
        try:
            value = call()
        except BaseException as error:
            del call
            result.set_exception(error)
        else:
            del call
            result.set_result(value)
            del value
        del result


def without_traceback(error: ErrorT) -> ErrorT:
    """Return an error without its traceback, whose frames keep all that they use."""
    try:
        return copy.copy(error)
    except Exception:  # it cannot be copied
        return error

"""Reads with a future each. One thread completes all futures of an engine.

A few bytes that the page cache has are read before their future is returned. A thread that waits
for the only read in progress does a worker's part, and completes the future itself.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from gdsdata.errors import EngineClosed
from gdsdata.io.engine import File, endings_of, is_remote, table_of_one

# This many of the files read last stay open: to open and map one takes longer than a small read.
_KEPT_FILES = 8


class _Callbacks(threading.local):
    """Whether this thread runs a callback whose future was done when it was added."""

    are_running = False


_callbacks = _Callbacks()


class _Reading(Future[torch.Tensor]):
    """A future whose waiting thread helps with the read.

    Args:
        path, size_bytes, offset: of the read.
    """

    def __init__(self, path: str, size_bytes: int, offset: int) -> None:
        super().__init__()
        self._place = path, size_bytes, offset

    def __repr__(self) -> str:
        path, size_bytes, offset = self._place
        return f"<Read of {size_bytes} bytes from offset {offset} of '{path}', {self._state.lower()}>"

    help: Callable[[float], object] | None = None

    def add_done_callback(self, fn: Callable[[Future[torch.Tensor]], object]) -> None:
        outer, _callbacks.are_running = _callbacks.are_running, self.done()
        try:
            super().add_done_callback(fn)
        finally:
            _callbacks.are_running = outer

    def result(self, timeout: float | None = None) -> torch.Tensor:
        return super().result(self._left_of(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(self._left_of(timeout))

    def _left_of(self, timeout: float | None) -> float | None:
        help_it = self.help  # the thread may remove it meanwhile
        if self.done() or help_it is None:
            return timeout
        began = time.monotonic()
        help_it(math.inf if timeout is None else timeout)
        return None if timeout is None else max(began + timeout - time.monotonic(), 0)


class _Call(NamedTuple):
    future: _Reading
    files: Any
    into: torch.Tensor
    offset: int
    before: Any
    is_background: bool


class ReadCalls:
    """Reads by one engine.

    Args:
        shared: the engine.
        most: reads in progress at a time; more are queued.
        owner: after it is freed, the thread completes all reads and ends.
    """

    def __init__(self, shared: Any, most: int, owner: object) -> None:
        self._shared, self._most = shared, most
        # A daemon, because a program that ends abandons its reads, and does not join this thread.
        self._thread = threading.Thread(target=self._complete_futures, name="gdsdata-reads", daemon=True)
        self._endings = endings_of(shared, self._thread)
        self._changing = threading.RLock()  # a future's callback may read
        self._waiting: deque[_Call] = deque()
        self._under_way: dict[int, tuple[_Call, Any]] = {}
        self._ended: deque[tuple[_Call, Any]] = deque()  # the thread completes these
        self._being_completed: set[_Reading] = set()  # threads that waited for them complete these
        self._numbers = itertools.count()
        self._is_closed = False
        self._kept: dict[str, tuple[tuple[int, ...], Any]] = {}  # by path: the file as it was seen, and its table
        self._thread.start()
        self._end = weakref.finalize(owner, self._endings.close)

    def read(
        self, path: str, into: torch.Tensor, offset: int, before: Any, is_background: bool
    ) -> Future[torch.Tensor]:
        """Queue a read. The future's result is ``into``, when its bytes are in place.

        Raises:
            EngineClosed: after `close`.
        """
        with self._changing:
            if self._is_closed:
                raise EngineClosed("this Engine was closed; make another one")
            future = _Reading(path, into.nbytes, offset)
            try:
                table = self._table_of(path)
                if into.nbytes == 0 and not table.has_remote:
                    File(path)  # the engine opens no file for no bytes
            except Exception as error:  # of an object's store
                future.set_exception(error)
                return future
            call = _Call(future, table, into, offset, before, is_background)
            if self._waiting or len(self._under_way) >= self._most:
                future.help = functools.partial(self._help_in_callback, future)
                self._waiting.append(call)
                return future
            # A chain of callbacks, each of which reads, must not become one stack.
            finished = self._begin(call, at_once=not _callbacks.are_running)
        if finished is not None:
            _complete(call, finished)
        return future

    def _table_of(self, path: str) -> Any:
        """Return the kept table if the file of that name is still the same, or a new one."""
        seen: tuple[int, ...] = ()  # of an object: one version is read, by one request for its size
        if not is_remote(path):
            try:
                status = os.stat(path)
            except (OSError, ValueError):  # the engine says why
                return table_of_one(path)
            seen = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        kept = self._kept.pop(path, None)
        if kept is None or kept[0] != seen:
            kept = seen, table_of_one(path)
        self._kept[path] = kept
        if len(self._kept) > _KEPT_FILES:
            del self._kept[next(iter(self._kept))]
        return kept[1]

    def close(self) -> None:
        """Refuse new reads, and wait for those that were queued and for the thread."""
        with self._changing:
            self._is_closed = True
            calls = [*self._waiting, *(call for call, _ in [*self._under_way.values(), *self._ended])]
            futures = [*(call.future for call in calls), *self._being_completed]
        for future in futures:
            self._help_in_callback(future, math.inf)
        concurrent.futures.wait(futures)
        self._end()
        if threading.current_thread() is not self._thread:  # else a callback closes; the thread ends behind it
            self._thread.join()
        self._kept.clear()

    def _begin_some(self) -> None:
        """Begin as many queued reads as may be in progress."""
        while self._waiting and len(self._under_way) < self._most:
            call = self._waiting.popleft()
            call.future.help = None
            self._begin(call)

    def _begin(self, call: _Call, at_once: bool = False) -> Any | None:
        """Begin a read, unless its future was canceled.

        With ``at_once``, a few bytes that the page cache has are read here. The read is then
        returned, for `_complete`.
        """
        number, future = next(self._numbers), call.future
        if not future.set_running_or_notify_cancel():
            return None
        try:
            begun = self._shared.begin_range(
                call.files, call.offset, call.into, call.before, call.is_background, at_once, self._endings, number
            )
        except Exception as error:
            future.set_exception(error)
            return None
        if begun.finished():
            return begun
        self._under_way[number] = call, begun
        future.help = functools.partial(self._help, future, number, begun)
        return None

    def _help(self, future: _Reading, number: int, begun: Any, seconds: float) -> None:
        """Help with the read until it ends or ``seconds`` pass, and complete its future.

        The thread completes the future instead if it is faster. If several reads are in progress,
        the thread completes several at a time, which is faster than each by itself.
        """
        if self._help_in_callback(future, seconds) or len(self._under_way) > 1:
            return
        is_completed = False
        self._endings.begin_waiting(number)
        try:
            if begun.wait(seconds):
                self._complete_one(number, begun)
                is_completed = True
        finally:  # an interrupted wait leaves it to the thread
            self._endings.end_waiting(number, is_completed)

    def _help_in_callback(self, future: _Reading, seconds: float) -> bool:
        """Complete reads until ``future`` is done or ``seconds`` pass, if the caller is the thread.

        It is if a future's callback waits for another read. Return whether it is.
        """
        if threading.current_thread() is not self._thread:
            return False
        waited_until = time.monotonic() + seconds
        while not future.done():
            if self._ended:
                _complete(*self._ended.popleft())
                continue
            oldest = next(iter(self._under_way.items()), None)
            if oldest is None:  # another thread completes it
                break
            number, (_, begun) = oldest
            if not begun.wait(max(0.0, waited_until - time.monotonic())):
                break
            self._complete_one(number, begun)
        return True

    def _complete_one(self, number: int, begun: Any) -> None:
        with self._changing:
            call, _ = self._under_way.pop(number, (None, None))
            if call is None:
                return
            self._being_completed.add(call.future)
            self._begin_some()
        _complete(call, begun)
        self._being_completed.discard(call.future)

    def _complete_futures(self) -> None:
        while numbers := self._endings.take():
            with self._changing:
                self._ended += [self._under_way.pop(number) for number in numbers if number in self._under_way]
                self._begin_some()
            while self._ended:  # keeps no tensor while this thread sleeps
                _complete(*self._ended.popleft())
        left = [begun for _, begun in list(self._under_way.values())]  # the program ends, and does not need these
        for begun in left:
            begun.cancel()
        for begun in left:
            begun.abandon()


def _complete(call: _Call, begun: Any) -> None:
    call.future.help = None
    try:
        begun.wait(math.inf)  # for copies to a GPU
        begun.check()
    except Exception as error:
        call.future.set_exception(error)
    else:
        call.future.set_result(call.into)

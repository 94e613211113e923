"""gloo groups of this package's own, with the ranks of a program's group.

A gloo operation fails at once on the neighbors of a rank that has ended. The other ranks wait until
the operation's timeout. So a rank whose operation fails breaks the group off (`break_off`): that
closes its connections, and the error passes from rank to rank.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from gdsdata.errors import ITERATOR_CLOSED, EngineClosed
from gdsdata.torch_private import keys_of_gloo

if TYPE_CHECKING:
    from torch.distributed import Work

# A wait for the others looks this often whether it is still wanted. Each look costs some 30 us.
_LOOK_S = 0.05
# The others are there already when a group is made, so that takes milliseconds.
_CONNECT = timedelta(seconds=30)
# A store that works answers within milliseconds; gloo's own wait for it takes up to 1 s longer.
_ANSWER_S = 2.0
_BREAK_TAG = 1  # of messages that nobody sends

# By the program's group, a connection to its store. It is kept, because torch's TCPStore serves
# nobody for 5 s after every 25 connections that were closed (torch 2.15, 26 November 2026).
_stores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
# By the program's group and a name, the number of the last group that this process tried to make.
_numbers: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


class NotBegun(RuntimeError):
    """Not all ranks have come to make a group."""


def store_of(group: Any) -> Any:
    """Return a connection to a process group's store that blocks no call of the program."""
    if group not in _stores:
        _stores[group] = group.get_group_store().clone()
    return _stores[group]


def gloo_group(
    group: Any,
    name: str,
    rank: int,
    count: int,
    timeout: timedelta,
    is_wanted: Callable[[], bool] | None = None,
    is_only: bool = False,
) -> Any:
    """Return a new gloo group, which all ranks make.

    There may be several groups of one name, one after the other. Ranks may have tried to make one
    in vain: they agree on a number that is new to all of them.

    A thread makes it: a store whose host hangs answers no call, and torch has no timeout for that.

    Args:
        group: of the program. Its store is used.
        name: of the new group.
        rank, count: of this process among the ranks of the new group, and how many there are.
        timeout: how long to wait for the others, now and in each operation.
        is_wanted: the wait ends by `EngineClosed` when it returns False.
        is_only: there is no other group of this name, so nothing of it stays in the store.

    Raises:
        NotBegun: a rank does not come in time.
        RuntimeError: the store is gone or does not answer, or the ranks cannot connect.
        EngineClosed: the group is not wanted any more. It is caused by `NotBegun` if a rank had not
            come yet.
    """
    making = _Making(group, name, rank, count, timeout, is_only)
    threading.Thread(target=making.run, name="gdsdata-connect", daemon=True).start()
    try:
        while True:
            with contextlib.suppress(NotDone):
                return making.made.result(_LOOK_S)
            if is_wanted is not None and not is_wanted():
                raise EngineClosed(ITERATOR_CLOSED) from making.given_up()
            if time.monotonic() > making.until + _ANSWER_S:
                raise RuntimeError("the store of the process group does not answer: its host has ended or hangs")
    finally:
        making.is_wanted = False


class _Making:
    """A group that a thread makes.

    Args:
        others: as of `gloo_group`.

    Attributes:
        made: gets the group, or the error.
        until: when the step in progress should have ended.
        is_wanted: False ends the wait for the others.
    """

    def __init__(self, group: Any, name: str, rank: int, count: int, timeout: timedelta, is_only: bool) -> None:
        self._of_program, self._name, self._rank, self._count, self._timeout = group, name, rank, count, timeout
        self._is_only = is_only
        self.made: Future[Any] = Future()
        self.until = time.monotonic() + timeout.total_seconds()
        self.is_wanted = True

    def run(self) -> None:
        try:
            self.made.set_result(self._make())
        except BaseException as error:
            self.made.set_exception(error)

    def given_up(self) -> BaseException | None:
        """End the wait for the others, and return the error; None: they have come, or may have."""
        self.is_wanted = False
        with contextlib.suppress(NotDone):
            return self.made.exception(_ANSWER_S)
        return None

    def _make(self) -> Any:
        store = torch.distributed.PrefixStore(self._name, store_of(self._of_program))
        keys = [f"here/{one}" for one in range(self._count)]
        try:
            number = self._agreed_number(store, keys)
            connect = min(self._timeout, _CONNECT)
            self.until = time.monotonic() + connect.total_seconds()
            store_of_number = torch.distributed.PrefixStore(str(number), store)
            made = torch.distributed.ProcessGroupGloo(store_of_number, self._rank, self._count, connect)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the store may be gone
                store.set(keys[self._rank], "")  # others wait until this rank tries again
            raise
        made.set_timeout(self._timeout)
        of_gloo = [f"{number}/{key}" for key in keys_of_gloo(self._count)]
        _delete_when_all_are_connected(store, [*of_gloo, *(keys if self._is_only else ())], number, self._count)
        return made

    def _agreed_number(self, store: Any, keys: Sequence[str]) -> int:
        """Wait for the others, and return the highest number of all. gloo's own wait has no end.

        Args:
            store: of all groups of this name.
            keys: of the ranks' numbers.
        """
        numbers = {} if self._is_only else _numbers.setdefault(self._of_program, {})
        number, said = numbers.get(self._name, 0) + 1, 0
        pause_s = 0.001
        while True:
            if number != said:
                store.set(keys[self._rank], str(number))
                numbers[self._name] = said = number
            found = [int(one or 0) for one in store.multi_get(keys)] if store.check(keys) else [0]
            if min(found) == number == max(found):
                return number
            number = max(number, *found)
            if not self.is_wanted:
                raise NotBegun("the wait for them was given up before all of them had begun")
            if time.monotonic() > self.until:
                raise NotBegun(f"after {self._timeout.total_seconds():g} s not all of them had begun")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S)


def _delete_when_all_are_connected(store: Any, keys: Sequence[str], number: int, count: int) -> None:
    """Delete the keys of a group, if this process is the last one to connect and the store can."""
    connected = f"{number}/connected"
    with contextlib.suppress(RuntimeError):  # the group does not need the store any more
        if store.add(connected, 1) == count:
            for key in [*keys, connected]:
                store.delete_key(key)


def complete(work: Work, is_wanted: Callable[[], bool]) -> None:
    """Wait for an exchange over gloo.

    Raises:
        RuntimeError: it failed.
        EngineClosed: it is not wanted any more. It still uses its memory.
    """
    while not work.is_completed():
        if not is_wanted():
            raise EngineClosed(ITERATOR_CLOSED)
        with contextlib.suppress(RuntimeError):  # that it is not completed yet
            work.wait(timedelta(seconds=_LOOK_S))
    work.wait()


def words_of(error: Exception | str) -> str:
    """Return the text of an error of gloo or a store, without torch's file names and advice."""
    said = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[[^]]*\] |\.? This (is|may) .*$", "", said).rstrip(".")


def break_off(group: Any) -> None:
    """End all operations of a gloo group: those of the others fail too. Any thread calls it.

    gloo's groups have no such function (`abort` does nothing). But if a wait for a message takes
    too long, gloo closes all connections of the group. A wait for a rank that has ended fails
    before, and closes nothing. So each rank is tried.
    """
    rank, count = group.rank(), group.size()
    message = torch.empty(1, dtype=torch.uint8)
    for distance in range(1, count):
        with contextlib.suppress(RuntimeError):
            group.recv([message], (rank + distance) % count, _BREAK_TAG).wait(timedelta(milliseconds=1))

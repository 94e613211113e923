"""Locks and forks: locks that a fork leaves open, and those of others that a child needs.

- A fork waits for imports of gdsdata's modules that other threads have begun. A forked child has
  the lock of a module that another thread was importing, and not that thread. So its own import of
  the module would wait forever. Modules are imported when they are first used: a DataLoader may
  start its workers while another thread saves for the first time.
- A fork waits for `forks_wait`, which is for packages of others that import parts of themselves
  within their first call. It waits for half a minute at most.
- A child gets a new lock for sharing tensors. Each new data set shares one, on any thread, and a
  DataLoader's worker shares its batches.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gdsdata import torch_private


def fork_safe_lock(make: Callable[[], Any] = threading.Lock) -> Any:
    """Return a lock that is free in a child process, whatever thread of the parent held it.

    A DataLoader forks its workers while threads of the parent ask for access to objects.

    It is Python's own lock. Ctrl-C during methods of a class around it could leave it locked.

    Args:
        make: makes the lock. `threading.RLock` is for what a signal handler may need while the code
            that it interrupts has the lock.
    """
    lock = make()
    _locks.add(lock)
    return lock


_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # as the standard library does with its own


_FORK_WAITS_S = 30.0
_first_calls = fork_safe_lock(threading.RLock)  # a thread may fork within its own call
_forking = threading.local()


@contextlib.contextmanager
def forks_wait() -> Iterator[None]:
    """Let forks of other threads wait until this block ends, because it imports modules."""
    with _first_calls:
        yield


def _wait_for_first_calls() -> None:
    _forking.waited = _first_calls.acquire(timeout=_FORK_WAITS_S)


def _go_on() -> None:
    if _forking.waited:
        _first_calls.release()


def _wait_for_imports() -> None:
    for name in list(sys.modules):  # 0.12 ms for 1344 modules, 121 of them gdsdata's
        if name.startswith("gdsdata."):
            with contextlib.suppress(Exception):  # the other thread raises it
                importlib.import_module(name)


os.register_at_fork(after_in_child=_renew_all)
os.register_at_fork(before=_wait_for_imports, after_in_child=torch_private.renew_sharing_lock)
# Called before the others, which were registered earlier: imports may begin while it waits.
os.register_at_fork(before=_wait_for_first_calls, after_in_parent=_go_on)


if TYPE_CHECKING:  # type checkers know what it returns
    from functools import cached_property as cached_property
else:

    class cached_property:
        """`functools.cached_property` without the lock that it has in Python 3.10 and 3.11.

        That lock is one for all objects of a class. A child waits for it forever if another thread
        of its parent held it at the fork. Here, two threads may compute a value: it has to be the
        same.
        """

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self._compute = compute
            self.__doc__ = compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: object | None, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = self._compute(instance)
            return instance.__dict__.setdefault(self._name, value)  # the next use does not come here

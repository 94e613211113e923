"""Locks that a fork leaves open, and computed attributes that have none."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


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


os.register_at_fork(after_in_child=_renew_all)


class cached_property(Generic[T]):
    """`functools.cached_property` without the lock that it has in Python 3.10 and 3.11.

    That lock is one for all objects of a class. A child waits for it forever if another thread of
    its parent held it at the fork. Here, two threads may compute a value: it has to be the same.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> cached_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...

    def __get__(self, instance: object | None, owner: type | None = None) -> cached_property[T] | T:
        if instance is None:
            return self
        value = self._compute(instance)
        return instance.__dict__.setdefault(self._name, value)  # the next use does not come here

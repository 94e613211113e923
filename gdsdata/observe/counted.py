"""Objects that count what `gdsdata.top` shows of this process, noted while they exist.

Noting an object costs a microsecond and starts nothing. `observe.live` reads what is noted.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

Counters = dict[str, Any]  # numbers that only rise, or dicts of such numbers

if TYPE_CHECKING:
    from typing import Protocol

    class Counting(Protocol):
        """An object of this process that counts. Any thread may call its methods."""

        def counters(self) -> Counters:
            """Return numbers that only rise, or dicts of them."""

        def gauges(self) -> dict[str, Any]:
            """Return numbers and names of this moment."""


class Noted:
    """Objects of one kind. Any thread may call it. A forked child begins with none.

    The object that is noted in a forked child has counted in its parent too. So its counters are
    those of the child alone.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._objects: dict[int, tuple[weakref.ref[Counting], Counters]] = {}
        os.register_at_fork(after_in_child=self._objects.clear)

    def __contains__(self, one: Counting) -> bool:
        return any(noted() is one for noted, _ in list(self._objects.values()))

    def add(self, one: Counting, counted_before: Counters | None = None) -> None:
        """Note an object.

        Args:
            one: the object.
            counted_before: its counters in another process.
        """
        number = next(self._numbers)
        self._objects[number] = weakref.ref(one, lambda _: self._objects.pop(number, None)), counted_before or {}

    def snapshot(self) -> list[dict[str, Any]]:
        """Return number, gauges and counters of each object, in the order in which they came."""
        found = []
        for number, (noted, before) in list(self._objects.items()):
            if (one := noted()) is not None:
                found.append({"id": number, **one.gauges(), **minus(one.counters(), before)})
            del one
        return found


def minus(counters: Mapping[str, Any], before: Mapping[str, Any]) -> Counters:
    """Return how much each counter has risen, at least 0. A new one has risen from 0."""
    return {
        name: minus(count, before.get(name, {})) if isinstance(count, Mapping) else max(0, count - before.get(name, 0))
        for name, count in counters.items()
    }


class Requests:
    """Requests to stores that Python makes: lists, sizes, small reads and writes.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._renew()
        self._counted = dict.fromkeys(("requests", "retries", "sent_bytes", "received_bytes"), 0)
        os.register_at_fork(after_in_child=self._forget)

    def count(self, attempts: int, sent_bytes: int, received_bytes: int) -> None:
        """Count a request that has ended.

        Args:
            attempts: how often it was sent.
            sent_bytes, received_bytes: of bodies.
        """
        with self._lock:
            self._counted["requests"] += 1
            self._counted["retries"] += attempts - 1
            self._counted["sent_bytes"] += sent_bytes
            self._counted["received_bytes"] += received_bytes

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counted)

    def _renew(self) -> None:
        self._lock = threading.Lock()  # guards _counted

    def _forget(self) -> None:
        self._renew()  # another thread of the parent may have held it
        self._counted = dict.fromkeys(self._counted, 0)


data_sets, saves, store_requests = Noted(), Noted(), Requests()

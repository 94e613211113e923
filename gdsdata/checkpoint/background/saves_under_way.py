"""`SavesUnderWay`: saves that have not ended, and errors that nobody has seen yet."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, wait
from typing import Any

from gdsdata.warn import warn


class SavesUnderWay:
    """The saves of a program, and other work of the thread that saves.

    One thread at a time may call it; any thread `forget`.
    """

    def __init__(self) -> None:
        self._all: list[Future[Any]] = []
        self._unseen: list[Future[str]] = []  # saves whose errors nobody has seen yet

    def __len__(self) -> int:
        return sum(not one.done() for one in self._all)

    def add(self, ended: Future[str]) -> None:
        """Add a save. Its error is raised later, unless `forget` is called before."""
        self.add_silent(ended)
        self._unseen.append(ended)

    def add_silent(self, ended: Future[Any]) -> None:
        """Add work whose error is not raised."""
        self._all = [one for one in self._all if not one.done()]
        self._all.append(ended)

    def forget(self, ended: Future[str]) -> None:
        """Do not raise the error of a save: its caller has seen it."""
        with contextlib.suppress(ValueError):
            self._unseen.remove(ended)

    def raise_unseen(self) -> None:
        """Raise the first error that nobody has seen, of saves that have ended.

        A warning names each of the others.
        """
        done = [one for one in self._unseen if one.done()]
        for ended in done:
            self.forget(ended)
        errors = [error for error in (one.exception() for one in done) if error is not None]
        for other in errors[1:]:
            warn(f"gdsdata: another save failed too: {type(other).__name__}: {other}")
        if errors:
            raise errors[0]

    def wait(self) -> None:
        """Wait until all have ended. Raises as `raise_unseen` does."""
        wait(self._all)
        self._all.clear()
        self.raise_unseen()

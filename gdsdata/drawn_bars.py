"""Draw the bars of `progress_bars` in the terminal, by rich or tqdm.

One thread draws, and only while there are bars.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any, Protocol

_APPEARS_S = 1.0
_REDRAWN_S = 0.1
_REMOVED_S = 2.0  # the longest wait until a bar is removed from the terminal


class Shown(Protocol):
    """A `progress_bars.Bar`."""

    what: str
    total: int | None
    unit: str
    done: int
    began: float


class _Drawn(Protocol):
    """Bars in a terminal, by one of the libraries. One thread calls it."""

    def draw(self, bars: list[Shown]) -> None:
        """Draw these bars, and remove others."""

    def close(self) -> None:
        """Remove all bars, and leave the terminal as it was."""


class _ByRich:
    """Bars by rich."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[said]}")
        self._progress = Progress(*columns, console=Console(file=sys.stderr), transient=True, auto_refresh=False)
        self._tasks: dict[Shown, Any] = {}
        self._progress.start()

    def draw(self, bars: list[Shown]) -> None:
        for gone in self._tasks.keys() - set(bars):
            self._progress.remove_task(self._tasks.pop(gone))
        for one in bars:
            if one not in self._tasks:
                self._tasks[one] = self._progress.add_task(one.what, total=None, said="")
            self._progress.update(self._tasks[one], completed=one.done, total=one.total, said=_said(one))
        self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()


class _ByTqdm:
    """Bars by tqdm."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._tqdm: Any = tqdm
        self._drawn: dict[Shown, Any] = {}

    def draw(self, bars: list[Shown]) -> None:
        for gone in self._drawn.keys() - set(bars):
            self._drawn.pop(gone).close()
        for one in bars:
            if one not in self._drawn:
                form = "{desc}: {percentage:3.0f}%|{bar}| {postfix}" if one.total else "{desc}: {postfix}"
                self._drawn[one] = self._tqdm(desc=one.what, file=sys.stderr, leave=False, bar_format=form)
            drawn = self._drawn[one]
            drawn.n, drawn.total = one.done, one.total
            drawn.set_postfix_str(_said(one), refresh=True)

    def close(self) -> None:
        self.draw([])


def _said(one: Shown) -> str:
    """Return the numbers of a bar, as "1.5 of 3.0 GB, 0.75 GB/s"."""
    count = _bytes if one.unit == "B" else lambda number: f"{number:,.0f} {one.unit}"
    of_total = f" of {count(one.total)}" if one.total else ""
    return f"{count(one.done)}{of_total}, {count(one.done / (time.monotonic() - one.began))}/s"


def _bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _drawn() -> _Drawn | None:
    """Return bars by the library that is installed; None: none is."""
    for library in (_ByRich, _ByTqdm):
        with contextlib.suppress(ImportError):
            return library()
    return None


class Drawer:
    """The thread that draws the bars of a process, while there are any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards everything below
        self._bars: list[Shown] = []
        self._seen: set[Shown] = set()  # those that are in the terminal
        self._thread: threading.Thread | None = None

    def begin(self, one: Shown) -> None:
        """Draw a bar from now on, if it lasts."""
        with self._changed:
            self._bars.append(one)
            self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._draw, name="gdsdata-progress", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread is available: nothing is drawn
                    thread.start()
                    self._thread = thread

    def end(self, one: Shown) -> None:
        """Remove a bar, and wait until the terminal is without it: an error's text may follow."""
        with self._changed:
            self._bars.remove(one)
            self._changed.notify_all()
            self._changed.wait_for(lambda: one not in self._seen, _REMOVED_S)

    def _draw(self) -> None:
        drawn: _Drawn | None = None
        try:
            while (due := self._wait()) is not None:
                if due:
                    drawn = drawn or _drawn()
                    if drawn is None:
                        self._leave()
                        return
                    drawn.draw(due)
                elif drawn is not None:
                    drawn.draw([])
                with self._changed:
                    self._seen &= set(due)
                    self._changed.notify_all()
        except Exception:  # the terminal is gone, and the work goes on
            pass
        finally:
            with contextlib.suppress(Exception):
                if drawn is not None:
                    drawn.close()
            with self._changed:
                self._seen.clear()
                self._changed.notify_all()
                if self._thread is threading.current_thread():
                    self._thread = None

    def _wait(self) -> list[Shown] | None:
        """Wait until something is to be drawn; return the bars, or None if there are none left."""
        with self._changed:
            if self._bars and not self._seen:
                first = min(one.began for one in self._bars) + _APPEARS_S
                self._changed.wait_for(lambda: not self._bars, max(0.0, first - time.monotonic()))
            else:
                self._changed.wait_for(lambda: not self._bars or not self._seen <= set(self._bars), _REDRAWN_S)
            if not self._bars:
                self._thread = None  # a bar that begins now has a new thread
                return None
            due = [one for one in self._bars if time.monotonic() - one.began >= _APPEARS_S]
            self._seen |= set(due)
            return due

    def _leave(self) -> None:
        """Wait until no bar is left, if no library can draw them."""
        with self._changed:
            self._seen.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._bars)


drawer = Drawer()


def _renew() -> None:
    """Forget the parent's bars in a forked child, which has not the thread that draws them."""
    global drawer
    drawer = Drawer()


os.register_at_fork(after_in_child=_renew)

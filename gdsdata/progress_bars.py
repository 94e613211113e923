"""Progress bars for what takes long: saves, loads, indexing, unpacking, filling a cache.

A bar is drawn on stderr if that is a terminal, by rich or tqdm if one is installed, in the main
process of rank 0. It appears after a second and is removed at the end. `show_progress` and the
environment variable ``GDSDATA_PROGRESS=0`` switch bars off.

Code that completes bytes or files calls `current` once, and then `add` of what that returned:
without a bar, `add` does nothing. `drawn_bars` draws.
"""

from __future__ import annotations

import contextlib
import contextvars
import multiprocessing.process
import os
import sys
import threading
import time
from collections.abc import Iterator

VARIABLE = "GDSDATA_PROGRESS"

_is_on = True


def show_progress(on: bool) -> None:
    """Switch the progress bars of this process on or off. They are on at first.

    A bar appears on a terminal only: see `gdsdata.progress_bars`.

    Args:
        on: False: no bar begins from now on.
    """
    global _is_on
    _is_on = on


class Bar:
    """One progress bar. Any thread may call it.

    Args:
        what: is done, for people.
        total: how much there is to do; None: `expect` says it, or nobody knows.
        unit: "B" for bytes, else what is counted.
    """

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done, self.began = 0, time.monotonic()
        self._lock = threading.Lock()  # guards done and total

    def add(self, count: int) -> None:
        """Count what is done."""
        with self._lock:
            self.done += count

    def expect(self, count: int) -> None:
        """Count what there is to do."""
        with self._lock:
            self.total = count + (self.total or 0)


class _NoBar(Bar):
    """Stands for a bar that nobody sees."""

    def add(self, count: int) -> None:
        pass

    def expect(self, count: int) -> None:
        pass


_NO_BAR = _NoBar("", None, "")
_current: contextvars.ContextVar[Bar] = contextvars.ContextVar("gdsdata_progress", default=_NO_BAR)


def current(unit: str = "B") -> Bar:
    """Return the bar of the call that this thread is in.

    Without one, and if that counts something else than ``unit``, it is a bar that does nothing.
    """
    found = _current.get()
    return found if found.unit == unit else _NO_BAR


def bar(what: str, total: int | None = None, unit: str = "B") -> contextlib.AbstractContextManager[Bar]:
    """Return a bar for ``with``: see `Bar` for the arguments. There, `current` returns it."""
    return _shown(Bar(what, total, unit)) if _are_seen() else contextlib.nullcontext(_NO_BAR)


def _are_seen() -> bool:
    if not _is_on or os.environ.get(VARIABLE) == "0" or sys.stderr is None:
        return False
    try:
        return sys.stderr.isatty() and _rank() == 0 and multiprocessing.process.parent_process() is None
    except ValueError:  # it is closed
        return False


def _rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    said = next(filter(None, map(os.environ.get, ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"))), "0")
    return int(said) if said.isdecimal() else 0


@contextlib.contextmanager
def _shown(one: Bar) -> Iterator[Bar]:
    from gdsdata import drawn_bars  # late, because few programs have a bar

    drawer, token = drawn_bars.drawer, _current.set(one)
    drawer.begin(one)
    try:
        yield one
    finally:
        _current.reset(token)
        drawer.end(one)


def _renew() -> None:
    """Forget the parent's bars in a forked child, which draws its own."""
    _current.set(_NO_BAR)


os.register_at_fork(after_in_child=_renew)

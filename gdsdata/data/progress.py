"""How far the iterators of a data set have come: the part of its state that moves."""

from __future__ import annotations

import multiprocessing
import os
import threading
import weakref
from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from gdsdata.data.loaders import fetcher_of_worker
from gdsdata.data.shared_rows import new_rows, numbers_in
from gdsdata.warn import warn
from gdsdata.whole_numbers import shown, whole_number

# A DataLoader's workers share these rows with the process that began them. The first two have a
# column for each worker: the epoch of its next iterator, and the batches of it that its last one
# handed out. The third one has the notes below. From `_LOOP` on, these are of the newest loop of
# persistent workers: its place in a count of such loops, its loader's seed, which loop of this
# loader it is, and the epoch and moves that its first worker found. `_LOADED`: the batches of a
# loaded place, until an iterator begins there.
_EPOCHS, _BATCHES, _NOTES = range(3)
_IS_IN_WORKERS, _HAS_WARNED, _MOVES, _CHANGES, _LOOP, _SEED, _OF_LOADER, _LOOP_EPOCH, _LOOP_MOVES, _LOADED = range(10)
_ON_BREAK = ("restart", "continue")
_LARGEST_EPOCH = 2**62  # of set_epoch()


def checked_epoch(epoch: int, largest: int = _LARGEST_EPOCH) -> int:
    """Return the epoch of ``set_epoch`` as a plain int.

    Raises:
        ValueError: it is no whole number from 0 to ``largest``.
    """
    try:
        number = whole_number("epoch", epoch)
    except TypeError:
        number = -1
    if not 0 <= number <= largest:
        raise ValueError(f"epoch={shown(epoch)} is not a whole number in 0 to {largest}")
    return number


class Begun:
    """An iterator that begins.

    Args:
        epoch: that it is of.
        start: how many of its batches are left out, because they were handed out before.
        numbers: the epoch's batches that it gives.
        workers: how many worker processes share the epoch; 0 outside of a DataLoader's workers.
        moves: how often their parent had set the place before.
    """

    def __init__(self, epoch: int, start: int, numbers: range, workers: int, moves: int) -> None:
        self.epoch, self.start, self.numbers, self.workers = epoch, start, numbers, workers
        self.moves = moves


class _Position:
    """Where an iterator is, or begins: behind so many batches of an epoch.

    With ``workers``, these are batches of the share that one of them has.
    """

    def __init__(self, epoch: int, batches: int, workers: int) -> None:
        self.epoch, self.batches, self.workers = epoch, batches, workers


def position_in(state: Mapping[str, Any], largest_epoch: int = _LARGEST_EPOCH) -> _Position:
    """Return the position that a state of a data set or a mix says.

    Its epoch may be half as large again as that of ``set_epoch``. No loop gets that far behind it,
    so each state that is taken can be loaded, and the rows have place for the next epoch.

    Args:
        state: as `Progress.state` returned it.
        largest_epoch: of ``set_epoch``.

    Raises:
        ValueError: one of its numbers is missing, or cannot be.
    """
    numbers = []
    most = {"epoch": largest_epoch * 3 // 2, "batches": _LARGEST_EPOCH, "workers": _LARGEST_EPOCH}
    for name, largest in most.items():
        try:
            number = whole_number(name, state.get(name))
        except TypeError:
            number = -1
        if not 0 <= number <= largest:
            said = f"is {shown(state[name])}" if name in state else "is missing"
            raise ValueError(
                f"the state's {name!r} {said}, and should be a whole number in 0 to {largest}: load a state as "
                "state_dict() returned it"
            )
        numbers.append(number)
    return _Position(*numbers)


class Progress:
    """Epoch and batches of a data set's newest iterator; the others move nothing.

    An epoch is over when its last batch is handed out, whether or not its iterator is asked for
    another one.

    The epoch is shared with the worker processes of a DataLoader: the workers of the next epoch are
    other processes, and must find the epoch that those before them reached. It is over when all of
    them have handed out their shares. Another process that has the data set (a rank that was
    spawned or forked with it) has an epoch of its own.

    Args:
        on_break: whether an epoch that was broken off starts again (``"restart"``; None does, with
            a warning) or goes on behind the last batch that was handed out (``"continue"``).

    Raises:
        ValueError: ``on_break`` is another value.
    """

    def __init__(self, on_break: str | None = None) -> None:
        if on_break is not None and on_break not in _ON_BREAK:
            raise ValueError(f"on_break={on_break!r} must be None, 'restart' or 'continue'")
        self._on_break = on_break
        # By the process that shares them with its workers. Each column is a worker's, because one
        # may end its share before another begins.
        self._rows_of = {os.getpid(): new_rows()}
        _living.add(self)
        self._position: _Position | None = None  # None: the epoch's beginning
        self._set_in: int | None = None  # the process that asked for the position, if no iterator has begun there yet
        self._loaded_step: int | list[int] | None = None
        self._newest: Begun | None = None
        self._at_start: tuple[int, int] | None = None  # `_epoch_and_moves` when a worker was started, until it begins
        # These are a worker's: the count of loops when it was started, the loops of its loader that
        # it has begun, and the fetcher of the last one.
        self._loops_at_start, self._loops = 0, 0
        self._fetcher: weakref.ref[object] | None = None

    @property
    def changes(self) -> int:
        """How often this process or one that shares its rows has noted that files have changed."""
        return int(self._rows()[_NOTES, _CHANGES])

    def note_change(self) -> None:
        """Note that files have changed, so each of the processes indexes them anew."""
        self._rows()[_NOTES, _CHANGES] += 1

    def _rows(self) -> np.ndarray:
        return numbers_in(self._shared_rows())

    def _shared_rows(self) -> torch.UntypedStorage:
        if get_worker_info() is not None:
            parent = multiprocessing.parent_process()
            if parent is not None and parent.pid in self._rows_of:
                return self._rows_of[parent.pid]
        return self._rows_of[os.getpid()]

    def _become_of(self, parent: int, own_rows: torch.UntypedStorage | None = None) -> None:
        """Note that this process has this object from ``parent``.

        If it is a worker, it shares the parent's rows. For workers of its own it has its own rows.

        Args:
            parent: a process.
            own_rows: what `_copied_rows` returned there.
        """
        own_rows = self._copied_rows(parent) if own_rows is None else own_rows
        self._rows_of = {parent: self._rows_in(parent), os.getpid(): own_rows}

    def _rows_in(self, process: int) -> torch.UntypedStorage:
        rows = self._rows_of.get(process)
        return next(iter(self._rows_of.values())) if rows is None else rows

    def _copied_rows(self, process: int) -> torch.UntypedStorage:
        """Return a copy of a process's rows, for one that it begins."""
        return new_rows(numbers_in(self._rows_in(process)))

    @property
    def epoch(self) -> int:
        """The epoch of the next iterator."""
        return _epoch_and_moves(self._rows())[0]

    def _set(self, row: int, value: int) -> None:
        worker = get_worker_info()
        first = worker.id if worker else 0
        is_last = worker is None or first == worker.num_workers - 1  # it also sets the columns beyond its number
        self._rows()[row, first : None if is_last else first + 1] = value

    def go_to(self, epoch: int) -> None:
        """Have the next iterator begin this epoch.

        It begins at the place that was loaded, or is to be continued, if that is in this epoch;
        else at the epoch's beginning. Then iterators that began before move nothing any more.
        """
        newest, now = self._newest, self._position
        if newest and now and (now.epoch, now.batches, now.workers) == (epoch, 0, newest.workers):
            return  # loaders of accelerate call this between `iter` and the first `next`
        is_kept = self._set_in is not None or self._on_break == "continue"
        place = self._position if is_kept else None
        if place is None or not place.epoch == self.epoch == epoch:
            self._move_to(_Position(epoch, 0, 0))

    def _move_to(self, position: _Position) -> None:
        rows = self._rows()
        if get_worker_info() is None:
            rows[_NOTES, _IS_IN_WORKERS], rows[_NOTES, _LOADED] = False, position.batches
            if rows[_BATCHES].any() or (rows[_EPOCHS] != position.epoch).any():
                rows[_NOTES, _MOVES] += 1
        self._set(_EPOCHS, position.epoch)
        self._set(_BATCHES, 0)
        self._position, self._set_in, self._loaded_step, self._newest = position, os.getpid(), None, None
        self._at_start = None

    def state(self) -> dict[str, int]:
        """Return the state that `load` takes.

        Raises:
            RuntimeError: a DataLoader's worker processes have the position.
        """
        worker = get_worker_info()
        if worker is None and self._rows()[_NOTES, _IS_IN_WORKERS]:
            raise RuntimeError(
                "state_dict(): a DataLoader's worker processes iterate this data set, ahead of the loop, so this "
                "process does not know how many batches the loop has had. Use torchdata's StatefulDataLoader and its "
                "state_dict(), or num_workers=0 (the engine's own threads read ahead). Between epochs, set_epoch() of "
                "the next one makes the state known."
            )
        if self._position is not None:
            return dict(vars(self._position))
        # The other workers may be in the epoch before.
        epoch = int(self._rows()[_EPOCHS, worker.id]) if worker else self.epoch
        return {"epoch": epoch, "batches": 0, "workers": worker.num_workers if worker else 0}

    def load(self, state: Mapping[str, Any], epoch_batches: int, step: int | list[int]) -> None:
        """Have the next iterator continue behind the batches that ``state`` counts.

        Iterators that began before it move nothing any more.

        Args:
            state: that `state` returned.
            epoch_batches: how many an epoch has.
            step: samples of a step, with which the batches were counted; of several sources, for
                each.

        Raises:
            ValueError: as `position_in`.
        """
        position = position_in(state)
        if position.workers <= 1 and position.batches >= epoch_batches:  # states had this form at an epoch's end
            position = _Position(position.epoch + 1, 0, position.workers)
        self._move_to(position)
        self._loaded_step = step

    def begin(self, epoch_batches: int, step: int | list[int]) -> Begun:
        """Begin an iterator, which is the newest from now on.

        Raises:
            ValueError: it would go on from a state of another ``step``, in the middle of an epoch
                with another number of workers, or in a worker behind a loop that was broken off. Or
                the worker has begun before a place was loaded.
        """
        worker, position, rows = get_worker_info(), self._position, self._rows()
        now = _epoch_and_moves(rows)
        epoch, moves = self._place_of_loop(worker) if worker else now
        workers = worker.num_workers if worker else 0
        if worker and self._on_break == "continue":
            raise ValueError(
                'on_break="continue" does not work in a DataLoader\'s worker processes: they read ahead of the loop '
                "and do not know where it stopped. Use num_workers=0 (the engine's own threads read ahead)"
            )
        if self._set_in is not None and self._loaded_step not in (None, step):
            raise ValueError(
                f"the state that was loaded is of samples_per_step {self._loaded_step} (batch_size x world_size), and "
                f"here that is {step}: give batch sizes of the same product, and call init_process_group() before "
                "iterating, if there are several ranks"
            )
        # The other workers may not have loaded theirs yet.
        if worker and position is not None and self._set_in == os.getpid():
            epoch = position.epoch
        start = 0
        if position is not None and position.epoch == epoch:
            if self._set_in is not None or self._on_break == "continue":
                start = position.batches
            if start and position.workers != workers:
                raise ValueError(
                    f"the state was taken with num_workers={position.workers} and cannot be resumed with {workers}, "
                    "because each worker counts its own batches"
                )
        if self.is_in_later_loop and rows[_NOTES, _LOADED]:
            raise ValueError(
                "a state of the middle of an epoch was loaded, and a DataLoader's persistent workers that began before "
                "do not have it: make the DataLoader again after load_state_dict(), or load the state of a "
                "StatefulDataLoader into such a loader"
            )
        has_moved = moves != now[1]
        if self._set_in is None and self._on_break is None and not has_moved and self._is_broken_off(epoch):
            self._warn_of_a_restart(epoch, epoch_batches)
        self._set_in, self._position, self._at_start = None, _Position(epoch, start, workers), None
        numbers = range(worker.id if worker else 0, epoch_batches, max(workers, 1))[start:]
        if not has_moved:
            # A share that a broken-off loop had read to its end is open again. An empty one is
            # over.
            self._set(_EPOCHS, epoch if numbers else epoch + 1)
            self._set(_BATCHES, 0)
            rows[_NOTES, _IS_IN_WORKERS], rows[_NOTES, _LOADED] = worker is not None, 0
        self._newest = Begun(epoch, start, numbers, workers, moves)
        return self._newest

    @property
    def is_in_later_loop(self) -> bool:
        """This is a persistent worker, in another loop than its first."""
        return get_worker_info() is not None and self._loops > 1

    def _place_of_loop(self, worker: Any) -> tuple[int, int]:
        """Return epoch and moves for an iterator of this worker.

        All workers of a DataLoader's loop begin the same epoch. Those that are started know it.
        Persistent workers begin each later loop by themselves, when others may have ended their
        shares, or set_epoch() may have been called: the first one notes what it finds.
        """
        rows, fetcher = self._rows(), fetcher_of_worker()
        found = self._at_start or _epoch_and_moves(rows)  # before the notes: a worker notes, then hands out
        if fetcher is not None and self._fetcher is not None and self._fetcher() is fetcher:
            # A wrapper begins epoch after epoch in one loop, in each worker by itself.
            is_moved = self._newest is None or self._has_moved(self._newest)
            return found if is_moved else (int(rows[_EPOCHS, worker.id]), found[1])
        self._fetcher = None if fetcher is None else weakref.ref(fetcher)
        self._loops += 1
        if self._loops == 1:
            return found
        seed, notes = worker.seed - worker.id, rows[_NOTES]
        is_noted = notes[_LOOP] > self._loops_at_start and notes[_SEED] == seed
        if is_noted and notes[_OF_LOADER] > self._loops:
            return found[0], -1  # the loader has left this loop, so it moves nothing
        if not is_noted or notes[_OF_LOADER] < self._loops:
            notes[_LOOP_EPOCH], notes[_LOOP_MOVES] = found
            notes[_LOOP], notes[_SEED], notes[_OF_LOADER] = notes[_LOOP] + 1, seed, self._loops
        return int(notes[_LOOP_EPOCH]), int(notes[_LOOP_MOVES])

    def _is_broken_off(self, epoch: int) -> bool:
        """Return whether an iterator handed out some batches of this epoch, but not all."""
        worker, position, rows = get_worker_info(), self._position, self._rows()
        if position is not None and position.epoch == epoch and position.batches:
            return True
        if worker is None:  # workers may have had the last iterator
            return bool(rows[_BATCHES].any())
        return bool(rows[_BATCHES, worker.id] or rows[_EPOCHS, worker.id] > epoch)

    def _warn_of_a_restart(self, epoch: int, epoch_batches: int) -> None:
        worker, notes = get_worker_info(), self._rows()[_NOTES]
        if notes[_HAS_WARNED] or (worker is not None and worker.id > 0):
            return
        notes[_HAS_WARNED] = True
        at, after = self._position, ""
        if worker is None and at is not None and at.epoch == epoch and at.batches:
            after = f" after {at.batches} of {epoch_batches} batches"
        warn(
            f"gdsdata: epoch {epoch} was broken off{after} and starts again with the same batches. A loop that takes "
            'only some batches of each epoch never sees the others. on_break="continue" goes on behind the last batch '
            'that was handed out; set_epoch() begins another epoch; on_break="restart" is this without a warning.',
            UserWarning,
        )

    def handed_out(self, iterator: Begun, given: int) -> None:
        """Note that ``iterator`` has given so many of its batches."""
        if self._newest is not iterator or self._has_moved(iterator):
            return
        self._position = _Position(iterator.epoch, iterator.start + given, iterator.workers)
        is_over = given == len(iterator.numbers)
        if iterator.workers:
            self._set(_BATCHES, 0 if is_over else given)
        if is_over:
            self._set(_EPOCHS, iterator.epoch + 1)
            if iterator.workers <= 1:  # else the others may have batches left, and this one's state must wait for them
                self._position = None

    def _has_moved(self, iterator: Begun) -> bool:
        """Return whether the parent has set another place since this worker began."""
        return iterator.workers > 0 and bool(self._rows()[_NOTES, _MOVES] != iterator.moves)

    def exhausted(self, iterator: Begun) -> None:
        """Note that ``iterator`` was asked for a batch behind its last one."""
        if self._newest is iterator:
            self._position = None

    def __getstate__(self) -> dict[str, Any]:
        rows: Any = self._shared_rows()
        if get_spawning_popen() is None:  # Torch pickles storages for processes alone that are spawned.
            rows = numbers_in(rows)
        return {**self.__dict__, "_rows_of": {os.getpid(): rows}, **_at_start_of_worker(self._rows())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        ((parent, rows),) = self._rows_of.items()
        if isinstance(rows, np.ndarray):
            self._rows_of[parent] = new_rows(rows)
        self._become_of(parent)
        _living.add(self)


def _epoch_and_moves(rows: np.ndarray) -> tuple[int, int]:
    """Return the epoch of the next iterator, and how often the place was set, as rows say it."""
    return int(rows[_EPOCHS].min()), int(rows[_NOTES, _MOVES])


def _at_start_of_worker(rows: np.ndarray) -> dict[str, Any]:
    """Return the attributes of a `Progress` in a worker that is started now."""
    at_start = _epoch_and_moves(rows)
    return {"_at_start": at_start, "_loops_at_start": int(rows[_NOTES, _LOOP]), "_loops": 0, "_fetcher": None}


_living: weakref.WeakSet[Progress] = weakref.WeakSet()


class _ForChild(threading.local):
    """The rows of the child that this thread forks.

    They are made before the fork. In the child, an operation of torch would wait forever if another
    thread was in the first call of it, which initializes it.
    """

    rows: Mapping[Progress, torch.UntypedStorage] = {}


_for_child = _ForChild()


def _make_rows_of_child() -> None:
    _for_child.rows = {progress: progress._copied_rows(os.getpid()) for progress in list(_living)}


def _drop_rows_of_child() -> None:
    _for_child.rows = {}


def _become_of_parent() -> None:
    for progress in list(_living):
        own_rows = _for_child.rows.get(progress)
        progress._become_of(os.getppid(), own_rows)
        if own_rows is not None:
            progress.__dict__.update(_at_start_of_worker(numbers_in(own_rows)))
    _drop_rows_of_child()


os.register_at_fork(before=_make_rows_of_child, after_in_parent=_drop_rows_of_child, after_in_child=_become_of_parent)

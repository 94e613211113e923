"""How far the iterators of a data set have come: the part of its state that moves."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

_MOST_WORKERS = 1024


class Begun(NamedTuple):
    """An iterator that begins.

    Attributes:
        key: tells it from the others.
        epoch: that it is of.
        start: how many of its batches are left out, because they were handed out before.
        numbers: the epoch's batches that it gives.
        workers: how many worker processes share the epoch; 0 outside of a DataLoader's workers.
    """

    key: object
    epoch: int
    start: int
    numbers: range
    workers: int


class _Position(NamedTuple):
    """Where an iterator is, or begins: behind so many batches of the share that one of ``workers`` has of an epoch."""

    epoch: int
    batches: int
    workers: int


class Progress:
    """Epoch and batches of a data set's newest iterator; the others move nothing.

    An epoch is over when its last batch is handed out, whether or not its iterator is asked for another one.

    The epoch is shared with the worker processes of a DataLoader: the workers of the next epoch are other processes,
    and must find the epoch that those before them reached. It is over when all of them have handed out their shares.
    Another process that has the data set (a rank that was spawned or forked with it) has an epoch of its own.
    """

    def __init__(self) -> None:
        # A cell for each worker, because one may end its share before another begins.
        self._epochs = torch.zeros(_MOST_WORKERS, dtype=torch.int64).share_memory_()
        self._process = os.getpid()  # with whose workers the cells are shared
        self._position: _Position | None = None  # None: the epoch's beginning
        self._set_in: int | None = None  # the process that asked for the position, if no iterator has begun there yet
        self._newest: object | None = None

    def _cells(self) -> torch.Tensor:
        if self._process != os.getpid() and get_worker_info() is None:
            self._epochs = self._epochs.clone().share_memory_()
            self._process = os.getpid()
        return self._epochs

    @property
    def epoch(self) -> int:
        """The epoch of the next iterator."""
        return int(self._cells().min())

    def _set_epoch(self, epoch: int) -> None:
        worker = get_worker_info()
        first = worker.id if worker else 0
        is_last = worker is None or first == worker.num_workers - 1  # it also sets the cells of those beyond its number
        self._cells()[first : None if is_last else first + 1] = epoch

    def go_to(self, epoch: int) -> None:
        """The next iterator begins this epoch; if a place in it was loaded, there, else at its beginning."""
        is_there = self._set_in is not None and self._position.epoch == self.epoch == epoch
        if not is_there:
            self._move_to(_Position(epoch, 0, 0))

    def _move_to(self, position: _Position) -> None:
        self._set_epoch(position.epoch)
        self._position, self._set_in = position, os.getpid()

    def state(self) -> dict[str, int]:
        """The state that `load` takes."""
        worker = get_worker_info()
        if self._position is not None:
            return self._position._asdict()
        # The other workers may be in the epoch before.
        epoch = int(self._cells()[worker.id]) if worker else self.epoch
        return _Position(epoch, 0, worker.num_workers if worker else 0)._asdict()

    def load(self, state: dict[str, Any], epoch_batches: int) -> None:
        """The next iterator goes on behind the batches that ``state`` counts, in an epoch of ``epoch_batches``."""
        position = _Position(state["epoch"], state["batches"], state["workers"])
        if position.workers <= 1 and position.batches >= epoch_batches:  # states had this form at an epoch's end
            position = _Position(position.epoch + 1, 0, position.workers)
        self._move_to(position)

    def begin(self, epoch_batches: int) -> Begun:
        """An iterator begins, and is the newest from now on.

        Raises:
            ValueError: it would go on in the middle of an epoch with another number of workers.
        """
        worker, position, epoch = get_worker_info(), self._position, self.epoch
        workers = worker.num_workers if worker else 0
        if worker and self._set_in == os.getpid():  # the other workers may not have loaded theirs yet
            epoch = position.epoch
        start = 0
        if self._set_in is not None and position.epoch == epoch:
            start = position.batches
            if start and position.workers != workers:
                raise ValueError(
                    f"the state was taken with num_workers={position.workers} and cannot be resumed with {workers}, "
                    "because each worker counts its own batches"
                )
        self._newest, self._set_in = object(), None
        self._position = _Position(epoch, start, workers)
        numbers = range(worker.id if worker else 0, epoch_batches, max(workers, 1))[start:]
        # A share that a broken-off loop had read to its end is open again; an empty one is over.
        self._set_epoch(epoch if numbers else epoch + 1)
        return Begun(self._newest, epoch, start, numbers, workers)

    def handed_out(self, iterator: Begun, given: int) -> None:
        """``iterator`` has given so many of its batches."""
        if self._newest is not iterator.key:
            return
        self._position = _Position(iterator.epoch, iterator.start + given, iterator.workers)
        if given == len(iterator.numbers):
            self._set_epoch(iterator.epoch + 1)
            if iterator.workers <= 1:  # else the others may have batches left, and this one's state must wait for them
                self._position = None

    def exhausted(self, iterator: Begun) -> None:
        """``iterator`` was asked for a batch behind its last one."""
        if self._newest is iterator.key:
            self._position = None

    def __getstate__(self) -> dict[str, Any]:
        self._cells()  # a process that is spawned from this one may be a worker of this one, and shares its cells
        return self.__dict__

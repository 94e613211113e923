"""How far the iterators of a data set have come: the part of its state that moves."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

_MOST_WORKERS = 1024


class Begun(NamedTuple):
    """An iterator that begins.

    Attributes:
        key: tells it from the others.
        start: how many of its batches are left out, for they were handed out before.
        worker, workers: it gives batches ``worker + i * workers`` of the epoch.
    """

    key: object
    start: int
    worker: int
    workers: int


class Progress:
    """Epoch and batches of a data set's newest iterator; the others move nothing.

    The epoch is shared with a DataLoader's worker processes: the next epoch's workers are other processes, and must
    find the epoch that those before them reached.
    """

    def __init__(self) -> None:
        # One place a worker, for one may end an epoch before another begins it.
        self._epochs = torch.zeros(_MOST_WORKERS, dtype=torch.int64).share_memory_()
        self._batches = 0  # of this epoch that the newest iterator gave
        self._newest: object | None = None
        self._resume_at = 0  # where the next iterator starts
        self._resume_workers: int | None = None

    @property
    def epoch(self) -> int:
        """Of this process's next iterator."""
        worker = get_worker_info()
        return int(self._epochs[worker.id if worker else 0])

    def _set_epoch(self, epoch: int) -> None:
        worker = get_worker_info()
        first = worker.id if worker else 0
        is_last = worker is None or first == worker.num_workers - 1  # speaks for those of a later, larger number too
        self._epochs[first : None if is_last else first + 1] = epoch

    def go_to(self, epoch: int) -> None:
        """The next iterator begins this epoch."""
        self._set_epoch(epoch)
        self._batches, self._resume_at, self._resume_workers = 0, 0, None

    def state(self) -> dict[str, int]:
        """For `load`."""
        worker = get_worker_info()
        return {"epoch": self.epoch, "batches": self._batches, "workers": worker.num_workers if worker else 0}

    def load(self, state: dict[str, Any]) -> None:
        """The next iterator goes on behind the batches that ``state`` counts."""
        self._set_epoch(state["epoch"])
        self._batches = self._resume_at = state["batches"]
        self._resume_workers = state["workers"]

    def begin(self) -> Begun:
        """An iterator begins, and is the newest from now on.

        Raises:
            ValueError: it would go on in the middle of an epoch with another number of workers.
        """
        start, self._resume_at = self._resume_at, 0
        worker = get_worker_info()
        workers = worker.num_workers if worker else 0
        if start and self._resume_workers != workers:
            raise ValueError(
                f"the state was taken with num_workers={self._resume_workers} and cannot be resumed with {workers}, "
                "because each worker counts its own batches"
            )
        self._batches = start
        self._newest = object()
        return Begun(self._newest, start, worker.id if worker else 0, max(workers, 1))

    def handed_out(self, iterator: Begun, batches: int) -> None:
        """``iterator`` has given so many of the epoch's batches, those before its start included."""
        if self._newest is iterator.key:
            self._batches = batches

    def ended(self, iterator: Begun, epoch: int) -> None:
        """``iterator`` has given all of this epoch: the next one is the next iterator's."""
        if self._newest is iterator.key:
            self._set_epoch(epoch + 1)
            self._batches = 0

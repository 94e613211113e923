"""The ranks that save and restore together, and how an error of one reaches all."""

from __future__ import annotations

import atexit
import pickle
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed

from gdsdata.checkpoint.background.arguments import seconds
from gdsdata.collective.gloo import NotBegun, break_off, gloo_group, words_of
from gdsdata.collective.shared_errors import contents_of_all, packed, unpacked
from gdsdata.errors import RankLost, SaveAborted

T = TypeVar("T")


class Ranks:
    """One rank, or all ranks of a process group.

    All of them make the same calls, in the same order. They exchange results over a gloo group of
    their own. If a rank is lost, it is broken off, so all others learn of that at once, and all
    later calls raise `RankLost` too, until `connect` is called.

    Args:
        group: with all ranks; None: the default group, if it has several ranks.
        timeout_s: how long ranks wait for one another.

    Attributes:
        timeout_s: as given.
        rank: of this process.
        count: how many there are.
        members: the rank in the default group of each.

    Raises:
        RankLost: a rank does not come in time.
    """

    def __init__(self, group: Any, timeout_s: float) -> None:
        distributed = torch.distributed
        together = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        self._of_program = (group or distributed.group.WORLD) if together else None
        self.timeout_s = seconds("timeout_s", timeout_s)
        self.rank = distributed.get_rank(group) if together else 0
        self.count = distributed.get_world_size(group) if together else 1
        self.members: list[int] = distributed.get_process_group_ranks(group) if together else [0]
        self._group: Any = None  # of gloo, which one thread uses
        self._lost = ""  # the text of the error, if a rank is lost
        _all.add(self)
        self.connect()

    def connect(self) -> None:
        """Connect the ranks, if they are not connected. All of them call it.

        Raises:
            RankLost: a rank does not come in time.
        """
        program = self._of_program
        if program is None or self._group is not None:
            return
        timeout = timedelta(seconds=self.timeout_s)
        try:
            self._group = gloo_group(program, "gdsdata/ranks", self.rank, self.count, timeout)
        except RuntimeError as error:  # of gloo or the store
            raise self._lost_by(error) from error
        self._lost = ""

    def again(self, timeout_s: float) -> Ranks:
        """Return the same ranks with a new group, for another thread. All of them call it."""
        return Ranks(self._of_program, timeout_s)

    def break_off(self) -> None:
        """End the exchange in progress, on all ranks: it raises `RankLost`. Any thread calls it."""
        if (group := self._group) is not None:
            break_off(group)

    def first(self, call: Callable[[], T]) -> T:
        """Make a call on the first rank, and return its result on all ranks.

        Raises:
            SaveAborted: on the other ranks, if the call failed; its error is the cause.
            RankLost: a rank is lost, now or since an earlier call.
            Exception: on the first rank, the error of the call.
        """
        if self._of_program is None:
            return call()
        self._check_connected()
        value, error = self._attempt(call) if self.rank == 0 else (None, None)
        content = self._exchange(error, lambda: self._of_first(_content_of(value, error)))
        return _values_of({0: content})[0]

    def each(self, call: Callable[[], T]) -> list[T]:
        """Make a call on each rank, and return the results of all ranks on all of them.

        Raises:
            SaveAborted: the call failed on another rank; its error is the cause.
            RankLost: a rank is lost, now or since an earlier call.
            Exception: the error of the call on this rank.
        """
        if self._of_program is None:
            return [call()]
        self._check_connected()
        value, error = self._attempt(call)
        contents = self._exchange(error, lambda: contents_of_all(_content_of(value, error), self._gather))
        return _values_of(dict(enumerate(contents)))

    def mine(self, call: Callable[[], T]) -> T:
        """Make a call on each rank, and return this rank's own result.

        The other ranks do not get it. Raises as `each` does.
        """
        values: list[T] = []
        self.each(lambda: values.append(call()))
        return values[0]

    def _attempt(self, call: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """Make a call, and return its result or its error.

        Raises:
            RankLost: the call raised it. The others get no answer then: they learn of it at once,
                because the group is broken off.
        """
        try:
            return call(), None
        except RankLost as error:
            self._break_off(str(error))
            raise
        except Exception as error:
            return None, error

    def _check_connected(self) -> None:
        if self._lost:
            raise RankLost(self._lost)

    def _exchange(self, mine: Exception | None, call: Callable[[], T]) -> T:
        """Make an exchange, and raise the error of this rank if it has one.

        If a rank is lost, that is the error on all others. It may be why this one failed: the rank
        that learns of it first removes the files of a save.
        """
        try:
            found = call()
        except RuntimeError as error:  # of gloo, which has no type of its own
            lost = self._lost_by(error)
            if mine is None:
                raise lost from error
            raise RankLost(f"{lost}. This rank failed too: {type(mine).__name__}: {mine}") from mine
        if mine is not None:
            raise mine
        return found

    def _lost_by(self, error: Exception) -> RankLost:
        all_call = ""
        if isinstance(error, NotBegun):
            all_call = " All ranks make the calls of an AsyncCheckpointer, also if only some of them write (replicas=)."
        lost = (
            f"a rank of the {self.count} that save and restore together has ended, or was silent for "
            f"{self.timeout_s:g} s: {words_of(error)}.{all_call} Look for its own error, and start all ranks again"
        )
        self._break_off(lost)
        return RankLost(lost)

    def _break_off(self, lost: str) -> None:
        group, self._group, self._lost = self._group, None, lost
        if group is not None:
            break_off(group)

    def _of_first(self, content: bytes) -> bytes:
        """Return the bytes of the first rank."""
        options = torch.distributed.distributed_c10d.BroadcastOptions()
        size = torch.tensor([len(content)])
        self._group.broadcast([size], options).wait()
        memory = torch.from_numpy(
            np.frombuffer(content, np.uint8).copy() if self.rank == 0 else np.empty(size, np.uint8)
        )
        self._group.broadcast([memory], options).wait()
        return memory.numpy().tobytes()

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        found = torch.empty((self.count, *mine.shape), dtype=mine.dtype)
        self._group.allgather([list(found.unbind(0))], [mine]).wait()
        return found


_all: weakref.WeakSet[Ranks] = weakref.WeakSet()


@atexit.register
def _release_groups() -> None:
    """Release all groups before Python ends, as `agreement` does, and for the same reason."""
    for ranks in list(_all):
        ranks._group, ranks._lost = None, "the program of this rank ends"


def _content_of(value: Any, error: Exception | None) -> bytes:
    return pickle.dumps((value, packed(error)))


def _values_of(contents: Mapping[int, bytes]) -> list[Any]:
    """Return the values that ranks have sent, or raise the first error."""
    found = {rank: pickle.loads(content) for rank, content in contents.items()}
    for rank, (_, said) in found.items():
        if (error := unpacked(said)) is not None:
            raise SaveAborted(f"rank {rank} failed: {type(error).__name__}: {error}", rank) from error
    return [value for value, _ in found.values()]

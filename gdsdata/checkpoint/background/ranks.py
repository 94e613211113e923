"""The ranks that save and restore together, and how an error of one reaches all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed

from gdsdata.errors import SaveAborted

T = TypeVar("T")


class Ranks:
    """One rank, or all ranks of a process group.

    All of them make the same calls, in the same order.

    Args:
        group: of gloo, with all ranks; None: a new one, if torch.distributed is initialized with
            several ranks.
        timeout_s: how long ranks wait for one another.

    Attributes:
        rank: of this process.
        count: how many there are.
        members: the rank in the default group of each.
    """

    def __init__(self, group: Any, timeout_s: float) -> None:
        distributed = torch.distributed
        together = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        if together and group is None:
            group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._group = group if together else None
        self.rank = distributed.get_rank(group) if together else 0
        self.count = distributed.get_world_size(group) if together else 1
        self.members: list[int] = distributed.get_process_group_ranks(group) if together else [0]

    def again(self, timeout_s: float) -> Ranks:
        """Return the same ranks with a new group, for another thread. All of them call it."""
        distributed = torch.distributed
        if self._group is None or self.count == distributed.get_world_size():
            return Ranks(None, timeout_s)
        timeout = timedelta(seconds=timeout_s)
        # The processes that are not in the group do not come here.
        group = distributed.new_group(self.members, timeout, "gloo", use_local_synchronization=True)
        return Ranks(group, timeout_s)

    def first(self, call: Callable[[], T]) -> T:
        """Make a call on the first rank, and return its result on all ranks.

        Raises:
            SaveAborted: on the other ranks, if the call failed; its error is the cause.
            Exception: on the first rank, the error of the call.
        """
        if self._group is None:
            return call()
        value, error = _attempt(call) if self.rank == 0 else (None, None)
        (said,) = self._exchange(lambda: _broadcast((value, error), self._group))
        if error is not None:
            raise error
        _raise_of_others({0: said[1]})
        return said[0]

    def each(self, call: Callable[[], T]) -> list[T]:
        """Make a call on each rank, and return the results of all ranks on all of them.

        Raises:
            SaveAborted: the call failed on another rank; its error is the cause.
            Exception: the error of the call on this rank.
        """
        value, error = _attempt(call)
        said = [(value, error)]
        if self._group is not None:
            said = self._exchange(lambda: _gathered((value, error), self._group, self.count))
        if error is not None:
            raise error
        _raise_of_others({rank: one[1] for rank, one in enumerate(said)})
        return [one[0] for one in said]

    def mine(self, call: Callable[[], T]) -> T:
        """Make a call on each rank, and return this rank's own result.

        The other ranks do not get it. Raises as `each` does.
        """
        values: list[T] = []
        self.each(lambda: values.append(call()))
        return values[0]

    def _exchange(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # gloo's own types
            raise SaveAborted(f"a rank is gone, or did not answer in time: {error}") from error


def _attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def _raise_of_others(errors: dict[int, Exception | None]) -> None:
    for rank, error in errors.items():
        if error is not None:
            raise SaveAborted(f"rank {rank} failed: {type(error).__name__}: {error}", rank) from error


def _broadcast(value: Any, group: Any) -> list[Any]:
    values = [value]
    source = torch.distributed.get_global_rank(group, 0)
    torch.distributed.broadcast_object_list(values, src=source, group=group, device=torch.device("cpu"))
    return values


def _gathered(value: Any, group: Any, count: int) -> list[Any]:
    values = [None] * count
    torch.distributed.all_gather_object(values, value, group=group)
    return values

"""`Replicas`: ranks whose states are the same. One of them saves, and all restore its file."""

from __future__ import annotations

import contextlib
import enum
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gdsdata.checkpoint.background.ranks import Ranks
from gdsdata.checkpoint.dtensors import shard_of
from gdsdata.checkpoint.tree import leaves, name_of
from gdsdata.collective.agreement import group_of
from gdsdata.collective.shared_errors import ranks_in_words
from gdsdata.errors import SaveAborted
from gdsdata.io.options import EngineOptions

if TYPE_CHECKING:
    from gdsdata.collective.transfers import SharedReads

T = TypeVar("T")

# Values whose words are compared. Only the types of others are.
_COMPARED = (int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype)
_GIVE = "give each rank a group of all ranks that have its state, and of no others"


class Replicas:
    """Which ranks have the same state. All of them construct it together.

    Args:
        ranks: all ranks.
        group: of this rank and those that have its state, as ``group=`` of `gdsdata.load`. None:
            no other rank has it.

    Attributes:
        place: of this rank's state among all states. A checkpoint has a file of each.
        count: how many states there are.
        saves: this rank saves the state, for all that have it.
        is_used: some rank has replicas.

    Raises:
        ValueError: a group is none, or they are no division of all ranks.
    """

    def __init__(self, ranks: Ranks, group: Any) -> None:
        self._ranks = ranks
        self._group = ranks.mine(lambda: group_of(group, "replicas"))
        own = ranks.members[ranks.rank]
        mine = [own] if self._group is None else torch.distributed.get_process_group_ranks(self._group)
        self._members = ranks.each(lambda: tuple(sorted(mine)))  # of the groups of all ranks
        self._check_division()
        first_ranks = list(dict.fromkeys(its[0] for its in self._members))
        self.place, self.count = first_ranks.index(min(mine)), len(first_ranks)
        self.saves = min(mine) == own
        self.is_used = self.count < ranks.count

    def _check_division(self) -> None:
        said = dict(zip(self._ranks.members, self._members, strict=True))
        for rank, its in said.items():
            others = [one for one in its if said.get(one) != its]
            if others:
                raise ValueError(
                    f"replicas=: rank {rank} has a group of {ranks_in_words(its)}, and rank {others[0]} "
                    f"{_words_of_group(said.get(others[0]))}: {_GIVE}"
                )

    def mine_of(self, files: Sequence[T]) -> Sequence[T]:
        """Return the files of a checkpoint that this rank takes care of.

        Another number of ranks may have saved it.
        """
        return files[self.place :: self.count] if self.saves else ()

    def place_in(self, count: int) -> int | None:
        """Return the place of this rank's file in a checkpoint of so many; None: it has no place.

        If each rank saved a file for itself, it restores that.
        """
        if count == self.count:
            return self.place
        return self._ranks.rank if count == self._ranks.count else None

    @property
    def in_words(self) -> str:
        """How many states and ranks there are."""
        if not self.is_used:
            return f"these are {self._ranks.count}"
        return f"these are {self._ranks.count}, with {self.count} different states"

    def reading(
        self, once: str | None, call: Mapping[str, object], options: EngineOptions
    ) -> contextlib.AbstractContextManager[SharedReads | None]:
        """Have the replicas read together in a block, as `transfers.reads_together` does."""
        if self._group is None and once is None:
            return contextlib.nullcontext()
        from gdsdata.collective.transfers import reads_together  # late: most programs read by themselves

        return reads_together(self._group, once, call, options.stall_timeout_s, self._ranks.timeout_s)

    def check_same(self, described: Callable[[], Described]) -> None:
        """Check that the states of replicas have the same description. All ranks call it.

        Args:
            described: returns that of this rank's state.

        Raises:
            SaveAborted: they differ; the message has the first difference.
            Exception: as ``described`` does.
        """
        if not self.is_used:
            return
        digests = dict(zip(self._ranks.members, self._ranks.each(lambda: described().digest()), strict=True))
        if all(digests[its[0]] == digests[rank] for its in self._members for rank in its):
            return
        words = dict(zip(self._ranks.members, self._ranks.each(lambda: described().words), strict=True))
        for its in dict.fromkeys(self._members):
            if difference := _first_difference({rank: words[rank] for rank in its}):
                raise SaveAborted(
                    f"replicas= has {ranks_in_words(its)} in one group, and their states differ: {difference}. Leave "
                    "what differs out of the state, or have each rank save its own, without replicas="
                )


def _words_of_group(members: Sequence[int] | None) -> str:
    return "is none of process_group" if members is None else f"one of {ranks_in_words(members)}"


def _first_difference(words: Mapping[int, Mapping[str, str]]) -> str | None:
    for name in dict.fromkeys(name for one in words.values() for name in one):
        ranks: dict[str, list[int]] = {}
        for rank, one in words.items():
            ranks.setdefault(one.get(name, "not there"), []).append(rank)
        if len(ranks) > 1:
            said = ", ".join(f"{value:.100} on {ranks_in_words(those)}" for value, those in ranks.items())
            return f"{name} is {said}"
    return None


class Described:
    """The description of a state that replicas have in common: names, and what they name.

    Args:
        state: what is saved, by name, with its DTensors.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.words = {name_of(one.path): _described(one.value) for one in leaves(dict(state))}

    def digest(self) -> bytes:
        """Return bytes that other words do not have."""
        return hashlib.blake2b(repr(sorted(self.words.items())).encode(), digest_size=16).digest()


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shard = shard_of(value)
        words = f"a tensor of {tuple(value.shape)}, {value.dtype}"
        return words if shard is None else f"part {shard} of {words}"
    return repr(value) if isinstance(value, _COMPARED) else f"a {type(value).__name__}"


class ReplicaJob:
    """The part in a save of a rank whose state another one saves.

    Args:
        step: the step.
    """

    size_bytes, is_copied = 0, False

    def __init__(self, step: int) -> None:
        self.step = step

    def check(self) -> None:
        pass

    def stage(self) -> None:
        pass

    def abandon(self, error: BaseException) -> None:
        pass

    def cancel(self) -> None:
        pass

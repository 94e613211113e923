"""`Peers`: processes that need the same bytes again and again, and read a part of them each.

`agreement` is for one call that all ranks make at the same place. Here the processes work ahead by
themselves, on a thread each, so they meet in groups of their own (`Meeting`), one for each
iterator.
"""

from __future__ import annotations

import hashlib
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed

from gdsdata.collective.gloo import NotBegun, break_off, complete, gloo_group, words_of
from gdsdata.collective.shared_errors import contents_of_all, error_of_all, ranks_in_words
from gdsdata.errors import ITERATOR_CLOSED, EngineClosed, RankLost
from gdsdata.torch_private import timeout_of_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

# The next pieces must be under way while one ends.
_PIECE_BYTES = 64 << 20
_PIECES_UNDER_WAY = 2
_FIRST_TAG = 2  # of parcels; a smaller one is that of `break_off`


class Peers:
    """Processes that read together, each a part.

    All of them make this object, and call its methods in the same order. It can be pickled, for a
    process that does not read together with them.

    Args:
        ranks: theirs in the default process group, in the order of their parts.
        together: what they do, in words for errors.

    Attributes:
        ranks: as they were given.
        count: how many there are.
        place: which of them this process is.
    """

    def __init__(self, ranks: Sequence[int], together: str = "read each batch together") -> None:
        self.ranks, self.count, self._together = list(ranks), len(ranks), together
        self.place = self.ranks.index(torch.distributed.get_rank())
        made, key = _made.setdefault(_default_group(), {}), tuple(self.ranks)
        number = made[key] = made.get(key, 0) + 1
        digest = hashlib.blake2b(repr(self.ranks).encode(), digest_size=16).hexdigest()  # of thousands of ranks
        self._name = f"gdsdata/peers/{digest}/{number}"
        self._meetings = 0
        self._in_vain: set[str] = set()  # names of meetings that the others have not begun

    def meet(self, is_wanted: Callable[[], bool], timeout: timedelta | None = None) -> Meeting:
        """Return a meeting. It begins when it is first used.

        Args:
            is_wanted: a wait for the others ends by `EngineClosed` when it returns False.
            timeout: how long they may be silent; None: as long as in the default group.
        """
        self._meetings += 1
        return Meeting(self, self._name_of_last, is_wanted, timeout)

    def take_back(self, meeting: Meeting) -> None:
        """Do not count a meeting that the others have not begun: their next one is their first.

        It counts as long as there is a later one that may still begin.
        """
        if meeting.is_taken_back:
            return
        meeting.is_taken_back = True
        self._in_vain.add(meeting.name)
        while self._name_of_last in self._in_vain:
            self._in_vain.remove(self._name_of_last)
            self._meetings -= 1

    @property
    def _name_of_last(self) -> str:
        return f"{self._name}/{self._meetings}"

    @property
    def in_words(self) -> str:
        """They, as in "ranks 0, 1"."""
        return ranks_in_words(self.ranks)

    @property
    def with_their_task(self) -> str:
        """They and what they do, as in "ranks 0, 1, which read each batch together"."""
        return f"{self.in_words}, which {self._together}"

    def lost(self, error: Exception | str) -> RankLost:
        """Return the error of a process that ended, or is silent."""
        return RankLost(
            f"of {self.with_their_task}, one has ended, or is silent for too long: {words_of(error)}. "
            "Look for its own error"
        )

    def left(self, places: Sequence[int]) -> RankLost:
        """Return the error of processes that take no more batches."""
        who = ranks_in_words([self.ranks[place] for place in places])
        return RankLost(
            f"of {self.with_their_task}, {who} left the epoch before its end: its loop was "
            "broken off, or failed. Look for its own error; else have all of them take the same batches"
        )


# By the default group, how often some ranks have made `Peers`.
_made: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()
# By the default group, the NCCL groups of some ranks.
_nccl: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], ProcessGroup]] = weakref.WeakKeyDictionary()


def _default_group() -> ProcessGroup:
    group = torch.distributed.group.WORLD
    if group is None:
        raise ValueError("torch.distributed is not initialized: call init_process_group() first")
    return group


class Parcel(NamedTuple):
    """Bytes that one peer sends to another.

    Attributes:
        place: of the other peer.
        tag: a number that both have for these bytes, and for no other ones on their way.
        content: the bytes, or the memory for them: uint8, one dimension, on the CPU.
    """

    place: int
    tag: int
    content: torch.Tensor


class Meeting:
    """Peers that exchange numbers and bytes over gloo, in the order of their calls.

    One thread uses it.

    Args:
        peers: that meet.
        name: of the meeting, the same for all of them.
        is_wanted, timeout: as of `Peers.meet`.

    Attributes:
        is_taken_back: it never began, and another one may have its name by now.
    """

    def __init__(
        self, peers: Peers, name: str, is_wanted: Callable[[], bool], timeout: timedelta | None = None
    ) -> None:
        self.peers, self.name, self._is_wanted, self._timeout = peers, name, is_wanted, timeout
        self.is_taken_back = False
        self._group: Any = None
        self._is_idle = True  # no exchange is under way

    def numbers(self, mine: np.ndarray) -> np.ndarray:
        """Return the numbers of all: int64 (n,) of each, in rows.

        Raises:
            RankLost: one of the others has ended or left, or is silent.
            EngineClosed: this is not wanted any more.
        """
        return self._all(torch.from_numpy(mine)).numpy()

    def contents(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all. It raises what `numbers` does."""
        return contents_of_all(mine, self._all)

    def error(self, mine: Exception | None) -> Exception:
        """Return the error of the first peer that has one, with a note that has its rank.

        All peers call it if one of them has an error.
        """
        peers = self.peers
        return error_of_all(mine, self.contents, peers.ranks, peers.place, peers.with_their_task)

    def pass_on(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Send tensors to other peers, and fill tensors with what they send.

        All peers of the transfers make this call. Bytes move in pieces of 64 MiB, straight from
        memory to memory. It follows another exchange of this meeting.

        Raises:
            RankLost: a peer has ended or left, or is silent for too long. Its bytes may still
                arrive until `close` was called.
        """
        parcels = [(self._group.send, one) for one in sends] + [(self._group.recv, one) for one in receives]
        under_way: deque[Work] = deque()
        self._is_idle = False
        if not self._is_wanted():  # `break_off` may have come just before
            raise EngineClosed(ITERATOR_CLOSED)
        try:
            for begin in range(0, max((one.content.nbytes for _, one in parcels), default=0), _PIECE_BYTES):
                for move, one in parcels:
                    if begin < one.content.nbytes:
                        piece = one.content[begin : begin + _PIECE_BYTES]
                        under_way.append(move([piece], one.place, _FIRST_TAG + one.tag))
                while len(under_way) > _PIECES_UNDER_WAY * len(parcels):
                    under_way.popleft().wait()
            while under_way:
                under_way.popleft().wait()
        except RuntimeError as error:
            raise self.peers.lost(error) from error
        self._is_idle = True

    def break_off(self) -> None:
        """End the exchange that is under way, which raises then. Any thread calls it."""
        if (group := self._group) is not None and not self._is_idle:
            break_off(group)

    def close(self) -> None:
        """Close the connections, so that calls of the others raise `RankLost`."""
        group, self._group = self._group, None
        if group is not None and not self._is_idle:
            break_off(group)

    def _all(self, mine: torch.Tensor) -> torch.Tensor:
        if self.is_taken_back:
            raise EngineClosed(ITERATOR_CLOSED)
        if self._group is None:
            try:
                self._group = _gloo_group(self.peers, self.name, self._is_wanted, self._timeout)
            except (EngineClosed, RankLost) as error:
                if isinstance(error.__cause__, NotBegun):
                    self.peers.take_back(self)
                raise
        found = torch.empty((self.peers.count, *mine.shape), dtype=mine.dtype)
        self._is_idle = False
        try:
            work = self._group.allgather([list(found.unbind(0))], [mine])
            complete(work, self._is_wanted)
        except RuntimeError as error:  # of gloo, which has no type of its own
            raise self.peers.lost(error) from error
        self._is_idle = True
        return found


def _gloo_group(peers: Peers, name: str, is_wanted: Callable[[], bool], timeout: timedelta | None = None) -> Any:
    """Return a new gloo group of the peers, which all make it.

    Args:
        name: of the group.
        is_wanted, timeout: as of `Peers.meet`.

    Raises:
        RankLost: one of them does not come in time.
        EngineClosed: the group is not wanted any more.
    """
    default = _default_group()
    timeout = timeout or timeout_of_group(default)
    try:
        return gloo_group(default, name, peers.place, peers.count, timeout, is_wanted, is_only=True)
    except RuntimeError as error:  # of gloo or the store
        raise peers.lost(error) from error


class Gathers(ABC):
    """Gathers the parts of batches, in the order of its calls."""

    @abstractmethod
    def begin(self, whole: torch.Tensor, part: torch.Tensor) -> Work:
        """Begin to fill ``whole`` with the parts of all peers, which have equal sizes.

        Args:
            whole, part: uint8 of one dimension.

        Raises:
            RankLost: a peer has ended or left.
        """

    @abstractmethod
    def abort(self) -> None:
        """End what is under way: a peer is lost, so it may not end by itself.

        Any thread calls it.
        """

    @abstractmethod
    def close(self) -> None:
        """End the use: nothing is under way any more."""


class GlooGathers(Gathers):
    """Gathers on the CPU, in a group for one iterator, which all peers make.

    Args:
        peers: that gather.
        name: of the group, the same for all of them.
        is_wanted: as of `Peers.meet`.
    """

    def __init__(self, peers: Peers, name: str, is_wanted: Callable[[], bool]) -> None:
        self._peers, self._group = peers, _gloo_group(peers, name, is_wanted)

    def begin(self, whole: torch.Tensor, part: torch.Tensor) -> Work:
        parts = list(whole.view(self._peers.count, -1).unbind(0))
        try:
            return self._group.allgather([parts], [part])
        except RuntimeError as error:
            raise self._peers.lost(error) from error

    def abort(self) -> None:
        if (group := self._group) is not None:
            break_off(group)

    def close(self) -> None:
        self._group = None


class NcclGathers(Gathers):
    """Gathers on GPUs, in a communicator that all data sets of these peers share.

    It is not one of the program's. NCCL needs the same order of collectives on all ranks, so the
    consumer's thread begins them, at the same places of the program.

    Args:
        peers: that gather.
        device: of this process.
        is_new: make another communicator: one of the peers has none, or its own was aborted. All
            peers agree on it.
    """

    def __init__(self, peers: Peers, device: torch.device, is_new: bool) -> None:
        self._key, kept = tuple(peers.ranks), _nccl.setdefault(_default_group(), {})
        if is_new or self._key not in kept:
            with torch.cuda.device(device):
                made = torch.distributed.new_group(
                    peers.ranks,
                    timeout_of_group(_default_group()),
                    "nccl",
                    use_local_synchronization=True,
                    group_desc="gdsdata_share_reads",
                )
            assert isinstance(made, torch.distributed.ProcessGroup)  # this process is one of the peers
            kept[self._key] = made
        self._group = kept[self._key]

    @staticmethod
    def has_group(peers: Peers) -> bool:
        """Return whether these peers have a communicator here."""
        return tuple(peers.ranks) in _nccl.get(_default_group(), {})

    def begin(self, whole: torch.Tensor, part: torch.Tensor) -> Work:
        work = torch.distributed.all_gather_into_tensor(whole, part, self._group, async_op=True)
        assert work is not None  # this process is in the group
        return work

    def close(self) -> None:
        """Keep the communicator for the next iterator."""

    def abort(self) -> None:
        kept = _nccl.get(_default_group(), {})
        if kept.get(self._key) is self._group:
            del kept[self._key]
            self._group.abort()

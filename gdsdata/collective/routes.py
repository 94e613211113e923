"""How pieces move between ranks: over gloo on the CPU, over NCCL between GPUs."""

from __future__ import annotations

import hashlib
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed

from gdsdata import torch_private
from gdsdata.collective.agreement import Kind, Session
from gdsdata.errors import BackendUnavailable
from gdsdata.io import engine

CPU, GPU = 0, 1  # the routes of `Wants`

Transfer = tuple[torch.Tensor, int]  # memory without gaps, and the other rank

# Transfers that a GPU's stream has ahead of it. More would only hide a rank that is lost.
_MOST_QUEUED = 2
# A load waited 0.45 ms for its last transfer, and 0.58 with four times this (two H200, 2026-11-29).
_LOOKS_EVERY_S = 0.00005

# Groups whose NCCL may still have transfers that the other side never began. They would take the
# bytes of the next ones.
_in_doubt: weakref.WeakSet[Any] = weakref.WeakSet()
# By the user's group, the number of the connection that each GPU of this rank has in its NCCL: the
# first is 1. torch keeps a communicator for each GPU. All ranks have to make theirs together.
_connections: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()


class Route(Protocol):
    """A way between the ranks. All methods are called on the thread of the session."""

    device: torch.device

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """Send and receive. Work that the caller queues next comes after that.

        Two ranks list their transfers in the same order.

        Raises:
            RankLost: a rank has ended, or is silent for too long.
        """

    def settle(self) -> None:
        """Wait until few transfers are queued, before an agreement. Raises as `exchange`."""

    def finish(self) -> None:
        """Wait until all bytes are in place, for every stream. Raises as `exchange` does."""


class CpuRoute:
    """Memory of the CPU, over the session's gloo group."""

    def __init__(self, session: Session) -> None:
        self._session, self.device = session, torch.device("cpu")

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        session = self._session
        works = [session.receive(memory, rank) for memory, rank in receives]
        works += [session.send(memory, rank) for memory, rank in sends]
        for work in works:
            session.complete(work)

    def settle(self) -> None:
        """Return: `exchange` has waited."""

    def finish(self) -> None:
        """Return: `exchange` has waited."""


class GpuRoute:
    """Memory of one GPU for each rank, over the NCCL of the user's group.

    Transfers follow the work that the device's current stream has.

    Args:
        session: in progress.
        device: of this rank.
    """

    def __init__(self, session: Session, device: torch.device) -> None:
        self._session, self.device = session, device
        self._queued: deque[torch.cuda.Event] = deque()

    def connect(self, number: int) -> None:
        """Have NCCL connect all ranks of the group, which all make this call.

        NCCL demands it before a transfer between some of them.

        Args:
            number: of the GPU, as of `number_of_gpu`.
        """
        group = self._session.agreement.group
        try:
            with torch.cuda.device(self.device):
                torch.distributed.all_reduce(torch.zeros(1, device=self.device), group=group)
                self._note()
            self.finish()
        except BaseException:
            doubt(self._session)
            raise
        connections = _connections.setdefault(group, {})
        connections[number] = len(connections) + 1

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        agreement = self._session.agreement
        distributed = torch.distributed
        moves = [(distributed.irecv, one) for one in receives] + [(distributed.isend, one) for one in sends]
        if not moves:
            return
        operations = [
            distributed.P2POp(move, memory, agreement.ranks[rank], agreement.group) for move, (memory, rank) in moves
        ]
        with torch.cuda.device(self.device):
            self._queue(distributed.batch_isend_irecv(operations))

    def broadcast(self, memories: Sequence[Transfer]) -> None:
        """Give memory of some ranks to all ranks of the group, which all make this call.

        Args:
            memories: memory without gaps, and the rank whose bytes it gets; alike on all ranks.

        Raises: as `exchange`.
        """
        if memories:
            with torch.cuda.device(self.device):
                self._queue(torch_private.begin_broadcasts(memories, self._session.agreement.group))

    def settle(self) -> None:
        self._wait_for_all_but(_MOST_QUEUED)

    def finish(self) -> None:
        self._wait_for_all_but(0)

    def _queue(self, works: Sequence[torch.distributed.Work]) -> None:
        for work in works:
            work.wait()  # the current stream does; the processor goes on
        self._note()

    def _note(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._queued.append(event)

    def _wait_for_all_but(self, count: int) -> None:
        """Wait for transfers. A wait for the stream itself would never end if a rank is lost."""
        while len(self._queued) > count:
            self._session.wait(self._has_passed, self._session.agreement.timeout_s)
            self._queued.popleft()

    def _has_passed(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._queued[0].query():  # type: ignore[no-untyped-call]
            if time.monotonic() > until:
                return False
            time.sleep(_LOOKS_EVERY_S)
        return True


class GpuUse(NamedTuple):
    """The GPU that a rank would use, which it says before bytes pass between GPUs.

    Every rank of the group says it, also one that wants nothing: NCCL connects all of them.

    Attributes:
        number: of the GPU that it would use, which no other GPU has; 0: it has none.
        in_doubt: `doubt` was called on it.
        connection: of the group's NCCL that this GPU has; 0: it has none yet.
    """

    number: int
    in_doubt: int
    connection: int

    @classmethod
    def of(cls, session: Session, device: torch.device | None) -> GpuUse:
        """Return what this rank says, if it would use ``device``."""
        number = 0 if device is None else number_of_gpu(device)
        group = session.agreement.group
        return cls(number, group in _in_doubt, _connections.get(group, {}).get(number, 0))


def lack_of(uses: Sequence[GpuUse]) -> str:
    """Return why the ranks of a group pass nothing on between their GPUs; "" if they do."""
    numbers = {use.number for use in uses}
    if 0 in numbers:
        return "a rank of the group has no GPU that it can use"
    if len(numbers) < len(uses):
        return "several ranks use the same GPU (call torch.cuda.set_device() on each rank)"
    if any(use.in_doubt for use in uses):
        return "an earlier load has left transfers in the group's NCCL (make a new group)"
    if len({use.connection for use in uses}) > 1:
        return "some ranks use another GPU than in an earlier load over the group (make a new group)"
    return ""


def gpu_route(session: Session, gpu: torch.device | None) -> GpuRoute | None:
    """Return the way between the GPUs of a group, whose ranks all make this call.

    Args:
        session: in progress.
        gpu: that this rank wants something on; None: it wants nothing on one.

    Returns:
        None: there is none. A warning says why.
    """
    lack = "the process group has no NCCL"
    if reaches_gpus(session):
        device = gpu or current_gpu()
        mine = GpuUse.of(session, device)
        headers = session.agree(Kind.GPUS, *mine)
        lack = lack_of([GpuUse(*its) for its in headers[:, 1:4].tolist()])
        if not lack:
            assert device is not None  # each rank has one
            way = GpuRoute(session, device)
            if not mine.connection:
                way.connect(mine.number)
            return way
    engine.warn_once(f"{lack}, so each rank reads by itself what is for its GPU")
    return None


def reaches_gpus(session: Session) -> bool:
    """Return whether the user's group has NCCL for memory of GPUs."""
    return "cuda:nccl" in torch.distributed.get_backend_config(session.agreement.group)


def doubt(session: Session) -> None:
    """Have the user's group pass no more bytes on between GPUs."""
    _in_doubt.add(session.agreement.group)


def number_of_gpu(device: torch.device) -> int:
    """Return a number that no other GPU has, and that is not 0."""
    unique = str(torch.cuda.get_device_properties(device).uuid).encode()
    return int.from_bytes(hashlib.blake2b(unique, digest_size=8).digest(), "little", signed=True) or 1


def current_gpu() -> torch.device | None:
    """Return the GPU that is current; None: this process cannot use one."""
    try:
        return engine.resolved("cuda")
    except BackendUnavailable:
        return None

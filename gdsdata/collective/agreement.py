"""`Agreement`: the ranks of a group proceed in step, and an error of one is raised on all.

Between two agreements, a rank works by itself. In an agreement, all ranks exchange a short header
over a gloo group of its own, so the user's group has no part in it. A rank whose code raises says
so in the next agreement, and then all exchange the error. So nobody waits for a rank that has given
up.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import hashlib
import os
import pickle
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
import torch.distributed

from gdsdata.collective.gloo import break_off, gloo_group, words_of
from gdsdata.collective.shared_errors import contents_of_all, error_of_all, words_of_values
from gdsdata.errors import RankLost

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

# A rank that waits for its own work says so this often.
_BEAT_S = 1.0
_NUMBERS = 6  # of a header, behind its kind


class Kind(enum.IntEnum):
    """Why a rank takes part in an agreement."""

    BEGIN = 1  # of a session
    BUSY = 2  # its own work takes long; the others repeat their agreement
    OBJECTS = 3  # the ranks exchange a value each
    WANTS = 4  # it has something to read
    GPUS = 5  # the ranks say which GPU each of them would use
    STEP = 6  # of a schedule
    DONE = 7  # it needs nothing more
    ERROR = 8  # its code has raised


_ALLOWED_TOGETHER = frozenset({Kind.WANTS, Kind.DONE})


class _Twin:
    """A gloo group with the ranks of the user's group.

    Attributes:
        group: of gloo.
        in_use: held during a session, because the ranks agree on one thing at a time.
        nodes: the number of each rank's node; None until it is known.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.in_use = threading.Lock()
        self.nodes: np.ndarray | None = None


# By the user's group, until that is destroyed.
_twins: weakref.WeakKeyDictionary[Any, _Twin] = weakref.WeakKeyDictionary()
# gloo's threads free tensors, for which torch acquires the GIL. In a thread that does so behind
# Python's end, that aborts the process. A group that is freed before joins its threads.
atexit.register(_twins.clear)


def group_of(group: Any, name: str = "group") -> ProcessGroup | None:
    """Return the process group that an argument means.

    Args:
        group: a process group, a `DeviceMesh` of one dimension, ``"auto"`` (the default group, if
            there is one), or None.
        name: of the argument, for errors.

    Returns:
        None: there are no other ranks.

    Raises:
        ValueError: it is none of these or was destroyed, or this process is no rank of it.
    """
    if group is None:
        return None
    distributed = torch.distributed
    if isinstance(group, str):
        if group != "auto":
            raise ValueError(f'{name}={group!r}: give a process group, a DeviceMesh of one dimension, or "auto"')
        is_ready = distributed.is_available() and distributed.is_initialized()
        group = distributed.group.WORLD if is_ready else None
    elif hasattr(group, "get_group") and hasattr(group, "ndim"):  # a DeviceMesh, whose import takes time
        if group.ndim != 1:
            raise ValueError(f'{name}= is a mesh of {group.ndim} dimensions: give one of them, as mesh["dp"]')
        group = group.get_group()
    if group is None:
        return None
    if group == distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{name}=: this process is no rank of the group, so it must not make this call")
    if not isinstance(group, distributed.ProcessGroup):
        raise ValueError(f'{name}={group!r}: give a process group, a DeviceMesh of one dimension, or "auto"')
    if group.size() == 1:
        return None
    try:
        distributed.get_process_group_ranks(group)
    except KeyError:
        message = f"{name}=: the process group was destroyed: make the call before, or make the group again"
        raise ValueError(message) from None
    return group


class Agreement:
    """The ranks of a group, which enter the same sessions in the same order.

    Args:
        group: with several ranks.
        timeout_s: how long a rank may be silent. A rank that reads says so every second; one that
            opens files or allocates memory does not.

    Attributes:
        group: of the user.
        timeout: ``timeout_s`` as a `timedelta`, which torch takes.
        ranks: the rank in the default group of each rank.
        rank: of this process in the group.
        count: how many ranks there are.
    """

    def __init__(self, group: ProcessGroup, timeout_s: float) -> None:
        self.group, self.timeout_s = group, timeout_s
        self.timeout = timedelta(seconds=timeout_s)
        self.ranks: list[int] = torch.distributed.get_process_group_ranks(group)
        self.rank, self.count = group.rank(), group.size()

    def session(self, call: Mapping[str, object], take_part: Callable[[Session, np.ndarray], None]) -> Session:
        """Return a context in which all ranks make the same call.

        Args:
            call: the name of the call, and those of its arguments that must not differ.
            take_part: called with the headers of an agreement in which this rank was done and
                others had `Kind.WANTS`. It does what their next agreements need.
        """
        return Session(self, call, take_part)

    def twin(self) -> _Twin:
        """Return the gloo group, which all ranks make at their first session.

        Raises:
            RankLost: a rank did not come in time.
        """
        twin = _twins.get(self.group)
        if twin is None:
            try:
                made = gloo_group(self.group, "gdsdata/reads", self.rank, self.count, self.timeout)
            except RuntimeError as error:  # of gloo or the store
                raise self.lost(error) from error
            twin = _twins[self.group] = _Twin(made)
        return twin

    def drop_twin(self) -> None:
        """Close the connections, so that the others notice. The next session makes new ones."""
        if (twin := _twins.pop(self.group, None)) is not None:
            break_off(twin.group)

    def lost(self, error: Exception | str) -> RankLost:
        """Return the error of a rank that ended or is silent."""
        return RankLost(
            f"a rank of the {self.count} that read together has ended, or was silent for {self.timeout_s:g} s: "
            f"{words_of(error)}. Look for its own error, and start all ranks again"
        )


class Session:
    """One call that all ranks of an `Agreement` make.

        with agreement.session({"call": "load", "verify": False}, take_part) as session:
            ...

    If the block raises on one rank, all ranks raise that error, with a note that has the rank. The
    block ends when all ranks have ended it. One thread uses it.

    Attributes:
        is_abandoned: ranks are lost, or may wait for transfers of this one.

    Raises (each method, and the end of the block):
        ValueError: the ranks make different calls.
        RankLost: a rank has ended, or is silent for too long.
        Exception: the error of another rank.
    """

    def __init__(
        self, agreement: Agreement, call: Mapping[str, object], take_part: Callable[[Session, np.ndarray], None]
    ) -> None:
        self.agreement, self.rank, self.count = agreement, agreement.rank, agreement.count
        self._call, self._take_part = dict(call), take_part
        self._twin: _Twin | None = None
        self.is_abandoned = False
        self._is_over = False  # all ranks know of an error, or some are lost
        self._calls: tuple[torch.Tensor, Work] | None = None  # of all ranks, not compared yet

    def __enter__(self) -> Session:
        twin = self.agreement.twin()
        twin.in_use.acquire()
        self._twin = twin
        try:
            self._begin()
        except BaseException:
            if not self._is_over:
                self._abandon()
            self._release()
            raise
        return self

    def _begin(self) -> None:
        """Say which call this is. The next exchange compares it, so this rank need not wait now."""
        said = hashlib.blake2b(repr(sorted(self._call.items())).encode(), digest_size=8).digest()
        self._calls = self._sent(_header(Kind.BEGIN, int.from_bytes(said, "little", signed=True)))

    def _compare(self, calls: torch.Tensor, exchange: Work) -> None:
        headers = self._received(calls, exchange).numpy()
        if (headers[:, :2] != headers[0, :2]).any():
            different = [pickle.loads(one) for one in self._exchanged(pickle.dumps(self._call))]
            self._is_over = True
            raise ValueError(f"the ranks of the group make different calls: {words_of_values(different)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                error = self._end()
            if error is None or self._is_over:
                return
            if not isinstance(error, Exception):  # the program ends
                self._abandon()
                raise error
            self._gathered(Kind.ERROR)
            self._raise_errors(error)
        finally:
            self._release()

    def _end(self) -> BaseException | None:
        """Take part in what other ranks still do, and return the error of that.

        Errors that all ranks know of are raised.
        """
        try:
            while True:
                headers = self.agree(Kind.DONE)
                if (headers[:, 0] == Kind.DONE).all():
                    return None
                self._take_part(self, headers)
        except BaseException as error:
            if self._is_over:
                raise
            return error

    def _release(self) -> None:
        if self._twin is not None:
            twin, self._twin = self._twin, None
            twin.in_use.release()

    # ------------------------------------------------------------------------------------------ agreements

    def agree(self, kind: Kind, *numbers: int) -> np.ndarray:
        """Take part in an agreement, and return the headers of all ranks.

        It is repeated while a rank is busy.

        Returns:
            int64 (count, 7): kind and numbers of each rank.
        """
        while True:
            headers = self._gathered(kind, *numbers)
            self._raise_if_failed(headers)
            kinds = headers[:, 0]
            if (kinds == Kind.BUSY).any():
                continue
            found = set(map(Kind, kinds.tolist()))
            if len(found) > 1 and not found <= _ALLOWED_TOGETHER:
                self._is_over = True
                said = [{"agreement": Kind(one).name.lower()} for one in kinds.tolist()]
                raise ValueError(f"the ranks of the group are at different places: {words_of_values(said)}")
            return headers

    def wait(self, is_done: Callable[[float], bool], timeout_s: float | None = None) -> None:
        """Wait for work of this rank, and meanwhile have the others wait.

        Args:
            is_done: waits for at most so many seconds, and returns whether the work is done.
            timeout_s: how long the work may take; None: it ends by itself.

        Raises:
            RankLost: the work took longer.
        """
        waited_s = 0.0
        while not is_done(_BEAT_S):
            waited_s += _BEAT_S
            if timeout_s is not None and waited_s >= timeout_s:
                raise self._lost("a transfer does not end")
            self._raise_if_failed(self._gathered(Kind.BUSY))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which all make this call.

        They are pickled, and should be small: a rank has all of them in memory.
        """
        content = pickle.dumps(value)
        self.agree(Kind.OBJECTS)  # before any exchange, because a rank may still be busy, or have failed
        return [pickle.loads(one) for one in self._exchanged(content)]

    def nodes(self) -> np.ndarray:
        """Return the number of each rank's node; all ranks make this call."""
        assert self._twin is not None
        if self._twin.nodes is None:
            names = self.gather(node_name())
            self._twin.nodes = np.array([names.index(name) for name in names], np.int64)
        return self._twin.nodes

    @contextlib.contextmanager
    def transfers(self) -> Iterator[None]:
        """Have an error in the block, which sends and receives, be `RankLost` on the other ranks.

        They wait for the transfers, not for an agreement.
        """
        try:
            yield
        except BaseException:
            self._abandon()
            raise

    # ------------------------------------------------------------------------------------------ tensors on the CPU

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fill a tensor with that of the rank ``root``; all ranks make this call."""
        self.agree(Kind.OBJECTS)
        options = torch.distributed.distributed_c10d.BroadcastOptions()
        options.rootRank, options.timeout = root, self.agreement.timeout
        self._made(lambda group: group.broadcast([tensor], options).wait())

    def send(self, tensor: torch.Tensor, rank: int) -> Work:
        """Begin to send a tensor to another rank, which calls `receive` in the same order."""
        return self._made(lambda group: group.send([tensor], rank, 0))

    def receive(self, tensor: torch.Tensor, rank: int) -> Work:
        """Begin to fill a tensor with one that another rank sends."""
        return self._made(lambda group: group.recv([tensor], rank, 0))

    def complete(self, work: Work) -> None:
        """Wait for a transfer."""
        self._made(lambda _: work.wait(self.agreement.timeout))

    # ------------------------------------------------------------------------------------------ exchanges

    def _made(self, call: Callable[[Any], Any]) -> Any:
        assert self._twin is not None
        try:
            return call(self._twin.group)
        except RuntimeError as error:  # of gloo, which has no type of its own
            raise self._lost(error) from error

    def _lost(self, error: Exception | str) -> RankLost:
        self._abandon()
        return self.agreement.lost(error)

    def _abandon(self) -> None:
        """Leave the others without an answer. They notice that the connections end."""
        self._is_over = self.is_abandoned = True
        self.agreement.drop_twin()

    def _gathered(self, kind: Kind, *numbers: int) -> np.ndarray:
        if self._calls is not None:
            calls, self._calls = self._calls, None
            self._compare(*calls)
        return self._all(_header(kind, *numbers)).numpy()

    def _all(self, mine: torch.Tensor) -> torch.Tensor:
        return self._received(*self._sent(mine))

    def _sent(self, mine: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Begin to exchange a tensor. Returns the place for those of all ranks, and the work."""
        found = torch.empty((self.count, *mine.shape), dtype=mine.dtype)
        options = torch.distributed.distributed_c10d.AllgatherOptions()
        options.timeout = self.agreement.timeout
        return found, self._made(lambda group: group.allgather([list(found.unbind(0))], [mine], options))

    def _received(self, found: torch.Tensor, exchange: Work) -> torch.Tensor:
        self._made(lambda _: exchange.wait())
        return found

    def _exchanged(self, content: bytes) -> list[bytes]:
        """Return the bytes of all ranks."""
        return contents_of_all(content, self._all)

    def _raise_if_failed(self, headers: np.ndarray) -> None:
        if (headers[:, 0] == Kind.ERROR).any():
            self._raise_errors(None)

    def _raise_errors(self, mine: Exception | None) -> NoReturn:
        """Exchange the errors of all ranks, and raise the first one."""
        self._is_over = True
        together = f"{self.count} that read together"
        raise error_of_all(mine, self._exchanged, range(self.count), self.rank, together)


def _header(kind: Kind, *numbers: int) -> torch.Tensor:
    """Return what a rank says in an agreement: int64 (7,)."""
    found = np.zeros(1 + _NUMBERS, np.int64)
    found[: 1 + len(numbers)] = (kind, *numbers)
    return torch.from_numpy(found)


def node_name() -> str:
    """Return what processes have in common that run on one machine, in one container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot} {os.uname().machine}"

"""`SharedReads`: ranks read what they have in common once, and pass it on.

The plan has rounds. In a round, each rank has read its piece, all agree that none has failed, and
then the pieces are sent, or broadcast by NCCL if all ranks want them. Reads run ahead of that,
straight into the tensors. Long parts go from there to where they are wanted. Short parts are
packed.

A rank needs this memory besides: packed parts of the pieces that are sent at the same time, at most
128 MiB on the CPU and as much on the GPU (``_READERS_AT_A_TIME * plan.PACKED_BYTES``). An extent
takes 22 bytes, for each rank whose wants differ from the others', and the plan about 170 more while
it is computed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from gdsdata import torch_private
from gdsdata.collective import routes
from gdsdata.collective.agreement import Agreement, Kind, Session, group_of
from gdsdata.collective.plan import (
    NOT_SHARED,
    SHORT_BYTES,
    Piece,
    Schedule,
    Wants,
    check_versions,
    hops_of,
    schedule_of,
)
from gdsdata.collective.reads import NoReader, Reader, ScheduledReads
from gdsdata.collective.routes import CPU, GPU, CpuRoute, GpuRoute, Route, Transfer
from gdsdata.io.file_systems import is_on_network

# A rank may be silent for so many times the engine's ``stall_timeout_s``: it opens files, makes
# memory, or unpickles.
_STALLS = 5
# The pieces of so many readers are sent at a time, which bounds the packed memory.
_READERS_AT_A_TIME = 8
_NODE, _JOB = 0, 1
_ONCE = {"node": _NODE, "job": _JOB}


@contextlib.contextmanager
def reads_together(
    group: object,
    once: str | None,
    call: Mapping[str, object],
    stall_timeout_s: float,
    most_silent_s: float = math.inf,
) -> Iterator[SharedReads | None]:
    """Have the ranks of a group read together in the block, which all of them enter.

    If the block raises on one rank, it raises that error on all.

    Args:
        group: see `agreement.group_of`.
        once: "node": each node reads what its ranks want; "job": all nodes together read it once;
            None: "job" for URLs and file systems that are shared between nodes, else "node".
        call: see `Agreement.session`.
        stall_timeout_s: of the engine.
        most_silent_s: a rank may be silent for so long, if that is shorter than five such times.

    Yields:
        None if there are no other ranks.

    Raises:
        ValueError: an argument is wrong, or the ranks make different calls.
        RankLost: another rank has ended, or is silent for too long.
    """
    if once not in (None, *_ONCE):
        raise ValueError(f'once={once!r}: give "node", "job" or None')
    found = group_of(group)
    if found is None:
        yield None
        return
    timeout_s = min(_STALLS * (stall_timeout_s or 60.0), most_silent_s)
    with Agreement(found, timeout_s).session({**call, "once": once}, _take_part) as session:
        session.nodes()  # known from now on, without an agreement
        yield SharedReads(session, once)


def _take_part(session: Session, headers: np.ndarray) -> None:
    """Take part in reads of other ranks, when this one needs nothing more."""
    SharedReads(session, None)._follow(headers, Wants.nothing(), NoReader(), None)


class SharedReads:
    """Reads that the ranks of a session make together.

    Attributes:
        session: in progress.
    """

    def __init__(self, session: Session, once: str | None) -> None:
        self.session, self._once = session, once
        self._are_alike = True  # all ranks wanted the same last time

    def read(self, wants: Wants, reader: Reader, gpu: torch.device | None) -> None:
        """Read what this rank wants. The ranks may call this a different number of times.

        It begins before the ranks have agreed, as if all wanted the same. If they do not, this rank
        has read one piece for nothing, and does not try it at the next call.

        Args:
            wants: of this rank, with the routes of `routes`.
            reader: reads it.
            gpu: that of the extents with the route `GPU`.

        Raises:
            CorruptData: ranks see different versions of a file, or as ``reader`` does.
            Exception: of another rank, or of the reader.

        Stream semantics: the bytes are in place when this returns, for every stream.
        """
        once = self._once_of(wants)
        with contextlib.ExitStack() as block:
            early = None
            if self._are_alike and (routes.reaches_gpus(self.session) or not wants.has_route(GPU)):
                guess = schedule_of([wants], [0] * self.session.count, self._ranks(once), self.session.rank)
                early = block.enter_context(ScheduledReads(self.session, guess, reader))
                early.begin_first()
            said = wants.packed()
            headers = self.session.agree(Kind.WANTS, *wants.digest(), len(said), once, gpu is not None)
            self._follow(headers, wants, reader, gpu, said, early)

    def _once_of(self, wants: Wants) -> int:
        if self._once is not None:
            return _ONCE[self._once]
        paths = [file.path for file in wants.files]
        folders = {os.path.dirname(path) for path in paths if not _is_url(path)}
        return _JOB if all(map(is_on_network, folders)) else _NODE

    def _follow(
        self,
        headers: np.ndarray,
        wants: Wants,
        reader: Reader,
        gpu: torch.device | None,
        said: bytes = b"",
        early: ScheduledReads | None = None,
    ) -> None:
        """Do what follows on an agreement in which a rank had wants."""
        asks = headers[:, 0] == Kind.WANTS
        self._are_alike = bool(asks.all() and (headers[:, 1:5] == headers[0, 1:5]).all())
        if early is not None and self._are_alike:
            early.begin()
        way_of = self._routes(bool(headers[asks, 5].any()), gpu)
        if early is not None:
            if self._are_alike and (GPU in way_of or not wants.has_route(GPU)):
                _Work(self.session, early, reader, way_of).carry_out()
                return
            early.drop()
        wants_of_kind, kind_of_rank = self._kinds(headers, asks, wants, said)
        if GPU not in way_of:
            wants_of_kind = [
                one._replace(route=np.where(one.route == GPU, np.int8(NOT_SHARED), one.route)) for one in wants_of_kind
            ]
        schedule = self._schedule(headers[asks], wants_of_kind, kind_of_rank)
        with ScheduledReads(self.session, schedule, reader) as reads:
            reads.begin()
            _Work(self.session, reads, reader, way_of).carry_out()

    def _routes(self, some_want_gpus: bool, gpu: torch.device | None) -> dict[int, Route]:
        """Return the routes that all ranks of the group can use; they all make this call."""
        found: dict[int, Route] = {CPU: CpuRoute(self.session)}
        if some_want_gpus and (way := routes.gpu_route(self.session, gpu)) is not None:
            found[GPU] = way
        return found

    def _kinds(self, headers: np.ndarray, asks: np.ndarray, wants: Wants, said: bytes) -> tuple[list[Wants], list[int]]:
        """Return the different wants of all ranks, and which are whose.

        Equal wants are known by their digests alone.
        """
        digests = [tuple(row) if its else () for row, its in zip(headers[:, 1:3].tolist(), asks, strict=True)]
        different = list(dict.fromkeys(digests))
        kind_of_rank = [different.index(digest) for digest in digests]
        found = []
        for digest in different:
            owner = digests.index(digest)
            if not digest:
                found.append(Wants.nothing())
            elif len(set(different) - {()}) == 1:
                found.append(wants)  # nobody needs them who has others
            else:
                is_mine = owner == self.session.rank
                content = np.frombuffer(said, np.uint8) if is_mine else np.empty(int(headers[owner, 3]), np.uint8)
                memory = torch.from_numpy(content.copy() if is_mine else content)
                self.session.broadcast(memory, owner)
                found.append(Wants.unpacked(memory.numpy().tobytes()))
        return found, kind_of_rank

    def _schedule(self, headers: np.ndarray, wants: list[Wants], kind_of_rank: list[int]) -> Schedule:
        remote = [one._replace(files=tuple(file for file in one.files if _is_url(file.path))) for one in wants]
        check_versions(remote)
        return schedule_of(wants, kind_of_rank, self._ranks(headers[:, 4].min()), self.session.rank)

    def _ranks(self, once: int) -> list[int]:
        """Return the ranks that share reads with this one."""
        nodes = self.session.nodes()
        return [rank for rank in range(self.session.count) if once == _JOB or nodes[rank] == nodes[self.session.rank]]


def _is_url(path: str) -> bool:
    return "://" in path  # other paths are absolute


class _Moved(NamedTuple):
    """The memory of a piece on this rank.

    Attributes:
        piece: the piece.
        packed: has its short parts one behind the other; None if there are none.
        short, long: the parts where they belong.
    """

    piece: Piece
    packed: torch.Tensor | None
    short: list[torch.Tensor]
    long: list[torch.Tensor]

    def all(self) -> list[torch.Tensor]:
        return [*([] if self.packed is None else [self.packed]), *self.long]


class _Work:
    """The work of one rank for a schedule, whose reads have begun."""

    def __init__(self, session: Session, reads: ScheduledReads, reader: Reader, ways: Mapping[int, Route]) -> None:
        self._session, self._reads, self._reader, self._ways = session, reads, reader, ways
        self._schedule = reads.schedule
        self._nodes = session.nodes().tolist()
        self._packed = {
            route: torch.empty(size, dtype=torch.uint8, device=ways[route].device)
            for route, size in self._packed_bytes().items()
        }

    def carry_out(self) -> None:
        session = self._session
        try:
            rounds = int(session.agree(Kind.STEP, self._schedule.rounds)[:, 1].max())
            waves = {
                number: list(its)
                for number, its in itertools.groupby(self._schedule.pieces, key=lambda piece: piece.round)
            }
            for number in range(rounds):
                self._reads.wait_for_round(number)
                for way in self._ways.values():
                    way.settle()
                session.agree(Kind.STEP, number)
                with session.transfers():
                    for wave in _waves(waves.get(number, [])):
                        for route, its in itertools.groupby(wave, key=lambda piece: piece.route):
                            self._pass_on(list(its), route)
            self._reads.wait_for_private()
            for way in self._ways.values():
                way.finish()
        except BaseException as error:
            if GPU in self._ways and (session.is_abandoned or not isinstance(error, Exception)):
                routes.doubt(session)
            raise

    def _packed_bytes(self) -> dict[int, int]:
        """Return how much of a route's pieces is packed at the same time."""
        most = dict.fromkeys(self._ways, 0)
        for _, its in itertools.groupby(self._schedule.pieces, key=lambda piece: piece.round):
            for wave in _waves(list(its)):
                for route in most:
                    most[route] = max(most[route], sum(_short_bytes(one) for one in wave if one.route == route))
        return most

    def _pass_on(self, pieces: Sequence[Piece], route: int) -> None:
        way, moved, used = self._ways[route], [], 0
        for piece in pieces:
            one = self._memory_of(piece, used)
            used += _short_bytes(piece)
            if one.packed is not None and piece.reader == self._session.rank:
                torch.cat(one.short, out=one.packed)
            moved.append(one)
        rest = self._without_broadcast(moved, way) if isinstance(way, GpuRoute) else moved
        hops = [hops_of(one.piece, self._nodes) for one in rest]
        for phase in range(2):
            sends: list[Transfer] = []
            receives: list[Transfer] = []
            for one, both in zip(rest, hops, strict=True):
                for sender, receiver in both[phase]:
                    if sender == self._session.rank:
                        sends += [(memory, receiver) for memory in one.all()]
                    elif receiver == self._session.rank:
                        receives += [(memory, sender) for memory in one.all()]
            way.exchange(sends, receives)
        for one in moved:
            if one.packed is not None and one.piece.reader != self._session.rank:
                sizes = [part.nbytes for part in one.short]
                torch_private.copy_each(one.short, list(torch.split(one.packed, sizes)))

    def _without_broadcast(self, moved: Sequence[_Moved], way: GpuRoute) -> list[_Moved]:
        """Broadcast what all ranks of the group want, and return the rest.

        NCCL has the connections of a broadcast sooner than those of sends between two ranks.
        """
        for_all = [one for one in moved if len(one.piece.ranks) == self._session.count]
        way.broadcast([(memory, one.piece.reader) for one in for_all for memory in one.all()])
        return [one for one in moved if len(one.piece.ranks) < self._session.count]

    def _memory_of(self, piece: Piece, used: int) -> _Moved:
        memories = self._reader.memories(piece.parts)
        short = [memory for memory in memories if memory.nbytes < SHORT_BYTES]
        long = [memory for memory in memories if memory.nbytes >= SHORT_BYTES]
        size = _short_bytes(piece)
        return _Moved(piece, self._packed[piece.route][used : used + size] if size else None, short, long)


def _short_bytes(piece: Piece) -> int:
    sizes = piece.parts.size
    return int(sizes[sizes < SHORT_BYTES].sum())


def _waves(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces of a round that are sent at the same time, in the order of all ranks."""

    def place(piece: Piece) -> int:
        return piece.reader // _READERS_AT_A_TIME

    for _, its in itertools.groupby(sorted(pieces, key=place), key=place):
        yield sorted(its, key=lambda piece: (piece.route, piece.number))

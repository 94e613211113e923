"""A rank that is killed or stopped in the middle of a call, and what the others get.

place = Place(TensorReader, "_read", 1, rank=2)
for outcome in survivors(4, load, tmp_path, place, signal.SIGKILL, 3.0):
    assert outcome.kind == "RankLost"
"""

import contextlib
import importlib
import itertools
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import helpers
import pytest
import torch.distributed as dist

_START_S = 60  # the processes start, on a machine that does other things too


class Place(NamedTuple):
    """Where a rank is lost: when it makes a call.

    Attributes:
        owner, name: of the function; a module is given by its name.
        call: which of its calls; the first is 1.
        rank: that is lost.
    """

    owner: Any
    name: str
    call: int = 1
    rank: int = 2


class Outcome(NamedTuple):
    """The outcome of a rank that was not lost.

    Attributes:
        rank: its number.
        kind: the class of its error, "" without one.
        text: of its error.
        result: of its call; None if that raised.
        after_s: seconds from the loss of the other rank until the call ended.
    """

    rank: int
    kind: str
    text: str
    result: Any
    after_s: float


def survivors(
    count: int,
    function: Callable[..., Any],
    folder: Path,
    place: Place,
    by: signal.Signals,
    timeout_s: float,
    *arguments: Any,
    limit_s: float = 30,
    in_host_of_store: bool = False,
) -> list[Outcome]:
    """Have each rank call ``function(rank, folder, *arguments)``, and lose one of them meanwhile.

    No rank ends, closes a group, or drops its error before all have an outcome. Thus none of them
    learns of the loss by the end of another one.

    Args:
        count: of ranks, which have a new gloo group.
        function: of a module's top level.
        folder: for the store of the group.
        place: where the rank is lost.
        by: SIGKILL or SIGSTOP.
        timeout_s: of the process group.
        arguments: of ``function``.
        in_host_of_store: the group's store is in the first rank, and not a file.
        limit_s: the test fails if a rank has no outcome so long after the loss.
    """
    processes, connections = [], []
    port = free_port() if in_host_of_store else 0
    try:
        for rank in range(count):
            mine, its = helpers.new_pipe()
            arguments_of_rank = its, rank, count, function, folder, place, by, timeout_s, port, arguments
            processes.append(helpers.new_process(_as_rank, arguments_of_rank))
            processes[-1].start()
            its.close()
            connections.append(mine)
        lost = connections[place.rank]
        if not lost.poll(_START_S):
            pytest.fail(f"rank {place.rank} did not come to {place.name}")
        lost_at = lost.recv()
        if lost_at is None:
            pytest.fail(f"rank {place.rank} ended without a call {place.call} of {place.name}")
        waiting = [one for one in connections if one is not lost]
        found = []
        until = lost_at + limit_s
        while waiting and (ready := wait(waiting, max(until - time.monotonic(), 0))):
            for one in ready:
                waiting.remove(one)
                rank, kind, text, result, at = one.recv()
                found.append(Outcome(rank, kind, text, result, at - lost_at))
        if waiting:
            still = [connections.index(one) for one in waiting]
            pytest.fail(f"ranks {still} still wait {limit_s} s after the loss; the others got {found}")
        return sorted(found)
    finally:
        for process in processes:
            process.kill()
            process.join()


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def _as_rank(
    connection: Connection,
    rank: int,
    count: int,
    function: Callable[..., Any],
    folder: Path,
    place: Place,
    by: signal.Signals,
    timeout_s: float,
    port: int,
    arguments: tuple[Any, ...],
) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": "lo"}
    store = dist.FileStore(f"{folder}/store", count)
    if port:
        waits = timedelta(seconds=_START_S)
        store = dist.TCPStore("localhost", port, count, rank == 0, wait_for_workers=False, timeout=waits)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
    kept, result, kind, text = None, None, "", ""
    with _lost_at(place, by, connection) if rank == place.rank else contextlib.nullcontext():
        try:
            result = function(rank, folder, *arguments)
        except BaseException as error:
            kept = error  # as a program does that reports it later
            kind, text = type(error).__name__, str(error)
    connection.send(None if rank == place.rank else (rank, kind, text, result, time.monotonic()))
    time.sleep(2 * _START_S)
    del kept


@contextlib.contextmanager
def _lost_at(place: Place, by: signal.Signals, connection: Connection) -> Iterator[None]:
    owner = importlib.import_module(place.owner) if isinstance(place.owner, str) else place.owner
    original, calls = getattr(owner, place.name), itertools.count(1)

    def call_or_be_lost(*arguments: Any, **named: Any) -> Any:
        if next(calls) == place.call:
            connection.send(time.monotonic())
            os.kill(os.getpid(), by)
        return original(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, place.name, call_or_be_lost)
        yield

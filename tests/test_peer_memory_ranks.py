"""`AsyncCheckpointer(peers=1)` on several ranks, whose nodes are folders."""

import contextlib
import os
import shutil
import signal
import threading
import warnings
from datetime import timedelta
from inspect import signature
from random import Random

import pytest
import torch.distributed as dist
from helpers import eventually, start_script
from test_dcp import on_ranks
from test_peer_memory import COUNT, checkpointer_of, copies_in, restored, state_of

from gdsdata import AsyncCheckpointer
from gdsdata.checkpoint.background import memory_folder
from gdsdata.collective import peers
from gdsdata.errors import IoError, SaveAborted

pytestmark = pytest.mark.usefixtures("quick_programs")


def bytes_in(*folders):
    found = 0
    for folder in folders:
        for path in folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                found += path.stat().st_size if path.is_file() else 0
    return found


class Most:
    """Measures the most bytes in folders until the end of the block."""

    def __init__(self, *folders):
        self.folders, self.bytes, self._is_over = folders, 0, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()

    def _look(self):
        while not self._is_over.wait(0.001):
            self.bytes = max(self.bytes, bytes_in(*self.folders))


def _save_and_restore_on_two_nodes(rank, folder):
    node = f"node-{rank // 2}"
    peers._PIECE_BYTES = 30_000
    caught = []
    warnings.showwarning = lambda message, *_: caught.append(str(message))
    warnings.simplefilter("always")

    def again(at=0, *removed):
        """Start the job anew, after rank ``at`` has removed something."""
        dist.barrier()
        if rank == at:
            for path in removed:
                shutil.rmtree(path)
        dist.barrier()
        return checkpointer_of(folder, node)

    nodes = [folder / "node-0", folder / "node-1"]
    with again() as checkpointer, Most(*nodes if rank == 0 else ()) as most:
        for step in range(1, 6):
            handle = checkpointer.save(step, state_of(step, rank))
            assert handle.copied(20)
            dist.barrier()
            size_bytes = (folder / "run" / f"step-{step}").glob(f"rank-{rank}-*.pt").__next__().stat().st_size
            assert bytes_in(*nodes) == 4 * 2 * size_bytes
            for path in copies_in(nodes[rank % 2]):
                assert path.read_bytes() == (folder / "run" / f"step-{step}" / path.name).read_bytes()
            dist.barrier()
    assert (rank > 0 or most.bytes > 0) and most.bytes <= 4 * 4 * size_bytes

    with again(0, folder / "run" / "step-5") as checkpointer:  # storage lacks it
        assert checkpointer.steps() == [3, 4]
        assert restored(checkpointer, rank) == 5
    with again(2, folder / "node-0") as checkpointer:  # a node is lost
        assert restored(checkpointer, rank, verify=True) == 5
        dist.barrier()
        assert len(copies_in(folder / node)) == (2 if rank < 2 else 4)
        assert checkpointer.save(6, state_of(6, rank)).copied(20)
        assert len(copies_in(folder / node)) == 4
    assert caught == []

    if rank == 1:  # damaged
        (path,) = (folder / node).rglob("rank-1-*.pt")
        with open(path, "r+b") as file:
            file.seek(COUNT)
            file.write(b"damaged")
    with again() as checkpointer:
        assert restored(checkpointer, rank, verify=True) == 6
        assert (
            len(caught) == 1 and "step 6 could not be restored from memory, so storage is read (rank 1: " in caught[0]
        )
    with again(3, folder / "run" / "step-6") as checkpointer:
        assert restored(checkpointer, rank, verify=True) == 4

        caught.clear()  # rank 3 has no room, first for its own copy, then for that of rank 1
        available_bytes = memory_folder.available_bytes
        if rank == 3:
            memory_folder.available_bytes = lambda: 100
        handle = checkpointer.save(7, state_of(7, rank))
        assert handle.result() and not handle.copied(20)
        if rank == 3:
            replies = iter([10**12])
            memory_folder.available_bytes = lambda: next(replies, 100)
        for step in (8, 9):
            handle = checkpointer.save(step, state_of(step, rank))
            assert handle.result() and not handle.copied(20)
            if rank == 3:
                replies = iter([10**12])
        assert [one.split(" (")[0] for one in caught] == (
            []
            if rank
            else ["gdsdata: step 7 is not kept in memory", "gdsdata: not all partners have a copy of step 8 in memory"]
        ), caught
        memory_folder.available_bytes = available_bytes
        dist.barrier()
        held = checkpointer._memory.held()
        assert {copy.generation.step for copy in held.copies} == {9}
        assert len(held.copies) == (4 if rank < 2 else 3)
    assert len(checkpointer._memory._meeting.name) < 80, "the name has not all ranks in it"
    return _refused_peers(rank, folder)


def _refused_peers(rank, folder):
    """Return the errors of constructing with other numbers of peers, and with a wrong one."""
    said = []
    for numbers in ([1, 0, 1, 1], [1, 1, 2, 1]):
        with pytest.raises((ValueError, SaveAborted)) as caught:
            AsyncCheckpointer(folder / "other", peers=numbers[rank], memory_folder=folder, timeout_s=20)
        said.append(str(caught.value))
    return said


def _save_and_restore_in_a_group_of_its_own(rank, folder):
    in_this_order = {"sort_ranks": False} if "sort_ranks" in signature(dist.new_group).parameters else {}
    group = dist.new_group([2, 1], **in_this_order)
    restores = None
    if rank > 0:
        with checkpointer_of(folder, f"node-{rank}", process_group=group) as checkpointer:
            assert checkpointer.save(1, state_of(1, rank)).copied(20)
        dist.barrier(group)
        if rank == 1:
            shutil.rmtree(folder / "node-1")
        dist.barrier(group)
        with checkpointer_of(folder, f"node-{rank}", process_group=group) as checkpointer:
            restores = restored(checkpointer, rank), len(copies_in(folder / f"node-{rank}"))
    dist.barrier()
    return restores


def test_some_ranks_of_a_program_in_any_order_keep_copies(tmp_path):
    assert on_ranks(3, _save_and_restore_in_a_group_of_its_own, tmp_path) == [None, (1, 1), (1, 2)]


def test_two_nodes_keep_two_copies_and_restore_what_is_left(tmp_path):
    for differs, wrong in on_ranks(4, _save_and_restore_on_two_nodes, tmp_path):
        assert "peers= differs among the ranks: rank 0 has 1, and rank 1 has 0" in differs
        assert "peers=2: give 1" in wrong


def _is_silent_on_rank_1(rank, folder):
    """One rank's thread takes part no more, though its process lives."""
    node = folder / f"node-{rank}"
    node.mkdir()
    released = threading.Event()
    with AsyncCheckpointer(folder / "silent", peers=1, memory_folder=node, timeout_s=20) as checkpointer:
        assert checkpointer.save(1, state_of(1)).copied(20)
        checkpointer._memory._meeting._group.set_timeout(timedelta(seconds=1))
        if rank == 1:
            checkpointer._memory._thread.submit(released.wait)
        dist.barrier()
        handle = checkpointer.save(2, state_of(2))
        assert handle.result(20)
        if rank == 0:
            assert not handle.copied(20)
            assert not checkpointer.save(3, state_of(3)).copied(20), "there are no more copies"
        else:
            checkpointer.save(3, state_of(3))
        dist.barrier()
        released.set()
        assert not handle.copied(20)
    shutil.rmtree(node)


def _die_while_sending(rank, folder):
    _is_silent_on_rank_1(rank, folder)
    peers._PIECE_BYTES = 30_000
    checkpointer = checkpointer_of(folder, f"node-{rank}")
    assert checkpointer.save(1, state_of(1, rank)).copied(20)
    handle = None
    if rank == 1:
        begun = threading.Event()

        class Group:
            """The gloo group, whose third send ends the process."""

            def __init__(self, group):
                self.group, self.sends = group, 0

            def __getattr__(self, name):
                return getattr(self.group, name)

            def send(self, *arguments):
                self.sends += 1
                if self.sends == 3:
                    begun.set()
                    assert eventually(handle_is_done, 20)
                    os.kill(os.getpid(), signal.SIGKILL)
                return self.group.send(*arguments)

        def handle_is_done():
            return handle is not None and handle.done()

        checkpointer._memory._meeting._group = Group(checkpointer._memory._meeting._group)
    handle = checkpointer.save(2, state_of(2, rank))
    assert handle.result(20)
    assert not handle.copied(20)  # rank 1 is dead by now
    assert [path for path in copies_in(folder / "node-0") if path.suffix == ".tmp"] == []
    assert len([path for path in copies_in(folder / "node-0") if "-step-1-" in str(path)]) == 2
    checkpointer.close()


def _restore_after_a_death(rank, folder):
    with checkpointer_of(folder, f"node-{rank}") as checkpointer:
        first = restored(checkpointer, rank)  # own copies of step 2 are complete
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder / "run" / "step-2")
            shutil.rmtree(folder / "run" / "step-1")
            shutil.rmtree(folder / "node-1")
        dist.barrier()
        (folder / f"node-{rank}").mkdir(exist_ok=True)
        second = restored(checkpointer, rank)
        assert checkpointer.save(3, state_of(3, rank)).copied(20)
        return first, second


def test_a_rank_that_is_killed_while_it_sends_leaves_the_older_copies(tmp_path):
    with pytest.raises(BaseException, match="exit code -9"):
        on_ranks(2, _die_while_sending, tmp_path)
    assert on_ranks(2, _restore_after_a_death, tmp_path) == [(2, 1), (2, 1)]
    assert [len(copies_in(tmp_path / f"node-{rank}")) for rank in range(2)] == [2, 2]


ENDS_WHILE_IT_SENDS = """
import sys, threading
import torch, torch.distributed as dist
from gdsdata import AsyncCheckpointer
from gdsdata.collective import peers

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
peers._PIECE_BYTES = 1000
sends, pass_on = threading.Event(), peers.Meeting.pass_on
peers.Meeting.pass_on = lambda *arguments: (sends.set(), pass_on(*arguments))
checkpointer = AsyncCheckpointer(f"{folder}/run", peers=1, memory_folder=f"{folder}/node-{rank}", timeout_s=20)
checkpointer.save(1, {"a": torch.ones(4 << 20)}).result()
sends.wait()
"""


@pytest.mark.whole_end
def test_a_program_that_ends_while_it_sends_ends_at_once(tmp_path):
    for rank in range(2):
        (tmp_path / f"node-{rank}").mkdir()
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [start_script(ENDS_WHILE_IT_SENDS, tmp_path, rank, environment=environment) for rank in range(2)]
    for rank in ranks:
        assert rank.communicate(timeout=50)[1].count("terminate called") == 0
        assert rank.returncode == 0
    for rank in range(2):
        names = [copy.name for copy in copies_in(tmp_path / f"node-{rank}")]
        assert len(names) == 1 and names[0].startswith(f"rank-{rank}-"), names


def _save_until_killed(rank, folder, delay_s):
    checkpointer = checkpointer_of(folder, f"node-{rank}")
    step = restored(checkpointer, rank, verify=True) or 0
    if rank == 1:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with contextlib.suppress(SaveAborted, IoError):
        while True:
            step += 1
            checkpointer.save(step, state_of(step, rank)).result(20)
    os._exit(1)


def _restore_and_count(rank, folder):
    with checkpointer_of(folder, f"node-{rank}") as checkpointer:
        return restored(checkpointer, rank, verify=True), len(copies_in(folder / f"node-{rank}"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_are_killed_at_any_time_leave_whole_copies(tmp_path, seed):
    random = Random(seed)
    newest = 0
    for _ in range(3):
        with pytest.raises(BaseException, match="exit code"):
            on_ranks(2, _save_until_killed, tmp_path, random.uniform(0, 0.5))
        loss = random.choice(["nothing", "storage", "node-0", "node-1"])
        if loss == "storage":
            for path in (tmp_path / "run").glob("step-*"):
                shutil.rmtree(path)
        elif loss != "nothing":
            shutil.rmtree(tmp_path / loss)
        (step, of_first), (other, of_second) = on_ranks(2, _restore_and_count, tmp_path)
        assert step == other and max(of_first, of_second) <= 5
        assert loss == "storage" or (step or 0) >= newest
        newest = step or 0

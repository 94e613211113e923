"""`AsyncCheckpointer(peers=1)`: copies of the newest save in the memory of nodes.

A node is a folder here: ranks with the same one see the same memory.
"""

import contextlib
import os
import shutil
import signal
import threading
import warnings
from collections import Counter
from datetime import timedelta
from random import Random

import pytest
import torch
import torch.distributed as dist
from helpers import eventually
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint_save import disk_of
from test_dcp import on_ranks

from gdsdata import AsyncCheckpointer
from gdsdata.checkpoint.background import memory_folder
from gdsdata.checkpoint.background.copies import (
    Copy,
    Generation,
    Held,
    InMemory,
    Transfer,
    newest_in_memory,
    partners_of,
    transfers_to_partners,
)
from gdsdata.checkpoint.background.manifest import Manifest, SavedFile
from gdsdata.checkpoint.background.memory_folder import MemoryFolder
from gdsdata.checkpoint.background.memory_transfers import Transfers
from gdsdata.collective import peers
from gdsdata.errors import CorruptData, IoError, SaveAborted

pytestmark = pytest.mark.usefixtures("quick_programs")
COUNT = 50_000
RUN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def warnings_are_new(monkeypatch):
    monkeypatch.setattr("gdsdata.io.engine._warned", set())


def state_of(step, rank=0):
    return {"a": torch.full((COUNT,), 10.0 * step + rank), "step": step, "small": [torch.full((9,), step)] * 3}


def empty():
    return {"a": torch.zeros(COUNT), "step": None, "small": [torch.zeros(9, dtype=torch.int64)] * 3}


def checkpointer_of(folder, node="node", **options):
    (folder / node).mkdir(exist_ok=True)
    return AsyncCheckpointer(folder / "run", peers=1, memory_folder=folder / node, timeout_s=20, **options)


def restored(checkpointer, rank=0, **options):
    """Restore, check the state, and return the step."""
    state = empty()
    step = checkpointer.restore(state, **options)
    if step is not None:
        assert state["step"] == step and state["a"].eq(10 * step + rank).all()
    return step


def copies_in(folder):
    """Return the paths below a node's folder, complete copies and others."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def bytes_in(*folders):
    found = 0
    for folder in folders:
        for path in folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                found += path.stat().st_size if path.is_file() else 0
    return found


# ------------------------------------------------------------------------------------------------ numbers alone

PLACES = st.lists(st.sampled_from("abcde"), min_size=2, max_size=24)


@given(PLACES)
def test_partners_are_a_permutation_and_on_other_nodes_where_that_is_possible(places):
    partners = partners_of(places)
    assert sorted(partners) == list(range(len(places)))
    assert all(rank != partner for rank, partner in enumerate(partners))
    elsewhere = sum(places[rank] != places[partner] for rank, partner in enumerate(partners))
    largest = max(Counter(places).values())
    assert elsewhere == (len(places) if 2 * largest <= len(places) else 2 * (len(places) - largest)) or (
        2 * largest > len(places) and elsewhere >= 2 * (len(places) - largest)
    )


def test_partners_are_half_of_the_ranks_away():
    assert partners_of(["a"] * 4) == [2, 3, 0, 1]
    assert partners_of(["a", "a", "b", "b", "c", "c", "d", "d"]) == [4, 5, 6, 7, 0, 1, 2, 3]
    assert transfers_to_partners(["a", "a"], [1, 1]) == [], "a copy in the same memory is no second one"
    assert transfers_to_partners(["a"], [1]) == []


@st.composite
def holdings(draw):
    """Draw a job, and the copies that its nodes have of a few saves."""
    places = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=5))
    numbers = st.tuples(st.integers(0, 3), st.integers(0, len(places)), st.sampled_from([100, 100, 100, 101]))
    of_place = {place: draw(st.lists(numbers, max_size=8)) for place in sorted(set(places))}
    return [
        Held(
            place,
            tuple(Copy(generation(sequence, len(places)), rank, size) for sequence, rank, size in of_place[place]),
        )
        for place in places
    ]


def generation(sequence, ranks, run=RUN):
    return Generation(sequence, 10 * sequence, ranks, f"{sequence:08x}", run)


@given(holdings())
def test_the_newest_save_with_a_copy_of_every_file_is_restored(held):
    ranks = len(held)
    found = newest_in_memory(held, RUN, None)
    whole = []
    for sequence in range(4):
        of_rank = [
            {copy.size_bytes for one in held for copy in one.copies if copy[:2] == (generation(sequence, ranks), rank)}
            for rank in range(ranks + 1)
        ]
        if all(len(sizes) == 1 for sizes in of_rank[:ranks]) and not of_rank[ranks]:
            whole.append(sequence)
    assert (found and found.generation.sequence) == (whole[-1] if whole else None)
    assert newest_in_memory(held, "another run", None) is None
    assert newest_in_memory(held, None, None) is None
    if found is None:
        return
    assert newest_in_memory(held, RUN, found.generation.step) == found
    has = [{copy.rank for copy in one.copies if copy.generation == found.generation} for one in held]
    assert [one.destination for one in found.transfers] == [rank for rank in range(ranks) if rank not in has[rank]]
    assert all(one.file == one.destination and one.file in has[one.source] for one in found.transfers)


def test_memory_is_restored_if_it_has_the_same_save_or_a_newer_one():
    def manifest(number, size_bytes=5):
        return Manifest(10, 3, (SavedFile(f"rank-0-{number:08x}.pt", size_bytes),))

    here = InMemory(Generation(3, 10, 1, "00000001", RUN), manifest(1).files, ())
    assert here.is_newer(manifest(1), 3) and here.is_newer(manifest(1), 4), "an upload may have raised its sequence"
    assert here.is_newer(manifest(2), 2) and not here.is_newer(manifest(2), 3)
    assert not here.is_newer(manifest(1, size_bytes=6), 3), "a copy of another size is damaged"


def test_names_of_generations_are_read_back():
    one = generation(7, 16)
    assert Generation.named(one.name) == one
    assert Generation.named("step-7") is None


# ------------------------------------------------------------------------------------------------ one node


def test_a_restart_restores_from_memory_and_storage_need_not_have_the_save(tmp_path):
    with checkpointer_of(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            assert checkpointer.save(step, state_of(step)).copied(20)
            (copy,) = copies_in(tmp_path / "node")
            assert copy.read_bytes() == (tmp_path / "run" / f"step-{step}" / copy.name).read_bytes()
            assert copy.parent.parent.stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "run").glob("step-[23]"):
        shutil.rmtree(path)
    with checkpointer_of(tmp_path) as checkpointer:
        assert restored(checkpointer) == 3
        assert restored(checkpointer, step=3, verify=True) == 3
        assert restored(checkpointer, step=1) == 1
        with pytest.raises(FileNotFoundError, match="there are: 1"):
            checkpointer.restore(empty(), step=2)
        checkpointer.save(4, state_of(4)).result()
    assert checkpointer.restore(empty()) == 4, "also after close()"
    assert [copy.parent.name.split("-of")[0] for copy in copies_in(tmp_path / "node")] == ["3-step-4"]


def test_the_same_save_is_read_from_memory_and_a_newer_one_from_storage(tmp_path, monkeypatch):
    with checkpointer_of(tmp_path) as checkpointer:
        assert checkpointer.save(1, state_of(1)).copied(20)
    (copy,) = copies_in(tmp_path / "node")
    (stored,) = (tmp_path / "run").glob("step-1/*.pt")
    stored.write_bytes(bytes(stored.stat().st_size))
    assert restored(checkpointer_of(tmp_path)) == 1
    with checkpointer_of(tmp_path) as checkpointer:
        monkeypatch.setattr(checkpointer._memory, "_is_busy", True)
        with pytest.warns(RuntimeWarning, match="saves come faster"):
            handle = checkpointer.save(2, state_of(2))
            assert handle.result() and not handle.copied(20)
    assert copies_in(tmp_path / "node") == [copy]
    copy.write_bytes(bytes(copy.stat().st_size))
    assert restored(checkpointer_of(tmp_path)) == 2


def test_copies_of_a_folder_that_was_deleted_are_not_restored(tmp_path):
    with checkpointer_of(tmp_path) as checkpointer:
        assert checkpointer.save(5, state_of(5)).copied(20)
    shutil.rmtree(tmp_path / "run")
    with checkpointer_of(tmp_path) as checkpointer:
        assert restored(checkpointer) is None
        assert checkpointer.save(1, state_of(1)).copied(20)
        assert restored(checkpointer) == 1
    assert len(copies_in(tmp_path / "node")) == 1


def test_the_next_save_removes_what_killed_processes_have_left(tmp_path):
    with checkpointer_of(tmp_path) as checkpointer:
        assert checkpointer.save(1, state_of(1)).copied(20)
    (copy,) = copies_in(tmp_path / "node")
    run = checkpointer._folder.run_id()
    memory = MemoryFolder(str(tmp_path / "node"), str(tmp_path / "run"))
    left = [memory.begin(generation(0, 8, run), 3, 1000), memory.begin(Generation.named(copy.parent.name), 0, 1000)]
    memory.begin(generation(9, 8, run), 3, 1000).complete()
    assert len(copies_in(tmp_path / "node")) == 4
    with checkpointer_of(tmp_path) as checkpointer:
        assert restored(checkpointer) == 1
        at_begin = []
        begin = checkpointer._memory._folder.begin
        checkpointer._memory._folder.begin = lambda *of: (at_begin.append(copies_in(tmp_path / "node")), begin(*of))[1]
        assert checkpointer.save(2, state_of(2)).copied(20)
    assert at_begin == [[copy]]
    assert len(copies_in(tmp_path / "node")) == 1
    for one in left:
        one.abandon()


def test_a_run_without_peers_removes_the_copies(tmp_path):
    with checkpointer_of(tmp_path) as checkpointer:
        assert checkpointer.save(1, state_of(1)).copied(20)
    with AsyncCheckpointer(tmp_path / "run", memory_folder=tmp_path / "node") as checkpointer:
        assert restored(checkpointer) == 1
        assert copies_in(tmp_path / "node")
        handle = checkpointer.save(2, state_of(2))
        with pytest.raises(ValueError, match="with peers=1"):
            handle.copied()
    assert list((tmp_path / "node").iterdir()) == []


@pytest.mark.parametrize("is_checked", [True, False], ids=["before", "while_writing"])
def test_memory_without_room_is_reported_once_and_fails_no_save(tmp_path, monkeypatch, is_checked):
    if not is_checked:
        monkeypatch.setattr(MemoryFolder, "_check_room", lambda *_: None)
    with disk_of("100k", tmp_path / "node"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with checkpointer_of(tmp_path) as checkpointer:
            for step in (1, 2):
                handle = checkpointer.save(step, state_of(step))
                assert handle.result(20) and not handle.copied(20)
                assert copies_in(tmp_path / "node") == []
            assert restored(checkpointer) == 2
        shutil.rmtree(checkpointer._memory._folder.path)
    said = [str(one.message) for one in caught if "not kept in memory" in str(one.message)]
    assert len(said) == 1 and "step 1 is not kept in memory (rank 0: " in said[0]


def test_a_copy_leaves_a_share_of_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_folder, "available_bytes", lambda: 4000)
    folder = MemoryFolder(str(tmp_path), "run")
    first = folder.begin(generation(1, 2), 0, 2000)
    with pytest.raises(OSError, match="does not fit into .*: 1000 bytes are left, because .* 75%"):
        folder.begin(generation(1, 2), 1, 1001)
    first.abandon()
    folder.begin(generation(1, 2), 1, 3000).abandon()


def test_a_folder_of_another_user_is_not_used(tmp_path):
    memory = MemoryFolder(str(tmp_path / "node"), str(tmp_path / "run"))
    os.makedirs(memory.path, 0o755)
    said = pytest.warns(RuntimeWarning, match="not a folder that this user alone may use")
    with said, checkpointer_of(tmp_path) as checkpointer:
        handle = checkpointer.save(1, state_of(1))
        assert handle.result() and not handle.copied(20)
        assert restored(checkpointer) == 1


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_file_that_arrives_with_another_checksum_is_no_copy(tmp_path, is_damaged):
    nodes = [MemoryFolder(str(tmp_path / name), "run") for name in "ab"]
    for node in nodes:
        os.mkdir(os.path.dirname(node.path))
    one = generation(1, 2)
    own = nodes[0].begin(one, 0, 5000)
    own.write(0, bytes(range(250)) * 20)
    own.complete()
    sender, receiver = (Transfers(node, one, [Transfer(0, 0, 1, 5000)], rank) for rank, node in enumerate(nodes))
    assert sender.open() == receiver.open() == {}
    (sent,), (received,) = sender.sends, receiver.receives
    received.content.copy_(sent.content)
    if is_damaged:
        received.content[4999] ^= 1
    checksums = [sender.checksums(), receiver.checksums()]
    for end in (sender, receiver):
        end.complete(checksums)
        end.close()
    assert list(receiver.errors) == ([0] if is_damaged else []) and sender.errors == {}
    assert len(copies_in(tmp_path / "b")) == (0 if is_damaged else 1)
    assert len(copies_in(tmp_path / "a")) == 1


@pytest.mark.parametrize(("peers", "error"), [(2, ValueError), (-1, ValueError), ("1", TypeError)])
def test_wrong_numbers_of_peers_are_refused(tmp_path, peers, error):
    with pytest.raises(error, match="peers="):
        AsyncCheckpointer(tmp_path, peers=peers)


# ------------------------------------------------------------------------------------------------ several nodes


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
    return node


def test_two_nodes_keep_two_copies_and_restore_what_is_left(tmp_path):
    assert on_ranks(4, _save_and_restore_on_two_nodes, tmp_path) == ["node-0", "node-0", "node-1", "node-1"]


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


def test_a_damaged_copy_without_a_checkpoint_on_storage_is_an_error(tmp_path):
    with checkpointer_of(tmp_path) as checkpointer:
        assert checkpointer.save(1, state_of(1)).copied(20)
    shutil.rmtree(tmp_path / "run" / "step-1")
    (copy,) = copies_in(tmp_path / "node")
    copy.write_bytes(copy.read_bytes().replace(torch.full((9,), 10.0).numpy().tobytes(), b"x" * 36, 1))
    with pytest.raises(CorruptData):
        checkpointer_of(tmp_path).restore(empty(), verify=True)

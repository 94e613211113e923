"""`AsyncCheckpointer(peers=1)`: copies of the newest save in the memory of nodes.

A node is a folder here: ranks with the same one see the same memory.
"""

import errno
import os
import shutil
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint_save import disk_of

from gdsdata import AsyncCheckpointer
from gdsdata.checkpoint.background import memory_folder
from gdsdata.checkpoint.background.checkpoint_folder import LockedFolder
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
from gdsdata.checkpoint.background.memory_folder import MemoryCopy, MemoryFolder
from gdsdata.checkpoint.background.memory_transfers import Transfers
from gdsdata.errors import CorruptData

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


# ------------------------------------------------------------------------------------------------ numbers alone

PLACES = st.lists(st.sampled_from("abcde"), min_size=2, max_size=24)


@given(PLACES)
def test_partners_are_a_permutation_and_on_other_nodes_where_that_is_possible(places):
    partners = partners_of(places)
    assert sorted(partners) == list(range(len(places)))
    assert all(rank != partner for rank, partner in enumerate(partners))
    elsewhere = sum(places[rank] != places[partner] for rank, partner in enumerate(partners))
    largest = max(Counter(places).values())
    most = len(places) if 2 * largest <= len(places) else 2 * (len(places) - largest)
    assert elsewhere == most


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
    assert checkpointer.restore(empty()) == 4, "a restore works after close()"
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


@pytest.mark.parametrize("kind", ["others may read it", "it is another user's", "a link"])
def test_a_folder_that_is_not_this_users_alone_is_neither_used_nor_emptied(tmp_path, monkeypatch, kind):
    memory, home = MemoryFolder(str(tmp_path / "node"), str(tmp_path / "run")), tmp_path / "home"
    place = home if kind == "a link" else Path(memory.path)
    (place / "letters").mkdir(parents=True)
    place.chmod(0o755 if kind == "others may read it" else 0o700)
    if kind == "a link":
        (tmp_path / "node").mkdir()
        os.symlink(home, memory.path)
    if kind == "it is another user's":
        lstat = os.lstat
        monkeypatch.setattr(
            memory_folder.os, "lstat", lambda path: Foreign(lstat(path)) if path == memory.path else lstat(path)
        )
    said = pytest.warns(RuntimeWarning, match="not a folder that this user alone may use")
    with said, checkpointer_of(tmp_path) as checkpointer:
        handle = checkpointer.save(1, state_of(1))
        assert handle.result() and not handle.copied(20)
        assert restored(checkpointer) == 1
    with AsyncCheckpointer(tmp_path / "run", memory_folder=tmp_path / "node") as without:  # which frees memory
        without.save(2, state_of(2)).result()
    assert (place / "letters").exists()


class Foreign:
    """The answer of `os.lstat` for a folder that another user owns."""

    def __init__(self, found):
        self.st_mode, self.st_uid = found.st_mode, found.st_uid + 1


def test_a_save_whose_manifest_is_not_written_leaves_no_copy(tmp_path, monkeypatch):
    with checkpointer_of(tmp_path) as checkpointer:
        assert checkpointer.save(1, state_of(1)).copied(20)
        with monkeypatch.context() as patched:
            patched.setattr(LockedFolder, "commit", refuse_for_lack_of_room)
            handle = checkpointer.save(2, state_of(2))
            with pytest.raises(OSError, match="no room"):
                handle.result()
            assert not handle.copied(20)
        assert restored(checkpointer) == 1
        assert checkpointer.save(3, state_of(3)).copied(20)


def refuse_for_lack_of_room(*_, **__):
    raise OSError(errno.ENOSPC, "no room")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA error"), OSError(errno.EIO, "bad memory")])
def test_a_copy_with_a_hole_is_none_whatever_the_error_was(tmp_path, monkeypatch, error):
    write = MemoryCopy.write

    def fails_once(self, offset, content):
        monkeypatch.setattr(MemoryCopy, "write", write)
        raise error

    with checkpointer_of(tmp_path) as checkpointer:
        monkeypatch.setattr(MemoryCopy, "write", fails_once)
        with pytest.warns(RuntimeWarning, match="step 1 is not kept in memory"):
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


def test_a_damaged_copy_without_a_checkpoint_on_storage_is_an_error(tmp_path):
    with checkpointer_of(tmp_path) as checkpointer:
        assert checkpointer.save(1, state_of(1)).copied(20)
    shutil.rmtree(tmp_path / "run" / "step-1")
    (copy,) = copies_in(tmp_path / "node")
    copy.write_bytes(copy.read_bytes().replace(torch.full((9,), 10.0).numpy().tobytes(), b"x" * 36, 1))
    with pytest.raises(CorruptData):
        checkpointer_of(tmp_path).restore(empty(), verify=True)

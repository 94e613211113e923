"""The folder of copies in a node's memory: forks, other containers, and what errors leave."""

import errno
import fcntl
import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import eventually
from test_peer_memory import RUN, checkpointer_of, copies_in, generation, restored, state_of

from gdsdata.checkpoint.background import memory_folder
from gdsdata.checkpoint.background.checkpoint_folder import CheckpointFolder
from gdsdata.checkpoint.background.memory_folder import MemoryFolder, mapped

OTHER_RUN = "fedcba9876543210"


def folder_in(tmp_path, name="node"):
    (tmp_path / name).mkdir(exist_ok=True)
    return MemoryFolder(str(tmp_path / name), "run")


def complete(folder, one, rank=0, content=b"x" * 5000):
    copy = folder.begin(one, rank, len(content))
    copy.write(0, content)
    copy.complete()
    return folder.file(one, rank)


def in_a_child(call):
    """Return the text that ``call`` returns in a forked child, which is waited for."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, str(call()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


def uses_of(path):
    """Return the lines of this process's descriptors and mappings that name a path."""
    descriptors = [os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd") if _is_open(one)]
    with open("/proc/self/maps") as maps:
        return [line for line in [*descriptors, *maps.read().splitlines()] if path in line]


def _is_open(descriptor):
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_a_forked_child_keeps_no_memory_of_copies(tmp_path):
    folder = folder_in(tmp_path)
    path = complete(folder, generation(1, 2))
    sent, coming = mapped(path), folder.begin(generation(1, 2), 1, 5000)
    coming.occupy()
    received = coming.mapped()
    assert len(uses_of(folder.path)) >= 4
    assert in_a_child(lambda: uses_of(folder.path)) == "[]"
    received[:] = sent
    coming.complete()
    assert Path(folder.file(generation(1, 2), 1)).read_bytes() == b"x" * 5000


def test_a_mapped_file_is_written_through_and_unmapped_with_its_tensor(tmp_path):
    (tmp_path / "a").write_bytes(bytes(10_000))
    content = mapped(str(tmp_path / "a"))
    assert content.dtype == torch.uint8 and content.shape == (10_000,)
    content[9_999] = 7
    assert (tmp_path / "a").read_bytes()[-1] == 7
    del content
    assert uses_of(str(tmp_path / "a")) == []
    with pytest.raises(OSError, match="No such file"):
        mapped(str(tmp_path / "b"))
    (tmp_path / "c").touch()
    with pytest.raises(ValueError, match="is empty"):
        mapped(str(tmp_path / "c"))


def test_copies_of_another_run_stay_while_its_process_lives(tmp_path):
    ours, theirs = folder_in(tmp_path), folder_in(tmp_path)
    their_copy = complete(theirs, generation(5, 2, OTHER_RUN))
    ours.keep_only(generation(1, 2))
    ours.free()
    assert os.path.exists(their_copy)
    assert ours.held().copies[0].generation.run == OTHER_RUN
    theirs.release()
    ours.keep_only(generation(1, 2))
    assert not os.path.exists(their_copy)


@pytest.mark.parametrize("end", ["release", "collected"])
def test_older_copies_of_the_own_run_are_removed_and_locks_end_with_their_owner(tmp_path, end):
    ours, theirs = folder_in(tmp_path), folder_in(tmp_path)
    older = complete(theirs, generation(1, 2))
    ours.keep_only(generation(2, 2))
    assert not os.path.exists(older), "another rank of this run has begun it"
    path = complete(theirs, generation(3, 2, OTHER_RUN))
    if end == "release":
        theirs.release()
    del theirs
    ours.free()
    assert not os.path.exists(path) and not os.path.exists(ours.path)


def test_a_restored_copy_is_held_until_the_checkpointer_is_closed(tmp_path):
    with checkpointer_of(tmp_path) as checkpointer:
        assert checkpointer.save(1, state_of(1)).copied(20)
    other = MemoryFolder(str(tmp_path / "node"), str(tmp_path / "run"))
    with checkpointer_of(tmp_path) as checkpointer:
        assert restored(checkpointer) == 1
        other.keep_only(generation(9, 1, OTHER_RUN))
        assert len(copies_in(tmp_path / "node")) == 1
    other.keep_only(generation(9, 1, OTHER_RUN))
    assert copies_in(tmp_path / "node") == []


@pytest.mark.parametrize("call", ["ftruncate", "posix_fallocate"])
def test_a_copy_that_finds_no_memory_leaves_no_file_and_no_descriptor(tmp_path, monkeypatch, call):
    folder = folder_in(tmp_path)
    folder.make()

    def no_memory(*_):
        raise OSError(errno.ENOSPC, "no memory")

    with monkeypatch.context() as patched:
        patched.setattr(memory_folder.os, call, no_memory)
        with pytest.raises(OSError, match="no memory"):
            copy = folder.begin(generation(1, 2), 0, 5000)
            try:
                copy.occupy()
            finally:
                copy.abandon()
    folder.remove(generation(1, 2), 0)
    assert eventually(lambda: uses_of(folder.path) == [])
    assert list((tmp_path / "node").rglob("*/*")) == []


def test_the_folder_of_a_generation_goes_with_its_last_file_even_if_that_is_gone(tmp_path):
    folder = folder_in(tmp_path)
    path = complete(folder, generation(1, 2))
    os.unlink(path)
    folder.remove(generation(1, 2), 0)
    assert not os.path.exists(os.path.dirname(path))


@pytest.mark.parametrize(
    "content", ["", "../../../../etc/x", "0123456789abcde", "0123456789abcdeF", RUN + "\n", "x" * 99]
)
def test_a_random_name_that_is_none_is_replaced(tmp_path, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run-id").write_text(content)
    assert CheckpointFolder(str(tmp_path / "run")).run_id() is None
    with checkpointer_of(tmp_path) as checkpointer:
        assert restored(checkpointer) is None
        assert checkpointer.save(1, state_of(1)).copied(20)
        assert restored(checkpointer) == 1
    run = CheckpointFolder(str(tmp_path / "run")).run_id()
    assert (
        run is not None
        and len(run) == 16
        and [path.parent.name[-16:] for path in copies_in(tmp_path / "node")] == [run]
    )


def test_a_child_that_was_forked_under_the_folders_lock_does_not_keep_it(tmp_path):
    folder, (reader, writer) = folder_in(tmp_path), os.pipe()
    folder.make()
    with folder._locked():
        child = os.fork()  # with another thread's descriptor, if a thread of a program forks
        if not child:
            os.read(reader, 1)
            os._exit(0)
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(complete, folder, generation(1, 2)).result(10)
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_a_folder_that_another_process_removes_is_made_again_for_its_user_alone(tmp_path, monkeypatch):
    folder, other = folder_in(tmp_path), folder_in(tmp_path)
    folder.make()
    flock, removed = fcntl.flock, []

    def flock_late(lock, how):
        if not removed:
            removed.append(True)
            other.free()
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    complete(folder, generation(1, 2))
    assert os.path.exists(folder.file(generation(1, 2), 0))
    assert oct(os.stat(folder.path).st_mode & 0o777) == "0o700"


def test_a_copy_that_is_gone_before_it_is_mapped_is_not_made_anew(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"x" * 5000)
    make = torch.from_file

    def make_late(*arguments, **named):
        (tmp_path / "a").unlink(missing_ok=True)
        return make(*arguments, **named)

    monkeypatch.setattr(torch, "from_file", make_late)
    assert bytes(mapped(str(tmp_path / "a")).numpy()) == b"x" * 5000
    assert not (tmp_path / "a").exists()


def test_a_folder_that_cannot_be_opened_is_one_error(tmp_path, capfd):
    folder = folder_in(tmp_path)
    folder.hold(generation(1, 2))
    gc.collect()
    assert "Exception ignored" not in capfd.readouterr().err


def test_a_memory_folder_that_is_not_there_is_named_with_the_remedy(tmp_path):
    """A checkpointer gives these words in its warnings."""
    folder = MemoryFolder(str(tmp_path / "lost"), "run")
    with pytest.raises(FileNotFoundError, match=rf"'{tmp_path}/lost' does not exist: create it, or pass another"):
        folder.held()
    (tmp_path / "lost").mkdir()
    assert folder.held().copies == ()

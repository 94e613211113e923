"""An `AsyncCheckpointer`'s folder: its lock without `flock`, and a save beside many checkpoints."""

import errno
import fcntl
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers import descriptors, eventually, in_new_process

from gdsdata import AsyncCheckpointer, EngineOptions
from gdsdata.checkpoint.background import heartbeat_lock
from gdsdata.checkpoint.background.checkpoint_folder import CheckpointFolder, LockedFolder
from gdsdata.checkpoint.background.save_job import SaveJob
from gdsdata.errors import CorruptData, IoError
from gdsdata.io import engine

# ------------------------------------------------------------------------------------------------ without flock


def refuse_flock(monkeypatch, number: int) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(engine, "_warned", set())


@pytest.fixture
def no_flock(monkeypatch):
    refuse_flock(monkeypatch, errno.ENOSYS)
    monkeypatch.setattr(heartbeat_lock, "BEAT_S", 0.02)
    monkeypatch.setattr(heartbeat_lock, "STALE_S", 0.6)


def locked(path: Path) -> LockedFolder:
    return LockedFolder(CheckpointFolder(str(path)), EngineOptions())


class OtherProcess:
    """Holds the lock of a folder, with its heartbeat, until it is ended."""

    def __init__(self, path: Path) -> None:
        self._answers, answers = os.pipe()
        commands, self._commands = os.pipe()
        self.id = os.fork()
        if self.id == 0:
            os.close(self._commands)
            try:
                folder = locked(path)
                os.write(answers, b"y")
                os.read(commands, 1)
                folder.release()
            except BaseException:
                os.write(answers, b"n")
            os._exit(0)
        os.close(commands), os.close(answers)

    def has_it(self) -> bool:
        return os.read(self._answers, 1) == b"y"

    def end(self) -> None:
        os.close(self._commands)
        os.waitpid(self.id, 0)
        os.close(self._answers)

    def kill(self) -> None:
        os.kill(self.id, signal.SIGKILL)
        self.end()


@pytest.mark.filterwarnings("ignore:gdsdata. the file system of .* has no flock")
def test_without_flock_a_folder_belongs_to_the_process_that_lives(tmp_path, no_flock):
    other = OtherProcess(tmp_path)
    assert other.has_it()
    for _ in range(2):
        with pytest.raises(IoError, match=f"process {other.id} on .* saves checkpoints to '{tmp_path}' now: end it"):
            locked(tmp_path)
    other.end()
    folder = locked(tmp_path)
    folder.begin(1)
    folder.release()
    assert not (tmp_path / "lock-held").exists()


@pytest.mark.filterwarnings("ignore:gdsdata. the file system of .* has no flock")
def test_without_flock_the_lock_of_a_killed_process_is_taken_over_by_one(tmp_path, no_flock):
    other = OtherProcess(tmp_path)
    assert other.has_it()
    other.kill()
    heirs = [OtherProcess(tmp_path) for _ in range(4)]
    assert sorted(heir.has_it() for heir in heirs) == [False, False, False, True]
    for heir in heirs:
        heir.end()
    assert os.listdir(tmp_path) == ["lock"]


@pytest.mark.filterwarnings("ignore:gdsdata. the file system of .* has no flock")
def test_a_process_that_lost_the_folder_while_it_was_suspended_saves_and_removes_nothing(tmp_path, no_flock):
    folder = locked(tmp_path)
    folder.begin(1)
    (tmp_path / "step-1" / "rank-0-00c0ffee.pt").write_bytes(b"of the other process")
    held = tmp_path / "lock-held"
    content = held.read_text()
    held.unlink()  # another process does so if it has seen no heartbeat
    held.write_text(f"{'0' * 32} 000000000001 process 5 on elsewhere\n")
    for call in (lambda: folder.commit(1, []), lambda: folder.begin(2), folder.tidy):
        with pytest.raises(IoError, match="process 5 on elsewhere saves checkpoints"):
            call()
    folder.release()
    assert held.read_text() != content and held.exists(), "the other's lock is left alone"
    assert (tmp_path / "step-1" / "rank-0-00c0ffee.pt").exists()


@pytest.mark.filterwarnings("ignore:gdsdata. the file system of .* has no flock")
def test_a_host_that_has_flock_respects_the_lock_of_one_that_has_not(tmp_path, no_flock, monkeypatch):
    other = OtherProcess(tmp_path)
    assert other.has_it()
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with pytest.raises(IoError, match=f"process {other.id} on"):
        locked(tmp_path)
    other.kill()
    locked(tmp_path).release()
    assert os.listdir(tmp_path) == ["lock"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK])
def test_without_flock_saves_work_with_one_warning(tmp_path, monkeypatch, number):
    refuse_flock(monkeypatch, number)
    state = {"a": 0}
    with pytest.warns(RuntimeWarning, match="has no flock .* the next one waits 60 s") as warned:
        with AsyncCheckpointer(tmp_path) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, {"a": step}).result()
            assert checkpointer.restore(state) == 2 and state == {"a": 2}
        with AsyncCheckpointer(tmp_path) as checkpointer:  # the first one has released it
            checkpointer.save(3, state).result()
    assert len([one for one in warned if "flock" in str(one.message)]) == 1
    assert not (tmp_path / "lock-held").exists()
    assert eventually(lambda: all(thread.name != "gdsdata-heartbeat" for thread in threading.enumerate()))


def test_a_lock_without_a_thread_for_its_heartbeat_is_refused(tmp_path, no_flock, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    before = descriptors()
    with monkeypatch.context() as patched, pytest.raises(IoError, match="could not start a thread; raise the limit"):
        patched.setattr(threading.Thread, "start", refuse)
        locked(tmp_path)
    assert descriptors() == before and not (tmp_path / "lock-held").exists()
    locked(tmp_path).release()


def test_another_error_of_flock_names_the_file_and_what_to_do(tmp_path, monkeypatch):
    refuse_flock(monkeypatch, errno.EIO)
    with pytest.raises(IoError, match=f"could not lock '{tmp_path}/lock': .*; save into a folder on another"):
        locked(tmp_path)


@pytest.mark.parametrize(("folder", "said"), [("x" * 300, "make the folder"), ("a/b", "open")])
def test_a_folder_that_the_system_refuses_is_an_io_error_with_its_path(tmp_path, folder, said):
    (tmp_path / "a" / "b" / "lock").mkdir(parents=True)  # what a full or read-only disk does, too
    with AsyncCheckpointer(tmp_path / folder) as checkpointer:
        handle = checkpointer.save(1, {"a": torch.ones(3)})
        with pytest.raises(IoError, match=f"could not {said} '{tmp_path}/{folder}"):
            handle.result()


def test_a_full_disk_leaves_no_folder_locked(tmp_path, monkeypatch):
    def full(descriptor: int, content: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        locked(tmp_path).release()  # its holder's name is for messages only
    locked(tmp_path).release()


@pytest.mark.filterwarnings("ignore:gdsdata. the file system of .* has no flock")
def test_a_forked_child_leaves_its_parents_lock_alone(tmp_path, no_flock):
    folder = locked(tmp_path)
    if (child := os.fork()) == 0:
        folder.release()
        os._exit(0)
    os.waitpid(child, 0)
    folder.begin(1)
    folder.release()
    assert not (tmp_path / "lock-held").exists()


# ------------------------------------------------------------------------------------------------ many checkpoints


def files_opened_by_a_save(folder: Path, kept: int) -> tuple[int, int]:
    """Count the files opened and folders listed by a save beside so many checkpoints.

    `keep_every` keeps the checkpoints.
    """
    for step in range(kept):
        (folder / f"step-{step}").mkdir(parents=True)
        files = [{"name": "rank-0-00c0ffee.pt", "size_bytes": 1}]
        manifest = {"format": 1, "step": step, "sequence": step, "files": files}
        (folder / f"step-{step}" / "manifest.json").write_text(json.dumps(manifest))
    events = []
    sys.addaudithook(lambda event, _: events.append(event) if event in ("open", "os.listdir") else None)
    with AsyncCheckpointer(folder, keep_last=2, keep_every=1) as checkpointer:
        checkpointer.save(kept, {"a": 1}).result()
        events.clear()
        for step in range(kept + 1, kept + 4):
            checkpointer.save(step, {"a": 1}).result()
        counted = events.count("open"), events.count("os.listdir")
        assert len(checkpointer.steps()) == kept + 4
    return counted


def test_a_save_beside_many_checkpoints_reads_no_more_than_beside_few(tmp_path):
    few = in_new_process(files_opened_by_a_save, tmp_path / "few", 5)
    assert in_new_process(files_opened_by_a_save, tmp_path / "many", 500) == few


def test_a_checkpoint_that_somebody_removed_is_not_counted_as_kept(tmp_path):
    with AsyncCheckpointer(tmp_path, keep_last=2) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"a": step}).result()
        (tmp_path / "step-2" / "manifest.json").unlink()
        checkpointer.save(3, {"a": 3}).result()
        assert checkpointer.steps() == [1, 3]
        checkpointer.save(4, {"a": 4}).result()
        assert checkpointer.steps() == [3, 4]


def test_a_checkpoint_that_a_save_removed_meanwhile_is_not_called_broken(tmp_path, monkeypatch):
    with AsyncCheckpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(1, {"a": 1}).result()
        check = CheckpointFolder.check

        def checked_later(folder, manifest, file):
            if manifest.step == 1:
                checkpointer.save(2, {"a": 2}).result()
            return check(folder, manifest, file)

        monkeypatch.setattr(CheckpointFolder, "check", checked_later)
        reader = AsyncCheckpointer(tmp_path)
        with pytest.raises(FileNotFoundError, match="step 1 .* was removed or saved again meanwhile: restore again"):
            reader.restore({"a": 0})
        assert reader.restore({"a": 0}) == 2


@pytest.mark.parametrize("has_flock", [True, False])
@pytest.mark.filterwarnings("ignore:gdsdata. the file system of .* has no flock")
def test_a_folder_that_was_removed_between_saves_is_made_and_locked_again(tmp_path, has_flock, request):
    if not has_flock:
        request.getfixturevalue("no_flock")
    path = tmp_path / "run"
    with AsyncCheckpointer(path) as checkpointer:
        checkpointer.save(1, {"a": 1}).result()
        shutil.rmtree(path)
        checkpointer.save(2, {"a": 2}).result()
        assert checkpointer.steps() == [2]
        with pytest.raises(IoError, match="another AsyncCheckpointer of this process saves checkpoints"):
            locked(path)
    assert os.listdir(path / "step-2") and AsyncCheckpointer(path).restore({"a": 0}) == 2


@pytest.mark.parametrize(("owner", "method"), [(SaveJob, "write"), (LockedFolder, "commit")])
def test_a_folder_that_is_removed_in_the_middle_of_a_save_is_its_error(tmp_path, monkeypatch, owner, method):
    path = tmp_path / "run"
    called = getattr(owner, method)

    def removed_before(*arguments):
        shutil.rmtree(path)
        return called(*arguments)

    with AsyncCheckpointer(path) as checkpointer:
        checkpointer.save(1, {"a": 1}).result()
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, removed_before)
            with pytest.raises(IoError, match="step-2' was removed while it was saved: save again"):
                checkpointer.save(2, {"a": 2}).result()
        checkpointer.save(3, {"a": 3}).result()
        assert checkpointer.steps() == [3]


# ------------------------------------------------------------------------------------------- links to other runs


def save_steps(folder: Path, *steps: int, keep_last: int = 3) -> None:
    with AsyncCheckpointer(folder, keep_last=keep_last) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"step": step}).result()


@pytest.fixture
def linked(tmp_path) -> tuple[Path, Path]:
    """Return a run's folder with a step of another run behind a link, and that step's folder."""
    save_steps(tmp_path / "first", 30)
    first = tmp_path / "first" / "step-30"
    (first / "rank-0-00000000.pt").write_bytes(b"of a save that is in progress there")
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "step-30").symlink_to(Path("..", "first", "step-30"))
    return tmp_path / "second", first


def test_a_step_of_another_run_behind_a_link_is_restored_and_its_files_stay(linked):
    folder, first = linked
    before = sorted(os.listdir(first))
    with AsyncCheckpointer(folder) as checkpointer:
        state = {"step": 0}
        assert checkpointer.restore(state) == 30 and state["step"] == 30
    save_steps(folder, 31, keep_last=2)
    assert (folder / "step-30").is_symlink() and sorted(os.listdir(first)) == before
    save_steps(folder, 32, 33, keep_last=2)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-32", "step-33"]
    assert sorted(os.listdir(first)) == before


def test_a_link_to_an_incomplete_step_of_another_run_is_left_alone(linked):
    folder, first = linked
    (first / "manifest.json").unlink()
    before = sorted(os.listdir(first))
    save_steps(folder, 31, 32, keep_last=1)
    assert (folder / "step-30").is_symlink() and sorted(os.listdir(first)) == before


def test_a_step_behind_a_link_is_not_saved_over(linked):
    folder, first = linked
    before = sorted(os.listdir(first))
    with pytest.raises(IoError, match="step-30' is a link to '../first/step-30', .*Remove the link"):
        save_steps(folder, 30)
    assert sorted(os.listdir(first)) == before
    save_steps(folder, 31)


def test_a_step_whose_folder_was_renamed_is_an_error_that_says_so(tmp_path):
    save_steps(tmp_path, 30)
    (tmp_path / "step-30").rename(tmp_path / "step-41")
    with pytest.raises(CorruptData, match="it is of step 30.*rename its folder to 'step-30'"):
        AsyncCheckpointer(tmp_path).restore({"step": 0})

"""The live view: what a process exports, to whom, and what is shown of it."""

import gc
import os
import signal
import socket
import stat
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from helpers import eventually, exit_code_of_fork, in_new_process
from live_view import data_set_of, own, own_sockets, write_samples
from torch.utils.data import DataLoader

import gdsdata
from gdsdata import top
from gdsdata.observe import counted, live
from gdsdata.observe.live import client, folder, rates, sections

PAGE = Path(__file__).resolve().parent.parent / "docs" / "guide" / "top.md"


@pytest.fixture
def sockets(tmp_path, monkeypatch):
    yield from own_sockets(tmp_path, monkeypatch)


@pytest.fixture
def samples(tmp_path):
    return write_samples(tmp_path / "samples")


# ------------------------------------------------------------------------------------------------- the switch


def _used(path, runtime, switch):
    os.environ["XDG_RUNTIME_DIR"] = runtime
    os.environ.pop("GDSDATA_TOP", None)
    if switch is not None:
        os.environ["GDSDATA_TOP"] = switch
    dataset = gdsdata.GDSDataset(path, batch_size=8, device="cpu")
    batches = len(list(dataset))
    gdsdata.save({"a": torch.ones(3)}, f"{path}/../a.pt")
    imported = [name for name in sys.modules if name.startswith("gdsdata.observe.live")]
    answers = client.ask(os.getpid()) if switch == "1" else None
    names = [one.name for one in threading.enumerate() if one.name == "gdsdata-top"]
    del dataset  # not before: an object that is gone is not in a snapshot
    return batches, sorted(imported), names, sorted(os.listdir(runtime)), answers


@pytest.mark.parametrize("switch", [None, "0", ""])
def test_without_the_switch_there_is_no_thread_no_socket_and_no_import(samples, tmp_path, switch):
    (tmp_path / "run").mkdir()
    assert in_new_process(_used_without_this_module, str(samples), str(tmp_path / "run"), switch) == (5, [], [], [])


def _used_without_this_module(path, runtime, switch):
    """The same, and this file's own imports do not count."""
    for name in [one for one in sys.modules if one.startswith("gdsdata.observe.live")]:
        del sys.modules[name]
    return _used(path, runtime, switch)[:4]


def test_the_switch_exports_from_the_first_engine_on(samples, tmp_path):
    (tmp_path / "run").mkdir()
    _, _, threads, made, answers = in_new_process(_used, str(samples), str(tmp_path / "run"), "1")
    assert (threads, made, answers[1]) == (["gdsdata-top"], ["gdsdata"], [])
    (snapshot,) = answers[0]
    assert data_set_of(snapshot, samples)["batches"] == 5


def test_starting_and_stopping_twice_does_no_more_than_once(sockets):
    assert live.start() and live.start()
    assert len(os.listdir(sockets)) == 1
    assert own()["pid"] == os.getpid()
    live.stop()
    live.stop()
    assert os.listdir(sockets) == []
    assert "gdsdata-top" not in [one.name for one in threading.enumerate()]
    assert client.ask() == ([], [])


# ------------------------------------------------------------------------------------------------- the snapshot


def test_a_snapshot_has_each_data_set_with_its_own_counts(sockets, samples, tmp_path):
    live.start()
    other = write_samples(tmp_path / "other", 12)
    first, second = (gdsdata.GDSDataset(path, batch_size=4, device="cpu") for path in (samples, other))
    list(first)
    batches = iter(second)
    next(batches)
    snapshot = own()
    assert data_set_of(snapshot, samples)["batches"] == 10
    at = data_set_of(snapshot, other)
    assert (at["batches"], at["epoch_batch"], at["epoch_batches"], at["files"]) == (1, 1, 3, 12)
    assert at["ring"]["slots"] == second.prefetch
    assert at["ring"]["ready"] + at["ring"]["filling"] == 2  # the rest of the epoch
    assert eventually(lambda: data_set_of(own(), other)["ring"]["ready"] == 2)
    assert at["bytes"] == second.stats()["bytes"]
    assert sum(one["bytes"]["page_cache"] for one in snapshot["engines"]) > 0
    batches.close()
    assert data_set_of(own(), other)["batches"] == 1
    del first, second, batches
    gc.collect()
    assert not any(one["source"].startswith(str(tmp_path)) for one in own()["data_sets"])


def test_a_snapshot_counts_saves_in_the_background(sockets, tmp_path):
    live.start()
    with gdsdata.AsyncCheckpointer(tmp_path / "run1") as checkpointer:
        checkpointer.save(7, {"a": torch.ones(1000), "b": torch.ones(50)}).result(60)
        (at,) = (one for one in own()["saves"] if one["folder"] == str(tmp_path / "run1"))
        assert (at["step"], at["begun"], at["complete"], at["failed"]) == (7, 1, 1, 0)
        assert at["begun_bytes"] == at["staged_bytes"] == at["written_bytes"] == 4200
        assert at["stall_s"] > 0
        (tmp_path / "run1" / "step-8").write_text("no folder")
        with pytest.raises(OSError):
            checkpointer.save(8, {"a": torch.ones(1000)}).result(60)
        assert eventually(lambda: [one["failed"] for one in own()["saves"] if one["id"] == at["id"]] == [1])


def test_requests_to_stores_are_counted_with_their_retries():
    requests = counted.Requests()
    requests.count(1, 10, 20)
    requests.count(3, 5, 0)
    assert requests.snapshot() == {"requests": 2, "retries": 2, "sent_bytes": 15, "received_bytes": 20}


def test_a_data_sets_name_has_no_secret(sockets, samples):
    live.start()
    dataset = gdsdata.GDSDataset(samples, batch_size=4, device="cpu")
    dataset._samples.paths = ["https://user:password@host/a.npy?X-Amz-Signature=secret"]
    assert [one["source"] for one in own()["data_sets"]].count("https://host/a.npy") == 1


def test_each_field_of_a_snapshot_is_documented(sockets, samples, tmp_path):
    live.start()
    dataset = gdsdata.GDSDataset(samples, batch_size=4, device="cpu")
    list(dataset)
    checkpointer = gdsdata.AsyncCheckpointer(tmp_path / "run1")
    snapshot, text = own(), PAGE.read_text()
    checkpointer.close()
    parts = [snapshot, *snapshot["data_sets"][:1], *snapshot["engines"][:1], *snapshot["saves"][:1]]
    parts += [snapshot["network"], snapshot["stores"], snapshot["data_sets"][0]["ring"]]
    lacking = {name for part in parts for name in part if f"`{name}`" not in text}
    assert lacking == set()


def test_a_number_that_cannot_be_read_does_not_end_the_export(sockets, samples):
    live.start()
    dataset = gdsdata.GDSDataset(samples, batch_size=4, device="cpu")
    paths, dataset._samples.paths = dataset._samples.paths, []
    snapshots, silent = client.ask(os.getpid())
    assert snapshots == [] and "could not be read: IndexError" in silent[0].reason
    dataset._samples.paths = paths
    assert data_set_of(own(), samples)["files"] == 40


# ------------------------------------------------------------------------------------------------- who may read it


def test_only_this_user_may_enter_the_folder(sockets):
    live.start()
    (name,) = os.listdir(sockets)
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    assert stat.S_ISSOCK((sockets / name).stat().st_mode)
    assert folder.process_of(name) == os.getpid()


def make_open_folder(path):
    path.mkdir()
    path.chmod(0o750)


def make_link(path):
    path.symlink_to(path.parent)


def make_folder_of_another_user(path):
    if os.geteuid():
        pytest.skip("only root can make a folder of another user")
    path.mkdir(mode=0o700)
    os.chown(path, 1, 1)


@pytest.mark.parametrize("make", [make_open_folder, make_link, make_folder_of_another_user, Path.touch])
def test_a_folder_that_others_may_have_made_is_refused(sockets, make):
    make(sockets)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert not live.start()
    assert len(warned) <= 1  # each message once
    with pytest.raises(PermissionError, match="gdsdata"):
        client.ask()


def test_the_folder_is_that_of_the_session_or_one_below_tmp(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    own_folder = f"/tmp/gdsdata-{os.geteuid()}"
    assert folder.places() == [f"{tmp_path}/gdsdata", own_folder]
    for value in ("", "relative", str(tmp_path / "none")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        assert folder.places() == [own_folder]


# ------------------------------------------------------------------------------------------------- other processes


def listening(path, name):
    listener = socket.socket(socket.AF_UNIX)
    with folder.opened(str(path), make=True) as descriptor:
        listener.bind(folder.address(descriptor, name))
    listener.listen()
    return listener


def test_a_socket_that_a_killed_process_left_is_removed(sockets):
    listening(sockets, "12345-00000000.sock").close()
    (sockets / "notes").touch()
    assert client.ask() == ([], [])
    assert os.listdir(sockets) == ["notes"]


def test_a_process_that_does_not_answer_is_named(sockets):
    with listening(sockets, "12345-00000000.sock"):
        snapshots, silent = client.ask(timeout_s=0.05)
        assert (snapshots, [one.pid for one in silent]) == ([], [12345])
        assert "does not answer within 0.05 s" in silent[0].reason
        assert client.ask(99) == ([], [])  # another process is asked
    assert "does not answer" in sections.plain(rates.view_of(client.Answers([], silent), {}))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b'{"version": 2, "gdsdata": "9.0"}', "gdsdata 9.0, whose snapshots have version 2"),
        (b'{"vers', "was cut"),
        (b"", "was cut"),
    ],
)
def test_an_answer_that_is_not_understood_is_named(sockets, answer, reason):
    with listening(sockets, "12345-00000000.sock") as listener:

        def reply():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)

        replying = threading.Thread(target=reply)
        replying.start()
        snapshots, silent = client.ask()
        replying.join()
    assert snapshots == []
    assert reason in silent[0].reason


def test_a_forked_child_exports_its_own_counts_or_nothing(sockets, samples):
    dataset = gdsdata.GDSDataset(samples, batch_size=4, device="cpu")
    live.start()
    list(dataset)

    def child():
        assert client.ask(os.getpid()) == ([], [])
        assert "gdsdata-top" not in [one.name for one in threading.enumerate()]
        assert live.start()
        assert own()["data_sets"] == []
        next(iter(dataset))
        assert data_set_of(own(), samples)["batches"] == 1
        assert len(client.ask().snapshots) == 2  # the parent's is there too

    assert exit_code_of_fork(child, timeout_s=30) == 0
    assert len(os.listdir(sockets)) == 2  # `os._exit` leaves the socket
    assert [one["pid"] for one in client.ask().snapshots] == [os.getpid()]
    assert len(os.listdir(sockets)) == 1
    assert data_set_of(own(), samples)["batches"] == 10


def test_a_child_does_not_keep_its_killed_parents_socket_open(sockets):
    read, write = os.pipe()
    parent = os.fork()
    if not parent:
        live.start()
        child = os.fork()
        if not child:
            signal.pause()
        os.write(write, str(child).encode())
        signal.pause()
    child = int(os.read(read, 20))
    try:
        assert [one["pid"] for one in client.ask().snapshots] == [parent]
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert client.ask() == ([], [])
        assert os.listdir(sockets) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(read)
        os.close(write)


def _seen_with_a_loader(path, runtime, method):
    os.environ |= {"XDG_RUNTIME_DIR": runtime, "GDSDATA_TOP": "1"}
    dataset = gdsdata.GDSDataset(path, batch_size=1, device="cpu", on_break="restart")
    next(iter(dataset))
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method)
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    answers = client.ask()
    left = sum(1 for _ in batches)
    counts = {one["loader_worker"]: data_set_of(one, path)["batches"] for one in answers.snapshots}
    return answers.silent, counts, left


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_loader_export_their_own_counts(samples, tmp_path, method):
    (tmp_path / "run").mkdir()
    silent, counts, left = in_new_process(_seen_with_a_loader, str(samples), str(tmp_path / "run"), method)
    assert (silent, left, set(counts)) == ([], 34, {None, 0, 1})
    assert counts[None] == 1 and all(3 <= counts[worker] <= 20 for worker in (0, 1))


def test_a_fork_while_the_export_changes_leaves_no_lock_behind(sockets):
    from gdsdata.observe.live import exporter

    with exporter._changing:
        assert exit_code_of_fork(live.start) == 0


@pytest.mark.parametrize("option", ["--once", "--json"])
def test_one_view_that_is_interrupted_is_no_success(sockets, monkeypatch, option):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(rates.Sampler, "_newest", interrupt)
    assert top.main([option]) == 130

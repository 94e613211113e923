"""`AsyncCheckpointer(upload=)`: checkpoints that go on to a store, behind everything else."""

import functools
import json
import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from folder_store import FolderStore, install, refuse
from helpers import REPOSITORY, eventually, start_script
from hypothesis import given
from hypothesis import strategies as st
from servers.faults import FaultServer
from test_checkpoint import assert_same
from test_dcp import on_ranks

from gdsdata import AsyncCheckpointer
from gdsdata.checkpoint import open_object
from gdsdata.checkpoint.background import sending, uploads
from gdsdata.checkpoint.background.checkpoints import in_order
from gdsdata.checkpoint.background.manifest import Kept, Manifest, SavedFile
from gdsdata.checkpoint.background.remote_folder import RemoteFolder
from gdsdata.checkpoint.background.sending import Pace, Stopped
from gdsdata.errors import CorruptData, IoError, SaveAborted
from gdsdata.io import engine
from gdsdata.storage import stores
from gdsdata.storage.stores.xml_store import XmlUpload

pytestmark = pytest.mark.usefixtures("quick_programs")
URL = "s3://bucket/run"


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_stores", {})
    monkeypatch.setattr(open_object, "OpenObject", open_object.OpenObject)
    monkeypatch.setattr(engine, "_warned", set())
    monkeypatch.setattr(sending, "_PUT_BYTES", 10_000)
    monkeypatch.setattr(uploads, "_FIRST_PAUSE_S", 0.001)
    return install(FolderStore(tmp_path / "bucket", part_bytes=20_000))


def state_of(step):
    return {"a": torch.full((20_000,), float(step)), "step": step}


def upload_of(tmp_path, name="run", **options):
    return AsyncCheckpointer(tmp_path / name, upload=URL, **{"keep_last": 2} | options)


def save(checkpointer, *steps):
    """Save steps, and return their handles when they are on storage."""
    handles = [checkpointer.save(step, state_of(step)) for step in steps]
    for handle in handles:
        handle.result(20)
    return handles


def uploaded(store):
    """Return the steps of the manifests in the store."""
    return sorted(
        int(key.split("/")[1].removeprefix("step-")) for key in store.names() if key.endswith("manifest.json")
    )


def assert_consistent(store):
    """Assert that each manifest in the store names files that are there, with their sizes."""
    there = store.names()
    for key in there:
        if key.endswith("manifest.json"):
            for file in json.loads(Path(store.path(key)).read_bytes())["files"]:
                name = key.replace("manifest.json", file["name"])
                assert name in there and os.path.getsize(store.path(name)) == file["size_bytes"]


# ------------------------------------------------------------------------------------------------ straight on


def test_a_checkpoint_is_uploaded_with_its_manifest_last(store, tmp_path):
    with upload_of(tmp_path) as checkpointer:
        (handle,) = save(checkpointer, 5)
        assert handle.upload_result(20) == f"{URL}/step-5" and handle.upload_done()
        assert checkpointer.upload_status.newest_step == 5 and checkpointer.upload_status.error is None
    (file,) = (tmp_path / "run/step-5").glob("rank-0-*.pt")
    assert store.names() == ["run/step-5/manifest.json", f"run/step-5/{file.name}"]
    assert Path(store.path(f"run/step-5/{file.name}")).read_bytes() == file.read_bytes()
    assert [key for method, key in store.calls if method in ("put", "complete")][-1] == "run/step-5/manifest.json"
    assert store.most_at_a_time <= sending.PARTS_AT_A_TIME


def test_closing_waits_for_uploads_and_the_store_keeps_the_newest(store, tmp_path):
    with upload_of(tmp_path, upload_keep_last=3, keep_last=9, keep_every=4) as checkpointer:
        save(checkpointer, *range(10))
    assert uploaded(store) == [0, 4, 7, 8, 9]
    assert len(store.names()) == 10


def test_without_an_upload_a_handle_says_so(tmp_path):
    with AsyncCheckpointer(tmp_path) as checkpointer:
        (handle,) = save(checkpointer, 1)
        assert handle.upload_done() and checkpointer.upload_status is None
        with pytest.raises(ValueError, match="construct AsyncCheckpointer with upload="):
            handle.upload_result()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"upload": "/a/folder"}, ValueError, "upload='/a/folder' is no URL of a store"),
        ({"upload": 3}, ValueError, "upload=3 is no URL"),
        (
            {"upload": "https://host/run"},
            ValueError,
            "upload='https://host/run' is of a web server, which is only read",
        ),
        ({"upload_keep_last": 0}, ValueError, "upload_keep_last=0 must be 1 or more"),
        ({"upload_gb_per_s": 0}, ValueError, "upload_gb_per_s=0 must be more than 0"),
        ({"upload_gb_per_s": "1"}, TypeError, "give a number of GB/s"),
    ],
)
def test_wrong_arguments_are_explained(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        AsyncCheckpointer(tmp_path, **{"upload": URL} | options)
    with pytest.raises(ValueError, match="give a local folder, and upload='s3://bucket/run'"):
        AsyncCheckpointer(URL)


def test_bytes_are_spread_over_time():
    pace = Pace(10e6)
    begun = time.monotonic()
    for _ in range(5):
        pace.wait(500_000)
    assert 0.2 <= time.monotonic() - begun < 2  # the first 500 kB go at once
    pace.stop()
    with pytest.raises(Stopped):
        pace.wait(1)


# ------------------------------------------------------------------------------------------------ stores that fail


def test_a_slow_store_delays_no_save_and_fills_no_disk(store, tmp_path):
    may_go_on, sending_now = threading.Event(), threading.Event()

    def fail(method, key):
        if method == "send":
            sending_now.set()
            assert may_go_on.wait(20)

    store.fail = fail
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with upload_of(tmp_path) as checkpointer:
            handles = save(checkpointer, 1)
            assert sending_now.wait(20)
            for step in range(2, 9):
                handles += save(checkpointer, step)
                assert len(list((tmp_path / "run").glob("step-*"))) <= 3
            assert checkpointer.upload_status.step == 1 and checkpointer.upload_status.waiting == (7, 8)
            may_go_on.set()
    skipped = [handle.step for handle in handles if handle._uploaded.exception() is not None]
    assert skipped == [2, 3, 4, 5, 6] and uploaded(store) == [1, 7, 8]
    with pytest.raises(SaveAborted, match="the upload of step 3 was skipped"):
        handles[2].upload_result()
    assert [str(one.message) for one in warned if "step 3 was skipped" in str(one.message)] != []
    assert_consistent(store)


@pytest.mark.parametrize("method", ["head", "upload", "send", "complete", "put", "list"])
def test_an_upload_that_fails_is_tried_again(store, tmp_path, method):
    failures = [IoError(5, "503")] * 2

    def fail(called, key):
        if called == method and failures:
            raise failures.pop()

    with upload_of(tmp_path) as checkpointer:
        (handle,) = save(checkpointer, 1)
        handle.upload_result(20)
        store.fail = fail
        (second,) = save(checkpointer, 2)
        assert second.upload_result(20) == f"{URL}/step-2"
    assert uploaded(store) == [1, 2] and store.unfinished() == []


def test_a_step_that_is_saved_again_before_its_upload_is_skipped_and_uploaded_once(store, tmp_path):
    may_go_on = threading.Event()
    store.fail = lambda method, key: method != "head" or may_go_on.wait(20)
    with warnings.catch_warnings(), upload_of(tmp_path) as checkpointer:
        warnings.simplefilter("ignore")
        (handle,) = save(checkpointer, 1)
        assert eventually(lambda: any(method == "head" for method, _ in store.calls))
        (again,) = save(checkpointer, 1)
        may_go_on.set()
        with pytest.raises(SaveAborted, match="the upload of step 1 was skipped"):
            handle.upload_result(20)
        assert again.upload_result(20) == f"{URL}/step-1"
        assert "No such file" not in checkpointer.upload_status.error
    assert_consistent(store)


def test_an_upload_that_the_bucket_has_deleted_is_begun_again(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_stores", {})
    monkeypatch.setattr(sending, "_PUT_BYTES", 10_000)
    monkeypatch.setattr(uploads, "_FIRST_PAUSE_S", 0.001)
    with FaultServer() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        complete, rules = XmlUpload.complete, [server.content_.uploads.clear]
        monkeypatch.setattr(XmlUpload, "complete", lambda self: (rules and rules.pop()(), complete(self))[1])
        with upload_of(tmp_path) as checkpointer:
            (handle,) = save(checkpointer, 1)
            assert handle.upload_result(20) == f"{URL}/step-1"
        assert len(server.names("run/step-1/")) == 2


def test_a_store_that_refuses_fails_no_save_and_is_reported_once(store, tmp_path):
    store.fail = refuse("upload", "put", error=PermissionError("s3://bucket/run: 403"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with upload_of(tmp_path) as checkpointer:
            (handle,) = save(checkpointer, 1)
            with pytest.raises(PermissionError, match="403"):
                handle.upload_result(20)
            assert "403" in checkpointer.upload_status.error
        assert checkpointer.steps() == [1]
    assert len([one for one in warned if "step 1 could not be uploaded" in str(one.message)]) == 1
    assert [method for method, _ in store.calls].count("upload") == 1, "another attempt would fail too"


def test_a_store_that_cannot_be_listed_at_first_gets_the_saves_all_the_same(store, tmp_path):
    store.fail = refuse("list")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with upload_of(tmp_path) as checkpointer:
            save(checkpointer, 1)
            assert eventually(lambda: checkpointer.upload_status.error is not None)
            store.fail = lambda method, key: None
            save(checkpointer, 2)
    assert 2 in uploaded(store)


def test_a_program_that_fails_does_not_wait_for_uploads(store, tmp_path):
    may_go_on = threading.Event()
    store.fail = lambda method, key: method != "send" or may_go_on.wait(20)
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError), upload_of(tmp_path) as checkpointer:
        (handle,) = save(checkpointer, 1)
        _ = 1 / 0
    assert time.monotonic() - begun < 10
    with pytest.raises(Stopped, match="the next one uploads it"):
        handle.upload_result(20)
    may_go_on.set()
    assert eventually(lambda: store.unfinished() == [])
    assert uploaded(store) == []


# ------------------------------------------------------------------------------------------------ the next process


def test_the_next_process_uploads_what_is_left_before_its_first_save(store, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.fail = refuse("put", error=PermissionError("403"))  # the manifest's
        with upload_of(tmp_path) as checkpointer:
            save(checkpointer, 1, 2)
    assert uploaded(store) == []
    store.fail = lambda method, key: None
    store.calls.clear()
    with upload_of(tmp_path) as checkpointer:
        assert checkpointer.restore(state := state_of(0)) == 2 and state["step"] == 2
        assert eventually(lambda: uploaded(store) == [1, 2], 20)
    assert ("send", "run/step-2") not in store.calls, "its file was there already"
    with upload_of(tmp_path) as checkpointer:
        save(checkpointer, 3)
    assert uploaded(store) == [1, 2, 3]


KILLED = """
import sys, warnings, torch
sys.path.insert(0, sys.argv[1])
from folder_store import FolderStore, install
from gdsdata import AsyncCheckpointer
from gdsdata.checkpoint.background import sending
import time
sending._PUT_BYTES = 10_000
store = install(FolderStore(sys.argv[2] + "/bucket", part_bytes=20_000))
store.fail = lambda method, key: time.sleep(0.002)
warnings.simplefilter("ignore")
with AsyncCheckpointer(sys.argv[2] + "/run", upload="s3://bucket/run", keep_last=2, upload_keep_last=3) as checkpointer:
    state = {"a": torch.zeros(20_000), "step": 0}
    begin = checkpointer.restore(state) or 0
    print("step", begin, flush=True)
    for step in range(begin + 1, 10_000):
        state["a"].fill_(step)
        state["step"] = step
        checkpointer.save(step, state).result()
"""


def test_killed_uploads_are_resumed_and_half_objects_never_seen(store, tmp_path):
    draw = random.Random(1)
    tests = str(REPOSITORY / "tests")
    manifests = functools.partial((tmp_path / "run").glob, "step-*/manifest.json")
    for left in reversed(range(6)):
        process = start_script(KILLED, tests, tmp_path)
        try:
            assert process.stdout.readline().startswith("step"), process.stderr.read()
            until = time.monotonic() + draw.uniform(0.0, 0.25)
            while time.monotonic() < until or not (left or any(manifests())):  # a busy machine may have none yet
                assert_consistent_while_it_changes(store)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close(), process.stderr.close()
        assert_consistent(store)
        assert len(list(manifests())) <= 4
    newest_step = max(int(path.parent.name[5:]) for path in manifests())
    with upload_of(tmp_path, upload_keep_last=3) as checkpointer:
        state = state_of(0)
        assert checkpointer.restore(state) == newest_step
        assert_same(state, state_of(newest_step))
    assert eventually(lambda: newest_step in uploaded(store))
    assert_consistent(store)
    assert 0 < len(uploaded(store)) <= 3
    with upload_of(tmp_path, "new node") as checkpointer:
        state = state_of(0)
        assert checkpointer.restore(state) == newest_step
        assert_same(state, state_of(newest_step))


def assert_consistent_while_it_changes(store):
    """Assert that a manifest that stays has its files."""
    before = set(uploaded(store))
    try:
        assert_consistent(store)
    except (AssertionError, FileNotFoundError):
        gone = before - set(uploaded(store))
        assert gone, "a manifest is there, and one of its files is missing"


# ------------------------------------------------------------------------------------------------ restoring from both


def test_a_new_node_restores_from_the_store_and_goes_on_behind_it(store, tmp_path):
    with upload_of(tmp_path) as checkpointer:
        save(checkpointer, 1, 2, 3)
    with upload_of(tmp_path, "new") as checkpointer:
        state = state_of(0)
        assert checkpointer.steps() == [1, 2, 3]
        assert checkpointer.restore(state) == 3
        assert_same(state, state_of(3))
        assert checkpointer.restore(state, step=1) == 1
        assert_same(state, state_of(1))
        save(checkpointer, 4)
        with pytest.raises(
            FileNotFoundError, match=r"'.*new' or 's3://bucket/run' has no complete.*step 9.*1, 2, 3, 4"
        ):
            checkpointer.restore(state, step=9)
    with upload_of(tmp_path, "newer") as checkpointer:
        assert checkpointer.restore(state_of(0)) == 4
    with upload_of(tmp_path) as checkpointer:  # the old node is back, and its disk has step 3
        assert checkpointer.restore(state_of(0)) == 4
        save(checkpointer, 5)
    assert uploaded(store) == [1, 2, 3, 4, 5]


def test_a_local_checkpoint_that_is_newer_is_restored(store, tmp_path):
    with upload_of(tmp_path) as checkpointer:
        save(checkpointer, 1)
    with AsyncCheckpointer(tmp_path / "run") as checkpointer:
        save(checkpointer, 2)
    store.calls.clear()
    with upload_of(tmp_path) as checkpointer:
        assert checkpointer.restore(state_of(0)) == 2
    assert uploaded(store) == [1, 2]


def test_a_run_that_begins_anew_in_an_old_url_is_the_newest_one(store, tmp_path):
    with upload_of(tmp_path) as checkpointer:
        save(checkpointer, 1, 2, 3)
    with upload_of(tmp_path, "anew") as checkpointer:
        save(checkpointer, 1)  # nobody has restored
    with upload_of(tmp_path, "empty") as checkpointer:
        assert checkpointer.restore(state_of(0)) == 1


def test_a_store_that_cannot_be_listed_is_an_error_of_restore(store, tmp_path):
    with upload_of(tmp_path) as checkpointer:
        save(checkpointer, 1)
        store.fail = refuse("list")
        with pytest.raises(IoError, match="503"):
            checkpointer.restore(state_of(0))
        store.fail = lambda method, key: None


def test_a_checkpoint_without_its_files_or_manifest_is_not_restored(store, tmp_path):
    with upload_of(tmp_path, keep_last=3) as checkpointer:
        save(checkpointer, 1, 2, 3)
    (file,) = [key for key in store.names() if key.startswith("run/step-3/rank")]
    os.truncate(store.path(file), 1000)
    os.unlink(store.path("run/step-2/manifest.json"))
    with upload_of(tmp_path, "new") as checkpointer:
        assert checkpointer.steps() == [1]
        assert checkpointer.restore(state_of(0)) == 1
        save(checkpointer, 7)
    assert uploaded(store) == [1, 7]
    assert not any(key.startswith(("run/step-2/", "run/step-3/")) for key in store.names())


def test_a_damaged_manifest_is_named(store, tmp_path):
    store.put("run/step-1/manifest.json", b"{}")
    with (
        upload_of(tmp_path) as checkpointer,
        pytest.raises(CorruptData, match="'s3://bucket/run/step-1/manifest.json'"),
    ):
        checkpointer.restore(state_of(0))


def manifest(step, sequence):
    return Manifest(step, sequence, (SavedFile(f"rank-0-{step:08x}.pt", 1),))


@given(st.lists(st.sampled_from(["save", "upload", "lose the disk", "move"]), max_size=12))
def test_the_newest_of_both_is_what_was_saved_last_of_what_is_left(events):
    local, remote, highest, saved = [], [], -1, 0
    for event in events:
        if event == "save":
            saved += 1
            sequence = max((one.sequence for one in local), default=-1)
            local.append(manifest(saved, max(sequence, highest) + 1))
        elif event == "upload" and local:
            highest = max(highest + 1, local[-1].sequence)
            if local[-1].files not in [one.files for one in remote]:
                remote.append(Manifest(local[-1].step, highest, local[-1].files))
        elif event == "lose the disk":
            local = []
        elif event == "move":  # a node that has not asked the store
            local, highest = [], -1
            if remote:
                highest = remote[-1].sequence
    found = in_order(local, remote)
    left = {one.step for one in [*local, *remote]}
    assert [one.manifest.step for one in found] == sorted(left)
    assert all(one.is_local == any(one.manifest is its for its in local) for one in found)


# ------------------------------------------------------------------------------------------------ retention


@pytest.mark.parametrize("at", range(12))
def test_retention_that_is_cut_at_any_call_leaves_only_complete_checkpoints(store, tmp_path, at):
    with upload_of(tmp_path, upload_keep_last=9, keep_last=9) as checkpointer:
        save(checkpointer, 1, 2, 3, 4)
    store.put("run/step-9/rank-0-00000000.pt", b"of an upload that was not completed")
    store.put("run/step-9/notes.txt", b"a user's own")
    left = [at]

    def fail(method, key):
        if method == "delete":
            left[0] -= 1
            if left[0] < 0:
                raise IoError(5, "the process ends here")

    store.fail = fail
    folder = RemoteFolder(URL)
    cut = False
    try:
        folder.retain(Kept(2), [])
    except IoError:
        cut = True
    assert cut == (at < 5)
    assert_consistent(store)
    store.fail = lambda method, key: None
    RemoteFolder(URL).retain(Kept(2), [])
    assert uploaded(store) == [3, 4] and len(store.names()) == 5


def test_files_of_checkpoints_that_are_coming_stay(store):
    coming = manifest(3, 0)
    store.put("run/step-3/rank-0-00000003.pt", b"1")
    store.put("run/step-2/rank-0-00000002.pt", b"1")
    RemoteFolder(URL).retain(Kept(1), [coming])
    assert store.names() == ["run/step-3/rank-0-00000003.pt"]


# ------------------------------------------------------------------------------------------------ several ranks


def _install_on(rank, folder):
    sending._PUT_BYTES, uploads._FIRST_PAUSE_S = 10_000, 0.001
    return install(FolderStore(folder / "bucket", part_bytes=20_000))


def _upload_on_ranks(rank, folder):
    store = _install_on(rank, folder)
    with AsyncCheckpointer(folder / "run", upload=URL, keep_last=1, upload_keep_last=2) as checkpointer:
        handles = [checkpointer.save(step, {"mine": torch.full((20_000,), 10.0 * step + rank)}) for step in (1, 2)]
        for handle in handles:
            handle.result()
    outcomes = [type(handle._uploaded.exception()).__name__ for handle in handles]
    with AsyncCheckpointer(folder / "empty", upload=URL) as checkpointer:
        state = {"mine": torch.zeros(20_000)}
        assert checkpointer.restore(state) == 2 and state["mine"].eq(20 + rank).all()
    return outcomes, sorted({key for method, key in store.calls if method in ("complete", "put")})


def test_each_rank_uploads_its_file_and_the_first_one_the_manifest(tmp_path):
    (first, of_first), (second, of_second) = on_ranks(2, _upload_on_ranks, tmp_path)
    assert first == second and first[1] == "NoneType" and first[0] in ("NoneType", "SaveAborted")
    assert "run/step-2/manifest.json" in of_first and all("rank-0" in key or "manifest" in key for key in of_first)
    assert of_second and all("rank-1" in key for key in of_second)
    assert_consistent(FolderStore(tmp_path / "bucket"))


def _fail_on_rank_1(rank, folder):
    store = _install_on(rank, folder)
    if rank == 1:
        store.fail = refuse("upload", error=PermissionError("403"))
    warnings.simplefilter("ignore")
    with AsyncCheckpointer(folder / "run", upload=URL) as checkpointer:
        handle = checkpointer.save(1, {"mine": torch.zeros(20_000)})
        handle.result()
        failed = type(handle._uploaded.exception(20)).__name__
        store.fail = lambda method, key: None
        handle = checkpointer.save(2, {"mine": torch.zeros(20_000)})
        return failed, handle.upload_result(20)


def test_an_upload_that_fails_on_one_rank_is_known_to_all_and_the_next_one_succeeds(tmp_path):
    results = on_ranks(2, _fail_on_rank_1, tmp_path)
    assert results == [("SaveAborted", f"{URL}/step-2"), ("PermissionError", f"{URL}/step-2")]
    assert uploaded(FolderStore(tmp_path / "bucket")) == [2]


def _end_without_close(rank, folder):
    _install_on(rank, folder)
    warnings.simplefilter("ignore")
    checkpointer = AsyncCheckpointer(folder / "run", upload=URL)
    handle = checkpointer.save(1, {"mine": torch.zeros(20_000)})
    return handle.upload_result(20)  # the upload thread of rank 1 waits for the next checkpoint, in a collective call


def test_ranks_end_also_if_nobody_closes(tmp_path):
    assert on_ranks(2, _end_without_close, tmp_path) == [f"{URL}/step-1"] * 2


LEFT_OPEN = """
import os, sys, time, torch
import torch.distributed as dist
folder, rank = sys.argv[2], int(sys.argv[3])
sys.path.insert(0, sys.argv[1])
from folder_store import FolderStore, install
from gdsdata import AsyncCheckpointer
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", store=dist.FileStore(folder + "/ranks", 2), rank=rank, world_size=2)
install(FolderStore(folder + "/bucket"))

class Last:  # is deleted when modules are torn down
    def __del__(self, os=os, sleep=time.sleep, path=folder + "/ending"):
        os.close(os.open(path, os.O_CREAT))
        sleep(1)

checkpointer = AsyncCheckpointer(folder + "/run", upload="s3://bucket/run")
checkpointer.save(1, {"mine": torch.zeros(1000)}).upload_result(30)
if rank == 1:
    last = Last()
else:
    until = time.monotonic() + 20
    while not os.path.exists(folder + "/ending") and time.monotonic() < until:
        time.sleep(0.01)
    os._exit(0)
"""


@pytest.mark.whole_end
def test_a_rank_that_ends_without_close_does_not_abort_when_another_one_is_gone(tmp_path):
    tests = str(REPOSITORY / "tests")
    processes = [start_script(LEFT_OPEN, tests, tmp_path, rank) for rank in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0], processes[1].stderr.read()
    assert processes[1].stderr.read() == ""


def _die_on_rank_1(rank, folder):
    store = _install_on(rank, folder)
    warnings.simplefilter("ignore")
    checkpointer = AsyncCheckpointer(folder / "run", upload=URL)
    if rank == 1:
        store.fail = lambda method, key: os._exit(0) if method == "send" else None
    handle = checkpointer.save(1, {"mine": torch.zeros(20_000)})
    handle.result()
    error = handle._uploaded.exception(30)
    checkpointer._uploads.close(waits=True)
    return type(error).__name__


def test_a_rank_that_dies_ends_the_uploads_of_the_others(tmp_path):
    with pytest.raises(BaseException, match="ended its process with exit code 0"):
        on_ranks(2, _die_on_rank_1, tmp_path)
    assert uploaded(FolderStore(tmp_path / "bucket")) == []

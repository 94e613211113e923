"""Checkpoints in a real object store: what is saved there is loaded, by the engine's own ranges."""

import io
import json
import os
import re
import signal
import time
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import REPOSITORY, eventually, start_script
from test_checkpoint import assert_same, awkward, trained, zeroed
from test_store_servers import store_of
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

import gdsdata
from gdsdata import AsyncCheckpointer
from gdsdata.errors import CorruptData
from gdsdata.storage import stores

pytestmark = [
    pytest.mark.usefixtures("quick_programs"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture
def server(seaweedfs, monkeypatch):
    """Give the store of a real server, with nothing in it."""
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stores, "_stores", {})
    before = set(seaweedfs.uploads())  # of other tests
    yield seaweedfs
    for name in seaweedfs.names():
        seaweedfs.delete(name)
    assert set(seaweedfs.uploads()) <= before


@pytest.fixture(params=["rclone", "azurite"])
def other_server(request, monkeypatch):
    """Give a server of another make, with nothing in it."""
    server = request.getfixturevalue(request.param)
    monkeypatch.setattr(stores, "_stores", {(server.scheme, server.bucket): store_of(server)})
    yield server
    for name in server.names():
        server.delete(name)


def large_state():
    """Return 40 MiB of tensors, in which parts begin and end anywhere."""
    state = {f"layers.{i}.weight": torch.randn(1000 + 77 * i, 1000) for i in range(9)}
    state |= {f"layers.{i}.bias": torch.randn(7 * i) for i in range(50)}
    return dict(sorted(state.items()))  # as they come from a safetensors file


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_saved_object_is_the_file_and_is_loaded(server, tmp_path, ending):
    state, url = large_state(), server.url(f"run/a.{ending}")
    gdsdata.save(state, tmp_path / f"a.{ending}")
    gdsdata.save(state, url)
    assert server.get(f"run/a.{ending}") == (tmp_path / f"a.{ending}").read_bytes()
    assert_same(gdsdata.load(url, verify=True), state)
    names = {name: state[name] for name in state if name.startswith("layers.3.")}
    assert_same(gdsdata.load(url, only=["layers.3.*"]), names)
    assert_same(gdsdata.load(url, dtype=torch.bfloat16), {key: one.bfloat16() for key, one in state.items()})
    into = zeroed(state)
    assert gdsdata.load(url, into=into) is into
    assert_same(into, state)


@pytest.mark.filterwarnings("ignore:.*quantize|TypedStorage is deprecated")
@pytest.mark.parametrize("weights_only", [True, False])
def test_every_kind_of_value_comes_back(server, tmp_path, weights_only):
    state = trained() if weights_only else awkward()
    state.pop("storage", None)
    gdsdata.save(state, server.url("a.pt"))
    gdsdata.save(state, tmp_path / "a.pt")
    assert server.get("a.pt") == (tmp_path / "a.pt").read_bytes()
    found = gdsdata.load(server.url("a.pt"), weights_only=weights_only)
    assert_same(found, gdsdata.load(tmp_path / "a.pt", weights_only=weights_only))


@pytest.mark.filterwarnings("ignore:.*is read by torch.load")
def test_a_file_that_only_torch_reads_is_read_from_the_store(server):
    state, content = {"x": torch.arange(100_000), "y": "text"}, io.BytesIO()
    torch.save(state, content, _use_new_zipfile_serialization=False)
    server.put("old.pt", content.getvalue())
    assert_same(gdsdata.load(server.url("old.pt")), state)


def test_shards_are_found_by_their_index(server):
    state = {f"layers.{i:02}": torch.randn(300, 10 + i) for i in range(20)}
    of_tensor = {name: f"model-{i % 4}.safetensors" for i, name in enumerate(state)}
    for shard in set(of_tensor.values()):
        gdsdata.save({name: state[name] for name in state if of_tensor[name] == shard}, server.url(f"m/{shard}"))
    index = server.put("m/model.safetensors.index.json", json.dumps({"weight_map": of_tensor}).encode())
    assert_same(gdsdata.load(index, verify=True), state)
    server.delete("m/model-2.safetensors")
    with pytest.raises(FileNotFoundError, match="a shard is missing.*'model-2.safetensors' for 'layers.02'"):
        gdsdata.load(index)


def test_other_servers_get_the_same_objects(other_server, tmp_path):
    state, before = large_state(), set(other_server.uploads())
    gdsdata.save(state, tmp_path / "a.safetensors")
    gdsdata.save(state, other_server.url("run/a.safetensors"))
    assert other_server.get("run/a.safetensors") == (tmp_path / "a.safetensors").read_bytes()
    assert set(other_server.uploads()) <= before
    with AsyncCheckpointer(tmp_path / "run", upload=other_server.url("run")) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"a": torch.full((5 << 20,), step), "step": step})
    assert [name for name in other_server.names("run/") if name.endswith("json")] == [
        "run/step-1/manifest.json",
        "run/step-2/manifest.json",
    ]
    if other_server.name == "rclone":  # it answers ranges with whole objects
        return
    assert_same(gdsdata.load(other_server.url("run/a.safetensors"), verify=True), state)
    with AsyncCheckpointer(tmp_path / "new node", upload=other_server.url("run")) as checkpointer:
        found = {"a": torch.zeros(5 << 20, dtype=torch.int64), "step": 0}
        assert checkpointer.restore(found) == 2 and bool(found["a"].eq(2).all())


def test_errors_name_the_url(server):
    with pytest.raises(FileNotFoundError, match=re.escape(server.url("absent.pt"))):
        gdsdata.load(server.url("absent.pt"))
    server.put("empty.pt", b"")
    with pytest.raises(CorruptData, match=re.escape(server.url("empty.pt")) + ".* is empty"):
        gdsdata.load(server.url("empty.pt"))
    server.put("page.pt", b"<html>404</html>")
    with pytest.raises(CorruptData, match="an HTML or XML page"):
        gdsdata.load(server.url("page.pt"))
    gdsdata.save(large_state(), server.url("cut.pt"))
    server.put("cut.pt", server.get("cut.pt")[:-1000])
    with pytest.raises(CorruptData, match=re.escape(server.url("cut.pt"))):
        gdsdata.load(server.url("cut.pt"))


def test_an_object_is_loaded_anew_when_it_was_saved_again(server):
    url = server.url("a.safetensors")
    for number in range(3):
        state = {"x": torch.full((1000 + number,), float(number))}
        gdsdata.save(state, url)
        assert_same(gdsdata.load(url), state)


def test_dcp_saves_to_a_url_and_both_readers_read_it(server, tmp_path):
    state = large_state() | {"text": "text", "step": 3}
    url = server.url("run/step-1")
    dcp.save(state, storage_writer=gdsdata.GDSStorageWriter(url))
    for verify in (False, True):
        found = zeroed(state)
        dcp.load(found, storage_reader=gdsdata.GDSStorageReader(url, verify=verify))
        assert_same(found, state)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in server.names("run/step-1/"):
        (copy / name.rpartition("/")[2]).write_bytes(server.get(name))
    found = zeroed(state)
    dcp.load(found, storage_reader=FileSystemReader(copy))
    assert_same(found, state)
    server.delete("run/step-1/.metadata")
    with pytest.raises(CheckpointException, match="its save did not complete"):
        dcp.load(found, storage_reader=gdsdata.GDSStorageReader(url))


def test_a_folder_of_torchs_own_writer_is_read_from_a_url(server, tmp_path):
    state = trained() | {"number": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "of torch", thread_count=2))
    for path in (tmp_path / "of torch").iterdir():
        server.put(f"of torch/{path.name}", path.read_bytes())
    found = zeroed(state)
    dcp.load(found, storage_reader=gdsdata.GDSStorageReader(server.url("of torch")))
    assert_same(found, state)


KILLED = """
import sys, torch, gdsdata
with gdsdata.AsyncCheckpointer(sys.argv[1], upload=sys.argv[2], keep_last=2, upload_keep_last=3) as checkpointer:
    state = {"a": torch.zeros(4 << 20), "step": 0}
    begin = checkpointer.restore(state) or 0
    print("step", begin, flush=True)
    for step in range(begin + 1, 10_000):
        state["a"].fill_(step)
        state["step"] = step
        checkpointer.save(step, state).result()
"""


def test_killed_uploads_go_on_and_a_new_node_restores_them(server, tmp_path):
    url = server.url("run")
    for delay_s in (0.1, 0.6, 1.5):
        process = start_script(KILLED, tmp_path / "run", url, environment={"PYTHONPATH": str(REPOSITORY)})
        try:
            assert process.stdout.readline().startswith("step"), process.stderr.read()
            time.sleep(delay_s)  # the kill comes at any moment
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close(), process.stderr.close()
    with AsyncCheckpointer(tmp_path / "run", upload=url, upload_keep_last=3) as checkpointer:
        state = {"a": torch.zeros(4 << 20), "step": 0}
        step = checkpointer.restore(state)
        assert state["step"] == step > 0 and bool(state["a"].eq(step).all())
        assert eventually(lambda: f"run/step-{step}/manifest.json" in server.names("run/"), 30)
    with AsyncCheckpointer(tmp_path / "new node", upload=url) as checkpointer:
        state = {"a": torch.zeros(4 << 20), "step": 0}
        assert checkpointer.restore(state, verify=True) == step and bool(state["a"].eq(step).all())
        assert checkpointer.steps()[-1] == step
    for key in server.uploads():  # of the processes that were killed: a lifecycle rule deletes them
        abort_all(server, key)


def abort_all(server, key):
    """Delete the parts of an object that was never completed."""
    found = server.client.list_multipart_uploads(Bucket=server.bucket).get("Uploads", [])
    for one in found:
        if one["Key"] == key:
            server.client.abort_multipart_upload(Bucket=server.bucket, Key=key, UploadId=one["UploadId"])

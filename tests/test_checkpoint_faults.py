"""Checkpoints in a store that fails: right bytes or the right error, and no half objects."""

import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from servers.fault_kinds import APPLY, Plan, of_any, of_write
from servers.faults import FaultServer
from test_checkpoint import assert_same, zeroed

import gdsdata
from gdsdata import AsyncCheckpointer
from gdsdata.checkpoint import object_writer
from gdsdata.checkpoint.background import sending, uploads
from gdsdata.checkpoint.background.remote_folder import RemoteFolder
from gdsdata.errors import GdsdataError
from gdsdata.storage import stores, transport
from gdsdata.storage.stores import xml_store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:gdsdata")
PART_BYTES = 1 << 18
# These end a request soon. In others, the engine's own requests wait long before they fail.
SOON = tuple(name for name in APPLY if name not in ("silence", "stall", "slow"))
REFUSALS = ("status_403", "status_404", "expired")  # another attempt would fail too
WRITES = tuple(name for name, applies in APPLY.items() if applies in (of_any, of_write))


@pytest.fixture
def server(monkeypatch):
    """Give a server near by, with small parts and short waits."""
    with FaultServer() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(stores, "_stores", {})
        monkeypatch.setattr(xml_store, "_PART_BYTES", PART_BYTES)
        monkeypatch.setattr(object_writer, "PUT_BYTES", PART_BYTES)
        monkeypatch.setattr(sending, "_PUT_BYTES", PART_BYTES)
        monkeypatch.setattr(transport, "_FIRST_WAIT_S", 0.001)
        monkeypatch.setattr(transport, "_ATTEMPT_S", 0.2)
        monkeypatch.setattr(uploads, "_FIRST_PAUSE_S", 0.001)
        yield server


def state_of(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    return {f"layers.{i:02}": torch.randn(draw.randrange(60_000)) for i in range(20)}


@pytest.mark.parametrize("kind", WRITES)
def test_a_save_under_a_fault_of_each_kind_is_whole_or_not_there(server, tmp_path, kind):
    for seed in range(1 if kind == "silence" else 3):
        state = state_of(seed)
        for ending in ("pt", "safetensors"):
            gdsdata.save(state, tmp_path / f"a.{ending}")
            right = (tmp_path / f"a.{ending}").read_bytes()
            server.plan = Plan(seed=seed, share=0.3, kinds=(kind,), retry_after_s=0)
            try:
                gdsdata.save(state, server.url(f"{seed}.{ending}"))
                is_saved = True
            except (GdsdataError, OSError) as error:
                is_saved = False
                assert kind in REFUSALS, error
                assert f"{seed}.{ending}" in str(error) and server.secret_key not in str(error)
            server.plan = Plan()
            if is_saved or f"{seed}.{ending}" in server.names():
                assert server.get(f"{seed}.{ending}") == right


@pytest.mark.parametrize("kind", SOON)
def test_a_load_under_a_fault_of_each_kind_is_right_or_an_error(server, kind):
    state = state_of(1)
    for ending in ("pt", "safetensors"):
        gdsdata.save(state, server.url(f"a.{ending}"))
        for seed in range(3):
            server.plan = Plan(seed=seed, share=0.2, kinds=(kind,), retry_after_s=0)
            try:
                found = gdsdata.load(server.url(f"a.{ending}"))
            except (GdsdataError, OSError) as error:
                assert "s3://bucket/a." in str(error) and server.secret_key not in str(error)
            else:
                assert_same({name: found[name] for name in state}, state)
            finally:
                server.plan = Plan()


@pytest.mark.parametrize("seed", range(4))
def test_a_dcp_folder_under_faults_is_complete_or_not_there(server, seed):
    state, url = state_of(seed), server.url(f"run/step-{seed}")
    server.plan = Plan(seed=seed, share=0.3, kinds=SOON, in_a_row=None, retry_after_s=0)
    try:
        dcp.save(state, storage_writer=gdsdata.GDSStorageWriter(url))
    except BaseException as error:  # CheckpointException is no Exception
        assert "s3://bucket/" in str(error), error
    server.plan = Plan()
    if f"run/step-{seed}/.metadata" in server.names():
        found = zeroed(state)
        dcp.load(found, storage_reader=gdsdata.GDSStorageReader(url, verify=True))
        assert_same(found, state)


@pytest.mark.parametrize("seed", range(3))
def test_uploads_under_faults_leave_only_complete_checkpoints(server, tmp_path, seed):
    def assert_complete():
        for step in RemoteFolder(server.url("run")).complete():
            manifest = f"run/step-{step.step}/manifest.json"
            assert manifest in server.names()
            for file in step.files:
                assert len(server.get(f"run/step-{step.step}/{file.name}")) == file.size_bytes

    server.plan = Plan(seed=seed, share=0.25, kinds=SOON, in_a_row=None, retry_after_s=0)
    options = {"upload": server.url("run"), "keep_last": 2, "upload_keep_last": 3}
    with AsyncCheckpointer(tmp_path / "run", **options) as checkpointer:
        handles = [checkpointer.save(step, {"step": step, "a": torch.full((200_000,), step)}) for step in range(8)]
        for handle in handles:
            handle.result()
        for handle in handles:  # each upload ends, in whatever way
            handle._uploaded.exception(60)
        server.plan = Plan()
        checkpointer.save(8, {"step": 8, "a": torch.full((200_000,), 8)}).upload_result(60)
    assert_complete()
    state = {"step": 0, "a": torch.zeros(200_000, dtype=torch.int64)}
    with AsyncCheckpointer(tmp_path / "new node", **options) as checkpointer:
        assert checkpointer.restore(state) == 8 and state["step"] == 8 and bool(state["a"].eq(8).all())

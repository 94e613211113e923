"""Checkpoints in object stores: saved in parts, loaded by ranges."""

import random
import re
import threading
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from folder_store import FolderStore, install, refuse
from test_checkpoint import assert_same
from test_dcp import on_ranks
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

import gdsdata
from gdsdata.checkpoint import object_writer, open_object
from gdsdata.errors import IoError
from gdsdata.storage import stores


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_stores", {})
    monkeypatch.setattr(open_object, "OpenObject", open_object.OpenObject)
    monkeypatch.setattr(object_writer, "PUT_BYTES", 100_000)
    return install(FolderStore(tmp_path / "bucket", part_bytes=64 << 10))


def state_of(seed, most=40):
    """Return a state with tensors of many sizes, views and values, drawn by a seed."""
    draw = random.Random(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    state = {}
    for i in range(draw.randrange(1, most)):
        size = int(10 ** draw.uniform(0, 5.5)) * draw.randrange(2)
        generator = torch.Generator().manual_seed(seed * 100 + i)
        state[f"layer.{i}"] = torch.randint(0, 200, (size,), generator=generator).to(draw.choice(dtypes))
    return state


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize("seed", range(8))
def test_an_object_has_the_bytes_of_the_file(store, tmp_path, ending, seed):
    state = state_of(seed)
    if ending == "pt":
        state = {"model": state, "shared": next(iter(state.values())), "step": seed, "text": "x" * seed * 50_000}
    gdsdata.save(state, tmp_path / f"a.{ending}")
    gdsdata.save(state, f"s3://bucket/run/a.{ending}")
    assert (tmp_path / f"bucket/run/a.{ending}").read_bytes() == (tmp_path / f"a.{ending}").read_bytes()
    assert store.unfinished() == []


@pytest.mark.gpu
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize("seed", range(4))
def test_an_object_has_the_bytes_of_tensors_on_a_gpu(store, tmp_path, ending, seed):
    state = {name: one if i % 5 == 0 else one.cuda() for i, (name, one) in enumerate(state_of(seed).items())}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # work that is still in progress when the save begins
        torch.cuda._sleep(10_000_000)
        for one in state.values():
            one.copy_(one == 0)
        gdsdata.save(state, f"s3://bucket/run/a.{ending}")
    gdsdata.save(state, tmp_path / f"a.{ending}")
    assert (tmp_path / f"bucket/run/a.{ending}").read_bytes() == (tmp_path / f"a.{ending}").read_bytes()


def test_a_small_object_is_one_put_and_a_large_one_an_upload(store):
    gdsdata.save({"x": torch.zeros(10)}, "s3://bucket/small.pt")
    assert store.calls == [("put", "small.pt")]
    gdsdata.save({"x": torch.zeros(100_000)}, "s3://bucket/large.pt")
    assert [method for method, _ in store.calls[1:]] == ["upload", *["send"] * 7, "complete"]


def test_memory_and_parts_on_their_way_are_bounded(store, monkeypatch):
    made = []
    memory = object_writer.paged_memory
    monkeypatch.setattr(object_writer, "paged_memory", lambda *args: made.append(args) or memory(*args))
    gdsdata.save({str(i): torch.zeros(100_000 + i, dtype=torch.uint8) for i in range(100)}, "s3://bucket/a.pt")
    assert 1 < store.most_at_a_time <= object_writer.PARTS_AT_A_TIME
    assert len(made) <= object_writer.PARTS_AT_A_TIME + 3


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize(("method", "after"), [("upload", 0), ("send", 0), ("send", 5), ("send", 23), ("complete", 0)])
def test_a_failed_save_leaves_the_object_that_was_there(store, ending, method, after):
    url, key = f"s3://bucket/a.{ending}", f"a.{ending}"
    gdsdata.save({"x": torch.ones(3)}, url)
    before = store.info(key)
    store.fail = refuse(method, after=after)
    with pytest.raises(IoError, match="503"):
        gdsdata.save({str(i): torch.zeros(100_000 + i) for i in range(4)}, url)
    assert store.info(key) == before and store.unfinished() == []
    assert method == "upload" or ("abort", key) in store.calls


def test_a_failed_put_is_the_stores_error(store):
    store.fail = refuse("put", error=PermissionError("s3://bucket/a.pt: 403"))
    with pytest.raises(PermissionError, match="403"):
        gdsdata.save({"x": torch.ones(3)}, "s3://bucket/a.pt")
    assert store.names() == []


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "s3://bucket/run/"])
def test_a_url_of_a_bucket_or_folder_is_refused_before_a_request(store, url):
    for call in (lambda: gdsdata.save({"x": torch.ones(3)}, url), lambda: gdsdata.load(url)):
        with pytest.raises(IoError, match=f"'{url}' names a (bucket|folder), and no object"):
            call()
    assert store.calls == []


def test_an_interrupted_save_is_aborted_when_its_sends_have_ended(store):
    sending, may_end = threading.Event(), threading.Event()

    def fail(method, key):
        if method == "send":
            sending.set()
            assert may_end.wait(20)

    store.fail = fail
    writer = object_writer.ObjectWriter("s3://bucket/a.bin", 300_000)
    with pytest.raises(KeyboardInterrupt), writer:
        writer.write_bytes([(0, bytes(200_000))])
        assert sending.wait(20)
        threading.Timer(0.05, may_end.set).start()
        raise KeyboardInterrupt
    assert store.calls[-1] == ("abort", "a.bin")
    assert store.names() == [] and store.unfinished() == []


def test_a_file_url_is_its_path(tmp_path):
    gdsdata.save({"x": torch.arange(3)}, f"file://{tmp_path}/a%20b.pt")
    assert gdsdata.load(tmp_path / "a b.pt")["x"].tolist() == [0, 1, 2]
    assert gdsdata.load(f"file://localhost{tmp_path}/a%20b.pt")["x"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="names the host 'elsewhere'"):
        gdsdata.load("file://elsewhere/a.pt")


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def dcp_state():
    state = {f"layers.{i}": torch.randn(100 + 700 * i) for i in range(40)}
    return state | {"turned": torch.randn(300, 200).t(), "step": 3, "text": "x" * 10_000, "none": None}


def dcp_save(state, url="s3://bucket/run/step-1", **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=gdsdata.GDSStorageWriter(url, **options))


def dcp_loaded(state, reader):
    found = {key: torch.zeros_like(one) if isinstance(one, torch.Tensor) else None for key, one in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, storage_reader=reader)
    return found


def test_torchs_reader_reads_a_copy_of_the_objects_of_dcp(store, tmp_path):
    state = dcp_state()
    dcp_save(state)
    names = [key.removeprefix("run/step-1/") for key in store.names()]
    assert names[0] == ".metadata" and len(names) == 2 and re.fullmatch(r"__0_[0-9a-f]{32}\.distcp", names[1])
    assert_same(dcp_loaded(state, FileSystemReader(tmp_path / "bucket/run/step-1")), state)
    assert_same(dcp_loaded(state, gdsdata.GDSStorageReader(tmp_path / "bucket/run/step-1", verify=True)), state)
    assert [key for method, key in store.calls if method in ("put", "complete")][-1] == "run/step-1/.metadata"


def test_a_failed_dcp_save_leaves_the_checkpoint_that_was_there(store, tmp_path):
    state = dcp_state()
    dcp_save(state)
    before = store.names()
    for method in ("upload", "send", "complete", "put"):
        store.fail = refuse(method)
        with pytest.raises((CheckpointException, IoError)):
            dcp_save({key: None if one is None else one * 2 for key, one in state.items()})
        store.fail = lambda method, key: None
        assert_same(dcp_loaded(state, FileSystemReader(tmp_path / "bucket/run/step-1")), state)
    assert set(before) <= set(store.names()) and store.unfinished() == []


def test_leftovers_of_an_earlier_attempt_are_replaced_by_nothing_and_removed(store, tmp_path):
    state = dcp_state()
    store.put("run/step-1/__0_0.distcp", b"of an attempt")
    store.put("run/step-1/__7_12.distcp", b"of a rank that is gone")
    store.put("run/step-1/notes.txt", b"a user's own")
    dcp_save(state)
    assert_same(dcp_loaded(state, FileSystemReader(tmp_path / "bucket/run/step-1")), state)
    assert [key for key in store.names() if "distcp" not in key] == ["run/step-1/.metadata", "run/step-1/notes.txt"]
    dcp_save(state)
    assert len(store.names()) == 3


def test_dcp_removes_nothing_of_a_checkpoint_below_its_folder(store):
    state = {"x": torch.arange(5)}
    dcp_save(state, "s3://bucket/run/__best_model")
    before = store.names()
    dcp_save(state, "s3://bucket/run")
    assert set(before) < set(store.names())


def test_dcp_does_not_overwrite_if_that_is_forbidden(store):
    dcp_save({"x": torch.zeros(3)})
    with pytest.raises((CheckpointException, RuntimeError), match="already exists"):
        dcp_save({"x": torch.zeros(3)}, overwrite=False)


def test_hooks_take_the_url_of_a_dcp_checkpoint(store, tmp_path):
    state = {"x": torch.arange(5)}
    with gdsdata.torch_hooks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id="s3://bucket/run/step-1")
    assert_same(dcp_loaded(state, FileSystemReader(tmp_path / "bucket/run/step-1")), state)


def _save_on_ranks(rank, folder):
    store = install(FolderStore(folder / "bucket", part_bytes=64 << 10))
    object_writer.PUT_BYTES = 100_000
    dcp_save({f"of rank {rank}": torch.full((100_000,), float(rank)), "shared": torch.arange(1000.0)})
    return [key for method, key in store.calls if method in ("put", "complete")]


def test_each_rank_sends_its_file_and_the_first_one_the_metadata(tmp_path):
    first, second = on_ranks(2, _save_on_ranks, tmp_path)
    assert first[-1] == "run/step-1/.metadata" and first[0].startswith("run/step-1/__0_")
    assert len(second) == 1 and second[0].startswith("run/step-1/__1_")
    state = {f"of rank {rank}": torch.full((100_000,), float(rank)) for rank in range(2)}
    assert_same(dcp_loaded(state, FileSystemReader(tmp_path / "bucket/run/step-1")), state)

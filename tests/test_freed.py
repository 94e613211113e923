"""Engines, files and memory that are dropped are freed at once, without a collection of garbage.

Python collects cycles of objects rarely in a large program. `tests/soak.py` found these.
"""

import contextlib
import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
from helpers import descriptors, eventually, threads
from long_runs.made_data import KINDS, make
from object_server import serving

import gdsdata
from gdsdata import EngineOptions, GDSDataset, Reading
from gdsdata.checkpoint.background import folder_lock
from gdsdata.checkpoint.background.manifest import Manifest, SavedFile
from gdsdata.checkpoint.background.remote_folder import RemoteFolder
from gdsdata.checkpoint.open_object import read_object
from gdsdata.errors import CorruptData, IoError
from gdsdata.storage import objects


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    found = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in found.items():
        make(kind, 1).write(folder)
    return found


@pytest.fixture
def no_collection(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def read(kind: str, folder: Path, batches: int | None, **arguments) -> None:
    dataset = GDSDataset(folder, 7, device="cpu", on_break="restart", **make(kind, 1).arguments, **arguments)
    iterator = iter(dataset)
    with contextlib.suppress(IoError, CorruptData):
        for count, _ in enumerate(iterator, 1):
            if count == batches:
                break


def assert_freed(kind: str, folder: Path, batches: int | None, **arguments) -> None:
    read(kind, folder, batches, **arguments)  # which imports what it needs
    gc.collect()
    before = descriptors(), threads()
    read(kind, folder, batches, **arguments)
    # The kernel ends io_uring's helpers a moment later.
    assert eventually(lambda: descriptors() <= before[0] and threads() <= before[1]), (before, descriptors(), threads())


@pytest.mark.parametrize(("shuffle", "batches"), [(True, 1), ("lanes", None)], ids=["broken off", "whole, lanes"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_data_set_is_freed_with_its_last_reference(folders, no_collection, kind, shuffle, batches):
    options = EngineOptions(workers=2, direct="never")  # no other test's: the engine is not shared
    assert_freed(kind, folders[kind], batches, shuffle=shuffle, reading=Reading(options, index_cache=None))


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_data_set_whose_reads_failed_is_freed_with_its_last_reference(folders, no_collection, kind, on_error):
    options = EngineOptions(workers=1, direct="always", faults="seed=3,fail=0.5")
    assert_freed(kind, folders[kind], None, on_error=on_error, reading=Reading(options, index_cache=None))


def fail_to_save(save) -> weakref.ref:
    """Return a reference to a tensor of a state that could not be saved."""
    state = {"a": torch.ones(300_000), "b": torch.ones(10)}
    with pytest.raises(IoError):
        save(state)
    return weakref.ref(state["a"])


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_state_that_could_not_be_saved_is_freed_with_its_last_reference(tmp_path, no_collection, name):
    options = EngineOptions(faults="seed=1,fail=1")
    kept = fail_to_save(lambda state: gdsdata.save(state, tmp_path / name, options=options))
    assert kept() is None


def test_a_folder_lock_closes_its_descriptor_once_if_a_child_is_forked_meanwhile(tmp_path, monkeypatch):
    lock = folder_lock.FolderLock(str(tmp_path))
    held, closed, close = lock._descriptor, [], os.close

    def close_and_fork(descriptor: int) -> None:
        close(descriptor)
        closed.append(descriptor)
        folder_lock._drop_all()  # as a child does that is forked now: the number may be another file's

    monkeypatch.setattr(folder_lock.os, "close", close_and_fork)
    lock.release()
    assert closed == [held]


@pytest.fixture
def server(monkeypatch):
    with serving(monkeypatch) as running:
        yield running


def test_objects_that_were_loaded_leave_nothing_in_the_process(server):
    for step in range(3):
        server.content[f"step-{step}"] = bytes(1000)
        read_object(server.url(f"step-{step}"))
        gdsdata.read_tensor(server.url(f"step-{step}"), torch.uint8, (1000,))
    assert not [url for url in objects._known if "step-" in url]


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_files_that_were_saved_and_loaded_leave_nothing_in_the_process(tmp_path, name):
    def objects_after(*steps: int) -> int:
        for step in steps:
            gdsdata.save({f"layer.{i}": torch.full((i + 1,), step) for i in range(50)}, tmp_path / name)
            assert gdsdata.load(tmp_path / name)["layer.9"][0] == step
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(1, 2)
    assert objects_after(*range(3, 11)) - before < 50  # of 400 tensors


def test_manifests_of_checkpoints_that_were_removed_are_forgotten(monkeypatch):
    removed = {step: Manifest(step, step, (SavedFile("rank-0-00000000.pt", 3),)) for step in range(5)}
    folder = RemoteFolder("s3://bucket/run")
    monkeypatch.setattr("gdsdata.checkpoint.background.remote_folder.read_object", lambda url, _: contents[url])
    contents = {folder.file(step, "manifest.json"): one.content for step, one in removed.items()}
    for step, manifest in removed.items():
        listed = {step: {"manifest.json": (1, f"tag {step}"), "rank-0-00000000.pt": (3, "")}}
        monkeypatch.setattr(folder, "_list", lambda listed=listed: listed)
        assert folder.complete() == [manifest]
        assert list(folder._read.values()) == [manifest]

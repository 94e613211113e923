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

import gdsdata
from gdsdata import EngineOptions, GDSDataset, Reading
from gdsdata.checkpoint.background import folder_lock
from gdsdata.errors import CorruptData, IoError


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


def test_a_folder_lock_closes_its_descriptor_once_also_in_a_child_that_is_forked_meanwhile(tmp_path, monkeypatch):
    lock = folder_lock.FolderLock(str(tmp_path))
    held, closed, close = lock._descriptor, [], os.close

    def close_and_fork(descriptor: int) -> None:
        close(descriptor)
        closed.append(descriptor)
        folder_lock._drop_all()  # as a child does that is forked now: the number may be another file's

    monkeypatch.setattr(folder_lock.os, "close", close_and_fork)
    lock.release()
    assert closed == [held]

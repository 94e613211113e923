"""A save's extra memory is small: pages are written early, and the file is still right."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import MIB, in_new_process, peak_bytes, reset_peak

import gdsdata
from gdsdata.checkpoint import file_writer
from gdsdata.checkpoint.partial_pages import PAGE_BYTES, PartialPages


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_small_batches_and_pages_written_early_make_the_same_file(tmp_path, monkeypatch, seed, name):
    numbers = np.random.default_rng(seed)
    sizes = numbers.choice([1, 60, 900, 4096, 5000, 13000, 70000], 300, p=[0.1, 0.2, 0.3, 0.1, 0.1, 0.1, 0.1])
    state = {f"t{i}": torch.from_numpy(numbers.integers(1, 256, size).astype(np.uint8)) for i, size in enumerate(sizes)}
    gdsdata.save(state, tmp_path / name)
    expected = (tmp_path / name).read_bytes()
    monkeypatch.setattr(file_writer, "_BATCH_BYTES", int(numbers.integers(1, 40_000)))
    monkeypatch.setattr(file_writer, "_PAGES_BYTES", PAGE_BYTES)
    gdsdata.save(state, tmp_path / name)
    assert (tmp_path / name).read_bytes() == expected
    if name.endswith(".pt"):
        assert zipfile.ZipFile(tmp_path / name).testzip() is None


def test_pages_that_somebody_else_writes_are_not_given_until_they_are_released():
    pages = PartialPages()
    pages.hold(0, 2 * PAGE_BYTES)
    pages.add(0, bytes(3 * PAGE_BYTES))
    assert pages.whole_bytes == PAGE_BYTES and [begin for begin, _ in pages.take_whole()] == [2 * PAGE_BYTES]
    pages.release(0, 2 * PAGE_BYTES)
    assert [(begin, len(run)) for begin, run in pages.take_whole()] == [(0, 2 * PAGE_BYTES)]
    assert pages.whole_bytes == 0 and pages.take_runs() == []


def _beside_many_small_tensors(folder: Path) -> int:
    state = {f"t{i}": torch.full((1000,), i % 251, dtype=torch.uint8) for i in range(40_000)}
    options = gdsdata.EngineOptions(bounce_bytes=4 * MIB, workers=1)
    file_writer._BATCH_BYTES, file_writer._PAGES_BYTES = 4 * MIB, MIB
    gdsdata.save({"x": torch.zeros(MIB)}, folder / "a.pt", options=options)  # allocates threads and memory
    reset_peak()
    before = peak_bytes()
    gdsdata.save(state, folder / "a.pt", options=options)
    return peak_bytes() - before


def test_many_small_tensors_take_a_few_kb_each_beside_their_bytes(tmp_path):
    assert in_new_process(_beside_many_small_tensors, tmp_path) < 40_000 * 3000 + 40 * MIB


def _dcp_save(state: dict, path: Path, options: gdsdata.EngineOptions) -> None:
    dcp.save(state, storage_writer=gdsdata.GDSStorageWriter(path, options=options))


def _dcp_load(path: Path) -> dict:
    state = {f"t{i}": torch.empty(1024, 1024) for i in range(40)}
    dcp.load(state, storage_reader=gdsdata.GDSStorageReader(path, verify=True))
    return state


def _beside_tensors_with_gaps(folder: Path, name: str) -> int:
    save, load = (gdsdata.save, gdsdata.load) if name == "a.safetensors" else (_dcp_save, _dcp_load)
    state = {f"t{i}": torch.rand(1024, 2048)[:, ::2] for i in range(40)}  # 4 MiB each
    options = gdsdata.EngineOptions(bounce_bytes=4 * MIB, workers=1)
    file_writer._BATCH_BYTES = 4 * MIB
    save({"x": torch.zeros(MIB)}, folder / name, options=options)
    reset_peak()
    before = peak_bytes()
    save(state, folder / name, options=options)
    more = peak_bytes() - before
    loaded = load(folder / name)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())
    return more


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["a.safetensors", "a-folder-of-dcp"])
def test_tensors_with_gaps_are_copied_a_few_at_a_time(tmp_path, name):
    assert in_new_process(_beside_tensors_with_gaps, tmp_path, name) < 90 * MIB  # all have 160 MiB

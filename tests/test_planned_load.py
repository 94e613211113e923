"""`PlannedLoad`: tensors are read in batches within a bound, and errors come with their results."""

import os
from concurrent.futures import Future

import pytest
import torch

import gdsdata
from gdsdata.checkpoint import tensor_reader
from gdsdata.checkpoint.safetensors import planned_load
from gdsdata.checkpoint.safetensors.opened import safe_open
from gdsdata.errors import CorruptData

CPU = torch.device("cpu")
SIZES = [4000, 4000, 4000, 24_000, 4000]


@pytest.fixture
def path(tmp_path):
    tensors = {f"t{i}": torch.full((size,), i, dtype=torch.uint8) for i, size in enumerate(SIZES)}
    gdsdata.save(tensors, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def futures_of(path, load):
    file = safe_open(path, "pt")
    return [load.add(file.get_slice(f"t{i}"), CPU, None) for i in range(len(SIZES))]


def test_a_batch_has_at_most_its_bytes_or_one_larger_tensor(path, monkeypatch):
    monkeypatch.setattr(planned_load, "_BATCH_BYTES", 10_000)
    load = planned_load.PlannedLoad()
    futures = futures_of(path, load)
    assert [batch.size_bytes for batch in load._batches] == [8000, 4000, 24_000, 4000]
    for i, future in enumerate(futures):
        assert torch.equal(future.result(), torch.full((SIZES[i],), i, dtype=torch.uint8))


def test_an_error_of_a_batch_is_raised_by_each_result_of_it(path, monkeypatch):
    monkeypatch.setattr(planned_load, "_BATCH_BYTES", 10_000)
    load = planned_load.PlannedLoad()
    file = safe_open(path, "pt")
    os.truncate(path, path.stat().st_size - 30_000)
    futures = [load.add(file.get_slice(f"t{i}"), CPU, None) for i in range(len(SIZES))]
    for future in (futures[3], futures[4], futures[3]):
        with pytest.raises(CorruptData):
            future.result()


def test_a_result_that_ctrl_c_interrupted_is_read_when_it_is_asked_for_again(path, monkeypatch):
    load = planned_load.PlannedLoad()
    futures = futures_of(path, load)

    def interrupt(futures):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tensor_reader.CallThreads, "submit", lambda *_: Future())  # no read has begun
        patched.setattr(tensor_reader, "results_of", interrupt)
        futures[0].result()
    for i, future in enumerate(futures):
        assert torch.equal(future.result(), torch.full((SIZES[i],), i, dtype=torch.uint8))


def test_a_tensor_is_there_after_ctrl_c_behind_its_read(path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    future = futures_of(path, planned_load.PlannedLoad())[0]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(planned_load._Tensor, "set_result", interrupt)
        future.result()
    assert torch.equal(future.result(), torch.zeros(SIZES[0], dtype=torch.uint8))

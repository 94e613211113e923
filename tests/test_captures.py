"""A thread's mode towards captures of CUDA graphs. tests/test_gpu.py captures some."""

import threading

import pytest
import torch

import gdsdata
from gdsdata.checkpoint import casts, loading, tensor_reader
from gdsdata.checkpoint.background.save_job import SaveJob
from gdsdata.checkpoint.threads import DaemonThreads
from gdsdata.io import captures


class Modes(threading.local):
    """Stands in for the driver. `had` are the modes that the thread has had, the last one now."""

    def __init__(self):
        self.had = [0]

    def exchange(self, mode):
        self.had.append(mode)
        return self.had[-2]


@pytest.fixture
def modes(monkeypatch):
    modes = Modes()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(captures, "exchange_capture_mode", modes.exchange)
    return modes


def test_a_threads_own_mode_is_back_after_the_block_and_after_an_error_in_it(modes):
    with pytest.raises(KeyError), captures.beside_captures():
        assert modes.had == [0, 2]
        raise KeyError
    assert modes.had == [0, 2, 0]


def test_blocks_within_each_other_leave_the_thread_as_it_was(modes):
    with captures.beside_captures(), captures.beside_captures():
        assert modes.had[-1] == 2
    assert modes.had[-1] == 0


def test_saves_and_loads_are_such_blocks(modes, tmp_path):
    gdsdata.save({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    assert modes.had == [0, 2, 0]
    assert torch.equal(gdsdata.load(tmp_path / "a.safetensors")["a"], torch.ones(3))
    assert modes.had == [0, 2, 0, 2, 0]


def test_a_thread_that_makes_calls_stays_beside_captures(modes):
    threads = DaemonThreads(1, "test")
    assert threads.submit(lambda: modes.had[-1]).result() == 2
    threads.close()
    assert modes.had == [0]


def test_a_background_save_stays_beside_captures(modes, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(SaveJob, "check", lambda job: seen.append(modes.had[-1]))
    with gdsdata.AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(3)}).result()
    assert set(seen) == {2}


def test_without_cuda_no_driver_is_asked(monkeypatch):
    monkeypatch.setattr(captures, "exchange_capture_mode", lambda mode: pytest.fail("it was asked"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with captures.beside_captures():
        captures.stay_beside_captures()


def test_on_gpus_of_another_maker_saves_loads_and_threads_ask_no_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(captures, "exchange_capture_mode", lambda mode: pytest.fail("it was asked"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # torch for ROCm has its GPUs under this name
    monkeypatch.setattr(torch.version, "cuda", None)
    gdsdata.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    assert torch.equal(gdsdata.load(tmp_path / "a.pt")["a"], torch.ones(3))
    captures.stay_beside_captures()


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_a_load_that_casts_or_copies_waits_for_its_streams(tmp_path, monkeypatch, ending):
    waited = []
    for module in (loading, casts, tensor_reader):
        monkeypatch.setattr(module, "wait_for_streams", waited.extend)
    path = tmp_path / f"a.{ending}"
    gdsdata.save({"a": torch.ones(3)}, path)
    gdsdata.load(path)
    gdsdata.load(path, into={"a": torch.zeros(3)})
    assert waited == []
    gdsdata.load(path, dtype=torch.float64)
    assert waited == [torch.device("cpu")]
    gdsdata.load(path, into={"a": torch.zeros(3, dtype=torch.float64)}, dtype=torch.float64)
    assert waited == [torch.device("cpu")] * 2

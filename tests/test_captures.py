"""A thread's mode towards captures of CUDA graphs. tests/test_gpu.py captures some."""

import pytest
import torch

import gdsdata
from gdsdata.io import captures


@pytest.fixture
def modes(monkeypatch):
    """Stand in for the driver. Returns the modes that the thread has had, the last one now."""
    had = [0]

    def exchange(mode):
        had.append(mode)
        return had[-2]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(captures, "exchange_capture_mode", exchange)
    return had


def test_a_threads_own_mode_is_back_after_the_block_and_after_an_error_in_it(modes):
    with pytest.raises(KeyError), captures.beside_captures():
        assert modes == [0, 2]
        raise KeyError
    assert modes == [0, 2, 0]


def test_blocks_within_each_other_leave_the_thread_as_it_was(modes):
    with captures.beside_captures(), captures.beside_captures():
        assert modes[-1] == 2
    assert modes[-1] == 0


def test_saves_and_loads_are_such_blocks(modes, tmp_path):
    gdsdata.save({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    assert modes == [0, 2, 0]
    assert torch.equal(gdsdata.load(tmp_path / "a.safetensors")["a"], torch.ones(3))
    assert modes == [0, 2, 0, 2, 0]


def test_without_cuda_no_driver_is_asked(monkeypatch):
    monkeypatch.setattr(captures, "exchange_capture_mode", lambda mode: pytest.fail("it was asked"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with captures.beside_captures():
        pass

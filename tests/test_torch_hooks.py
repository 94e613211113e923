"""Under `torch_hooks`, torch's own calls give what they give without, and move their bytes by gdsdata."""

import io
import os
import pickle
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import run_script
from test_checkpoint import DEVICES, assert_same, awkward, trained

import gdsdata
from gdsdata.checkpoint import hooks
from gdsdata.checkpoint.dcp import GDSStorageWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*quantize|TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture
def by_torch(monkeypatch) -> list[str]:
    """The calls that torch's own functions get."""
    calls = []
    for name in ("_torch_save", "_torch_load"):
        its = getattr(hooks, name)
        monkeypatch.setattr(
            hooks, name, lambda *a, name=name, its=its, **k: (calls.append(name), its(*a, **k))[1]
        )
    return calls


def states():
    state = awkward()
    del state["storage"]  # two of them are never equal
    return [trained(), state, torch.arange(5), [1, "x"], None]


@pytest.mark.parametrize("device", [None, *DEVICES])
def test_what_torch_saves_and_loads_is_the_same_with_and_without(tmp_path, by_torch, device):
    for state in states():
        torch.save(state, tmp_path / "torchs.pt")
        with gdsdata.torch_hooks():
            torch.save(state, tmp_path / "ours.pt")
            found = [torch.load(tmp_path / name, device, weights_only=False) for name in ("ours.pt", "torchs.pt")]
        expected = torch.load(tmp_path / "torchs.pt", device, weights_only=False)
        for one in (*found, torch.load(tmp_path / "ours.pt", device, weights_only=False)):
            assert_same(one, expected, device or "cpu")
    assert "_torch_save" not in by_torch


def test_hooks_are_there_within_and_gone_behind_whatever_happens(tmp_path):
    before = torch.save, torch.load, torch.serialization.save, torch.serialization.load
    with pytest.raises(KeyError), gdsdata.torch_hooks():
        assert torch.save is hooks._save and torch.serialization.load is hooks._load
        with gdsdata.torch_hooks():
            pass
        assert torch.load is hooks._load
        raise KeyError
    assert (torch.save, torch.load, torch.serialization.save, torch.serialization.load) == before
    assert torch.save.__doc__ == hooks._save.__doc__


def test_what_is_not_allowed_with_torch_is_not_allowed_with_hooks(tmp_path):
    torch.save({"a": torch.ones(3), "f": os.getcwd}, tmp_path / "x.pt")
    with gdsdata.torch_hooks():
        with pytest.raises(pickle.UnpicklingError):
            torch.load(tmp_path / "x.pt")
        assert torch.load(tmp_path / "x.pt", weights_only=False)["f"] is os.getcwd


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_what_gdsdata_does_otherwise_is_left_to_torch(tmp_path, by_torch):
    state, path = {"a": torch.arange(1000.0)}, tmp_path / "x.pt"
    torch.save(state, path)
    (tmp_path / "link.pt").symlink_to("x.pt")
    with gdsdata.torch_hooks():
        buffer = io.BytesIO()
        torch.save(state, buffer)
        torch.save(state, tmp_path / "link.pt")
        torch.save(state, path, _use_new_zipfile_serialization=False)
        legacy = torch.load(path)
        torch.save(state, tmp_path / "4.pt", pickle_protocol=4)
        torch.save(state, path, _disable_byteorder_record=True)
        assert by_torch == ["_torch_save"] * 3 + ["_torch_load"] + ["_torch_save"] * 2
        assert (tmp_path / "link.pt").is_symlink()
        found = [
            torch.load(io.BytesIO(buffer.getvalue())), torch.load(path, mmap=True), torch.load(tmp_path / "link.pt"),
            torch.load(path, map_location=lambda storage, location: storage), torch.load(path, encoding="utf-8"),
        ]  # fmt: skip
        assert by_torch[6:] == ["_torch_load"] * 5
        for one in (legacy, *found):
            assert_same(one, state)
        with torch.serialization.skip_data():
            torch.load(path)
        with torch._subclasses.FakeTensorMode():
            assert isinstance(torch.load(path)["a"], torch._subclasses.FakeTensor)
        assert by_torch[11:] == ["_torch_load"] * 2
        path.write_bytes(path.read_bytes()[:-30])
        with pytest.raises((RuntimeError, OSError)) as of_torch:
            torch.load(path)
        assert type(of_torch.value) in (RuntimeError, OSError), "its own error, not gdsdata's"
        with pytest.raises(FileNotFoundError):
            torch.load(tmp_path / "absent.pt")


def test_locations_are_mapped_as_torch_maps_them(tmp_path, by_torch):
    state = {"a": torch.arange(3)}
    torch.save(state, tmp_path / "x.pt")
    with gdsdata.torch_hooks():
        for location in ("cpu", torch.device("cpu"), {"cpu": "cpu"}, {"cuda:0": "cpu"}, {}):
            assert_same(torch.load(tmp_path / "x.pt", map_location=location), state)
        assert by_torch == []
        assert torch.load(tmp_path / "x.pt", map_location="meta")["a"].is_meta
        assert by_torch == ["_torch_load"]


def test_dcp_by_a_checkpoint_id_alone(tmp_path, monkeypatch):
    written = []
    finish = GDSStorageWriter.finish
    monkeypatch.setattr(GDSStorageWriter, "finish", lambda self, **k: (written.append(self.path), finish(self, **k))[1])
    state = {"a": torch.arange(100), "b": 5}
    with gdsdata.torch_hooks():
        dcp.save(state, checkpoint_id=str(tmp_path / "x"))
        found = {"a": torch.zeros(100, dtype=torch.int64), "b": 0}
        dcp.load(found, checkpoint_id=str(tmp_path / "x"))
        assert_same(found, state)
    dcp.save(state, checkpoint_id=str(tmp_path / "y"))
    assert list(map(str, written)) == [str(tmp_path / "x")]


def test_threads_that_come_and_go_leave_torch_as_it_was(tmp_path):
    before = torch.save

    def use() -> None:
        for i in range(20):
            with gdsdata.torch_hooks():
                torch.save(i, tmp_path / f"{threading.get_ident()}.pt")

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.save is before


def test_installed_hooks_stay(tmp_path):
    script = """
import sys, torch, gdsdata
gdsdata.install_torch_hooks()
with gdsdata.torch_hooks():
    pass
torch.save({"a": torch.ones(3)}, sys.argv[1])
assert torch.load(sys.argv[1])["a"].sum() == 3 and torch.load.__module__ == "torch.serialization"
assert "_load" in torch.load.__code__.co_name
"""
    assert run_script(script, tmp_path / "x.pt")[0] == 0


@pytest.mark.gpu
def test_tensors_go_back_to_the_gpu_that_they_came_from(tmp_path, by_torch):
    state = {"a": torch.arange(5, device="cuda"), "b": torch.arange(5)}
    with gdsdata.torch_hooks():
        torch.save(state, tmp_path / "x.pt")
        found = torch.load(tmp_path / "x.pt")
        assert {name: tensor.device for name, tensor in found.items()} == {n: t.device for n, t in state.items()}
        assert torch.load(tmp_path / "x.pt", map_location={"cuda:0": "cpu"})["a"].device.type == "cpu"
    assert by_torch == []

"""Loads during a save of the same name: one complete file, or an error that says what happened."""

import gc
import json
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import descriptors, eventually
from safetensors.torch import save_file

import gdsdata
from gdsdata.checkpoint import open_file
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.errors import CorruptData

OLD, NEW = {"a": torch.full((5000,), 1.0), "b": torch.ones(3)}, {"a": torch.full((900,), 2.0), "c": torch.zeros(3)}


class Odd:
    """Makes a pickle one that only torch unpickles."""


@pytest.fixture
def before_reading(monkeypatch):
    """Call a function after a load has read the headers, and before it reads tensors."""

    def install(call):
        run = TensorReader.run

        def run_after(self):
            call()
            monkeypatch.setattr(TensorReader, "run", run)
            return run(self)

        monkeypatch.setattr(TensorReader, "run", run_after)

    return install


def assert_old(found):
    assert found.keys() >= OLD.keys() and all(torch.equal(found[name], OLD[name]) for name in OLD)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
@pytest.mark.parametrize("how", ["whole", "only", "into", "verify"])
def test_a_file_replaced_during_a_load_is_read_as_it_was_opened(tmp_path, name, how, before_reading):
    path = tmp_path / name
    gdsdata.save(OLD, path)
    before_reading(lambda: gdsdata.save(NEW, path))
    arguments = {"only": {"only": ["*"]}, "into": {"into": {k: torch.zeros_like(v) for k, v in OLD.items()}}}
    assert_old(gdsdata.load(path, **arguments.get(how, {}), verify=how == "verify"))
    assert gdsdata.load(path).keys() == NEW.keys()


def test_unpickling_by_torch_reads_the_file_that_was_opened(tmp_path, before_reading):
    path = tmp_path / "x.pt"
    torch.save({**OLD, "odd": Odd()}, path)
    before_reading(lambda: torch.save({**NEW, "odd": None}, tmp_path / "new") or os.replace(tmp_path / "new", path))
    assert_old(gdsdata.load(path, weights_only=False))


def test_a_file_deleted_during_a_load_is_read_whole(tmp_path, before_reading):
    gdsdata.save(OLD, tmp_path / "x.pt")
    before_reading((tmp_path / "x.pt").unlink)
    assert_old(gdsdata.load(tmp_path / "x.pt"))


def saved_in_shards(folder, state):
    for name, tensor in state.items():
        save_file({name: tensor}, folder / f"{name}.tmp")
        os.replace(folder / f"{name}.tmp", folder / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in state}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "model.safetensors.index.json"


def test_shards_replaced_during_a_load_are_read_as_they_were_opened(tmp_path, before_reading):
    index = saved_in_shards(tmp_path, OLD)
    before_reading(lambda: saved_in_shards(tmp_path, {name: tensor + 1 for name, tensor in OLD.items()}))
    assert_old(gdsdata.load(index))


def test_a_replaced_shard_beyond_those_kept_open_is_an_error_that_says_load_again(
    tmp_path, before_reading, monkeypatch
):
    monkeypatch.setattr("gdsdata.checkpoint.safetensors_file.most_kept_files", lambda: 1)
    index = saved_in_shards(tmp_path, OLD)
    assert_old(gdsdata.load(index))
    before_reading(lambda: saved_in_shards(tmp_path, {name: tensor + 1 for name, tensor in OLD.items()}))
    with pytest.raises(CorruptData, match=r"b.safetensors' was changed while it was being loaded.*Load it again"):
        gdsdata.load(index)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_file_changed_in_place_during_a_load_is_an_error_that_says_load_again(tmp_path, name, before_reading):
    path = tmp_path / name
    gdsdata.save(OLD, path)
    gdsdata.save({**OLD, "more": torch.ones(9)}, tmp_path / "other")
    before_reading(lambda: shutil.copyfile(tmp_path / "other", path))
    with pytest.raises(CorruptData, match="was changed while it was being loaded.*Load it again") as caught:
        gdsdata.load(path)
    assert "iterat" not in str(caught.value) and caught.value.path == str(path)


def test_a_file_changed_in_place_while_its_tensors_are_read_is_an_error(tmp_path, monkeypatch):
    gdsdata.save(OLD, tmp_path / "x.pt")
    table_of = open_file.table_of

    def changed(files):
        os.utime(tmp_path / "x.pt", ns=(0, 0))
        return table_of(files)

    monkeypatch.setattr("gdsdata.checkpoint.tensor_reader.table_of", changed)
    with pytest.raises(CorruptData, match="was changed while it was being loaded"):
        gdsdata.load(tmp_path / "x.pt")


def test_the_files_of_a_dcp_load_are_read_as_they_were_opened(tmp_path, before_reading):
    dcp.save(dict(OLD), storage_writer=gdsdata.GDSStorageWriter(tmp_path))
    newer = {name: tensor + 1 for name, tensor in OLD.items()}
    before_reading(lambda: dcp.save(newer, storage_writer=gdsdata.GDSStorageWriter(tmp_path)))
    found = {name: torch.zeros_like(tensor) for name, tensor in OLD.items()}
    dcp.load(found, storage_reader=gdsdata.GDSStorageReader(tmp_path))
    assert_old(found)


@pytest.mark.parametrize("state", [OLD, {**OLD, "odd": Odd()}])
def test_a_load_leaves_no_descriptor_open(tmp_path, state):
    torch.save(state, tmp_path / "x.pt")
    index = saved_in_shards(tmp_path, OLD)
    dcp.save(dict(OLD), storage_writer=gdsdata.GDSStorageWriter(tmp_path / "dcp"))
    reader = gdsdata.GDSStorageReader(tmp_path / "dcp")

    def load_all():
        gdsdata.load(tmp_path / "x.pt", weights_only=False)
        gdsdata.load(index)
        dcp.load(dict(OLD), storage_reader=reader)
        with pytest.raises(ValueError):
            gdsdata.load(tmp_path / "x.pt", into={"a": torch.zeros(1)}, weights_only=False)

    load_all()  # allocates engines and threads
    gc.collect()
    gc.disable()  # nothing may depend on it
    try:
        before = descriptors()
        load_all()
        assert eventually(lambda: descriptors() <= before)
    finally:
        gc.enable()

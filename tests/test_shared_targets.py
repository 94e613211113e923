"""Tensors that share memory, and are filled from tensors that were saved apart."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp

import gdsdata
from gdsdata import AsyncCheckpointer

# Long enough that several workers read each tensor.
COUNT = 6 << 20
SAVED = {"a": torch.zeros(COUNT), "b": torch.ones(COUNT)}


@pytest.fixture(scope="module", params=["x.pt", "x.safetensors"])
def path(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / request.param
    gdsdata.save(SAVED, path)
    return path


@pytest.mark.parametrize("how", [{}, {"verify": True}, {"dtype": torch.float16}], ids=["as it is", "verified", "cast"])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_last_name_fills_memory_that_several_names_share(path, order, how):
    for _ in range(5):
        shared = torch.full((COUNT,), 7.0, dtype=how.get("dtype", torch.float32))
        with pytest.warns(RuntimeWarning, match=f"{order[0]} and {order[1]} share memory.*those of {order[1]}"):
            gdsdata.load(path, into=dict.fromkeys(order, shared), **how)
        assert torch.equal(shared, SAVED[order[1]].to(shared.dtype))


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize("verify", [False, True])
def test_the_last_name_fills_shared_memory_that_has_gaps(tmp_path, ending, verify):
    saved = {name: tensor.reshape(2, -1) for name, tensor in SAVED.items()}
    gdsdata.save(saved, tmp_path / f"x.{ending}")
    shared = torch.full((2, 2 * COUNT), 7.0)[:, : COUNT // 2]
    with pytest.warns(RuntimeWarning, match="a and b share memory"):
        gdsdata.load(tmp_path / f"x.{ending}", into={"a": shared, "b": shared}, verify=verify)
    assert torch.equal(shared, saved["b"])


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize("verify", [False, True])
def test_equal_tensors_fill_shared_memory_without_a_warning(tmp_path, recwarn, ending, verify):
    saved = torch.rand(1000)
    saved[3] = torch.nan
    gdsdata.save({"a": saved, "b": saved.clone()}, tmp_path / f"x.{ending}")
    shared = torch.zeros(1000)
    gdsdata.load(tmp_path / f"x.{ending}", into={"a": shared, "b": shared}, verify=verify)
    assert torch.equal(shared.view(torch.int32), saved.view(torch.int32))
    assert not recwarn.list


def test_a_tied_model_takes_what_torch_gives_it_from_one_that_was_not_tied(tmp_path):
    model = two_layers()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model}).result()
        for _ in range(5):
            tied = two_layers(tied=True)
            checkpointer.restore({"model": tied})
            assert torch.equal(tied[1].weight, model[1].weight) and tied[0].weight is tied[1].weight


@pytest.mark.parametrize("names", [("model", "best"), ("best", "model")])
@pytest.mark.parametrize("verify", [False, True])
def test_a_state_that_begins_as_the_models_own_is_restored_beside_the_model(tmp_path, names, verify):
    model = two_layers()
    saved = {"model": model, "best": {name: tensor + 1 for name, tensor in model.state_dict().items()}}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved).result()
        new = two_layers()
        begun = {"model": new, "best": dict(new.state_dict())}  # until there is a better one
        state = {name: begun[name] for name in names}
        checkpointer.restore(state, verify=verify)
    assert torch.equal(new[0].weight, model[0].weight) and torch.equal(new[1].weight, model[1].weight)
    assert all(torch.equal(state["best"][name], tensor) for name, tensor in saved["best"].items())


def test_plain_values_that_were_saved_apart_are_apart_after_a_restore(tmp_path):
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": torch.zeros(5), "b": torch.ones(5)}).result()
        shared = torch.full((5,), 7.0)
        state = {"a": shared, "b": shared}
        checkpointer.restore(state)
    assert state["a"] is shared and state["a"].tolist() == [0.0] * 5 and state["b"].tolist() == [1.0] * 5


def test_plain_values_that_were_saved_as_one_stay_one(tmp_path):
    one = torch.arange(5.0)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": one, "b": one, "c": one[:2]}).result()
        shared = torch.zeros(5)
        state = {"a": shared, "b": shared, "c": shared[:2]}
        checkpointer.restore(state)
    assert state["a"] is shared and state["b"] is shared and shared.tolist() == one.tolist()
    assert state["c"].data_ptr() == shared.data_ptr()


def test_a_distributed_checkpoint_fills_shared_memory_with_one_of_its_tensors(tmp_path):
    dcp.save(copy.copy(SAVED), storage_writer=gdsdata.GDSStorageWriter(tmp_path / "x"), no_dist=True)
    for _ in range(5):
        shared = torch.full((COUNT,), 7.0)
        with pytest.warns(RuntimeWarning, match="share memory"):
            state = {"a": shared, "b": shared}
            dcp.load(state, storage_reader=gdsdata.GDSStorageReader(tmp_path / "x"), no_dist=True)
        assert torch.equal(shared, SAVED["b"])


def two_layers(tied=False):
    model = torch.nn.Sequential(*(torch.nn.Linear(1500, 1500, bias=False) for _ in range(2)))
    if tied:
        model[1].weight = model[0].weight
    return model

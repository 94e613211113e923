"""Odd values of a checkpoint, and odd places for them in the tree that a load fills."""

import struct
from typing import NamedTuple

import pytest
import torch

import gdsdata
from gdsdata import AsyncCheckpointer, torch_private
from gdsdata.errors import CorruptData


def behind_their_storage():
    """Return empty tensors that torch begins behind the end of their storage."""
    rows = torch.empty(4, 0).split(1)
    return {"one": torch.zeros(3, 0, 4)[1:], "rows": list(rows), "parameter": torch.nn.Parameter(rows[3])}


@pytest.mark.parametrize(
    "how", [{}, {"only": ["*"]}, {"dtype": torch.float16}, {"verify": True}, {"into": behind_their_storage()}]
)
def test_empty_tensors_behind_their_storage_load(tmp_path, how):
    state = behind_their_storage() | {"full": torch.arange(4.0)}
    gdsdata.save(state, tmp_path / "x.pt")
    if "into" in how:
        how["into"]["full"] = torch.zeros(4)
    found = gdsdata.load(tmp_path / "x.pt", **how)
    assert found["one"].shape == (2, 0, 4) and [row.shape for row in found["rows"]] == [(1, 0)] * 4
    assert found["parameter"].shape == (1, 0) and found["full"].tolist() == [0, 1, 2, 3]


def test_a_step_with_empty_tensors_behind_their_storage_is_restored(tmp_path):
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"odd": behind_their_storage(), "full": torch.ones(5)}).result()
        state = {"odd": behind_their_storage(), "full": torch.zeros(5)}
        assert checkpointer.restore(state) == 1 and state["full"].sum() == 5


def test_values_in_tuples_are_replaced_in_a_tree_that_is_filled(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)

    def optimizer(**rates):
        made = torch.optim.AdamW([parameter], **rates)
        made.step()
        return made

    saved = {"opt": optimizer(lr=1e-3, betas=(0.9, 0.95)).state_dict(), "deep": [((1, 2), torch.ones(2), {"a": 3})]}
    gdsdata.save(saved, tmp_path / "x.pt")
    state = {"opt": optimizer(lr=1.0, betas=(0.5, 0.6)).state_dict(), "deep": [((0, 0), torch.zeros(2), {"a": 0})]}
    kept, inner = state["deep"][0][1], state["deep"][0][2]
    assert gdsdata.load(tmp_path / "x.pt", into=state) is state
    assert state["opt"]["param_groups"][0]["betas"] == (0.9, 0.95)
    assert state["opt"]["param_groups"][0]["lr"] == 1e-3
    assert state["deep"][0][0] == (1, 2) and inner == {"a": 3}
    assert state["deep"][0][1] is kept and kept.tolist() == [1, 1]
    assert state["deep"][0][2] is inner


def test_a_tree_that_is_a_tuple_is_returned_with_the_saved_values(tmp_path):
    gdsdata.save((torch.ones(2), 7), tmp_path / "x.pt")
    target = torch.zeros(2)
    found = gdsdata.load(tmp_path / "x.pt", into=(target, 0))
    assert found[0] is target and target.tolist() == [1, 1] and found[1] == 7
    tensors = (torch.zeros(2),)
    gdsdata.save((torch.ones(2),), tmp_path / "y.pt")
    assert gdsdata.load(tmp_path / "y.pt", into=tensors) is tensors


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_autograd_notices_a_load_into_a_tensor_that_a_graph_has_saved(tmp_path, name):
    gdsdata.save({"a": torch.ones(3, 2)}, tmp_path / name)
    for factor in (torch.zeros(3, 2), torch.zeros(2, 3).t(), torch.zeros(3, 4)[:, :2]):
        product = (torch.zeros(3, 2, requires_grad=True) * factor).sum()
        gdsdata.load(tmp_path / name, into={"a": factor})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_a_damaged_number_of_a_pickle_is_found_without_being_asked_for(tmp_path):
    gdsdata.save({"w": torch.ones(5), "lr": 0.001}, tmp_path / "x.pt")
    torch.save({"w": torch.ones(5), "lr": 0.001}, tmp_path / "y.pt")
    for path in (tmp_path / "x.pt", tmp_path / "y.pt"):
        content = bytearray(path.read_bytes())
        content[content.index(struct.pack(">d", 0.001)) + 1] ^= 0x20
        path.write_bytes(content)
        for how in ({}, {"only": ["lr"]}, {"into": {"w": torch.zeros(5), "lr": 0.0}}):
            with pytest.raises(CorruptData, match=r"checksum of data.pkl differs"):
                gdsdata.load(path, **how)


def test_tied_tensors_stay_tied_when_they_are_cast(tmp_path):
    weight = torch.arange(4.0)
    torch.save({"embedding": weight, "head": weight, "other": torch.zeros(4), "half": weight[:2]}, tmp_path / "x.pt")
    found = gdsdata.load(tmp_path / "x.pt", dtype=torch.float16)
    found["embedding"][0] = 9
    assert found["head"].tolist() == [9, 1, 2, 3] and found["other"].tolist() == [0] * 4
    assert found["half"].dtype == torch.float16 and found["half"].tolist() == [0, 1]


def test_an_expanded_tensor_is_refused_before_anything_is_filled(tmp_path):
    gdsdata.save({"a": torch.ones(5), "x": torch.arange(4.0)}, tmp_path / "x.pt")
    state = {"a": torch.zeros(5), "x": torch.zeros(1).expand(4)}
    with pytest.raises(ValueError, match="x is to be filled from .* but it was expanded"):
        gdsdata.load(tmp_path / "x.pt", into=state)
    assert state["a"].sum() == 0
    state = {"a": torch.zeros(5), "x": torch.zeros(4, 1).expand(4, 1)[:, 0]}  # nothing of it is
    gdsdata.load(tmp_path / "x.pt", into=state)
    assert state["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", ["bfloat16", float])
def test_a_dtype_that_is_none_of_torchs_is_refused(tmp_path, dtype):
    gdsdata.save({"a": torch.ones(5)}, tmp_path / "x.pt")
    with pytest.raises(TypeError, match=r"dtype=.*give a torch\.dtype"):
        gdsdata.load(tmp_path / "x.pt", dtype=dtype)


class Pair(NamedTuple):
    tensor: torch.Tensor
    step: int


def tied_in_a_pair(value: float) -> dict:
    weight = torch.full((300_000,), value)  # so large that its memory is arbitrary before it is read
    return {"pair": Pair(weight, 3), "weight": weight}


@pytest.mark.parametrize("by", [lambda path: torch.load(path, lambda storage, _: storage, weights_only=False),
                                lambda path: gdsdata.load(path, weights_only=False)])  # fmt: skip
def test_empty_tensors_that_share_a_storage_in_an_unusual_state_share_it_again(tmp_path, by):
    empty = torch.empty(0)
    torch.save({"pair": Pair(empty, 3), "again": empty.view(0, 2), "weight": torch.ones(9)}, tmp_path / "x.pt")
    with gdsdata.torch_hooks():
        found = by(tmp_path / "x.pt")
    assert torch_private.storage_id(found["pair"].tensor.untyped_storage()) == torch_private.storage_id(
        found["again"].untyped_storage()
    )
    assert (found["weight"] == 1).all() and found["again"].shape == (0, 2)


@pytest.mark.parametrize("how", [{}, {"only": ["*"]}, {"dtype": torch.float64}, {"into": True}])
def test_a_tensor_in_a_named_tuple_that_is_tied_to_another_one_has_its_values(tmp_path, how):
    gdsdata.save(tied_in_a_pair(1), tmp_path / "x.pt")
    if "into" in how:
        how = {"into": tied_in_a_pair(0)}
    found = gdsdata.load(tmp_path / "x.pt", weights_only=False, **how)
    assert (found["pair"].tensor == 1).all() and (found["weight"] == 1).all() and found["pair"].step == 3


class OfVersionTwo(torch.nn.Linear):
    """A module that takes a state only if that says its version, as MNASNet of torchvision does."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
        if local_metadata.get("version") != 2:
            raise ValueError(f"the state is of version {local_metadata.get('version')}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


@pytest.mark.parametrize("how", [{}, {"only": ["model.*"]}, {"only": ["*.weight", "*.bias"]}, {"dtype": torch.float32}])
def test_a_loaded_state_has_the_versions_of_its_modules(tmp_path, how):
    model = torch.nn.Sequential(OfVersionTwo(2, 2))
    gdsdata.save({"model": model.state_dict(), "step": 3}, tmp_path / "x.pt")
    model.load_state_dict(gdsdata.load(tmp_path / "x.pt", **how)["model"])


def test_a_module_that_reads_its_version_is_restored(tmp_path):
    model = torch.nn.Sequential(OfVersionTwo(2, 2))
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model}).result()
        before = model[0].weight.detach().clone()
        torch.nn.init.zeros_(model[0].weight)
        assert checkpointer.restore({"model": model}) == 1
    assert model[0].weight.tolist() == before.tolist()

"""Checkpoints of torch.save and safetensors load as those libraries load them, or in part."""

import collections
import contextlib
import errno
import json
import os
import pickle
import resource
import struct
import sys
import time
import types
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import MIB, drop_cache, require_direct, resident_pages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import gdsdata
from gdsdata import EngineOptions
from gdsdata.checkpoint import safetensors_file
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.torch_zip.archive import open_archive
from gdsdata.checkpoint.torch_zip.archive_reader import unpickle_structure
from gdsdata.checkpoint.torch_zip.unpickling import NotPlain, Unusual, storages_of, unpickle_plain
from gdsdata.errors import CorruptData, IoError
from gdsdata.io.engine import pickle_claims_too_much, shared_engine

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
]  # fmt: skip


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return values with random bits, within what the dtype permits."""
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj()
    flat = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(found, expected, device="cpu", where="it"):
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert found.device.type == device, where
        about = ("dtype", "shape", "requires_grad", "layout")
        assert [getattr(found, name) for name in about] == [getattr(expected, name) for name in about], where
        if expected.layout == torch.strided and not expected.is_quantized:
            assert found.stride() == expected.stride(), where
            assert bits(found) == bits(expected), where
        else:
            assert torch.equal(found.cpu(), expected.cpu()), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected:
            assert_same(found[key], expected[key], device, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for i, one in enumerate(expected):
            assert_same(found[i], one, device, f"{where}.{i}")
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(found, expected) and found.dtype == expected.dtype, where
    else:
        assert found == expected, where


def trained() -> dict:
    """Return the training state of a small model."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 7))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "step": 7}


def awkward() -> dict:
    base = torch.randn(40, 50)
    return {
        "dtypes": {str(dtype): values(dtype, 5, 3) for dtype in DTYPES},
        "views": [base, base.t(), base[3:9, ::2], base[7], base.reshape(-1)[5:5]],
        "tied": (base, base),
        "empty": [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int8)],
        "scalar": torch.tensor(2.5),
        "expanded": torch.tensor([1.0, 2.0])[:, None].expand(2, 1000),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "quantized": torch.quantize_per_tensor(torch.randn(20), 0.1, 3, torch.quint8),
        "values": [None, True, 3, 2.5, 1j, "text", b"bytes", {"nested": (1, [2])}, {4: 5, (6, 7): 8}],
        "ordered": collections.OrderedDict(b=1, a=torch.arange(3)),
        "storage": torch.arange(9.0).untyped_storage(),
    }


@pytest.mark.filterwarnings("ignore:.*quantize|TypedStorage is deprecated")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("state", [trained, awkward, dict, lambda: torch.arange(5), lambda: [1, 2], lambda: None])
def test_a_file_of_torch_is_loaded_as_torch_loads_it(tmp_path, state, device):
    state = state()
    torch.save(state, tmp_path / "x.pt")
    found = gdsdata.load(tmp_path / "x.pt", device, verify=True)
    expected = torch.load(tmp_path / "x.pt", map_location=device)
    if isinstance(expected, dict) and "storage" in expected:
        assert bytes(found.pop("storage").cpu()) == bytes(expected.pop("storage").cpu())
    assert_same(found, expected, device)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_that_shared_memory_share_it_again(tmp_path, device):
    torch.save(awkward(), tmp_path / "x.pt")
    for found in (
        gdsdata.load(tmp_path / "x.pt", device),
        gdsdata.load(tmp_path / "x.pt", device, only=["views*", "tied*"]),
    ):
        found["tied"][0][0, 0] = 1234.5
        assert found["tied"][1][0, 0] == found["views"][0][0, 0] == found["views"][1][0, 0] == 1234.5


def strided(dtype, rows, columns, step, transposed):
    tensor = values(dtype, rows, columns)[::step]
    return tensor.t() if transposed else tensor


tensors = st.builds(
    strided, st.sampled_from(DTYPES), st.integers(0, 7), st.integers(0, 400), st.integers(1, 3), st.booleans()
)
nests = st.recursive(
    tensors | st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(nests)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_nest_comes_back_whole_by_parts_and_into_itself(tmp_path, state):
    torch.save(state, tmp_path / "x.pt")
    expected = torch.load(tmp_path / "x.pt")
    assert_same(gdsdata.load(tmp_path / "x.pt"), expected)
    if isinstance(state, (dict, list, tuple, torch.Tensor)):  # these can be filled
        assert_same(gdsdata.load(tmp_path / "x.pt", into=zeroed(state)), state)


def zeroed(nest):
    """Return the same nest with tensors of zeros and the same strides."""
    if isinstance(nest, torch.Tensor):
        return torch.empty_strided(nest.shape, nest.stride(), dtype=nest.dtype, device=nest.device).view(nest.dtype)
    if isinstance(nest, dict):
        return type(nest)((key, zeroed(value)) for key, value in nest.items())
    if isinstance(nest, (list, tuple)):
        return type(nest)(zeroed(value) for value in nest)
    return nest


# ------------------------------------------------------------------------------------------------ parts, into, casts


@pytest.mark.parametrize("device", DEVICES)
def test_only_what_matches_comes(tmp_path, device):
    state = trained()
    torch.save(state, tmp_path / "x.pt")
    found = gdsdata.load(tmp_path / "x.pt", device, only=["model.0.*", "optimizer.state.*.exp_avg", "step"])
    assert list(found) == ["model", "optimizer", "step"] and found["step"] == 7
    assert list(found["model"]) == ["0.weight", "0.bias"] and type(found["model"]) is collections.OrderedDict
    assert bits(found["model"]["0.weight"]) == bits(state["model"]["0.weight"])
    assert list(found["optimizer"]) == ["state"]
    assert all(list(one) == ["exp_avg"] for one in found["optimizer"]["state"].values())
    with pytest.raises(ValueError, match=r"only=\['nothing'\] matches no name in '.*'. Give patterns of these: model"):
        gdsdata.load(tmp_path / "x.pt", only=["nothing"])
    assert gdsdata.load(tmp_path / "x.pt", only=[]) == {}
    with pytest.raises(ValueError, match="give a list of patterns"):
        gdsdata.load(tmp_path / "x.pt", only="model.*")


def test_patterns_may_come_from_a_generator(tmp_path):
    gdsdata.save({"b": torch.ones(1), "a": torch.ones(2), "step": 3}, tmp_path / "x.pt")
    assert list(gdsdata.load(tmp_path / "x.pt", only=iter(["a", "b"]))) == ["b", "a"]
    into = {"a": torch.zeros(2), "b": torch.zeros(1)}
    gdsdata.load(tmp_path / "x.pt", into=into, only=iter(["b", "a"]))
    assert into["a"].sum() == 2 and into["b"].sum() == 1


@pytest.mark.parametrize("strict", [True, False])
def test_patterns_fill_items_of_a_list_from_their_own_places(tmp_path, strict):
    """Other items of the list are left out before them."""
    saved = [torch.full((3,), float(number)) for number in range(4)]
    torch.save({"l": saved, "t": tuple(saved)}, tmp_path / "x.pt")
    into = {"l": [torch.zeros(3) for _ in saved], "t": tuple(torch.zeros(3) for _ in saved)}
    gdsdata.load(tmp_path / "x.pt", into=into, only=["l.1", "l.2", "t.3"], strict=strict)
    assert [one[0].item() for one in (*into["l"], *into["t"])] == [0, 1, 2, 0, 0, 0, 0, 3]


def test_an_error_has_the_name_that_an_item_of_a_list_has_in_the_file(tmp_path):
    gdsdata.save({"l": [torch.ones(3), torch.full((3,), 2.0)]}, tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(content.replace(torch.full((3,), 2.0).numpy().tobytes(), bytes(12)))
    with pytest.raises(CorruptData, match=r"l\.1\b"):
        gdsdata.load(tmp_path / "x.pt", only=["l.1"], verify=True)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_packed_floats_that_torch_does_not_cast_are_named(tmp_path, suffix):
    state = {"w": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "b": torch.ones(3)}
    path = tmp_path / f"x.{suffix}"
    gdsdata.save(state, path)
    said = r"^w in .* is of torch.float4_e2m1fn_x2, which torch does not cast to torch.float32: leave dtype= out"
    with pytest.raises(ValueError, match=said):
        gdsdata.load(path, dtype=torch.float32)
    into = {"b": torch.zeros(3), "w": torch.zeros(4)}
    with pytest.raises(ValueError, match=said):
        gdsdata.load(path, dtype=torch.float32, into=into)
    assert not into["b"].any()
    assert gdsdata.load(path, dtype=torch.float64, only=["b"])["b"].dtype == torch.float64
    assert gdsdata.load(path, dtype=torch.float4_e2m1fn_x2, only=["w"])["w"].dtype == torch.float4_e2m1fn_x2


def test_patterns_that_match_nothing_are_an_error_beside_an_empty_dict(tmp_path):
    gdsdata.save({"model": {"w": torch.ones(3)}, "optim": {"state": {}, "lr": 1.0}}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"only=\['modle.\*'\] matches no name .* of these: model.w, optim.lr"):
        gdsdata.load(tmp_path / "x.pt", only=["modle.*"])
    for pattern in ("optim.state", "optim.state.*"):
        assert gdsdata.load(tmp_path / "x.pt", only=[pattern]) == {"optim": {"state": {}}}


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_patterns_for_a_file_that_has_no_names_are_an_error(tmp_path, name):
    gdsdata.save({}, tmp_path / name)
    with pytest.raises(ValueError, match=r"only=\['a'\] matches no name .* of these: none"):
        gdsdata.load(tmp_path / name, only=["a"])
    assert gdsdata.load(tmp_path / name, only=["*"]) == {}


def test_leaves_of_the_same_name_are_kept_apart(tmp_path):
    state = {"a.b": torch.zeros(2), "a": {"b": torch.ones(2), 0: torch.full((2,), 2.0), "0": torch.full((2,), 3.0)}}
    torch.save(state, tmp_path / "x.pt")
    assert_same(gdsdata.load(tmp_path / "x.pt", only=["*"]), state)
    assert_same(gdsdata.load(tmp_path / "x.pt", into=zeroed(state)), state)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_only_the_bytes_that_are_asked_for_are_read(tmp_path, suffix):
    state = {f"layer.{i}": torch.randn(MIB // 4) for i in range(8)}
    path = tmp_path / f"x.{suffix}"
    torch.save(state, path) if suffix == "pt" else save_file(state, path)
    require_direct(path)
    options = EngineOptions(workers=2, direct="always", queue_depth=7)  # its own engine
    counted = shared_engine(options, torch.device("cpu"))
    before = counted.statistics()
    found = gdsdata.load(path, only=["layer.[25]"], options=options)
    assert list(found) == ["layer.2", "layer.5"] and bits(found["layer.5"]) == bits(state["layer.5"])
    assert sum(counted.statistics()["bytes"].values()) - sum(before["bytes"].values()) == 2 * MIB
    assert counted.statistics()["storage_bytes"] - before["storage_bytes"] < 2.2 * MIB


@pytest.mark.parametrize("device", DEVICES)
def test_into_fills_the_tensors_that_are_there_and_replaces_other_values(tmp_path, device):
    state = trained()
    torch.save(state, tmp_path / "x.pt")
    into = {"model": {key: torch.zeros_like(one, device=device) for key, one in state["model"].items()}, "step": 0}
    at = {key: one.data_ptr() for key, one in into["model"].items()}
    found = gdsdata.load(tmp_path / "x.pt", into=into, only=["model.*", "step"])
    assert found is into and into["step"] == 7
    assert {key: one.data_ptr() for key, one in into["model"].items()} == at
    assert_same(into["model"], {key: one.to(device) for key, one in state["model"].items()}, device)


def test_into_takes_views_and_other_orders_of_elements(tmp_path):
    state = {"a": torch.randn(6, 5), "b": torch.randn(6, 5).t(), "c": torch.randn(4)}
    torch.save(state, tmp_path / "x.pt")
    around = torch.zeros(8, 10)
    into = {"a": around[1:7, ::2], "b": torch.zeros(5, 6), "c": torch.nn.Parameter(torch.zeros(4))}
    gdsdata.load(tmp_path / "x.pt", into=into)
    assert all(torch.equal(into[key], state[key]) for key in state)
    assert around[0].abs().sum() == 0 and around[:, 1::2].abs().sum() == 0, "elements beside the view are not changed"


def test_into_with_other_names_shapes_or_dtypes_says_which(tmp_path):
    torch.save({"a": torch.zeros(3), "b": torch.zeros(2), "n": 1}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"different names: c only in into, b, n only in the file"):
        gdsdata.load(tmp_path / "x.pt", into={"a": torch.zeros(3), "c": torch.zeros(1)})
    into = {"a": torch.ones(3), "c": torch.ones(1)}
    gdsdata.load(tmp_path / "x.pt", into=into, strict=False)
    assert into["a"].sum() == 0 and into["c"] == 1
    with pytest.raises(ValueError, match="no name in common: module.a in into, a, b, n in the file: use the file's"):
        gdsdata.load(tmp_path / "x.pt", into={"module.a": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"a in .* shape \(3,\) .* fill \(4,\)"):
        gdsdata.load(tmp_path / "x.pt", into={"a": torch.zeros(4)}, strict=False)
    with pytest.raises(ValueError, match="dtype= allows a cast"):
        gdsdata.load(tmp_path / "x.pt", into={"a": torch.zeros(3).double()}, strict=False)
    with pytest.raises(ValueError, match="n is a tensor in into, and none in '"):
        gdsdata.load(tmp_path / "x.pt", into={"n": torch.zeros(3)}, strict=False)
    with pytest.raises(ValueError, match="different names: b, n only in the file: strict"):
        gdsdata.load(tmp_path / "x.pt", into={"a": torch.zeros(3)})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros(3, np.float32), "an array of numpy in into: give a tensor, as torch.from_numpy(array) is"),
        (None, "of type NoneType in into: give a tensor of shape (3,) and dtype torch.float32"),
        (0.5, "of type float in into: give a tensor of shape (3,)"),
    ],
)
def test_into_with_another_value_in_a_tensors_place_says_what_to_give(tmp_path, value, words):
    torch.save({"a": torch.ones(3)}, tmp_path / "x.pt")
    with pytest.raises(ValueError) as error:
        gdsdata.load(tmp_path / "x.pt", into={"a": value})
    assert f"a is a tensor in '{tmp_path / 'x.pt'}', and {words}" in str(error.value)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_one_tensor_as_into_for_a_file_of_names_says_to_give_a_dict(tmp_path, name):
    gdsdata.save({"a": torch.ones(3)}, tmp_path / name)
    with pytest.raises(ValueError, match=r"have no name in common: into= is one tensor, and the names .* are a: pass"):
        gdsdata.load(tmp_path / name, into=torch.zeros(3))


def test_a_file_with_one_of_the_names_of_tied_weights_fills_them_strictly(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False), torch.nn.Linear(5, 2))
    model[1].weight = model[0].weight
    values = {"0.weight": torch.rand(5, 3), "2.weight": torch.rand(2, 5), "2.bias": torch.rand(2)}
    gdsdata.save(values, tmp_path / "x.safetensors")
    gdsdata.load(tmp_path / "x.safetensors", into=model.state_dict())
    assert torch.equal(model[1].weight, values["0.weight"]) and torch.equal(model[2].weight, values["2.weight"])
    del values["2.bias"]
    gdsdata.save(values, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="different names: 2.bias only in into: strict"):
        gdsdata.load(tmp_path / "x.safetensors", into=model.state_dict())
    rows = torch.zeros(2, 5)
    with pytest.raises(ValueError, match="different names: a part only in into"):
        gdsdata.load(tmp_path / "x.safetensors", into={**values, "2.weight": rows, "a part": rows[:1]})
    with pytest.raises(ValueError, match="different names: b only in into"):
        gdsdata.load(tmp_path / "x.safetensors", into={**values, "2.weight": rows, "b": torch.zeros(2, 5)})


def test_a_load_that_is_not_strict_warns_if_no_name_fits(tmp_path):
    gdsdata.save({"module.a": torch.zeros(3)}, tmp_path / "x.safetensors")
    into = {"a": torch.ones(3)}
    with pytest.warns(RuntimeWarning, match="nothing was loaded: .* no name in common: a in into, module.a in the"):
        gdsdata.load(tmp_path / "x.safetensors", into=into, strict=False)
    assert into["a"].sum() == 3
    assert gdsdata.load(tmp_path / "x.safetensors", into={}, strict=False) == {}, (
        "no tensor is asked for, so there is no warning"
    )


@pytest.mark.parametrize("device", DEVICES)
def test_floating_point_tensors_are_cast_where_it_is_asked_for(tmp_path, device):
    state = {"a": torch.randn(9), "i": torch.arange(3), "half": torch.randn(4).half()}
    torch.save(state, tmp_path / "x.pt")
    found = gdsdata.load(tmp_path / "x.pt", device, dtype=torch.bfloat16)
    expected = {"a": state["a"].bfloat16(), "i": state["i"], "half": state["half"].bfloat16()}
    assert_same(found, {name: one.to(device) for name, one in expected.items()}, device)
    assert [one.dtype for one in found.values()] == [torch.bfloat16, torch.int64, torch.bfloat16]
    into = {"a": torch.zeros(9, dtype=torch.float64, device=device)}
    gdsdata.load(tmp_path / "x.pt", into=into, strict=False, dtype=torch.float64)
    assert torch.equal(into["a"].cpu(), state["a"].double())


# ------------------------------------------------------------------------------------------------ damage


def test_a_byte_that_changed_is_found_with_verify(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.randn(1000), "b": torch.randn(MIB)}, path)
    record = next(entry for entry in zipfile.ZipFile(path).infolist() if entry.filename.endswith("data/1"))
    damaged = bytearray(path.read_bytes())
    damaged[record.header_offset + 3 * MIB] ^= 1
    path.write_bytes(damaged)
    gdsdata.load(path)
    with pytest.raises(CorruptData, match="storage 1 in .* has the checksum .* was changed since") as caught:
        gdsdata.load(path, verify=True)
    assert caught.value.path == str(path) and caught.value.length == 4 * MIB
    with pytest.raises(CorruptData, match="b in .* has the checksum"):
        gdsdata.load(path, verify=True, only=["b"])
    gdsdata.load(path, verify=True, only=["a"])


def test_files_without_checksums_load_and_say_so_once(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.arange(9), tmp_path / "without_crc.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.warns(RuntimeWarning, match="'without_crc.pt' has no checksums"):
        assert gdsdata.load(tmp_path / "without_crc.pt", verify=True).sum() == 36


# torch's own unpickling raises them too.
ERRORS_OF_UNPICKLING = (
    CorruptData, RuntimeError, EOFError, pickle.UnpicklingError, ValueError, TypeError, KeyError, AttributeError,
    IndexError, AssertionError, OSError, ImportError,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is read by torch.load")
def test_a_file_cut_anywhere_is_an_error_and_nothing_else(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(trained(), path)
    whole = path.read_bytes()
    for cut in [*range(0, 200, 7), *np.linspace(200, len(whole) - 1, 30).astype(int)]:
        path.write_bytes(whole[:cut])
        with pytest.raises(ERRORS_OF_UNPICKLING):
            gdsdata.load(path)


@pytest.mark.parametrize("moved_by", [-30, 100, 10**6, 2**63, -1400])
def test_a_zip_whose_directory_says_another_place_is_damaged(tmp_path, moved_by):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(100.0)}, path)
    damaged = bytearray(path.read_bytes())
    place = damaged.rfind(b"PK\6\6") + 48  # of the directory, in zip64's end record
    (begin,) = struct.unpack_from("<Q", damaged, place)
    struct.pack_into("<Q", damaged, place, max(begin + moved_by, 0))
    path.write_bytes(damaged)
    with pytest.raises(CorruptData, match="damaged at bytes"):
        gdsdata.load(path)


def test_a_file_system_that_takes_no_hints_is_loaded_from(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "no hints here")

    torch.save({"a": torch.arange(100.0)}, tmp_path / "x.pt")
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    assert torch.equal(gdsdata.load(tmp_path / "x.pt")["a"], torch.arange(100.0))


@pytest.mark.filterwarnings("ignore:.*is read by torch.load", "ignore:Detected pickle protocol")
def test_a_mutated_file_loads_or_is_an_error_and_nothing_else(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.randn(30), "b": [torch.arange(4), "text"]}, path)
    whole, random = path.read_bytes(), np.random.default_rng(0)
    for _ in range(400):
        mutated = bytearray(whole)
        for place in random.integers(0, len(whole), random.integers(1, 6)):
            mutated[place] = random.integers(0, 256)
        path.write_bytes(mutated)
        with contextlib.suppress(*ERRORS_OF_UNPICKLING):
            gdsdata.load(path)


def test_code_in_a_pickle_is_not_run(tmp_path):
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (open, (str(ran), "w"))

    torch.save({"a": torch.zeros(3), "evil": Evil()}, tmp_path / "x.pt")
    for arguments in ({}, {"only": ["a"]}, {"into": {"a": torch.zeros(3)}, "strict": False}):
        with pytest.raises(pickle.UnpicklingError):
            gdsdata.load(tmp_path / "x.pt", **arguments)
    assert not ran.exists()
    gdsdata.load(tmp_path / "x.pt", weights_only=False)
    assert ran.exists(), "weights_only=False runs the pickle"


def test_a_tensor_beyond_its_storage_is_refused_in_every_way_of_loading(tmp_path):
    torch.save({"a": torch.arange(48)[10:20], "secret": torch.arange(100)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    pickled = contents["x/data.pkl"]
    at = pickled.index(b"K\nK\n\x85")  # storage_offset 10, size (10,)
    contents["x/data.pkl"] = pickled[:at] + b"K\x28" + pickled[at + 2 :]
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    for arguments in ({}, {"only": ["a"]}, {"into": {"a": torch.zeros(10, dtype=torch.int64)}, "strict": False}):
        with pytest.raises(CorruptData, match="is not within its storage 0 of 384 bytes"):
            gdsdata.load(tmp_path / "x.pt", **arguments)


def test_a_pickle_cannot_change_what_stands_for_a_tensor(tmp_path):
    """BUILD sets an object's state: here the fields of a `Stored`, with another file's record."""

    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    (tmp_path / "other").write_bytes(b"of another file, which is none of this one's business")
    torch.save(torch.zeros(32, dtype=torch.uint8), tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    tensor = contents["x/data.pkl"][2:-1]
    record = text("file") + text(str(tmp_path / "other")) + text("offset") + b"K\0" + text("size_bytes") + b"K\x20"
    record = b"ccollections\nOrderedDict\n)R}(" + record + text("crc32") + b"Nub"
    state = b"(" + record + b"K\0ctorch\nByteStorage\n(K\x20t(K\x01t" + text("cpu") + b"t"
    contents["x/data.pkl"] = b"\x80\x02}" + text("w") + tensor + state + b"bs."
    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    for arguments in ({}, {"only": ["*"]}, {"into": {"w": torch.zeros(32, dtype=torch.uint8)}}):
        with pytest.raises((pickle.UnpicklingError, RuntimeError, CorruptData)):
            gdsdata.load(tmp_path / "evil.pt", **arguments)


@pytest.mark.parametrize("make", [lambda: torch.ones(4), lambda: torch.nn.Parameter(torch.ones(4))])
def test_a_requires_grad_that_is_no_bool_is_left_to_torch(tmp_path, make):
    torch.save(make(), tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    pickled = contents["x/data.pkl"]
    last = max(pickled.rindex(flag) for flag in (b"\x88", b"\x89") if flag in pickled)  # True, False
    contents["x/data.pkl"] = pickled[:last] + b"K\2" + pickled[last + 1 :]
    with zipfile.ZipFile(tmp_path / "odd.pt", "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    assert unpickle_structure(open_archive(OpenFile(str(tmp_path / "odd.pt")))) is None
    with pytest.raises((RuntimeError, CorruptData), match="odd.pt.*bool"):
        gdsdata.load(tmp_path / "odd.pt")


@pytest.mark.parametrize("name", ["_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"])
@pytest.mark.parametrize("state", [b"}X\1\0\0\0aK\1s", b"N}X\x08\0\0\0__code__K\1s\x86"], ids=["dict", "attributes"])
def test_a_pickle_leaves_nothing_in_what_makes_tensors(name, state):
    pickled = b"\x80\x02ctorch._utils\n" + name.encode() + b"\n" + state + b"b."
    with pytest.raises(Unusual) as caught:
        unpickle_plain(pickled, None, None, None)
    assert isinstance(caught.value.__cause__, AttributeError)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_by_themselves_come_as_torch_gives_them(tmp_path):
    tensor = torch.arange(5)
    for storage in (tensor.storage(), tensor.untyped_storage()):
        torch.save({"s": storage, "t": tensor.clone()}, tmp_path / "x.pt")
        found, expected = gdsdata.load(tmp_path / "x.pt"), torch.load(tmp_path / "x.pt")
        assert type(found["s"]) is type(expected["s"])
        assert found["s"].tolist() == expected["s"].tolist() and torch.equal(found["t"], tensor)


@pytest.mark.parametrize("state", [trained, dict, lambda: torch.arange(5)])
def test_plain_pickles_are_unpickled_without_torch_and_alike(tmp_path, state, monkeypatch):
    torch.save(state(), tmp_path / "x.pt")
    expected = torch.load(tmp_path / "x.pt")
    monkeypatch.setattr(torch, "load", None)
    assert_same(gdsdata.load(tmp_path / "x.pt"), expected)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
@pytest.mark.parametrize("kind", ["legacy", "compressed", "sparse"])
def test_a_file_that_only_torch_can_read_is_left_to_it_with_a_warning(tmp_path, kind):
    path = tmp_path / f"{kind}.pt"
    state = {"a": torch.arange(5.0)}
    if kind == "sparse":
        state["s"] = torch.eye(3).to_sparse()
    torch.save(state, path, _use_new_zipfile_serialization=kind != "legacy")
    if kind == "compressed":
        with zipfile.ZipFile(path) as plain, zipfile.ZipFile(tmp_path / "z", "w", zipfile.ZIP_DEFLATED) as packed:
            for entry in plain.infolist():
                packed.writestr(entry.filename, plain.read(entry))
        (tmp_path / "z").rename(path)
    with pytest.warns(RuntimeWarning, match=f"'{kind}.pt' is read by torch.load: "):
        try:
            found = gdsdata.load(path)
        except RuntimeError:
            assert kind == "compressed", "torch refuses a compressed file alone"
            return
    assert torch.equal(found["a"], state["a"])
    if kind == "sparse":
        assert torch.equal(found["s"].to_dense(), torch.eye(3))
    into = {"a": torch.zeros(5)}
    gdsdata.load(path, into=into, strict=False)
    assert torch.equal(into["a"], state["a"])


def test_verify_warns_of_a_tensor_that_alone_has_no_checksum(tmp_path):
    path = tmp_path / "x.safetensors"
    gdsdata.save({"aaa": torch.ones(5), "bbb": torch.zeros(5)}, path)
    path.write_bytes(path.read_bytes().replace(b'"bbb"', b'"bbc"', 1))  # and not in the checksums
    with pytest.warns(RuntimeWarning, match="bbc in 'x.safetensors' has no checksum, though others have"):
        assert set(gdsdata.load(path, verify=True)) == {"aaa", "bbc"}


@pytest.mark.filterwarnings("ignore:.*is read by torch.load", "ignore:Validating sparse tensor")
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["sparse", "called deflated"])
def test_verify_compares_checksums_of_files_that_only_torch_can_read(tmp_path, method):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(50.0), "s": torch.eye(3).to_sparse()}, path)
    assert gdsdata.load(path, verify=True)["a"].sum() == 1225
    data = bytearray(path.read_bytes())
    if method == zipfile.ZIP_STORED:
        data[data.index(struct.pack("<f", 49.0))] ^= 1
    else:  # torch gives whatever was in memory
        data[data.rindex(b"PK\1\2", 0, data.rindex(b"x/data/0")) + 10] = method
    path.write_bytes(data)
    for where in ({}, {"only": ["a"]}, {"into": {"a": torch.zeros(50)}, "strict": False}):
        with pytest.raises(CorruptData, match="x.pt': x/data/[0-9] is damaged"):
            gdsdata.load(path, verify=True, **where)


@pytest.mark.parametrize(
    "claim",
    [b"r\xff\xff\xff\x0f", b"p268435455\n", b"B\xff\xff\xff\xff", b"\x8e" + struct.pack("<Q", 2**32)],
    ids=["memo", "memo-in-text", "bytes", "many-bytes"],
)
@pytest.mark.parametrize("before", [b"", b"X\x02\0\0\0r.", b"K.M..J....G........", b"F1.\n", b"N" * 3000])
def test_a_pickle_that_claims_gigabytes_is_given_none(claim, before):
    pickled = b"\x80\x02(" + before + b"N" + claim + b"l."
    limits = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 512 * MIB, limits[1]))
    try:
        with pytest.raises(NotPlain, match="it speaks of more than it can have"):
            storages_of(pickled)
        with pytest.raises(Unusual) as caught:
            unpickle_plain(pickled, None, None, None)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert not isinstance(caught.value.__cause__, MemoryError)


def test_a_pickle_that_names_many_things_is_looked_through_soon():
    named = b"".join(b"cm\nn%d\n0" % i for i in range(100_000))
    began_s = time.process_time()
    assert storages_of(b"\x80\x02" + named + b"N.") == ([], 0)
    assert time.process_time() - began_s < 2.5  # it takes 0.3 s; with a class for each, it took 7 s


@pytest.mark.parametrize("protocol", range(6))
def test_no_pickle_of_a_picklers_claims_too_much(protocol):
    value = [0, -1, 2**40, 2**3000, 1.5, None, True, b"bytes" * 100, "r" * 300]
    value += ["é", bytearray(9), (1, 2, 3, 4), {1}, Unusual]
    assert not pickle_claims_too_much(pickle.dumps([value, value, [[i] for i in range(70_000)]], protocol))


def test_a_file_that_is_not_there_says_so(tmp_path):
    for name in ("x.pt", "x.safetensors", "x.safetensors.index.json"):
        with pytest.raises(FileNotFoundError):
            gdsdata.load(tmp_path / name)


def test_a_file_that_the_system_refuses_is_an_io_error_with_its_path(tmp_path):
    long = "x" * 300
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": long}}))
    index = "x.safetensors.index.json"
    for path, words in ((tmp_path, f"is a folder. Give .* as '.*{index}'"), (tmp_path / index, "File name too long")):
        with pytest.raises(IoError, match=words) as caught:
            gdsdata.load(path)
        assert caught.value.path == str(tmp_path if path == tmp_path else tmp_path / long)


# ------------------------------------------------------------------------------------------------ safetensors

SAFE_DTYPES = [dtype for dtype in DTYPES if dtype not in (torch.complex128,)]


@pytest.mark.parametrize("device", DEVICES)
def test_safetensors_come_as_they_were_saved(tmp_path, device):
    state = {str(dtype): values(dtype, 5, 3) for dtype in SAFE_DTYPES}
    state |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(1.5), "long": torch.randn(MIB)}
    save_file(state, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = gdsdata.load(tmp_path / "x.safetensors", device)
    assert found.keys() == state.keys()
    assert_same(found, {name: state[name].to(device) for name in found}, device)
    into = {name: torch.zeros_like(one, device=device) for name, one in state.items()}
    gdsdata.load(tmp_path / "x.safetensors", into=into)
    assert_same(into, {name: one.to(device) for name, one in state.items()}, device)


def test_shards_come_together_by_their_index(tmp_path):
    shards = {f"model-{i}.safetensors": {f"{i}.{j}": torch.randn(100 + i, j) for j in range(4)} for i in range(3)}
    for name, state in shards.items():
        save_file(state, tmp_path / name)
    weight_map = {key: name for name, state in shards.items() for key in state}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    found = gdsdata.load(index)
    assert list(found) == list(weight_map)
    assert_same(found, {key: one for state in shards.values() for key, one in state.items()})
    (tmp_path / "model-1.safetensors").unlink()
    assert list(gdsdata.load(tmp_path / "model-2.safetensors", only=["2.3"])) == ["2.3"]
    with pytest.raises(FileNotFoundError):
        gdsdata.load(index)
    names = [json.dumps({"weight_map": {"a": name}}) for name in ("../x.safetensors", "..", ".", "", "\0", "\ud800", 3)]
    for bad in ("[]", "{", *names):
        index.write_text(bad)
        with pytest.raises(CorruptData, match="is no index of safetensors files"):
            gdsdata.load(index)


def test_an_index_that_names_a_tensor_twice_is_refused(tmp_path):
    for i in range(2):
        gdsdata.save({"a": torch.full((2,), i)}, tmp_path / f"{i}.safetensors")
    index = tmp_path / "x.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "0.safetensors", "a": "1.safetensors"}}')
    with pytest.raises(CorruptData, match="the name 'a' comes twice"):
        gdsdata.load(index)


def header_file(path, header, data_bytes, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data_bytes))


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data_bytes", "words"),
    [
        ({"a": GOOD}, 7, "tensors end at"),
        ({"a": GOOD}, 9, "tensors end at"),
        ({"a": GOOD, "b": GOOD}, 8, "does not begin where the one before ends"),
        ({"a": {**GOOD, "data_offsets": [4, 12]}}, 12, "does not begin where the one before ends"),
        ({"a": {**GOOD, "shape": [3]}}, 8, "has 8 bytes"),
        ({"a": {**GOOD, "shape": [-2]}}, 8, "a size or an offset that is none"),
        ({"a": {**GOOD, "shape": [2.0]}}, 8, "a size or an offset that is none"),
        ({"a": {**GOOD, "dtype": "F99"}}, 8, "which torch does not have"),
        ({"a": {**GOOD, "shape": [True, 2]}}, 8, "a size or an offset that is none"),
        ({"a": {**GOOD, "shape": [0, 2**63], "data_offsets": [0, 0]}}, 0, "a size or an offset that is none"),
        ({"a": {**GOOD, "shape": [0, 2**40, 2**40], "data_offsets": [0, 0]}}, 0, "is absurd"),
        ({"a": {**GOOD, "shape": [1] * 1_000_000}}, 4, "has 1000000 axes, more than 64"),
        ({"a": {"dtype": "F32"}}, 8, "not one of safetensors"),
        ({"a": 3}, 8, "not one of safetensors"),
        (b"{not json", 8, "not one of safetensors"),
        (b'{"a": ' + b"[" * 100_000, 8, "not one of safetensors"),
        (b"[]", 8, "does not begin as a safetensors file"),
        ({"__metadata__": {safetensors_file.CHECKSUMS: '{"a": "x"}'}, "a": GOOD}, 8, "a checksum that is none"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, data_bytes, words):
    header_file(tmp_path / "x.safetensors", header, data_bytes)
    with pytest.raises(CorruptData, match=words) as caught:
        gdsdata.load(tmp_path / "x.safetensors")
    assert caught.value.path == str(tmp_path / "x.safetensors")


@pytest.mark.parametrize("length", [99_000_000, 100_000_001, 2**64 - 1])
def test_a_header_longer_than_its_file_is_refused_before_it_is_read(tmp_path, length):
    header_file(tmp_path / "x.safetensors", {"a": GOOD}, 8, length=length)
    with pytest.raises(CorruptData, match=rf"says that its header has {length}, at offset 0, and the most is \d\d:"):
        gdsdata.load(tmp_path / "x.safetensors")


def test_checksums_in_a_safetensors_header_are_compared(tmp_path):
    path = tmp_path / "x.safetensors"
    checksums = {safetensors_file.CHECKSUMS: json.dumps({"a": zlib.crc32(bytes(8))})}
    header_file(path, {"__metadata__": checksums, "a": GOOD}, 8)
    assert gdsdata.load(path, verify=True)["a"].sum() == 0
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(CorruptData, match="a in .* has the checksum"):
        gdsdata.load(path, verify=True)


def test_a_cold_file_is_read_past_the_page_cache(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.randn(2 * MIB)}, path)
    require_direct(path)
    assert drop_cache(path)
    options = EngineOptions(workers=2, queue_depth=9)
    counted = shared_engine(options, torch.device("cpu"))
    gdsdata.load(path, options=options)
    assert counted.statistics()["bytes"]["direct"] > 7 * MIB


def test_a_cold_load_leaves_no_pages_that_would_keep_large_folios_away(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({str(i): torch.randn(MIB // 4) for i in range(30)}, path)
    require_direct(path)
    assert drop_cache(path)
    gdsdata.load(path)
    assert resident_pages(path) < 20  # its beginning is read, and nothing beside a tensor


def test_a_state_is_saved_while_another_thread_imports_dtensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", types.ModuleType("torch.distributed.tensor"))
    gdsdata.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    assert_same(gdsdata.load(tmp_path / "a.pt", into={"a": torch.zeros(3)}), {"a": torch.ones(3)})
    with gdsdata.AsyncCheckpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"a": torch.ones(3)}).result()

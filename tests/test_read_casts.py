"""Loads that cast float32, float16 and bfloat16 on the CPU: the engine does it while it reads."""

import itertools

import numpy as np
import pytest
import torch
from helpers import drop_cache
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from object_server import serving
from safetensors.torch import save_file

import gdsdata
from gdsdata import EngineOptions
from gdsdata.checkpoint import casts, tensor_reader
from gdsdata.errors import CorruptData, IoError

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
PAIRS = list(itertools.permutations(FLOATS, 2))
ENDINGS = [".pt", ".safetensors"]
some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def any_values(dtype, count, seed):
    """Return numbers of every kind, also NaNs, infinities and subnormal ones."""
    bits = np.random.default_rng(seed).integers(0, 1 << (8 * dtype.itemsize), count, f"u{dtype.itemsize}")
    return torch.from_numpy(bits).view(dtype)


def assert_cast(found, stored, wanted):
    """Check values, of which a NaN may be any NaN."""
    expected = stored.to(wanted)
    is_nan = expected.isnan()
    assert found.dtype == wanted and found.shape == stored.shape and torch.equal(found.isnan(), is_nan)
    bits = torch.int32 if wanted == torch.float32 else torch.int16
    assert torch.equal(found[~is_nan].view(bits), expected[~is_nan].view(bits))


@pytest.fixture
def own_bytes(monkeypatch):
    """The memory that loads had for tensors in the dtype of the file, reader by reader."""
    found, run, tensors = [], tensor_reader.TensorReader.run, tensor_reader.TensorReader.tensors

    def ended(self):
        found.append(self.own_bytes)
        run(self)

    def made(self, wanted, device):
        found.append(sum(one.size_bytes for one in wanted.values()))
        return tensors(self, wanted, device)

    monkeypatch.setattr(tensor_reader.TensorReader, "run", ended)
    monkeypatch.setattr(tensor_reader.TensorReader, "tensors", made)
    return found


@some
@given(
    pair=st.sampled_from(PAIRS),
    sizes=st.lists(st.one_of(st.integers(0, 300), st.integers(100_000, 1_100_000)), min_size=1, max_size=6),
    ending=st.sampled_from(ENDINGS),
    round_bytes=st.sampled_from([1, 300_000, 1 << 30]),
    direct=st.sampled_from(["auto", "always", "never"]),
    is_cached=st.booleans(),
    is_odd=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_of_any_bits_are_those_that_torch_casts(
    tmp_path, monkeypatch, pair, sizes, ending, round_bytes, direct, is_cached, is_odd, seed
):
    stored, wanted = pair
    state = {f"{i}": any_values(stored, size, seed + i) for i, size in enumerate(sizes)}
    state["square"] = any_values(stored, 210, seed).view(2, 105)
    state["number"] = torch.tensor(1.5, dtype=stored)
    path = tmp_path / f"x{ending}"
    if ending == ".pt":
        torch.save(state, path)
    else:
        save_file(state | {"a": torch.ones(3 if is_odd else 4, dtype=torch.uint8)}, path)
    if not is_cached:
        drop_cache(path)
    monkeypatch.setattr(casts, "ROUND_BYTES", round_bytes)
    found = gdsdata.load(path, dtype=wanted, options=EngineOptions(direct=direct))
    for name, one in state.items():
        assert_cast(found[name], one, wanted)


@pytest.mark.parametrize(("stored", "wanted"), [pair for pair in PAIRS if torch.float32 != pair[0]])
def test_each_number_of_two_bytes_is_cast_as_torch_casts_it(tmp_path, stored, wanted):
    numbers = torch.arange(1 << 16).to(torch.uint16).view(stored)
    save_file({"x": numbers}, tmp_path / "x.safetensors")
    assert_cast(gdsdata.load(tmp_path / "x.safetensors", dtype=wanted)["x"], numbers, wanted)


@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16])
def test_floats_beside_each_middle_of_two_numbers_are_rounded_as_torch_rounds_them(tmp_path, wanted):
    numbers = torch.arange(1 << 16).to(torch.uint16).view(wanted).float()
    numbers = numbers[numbers.isfinite()].sort().values
    middles = torch.cat([(numbers[1:] / 2 + numbers[:-1] / 2), numbers, torch.tensor([65519.0, 65520.0, 3.4e38])])
    bits = middles.view(torch.int32)
    state = {"x": torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)}
    save_file(state, tmp_path / "x.safetensors")
    assert_cast(gdsdata.load(tmp_path / "x.safetensors", dtype=wanted)["x"], state["x"], wanted)


def test_subnormal_numbers_remain_where_torch_takes_them_for_zero(tmp_path):
    numbers = torch.arange(1, 1024).to(torch.uint16).view(torch.float16)  # all of them
    save_file({"x": numbers, "y": numbers.float()}, tmp_path / "x.safetensors")
    assert torch.set_flush_denormal(True)
    try:
        up = gdsdata.load(tmp_path / "x.safetensors", dtype=torch.float32)
        down = gdsdata.load(tmp_path / "x.safetensors", dtype=torch.float16)
    finally:
        torch.set_flush_denormal(False)
    assert_cast(up["x"], numbers, torch.float32)
    assert_cast(down["y"], numbers.float(), torch.float16)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_no_tensor_is_in_memory_in_the_dtype_of_the_file(tmp_path, own_bytes, ending, pair):
    state = {str(i): any_values(pair[0], 5000, i).view(50, 100) for i in range(20)}
    gdsdata.save(state, tmp_path / f"x{ending}")
    found = gdsdata.load(tmp_path / f"x{ending}", dtype=pair[1])
    into = {name: torch.empty(50, 100, dtype=pair[1]) for name in state}
    gdsdata.load(tmp_path / f"x{ending}", into=into, dtype=pair[1])
    for name, one in state.items():
        assert_cast(found[name], one, pair[1])
        assert_cast(into[name], one, pair[1])
    assert len(own_bytes) > 2 and not any(own_bytes)


def test_tensors_that_the_engine_cannot_cast_are_cast_by_torch(tmp_path):
    base = any_values(torch.float32, 60_000, 1)
    state = {
        "all": base,
        "half": base[30_000:],
        "columns": base.view(200, 300)[:, 7:90],
        "transposed": any_values(torch.float32, 6000, 2).view(20, 300).t(),
        "double": torch.rand(9, dtype=torch.float64),
        "whole": torch.arange(7),
        "contiguous": any_values(torch.float32, 4000, 3),
    }
    torch.save(state, tmp_path / "x.pt")
    found = gdsdata.load(tmp_path / "x.pt", dtype=torch.bfloat16)
    strided = {name: torch.zeros(2 * one.numel(), dtype=torch.bfloat16)[::2] for name, one in state.items()}
    into = {name: strided[name].view(one.shape) for name, one in state.items() if one.is_floating_point()}
    gdsdata.load(tmp_path / "x.pt", into=into, only=into.keys(), dtype=torch.bfloat16)
    assert torch.equal(found.pop("whole"), state.pop("whole"))
    for name, one in state.items():
        assert_cast(found[name], one, torch.bfloat16)
        assert_cast(into[name], one, torch.bfloat16)


def test_targets_of_a_cast_may_share_memory(tmp_path):
    state = {"a": torch.zeros(5000), "b": torch.ones(5000)}
    gdsdata.save(state, tmp_path / "x.safetensors")
    memory = torch.zeros(5000, dtype=torch.bfloat16)
    with pytest.warns(RuntimeWarning, match="a and b share memory here"):
        gdsdata.load(tmp_path / "x.safetensors", into={"a": memory, "b": memory}, dtype=torch.bfloat16)
    assert torch.equal(memory, torch.ones(5000, dtype=torch.bfloat16))


@pytest.mark.parametrize("gap", [0, 1000, 3000])
def test_targets_anywhere_in_one_memory_get_their_own_values(tmp_path, gap):
    state = {"a": any_values(torch.float32, 1000, 1), "b": any_values(torch.float32, 1000, 2)}
    save_file(state, tmp_path / "x.safetensors")
    memory = torch.full((2000 + gap,), 7, dtype=torch.bfloat16)  # with 1000: as far apart as in the file
    into = {"a": memory[:1000], "b": memory[1000 + gap :]}
    gdsdata.load(tmp_path / "x.safetensors", into=into, dtype=torch.bfloat16, options=EngineOptions(direct="always"))
    for name, one in state.items():
        assert_cast(into[name], one, torch.bfloat16)
    assert (memory[1000 : 1000 + gap] == 7).all()


def test_tied_tensors_are_one_tensor_after_the_cast(tmp_path, own_bytes):
    weight = any_values(torch.float32, 3000, 1)
    torch.save({"a": weight, "b": weight}, tmp_path / "x.pt")
    found = gdsdata.load(tmp_path / "x.pt", dtype=torch.bfloat16)
    assert found["a"] is found["b"] and not any(own_bytes)
    assert_cast(found["a"], weight, torch.bfloat16)


def test_checksums_are_of_the_bytes_in_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    gdsdata.save({"a": torch.zeros(1000), "b": torch.zeros(1000)}, path)
    assert gdsdata.load(path, dtype=torch.bfloat16, verify=True)["b"].dtype == torch.bfloat16
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1  # the cast drops this bit
    path.write_bytes(content)
    with pytest.raises(CorruptData, match="b in .* has the checksum"):
        gdsdata.load(path, dtype=torch.bfloat16, verify=True)


@pytest.mark.parametrize("faults", ["seed=1,shorten=0.7", "seed=1,late=1", "seed=3,interrupt=0.5"])
def test_reads_that_come_in_parts_cut_no_value(tmp_path, faults):
    state = {"a": any_values(torch.float32, 700_001, 1), "b": any_values(torch.float32, 33, 2)}
    gdsdata.save(state, tmp_path / "x.safetensors")
    for direct in ["always", "never"]:
        options = EngineOptions(direct=direct, faults=faults)
        found = gdsdata.load(tmp_path / "x.safetensors", dtype=torch.bfloat16, options=options)
        for name, one in state.items():
            assert_cast(found[name], one, torch.bfloat16)


def test_a_read_that_fails_leaves_no_tensors(tmp_path):
    gdsdata.save({"a": torch.rand(100_000)}, tmp_path / "x.safetensors")
    failing = EngineOptions(direct="always", faults="seed=1,fail=1")
    with pytest.raises(IoError):
        gdsdata.load(tmp_path / "x.safetensors", dtype=torch.bfloat16, options=failing)
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:-100])
    with pytest.raises(CorruptData):
        gdsdata.load(tmp_path / "x.safetensors", dtype=torch.bfloat16)


@pytest.mark.parametrize("pair", PAIRS)
def test_objects_are_cast_as_they_arrive(tmp_path, monkeypatch, own_bytes, pair):
    state = {str(i): any_values(pair[0], 300_000 + i, i) for i in range(4)}
    save_file(state | {"a": torch.ones(3, dtype=torch.uint8)}, tmp_path / "x.safetensors")
    with serving(monkeypatch) as server:
        server.content["x.safetensors"] = (tmp_path / "x.safetensors").read_bytes()
        found = gdsdata.load(server.url("x.safetensors"), dtype=pair[1])
    for name, one in state.items():
        assert_cast(found[name], one, pair[1])
    assert sum(own_bytes) <= 3

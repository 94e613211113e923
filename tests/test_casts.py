"""Loads with another dtype: in rounds, so that few tensors are in memory in the file's dtype."""

import copy
import resource
import signal
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_checkpoint import DEVICES

import gdsdata
from gdsdata import EngineOptions, progress_bars
from gdsdata.checkpoint import casts, tensor_reader
from gdsdata.errors import CorruptData, IoError

ENDINGS = [".pt", ".safetensors"]
CAST_BY_ENGINE_AND_TORCH = [torch.float16, torch.float64]  # from float32, on the CPU
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool]
some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def tensors(count: int, numbers: int = 1000) -> dict[str, torch.Tensor]:
    return {f"{i:03}": torch.arange(numbers, dtype=torch.float32) + i for i in range(count)}


@pytest.fixture
def live_bytes(monkeypatch):
    """The bytes of tensors that loads have read and not freed, when each round begins."""
    alive, found = [], []
    read = tensor_reader.TensorReader.tensors

    def noted(self, wanted, device):
        made = read(self, wanted, device)
        alive.extend((weakref.ref(one), one.untyped_storage().nbytes()) for one in made.values())
        found.append(sum(size_bytes for one, size_bytes in alive if one() is not None))
        return made

    monkeypatch.setattr(tensor_reader.TensorReader, "tensors", noted)
    return found


@some
@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=12),
    wanted=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    ending=st.sampled_from(ENDINGS),
    round_bytes=st.sampled_from([1, 100, 4000, 1 << 30]),
    verify=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rounds_of_any_length_give_the_values_that_torch_casts(
    tmp_path, monkeypatch, dtypes, wanted, ending, round_bytes, verify, seed
):
    chance = torch.Generator().manual_seed(seed)
    state = {
        str(i): (torch.rand(int(torch.randint(60, (1,), generator=chance)), 7, generator=chance) * 100).to(dtype)
        for i, dtype in enumerate(dtypes)
    }
    gdsdata.save(state, tmp_path / f"x{ending}")
    monkeypatch.setattr(casts, "ROUND_BYTES", round_bytes)
    found = gdsdata.load(tmp_path / f"x{ending}", dtype=wanted, verify=verify)
    assert found.keys() == state.keys()
    for name, one in state.items():
        expected = one.to(wanted) if one.is_floating_point() else one
        assert found[name].dtype == expected.dtype and torch.equal(found[name], expected), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_views_of_a_storage_are_cast_in_one_round_and_tied_ones_once(tmp_path, monkeypatch, live_bytes, dtype):
    base = torch.arange(6000.0)
    state = {"a": base[:3000], "b": base[3000:], "again": base[:3000], "c": torch.ones(5)}
    torch.save(state, tmp_path / "x.pt")
    monkeypatch.setattr(casts, "ROUND_BYTES", 1)
    found = gdsdata.load(tmp_path / "x.pt", dtype=dtype, verify=True)
    assert all(torch.equal(found[name], one.to(dtype)) for name, one in state.items())
    assert found["a"] is found["again"]
    assert len(live_bytes) == (2 if dtype == torch.float16 else 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ending", ENDINGS)
def test_few_tensors_are_in_memory_in_the_dtype_of_the_file(tmp_path, monkeypatch, live_bytes, ending, device):
    gdsdata.save(tensors(40), tmp_path / f"x{ending}")
    monkeypatch.setattr(casts, "ROUND_BYTES", 7999)
    found = gdsdata.load(tmp_path / f"x{ending}", device, dtype=torch.float64)
    assert all(torch.equal(found[name].cpu(), one.double()) for name, one in tensors(40).items())
    assert len(live_bytes) == 40 and max(live_bytes) == 2 * 4000


def test_a_round_counts_the_gaps_that_are_read_with_the_rows_of_views(tmp_path, monkeypatch, live_bytes):
    state = {f"{i:02}": torch.rand(1000, 10)[:, i : i + 1] for i in range(10)}
    torch.save(state, tmp_path / "x.pt")
    monkeypatch.setattr(casts, "ROUND_BYTES", 50_000)
    found = gdsdata.load(tmp_path / "x.pt", dtype=torch.float64)
    assert all(torch.equal(found[name], one.double()) for name, one in state.items())
    assert len(live_bytes) == 10 and max(live_bytes) <= 2 * 40_000


def test_views_of_one_storage_are_cast_in_rounds_if_no_checksum_needs_all(tmp_path, monkeypatch, live_bytes):
    base = torch.rand(40_000)
    state = {f"{i:02}": base[1000 * i :][:1000] for i in range(40)}
    torch.save(state, tmp_path / "x.pt")
    monkeypatch.setattr(casts, "ROUND_BYTES", 4000)
    found = gdsdata.load(tmp_path / "x.pt", dtype=torch.float64)
    assert all(torch.equal(found[name], one.double()) for name, one in state.items())
    assert len(live_bytes) == 40 and max(live_bytes) == 2 * 4000


@pytest.mark.parametrize("dtype", CAST_BY_ENGINE_AND_TORCH)
def test_a_progress_bar_knows_all_rounds_from_the_first_one_on(tmp_path, monkeypatch, dtype):
    gdsdata.save(tensors(10), tmp_path / "x.safetensors")
    monkeypatch.setattr(casts, "ROUND_BYTES", 4000)
    bar, totals = progress_bars.Bar("load", None, "B"), []
    add = bar.add
    bar.add = lambda count: (totals.append(bar.total), add(count))
    before = progress_bars._current.set(bar)
    try:
        gdsdata.load(tmp_path / "x.safetensors", dtype=dtype)
    finally:
        progress_bars._current.reset(before)
    assert totals == [40_000] * 10 and bar.done == 40_000


def test_a_mapped_file_leaves_a_limited_address_space_to_the_tensors(tmp_path, monkeypatch):
    path, numbers, mib = tmp_path / "x.safetensors", 4 << 20, 1 << 20
    gdsdata.save(tensors(12, numbers), path)  # 192 MiB
    path.read_bytes()  # into the page cache, from which a mapped file is copied
    monkeypatch.setattr(casts, "ROUND_BYTES", 4 * numbers)
    gdsdata.load(path, only=["000"], dtype=torch.float64)  # starts the engine
    limits = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 520 * mib, limits[1]))
    try:
        found = gdsdata.load(path, dtype=torch.float64)  # 384 MiB
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert all(torch.equal(found[name], one.double()) for name, one in tensors(12, numbers).items())


def test_an_error_of_one_round_comes_when_the_reads_of_the_next_one_have_ended(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    gdsdata.save(tensors(6), path)
    content = bytearray(path.read_bytes())
    content[-5 * 4000 + 100] ^= 1  # in the second one
    path.write_bytes(content)
    monkeypatch.setattr(casts, "ROUND_BYTES", 1)
    slow = EngineOptions(faults="late=1,late_ms=300", direct="always")
    with pytest.raises(CorruptData, match="001 in .* has the checksum"):
        gdsdata.load(path, dtype=torch.float16, verify=True, options=slow)
    assert not [one for one in threading.enumerate() if one.name == "gdsdata-read"]


@pytest.mark.parametrize("how", [{}, *({"dtype": dtype} for dtype in CAST_BY_ENGINE_AND_TORCH)])
def test_ctrl_c_stops_reads_of_slow_storage_that_other_threads_make(tmp_path, monkeypatch, how):
    path = tmp_path / "x.pt"
    torch.save(tensors(80, 250_000), path)  # 80 MB, in requests of 1 MB
    monkeypatch.setattr(tensor_reader, "_BATCH_BYTES", 32 << 20)
    late = "late=1,late_ms=100"
    slow = EngineOptions(workers=1, queue_depth=1, request_bytes=1 << 20, faults=late, direct="always")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            gdsdata.load(path, options=slow, **how)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 3  # all of it takes 8 s, and a batch 3
    assert not [one for one in threading.enumerate() if one.name == "gdsdata-read"]
    assert torch.equal(gdsdata.load(path, **how)["079"].float(), tensors(80, 250_000)["079"].to(**how).float())


@pytest.mark.parametrize("dtype", CAST_BY_ENGINE_AND_TORCH)
def test_storage_that_fails_in_a_later_round_is_an_error(tmp_path, monkeypatch, dtype):
    gdsdata.save(tensors(6), tmp_path / "x.pt")
    monkeypatch.setattr(casts, "ROUND_BYTES", 1)
    faults = f"fail_at=3,seed={dtype.itemsize}"  # each has its own engine, and so its own count
    failing = EngineOptions(workers=1, faults=faults, direct="always")
    with pytest.raises(IoError):
        gdsdata.load(tmp_path / "x.pt", dtype=dtype, options=failing)


@pytest.mark.parametrize("ending", ENDINGS)
def test_into_casts_in_rounds_too(tmp_path, monkeypatch, ending):
    gdsdata.save(tensors(10), tmp_path / f"x{ending}")
    monkeypatch.setattr(tensor_reader, "MOST_OWN_BYTES", 8000)
    into = {name: torch.zeros(1000, dtype=torch.float64) for name in tensors(10)}
    most, run = [], tensor_reader.TensorReader.run
    monkeypatch.setattr(tensor_reader.TensorReader, "run", lambda self: (most.append(self.own_bytes), run(self))[1])
    gdsdata.load(tmp_path / f"x{ending}", into=into, dtype=torch.float64)
    assert all(torch.equal(into[name], one.double()) for name, one in tensors(10).items())
    assert len(most) == 6 and max(most) == 8000


def test_targets_that_share_memory_are_noticed_across_rounds(tmp_path, monkeypatch):
    gdsdata.save({"a": torch.zeros(1000), "b": torch.ones(1000), "c": torch.ones(9)}, tmp_path / "x.safetensors")
    monkeypatch.setattr(tensor_reader, "MOST_OWN_BYTES", 1)
    memory = torch.zeros(1000, dtype=torch.float64)
    into = {"a": memory, "b": memory, "c": torch.zeros(9, dtype=torch.float64)}
    with pytest.warns(RuntimeWarning, match="a and b share memory here, and .* has other values for each"):
        gdsdata.load(tmp_path / "x.safetensors", into=into, dtype=torch.float64)
    assert memory.sum() == 1000 and into["c"].sum() == 9


def saved_so_that_torch_reads_it(state: dict, path: Path, kind: str) -> None:
    if kind == "sparse":
        state = {**state, "sparse": torch.eye(3).to_sparse()}
    torch.save(state, path, _use_new_zipfile_serialization=kind != "legacy")


@pytest.mark.filterwarnings("ignore:.*is read by torch.load", "ignore:Validating sparse tensor")
@pytest.mark.parametrize("how", [{"dtype": torch.bfloat16}, {"dtype": torch.float32}, {"only": ["*"]}])
@pytest.mark.parametrize("kind", ["plain", "sparse", "legacy"])
def test_parameters_are_plain_tensors_also_in_files_that_torch_reads(tmp_path, kind, how):
    path, weight = tmp_path / "x.pt", torch.nn.Parameter(torch.rand(5))
    saved_so_that_torch_reads_it({"a": weight, "b": torch.rand(3, requires_grad=True)}, path, kind)
    found = gdsdata.load(path, **how)
    for one in (found["a"], found["b"]):
        assert type(one) is torch.Tensor and not one.requires_grad and one.grad_fn is None
    assert torch.equal(copy.deepcopy(found)["a"], weight.detach().to(found["a"].dtype))


@pytest.mark.filterwarnings("ignore:.*is read by torch.load", "ignore:Validating sparse tensor")
@pytest.mark.parametrize("kind", ["plain", "sparse", "legacy"])
def test_casts_of_tied_weights_stay_tied_also_in_files_that_torch_reads(tmp_path, kind):
    path, weight = tmp_path / "x.pt", torch.arange(5.0)
    tied = {"a": weight, "b": weight.detach(), "c": weight[:4], "d": torch.arange(5.0)}
    saved_so_that_torch_reads_it(tied, path, kind)
    found = gdsdata.load(path, dtype=torch.bfloat16)
    assert found["a"] is found["b"] and all(torch.equal(found[name], one.bfloat16()) for name, one in tied.items())
    assert len({found[name].data_ptr() for name in tied}) == 3


class Pair(NamedTuple):
    weight: torch.Tensor
    step: int


def test_tensors_that_stay_as_they_are_because_they_are_in_other_objects_are_named(tmp_path):
    whole = {"a": torch.ones(3), "nn": torch.nn.Linear(2, 2), "pair": Pair(torch.ones(3), 1), "step": 5}
    torch.save(whole, tmp_path / "x.pt")
    words = "'x.pt' has tensors of other dtypes in nn, pair, which dtype= does not cast"
    with pytest.warns(RuntimeWarning, match=words):
        found = gdsdata.load(tmp_path / "x.pt", dtype=torch.bfloat16, weights_only=False)
    assert found["a"].dtype == torch.bfloat16
    assert found["pair"].weight.dtype == found["nn"].weight.dtype == torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for how in ({"dtype": torch.float32}, {"dtype": torch.bfloat16, "only": ["a", "step"]}, {}):
            gdsdata.load(tmp_path / "x.pt", weights_only=False, **how)


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_a_negative_view_keeps_its_sign_when_a_tensor_is_filled_with_it(tmp_path, shape):
    view = torch.full(shape, 1 + 3j).conj().imag
    assert view.is_neg() and view.sum() < 0
    torch.save({"a": view}, tmp_path / "x.pt")
    into = {"a": torch.zeros(shape, dtype=torch.float16)}
    gdsdata.load(tmp_path / "x.pt", into=into, dtype=torch.float16)
    assert torch.equal(into["a"], torch.full(shape, -3.0, dtype=torch.float16))

"""States of hundreds of thousands of tensors: what one more tensor costs is counted, not timed."""

import collections
import sys
import threading
import types

import pytest
import torch
from helpers import engine_can_pickle
from hypothesis import given, settings
from hypothesis import strategies as st

import gdsdata
from gdsdata.checkpoint.background.staging import Staged
from gdsdata.checkpoint.torch_zip import pickling, zip_layout
from gdsdata.checkpoint.torch_zip.numbered_records import NumberedRecords

by_the_engine = pytest.mark.skipif(not engine_can_pickle(), reason="Python pickles, because this torch is old")


def state_of(count: int) -> dict:
    """Return the state of a model and its optimizer: four tensors for each of ``count``."""
    model = collections.OrderedDict((f"experts.{i}.weight", torch.full((64,), float(i))) for i in range(count))
    of_each = {
        i: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(8, 8), "exp_avg_sq": torch.ones(8, 8)}
        for i in range(count)
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(count))}]
    return {"model": model, "optimizer": {"state": of_each, "param_groups": groups}, "step": 1}


def calls_in(work) -> int:
    """Return how many functions Python calls in this thread, those of C included."""
    count = 0

    def note(frame: types.FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def calls_per_tensor(work_on) -> float:
    """Return how many calls one more tensor costs. ``work_on`` gets a number of tensors."""
    fewer, more = 1000, 3000
    work_on(fewer)  # what is made once
    return (calls_in(work_on(more)) - calls_in(work_on(fewer))) / (more - fewer)


@by_the_engine
def test_a_save_calls_python_hardly_ever_for_one_more_tensor(tmp_path):
    def saving(count):
        state = state_of(count // 4)
        return lambda: gdsdata.save(state, tmp_path / "x.pt")

    assert calls_per_tensor(saving) < 8


@by_the_engine
def test_a_background_save_hardly_calls_python_more_for_one_more_tensor(tmp_path):
    with gdsdata.AsyncCheckpointer(tmp_path) as checkpointer:

        def saving(count):
            state = state_of(count // 4)
            checkpointer.wait()
            return lambda: checkpointer.save(count, state)

        assert calls_per_tensor(saving) < 8


def test_a_load_calls_python_for_one_more_tensor_no_more_than_this(tmp_path):
    def loading(count):
        gdsdata.save(state_of(count // 4), tmp_path / f"{count}.pt")
        return lambda: gdsdata.load(tmp_path / f"{count}.pt")

    assert calls_per_tensor(loading) < 60


def test_thousands_of_short_tensors_come_back(tmp_path):
    state = state_of(1500)
    state["large"] = [torch.arange(30_000) + i for i in range(3)]
    state["none"] = [torch.empty(0), torch.empty(3, 0)]
    gdsdata.save(state, tmp_path / "x.pt")
    for found in (torch.load(tmp_path / "x.pt"), gdsdata.load(tmp_path / "x.pt", verify=True)):
        assert_equal(found, state)


def assert_equal(found, expected) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("staging_bytes", ["64KiB", "1MiB", "1GiB"])
def test_thousands_of_short_tensors_come_back_through_staging_memory(tmp_path, staging_bytes):
    state = {"state": state_of(500), "large": [torch.arange(30_000) + i for i in range(3)]}
    with gdsdata.AsyncCheckpointer(tmp_path, staging_bytes=staging_bytes) as checkpointer:
        (file,) = (tmp_path / "step-1").glob("*.pt") if checkpointer.save(1, state).result() else ()
        assert_equal(torch.load(file), state)
        assert_equal(gdsdata.load(file, verify=True), state)


class Mine:
    def __init__(self, value):
        self.value = value


torch.serialization.add_safe_globals([Mine])


def test_nothing_that_changes_after_a_save_has_returned_reaches_the_file(tmp_path, monkeypatch):
    opened = threading.Event()
    monkeypatch.setattr(Staged, "wait", lambda staged: opened.wait(60))  # nothing is written before
    inner, mine = {"lr": 0.5, "betas": [1, 2]}, Mine([1])
    tensor, replaced, grown = torch.ones(3), torch.ones(3), torch.ones(3)
    state = {"inner": inner, "mine": mine, "tensors": [tensor, replaced, grown], "step": 1}
    with gdsdata.AsyncCheckpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, {"state": state})
        inner["lr"], state["step"], state["new"], mine.value = 0.25, 2, "new", [2]
        inner["betas"].append(3)
        tensor.fill_(2).requires_grad_()
        replaced.data = torch.zeros(5)
        grown.resize_(2000).fill_(7)
        state["tensors"].append(torch.ones(1))
        opened.set()
        handle.result()
        (file,) = (tmp_path / "step-1").glob("*.pt")
    found = torch.load(file)["state"]
    assert found["mine"].value == [1]
    assert not found["tensors"][0].requires_grad
    del found["mine"]
    expected = {"inner": {"lr": 0.5, "betas": [1, 2]}, "tensors": [torch.ones(3)] * 3, "step": 1}
    assert_equal(found, expected)


def test_an_unchanged_state_is_saved_again_as_it_was(tmp_path):
    state = state_of(100)
    with gdsdata.AsyncCheckpointer(tmp_path) as checkpointer:
        contents = []
        for step in (1, 2):
            checkpointer.save(step, state).result()
            contents.append(next((tmp_path / f"step-{step}").glob("*.pt")).read_bytes())
    assert contents[0] == contents[1]


@by_the_engine
def test_the_engine_alone_pickles_what_is_saved_in_the_background(tmp_path, monkeypatch):
    monkeypatch.setattr(pickling, "pickle_by_python", lambda value: pytest.fail("Python's pickler was asked"))
    with gdsdata.AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {**state_of(5), "mine": Mine({1, 2})}).result()


# ------------------------------------------------------------------------------------------------ zip


@given(
    sizes=st.lists(st.sampled_from([0, 1, 100, 5000, 2**32 - 2, 2**32 - 1, 5 << 30]), max_size=30),
    before=st.integers(0, 1200),
    alignment=st.sampled_from([64, 4096]),
)
@settings(max_examples=60, deadline=None)
def test_many_records_are_described_as_each_alone_is(sizes, before, alignment):
    sizes = [1] * before + sizes
    first = zip_layout.place([("archive/data.pkl", 77, 64)])[0].end
    placed = zip_layout.place(
        [("archive/data.pkl", 77, 64), *((f"archive/data/{i}", size, alignment) for i, size in enumerate(sizes))]
    )[1:]
    columns = torch.tensor(sizes, dtype=torch.int64).numpy(), torch.full((len(sizes),), alignment).numpy()
    records = NumberedRecords("archive/data/", *columns, first)
    assert [records[i] for i in range(len(records))] == placed
    checksums = torch.arange(len(sizes)).numpy().astype("uint32") * 3_000_000
    entries = b"".join(record.entry(int(crc32)) for record, crc32 in zip(placed, checksums, strict=True))
    assert records.entries(checksums) == entries and records.entry_bytes == len(entries)
    short = next((i for i, size in enumerate(sizes) if size > 10_000), len(sizes))
    if short:
        image = torch.zeros(placed[short - 1].end - first, dtype=torch.uint8).numpy()
        expected = bytearray(len(image))
        for record, crc32 in zip(placed[:short], checksums, strict=False):
            header = record.header(int(crc32))
            expected[record.header_offset - first : record.header_offset - first + len(header)] = header
        records.stamp(image, first, 0, short, checksums)
        assert image.tobytes() == bytes(expected)


# ------------------------------------------------------------------------------------------------ dcp


def test_plans_of_dcp_call_python_for_one_more_tensor_no_more_than_this(tmp_path):
    def planning(count):
        planner, state = gdsdata.GDSSavePlanner(), state_of(count // 4)

        def plan():
            planner.set_up_planner(state, None, True)
            planner.create_global_plan([planner.create_local_plan()])

        return plan

    assert calls_per_tensor(planning) < 30

"""case=tensor of the bench: bytes, the table as DeepNVMe's, rows left out, and cleanup."""

import json
import os
import signal
import sys
import time
import types

import pytest
import torch

from gdsdata.bench import cases, settings
from gdsdata.bench import run as bench_run
from gdsdata.bench.cases.tensor.case import DeviceTensorFile, Tensor
from gdsdata.bench.cases.tensor.report import STATES, TensorLayout
from gdsdata.bench.data import made
from gdsdata.bench.data.pieces import random_bytes
from gdsdata.bench.harness import process
from gdsdata.bench.harness.tables import is_ours
from gdsdata.bench.measure import device, system
from gdsdata.bench.peers import registry
from gdsdata.bench.peers.deepnvme import DeepNvme
from gdsdata.bench.peers.gdsdata.tensors import CuFileTensor
from gdsdata.bench.report import layout, progress

pytestmark = pytest.mark.usefixtures("quick_programs")

MIB = 2**20
ROWS = registry.rows("tensor")
GPU_ROWS = registry.rows("tensor", device_name="cuda")
ON_CPU = {peer.key for peer in ROWS if not peer.package}


def small(tmp_path, device_name="cpu", **fields):
    """Return settings for a run of some seconds in this process."""
    chosen = settings.Settings(engine={}, case=cases.TensorSettings())
    chosen.data.folder, chosen.device.name = str(tmp_path / "data"), device_name
    chosen.case.repeats, chosen.case.limit_seconds, chosen.case.loop, chosen.case.size_bytes = 1, 0.02, 2, MIB
    for name, value in fields.items():
        assert hasattr(chosen.case, name)
        setattr(chosen.case, name, value)
    return settings.check(chosen)


def results_in(folder):
    return json.loads((folder / "results.json").read_text())


# ------------------------------------------------------------------------------------------------ whole runs


def paths(row):
    return {path for path, count in row["served_bytes"].items() if count}


def check_results(results, repeats, loop):
    """Check that all rows are verified and timed, and that served bytes and ratios fit the rows."""
    assert results["verified"] is True
    tables = {}
    for row in results["rows"]:
        tables.setdefault((row["data"], row["cache"]), {})[row["key"]] = row
        assert row["latency_s"]["count"] == repeats * loop and row["checked_bytes"] >= 2 * row["tensor_bytes"]
        assert [run["bytes"] for run in row["runs"]] == [loop * row["tensor_bytes"]] * repeats
        if is_ours(row["key"]):
            assert sum(row["served_bytes"].values()) == repeats * loop * row["tensor_bytes"], (
                "the engine counts these bytes"
            )
    for rows in tables.values():
        plain = rows["python"]["gb_per_s"]["median"]
        for row in rows.values():
            assert row["ratio_to_python"] == pytest.approx(row["gb_per_s"]["median"] / plain)
            assert row["ratio_to_limit"] == pytest.approx(row["gb_per_s"]["median"] / row["limit"]["gb_per_s"])
    return tables


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_row_is_verified_timed_and_reported_and_no_file_is_left(tmp_path, capsys):
    chosen = small(tmp_path, repeats=2, size_bytes=3 * MIB, validate=True)
    assert bench_run.main(chosen, tmp_path) == 0, capsys.readouterr().out
    results = results_in(tmp_path)
    tables = check_results(results, repeats=2, loop=2)
    assert set(tables) == {
        ("load CPU tensor", "warm"), ("load CPU tensor", "cold"),
        ("store CPU tensor", "replaced"), ("store CPU tensor", "in_place"),
    }  # fmt: skip
    for (_, cache), rows in tables.items():
        assert ON_CPU - ({"python_direct"} if cache == "warm" else set()) <= set(rows)
        assert paths(rows["gdsdata_direct"]) == {"direct"}
    assert paths(tables["load CPU tensor", "warm"]["gdsdata"]) == {"page_cache"}
    assert paths(tables["load CPU tensor", "cold"]["gdsdata"]) == {"direct"}
    assert os.listdir(tmp_path / "data") == []
    written = (tmp_path / "report.md").read_text()
    assert "## Load and store a tensor of 3 MiB by what moves its bytes" in written
    for state, label in STATES.values():
        assert f"CPU: {state} |" in written and f"## {label}, 3 MiB" in written
    assert "Stores are durable for every row" in written
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_every_row_is_verified_on_the_cpu_and_on_a_gpu(tmp_path):
    assert bench_run.main(small(tmp_path, "cuda", size_bytes=4 * MIB, validate=True), tmp_path) == 0
    results = results_in(tmp_path)
    tables = check_results(results, repeats=1, loop=2)
    found = {(place, state) for place, state in tables}
    assert len(found) == 8 and {kind for kind, _ in found} >= {"load GPU tensor", "store GPU tensor"}
    left_out = " ".join(results["notes"])
    for peer in GPU_ROWS:
        here = peer.key in tables["load GPU tensor", "cold"]
        assert here or f"Row {peer.key} was left out: " in left_out, "each row is there, or named with the reason"
    written = (tmp_path / "report.md").read_text()
    assert "CPU: load, cold" in written and "GPU: store, in place" in written


def test_one_row_runs_in_seconds_and_the_states_asked_for_are_the_only_ones(tmp_path, capsys):
    chosen = small(tmp_path, work=["store"], writes=["replaced"], rows=["gdsdata_engine", "python"])
    assert bench_run.main(chosen, tmp_path) == 0, capsys.readouterr().out
    results = results_in(tmp_path)
    assert set(check_results(results, repeats=1, loop=2)) == {("store CPU tensor", "replaced")}
    assert results["notes"] == [note for note in results["notes"] if "left out" not in note], (
        "no row that is missing was asked for"
    )
    assert os.listdir(tmp_path / "data") == []


WRONG = """
from gdsdata.bench.peers.by_hand.files import Python
from gdsdata.bench.peers.protocols import UnsyncedTensorPeer as Library

class Stale(Python):
    "Gives what it read first, for ever."
    kept = None

    def read(self):
        self.kept = super().read() if self.kept is None else self.kept
        return self.kept

class Short(Library):
    "Leaves out the last byte."

    def store(self, tensor, path):
        with open(path, "r+b" if self.state == "in_place" else "wb") as file:
            file.write(tensor.numpy()[:-1])
"""


@pytest.mark.parametrize(
    "peer, work, said",
    [
        ("Stale", "load", "1,048,576 of 1,048,576 bytes are wrong, the first at 0"),
        ("Short", "store", "the file has 1,048,575 bytes, 1,048,576 were due"),
    ],
)
def test_a_row_with_wrong_bytes_fails_is_not_timed_and_its_files_go(tmp_path, monkeypatch, capsys, peer, work, said):
    (tmp_path / "wrong_tensor.py").write_text(WRONG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    chosen = small(tmp_path, work=[work], rows=[f"wrong_tensor:{peer}"], cache=["warm"], writes=["replaced"])
    assert bench_run.main(chosen, tmp_path) == 1
    assert said in capsys.readouterr().out
    (row,) = results_in(tmp_path)["rows"]
    assert row["gb_per_s"] is None and row["ratio_to_python"] is None
    assert "FAILED" in (tmp_path / "report.md").read_text().split("## ")[1], "the overview names the failure too"
    assert os.listdir(tmp_path / "data") == []


# ------------------------------------------------------------------------------------------------ peers


@pytest.mark.parametrize("state", ["warm", "cold", "replaced", "in_place"])
@pytest.mark.parametrize("peer", [peer for peer in ROWS if peer.key in ON_CPU])
def test_peers_move_all_bytes_in_every_state(tmp_path, peer, state):
    work = "read" if state in ("warm", "cold") else "write"
    if not peer.can(work, state, MIB):
        pytest.skip("not this row's")
    path, expected = str(tmp_path / "tensor.bin"), random_bytes(MIB, seed=1)
    behind = bytes(4096 if state == "in_place" else 0)
    made.write_synced(path, expected.numpy() if work == "read" else bytearray(MIB + len(behind)))
    opened = peer(path, MIB, state, "cpu")
    try:
        if work == "read":
            assert torch.equal(opened.read(), expected)
        else:
            opened.write(expected)
            with open(path, "rb") as file:
                assert file.read() == bytes(expected.numpy()) + behind
    finally:
        opened.close()
    assert os.listdir(tmp_path) == ["tensor.bin"]


class FakeHandle:
    """The interface of deepspeed's handles, over plain files."""

    made, freed, answer = [], 0, 1

    def __init__(self, *arguments):
        self.made.append(arguments)

    def new_cpu_locked_tensor(self, count, like):
        return torch.empty(count, dtype=like.dtype)

    def free_cpu_locked_tensor(self, memory):
        type(self).freed += 1

    def sync_pread(self, memory, path):
        with open(path, "rb") as file:
            file.readinto(memory.numpy())
        return self.answer

    def sync_pwrite(self, memory, path):
        with open(path, "r+b" if os.path.exists(path) else "wb") as file:
            file.write(memory.numpy())
        return self.answer


@pytest.fixture
def fake_deepspeed(monkeypatch):
    """Install a deepspeed.ops.op_builder with one operator that needs no building.

    The real one runs if it is installed.
    """
    monkeypatch.setattr(FakeHandle, "made", [])
    monkeypatch.setattr(FakeHandle, "freed", 0)
    operator = types.SimpleNamespace(aio_handle=FakeHandle)
    builder = types.SimpleNamespace(load=lambda verbose: operator)
    builders = types.ModuleType("deepspeed.ops.op_builder")
    builders.AsyncIOBuilder = lambda: builder
    for name in ("deepspeed", "deepspeed.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["deepspeed"].ops, sys.modules["deepspeed.ops"].op_builder = sys.modules["deepspeed.ops"], builders
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", builders)
    return FakeHandle


def test_deepnvme_gets_the_settings_of_its_readme_and_its_refusals_are_errors(tmp_path, fake_deepspeed, monkeypatch):
    path, expected = str(tmp_path / "tensor.bin"), random_bytes(MIB, seed=2)
    made.write_synced(path, expected.numpy())
    opened = DeepNvme(path, MIB, "replaced", "cpu")
    assert fake_deepspeed.made == [(2**20, 128, True, True, 1)]
    assert "1 MiB, depth 128, 1 thread" in DeepNvme.setting and "fsync" in DeepNvme.setting
    assert torch.equal(opened.read(), expected)
    opened.write(expected + 1)
    assert torch.equal(opened.read(), expected + 1)
    monkeypatch.setattr(fake_deepspeed, "answer", -1)
    with pytest.raises(OSError, match=r"tensor\.bin: DeepNVMe's aio_handle says -1"):
        opened.read()
    with pytest.raises(OSError, match="aio_handle says -1"):
        opened.write(expected)
    opened.close()
    assert fake_deepspeed.freed == 1 and os.listdir(tmp_path) == ["tensor.bin"]


@pytest.mark.parametrize("state", ["replaced", "in_place"])
def test_a_store_is_synced_before_its_name_is_taken(tmp_path, monkeypatch, fake_deepspeed, state):
    path, expected, done = str(tmp_path / "tensor.bin"), random_bytes(MIB, seed=3), []
    made.write_synced(path, expected.numpy())
    opened = DeepNvme(path, MIB, state, "cpu")
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
    monkeypatch.setattr(os, "rename", lambda old, new: (done.append("rename"), rename(old, new)))
    opened.write(expected)
    monkeypatch.setattr(os, "fsync", fsync)
    temporary = f"tensor.bin.{os.getpid()}.tmp"
    assert done == (["tensor.bin"] if state == "in_place" else [temporary, "rename", tmp_path.name])


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["cold", "replaced", "in_place"])
def test_gdsdata_by_cufile_moves_all_bytes(tmp_path, state):
    if why := CuFileTensor.lacks():
        pytest.skip(why)
    path, expected = str(tmp_path / "tensor.bin"), random_bytes(MIB, seed=1)
    made.write_synced(path, expected.numpy())
    opened = CuFileTensor(path, MIB, state, "cuda")
    if state != "cold":
        opened.write(expected.cuda().add_(1))
        expected += 1
    assert torch.equal(opened.read().cpu(), expected) and sum(opened.served().values()) >= MIB
    opened.close()


# ------------------------------------------------------------------------------------------------ rows left out


def case_of(tmp_path, **fields):
    return Tensor(small(tmp_path, **fields), tmp_path, progress.Progress())


def test_missing_packages_are_named_and_only_rows_that_were_asked_for_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "installed", lambda package: False)
    one = case_of(tmp_path)
    source = DeviceTensorFile("read", MIB, str(tmp_path / "x"), "cpu")
    (tmp_path / "x").write_bytes(bytes(MIB))
    keys = one.wanted(source, "cold")
    assert set(keys) == ON_CPU
    assert one.notes == [
        "Row kvikio was left out: the package kvikio is not installed.",
        "Row deepnvme_aio was left out: the package deepspeed is not installed.",
    ]
    asked = case_of(tmp_path, rows=["python"])
    assert asked.wanted(source, "cold") == ["python"] and asked.notes == []


def test_rows_of_a_gpu_are_no_rows_of_the_cpu(tmp_path):
    (tmp_path / "x").write_bytes(bytes(MIB))
    one = case_of(tmp_path)
    of = {}
    for where in ("cpu", "cuda"):
        source = DeviceTensorFile("read", MIB, str(tmp_path / "x"), where)
        of[where] = {peer.key for peer in one.rows_for(source, "cold")}
    assert of["cuda"] == {peer.key for peer in GPU_ROWS}
    assert of["cuda"] - of["cpu"] == {"gdsdata_cufile", "torch_gds", "deepnvme_gds"}


def test_a_row_that_cannot_be_had_is_tried_once_and_left_out_with_what_it_said(tmp_path, monkeypatch):
    """DeepNVMe's row, with a package of its name that has no operators."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise RuntimeError('libaio.h is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    chosen = small(tmp_path, work=["load"], rows=["python", "deepnvme_aio"])
    tried, ask = [], process.RowProcess.send
    monkeypatch.setattr(
        process.RowProcess, "send", lambda self, do, **command: (tried.append(do), ask(self, do, **command))[1]
    )
    assert bench_run.main(chosen, tmp_path) == 0
    results = results_in(tmp_path)
    assert {row["key"] for row in results["rows"]} == {"python"} and tried.count("attempt") == 1
    said = "Row deepnvme_aio was left out: it was tried on a small file, and said RuntimeError: libaio.h is missing."
    assert said in results["notes"] and os.listdir(tmp_path / "data") == []


# ------------------------------------------------------------------------------------------------ its folder, settings


def test_an_error_in_mid_run_leaves_no_file(tmp_path, monkeypatch):
    def broken(self, source, results):
        assert os.path.getsize(source.path) == MIB
        raise KeyboardInterrupt

    monkeypatch.setattr(Tensor, "one_source", broken)
    with pytest.raises(KeyboardInterrupt):
        bench_run.main(small(tmp_path), tmp_path)
    assert os.listdir(tmp_path / "data") == []


def test_a_run_that_gets_sigterm_removes_its_files(tmp_path, monkeypatch):
    def ended(self, source, results):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(Tensor, "one_source", ended)
    with pytest.raises(SystemExit):
        bench_run.main(small(tmp_path), tmp_path)
    assert os.listdir(tmp_path / "data") == []


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"size_bytes": MIB + 4096}, r"case\.size_bytes=1052672: must be a multiple of 1 MiB"),
        ({"size_bytes": 0}, r"case\.size_bytes=0: must be more than 0"),
        ({"loop": 0}, r"case\.loop=0: must be more than 0"),
        ({"work": ["read"]}, r"case\.work=read: use load or store"),
        ({"work": []}, r"case\.work=\[\]: name at least one of load, store"),
        ({"writes": ["new"]}, r"case\.writes=new: use replaced or in_place"),
        ({"cache": ["hot"]}, r"case\.cache=hot: use warm or cold"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, fields, said):
    with pytest.raises(ValueError, match=said):
        small(tmp_path, **fields)


def test_files_of_the_users_own_and_tensors_beyond_memory_are_refused(tmp_path, monkeypatch):
    chosen = small(tmp_path)
    chosen.data.path = "/x"
    with pytest.raises(ValueError, match=r"data\.path=/x: case=tensor makes its files"):
        settings.check(chosen)
    monkeypatch.setattr(system, "available_bytes", lambda: 5 * MIB)
    with pytest.raises(made.DataError, match=r"case\.size_bytes=1048576 takes 6 MiB of memory and there are 5"):
        bench_run.main(small(tmp_path), tmp_path)
    assert not (tmp_path / "data").exists()


def test_quick_takes_a_small_tensor_and_few_iterations():
    chosen = settings.made_small(settings.Settings(engine={}, case=cases.TensorSettings()))
    assert (chosen.case.size_bytes, chosen.case.loop, chosen.case.repeats) == (16 * MIB, 2, 1)


# ------------------------------------------------------------------------------------------------ report


def made_row(key, where, work, cache, rate):
    return {
        "key": key, "name": key.title(), "data": "d", "tensor_device": where, "work": work, "cache": cache,
        "error": None if rate else "why", "gb_per_s": rate and {"median": rate, "min": rate / 2, "max": rate * 2},
        "limit": {"gb_per_s": 10.0, "name": "disk"}, "tensor_bytes": MIB,
    }  # fmt: skip


def test_the_overview_has_every_column_and_says_what_was_not_measured_and_what_failed(tmp_path):
    rows = [
        made_row("python", "cpu", "read", "warm", 2.0),
        made_row("gdsdata", "cpu", "read", "warm", 4.0),
        made_row("gdsdata", "cuda:1", "write", "in_place", 3.0),
        made_row("kvikio", "cuda:1", "write", "in_place", None),
    ]
    results = {"rows": rows, "config": {"case": {"size_bytes": MIB}}}
    laid = TensorLayout(results)
    title, _, lines = laid.tables()[0]
    columns = laid.columns_of(lines)
    labels = [label for label, _ in STATES.values()]
    assert [column.heading for column in columns] == [
        f"{place}: {label}" for place in ("CPU", "GPU") for label in labels
    ]
    assert "1 MiB" in title
    assert [layout.cells(line, columns) for line in lines] == [
        ["Gdsdata", "-", "4", "-", "-", "-", "-", "-", "3"],
        ["Python", "-", "2", "-", "-", "-", "-", "-", "-"],
        ["Kvikio", "-", "-", "-", "-", "-", "-", "-", "FAILED"],
        ["limit of this machine", "-", "10", "-", "-", "-", "-", "-", "10"],
    ]
    laid.plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_devices_are_called_as_readers_call_them():
    assert [device.kind(name) for name in ("cpu", "cuda", "cuda:3")] == ["CPU", "GPU", "GPU"]
    assert DeviceTensorFile("write", MIB, "x", "cuda:3").kind == "store GPU tensor"

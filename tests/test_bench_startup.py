"""case=startup of the bench: its parts and its floor, bytes, failures, refusals; and what a start
imports.
"""

import json
import time

import numpy as np
import pytest
from helpers import run_script

from gdsdata.bench import cases, settings
from gdsdata.bench import run as bench_run
from gdsdata.bench.cases.startup import script, starts
from gdsdata.bench.cases.startup.case import Startup
from gdsdata.bench.cases.startup.report import PARTS
from gdsdata.bench.cases.startup.script import OWN_PARTS
from gdsdata.bench.data import sources
from gdsdata.bench.harness.process import RowFailed

MIB = 2**20


def small(tmp_path, **fields):
    """Settings for a run of few starts, each of which takes as long as importing torch does."""
    chosen = settings.Settings(engine={}, case=cases.StartupSettings())
    chosen.data.folder, chosen.data.size_bytes = str(tmp_path / "data"), MIB
    chosen.data.seq_len = 64
    chosen.case.repeats, chosen.case.cache, chosen.case.state_bytes = 1, ["warm"], [MIB]
    chosen.case.warm_up = 0
    chosen.case.batch_size, chosen.case.workers, chosen.case.rows = 8, [0], ["gdsdata"]
    for name, value in fields.items():
        assert hasattr(chosen.case, name)
        setattr(chosen.case, name, value)
    settings.check(chosen)
    return chosen


def results_in(folder):
    return json.loads((folder / "results.json").read_text())


# ------------------------------------------------------------------------------------------------ whole runs


def test_parts_add_up_to_the_whole_above_a_floor_and_every_byte_is_compared(tmp_path, capsys):
    assert bench_run.main(small(tmp_path), tmp_path) == 0, capsys.readouterr().out
    results = results_in(tmp_path)
    floor, ours = results["rows"]
    assert (floor["key"], ours["key"]) == ("floor", "gdsdata") and results["verified"] is True
    for row in (floor, ours):
        (run,) = row["runs"]
        assert sum(run["parts_s"].values()) == pytest.approx(run["seconds"])
        assert run["seconds"] == pytest.approx(run["to_first_batch_s"] + run["parts_s"]["first_step"])
        assert set(run["parts_s"]) == set(PARTS) - {"context"}
        assert all(seconds >= 0 for seconds in run["parts_s"].values()) and run["parts_s"]["torch"] > 0.1
        assert row["above_floor_s"]["median"] == pytest.approx(run["seconds"] - floor["runs"][0]["seconds"])
    assert sum(floor["runs"][0]["parts_s"][name] for name in OWN_PARTS) < 0.05
    assert floor["own_s"]["median"] < ours["own_s"]["median"] < ours["seconds"]["median"]
    assert floor["checked_bytes"] == 0 and abs(ours["checked_bytes"] - MIB) < 64 * 1024
    assert ours["path"].startswith("page_cache"), "the kernel may take some pages before they are read"
    assert sum(ours["served_bytes"].values()) > 0.9 * MIB, "bytes of the checkpoint count too"
    assert not list((tmp_path / "data").glob("gdsdata-bench-*")), "tokens are kept, checkpoints are not"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_row_warm_and_cold_with_a_checkpoint_and_without(tmp_path, capsys):
    chosen = small(tmp_path, rows=[], cache=["warm", "cold"], state_bytes=[0, MIB], workers=[0, 1], repeats=1)
    assert bench_run.main(chosen, tmp_path) == 0, capsys.readouterr().out
    results = results_in(tmp_path)
    keys = {(row["data"], row["key"]) for row in results["rows"]}
    without = {key for kind, key in keys if kind == "no checkpoint"}
    assert without == {"floor", "gdsdata", "dataloader_0", "dataloader_1"}
    assert {"dataloader_0_mmap"} <= {key for kind, key in keys if kind == "checkpoint of 1 MiB"}
    for row in results["rows"]:
        assert row["verified"] and ("restore" in row["parts_s"]) == (row["data"] == "checkpoint of 1 MiB")
    written = (tmp_path / "report.md").read_text()
    title = "start to first step, no checkpoint, cold cache, on cpu"
    for part in (title, "of the DataLoaders", "| library |", "stay warm"):
        assert part in written
    assert "data:image/png" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_quick_run_takes_less_than_a_minute(tmp_path):
    chosen = settings.Settings(engine={}, case=cases.StartupSettings(), quick=True)
    chosen.data.folder = str(tmp_path / "data")
    started = time.monotonic()
    assert bench_run.main(settings.made_small(settings.check(chosen)), tmp_path) == 0
    assert time.monotonic() - started < 60


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_rows_are_verified_on_a_gpu_and_have_its_context_as_a_part(tmp_path, capsys):
    chosen = small(tmp_path, rows=["gdsdata", "dataloader_0"])
    chosen.device.name = "cuda"
    assert bench_run.main(chosen, tmp_path) == 0, capsys.readouterr().out
    results = results_in(tmp_path)
    assert results["verified"] is True and results["device"]["model"]
    for row in results["rows"]:
        assert row["parts_s"]["context"]["median"] > 0
    assert "on cuda" in (tmp_path / "report.md").read_text()


# ------------------------------------------------------------------------------------------------ failures

WRONG = """
from gdsdata.bench.harness.process import RowFailed
from gdsdata.bench.cases.startup.script import Ours

class Zeros(Ours):
    "Its first batch is none of the file's."

    def first_batch(self):
        return super().first_batch().zero_() - 1

class Forgets(Ours):
    "Does not restore the last tensor."

    def restore(self, model, optimizer):
        super().restore(model, optimizer)
        model[-1].data.zero_()

class Fails(Ours):
    def import_library(self):
        raise RuntimeError("no such library")

class Dies(Ours):
    def import_library(self):
        import os

        os._exit(7)
"""


@pytest.fixture
def wrong_starts(tmp_path, monkeypatch):
    (tmp_path / "wrong_starts.py").write_text(WRONG)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("quick_programs")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Fails", "library: RuntimeError: no such library"),
        ("Dies", "the script ended with 7 before its last part; see rows.log"),
    ],
)
def test_a_script_that_fails_says_in_which_part_and_leaves_its_trace(tmp_path, wrong_starts, name, message):
    with open(tmp_path / "rows.log", "wb") as log:
        key = f"wrong_starts:{name}"
        start = starts.Script(log, key, Startup(small(tmp_path), tmp_path, None).find(key))
        start.send("load", told={"device": "cpu", "workers": [0]})
        with pytest.raises(RowFailed) as failed:
            start.start()
    assert str(failed.value) == message
    assert ("no such library" in (tmp_path / "rows.log").read_text()) == (name == "Fails")


@pytest.mark.slow
def test_wrong_bytes_are_found_in_the_batch_and_in_the_checkpoint(tmp_path, wrong_starts, capsys):
    chosen = small(tmp_path, rows=["wrong_starts:Zeros", "wrong_starts:Forgets"])
    assert bench_run.main(chosen, tmp_path) == 1
    floor, zeros, forgets = results_in(tmp_path)["rows"]
    assert floor["error"] is None and not zeros["verified"] and not forgets["verified"]
    assert zeros["error"].startswith("first batch: 8 of its 8 windows are none of ")
    assert "restore: 1 of " in forgets["error"] and "are not what the checkpoint holds" in forgets["error"]
    assert "FAILED: checkpoint of 1 MiB" in capsys.readouterr().out


def test_one_window_or_one_tensor_that_differs_is_found(tmp_path):
    checked = Startup(small(tmp_path, batch_size=2), tmp_path, None)
    tokens = type("Tokens", (), {"files": ["t.bin"]})
    source = starts.Beginning(tokens, MIB, tensor_bytes=MIB, checksums={"a": 1, "b": 2}, windows={10, 11, 12})
    batch = {"shape": [2, 65], "dtype": "torch.int64", "device": "cpu"}
    right = {"batch": batch, "windows": [10, 12], "restored": {"a": 1, "b": 2}}
    assert checked.check(source, "gdsdata", right) == MIB + 2 * 65 * 2
    for wrong, message in (
        ({"windows": [10, 13]}, "first batch: 1 of its 2 windows are none of t.bin"),
        ({"batch": batch | {"shape": [1, 65]}}, r"\[1, 65\] on cpu, torch.int64 \[2, 65\] on cpu were due"),
        ({"batch": batch | {"device": "cuda"}}, "on cuda, torch.int64"),
        ({"restored": {"a": 1}}, "restore: 1 of 2 tensors are not what the checkpoint holds, the first of them 'b'"),
    ):
        with pytest.raises(RowFailed, match=message):
            checked.check(source, "gdsdata", right | wrong)


@pytest.mark.parametrize(
    ("rows", "formats"),
    [
        (["gdsdata"], ["torch"]),
        (["floor"], []),
        (["dataloader_0_safetensors", "gdsdata"], ["safetensors", "torch"]),
        ([], ["safetensors", "torch"]),
        (["gdsdata.bench.cases.startup.script:LoaderSafetensors"], ["safetensors"]),
    ],
)
def test_a_checkpoint_is_written_in_the_formats_of_the_wanted_rows_alone(tmp_path, rows, formats):
    source = starts.Beginning(tokens=None, state_bytes=MIB)
    assert Startup(small(tmp_path, rows=rows), tmp_path, None).formats(source) == formats


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state_bytes": []}, r"case.state_bytes=\[\]: name at least one"),
        ({"workers": [1, 1]}, r"case.workers=\[1, 1\]: name at least one, and none twice"),
        ({"workers": [-1]}, "case.workers=-1: must be from 0 to 256"),
        ({"batch_size": 10**6}, "too few for a batch of case.batch_size=1000000"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        small(tmp_path, **fields)


def test_an_unknown_row_is_refused_with_those_that_there_are(tmp_path):
    with pytest.raises(ValueError, match="there is no row 'dataloder_0'; there are floor, gdsdata, dataloader_0"):
        bench_run.main(small(tmp_path, rows=["dataloder_0"]), tmp_path)


# ------------------------------------------------------------------------------------------------ what it is made of


def test_the_state_has_about_the_bytes_that_were_asked_for():
    for state_bytes in (2**20, 2**24, 2**30, 2**33):
        count, width = script.layers_of(state_bytes, 1024)
        assert abs(count * width * width * 12 - state_bytes) <= max(width * width * 6, state_bytes * 0.01)
    assert script.layers_of(0, 16) == (1, 16)


def test_windows_are_those_that_both_kinds_of_data_sets_have(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    tokens = sources.describe_tokens([str(path)], "uint16", 64, None, "made")
    assert len(starts.windows_of(tokens, 64)) == len(script.Windows(str(path), 64)) == (1000 - 1) // 64


# ------------------------------------------------------------------------------------------------ what a start imports

# One start serves all kinds: a fork of it reads the first batch of each.
FIRST_BATCHES = """
import os
import sys
import numpy as np
import torch
from pathlib import Path

before = set(sys.modules)
import gdsdata

folder = Path(sys.argv[1])
for kind in sys.argv[2:]:
    if os.fork():
        os.wait()
        continue
    if kind == "npy":
        np.save(folder / "0.npy", np.zeros((8, 4), np.float32))
        data = gdsdata.GDSDataset(folder / "0.npy", 1, device="cpu")
    elif kind == "records":
        np.zeros(4096, np.uint8).tofile(folder / "0.rec")
        data = gdsdata.GDSDataset(folder / "0.rec", 4, gdsdata.formats.Records("u1", (64,)), device="cpu")
    else:
        np.zeros(4096, np.uint16).tofile(folder / "0.bin")
        data = gdsdata.GDSDataset(folder / "0.bin", 4, gdsdata.formats.Tokens("uint16", 64), device="cpu")
    next(iter(data))
    print(*sorted(name for name in sys.modules if name.startswith("gdsdata.")))
    dear = {"hmac", "numpy.ma", "numpy.typing", "pyarrow", "secrets", "torchcodec", "torchvision", "zstandard"}
    print(*sorted(dear & sys.modules.keys() - before))
    for name in [name for name in sys.modules if name.startswith("gdsdata.")]:
        classes = [one for one in vars(sys.modules[name]).values() if isinstance(one, type) and one.__module__ == name]
        generated = [one for one in classes if {"_fields", "__dataclass_fields__"} & vars(one).keys()]
        print(*(f"{name}.{one.__name__}" for one in generated), end=" ")
    print()
    break
"""
NEEDED = {
    *(
        "_engine",
        "errors",
        "lazy",
        "torch_private",
        "user_cache",
        "version",
        "warn",
        "observe",
        "observe.times",
    ),
    *("data", "data.dataset", "data.batch_dataset", "data.arguments", "data.counts", "data.groups", "data.iteration"),
    *("progress_bars", "observe.counted", "io.conversions", "storage.regular"),
    *("data.indexing", "data.loaders", "data.progress", "data.ranks", "data.samples", "whole_numbers"),
    *("data.epoch_dataset", "data.ranked_dataset", "data.shared_rows"),
    *("data.split", "data.batches", "data.batches.reader", "data.batches.ring", "data.batches.settings"),
    "formats.sample",
    *("data.batches.source", "data.order", "data.order.choice", "data.order.epoch", "data.order.permutation"),
    *("formats", "formats.caches", "formats.catalog", "formats.index", "storage", "storage.heads", "storage.urls"),
    *("formats.kept_index", "formats.listing"),
    *("fork_safe", "storage.paths", "values"),
    *("io", "io.device_names", "io.dlpack_types", "io.engine", "io.budget", "io.options", "io.program_end"),
}


# The format of a kind of files, and what a file without a format is recognized by.
MAGICS = {"formats.parsers", "formats.parsers.magics"}
NEEDED_FOR = {
    "npy": {"formats.npy", "formats.registry", *MAGICS},
    "tokens": {"formats.tokens", *MAGICS},
    "records": {"formats.records"},
}
FORMATS = {"npy": "formats.npy.Npy", "tokens": "formats.tokens.Tokens", "records": "formats.records.Records"}
# NamedTuples and dataclasses. Python writes and compiles code for each: 0.1 to 0.3 ms, and for a
# frozen dataclass that is no `Value` 0.4 to 0.7. A plain class takes 0.01. So these are classes
# that programs make or compare.
GENERATED = {
    *("data.groups.Fields", "data.groups.Reading", "data.groups.Sharding", "data.ranks.Share"),
    *("formats.index.Index", "formats.index.SampleIndex", "formats.sample.Sample"),
    "io.options.EngineOptions",
}


def test_a_first_batch_imports_no_format_and_makes_no_class_that_it_does_not_need(tmp_path):
    code, out, error = run_script(FIRST_BATCHES, tmp_path, *FORMATS, timeout_s=60)
    assert code == 0 and error == ""
    found = [set(line.split()) for line in out.splitlines()]
    for kind, modules, others, classes in zip(FORMATS, found[::3], found[1::3], found[2::3], strict=True):
        assert modules == {f"gdsdata.{name}" for name in NEEDED | NEEDED_FOR[kind]}, kind
        assert classes == {f"gdsdata.{name}" for name in GENERATED | {FORMATS[kind]}}, kind
        assert others == set(), kind

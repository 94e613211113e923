"""The bench: its data sets, its measurements, the peers' bytes, and whole runs."""

import dataclasses
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gdsdata
from gdsdata.bench import cases, settings
from gdsdata.bench import run as bench_run
from gdsdata.bench.cases.checkpoint import stock
from gdsdata.bench.data import checkpoints, made, sources
from gdsdata.bench.harness import tables
from gdsdata.bench.measure import device, limits, system
from gdsdata.bench.peers import protocols, registry, safetensors, torch_checkpoints
from gdsdata.bench.peers.by_hand import files, volumes
from gdsdata.bench.peers.gdsdata import batches as our_batches
from gdsdata.bench.peers.gdsdata import checkpoints as our_checkpoints
from gdsdata.io import engine

pytestmark = pytest.mark.usefixtures("quick_programs")

REPOSITORY = Path(__file__).resolve().parents[1]
MIB = 2**20


def bench(*overrides, cwd, timeout=110):
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    # If other programs share the processors, torch's threads spin at each barrier: a step of 134 ms
    # took 1,382 ms beside one busy process on two cores.
    environment["OMP_WAIT_POLICY"] = "passive"
    command = [sys.executable, "-m", "gdsdata.bench", *overrides]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def small(tmp_path, cls=cases.LoaderSettings, **fields):
    """Return settings for a run of a second or two in this process."""
    chosen = settings.made_small(settings.Settings(engine={}, case=cls()))
    chosen.data.folder = str(tmp_path / "data")
    chosen.data.size_bytes = 4 * MIB
    chosen.case.limit_seconds = 0.1
    for name, value in fields.items():
        group, _, field = name.partition("_")
        assert hasattr(getattr(chosen, group), field)
        setattr(getattr(chosen, group), field, value)
    return settings.check(chosen)


def results_in(folder):
    return json.loads((folder / "results.json").read_text())


def on_disk(tmp_path):
    if system.file_system(tmp_path)[0] in ("tmpfs", "ramfs", "overlay"):
        pytest.skip("the temporary folder is not on a disk's file system")


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.mark.slow
def test_quick_run_makes_all_artefacts_and_verifies_bytes(tmp_path):
    out = tmp_path / "out"
    rows = "case.rows=[gdsdata,index_select,read_ring]"
    done = bench("quick=true", rows, f"data.folder={tmp_path}/data", f"hydra.run.dir={out}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"Report: {out / 'report.md'}"
    assert all(line.startswith("gdsdata.bench: ") for line in done.stderr.splitlines()), done.stderr

    results = results_in(out)
    assert results["verified"] is True
    assert {(row["data"], row["dtype"], row["cache"]) for row in results["rows"]} == {
        ("tokens in 1 file, batch 64", "raw", "warm"),
        ("tokens in 1 file, batch 64", "int64", "warm"),
        ("tokens in 1 file, batch 64", "raw", "cold"),
        ("tokens in 1 file, batch 16", "raw", "warm"),
        ("tokens in 1 file, batch 16", "int64", "warm"),
        ("npy in 8 files, batch 16", "float32", "warm"),
        ("npy in 8 files, batch 16", "float32", "cold"),
    }
    for row in results["rows"]:
        assert row["checked_batches"] > 0
        assert row["samples_per_s"]["median"] > 0
        assert row["gb_per_s"]["median"] < 1000
        assert 0 < row["first_batch_ms"]["median"] < 60_000
        assert row["cpu_s_per_gb"]["median"] > 0
        assert row["peak_bytes"] >= 0
        assert row["ratio_to_best_peer"] > 0
    best = [row for row in results["rows"] if row["key"] == row["best_peer"]]
    assert best and all(row["ratio_to_best_peer"] == 1.0 for row in best)
    ours = [row for row in results["rows"] if row["key"] == "gdsdata"]
    assert all(sum(row["served_bytes"].values()) > 0 for row in ours), "each of our rows names the path of its bytes"
    assert results["limits"]["tokens in 1 file, batch 64"]["raw, warm"]["memory_copy"]["gb_per_s"] > 0.5
    assert {"cpu", "cores", "memory_bytes", "kernel"} <= results["machine"].keys()
    assert {"torch", "numpy", "python"} <= results["versions"].keys()

    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    report = (out / "report.md").read_text()
    for part in ("tokens in 1 file, int64, shuffled, warm cache", "torch.index_select", "Limit: memory copy"):
        assert part in report


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_quick_runs_on_a_gpu(tmp_path):
    for name, extra in (("loader", []), ("load", []), ("checkpoint", ["case.work=[save,load]"])):
        out = tmp_path / name
        done = bench(
            "quick=true", f"case={name}", "device=cuda", f"data.folder={tmp_path}/data", f"hydra.run.dir={out}",
            *extra, cwd=tmp_path, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr + (out / "rows.log").read_text()
        results = results_in(out)
        assert results["verified"] is True and results["device"]["model"]
        assert all(row["gb_per_s"]["median"] > 0 for row in results["rows"])
        assert name != "checkpoint" or {row["data"] for row in results["rows"]} == {"save", "load"}
        warm = [ones for found in results["limits"].values() for table, ones in found.items() if "warm" in table]
        assert warm and all(ones["pinned_copy"]["gb_per_s"] > 0.5 for ones in warm)
        assert "pinned copy to the GPU" in (out / "report.md").read_text()


def test_a_run_without_a_standard_output_ends_with_its_report(tmp_path):
    out, run = tmp_path / "out", f"{sys.executable} -m gdsdata.bench"
    overrides = f"case=load quick=true case.rows=[gdsdata] data.folder='{tmp_path}/data' hydra.run.dir='{out}'"
    done = subprocess.run(f"{run} {overrides} >&-", shell=True, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and (out / "report.md").exists(), done.stderr
    done = subprocess.run(f"{run}.compare '{out}' '{out}' >&-", shell=True, capture_output=True, text=True, timeout=60)
    said = "gdsdata.bench.compare: the report could not be written: standard output is closed\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.slow
def test_quick_load_compares_all_bytes_and_says_its_path(tmp_path):
    out = tmp_path / "out"
    done = bench("case=load", "quick=true", f"data.folder={tmp_path}/data", f"hydra.run.dir={out}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(line.startswith("gdsdata.bench: ") for line in done.stderr.splitlines()), done.stderr
    results = results_in(out)
    assert results["verified"] is True and results["case"] == "load"
    about = results["data"]["safetensors"]
    assert (about["loaded_bytes"], about["tensors"]) == (16 * MIB, 4)
    keys = {row["key"] for row in results["rows"]}
    assert {"gdsdata", "torch_load", "torch_load_mmap", "readinto", "readinto_threads"} <= keys
    assert not keys & {"kvikio", "instanttensor", "fastsafetensors"}, "these libraries load to a GPU only"
    if "safetensors" not in keys:
        assert any("safetensors is not installed" in note for note in results["notes"])
    in_memory = system.file_system(tmp_path)[0] in ("tmpfs", "ramfs")
    assert {row["cache"] for row in results["rows"]} == ({"warm"} if in_memory else {"warm", "cold"})
    for row in results["rows"]:
        assert row["checked_bytes"] == 16 * MIB and row["first_s"] > 0
        assert row["gb_per_s"]["median"] > 0 and row["cpu_s_per_gb"]["median"] > 0 and row["path"]
    for row in results["rows"]:
        if tables.is_ours(row["key"]):
            assert sum(row["served_bytes"].values()) == 16 * MIB, "the engine counts one load a run"
    written = (out / "report.md").read_text()
    assert "16 MiB of bf16 in 4 tensors, to cpu, warm cache" in written and "| ms |" in written

    results["device"] = {"name": "cuda", "model": "A GPU", "memory_bytes": 2**37, "driver": "1.2", "cuda": "3.4"}
    written = cases.layout_of(results).page_text(out)
    assert "- Device: cuda, A GPU, 128 GiB, driver 1.2, CUDA 3.4" in written
    assert "4 tensors, to cuda, warm cache" in written and "256 MiB pinned buffer" in written


WRONG_LOAD = """
from gdsdata.bench.peers.by_hand.files import Readinto

class Wrong(Readinto):
    name = "wrong"

    def load(self):
        tensors = super().load()
        tensors[""][3 * 2**20 + 5] ^= 1
        return tensors

class Short(Readinto):
    name = "short"

    def load(self):
        return {name: tensor[:-1] for name, tensor in super().load().items()}
"""


def test_a_wrong_byte_of_a_big_file_fails_the_bench(tmp_path, monkeypatch, capsys):
    (tmp_path / "wrong_load.py").write_text(WRONG_LOAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = ["readinto", "wrong_load:Wrong", "wrong_load:Short"]
    chosen = small(tmp_path, cases.LoadSettings, case_rows=rows, case_cache=["warm"])
    assert bench_run.main(chosen, tmp_path) == 1
    said = capsys.readouterr().out
    assert re.search("FAILED: safetensors, wrong: ValueError: tensor '.+': its bytes are not what the file", said)
    assert "FAILED: safetensors, short: ValueError: tensor '': 4,194,303 bytes came on cpu, 4,194,304 were due" in said
    by_name = {row["name"]: row for row in results_in(tmp_path)["rows"]}
    assert by_name["Python readinto"]["verified"] and by_name["wrong"]["gb_per_s"] is None


@pytest.mark.parametrize("size", [1, 7, 8, 9, 4096, 100_003])
def test_checksum_shows_any_changed_byte_wherever_it_lies_in_memory(size):
    memory = torch.randint(256, (size + 3,), dtype=torch.uint8)
    whole = checkpoints.checksum(memory[3:])
    assert whole == checkpoints.checksum(memory[3:].clone())
    for place in {3, 3 + size // 2, size + 2}:
        memory[place] ^= 1
        assert checkpoints.checksum(memory[3:]) != whole
        memory[place] ^= 1
    cut = size // 8 // 2 * 8
    assert (
        checkpoints.checksum(memory[3 : 3 + cut]) + checkpoints.checksum(memory[3 + cut :], cut // 8)
    ) % 2**64 == whole


@pytest.mark.slow
def test_own_safetensors_file_is_loaded(tmp_path):
    mine = tmp_path / "mine.safetensors"
    header = {"b": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]}, "__metadata__": {"a": "b"}}
    header["a"] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    text = json.dumps(header).encode()
    mine.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(11)))
    found = checkpoints.describe_safetensors(str(mine), "", "test")
    assert found.tensors == {"a": (0, 8), "b": (8, 11)} and found.bytes == 11 and found.dtype == "f32, u8"
    chosen = small(tmp_path, cases.LoadSettings, data_path=str(mine), case_cache=["warm"])
    assert bench_run.main(chosen, tmp_path) == 0
    keys = {row["key"] for row in results_in(tmp_path)["rows"]}
    assert {"gdsdata", "readinto"} <= keys and not keys & {"torch_load", "torch_load_mmap"}

    mine.write_bytes(mine.read_bytes()[:-1])
    with pytest.raises(made.DataError, match="promises 11 bytes of data"):
        checkpoints.describe_safetensors(str(mine), "", "test")
    mine.write_bytes(b"not that at all")
    with pytest.raises(made.DataError, match="no safetensors file"):
        checkpoints.describe_safetensors(str(mine), "", "test")


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_quick_checkpoint_saves_and_loads_every_bit(tmp_path):
    out, size = tmp_path / "out", 16 * MIB
    rows = "case.rows=[gdsdata_pt,gdsdata_safetensors,torch,torch_mmap,safetensors,dcp,dcp_async]"
    done = bench(
        "case=checkpoint", "quick=true", rows, f"case.state_bytes={size}", "case.tensors=40", "case.overwrite=true",
        f"data.folder={tmp_path}/data", f"hydra.run.dir={out}", cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + (out / "rows.log").read_text()
    results = results_in(out)
    assert results["verified"] is True and not os.listdir(tmp_path / "data"), "its files are gone"
    found = {}
    for row in results["rows"]:
        found.setdefault((row["data"], row["cache"]), {})[row["key"]] = row
        assert row["checked_bytes"] == size and row["gb_per_s"]["median"] > 0 and row["cpu_s_per_gb"]["median"] > 0
    savers = {"gdsdata_pt", "gdsdata_safetensors", "torch", "safetensors", "dcp"}
    assert set(found["save", "new"]) == set(found["save", "replaced"]) == savers
    assert set(found["load", "warm"]) == savers | {"torch_mmap"} and set(found["async", "staged"]) == {"dcp_async"}
    assert found["load", "warm"]["safetensors"]["ratio_to_mapped"] == 1.0
    for (kind, _), keyed in found.items():
        for key in keyed.keys() & {"gdsdata_pt", "gdsdata_safetensors"}:
            served_bytes = sum(keyed[key]["served_bytes"].values())
            assert size <= served_bytes < 1.02 * size, "the engine counts one pass a run"
            assert keyed[key]["stated_bytes"] > 0 and kind in ("save", "load")
    stall = found["async", "staged"]["dcp_async"]
    assert stall["first_s"] > 0 and stall["step_before_first_s"] > 0
    assert 0 < stall["seconds"]["median"] < stall["background_s"]["median"]
    assert stall["step_s"]["median"] > 0 and stall["step_beside_s"]["median"] > 0
    assert stall["peak_bytes"] >= size, "staging memory counts"
    assert any(name.startswith("direct_write_") for name in results["limits"]["save"]["bfloat16+float32, new"])
    written = (out / "report.md").read_text()
    for part in (
        "save to a new file: 16 MiB of bfloat16+float32 in 40 tensors, from cpu",
        "save over an older file",
        "load, warm cache: 16 MiB of bfloat16+float32 in 40 tensors, to cpu",
        "stall of an asynchronous save",
        "| x mapped |",
        "files were written by gdsdata DCP (dcp), gdsdata .pt (pt), gdsdata .safetensors (safetensors)",
    ):
        assert part in written


WRONG_CHECKPOINTS = """
import torch
from gdsdata.bench.peers.protocols import AsyncPeer
from gdsdata.bench.peers.safetensors import Checkpoint as Safetensors
from gdsdata.bench.peers.torch_checkpoints import TorchSave

class WrongSave(TorchSave):
    name = "wrong save"
    loads = ""

    def save(self, state, path):
        last = list(state)[-1]
        changed = state[last].clone()
        changed.view(torch.int64)[-1] ^= 1
        super().save(state | {last: changed}, path)

class WrongLoad(Safetensors):
    name = "wrong load"
    saves = ""

    def load(self, into, path):
        super().load(dict(list(into.items())[1:]), path)

class Late(AsyncPeer):
    name = "late"

    def open(self, folder, state):
        self.path = folder + ".pt"

    def save(self, state, step):
        self.state = state

    def wait(self):
        import os
        os.makedirs(self.path[:-3], exist_ok=True)
        torch.save({"model": self.state}, self.path[:-3] + "/late.pt")
        return self.path[:-3]
"""


@pytest.mark.parametrize(
    "work, peer, name, tensor",
    [
        ("save", "WrongSave", "wrong save", "layers.10.weight"),
        ("load", "WrongLoad", "wrong load", "layers.0.weight"),
        ("async", "Late", "late", "layers.0.weight"),
    ],
)
def test_a_wrong_bit_of_a_checkpoint_fails_the_bench(tmp_path, monkeypatch, capsys, work, peer, name, tensor):
    (tmp_path / "wrong_checkpoint.py").write_text(WRONG_CHECKPOINTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    chosen = small(
        tmp_path, cases.CheckpointSettings, case_rows=[f"wrong_checkpoint:{peer}"], case_work=[work],
        case_cache=["warm"], case_tensors=11, case_state_bytes=MIB,
    )  # fmt: skip
    assert bench_run.main(chosen, tmp_path) == 1
    said = f"FAILED: {work}, {name}: ValueError: tensor '{tensor}': not all of its bytes are those that were saved"
    assert said in capsys.readouterr().out
    assert results_in(tmp_path)["rows"][0]["gb_per_s"] is None, "a row that fails has no time"


FRESH = """
from gdsdata.bench.peers.torch_checkpoints import TorchSave

calls = []

class Fresh(TorchSave):
    def save(self, state, path):
        calls.append("save")
        super().save(state, path)

    def load(self, into, path):
        assert "save" not in calls, "this process has saved before"
        super().load(into, path)
"""


def test_the_first_load_and_the_first_save_of_a_process_are_timed(tmp_path, monkeypatch):
    (tmp_path / "fresh_checkpoint.py").write_text(FRESH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    chosen = small(
        tmp_path, cases.CheckpointSettings, case_rows=["fresh_checkpoint:Fresh"], case_work=["save", "load"],
        case_cache=["warm"], case_tensors=11, case_state_bytes=MIB,
    )  # fmt: skip
    assert bench_run.main(chosen, tmp_path) == 0
    assert [row["first_s"] > 0 for row in results_in(tmp_path)["rows"]] == [True, True]


def test_a_state_is_the_same_wherever_it_is_made_and_any_other_bit_shows():
    state = checkpoints.State(3 * MIB + 5, 25, ["bfloat16", "uint8"], 7)
    made, again = state.make("cpu"), dataclasses.replace(state).make("cpu")
    assert sum(tensor.nbytes for tensor in made.values()) == state.bytes == 3 * MIB
    assert len(made) == 25 and {tensor.dtype for tensor in made.values()} == {torch.bfloat16, torch.uint8}
    assert sorted(tensor.nbytes for tensor in made.values())[:2] == [checkpoints.SMALL_BYTES] * 2
    state.check(again)
    for name, tensor in again.items():
        for place in (0, len(tensor) // 2, -1):
            bits = tensor[place].clone()
            tensor.view(torch.uint8)[place * tensor.itemsize] ^= 1
            with pytest.raises(ValueError, match=f"tensor '{name}': not all of its bytes"):
                state.check(again)
            tensor[place] = bits
    with pytest.raises(ValueError, match=r"'layers\.0\.weight': none came"):
        state.check({})
    with pytest.raises(ValueError, match="bytes of torch.int8 came"):
        state.check(made | {"layers.0.weight": made["layers.0.weight"].view(torch.int8)})


def test_tensors_larger_than_the_random_base_are_whole(monkeypatch):
    monkeypatch.setattr(checkpoints, "BASE_WORDS", 1009)
    state = checkpoints.State(100_000, 2, ["int64"], 0)
    made = state.make("cpu")
    state.check(made)
    assert all(int((tensor == 0).sum()) == 0 for tensor in made.values())


def test_bytes_that_the_engines_of_saves_and_loads_move_are_counted(tmp_path):
    peer, state = our_checkpoints.Pt("cpu"), {"a": torch.ones(MIB)}
    peer.save(state, str(tmp_path / "a.pt"))
    assert sum(peer.served().values()) >= 4 * MIB and peer.stated_bytes() > 0
    peer.load(state, str(tmp_path / "a.pt"))
    assert 8 * MIB <= sum(peer.served().values()) < 9 * MIB


def test_engines_of_earlier_work_do_not_count_as_memory_that_a_load_takes(tmp_path):
    earlier = engine.kept_engine(gdsdata.EngineOptions(queue_depth=7), torch.device("cpu"))
    earlier.prepare()
    peer, state = our_checkpoints.Pt("cpu"), {"a": torch.ones(MIB)}
    assert peer.stated_bytes() == 0
    peer.save(state, str(tmp_path / "a.pt"))
    ours = engine.kept_engine(peer.options, torch.device("cpu"))
    assert earlier.bounce_bytes > 0 and peer.stated_bytes() == ours.bounce_bytes


@pytest.mark.parametrize("file_format", ["pt", "safetensors", "dcp"])
def test_an_asynchronous_save_is_read_by_its_formats_library(tmp_path, file_format):
    state = checkpoints.State(MIB, 12, ["float32"], 0)
    made, path = state.make("cpu"), str(tmp_path / "step-2" / f"x.{file_format}")
    os.mkdir(tmp_path / "step-2")
    if file_format == "safetensors":
        safetensors.Checkpoint("cpu").save({f"model.{name}": tensor for name, tensor in made.items()}, path)
    elif file_format == "dcp":  # DCP itself puts it under that key
        torch_checkpoints.TorchDcp("cpu").save(made, path)
    else:
        torch_checkpoints.TorchSave("cpu").save({"model": made}, path)
    state.check(stock.tensors_in(str(tmp_path), state.empty("cpu")))
    with pytest.raises(ValueError, match="no checkpoint that DCP, torch or safetensors read, but nothing"):
        stock.tensors_in(str(tmp_path / "nothing"), state.empty("cpu"))


def test_libraries_that_make_tensors_of_their_own_are_copied_into_those_that_are_there():
    class Library(protocols.LoadPeer):
        key, setting = "library", "its load"

        def load(self):
            return {"a": torch.arange(4), "b": torch.tensor([len(self.source.path)])}

    peer = protocols.borrowed(Library)
    into = {"b": torch.zeros(1, dtype=torch.int64), "a": torch.zeros(4, dtype=torch.int64)}
    targets = dict(into)
    peer("cuda").load(into, "path")
    assert targets["a"].tolist() == [0, 1, 2, 3] and targets["b"].tolist() == [4]
    assert peer.key == "library" and peer.devices == ("cuda",) and peer.loads == "safetensors"


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"written_by": "me"}, r"case\.written_by=me: use gdsdata or stock"),
        ({"work": ["save", "loads"]}, r"case\.work=loads: use save or load or async"),
        ({"work": []}, r"case\.work=\[\]: name at least one of save, load, async"),
        ({"dtypes": ["raw"]}, r"case\.dtypes=raw: use bfloat16 or"),
        ({"state_bytes": MIB}, r"case\.state_bytes=1048576: too few for case\.tensors=300, which take 9830400 or more"),
        ({"tensors": 0}, r"case\.tensors=0: must be more than 0"),
    ],
)
def test_settings_of_a_checkpoint_that_make_no_sense_are_refused(fields, said):
    chosen = settings.Settings(engine={}, case=cases.CheckpointSettings(**fields))
    with pytest.raises(ValueError, match=said):
        settings.check(chosen)


def test_a_checkpoint_is_refused_where_files_are_given_or_the_disk_is_full(tmp_path, monkeypatch):
    chosen = settings.Settings(engine={}, case=cases.CheckpointSettings())
    chosen.data.path = "/x"
    with pytest.raises(ValueError, match=r"data\.path=/x: case=checkpoint makes what it saves"):
        settings.check(chosen)
    monkeypatch.setattr(made.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10 * MIB}))
    with pytest.raises(made.DataError, match=r"10 MiB free and case\.work=\[save\] needs .* case\.state_bytes= to le"):
        bench_run.main(small(tmp_path, cases.CheckpointSettings), tmp_path)


@pytest.mark.skipif(limits.SYSCALLS.get(platform.machine()) is None, reason="no native AIO is known here")
def test_a_limit_is_measured_whatever_signals_come_meanwhile(tmp_path):
    """As a profiler sends them."""
    on_disk(tmp_path)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        found = limits.durable_writes(tmp_path, 32 * MIB)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all("gb_per_s" in one for one in found.values()), found


def test_raw_writes_fill_the_file_once_and_leave_none(tmp_path, monkeypatch):
    on_disk(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * MIB + 100))
    requests = limits.sequential_requests([path], MIB)
    found = limits.measured("write", lambda: limits.direct_io([path], requests, 2, write=True))
    if "unavailable" in found:
        pytest.skip(found["unavailable"])
    written = path.read_bytes()
    assert all(len(set(written[at : at + 4096])) > 200 for at in range(0, 3 * MIB, 4096)), "random bytes everywhere"
    assert written[3 * MIB :] == bytes(100)
    path.unlink()
    found = limits.durable_writes(tmp_path, 4 * MIB)
    assert set(found) == {"direct_write_1024_kib_32", "direct_write_4096_kib_8"} and not os.listdir(tmp_path)
    rate, name = limits.limit_of(found)
    assert rate == max(one["gb_per_s"] for one in found.values()) and name.startswith("O_DIRECT write, ")
    assert limits.limit_of({"direct_write_1_kib_2": {"unavailable": "why"}}) == (None, "why")


@pytest.mark.parametrize(
    "settings_class, fields",
    [
        (cases.LoadSettings, {"case_rows": ["readinto"]}),
        (cases.CheckpointSettings, {"case_rows": ["torch_mmap"], "case_work": ["load"]}),
    ],
)
def test_loads_of_a_cold_file_are_compared_with_one_reading_of_all_of_it(tmp_path, monkeypatch, settings_class, fields):
    on_disk(tmp_path)
    read_bytes, wait = [], limits.NativeAio.wait

    def counted(aio, least):
        events = wait(aio, least)
        read_bytes.append(int(events["res"].sum()))
        return events

    monkeypatch.setattr(limits.NativeAio, "wait", counted)
    chosen = small(tmp_path, settings_class, case_cache=["cold"], **fields)
    assert bench_run.main(chosen, tmp_path) == 0
    results = results_in(tmp_path)
    (found,) = results["limits"]["load" if "case_work" in fields else "safetensors"].values()
    if "unavailable" in found["direct_sequential"]:
        pytest.skip(found["direct_sequential"]["unavailable"])
    (of_data,) = results["data"].values()
    size = of_data["file_bytes"]["pt"] if "case_work" in fields else of_data["file_bytes"]
    assert sum(read_bytes) == size // MIB * MIB > 0


def test_files_in_memory_have_no_cold_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(system, "file_system", lambda path: ("tmpfs", "tmpfs"))
    chosen = small(tmp_path, cases.LoadSettings, case_rows=["readinto"])
    assert bench_run.main(chosen, tmp_path) == 0
    results = results_in(tmp_path)
    assert [row["cache"] for row in results["rows"]] == ["warm"]
    said = [line.partition(":")[0] for line in (tmp_path / "report.md").read_text().splitlines() if line[:2] == "- "]
    assert said[:6] == ["- Machine", "- Device", "- Versions", "- Data, safetensors", "- Bytes", "- Engine"]
    assert any("no cold tables" in note and "tmpfs" in note for note in results["notes"])
    chosen.case.cache = ["cold"]
    with pytest.raises(ValueError, match=r"case\.cache=\[cold\]: .* never cold"):
        bench_run.main(chosen, tmp_path)


WRONG = """
from gdsdata.bench.peers.by_hand.windows import NumpyGather

class Wrong(NumpyGather):
    name = "wrong"

    def rows(self, ids):
        batch = super().rows(ids).copy()
        batch[-1, -1] ^= 1
        return batch

class Reusing(NumpyGather):
    name = "reusing"

    def rows(self, ids):
        batch = super().rows(ids)
        if not hasattr(self, "buffer"):
            self.buffer = batch.copy()
        self.buffer[: len(batch)] = batch
        return self.buffer[: len(batch)]
"""


def test_a_peer_with_wrong_bytes_fails_the_bench(tmp_path, monkeypatch, capsys):
    (tmp_path / "wrong_peer.py").write_text(WRONG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = ["numpy", "wrong_peer:Wrong", "wrong_peer:Reusing"]
    chosen = small(
        tmp_path, data_kind="tokens", case_rows=rows, case_dtypes=["raw"], case_cache=["warm"], case_batch_sizes=[64]
    )
    assert bench_run.main(chosen, tmp_path) == 1
    said, of_it = capsys.readouterr().out, "FAILED: tokens in 1 file, batch 64"
    assert f"{of_it}, wrong: ValueError: epoch 0, batch 0: 1 of 64 samples are not what numpy reads" in said
    assert f"{of_it}, reusing: " in said, "a batch that the caller may keep was overwritten"
    assert said.splitlines()[-1].endswith("report.md")
    results = results_in(tmp_path)
    assert results["verified"] is False
    by_name = {row["name"]: row for row in results["rows"]}
    assert by_name["numpy"]["samples_per_s"] and by_name["numpy"]["verified"]
    assert by_name["wrong"]["samples_per_s"] is None, "a row that fails has no time"
    assert "FAILED" in (tmp_path / "report.md").read_text()


def test_a_table_has_several_batch_sizes_and_each_number_of_files_its_tables(tmp_path):
    chosen = small(
        tmp_path, data_kind="tokens", data_files=[1, 7], data_size_bytes=MIB, case_rows=["index_select"],
        case_dtypes=["raw"], case_batch_sizes=[32, 8, 32],
    )  # fmt: skip
    chosen.case.run_seconds = 60.0
    assert bench_run.main(chosen, tmp_path) == 0
    results = results_in(tmp_path)
    assert [about["files"] for about in results["data"].values()] == [1, 1, 7, 7]
    found = [
        [row["batch_size"] for row in rows] for rows in cases.layout_of(results).groups() if "warm" in rows[0]["cache"]
    ]
    assert found == [[32, 8]] * 2
    assert {row["batch_size"] for row in results["rows"] if row["cache"] == "cold"} <= {32}
    for row in results["rows"]:
        if row["cache"] == "warm":
            epochs = [row[name]["median"] for name in ("first_epoch_gb_per_s", "later_gb_per_s")]
            assert min(epochs) <= row["gb_per_s"]["median"] <= max(epochs)
    assert "| batch | samples/s | spread | GB/s | first epoch | later |" in (tmp_path / "report.md").read_text()


def test_own_path_is_read_and_recognized(tmp_path, capsys):
    volumes = tmp_path / "mine"
    volumes.mkdir()
    for index in range(20):
        np.save(volumes / f"{index}.npy", np.random.default_rng(index).standard_normal((3, 50)))
    rows = ["gdsdata", "read_ring", "dataloader_0"]
    chosen = small(tmp_path, data_path=str(volumes), case_rows=rows, case_cache=["warm"])
    assert bench_run.main(chosen, tmp_path) == 0, capsys.readouterr().out
    results = results_in(tmp_path)
    assert list(results["data"]) == ["npy in 20 files, batch 16"]
    assert results["data"]["npy in 20 files, batch 16"]["samples"] == 20
    assert {row["dtype"] for row in results["rows"]} == {"float64"}
    assert not (tmp_path / "data").exists(), "nothing is made when data.path is given"


@pytest.mark.parametrize(
    "override, said",
    [
        ("case.epoch=1", "Key 'epoch' not in 'LoaderSettings'"),
        ("case.epoch=1", "gdsdata.bench: case.epoch=1: there is no such setting here: did you mean case.epochs?"),
        ("qiuck=true", "gdsdata.bench: qiuck=true: there is no such setting here: did you mean quick?"),
        ("x.y.z=1", "gdsdata.bench: x.y.z=1: there is no such setting here: --help shows all"),
        ("case=io case.io_bytes=4096", "gdsdata.bench: case.io_bytes=4096: a list is due: case.io_bytes=[4096]"),
        ("case.epochs=many", "'many' of type 'str' could not be converted to Integer"),
        ("case.epochs=0", "gdsdata.bench: case.epochs=0: must be more than 0"),
        ("case.run_seconds=nan", "gdsdata.bench: case.run_seconds=nan: must be a finite number"),
        ("case.limit_seconds=inf", "gdsdata.bench: case.limit_seconds=inf: must be a finite number"),
        ("case.rows=[nmpy]", "there is no row 'nmpy'; there are gdsdata"),
        ("case.name=load", "case.name=load: choose a case by its group, case=load"),
        ("data.files=[0]", "data.files=0: must be from 1 to 65536"),
        ("data=npy data.files=[2]", "data.files=[2]: it splits made tokens, not npy, whose files follow from"),
        ("data=tokens data.dtype=int64", "data.dtype=int64: made tokens are uint16; it is for"),
        ("case.cache=[warm,warm]", "case.cache=['warm', 'warm']: name at least one, and none twice"),
        ("device.name=gpu", "device.name=gpu: use cpu, cuda or cuda:N"),
        ("device.name=cuda:99", "gdsdata.bench: device.name=cuda:99: "),
        ("engine.workers=-1", "gdsdata.bench: EngineOptions(workers=-1) must not be negative"),
        ("engine.backend=nope", "gdsdata.bench: engine.backend=nope: use auto or uring or posix or cufile"),
        ("engine.direct=nope", "gdsdata.bench: engine.direct=nope: use auto or always or never"),
        ("data.path=/nowhere/*.bin", "data.path=/nowhere/*.bin: no such file there"),
    ],
)
def test_wrong_overrides_are_refused_with_a_reason(tmp_path, monkeypatch, capsys, override, said):
    monkeypatch.chdir(tmp_path)
    assert refused(monkeypatch, *override.split(), f"hydra.run.dir={tmp_path}/out") not in (0, None)
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "a run that measured nothing leaves no folder"


def refused(monkeypatch, *overrides):
    """Run the bench in this process; return its exit status."""
    from hydra.core.global_hydra import GlobalHydra

    from gdsdata.bench import __main__ as command

    monkeypatch.setattr(sys, "argv", ["gdsdata.bench", *overrides])
    GlobalHydra.instance().clear()
    with pytest.raises(SystemExit) as ended:
        command.main()
    return ended.value.code


@pytest.mark.parametrize("setting", ["hydra.run.dir=file/out", "hydra.run.dir=/proc/x", ""])
def test_an_output_folder_that_cannot_be_made_is_an_error_with_its_setting(tmp_path, monkeypatch, capsys, setting):
    monkeypatch.chdir(tmp_path)
    for name in ("file", "outputs"):
        (tmp_path / name).touch()
    assert refused(monkeypatch, "quick=true", *filter(None, [setting])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gdsdata.bench: {setting or 'hydra.run.dir=outputs/bench/'}")


@pytest.mark.parametrize("folder", ["file", "/proc/x"])
def test_a_data_folder_that_cannot_be_made_is_an_error_with_its_setting(tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert refused(monkeypatch, "quick=true", "data=tokens", f"data.folder={folder}") == 2
    assert f"gdsdata.bench: {folder}: it cannot be made" in (said := capsys.readouterr().err)
    assert "set data.folder=" in said and "Traceback" not in said


def test_a_file_that_is_no_npy_file_is_an_error_with_its_path_and_setting(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens.bin").write_bytes(bytes(4096))
    assert refused(monkeypatch, "data=npy", "data.path=tokens.bin") == 2
    said = capsys.readouterr().err
    assert f"gdsdata.bench: {tmp_path}/tokens.bin: it is no .npy file" in said and "data=tokens" in said


def test_without_its_packages_the_bench_names_the_extra(tmp_path):
    program = """if True:
        import runpy, sys
        sys.modules |= {"hydra": None, "rich": None}
        runpy.run_module("gdsdata.bench", run_name="__main__", alter_sys=True)"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr == "gdsdata.bench: hydra-core, rich not installed: pip install 'gdsdata[bench]'\n"
    assert done.returncode == 2 and not list(tmp_path.iterdir())


def test_two_runs_of_the_same_second_have_folders_of_their_own():
    from hydra.core.utils import setup_globals
    from omegaconf import OmegaConf

    setup_globals()
    configs = [OmegaConf.load(settings.configs_folder() / "config.yaml") for _ in range(2)]
    first, second = (config.hydra.run.dir for config in configs)
    assert first != second


def test_help_explains_every_setting():
    text = settings.help_text()
    groups = [("case", cls) for cls in cases.SETTINGS.values()]
    groups += [("data", settings.DataSettings), ("device", settings.DeviceSettings)]
    groups += [("engine", settings.engine_schema())]
    for group, cls in groups:
        for field in dataclasses.fields(cls):
            if (group, field.name) == ("case", "name"):
                continue  # the group's name says it
            line = next(line for line in text.splitlines() if line.startswith(f"  {group}.{field.name}="))
            assert len(line.split(maxsplit=1)) == 2, f"{group}.{field.name} has no explanation"


# ------------------------------------------------------------------------------------------------ data sets


def test_making_data_is_atomic_and_reused(tmp_path):
    class Interrupted(Exception):
        pass

    def interrupt(count):
        raise Interrupted

    for kind in ("tokens", "npy"):
        folder = tmp_path / kind
        with pytest.raises(Interrupted):
            made.make(kind, folder, 4 * MIB, [128, 64, 64], interrupt)
        assert list(folder.iterdir()) == [], "an interrupted making leaves nothing"

        (folder / "tokens-uint16-4194304.bin.tmp-999999999").write_bytes(b"left by a killed process")
        kept = made.make(kind, folder, 4 * MIB, [128, 64, 64])
        before = kept.stat().st_mtime_ns
        assert made.make(kind, folder, 4 * MIB, [128, 64, 64], interrupt) == kept
        assert kept.stat().st_mtime_ns == before
        files = sources.expand(kept)
        content = Path(files[-1]).read_bytes()

        with open(files[-1], "r+b") as file:  # a damaged file is written anew
            file.truncate(100)
        assert made.make(kind, folder, 4 * MIB, [128, 64, 64]) == kept
        assert Path(files[-1]).read_bytes() == content

        made_without_manifest = folder / f"{kept.name}.json"
        made_without_manifest.unlink()
        with pytest.raises(Interrupted):
            made.make(kind, folder, 4 * MIB, [128, 64, 64], interrupt)
    assert not list((tmp_path / "tokens").glob("*.tmp-*")), "leftovers of killed processes are removed"


def test_two_runs_at_once_make_their_data_once(tmp_path):
    writes, kept = [], []

    def write(target):
        writes.append(target)
        if len(writes) == 1:
            other.start()
            other.join(0.3)  # without a lock it makes the data meanwhile
        target.write_bytes(b"made")

    def make():
        kept.append(made.keep(tmp_path, "data", {"kind": "tokens"}, 4, write))

    other = threading.Thread(target=make)
    make()
    other.join()
    assert len(writes) == 1
    assert kept == [tmp_path / "data"] * 2 and kept[0].read_bytes() == b"made"


def test_made_data_is_real_text(tmp_path):
    tokens = np.fromfile(made.make("tokens", tmp_path, 2 * MIB, []), np.uint16)
    assert len(tokens) == MIB
    assert b"import" in tokens.astype(np.uint8).tobytes()
    parts = sources.expand(made.make("tokens", tmp_path, 2 * MIB, [], files=3))
    assert len(parts) == 3 and np.array_equal(tokens, np.concatenate([np.fromfile(part, np.uint16) for part in parts]))
    volumes = sources.expand(made.make("npy", tmp_path, 4 * MIB, [128, 64, 64]))
    assert len(volumes) == 2
    first = np.load(volumes[0])
    assert first.shape == (128, 64, 64) and first.dtype == np.float32 and 0 < first.mean() < 1


def test_too_little_space_is_said_before_writing(tmp_path):
    with pytest.raises(made.DataError, match=r"MiB free and the tokens data set needs .* set data\.folder="):
        made.make("tokens", tmp_path, 2**60, [])
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ peers


def several_token_files(tmp_path):
    """Write unequal files: one has llm.c's header, one is too short, one has an odd tail."""
    generator = np.random.default_rng(0)
    for name, tokens in (("a", 33), ("b", 5), ("c", 200), ("e", 9)):
        generator.integers(0, 2**16, tokens, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    header = np.zeros(256, np.int32)
    header[:3] = sources.LLMC_MAGIC, 1, 57
    with open(tmp_path / "d.bin", "wb") as file:
        file.write(header.tobytes() + generator.integers(0, 2**16, 57, dtype=np.uint16).tobytes())
    return sources.describe_tokens(sources.expand(tmp_path), "uint16", 8, 4, "test")


@pytest.mark.parametrize("dtype", ["raw", "int64"])
@pytest.mark.parametrize(
    "peer", [peer for peer in registry.rows("loader", "tokens", "cold") if not tables.is_ours(peer.key)]
)
def test_peers_gather_windows_of_several_files(tmp_path, peer, dtype):
    source = several_token_files(tmp_path)
    assert source.counts == [7, 48, 13, 1]
    truth, opened = sources.Truth(source), peer(source, 16, dtype, seed=3)
    try:
        for epoch in (0, 1):
            batches = list(opened.epoch(epoch))
            expected = opened.expected_ids(epoch, len(batches))
            assert sorted(np.concatenate(expected)) == list(range(69))
            for ids, batch in zip(expected, batches, strict=True):
                assert batch.dtype == (torch.int64 if dtype == "int64" else torch.uint16)
                np.testing.assert_array_equal(batch.numpy(), truth.batch(ids, dtype))
    finally:
        opened.close()


class Event:
    """A CUDA event's stand-in. It reports a slot that is handed out before its copy is over."""

    def __init__(self):
        self.outstanding = False

    def synchronize(self):
        self.outstanding = False


@pytest.fixture
def copies(monkeypatch):
    """Stand in for a GPU: copy tensors, and return the list of the shapes sent."""
    sent = []

    def send(tensor, name):
        sent.append(tensor.shape)
        return tensor.clone()

    monkeypatch.setattr(device, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(device, "copied_event", Event)
    monkeypatch.setattr(device, "record", lambda event, name: setattr(event, "outstanding", True))
    monkeypatch.setattr(device, "send", send)
    return sent


def own_rows(kind):
    rows = registry.rows("loader", kind, "cold", "cuda")
    return [peer for peer in rows if not tables.is_ours(peer.key) and not peer.package]


@pytest.mark.filterwarnings("ignore:'pin_memory'")
@pytest.mark.parametrize("dtype", ["raw", "int64"])
@pytest.mark.parametrize("peer", own_rows("tokens"))
@pytest.mark.parametrize("layout", ["several files", "no overlap"])
def test_peers_send_windows_by_way_of_pinned_memory(tmp_path, copies, layout, peer, dtype):
    source = several_token_files(tmp_path)
    if layout == "no overlap":
        source = sources.describe_tokens([str(tmp_path / "c.bin")], "uint16", 7, 8, "test")
    truth, opened = sources.Truth(source), peer(source, 16, dtype, seed=3, device_name="cuda")
    try:
        for epoch in (0, 1):
            batches = list(opened.epoch(epoch))
            expected = opened.expected_ids(epoch, len(batches))
            assert sorted(np.concatenate(expected)) == list(range(source.samples))
            for ids, batch in zip(expected, batches, strict=True):
                np.testing.assert_array_equal(batch.numpy(), truth.batch(ids, dtype))
    finally:
        opened.close()
    assert len(copies) == 2 * len(batches)


@pytest.mark.filterwarnings("ignore:'pin_memory'")
@pytest.mark.parametrize("peer", [*own_rows("npy"), volumes.ReadRing8])
def test_peers_send_volumes_by_way_of_pinned_memory(tmp_path, copies, peer):
    for index in range(25):
        np.save(tmp_path / f"{index:02}.npy", np.full((4, 4), index, np.float32))
    source = sources.describe_npy(sources.expand(tmp_path), "test")
    opened = peer(source, 2, "float32", seed=0, device_name="cuda")
    assert opened.keeps_batches
    try:
        for epoch in range(3):
            wanted = 5 if epoch == 0 else 13  # the first epoch is broken off
            expected = opened.expected_ids(epoch, wanted)
            got = [batch for _, batch in zip(range(wanted), opened.epoch(epoch), strict=False)]
            assert [batch[:, 0, 0].int().tolist() for batch in got] == [ids.tolist() for ids in expected]
    finally:
        opened.close()


def test_python_readinto_sends_by_way_of_pinned_memory(tmp_path, copies, monkeypatch):
    monkeypatch.setattr(files, "SLOT_BYTES", 4096)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(10 * 4096 + 7 + 13))
    source = checkpoints.Checkpoint(str(path), "", 7, 10 * 4096 + 13, {}, "u8", "test")
    for peer in (files.Readinto, files.ReadintoThreads):
        monkeypatch.setattr(peer, "buffer", lambda self: torch.empty(self.source.bytes, dtype=torch.uint8))
        loaded = peer(source, "cuda").load()[protocols.WHOLE]
        assert bytes(loaded.numpy()) == path.read_bytes()[7:]
    source.bytes += 1
    with pytest.raises(EOFError, match="1 bytes are missing"):
        files.Readinto(source, "cuda").load()


def test_pinned_residency_is_timed_once_it_is_ready(monkeypatch):
    class Settling(our_batches.PinnedBatches):
        def open(self):
            self.dataset, self.epochs = self, []
            self.device = "cpu"

        def stats(self):
            return {"residency": {"ready": len(self.epochs) == 3}}

        def epoch(self, epoch):
            self.epochs.append(epoch)
            return iter([1, 2])

    peer = Settling(None, 1, "raw", 0, device_name="cuda")
    assert peer.settle() == 3 and peer.epochs == [0, 1, 2] and 0 <= peer.first_batch_s <= peer.first_epoch_s
    monkeypatch.setattr(our_batches, "SETTLE_SECONDS", 0.0)
    with pytest.raises(TimeoutError, match="residency was not ready after 0 s"):
        Settling(None, 1, "raw", 0, device_name="cuda").settle()
    monkeypatch.setattr(our_batches, "SETTLE_SECONDS", 60.0)
    monkeypatch.setattr(Settling, "stats", lambda self: {"residency": {"ready": False, "error": "too large"}})
    with pytest.raises(RuntimeError, match="residency is not to be had: too large"):
        Settling(None, 1, "raw", 0, device_name="cuda").settle()


def test_device_names_and_their_lack(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        ValueError, match=r"device\.name=cuda: torch .* (sees no CUDA device|without CUDA): use device=cpu"
    ):
        device.check("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    device.check("cuda:1")
    with pytest.raises(ValueError, match=r"device\.name=cuda:2: there are 2 CUDA device\(s\), the last is cuda:1"):
        device.check("cuda:2")
    for name in ("cuda:", "mps"):
        with pytest.raises(ValueError, match=rf"device\.name={name}: use cpu, cuda or cuda:N \(N is a number\)"):
            device.check(name)


def test_workers_to_a_gpu_follow_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    keys = [peer.key for peer in registry.rows("loader", "npy", "warm", "cuda")]
    assert {"dataloader_0", "dataloader_8", "dataloader_16", "read_ring_8", "dali_mmap", "gdsdata_pinned"} <= set(keys)
    assert registry.find("loader", "dataloader_8").workers == 8
    assert "gdsdata_pinned" not in [peer.key for peer in registry.rows("loader", "npy", "cold", "cuda")]


def test_ring_of_reads_raises_what_its_threads_met(tmp_path):
    for index in range(6):
        np.save(tmp_path / f"{index}.npy", np.full((4, 4), index, np.float32))
    source = sources.describe_npy(sources.expand(tmp_path), "test")
    (tmp_path / "3.npy").write_bytes((tmp_path / "3.npy").read_bytes()[:-1])
    ring = volumes.ReadRing(source, 2, "float32", seed=0)
    try:
        with pytest.raises(ValueError, match=r"3\.npy"):
            list(ring.epoch(0))
    finally:
        ring.close()


# ------------------------------------------------------------------------------------------------ measuring


def test_drop_really_drops_and_warm_really_warms(tmp_path):
    on_disk(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 * MIB + 100))
    assert system.warm([path]) == 1.0
    assert system.drop([path]) == 0.0
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.seek(MIB)
        file.read(1)
        resident, size = system.resident_bytes(path)
    assert size == 4 * MIB + 100
    assert 0 < resident < MIB
    assert system.warm([path]) == 1.0


def test_ctrl_c_while_the_page_cache_is_asked_is_no_other_error(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    (tmp_path / "x").write_bytes(b"x")
    monkeypatch.setattr(system, "libc", SimpleNamespace(mincore=interrupt))
    with pytest.raises(KeyboardInterrupt):
        system.resident_bytes(tmp_path / "x")


def test_a_file_that_is_partly_in_memory_is_dropped_before_it_is_warmed(tmp_path, monkeypatch):
    on_disk(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 * MIB))
    found = []
    monkeypatch.setattr(system, "read_through", lambda files: found.append(system.resident_share(files)))
    for offset, due in ((None, []), (MIB, [0.0] * system.WARMED_AT_MOST)):
        if offset is not None:
            system.drop([path])
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                os.pread(file.fileno(), 1, offset)
        system.warm([path])
        assert found == due


def test_drop_says_so_when_a_mapping_keeps_pages(tmp_path):
    on_disk(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.sum() == 0
    assert system.drop([path]) > 0.5
    del mapped
    assert system.drop([path]) == 0.0


def test_drop_waits_for_a_mapping_that_is_on_its_way_out(tmp_path):
    on_disk(tmp_path)
    path = tmp_path / "a.bin"
    path.write_bytes(os.urandom(MIB))
    view = np.memmap(path, np.uint8, mode="r")
    view.sum()
    unmapped = [view]
    del view
    later = threading.Timer(0.1, unmapped.clear)
    later.start()
    assert system.drop([path]) == 0.0
    later.join()


@pytest.mark.new_interpreter
def test_memory_of_children_counts_and_shared_pages_count_once():
    code = "import os, sys; a = bytearray(64 << 20); os.fork(); print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        child.stdout.readline()
        child.stdout.readline()
        assert 64 * MIB <= system.tree_bytes(child.pid) < 110 * MIB
        child.stdin.close()


def test_limits_are_plausible(tmp_path):
    on_disk(tmp_path)
    assert 0.3 < limits.memory_copy(0.1)["gb_per_s"] < 2000
    tokens = made.make("tokens", tmp_path, 8 * MIB, [])
    source = sources.describe_tokens([str(tokens)], "uint16", 1024, None, "test")
    system.warm(source.files)
    found = limits.over_turns([limits.cold_reads(source, 0.1) for _ in range(2)])
    if "unavailable" in found["direct_sequential"]:
        pytest.skip(found["direct_sequential"]["unavailable"])
    assert found["direct_sequential"]["request_bytes"] == MIB
    assert 0.005 < found["direct_sequential"]["gb_per_s"] < 100
    for depth in (32, 64):
        one = found[f"direct_random_{depth}"]
        assert 50 < one["per_s"] < 20e6
        assert 2050 <= one["mean_bytes"] <= 8192
    assert found["direct_random_64"]["per_s"] > 2 * found["direct_sequential"]["per_s"]


def test_the_limit_is_the_faster_way_to_the_samples():
    source = sources.Source("tokens", ["x"], "uint16", [1025], 1024, [0], [100_000], 200_000_000, "test")
    found = {"direct_sequential": {"gb_per_s": 2.0}}
    found |= {"direct_random_32": {"per_s": 40_000.0}, "direct_random_64": {"per_s": 50_000.0}}
    # The whole set takes 0.1 s. 1,000 samples are read sooner one by one, 100,000 are not.
    rate, name = limits.limit_for(source, "cold", 1_000, found)
    assert rate == pytest.approx(50_000 * 2050 / 1e9) and name == "O_DIRECT, one sample x 64"
    rate, name = limits.limit_for(source, "cold", 100_000, found)
    assert rate == pytest.approx(1e6 * 2050 / 1e9) and "whole set" in name
    assert limits.limit_for(source, "warm", 1_000, {"memory_copy": {"gb_per_s": 20.5}}) == (20.5, "memory copy")
    pinned = {"pinned_copy": {"gb_per_s": 20.5}}
    assert limits.limit_for(source, "warm", 1_000, pinned) == (20.5, "pinned copy to the GPU")
    found["direct_random_512"] = {"per_s": 150_000.0}  # an engine that keeps more in flight
    rate, name = limits.limit_for(source, "cold", 1_000, found)
    assert rate == pytest.approx(150_000 * 2050 / 1e9) and name == "O_DIRECT, one sample x 512"
    assert limits.limit_for(source, "cold", 1_000, {"direct_sequential": {"unavailable": "why"}}) == (None, "why")

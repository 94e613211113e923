"""case=latency of the bench: bytes, refusals, what it leaves behind, and what it reports."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import eventually
from quick_programs import NESTED

from gdsdata.bench import cases, settings
from gdsdata.bench import run as bench_run
from gdsdata.bench.cases.latency import report
from gdsdata.bench.cases.latency.case import Latency
from gdsdata.bench.cases.latency.row import LEAST_ITERATIONS
from gdsdata.bench.data.pieces import random_bytes
from gdsdata.bench.harness import tables
from gdsdata.bench.harness.folders import temporary_folder
from gdsdata.bench.measure import device, intervals, system
from gdsdata.bench.peers import registry
from gdsdata.bench.peers.by_hand import files

pytestmark = pytest.mark.usefixtures("quick_programs")

MIB = 2**20


def small(tmp_path, **fields):
    """Settings for a run of a second or two in this process."""
    chosen = settings.Settings(engine={}, case=cases.LatencySettings())
    chosen.data.folder = str(tmp_path / "data")
    chosen.case.repeats, chosen.case.limit_seconds, chosen.case.warm_up = 1, 0.02, 1
    chosen.case.sizes_bytes, chosen.case.iterations = [4096], 6
    for name, value in fields.items():
        assert hasattr(chosen.case, name)
        setattr(chosen.case, name, value)
    return settings.check(chosen)


def results_in(folder):
    return json.loads((folder / "results.json").read_text())


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.mark.slow
def test_every_row_is_verified_timed_and_reported_and_no_file_is_left(tmp_path, capsys):
    chosen = small(tmp_path, sizes_bytes=[100_001, 4096], repeats=2, verify=True)
    assert bench_run.main(chosen, tmp_path) == 0, capsys.readouterr().out
    results = results_in(tmp_path)
    assert results["verified"] is True and os.listdir(tmp_path / "data") == []
    found = {}
    for row in results["rows"]:
        found.setdefault((row["data"], row["cache"]), set()).add(row["key"])
        timed = row["latency_s"]
        assert timed["count"] == 12 and row["checked_bytes"] in (2 * row["tensor_bytes"], 4 * row["tensor_bytes"])
        assert 0 < timed["min"] <= timed["median"] <= timed["p90"] <= timed["p99"] <= timed["max"] < 10
        assert timed["mean_low"] < timed["mean"] < timed["mean_high"]
        assert sum(run["seconds"] for run in row["runs"]) == pytest.approx(timed["mean"] * 12)
        assert row["bandwidth_gb_per_s"]["max"] == pytest.approx(row["tensor_bytes"] / timed["min"] / 1e9)
        assert [run["latency_s"]["count"] for run in row["runs"]] == [6, 6]
        if tables.is_ours(row["key"]):
            assert sum(row["served_bytes"].values()) == 12 * row["tensor_bytes"], "the engine counts these bytes"
    everything = {"gdsdata", "gdsdata_engine", "python"}
    assert found["read 4 KiB", "warm"] == found["read 100,001 B", "warm"] == everything
    assert {"replaced", "in_place"} == {cache for kind, cache in found if kind.startswith("write")}
    assert found["write 100,001 B", "in_place"] == everything, "O_DIRECT writes no part of a page"
    assert [kind for kind in results["data"] if kind.startswith("read")] == ["read 4 KiB", "read 100,001 B"]
    written = (tmp_path / "report.md").read_text()
    for part in (
        "read, file in the page cache, to cpu",
        "write over the bytes of a file, synced, from cpu",
        "| 4 KiB |",
    ):
        assert part in written
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_every_row_is_verified_on_a_gpu(tmp_path):
    chosen = small(tmp_path, sizes_bytes=[100_001, 4 * MIB], verify=True)
    chosen.device.name = "cuda"
    assert bench_run.main(chosen, tmp_path) == 0
    results = results_in(tmp_path)
    assert results["verified"] is True and results["device"]["model"]
    assert {row["key"] for row in results["rows"]} == {
        peer.key for peer in registry.rows("latency", device_name="cuda")
    }
    assert "read, file in the page cache, to cuda" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_the_engines_settings_reach_it(tmp_path):
    chosen = small(tmp_path, work=["read"], cache=["warm"], rows=["gdsdata", "gdsdata_engine"])
    chosen.engine = {"direct": "always", "workers": 1, "queue_depth": 2, "backend": "posix"}
    assert bench_run.main(chosen, tmp_path) == 0
    rows = results_in(tmp_path)["rows"]
    assert len(rows) == 2 and all(row["path"] in ("direct", "buffered") for row in rows), (
        "no row is served by the page cache"
    )


def test_a_run_ends_when_its_seconds_are_over(tmp_path):
    chosen = small(tmp_path, work=["write"], writes=["replaced"], rows=["python"], iterations=10**6, run_seconds=0.3)
    started = time.monotonic()
    assert bench_run.main(chosen, tmp_path) == 0
    (row,) = results_in(tmp_path)["rows"]
    assert LEAST_ITERATIONS <= row["latency_s"]["count"] < 10**6 and time.monotonic() - started < 60


WRONG = """
import os
from gdsdata.bench.peers.by_hand.files import Python

class Stale(Python):
    "Gives what it read first, for ever."
    kept = None

    def read(self):
        self.kept = super().read() if self.kept is None else self.kept
        return self.kept

class Lazy(Python):
    "Writes once."
    done = False

    def write(self, tensor):
        if not self.done:
            super().write(tensor)
        self.done = True

class Long(Python):
    "Cuts what lies behind the tensor."

    def store(self, view):
        super().store(view)
        os.truncate(self.file, len(view))
"""


@pytest.mark.parametrize(
    "peer, work, states, said",
    [
        ("Stale", "read", {"cache": ["warm"]}, "warm: 4,096 of 4,096 bytes are wrong, the first at 0"),
        ("Lazy", "write", {"writes": ["replaced"]}, "replaced: 4,096 of 4,096 bytes are wrong, the first at 0"),
        ("Long", "write", {"writes": ["in_place"]}, "in_place: 0 bytes lie behind the tensor, and not as they lay"),
    ],
)
def test_a_row_with_wrong_bytes_fails_and_its_files_go(tmp_path, monkeypatch, capsys, peer, work, states, said):
    (tmp_path / "wrong_latency.py").write_text(WRONG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    chosen = small(tmp_path, work=[work], rows=[f"wrong_latency:{peer}"], **states)
    assert bench_run.main(chosen, tmp_path) == 1
    assert said in capsys.readouterr().out
    assert results_in(tmp_path)["rows"][0]["latency_s"] is None, "a row that fails has no time"
    assert os.listdir(tmp_path / "data") == []


@pytest.mark.parametrize("state", ["warm", "cold", "replaced", "in_place"])
@pytest.mark.parametrize("peer", registry.rows("latency"))
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 3 * MIB])
def test_peers_move_all_bytes_in_every_state(tmp_path, peer, state, size):
    work = "read" if state in ("warm", "cold") else "write"
    path = str(tmp_path / "tensor.bin")
    if not peer.can(work, state, size):
        pytest.skip("not this row's")
    expected = random_bytes(size, seed=1)
    with open(path, "wb") as file:
        file.write(expected.numpy() if work == "read" else bytes(size + (4096 if state == "in_place" else 0)))
    opened = peer(path, size, state, "cpu")
    try:
        if work == "read":
            assert torch.equal(opened.read(), expected)
        else:
            opened.write(expected)
            with open(path, "rb") as file:
                assert file.read() == bytes(expected.numpy()) + bytes(4096 if state == "in_place" else 0)
    except OSError as error:
        if peer.direct and error.errno == 22:
            pytest.skip("the file system refuses O_DIRECT")
        raise
    finally:
        opened.close()
    assert os.listdir(tmp_path) == ["tensor.bin"]


@pytest.mark.filterwarnings("ignore:'pin_memory'")
def test_python_goes_by_way_of_pinned_memory_to_a_gpu(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(device, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(device, "send", lambda tensor, name: sent.append(name) or tensor.clone())
    path = tmp_path / "tensor.bin"
    path.write_bytes(bytes(range(200)))
    opened = files.Python(str(path), 200, "replaced", "cuda")
    assert opened.read().tolist() == list(range(200)) and sent == ["cuda"]
    opened.write(torch.full((200,), 7, dtype=torch.uint8))
    assert path.read_bytes() == bytes([7]) * 200


# ------------------------------------------------------------------------------------------------ its folder


def test_a_runs_folder_goes_after_an_error_and_no_other_file_is_touched(tmp_path):
    for name in ("latency", "gdsdata-bench-latency-notes", "gdsdata-bench-tune-1-x", "gdsdata-bench-latency-1-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years of work")
    (tmp_path / "gdsdata-bench-latency-999999999-x").symlink_to(tmp_path / "latency")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(RuntimeError, match="in the middle"), temporary_folder(tmp_path, "latency") as folder:
        (folder / "tensor-read-1.bin").write_bytes(b"1")
        raise RuntimeError("in the middle")
    assert sorted(os.listdir(tmp_path)) == before and not folder.exists()
    assert (tmp_path / "latency" / "thesis.tex").read_text() == "years of work"


def test_files_of_a_killed_run_are_removed_and_those_of_a_living_one_stay(tmp_path):
    code = "from gdsdata.bench.harness.folders import temporary_folder; import sys\n"
    code += f"with temporary_folder({str(tmp_path)!r}, 'latency') as folder:\n"
    code += "    (folder / 'tensor-write-5.bin').touch(); print(folder, flush=True); sys.stdin.read()\n"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        other = child.stdout.readline().decode().strip()
        with temporary_folder(tmp_path, "latency") as folder:
            assert os.listdir(other) == ["tensor-write-5.bin"] and os.listdir(folder) == []
        child.send_signal(signal.SIGKILL)
    with temporary_folder(tmp_path, "latency") as folder:
        assert os.listdir(tmp_path) == [folder.name]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_ended_by_a_signal_removes_its_folder(tmp_path, number):
    data = tmp_path / "data"
    settings = ["case=latency", "device=cpu", f"data.folder={tmp_path}/data", f"hydra.run.dir={tmp_path}/out"]
    command, environment = [sys.executable, "-m", "gdsdata.bench", *settings], {**os.environ, NESTED: "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, **quiet) as run:
        assert eventually(lambda: list(data.glob("*/tensor-*")), timeout_s=60)
        time.sleep(1)  # now it waits for its rows, and no process is being started
        run.send_signal(number)
        assert run.wait(60) == 128 + number
    assert os.listdir(data) == []


def test_an_error_in_mid_run_leaves_no_file(tmp_path, monkeypatch):
    def broken(self, source, results):
        assert os.path.exists(source.path)
        raise KeyboardInterrupt

    monkeypatch.setattr(Latency, "one_source", broken)
    with pytest.raises(KeyboardInterrupt):
        bench_run.main(small(tmp_path), tmp_path)
    assert os.listdir(tmp_path / "data") == []


# ------------------------------------------------------------------------------------------------ settings and report


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"sizes_bytes": []}, r"case\.sizes_bytes=\[\]: name one size at least"),
        ({"sizes_bytes": [4096, 0]}, r"case\.sizes_bytes=\[4096, 0\]: .* of 1 byte or more"),
        ({"run_seconds": 1000.0}, r"case\.run_seconds=1000\.0: at most 240"),
        ({"iterations": 0}, r"case\.iterations=0: must be more than 0"),
        ({"work": ["append"]}, r"case\.work=append: use read or write"),
        ({"writes": []}, r"case\.writes=\[\]: name at least one of replaced, in_place"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, fields, said):
    with pytest.raises(ValueError, match=said):
        small(tmp_path, **fields)


def test_files_of_the_users_own_are_refused(tmp_path):
    chosen = small(tmp_path)
    chosen.data.path = "/x"
    with pytest.raises(ValueError, match=r"data\.path=/x: case=latency makes its files"):
        settings.check(chosen)


def test_quick_takes_small_sizes_and_few_iterations():
    chosen = settings.made_small(settings.Settings(engine={}, case=cases.LatencySettings()))
    assert chosen.case.sizes_bytes == [4096, 65536, MIB] and chosen.case.iterations == 20
    chosen.case.sizes_bytes = [2**30]
    assert settings.made_small(chosen).case.sizes_bytes == [MIB]


def test_sizes_are_said_exactly():
    said = [system.size_text(size) for size in (1, 1000, 4096, 6144, 100_001, MIB, 3 * 2**29, 2**30 + 1)]
    assert said == ["1 B", "1,000 B", "4 KiB", "6 KiB", "100,001 B", "1 MiB", "1.5 GiB", "1,073,741,825 B"]


def test_a_cell_says_the_mean_and_how_far_its_interval_reaches():
    row = {"latency_s": intervals.described([1e-3, 2e-3, 3e-3])}
    assert report.interval("mean", "latency_s", 1e6).cell(row) == "2,000 ± 2,484"
    assert report.interval("mean", "latency_s", 1e6).cell({"latency_s": intervals.described([2e-3])}) == "2,000"

"""case=all of the bench: if a case fails, the others still run and the page shows them all."""

import base64
import json
import re
import sys

import pytest
from test_bench import MIB, bench, on_disk, results_in, small
from test_bench_compare import documented, made_results, made_row, unnamed

from gdsdata.bench import cases, compare, settings
from gdsdata.bench import run as bench_run
from gdsdata.bench.cases.all import case as bench_all
from gdsdata.bench.cases.all.report import AllLayout
from gdsdata.bench.harness import case

pytestmark = pytest.mark.usefixtures("quick_programs")

LOADED = {"summary": "random", "loaded_bytes": MIB, "tensors": 3, "file_system": "ext4", "device": "/dev/vda"}
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PRINTS = [sys.executable, "-c"]


def case_row(key, rate, best_peer=None, ratio=None, error=None):
    row = made_row(key, [0.001 / rate] * 3)
    return row | {
        "data": "safetensors", "setting": "as it says", "verified": error is None, "error": error,
        "gb_per_s": None if error else {"median": rate, "min": rate, "max": rate},
        "seconds": {"median": 0.1, "min": 0.1, "max": 0.1}, "cpu_s_per_gb": {"median": 0.1, "min": 0.1, "max": 0.1},
        "peak_bytes": 1000, "best_peer": best_peer, "ratio_to_best_peer": ratio, "ratio_to_limit": rate / 10,
    }  # fmt: skip


def case_results(*rows, **fields):
    rows = rows or (case_row("gdsdata", 6.0, "readinto", 1.5), case_row("readinto", 4.0, "readinto", 1.0))
    return made_results(*rows) | {"data": {"safetensors": LOADED}, "seconds": 1.0, "verified": True} | fields


def leaves_results(monkeypatch, results_of, status_of=lambda name: 0):
    """Make cases leave these results without running. Returns the settings that each one got."""
    commands = {}

    def run(self, command, output):
        name = next(one for one in command if one.startswith("case=")).partition("=")[2]
        commands[name] = command
        output.write_text("output of it\n")
        results = results_of(name)
        if results:
            (output.parent / "results.json").write_text(json.dumps(results))
            (output.parent / "results.png").write_bytes(PIXEL)
            (output.parent / "report.html").write_text("its own page")
        return status_of(name)

    monkeypatch.setattr(bench_all.All, "run", run)
    return commands


def run_all(tmp_path, monkeypatch=None, name="out", quick=True, engine=None, **fields):
    chosen = small(tmp_path, cases.AllSettings, **fields)
    chosen.quick, chosen.engine = quick, engine or {}
    status = bench_run.main(settings.check(chosen), tmp_path / name)
    return status, results_in(tmp_path / name)


def test_every_case_that_there_is_runs_once_and_is_on_one_page(tmp_path, monkeypatch, capsys):
    busy = "Other programs kept up to 1.5 cores busy during it"
    commands = leaves_results(monkeypatch, lambda name: case_results(notes=[busy, "Nothing of weight."]))
    (tmp_path / "out").mkdir()
    status, results = run_all(tmp_path)
    names = [name for name in cases.SETTINGS if name != "all"]
    assert status == 0 and results["verified"] is True and list(commands) == names
    assert [row["name"] for row in results["rows"]] == names and {"loader", "io", "tune"} <= set(names)
    assert results["notes"] == [f"{name}: {busy}" for name in names]
    assert {"cpu", "cores"} <= results["machine"].keys() and "torch" in results["versions"]
    written = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)|url\(|@import|<script|<link|src=\"\"", written), (
        "the page needs no other file"
    )
    assert written.count("data:image/png;base64,") == len(names) + 1, (
        "each case has a figure, and all have one together"
    )
    assert all(f"case={name}" in written for name in names)
    assert "1.50" in capsys.readouterr().out, "the ratio to the best peer is shown"
    for row in results["rows"]:
        assert (row["ours"], row["best_peer"], row["ratio_to_best_peer"]) == ("gdsdata", "readinto", 1.5)
        assert row["ratio_to_limit"] == 0.6 and row["gb_per_s"]["median"] == 6.0
    assert unnamed(results, documented()) == []


def test_a_case_that_fails_is_named_and_the_others_are_there(tmp_path, monkeypatch, capsys):
    in_one_row = case_row("dali", 4.0, error="RuntimeError: no such decoder\nfrom here\nand there")
    of_others = (case_row("gdsdata", 6.0, "readinto", 1.5), case_row("readinto", 4.0))
    failing = case_results(*of_others, in_one_row, verified=False)
    found = {"load": None, "latency": {"schema": case.SCHEMA, "case": "load", "rows": []}, "io": failing}
    leaves_results(monkeypatch, lambda name: found.get(name, case_results()), lambda name: int(name in found))
    (tmp_path / "out").mkdir()
    status, results = run_all(tmp_path)
    errors = {row["name"]: row["error"] for row in results["rows"] if row["error"]}
    assert status == 1 and results["verified"] is False and set(errors) == {"load", "latency"}
    assert "output of it" in errors["load"] and "ended with 1 before its report" in errors["latency"]
    (io,) = (row for row in results["rows"] if row["failed_rows"])
    assert io["name"] == "io" and io["failed_rows"] == ["dali: RuntimeError: no such decoder"]
    assert io["verified"] is True and io["ratio_to_best_peer"] == 1.5, "it counts the rows that did not fail"
    printed = capsys.readouterr().out
    assert all(f"FAILED: {name}, {name}: " in printed for name in found)
    page = (tmp_path / "out" / "report.md").read_text()
    assert all(f"- case={name}: `" in page for name in found) and "It left no results." in page
    assert "| **io (1 of its rows FAILED)** | " in page and "from here" not in page
    assert page.count("### safetensors, ") >= len(results["rows"]) - 2, "the page has the tables of the other cases"


def test_each_case_gets_the_settings_that_differ_from_the_defaults_and_its_own(tmp_path, monkeypatch):
    commands = leaves_results(monkeypatch, lambda name: case_results())
    (tmp_path / "out").mkdir()
    run_all(
        tmp_path, quick=False, engine={"workers": 3, "direct": "never", "queue_depth": 0}, case_cases=["io", "load"],
        case_settings=["io.depth=[1,8]", "load.tensor_bytes=4096"], case_repeats=2, case_cache=["warm"],
    )  # fmt: skip
    assert list(commands) == ["io", "load"]
    io, load = set(commands["io"]), set(commands["load"])
    common = {"device.name=cpu", "case.repeats=2", "case.cache=[warm]", "engine.workers=3", "engine.direct=never"}
    assert common <= io & load and "case.depth=[1,8]" in io - load and "case.tensor_bytes=4096" in load - io
    assert not any(one.startswith(("engine.queue_depth", "quick", "case.name", "case.cases")) for one in io | load)
    assert f"data.folder={tmp_path}/data" in io and f"hydra.run.dir={tmp_path}/out/io" in io


@pytest.mark.parametrize("fields, said", [
    ({"cases": ["oi"]}, "case.cases=oi"), ({"cases": ["all"]}, "case.cases=all"), ({"rows": ["gdsdata"]}, "say whose"),
    ({"settings": ["io.colour=1"]}, "no such setting"), ({"settings": ["colour.io=1"]}, "its case=colour"),
    ({"settings": ["io.depth"]}, "NAME=VALUE"),
])  # fmt: skip
def test_settings_that_make_no_sense_are_named(fields, said):
    with pytest.raises(ValueError, match=said):
        settings.check(settings.Settings(engine={}, case=cases.AllSettings(**fields)))


def test_the_output_of_a_case_is_passed_on_and_kept(tmp_path):
    said = []

    class Progress:
        def say(self, line):
            said.append(line)

    runner = bench_all.All(settings.Settings(case=cases.AllSettings(), engine={}), tmp_path, Progress())
    code = "import sys; print('a table', flush=True); print('gdsdata.bench: half of it', file=sys.stderr); sys.exit(3)"
    assert runner.run([*PRINTS, code], tmp_path / "output.log") == 3
    assert said == ["half of it"]
    assert {"a table", "gdsdata.bench: half of it"} == set((tmp_path / "output.log").read_text().splitlines())


def test_a_line_takes_the_largest_size_of_a_table_that_has_several():
    rows = [case_row("gdsdata", 9.0) | {"tensor_bytes": 4096}, case_row("gdsdata_engine", 5.0) | {"tensor_bytes": MIB}]
    rows.append(case_row("readinto", 50.0) | {"tensor_bytes": MIB})
    assert bench_all.best_of_ours(rows)["key"] == "gdsdata_engine"
    assert bench_all.best_of_ours([case_row("readinto", 5.0)]) is None


def test_two_runs_are_compared_case_by_case(tmp_path, monkeypatch, capsys):
    slow = case_results(case_row("gdsdata", 3.0, "readinto", 0.75), case_row("readinto", 4.0, "readinto", 1.0))
    for name, broken in (("a", ()), ("b", ("io",)), ("c", ())):
        (tmp_path / name).mkdir()
        leaves_results(
            monkeypatch,
            lambda one, name=name, broken=broken: (
                None if one in broken else slow if (name, one) == ("b", "load") else case_results()
            ),
        )
        run_all(tmp_path, name=name, case_cases=["load", "latency", "io"] if name != "c" else ["load"])
    a, b, c = (str(tmp_path / name) for name in "abc")
    capsys.readouterr()

    assert compare.main([a, b, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cases"]["load"]["verdicts"] == {"slower": 1, "within noise": 1}
    assert found["cases"]["latency"]["verdicts"] == {"within noise": 2}
    assert [one["case"] for one in found["failed"]] == ["io"]
    assert compare.main([a, b, "--fail-if-slower", "10"]) == 1
    printed = capsys.readouterr().out
    assert "case=io cannot be compared" in printed and "1 slower" in printed
    assert compare.main([a, a, "--fail-if-slower", "0"]) == 0
    capsys.readouterr()
    assert compare.main([a, c]) == 0
    assert "Only in A: case=latency" in capsys.readouterr().out
    assert compare.main([a, str(tmp_path / "a" / "load")]) == 2, (
        "results of all cases and of one case cannot be compared"
    )


def test_the_page_does_without_a_picture_where_no_case_has_a_peer(tmp_path):
    AllLayout({"rows": [{"ratios_to_best_peer": []}]}).plot(tmp_path / "results.png")
    assert not (tmp_path / "results.png").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_quick_run_of_some_cases_has_their_tables_and_pictures(tmp_path):
    on_disk(tmp_path)
    out = tmp_path / "out"
    chosen = "case.settings=['latency.work=[read]','io.direction=[read]','loader.rows=[gdsdata,index_select]']"
    done = bench(
        "case=all", "quick=true", "case.cases=[loader,latency,io,tune]", chosen, "case.cache=[warm]",
        f"data.folder={tmp_path}/data", f"hydra.run.dir={out}", cwd=tmp_path, timeout=380,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = results_in(out)
    assert results["verified"] is True and unnamed(results, documented()) == []
    assert {row["data"] for row in results_in(out / "io")["rows"]} == {"read"}
    assert {row["cache"] for row in results_in(out / "loader")["rows"]} == {"warm"}
    assert (out / "report.html").read_text().count("data:image/png;base64,") == 5
    assert "case=latency, 2 of 4" in done.stderr and "gdsdata.bench: start: " in done.stderr


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_a_quick_run_on_a_gpu(tmp_path):
    out = tmp_path / "out"
    done = bench(
        "case=all", "quick=true", "device=cuda", "case.cases=[load,tune]", f"data.folder={tmp_path}/data",
        f"hydra.run.dir={out}", cwd=tmp_path, timeout=380,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = results_in(out)
    assert results["verified"] is True and results["device"]["model"]

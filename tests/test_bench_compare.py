"""`python -m gdsdata.bench.compare`, results.json's description, and report.html."""

import copy
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from gdsdata.bench import cases, compare, settings
from gdsdata.bench import run as bench_run
from gdsdata.bench.harness import case
from gdsdata.bench.measure import intervals
from gdsdata.bench.report import page

pytestmark = pytest.mark.usefixtures("quick_programs")

REPOSITORY = Path(__file__).resolve().parents[1]
MIB = 2**20


# ------------------------------------------------------------------------------------------------ statistics


@pytest.mark.parametrize(
    "confidence, dof, expected",  # fields of printed tables
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.3027),
        (0.99, 2, 9.9248),
        (0.95, 4, 2.7764),
        (0.99, 4, 4.6041),
        (0.999, 3, 12.9240),
        (0.95, 30, 2.0423),
        (0.95, 100, 1.9840),
        (0.95, 1_000_000, 1.9600),
    ],
)
def test_students_t_is_that_of_the_tables(confidence, dof, expected):
    assert intervals.t_quantile(confidence, dof) == pytest.approx(expected, abs=6e-5)
    assert intervals.t_probability(expected, dof) == pytest.approx(confidence, abs=1e-5)


def test_students_t_of_a_dof_that_is_no_whole_number_lies_between_its_neighbors():
    quantiles = [intervals.t_quantile(0.95, dof) for dof in (2, 2.5, 3)]
    assert quantiles == sorted(quantiles, reverse=True) and len(set(quantiles)) == 3


def test_described_values_are_numpys():
    values = list(np.random.default_rng(1).gamma(2.0, 1e-3, 137))
    found = intervals.described(values)
    assert found["count"] == 137
    assert found["mean"] == pytest.approx(np.mean(values)) and found["stdev"] == pytest.approx(np.std(values, ddof=1))
    for name, share in (("median", 50), ("p90", 90), ("p99", 99), ("min", 0), ("max", 100)):
        assert found[name] == pytest.approx(np.percentile(values, share))
    # By hand: mean 2, deviation 1, t(2 dof) 4.3027, half width 4.3027 / sqrt(3).
    assert intervals.mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    single = intervals.described([0.5])
    assert (single["mean"], single["mean_low"], single["stdev"]) == (0.5, None, None)


def test_the_interval_of_the_mean_holds_the_mean_in_95_of_100_cases_even_of_three_values():
    generator, held = np.random.default_rng(2), 0
    for values in generator.normal(10.0, 1.0, (2000, 3)).tolist():
        low, high = intervals.mean_interval(values)
        held += low <= 10.0 <= high
    assert 0.93 < held / 2000 < 0.97


# ------------------------------------------------------------------------------------------------ verdicts


def draws(scatter, repeats, factor, count, seed):
    """Return the verdicts on pairs of runs, the second of which takes `factor` times as long."""
    generator = np.random.default_rng(seed)
    for logs in generator.normal(0.0, scatter, (count, 2, repeats)):
        before, after = np.exp(logs)
        yield compare.judged(before.tolist(), (factor * after).tolist())


@pytest.mark.parametrize("repeats", [3, 5, 10])
@pytest.mark.parametrize("scatter", [0.03, 0.2])
def test_equal_noisy_runs_are_seldom_called_different(repeats, scatter):
    wrong = sum(found["verdict"] in ("slower", "faster") for found in draws(scatter, repeats, 1.0, 600, seed=repeats))
    assert wrong <= 600 * 0.02


def test_a_slowdown_of_20_percent_is_found():
    for repeats, scatter, share in ((3, 0.01, 0.99), (3, 0.03, 0.6), (5, 0.03, 0.98), (10, 0.06, 0.9)):
        found = [one["verdict"] for one in draws(scatter, repeats, 1.2, 200, seed=repeats)]
        assert found.count("slower") >= 200 * share and "faster" not in found
        back = [one["verdict"] for one in draws(scatter, repeats, 1 / 1.2, 200, seed=repeats)]
        assert back.count("faster") >= 200 * share and "slower" not in back


def test_one_repeat_that_is_far_off_makes_no_change():
    found = compare.judged([1.00, 1.01, 0.99], [1.0, 1.01, 3.0])
    assert found["verdict"] == "within noise"


def test_a_change_of_one_percent_is_none_however_sure():
    assert compare.judged([1.0, 1.0001, 0.9999], [1.01, 1.0101, 1.0099])["verdict"] == "within noise"
    assert compare.judged([1.0, 1.0001, 0.9999], [1.03, 1.0301, 1.0299])["verdict"] == "slower"


def test_a_change_that_one_repeat_of_the_other_run_reaches_is_within_noise():
    before, after = [1.0] * 9 + [1.2], [1.1] * 10
    low = intervals.ratio_interval(before, after, compare.CONFIDENCE)[1]
    assert low > 1, "Welch's interval alone would call it slower"
    assert compare.judged(before, after)["verdict"] == "within noise"
    assert compare.judged(before, [1.25] * 10)["verdict"] == "slower"


def test_two_repeats_are_too_few():
    found = compare.judged([1.0, 1.0], [2.0, 2.0, 2.0])
    assert (found["verdict"], found["change_percent"], found["low_percent"]) == (compare.TOO_FEW, 100.0, None)


# ------------------------------------------------------------------------------------------------ whole files


def made_row(key, seconds, **fields):
    runs = [{"bytes": 10**9, "seconds": one, "cpu_seconds": 0.1} for one in seconds]
    row = {"data": "tokens", "dtype": "raw", "cache": "warm", "key": key, "name": key, "error": None, "runs": runs}
    return row | {"path": "direct", "limit": {"gb_per_s": 10.0, "name": "memory copy"}} | fields


def made_results(*rows, **fields):
    results = {
        "schema": case.SCHEMA,
        "case": "load",
        "when": "2026-01-01T00:00:00+00:00",
        "machine": {"cpu": "A", "cores": 2, "load_before": 0.5},
        "versions": {"torch": "2.15.0"},
        "device": {"name": "cpu"},
        "data": {"tokens": {"file_system": "ext4", "first_file": "/a"}},
        "config": {"case": {"repeats": 3}},
        "rows": list(rows),
        "notes": [],
        "verified": True,
    }
    return results | fields


def written(folder, results):
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results))
    return str(folder)


@pytest.fixture
def two(tmp_path):
    """Make results of two runs, and of a third one (C) on another machine at half the speed.

    One row is 20 % slower, one is as it was, and one is in A or B only.
    """
    steady = [1.0, 1.01, 0.99]
    a = made_results(made_row("gdsdata", steady), made_row("same", steady), made_row("gone", steady))
    slower, same = made_row("gdsdata", [1.2, 1.21, 1.19]), made_row("same", [1.005, 1.0, 0.99])
    b = made_results(slower, same, made_row("new", steady))
    c = copy.deepcopy(a)
    c["machine"] |= {"cpu": "B", "load_before": 9.0}
    c["versions"]["torch"] = "2.11.0"
    c["notes"] = ["Other programs kept up to 2.0 cores busy during all of it."]
    for row in c["rows"]:
        row["limit"]["gb_per_s"] = 5.0
        for run in row["runs"]:
            run["seconds"] *= 2
    return [written(tmp_path / name, results) for name, results in (("a", a), ("b", b), ("c", c))]


def test_a_slowdown_is_said_and_fails_where_asked(two, capsys):
    a, b, _ = two
    assert compare.main([a, b]) == 0, "without --fail-if-slower it only says so"
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if " gdsdata " in line)
    assert "slower" in line and "+20.0 %" in line and "1 GB/s" in line and "0.833 GB/s" in line
    assert "within noise" in next(line for line in said.splitlines() if " same " in line)
    assert "Only in A: tokens raw, warm: gone" in said and "Only in B: tokens raw, warm: new" in said
    assert "MACHINE" not in said and "differ" not in said
    assert compare.main([a, b, "--fail-if-slower", "15"]) == 1
    assert compare.main([a, b, "--fail-if-slower", "25"]) == 0
    assert compare.main([b, a, "--fail-if-slower", "1"]) == 0, "faster is no failure"


def test_machines_and_versions_that_differ_are_said_first(two, capsys):
    a, _, c = two
    assert compare.main([a, c]) == 0
    said = capsys.readouterr().out
    assert said.startswith("NOT THE SAME MACHINE:\n  cpu: A -> B\n")
    assert "Versions differ:\n  torch: 2.15.0 -> 2.11.0" in said and "load_before" not in said
    assert "In B: Other programs kept up to 2.0 cores busy" in said
    assert said.index("torch:") < said.index("B against A")
    assert said.count("slower with the machine") == 4, "three rows and the summary say it"
    assert compare.main([a, c, "--fail-if-slower", "1"]) == 0, "a slower machine is no failure"


def test_a_row_that_is_slower_by_as_much_as_its_peers_is_slower_with_the_machine(tmp_path, capsys):
    names = ["gdsdata", "gdsdata_engine", "peer", "other"]
    a = written(tmp_path / "a", made_results(*[made_row(name, [1.0, 1.01, 0.99]) for name in names]))
    slower = {"gdsdata": 1.3, "gdsdata_engine": 2.0, "peer": 1.25, "other": 1.2}
    rows = [made_row(name, [factor, factor * 1.01, factor * 0.99]) for name, factor in slower.items()]
    b = written(tmp_path / "b", made_results(*rows))
    assert compare.main([a, b, "--json", "--fail-if-slower", "10"]) == 1
    verdicts = {row["key"]: row["verdict"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert verdicts.pop("gdsdata_engine") == "slower", "by far more than its peers"
    assert set(verdicts.values()) == {"slower with the machine"}


def test_without_rich_the_error_names_the_extra(two, monkeypatch, capsys):
    a, b, _ = two
    monkeypatch.setitem(sys.modules, "rich", None)
    assert compare.main([a, b]) == 2
    assert "rich not installed: pip install 'gdsdata[bench]', or use --json" in capsys.readouterr().err
    assert compare.main([a, b, "--json"]) == 0


def test_json_has_all_that_the_table_says(two, capsys):
    a, b, _ = two
    compare.main([a, b + "/results.json", "--json"])
    found = json.loads(capsys.readouterr().out)
    rows = {row["key"]: row for row in found["rows"]}
    assert rows["gdsdata"]["verdict"] == "slower" and rows["gdsdata"]["repeats"] == [3, 3]
    assert rows["gdsdata"]["low_percent"] < 20 < rows["gdsdata"]["high_percent"]
    assert found["only_in_a"] == [["tokens", "raw", "warm", "gone"]]
    assert found["verdicts"] == {"slower": 1, "within noise": 1}


@pytest.mark.parametrize("by", ["a kill", "Ctrl-C"])
def test_rows_that_fail_and_runs_that_were_broken_off_are_said(tmp_path, capsys, by):
    a = written(tmp_path / "a", made_results(made_row("gdsdata", [1.0] * 3), made_row("old", [], error="it broke")))
    results = made_results(
        made_row("gdsdata", [], error="ValueError: wrong bytes"), made_row("old", [1.0] * 3), path="x"
    )
    if by == "Ctrl-C":
        results["broken_off"] = True
    else:
        del results["verified"]
    b = written(tmp_path / "b", results)
    assert compare.main([a, b, "--fail-if-slower", "5"]) == 1
    said = capsys.readouterr().out
    assert "failed in B: ValueError: wrong bytes" in said and "failed in A: it broke" in said
    assert "B was broken off" in said


def test_cpu_time_below_the_clocks_tick_is_not_compared_and_the_rest_is(tmp_path, capsys):
    rows = [made_row("gdsdata", [1.0, 1.01, 0.99]), made_row("gdsdata", [1.5, 1.51, 1.49])]
    rows[1]["runs"][0]["cpu_seconds"] = 0.0
    a, b = (written(tmp_path / name, made_results(row)) for name, row in zip("ab", rows, strict=True))
    assert compare.main([a, b, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["rows"]
    assert found["verdict"] == "slower" and found["cpu"]["verdict"] == compare.TOO_FEW


def test_another_path_is_said(tmp_path, capsys):
    a = written(tmp_path / "a", made_results(made_row("gdsdata", [1.0] * 3)))
    b = written(tmp_path / "b", made_results(made_row("gdsdata", [1.0] * 3, path="buffered 70%, direct 30%")))
    compare.main([a, b])
    assert "served by buffered 70%, direct 30%, before by direct" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "No such file or directory; give a results.json, or the folder of a run"),
        ("nothing", "is no results.json of gdsdata.bench: Expecting value"),
        ("[1]", "it has no schema, case and rows"),
        (json.dumps({"schema": 1, "case": "load", "rows": []}), "has schema 1, and this gdsdata reads 2"),
        (json.dumps({"schema": 2, "case": "loader", "rows": []}), "A is of case=load and B of case=loader"),
    ],
)
def test_files_that_cannot_be_compared_are_refused(tmp_path, capsys, content, said):
    a = written(tmp_path / "a", made_results(made_row("gdsdata", [1.0] * 3)))
    if content is not None:
        (tmp_path / "b").write_text(content)
    assert compare.main([a, str(tmp_path / "b")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage", [{"data": ["x"]}, {"runs": [{"seconds": 1.0, "bytes": 0}]}, {"runs": 3}, {"runs": []}]
)
def test_damaged_rows_are_refused_in_words(tmp_path, capsys, damage):
    rows = made_row("gdsdata", [1.0] * 3), made_row("gdsdata", [1.0] * 3, **damage)
    a, b = (written(tmp_path / name, made_results(row)) for name, row in zip("ab", rows, strict=True))
    damaged = json.loads((tmp_path / "b" / "results.json").read_text())
    del damaged["rows"][0]["key"]
    c = written(tmp_path / "c", damaged)
    for other in (b, c):
        assert compare.main([a, other]) == 2
        assert "a row of A or B is damaged" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ docs/bench_results.md

LONGER = ("loader", "replicas", "latency", "tensor", "io", "train", "startup", "remote")
SPREAD = {"median", "min", "max"}
DESCRIBED = set(intervals.described([1.0, 2.0]))


def documented():
    """Return {field: type} from the tables of docs/bench_results.md."""
    described_at = REPOSITORY / "docs" / "bench_results.md"
    if not described_at.exists():
        pytest.skip("no docs/ beside these tests")
    return dict(re.findall(r"^\| `([^`]+)` \| (\w+) \|", described_at.read_text(), re.MULTILINE))


def leaves(value, at=""):
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{at}.{name}" if at else name)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from leaves(inner, f"{at}[]")
    else:
        yield at, value


def unnamed(results, fields):
    """Return the fields that the page does not name."""
    patterns = {}
    for name, kind in fields.items():
        pattern = re.escape(name).replace(r"\*\*", ".*").replace(r"\*", r"[^\[\]]+?")
        inner = {"spread": SPREAD, "described": DESCRIBED}.get(kind)
        patterns[name] = re.compile(pattern + (rf"(\.({'|'.join(inner)}))?" if inner else ""))
    found = set()
    for at, value in leaves(results):
        empty = value in ({}, [])  # it has no field to name
        if not empty and not any(pattern.fullmatch(at) for pattern in patterns.values()):
            found.add(at)
    return sorted(found)


@pytest.mark.parametrize("name", ["load", *(pytest.param(one, marks=pytest.mark.slow) for one in LONGER)])
def test_results_have_no_field_that_the_page_does_not_name(tmp_path, name):
    rows = {"loader": ["gdsdata", "index_select"], "load": ["gdsdata", "readinto"], "latency": ["gdsdata", "python"]}
    rows |= {"io": ["gdsdata_batch", "pread"], "tensor": ["gdsdata_engine", "python"]}
    rows["train"] = ["ceiling", "gdsdata", "dataloader", "gdsdata_saving"]
    rows["startup"] = ["gdsdata", "dataloader_0"]
    rows["replicas"] = ["gdsdata", "gdsdata_alone"]
    rows["remote"] = ["gdsdata", "boto3"]
    chosen = settings.made_small(settings.Settings(engine={}, case=cases.SETTINGS[name](rows=rows[name])))
    chosen.data.folder, chosen.data.size_bytes, chosen.data.kind = str(tmp_path / "data"), 4 * MIB, "tokens"
    chosen.case.limit_seconds = 0.05
    if name == "latency":
        chosen.case.sizes_bytes = [4096, 100_001]
    if name == "train":
        chosen.case.work = ["volumes"]
    if name == "tensor":
        chosen.case.size_bytes = MIB
    assert bench_run.main(settings.check(chosen), tmp_path) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["schema"] == case.SCHEMA and unnamed(results, documented()) == []
    results["rows"][0]["secret"] = 1
    assert unnamed(results, documented()) == ["rows[].secret"], "the test finds a field without documentation"

    written_page = (tmp_path / "report.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)|url\(|@import|<script|<link", written_page), (
        "the page needs no other file"
    )
    assert "data:image/png;base64," in written_page and "prefers-color-scheme: dark" in written_page
    shown = re.sub(r"<[^>]+>", " ", written_page)
    for row in results["rows"]:
        assert row["name"] in shown and row["key"]
    for line in (tmp_path / "report.md").read_text().splitlines():
        if line.startswith("## "):
            assert line[3:] in shown


KEPT = sorted((REPOSITORY / "benchmarks" / "results").rglob("*.json"))


@pytest.mark.parametrize("file", KEPT, ids=lambda path: path.stem)
def test_kept_results_of_this_schema_have_no_field_that_the_page_does_not_name(file):
    results = json.loads(file.read_text())
    if not isinstance(results, dict) or results.get("schema") != case.SCHEMA:
        pytest.skip("of another schema")
    assert unnamed(results, documented()) == []


def test_a_page_shows_markup_as_text_and_misses_no_picture_that_is_not_there(tmp_path):
    made = page.page(
        "# A <script>alert(1)</script>\n\n![gone](gone.png)\n\n| a |\n|---|\n| `x<y` & **b** |\n", tmp_path
    )
    assert "<script>" not in made and "<title>A &lt;script&gt;" in made
    assert 'src=""' in made and "<code>x&lt;y</code> &amp; <strong>b</strong>" in made

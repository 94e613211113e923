"""case=tune of the bench: the search's results, its gains, and the use of its answer."""

import random
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from test_bench import MIB, bench, results_in, small
from test_bench_compare import documented, unnamed

from gdsdata.bench import cases, compare, settings
from gdsdata.bench import run as bench_run
from gdsdata.bench.cases.settings import quoted
from gdsdata.bench.cases.tune import case as tune
from gdsdata.bench.cases.tune import row as tune_row
from gdsdata.bench.cases.tune import search
from gdsdata.bench.harness.process import RowFailed
from gdsdata.io.options import EngineOptions

pytestmark = pytest.mark.usefixtures("quick_programs")

TUNING = Path(__file__).parent.parent / "csrc" / "tuning.h"
SPACE = {"workers": [1, 2, 4, 8], "queue_depth": [16, 256], "direct": ["always", "never"]}


class Staged:
    """A measurement with noise, whose rate is a known function of the options.

    Each measurement takes a second of its clock.
    """

    def __init__(self, rate_of, scatter, seed):
        self.rate_of, self.scatter, self.random = rate_of, scatter, random.Random(seed)
        self.now, self.count = 0.0, 0

    def __call__(self, options):
        self.now += 1
        self.count += 1
        return self.rate_of(options) * self.random.lognormvariate(0.0, self.scatter)

    def pairs(self, options, count=12):
        return search.confirmed([self(options) / self({}) for _ in range(count)])


def searched(measure, space=SPACE, seconds=1000, seed=0):
    found = search.Search(space, measure, seconds, random.Random(seed), clock=lambda: measure.now)
    return found, found.run()


def depth_pays_with_workers(options):
    """Two steps lead to the best options, and the second step alone is a loss."""
    rate = {1: 0.5, 4: 1.5, 8: 1.2}.get(options.get("workers"), 1.0)
    return rate * {256: 1.3 if options.get("workers") == 4 else 0.9}.get(options.get("queue_depth"), 1.0)


# ------------------------------------------------------------------------------------------------ the search


@pytest.mark.parametrize("seed", range(8))
def test_a_setting_that_pays_is_found_and_its_gain_is_reported(seed):
    measure = Staged(depth_pays_with_workers, 0.05, seed)
    found, best = searched(measure, seed=seed)
    assert best.items() >= {"workers": 4, "queue_depth": 256}.items() and found.complete
    gain = measure.pairs(best)
    assert gain["confirmed"] and gain["low"] < 1.5 * 1.3 < gain["high"]


def test_a_parameter_that_pays_only_later_is_found_by_the_second_pass():
    measure = Staged(depth_pays_with_workers, 0.0, 0)
    found, best = searched(measure, {"queue_depth": [256], "workers": [4]})
    assert best == {"workers": 4, "queue_depth": 256}
    assert [one.parameter for one in found.tried if one.options == best][0] == "queue_depth"


def test_where_settings_change_nothing_the_default_is_as_good():
    gains = []
    for seed in range(200):
        measure = Staged(lambda options: 1.0, 0.1, seed)
        _, best = searched(measure, seed=seed)
        gains.append(measure.pairs(best) if best else search.confirmed([]))
    lucky = [gain for gain in gains if gain["ratio"] is not None]
    assert len(lucky) > 100, "noise wins comparisons, so the search alone proves nothing"
    assert sum(gain["confirmed"] for gain in gains) <= 4
    assert "default is as good" in search.said(next(gain for gain in lucky if not gain["confirmed"]))
    assert "default is as good" in search.said(search.confirmed([]))


def test_a_machine_that_becomes_slower_while_it_searches_makes_no_setting_better():
    measure = Staged(lambda options: 1.0, 0.02, 3)
    measure.rate_of = lambda options: 1.0 if measure.now < 15 else 0.4
    for seed in range(20):
        measure.now = 0
        _, best = searched(measure, seed=seed)
        assert not best or not measure.pairs(best)["confirmed"]


def test_a_worse_setting_is_not_chosen_and_slow_ones_leave_early():
    measure = Staged(lambda options: 0.5 if options else 1.0, 0.02, 0)
    found, best = searched(measure)
    assert best == {}
    assert {len(one.rates) for one in found.tried if one.options} == {1, 2, 3}
    assert measure.count < search.ROUNDS * len(found.tried)


def test_the_search_ends_with_its_time_and_says_so():
    measure = Staged(depth_pays_with_workers, 0.0, 0)
    found, best = searched(measure, seconds=7)
    assert measure.count == 7 and not found.complete
    assert best == {}, "a comparison that was broken off moves nothing"
    found, best = searched(measure, seconds=15)
    assert best == {"workers": 4} and not found.complete


def test_a_setting_that_cannot_be_is_tried_once_and_named():
    asked = []

    def measure(options):
        asked.append(options)
        if options.get("workers") == 8:
            raise search.Refused("no memory for 8 workers")
        return depth_pays_with_workers(options)

    found = search.Search(SPACE, measure, 1000, random.Random(0))
    assert found.run()["workers"] == 4
    assert sum(options.get("workers") == 8 and len(options) == 1 for options in asked) == 1
    assert {one.error for one in found.tried if one.options == {"workers": 8}} == {"no memory for 8 workers"}


@pytest.mark.parametrize(
    "ratios, is_confirmed",
    [([1.2, 1.21, 1.19, 1.2, 1.22, 1.2], True), ([1.2, 1.21, 1.19, 1.2], False), ([1.01] * 20, False), ([], False),
     ([0.8] * 10, False), ([1.6, 0.9, 1.3, 0.8, 1.4, 1.1], False)],
)  # fmt: skip
def test_a_gain_counts_where_enough_pairs_show_it_beyond_their_noise(ratios, is_confirmed):
    assert search.confirmed(ratios)["confirmed"] is is_confirmed


# ------------------------------------------------------------------------------------------------ the case


class Process:
    """Stands for a row's process: its rate is staged, and each call of verify is recorded."""

    def __init__(self, rate_of, wrong=lambda options: False):
        self.rate_of, self.wrong, self.verified, self.opened = rate_of, wrong, [], None
        self.random = random.Random(0)
        self.process = self

    def poll(self):
        return None

    def ask(self, do, options=None, **rest):
        if do == "verify":
            if self.wrong(options):
                raise RowFailed(f"WrongBytes: at {options}")
            self.verified.append(options)
            return {"checked_bytes": MIB}
        if do == "open":
            self.opened = options
        return {}

    def run(self, seconds, once):
        rate = self.rate_of(self.opened) * self.random.lognormvariate(0.0, 0.02)
        return {
            "bytes": 10**8, "seconds": 0.1 / rate, "cpu_seconds": 0.1, "peak_bytes": 0, "others_cores": 0.0,
            "served": {"direct": 10**8}, "path": "",
        }  # fmt: skip

    def dismiss(self):
        pass

    def end(self, within_s):
        pass


def staged(tmp_path, monkeypatch, process, engine=None, **fields):
    chosen = small(tmp_path, cases.TuneSettings, **fields)
    chosen.case.workers, chosen.case.queue_depth, chosen.case.repeats = [1, 2, 4, 8], [16, 256], 10
    chosen.case.budget_s = 60.0  # a busy machine needs it
    chosen.engine = engine or {}
    monkeypatch.setattr(tune.Tune, "process", lambda self, name: self.processes.setdefault(name, process))
    monkeypatch.setattr(tune.Tune, "start", lambda self, source, names: {name: self.process(name) for name in names})
    (tmp_path / "out").mkdir(parents=True)
    status = bench_run.main(chosen, tmp_path / "out")
    return status, results_in(tmp_path / "out")


def test_the_best_options_are_printed_with_their_gain_as_yaml_and_as_a_command(tmp_path, monkeypatch, capsys):
    process = Process(depth_pays_with_workers)
    status, results = staged(tmp_path, monkeypatch, process, case_cache=["cold"])
    (answer,), (default, best) = results["tune"], results["rows"]
    assert status == 0 and results["verified"] is True
    assert answer["best"] == {"workers": 4, "queue_depth": 256} and answer["complete"]
    assert answer["gain"]["confirmed"] and answer["gain"]["low"] < 1.95 < answer["gain"]["high"]
    assert (default["key"], best["key"]) == ("gdsdata_default", "gdsdata_tuned")
    assert best["gb_per_s"]["median"] == pytest.approx(1.95, rel=0.1) and default["ratio_to_limit"] > 0
    assert unnamed(results, documented()) == []
    assert len(process.verified) == len({str(one) for one in process.verified}), "each setting's bytes, once"
    for text in (capsys.readouterr().out, (tmp_path / "out" / "report.md").read_text()):
        assert "workers: 4" in text and "engine.queue_depth=256" in text and answer["command"] in text
        assert "gdsdata.EngineOptions(workers=4, queue_depth=256)" in text
        assert re.search(r"\d\.\d\d times the default's rate \(1\.\d\d to \d\.\d\d, 99 % interval of \d+ pairs", text)
    assert (tmp_path / "out" / "results.png").read_bytes().startswith(b"\x89PNG")


def test_where_nothing_pays_the_answer_is_the_default(tmp_path, monkeypatch, capsys):
    status, results = staged(tmp_path, monkeypatch, Process(lambda options: 1.0), {"backend": "posix"})
    (answer,) = results["tune"]
    assert status == 0 and answer["best"] == {"backend": "posix"} and not answer["gain"]["confirmed"]
    assert "he default is as good" in capsys.readouterr().out
    assert set(yaml.safe_load(answer["yaml"])) == {"defaults", "backend"}


def test_wrong_bytes_of_any_setting_fail_the_run(tmp_path, monkeypatch):
    process = Process(depth_pays_with_workers, wrong=lambda options: options.get("workers") == 8)
    status, results = staged(tmp_path, monkeypatch, process)
    assert status == 1 and results["verified"] is False
    assert "'workers': 8" in results["rows"][0]["error"]
    assert "NOT VERIFIED" in (tmp_path / "out" / "report.md").read_text()


def test_two_runs_can_be_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune.Tune, "take_limits", lambda *_: {"direct_sequential": {"gb_per_s": 5.0}})
    staged(tmp_path, monkeypatch, Process(depth_pays_with_workers), case_cache=["cold"])
    staged(tmp_path / "second", monkeypatch, Process(lambda options: 0.5 * depth_pays_with_workers(options)))
    capsys.readouterr()
    status = compare.main([str(tmp_path / "out"), str(tmp_path / "second" / "out"), "--fail-if-slower", "50"])
    assert "the best found" in capsys.readouterr().out and status == 1


# ------------------------------------------------------------------------------------------------ its work


def row_of(name, files, tensor_bytes):
    source = tune.Files("", files, tensor_bytes, "")
    return getattr(tune_row, name)("gdsdata", source, cases.TuneSettings(), {}, "cpu")


def test_reads_that_return_wrong_bytes_are_found(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 4096)
    reads = row_of("Reads", [str(path)], 300_000)
    assert reads.verify({}) == {"checked_bytes": MIB}
    with open(path, "r+b") as file:
        file.seek(700_000)
        file.write(b"\x01\x02\x03")
    with pytest.raises(ValueError, match="the 300,000 bytes from 600,000 on are not"):
        reads.verify({"workers": 2})
    reads.close()


def test_reads_once_read_every_byte_once_and_short_files_too(tmp_path):
    for name, size in (("a", 5), ("b", 100_000)):
        (tmp_path / name).write_bytes(b"x" * size)
    files = tune.plain_files(str(tmp_path))
    reads = row_of("Reads", files, 4096)
    reads.open({})
    found = reads.run(60.0, once=True)
    assert found["bytes"] == 100_005 == sum(found["served"].values())
    assert reads.run(0.05, once=False)["bytes"] > 100_005
    reads.close()


def test_writes_are_compared_and_leave_nothing(tmp_path):
    writes = row_of("Writes", [str(tmp_path)], 100_001)
    assert writes.verify({"direct": "never"}) == {"checked_bytes": 100_001}
    writes.open({})
    assert writes.run(0.01, once=False)["bytes"] % 100_001 == 0
    writes.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("override, said", [
    ("case.rows=[gdsdata]", "no rows"), ("case.workers=[0]", "each must be 1 or more"),
    ("case.direct=[often]", "auto or always or never"), ("case.work=[copy]", "read or batches or write"),
])  # fmt: skip
def test_settings_that_make_no_sense_are_named(tmp_path, override, said):
    name, _, value = override.removeprefix("case.").partition("=")
    values = [int(one) if one.isdigit() else one for one in value.strip("[]").split(",")]
    with pytest.raises(ValueError, match=said):
        settings.check(settings.Settings(engine={}, case=cases.TuneSettings(**{name: values})))


def default_of(constant):
    """Return a constant of the engine's tuning.h."""
    ((number, shift),) = re.findall(rf"{constant} = (\d+)(?: << (\d+))?;", TUNING.read_text())
    return int(number) << int(shift or 0)


@pytest.mark.parametrize(("device", "its"), [("cpu", "Host"), ("cuda", "Device")])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_values_that_are_the_engines_defaults_are_not_tried(device, its, kind):
    segment, depth = default_of(f"k{its}{kind.title()}SegmentBytes"), default_of("kQueueDepth")
    chosen = cases.TuneSettings(segment_bytes=[segment, 5 * MIB], queue_depth=[7, depth])
    bench_side = SimpleNamespace(case=chosen, device=torch.device(device), base={})
    space = tune.Tune.space(bench_side, SimpleNamespace(source=SimpleNamespace(kind=kind), cache="cold"))
    assert (space["segment_bytes"], space["queue_depth"]) == ([5 * MIB], [7])


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.mark.slow
def test_a_quick_run_verifies_bytes_and_its_yaml_is_an_engine_group(tmp_path):
    own = tmp_path / "it's mine.bin"
    own.write_bytes(bytes(range(251)) * 40_000)
    out = tmp_path / "out"
    done = bench(
        "case=tune", "quick=true", "case.cache=[warm]", "case.direct=[]", "case.budget_s=3", "engine=posix",
        "data.path=" + quoted(str(own)), f"hydra.run.dir={out}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + (out / "rows.log").read_text()
    results = results_in(out)
    assert results["verified"] is True and results["data"]["read"]["first_file"] == str(own)
    assert own.read_bytes() == bytes(range(251)) * 40_000
    (answer,) = results["tune"]
    assert answer["best"]["backend"] == "posix" and answer["tried"]

    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from gdsdata.bench.__main__ import register

    (out / "engine" / "read_warm.yaml").write_text(
        tune.yaml_text({"backend": "posix", "workers": 3, "direct": "never", "strict": True}, "made by hand")
    )
    GlobalHydra.instance().clear()
    register()
    with initialize_config_dir(str(settings.configs_folder()), version_base="1.3"):
        config = compose("config", overrides=[f"hydra.searchpath=[file://{out}]", "engine=read_warm"])
    GlobalHydra.instance().clear()
    wanted = EngineOptions(backend="posix", workers=3, direct="never", strict=True)
    assert EngineOptions(**config.engine) == wanted


@pytest.mark.slow
@pytest.mark.timeout(760)  # three runs of 250 s
@pytest.mark.parametrize("work, state", [("read", "warm"), ("batches", "warm"), ("write", "replaced")])
def test_the_command_that_is_printed_runs(tmp_path, work, state):
    group = f"{work}_{state}"
    out, folder = tmp_path / "out", tmp_path / "a folder"
    where = f"data.folder={quoted(str(folder))}"
    done = bench(
        "case=tune", "quick=true", "case.cache=[warm]", f"case.work=[{work}]", where, f"hydra.run.dir={out}",
        cwd=tmp_path, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (answer,) = results_in(out)["tune"]
    assert answer["group"] == group and answer["command"] in done.stdout
    command = shlex.split(answer["command"])
    assert command[:3] == ["python", "-m", "gdsdata.bench"]
    again = bench(
        *command[3:], "engine.workers=2", "quick=true", f"hydra.run.dir={tmp_path}/2", cwd=tmp_path, timeout=250
    )
    assert again.returncode == 0, again.stdout + again.stderr
    used = results_in(tmp_path / "2")["config"]["engine"]
    assert used["workers"] == 2
    again = bench(
        f"--config-dir={out}", *command[3:], f"engine={group}", "quick=true", f"hydra.run.dir={tmp_path}/3",
        cwd=tmp_path, timeout=250,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_quick_run_on_a_gpu(tmp_path):
    out = tmp_path / "out"
    done = bench(
        "case=tune", "quick=true", "device=cuda", "case.work=[read,batches,write]", f"data.folder={tmp_path}/data",
        f"hydra.run.dir={out}", cwd=tmp_path, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + (out / "rows.log").read_text()
    results = results_in(out)
    assert results["verified"] is True and results["device"]["model"]
    assert {answer["data"] for answer in results["tune"]} == {"read", "batches", "write"}

"""Ctrl-C on the bench: one line, nothing left behind, and a report of what was measured."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import default_interrupts, eventually
from quick_programs import NESTED
from test_bench import REPOSITORY, results_in, small
from test_bench_all import case_results

from gdsdata.bench import cases
from gdsdata.bench import run as bench_run
from gdsdata.bench.cases.all import case as bench_all
from gdsdata.bench.cases.latency.case import Latency
from gdsdata.bench.cases.startup import starts
from gdsdata.bench.harness import case, process

pytestmark = pytest.mark.usefixtures("quick_programs")

SIGINT_BIT = 1 << (signal.SIGINT - 1)
LATENCY = ["case=latency", "case.rows=[python,gdsdata]", "case.sizes_bytes=[4096,8192,16384,32768]", "case.repeats=1"]
LATENCY += ["case.iterations=1000000", "case.run_seconds=1", "case.limit_seconds=0.1", "case.work=[write]"]
ONE_ROW = {"case_work": ["read"], "case_cache": ["warm"], "case_rows": ["python"]}
LONG = ["data.size_bytes=4194304", "case.repeats=5000", "case.cache=[warm]"]


class Bench:
    """A run of the bench that a test interrupts together with all processes it has started."""

    def __init__(self, tmp_path, *settings):
        self.out, self.data = tmp_path / "out", tmp_path / "data"
        command = [sys.executable, "-m", "gdsdata.bench", "device=cpu", *settings]
        command += [f"data.folder={self.data}", f"hydra.run.dir={self.out}"]
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), NESTED: "1"}
        self.said = tmp_path / "said"
        with default_interrupts(), open(self.said, "w") as said:
            self.process = subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=said, stderr=said, start_new_session=True
            )

    def interrupt_when(self, condition):
        """Return its status and output."""
        try:
            assert eventually(condition, timeout_s=60), "the run did not reach the condition"
            time.sleep(0.3)
            os.killpg(self.process.pid, signal.SIGINT)
            status = self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
        return status, self.said.read_text()


def blocks_interrupts(pid):
    with open(f"/proc/{pid}/status") as status:
        (mask,) = [line.split()[1] for line in status if line.startswith("SigBlk:")]
    return bool(int(mask, 16) & SIGINT_BIT)


def test_an_interrupted_run_reports_its_results_and_ends_with_one_line(tmp_path):
    run = Bench(tmp_path, *LATENCY)
    status, said = run.interrupt_when((run.out / "results.json").exists)
    assert status == 130 and said.splitlines()[-1] == "gdsdata.bench: interrupted"
    assert "Traceback" not in (all_said := said + (run.out / "rows.log").read_text()), all_said
    results = results_in(run.out)
    kinds = {row["data"] for row in results["rows"]}
    assert results["broken_off"] is True and "write 4 KiB" in kinds and "write 32 KiB" not in kinds
    written = (run.out / "report.md").read_text()
    assert case.BROKEN_OFF in written and "| 4 KiB |" in written and (run.out / "report.html").exists()
    assert (run.out / "results.png").read_bytes().startswith(b"\x89PNG")
    assert os.listdir(run.data) == [], "its files are gone"


def test_interrupts_behind_the_first_cost_no_report(tmp_path):
    """`timeout -s INT` signals a program and its group, and a user may press Ctrl-C again."""
    run = Bench(tmp_path, *LATENCY)

    def several():
        if not (run.out / "results.json").exists():
            return False
        for _ in range(40):
            os.kill(run.process.pid, signal.SIGINT)
            time.sleep(0.01)
        return True

    status, said = run.interrupt_when(several)
    assert status == 130 and said.splitlines()[-1] == "gdsdata.bench: interrupted"
    assert case.BROKEN_OFF in (run.out / "report.md").read_text() and results_in(run.out)["broken_off"]


@pytest.mark.whole_end
@pytest.mark.parametrize("measured", [0, 1])
def test_an_interrupt_while_an_interrupted_bench_ends_is_not_seen(tmp_path, measured):
    ended = tmp_path / "ended"
    program = f"""
import atexit, os, pathlib, signal
from gdsdata.bench import __main__
from gdsdata.bench.cases.latency.case import Latency

runs, run = [], Latency.run

def interrupted(self, row):
    if len(runs) == {measured}:
        os.kill(os.getpid(), signal.SIGINT)
    runs.append(row)
    return run(self, row)

def late():
    os.kill(os.getpid(), signal.SIGINT)
    pathlib.Path({str(ended)!r}).touch()

Latency.run = interrupted
atexit.register(late)
__main__.main()
"""
    settings = ["case=latency", "case.rows=[python]", "case.work=[read]", "case.sizes_bytes=[4096]"]
    settings += ["case.cache=[warm]", "case.repeats=2", "case.iterations=6", "case.run_seconds=0.1"]
    settings += ["case.limit_seconds=0.1", "device=cpu", "data.size_bytes=1048576"]
    settings += [f"data.folder={tmp_path / 'data'}", f"hydra.run.dir={tmp_path / 'out'}"]
    command, environment = [sys.executable, "-c", program, *settings], {**os.environ, NESTED: "1"}
    with default_interrupts():
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and ended.exists()
    assert "Exception ignored" not in done.stderr
    assert done.stderr.splitlines()[-1] == "gdsdata.bench: interrupted"
    assert (tmp_path / "out" / "report.md").exists() == bool(measured)


def test_where_nothing_was_measured_the_line_is_all(tmp_path):
    run = Bench(tmp_path, *LATENCY)
    status, said = run.interrupt_when(lambda: run.data.exists() and os.listdir(run.data))
    assert status == 130 and said.splitlines()[-1] == "gdsdata.bench: interrupted"
    rows = run.out / "rows.log"  # there is none if no row has begun
    assert "Traceback" not in said + (rows.read_text() if rows.exists() else "")
    assert not (run.out / "report.md").exists() and os.listdir(run.data) == []


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    ["case=loader", "data=tokens", "case.rows=[dataloader_2]", "case.epochs=1000000", "case.run_seconds=60"],
    ["case=startup", "case.rows=[dataloader_2]", "case.workers=[2]", "case.state_bytes=[0]"],
], ids=lambda settings: settings[0])  # fmt: skip
def test_workers_of_a_row_say_nothing_either(tmp_path, settings):
    run = Bench(tmp_path, *LONG, *settings)
    status, said = run.interrupt_when(lambda: (run.out / "rows.log").exists() and time.sleep(6) is None)
    assert status == 130 and said.splitlines()[-1] == "gdsdata.bench: interrupted"
    assert "Traceback" not in said
    # Torch's threads that share a worker's memory log that the other end has gone.
    assert "KeyboardInterrupt" not in (run.out / "rows.log").read_text()


def test_a_rows_process_leaves_interrupts_to_the_bench(tmp_path):
    with open(tmp_path / "log", "wb") as log:
        row = process.RowProcess(log)
        try:
            os.kill(row.process.pid, signal.SIGINT)
            assert row.ask("device", device="cpu")
            assert blocks_interrupts(row.process.pid) and not blocks_interrupts(os.getpid())
        finally:
            row.end()
    assert (tmp_path / "log").read_bytes() == b""


def test_a_row_that_gives_no_answer_is_ended_and_its_stacks_are_logged(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "silent.py").write_text("""
import time

def hang(**_):
    time.sleep(3600)
""")
    with open(tmp_path / "log", "wb") as log:
        row = process.RowProcess(log)
        row.ask("device", device="cpu")
        row.send("load", row="silent:hang")
        with pytest.raises(process.RowFailed, match="no answer for 1 s: .*see rows.log"):
            row.receive(timeout=1)
        assert row.process.poll() is not None
    assert "in hang" in (tmp_path / "log").read_text()


def test_a_starting_script_leaves_interrupts_to_the_bench(tmp_path, monkeypatch):
    shows = tmp_path / "shows.py"
    shows.write_text("""
import json, signal
held = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
print(json.dumps({"held": held}))
""")
    monkeypatch.setattr(starts, "SCRIPT", shows)
    script = starts.Script(None, "shows", None)
    script.told = {}
    assert script.start()["held"] is True


def interrupted_at(monkeypatch, number):
    """Interrupt the bench in the place of the run with this number."""
    runs, run = [], Latency.run

    def break_off(self, row):
        runs.append(row)
        if len(runs) == number:
            raise KeyboardInterrupt
        return run(self, row)

    monkeypatch.setattr(Latency, "run", break_off)


def latency_settings(tmp_path, **fields):
    chosen = small(tmp_path, cases.LatencySettings, **ONE_ROW, **fields)
    chosen.case.iterations, chosen.case.sizes_bytes = 6, [4096, 8192]
    return chosen


def test_a_table_with_a_whole_turn_is_reported_with_the_turns_it_has(tmp_path, monkeypatch, capsys):
    interrupted_at(monkeypatch, 3)
    assert bench_run.main(latency_settings(tmp_path, case_repeats=5), tmp_path) == 130
    results = results_in(tmp_path)
    (row,) = results["rows"]
    assert len(row["runs"]) == 2 and row["latency_s"]["count"] == 12 and results["verified"]
    assert any("read 4 KiB uint8, warm: broken off after 2 of 5 turns" in note for note in results["notes"])
    assert f"Note: {case.BROKEN_OFF}" in capsys.readouterr().out.replace("\n", " ")


def test_rows_of_a_first_turn_are_reported_and_those_that_had_none_say_so(tmp_path, monkeypatch):
    interrupted_at(monkeypatch, 2)
    chosen = latency_settings(tmp_path, case_repeats=5)
    chosen.case.rows = ["python", "gdsdata"]
    assert bench_run.main(chosen, tmp_path) == 130
    measured, other = sorted(results_in(tmp_path)["rows"], key=lambda row: not row["runs"])
    assert len(measured["runs"]) == 1 and measured["error"] is None and measured["latency_s"]["count"] == 6
    assert other["error"] == case.NO_TURN and not other["runs"]
    assert case.NO_TURN in (tmp_path / "report.md").read_text()


def test_a_table_without_any_run_is_not_reported(tmp_path, monkeypatch):
    interrupted_at(monkeypatch, 2)
    assert bench_run.main(latency_settings(tmp_path, case_repeats=1), tmp_path) == 130
    assert [row["data"] for row in results_in(tmp_path)["rows"]] == ["read 4 KiB"]


def test_without_any_figure_an_interrupt_stays_one(tmp_path, monkeypatch):
    interrupted_at(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        bench_run.main(latency_settings(tmp_path, case_repeats=5), tmp_path)
    assert not (tmp_path / "report.md").exists() and os.listdir(tmp_path / "data") == []


def test_a_run_that_ends_by_itself_was_not_broken_off(tmp_path):
    assert bench_run.main(latency_settings(tmp_path, case_repeats=1), tmp_path) == 0
    assert results_in(tmp_path)["broken_off"] is False
    assert case.BROKEN_OFF not in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("earlier", [False, True], ids=["everything measured", "for the second time"])
def test_an_interrupt_while_processes_end_loses_no_report(tmp_path, monkeypatch, earlier):
    dismiss = process.RowProcess.dismiss

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)
        dismiss(self)

    monkeypatch.setattr(process.RowProcess, "dismiss", interrupted)
    if earlier:
        interrupted_at(monkeypatch, 2)
    with default_interrupts():
        status = bench_run.main(latency_settings(tmp_path, case_repeats=1), tmp_path)
    results = results_in(tmp_path)
    assert status == (130 if earlier else 0) and results["broken_off"] is earlier
    assert [row["data"] for row in results["rows"]] == ["read 4 KiB", "read 8 KiB"][: 1 if earlier else 2]
    assert (tmp_path / "report.md").exists()


@pytest.mark.new_interpreter  # a fork may lose an interrupt that comes at once
def test_all_passes_on_an_interrupt_that_comes_while_it_starts_a_case(tmp_path, monkeypatch):
    begun, run, started = [], bench_all.All.run, []

    def interrupted(*arguments, **options):
        started.append(popen(*arguments, **options))
        os.kill(os.getpid(), signal.SIGINT)
        return started[0]

    def stand_in(self, command, output):
        begun.append(output.parent.name)
        (output.parent / "results.json").write_text(json.dumps(case_results()))
        if len(begun) == 2:
            monkeypatch.setattr(subprocess, "Popen", interrupted)
            return run(self, [sys.executable, "-c", "import time; time.sleep(30)"], output)
        return 0

    popen = subprocess.Popen
    monkeypatch.setattr(bench_all.All, "run", stand_in)
    chosen = small(tmp_path, cases.AllSettings, case_cases=["load", "latency", "io"])
    with default_interrupts():
        assert bench_run.main(chosen, tmp_path) == 130
    assert started[0].poll() is not None, "the case still runs"
    assert begun == ["load", "latency"] and results_in(tmp_path)["broken_off"] is True


@pytest.mark.new_interpreter  # a fork would interrupt the call of Popen that starts it
def test_all_passes_it_on_once_and_its_page_has_what_is_there(tmp_path, monkeypatch):
    """The case that is running writes its own report, and no further one begins."""
    interrupts = f"import os, signal; os.kill({os.getpid()}, signal.SIGINT)"
    script = f"{interrupts}\nimport sys, time\ntry:\n    time.sleep(30)\nexcept KeyboardInterrupt:\n    sys.exit(130)"
    begun, run = [], bench_all.All.run

    def stand_in(self, command, output):
        begun.append(output.parent.name)
        (output.parent / "results.json").write_text(json.dumps(case_results()))
        if len(begun) == 2:
            return run(self, [sys.executable, "-c", script], output)
        return 0

    monkeypatch.setattr(bench_all.All, "run", stand_in)
    chosen = small(tmp_path, cases.AllSettings, case_cases=["load", "latency", "io"])
    with default_interrupts():
        assert bench_run.main(chosen, tmp_path) == 130
    results = results_in(tmp_path)
    assert begun == ["load", "latency"] == [row["name"] for row in results["rows"]]
    assert not any(row["error"] for row in results["rows"]) and results["broken_off"] is True
    assert case.BROKEN_OFF in (tmp_path / "report.md").read_text()

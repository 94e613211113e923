"""The soak's judge finds what grows, and only that, and a leak that is made on purpose."""

import mmap
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers import REPOSITORY, eventually
from long_runs.judge import judge, slope_of
from long_runs.leaks import LEAKS
from long_runs.plot import draw
from long_runs.sampler import Sampler, children_of, memory_of
from soak import watch

SAMPLES = 400


def rows(values, name="private_mib"):
    return [{"seconds": 5.0 * i, name: float(value)} for i, value in enumerate(values)]


def is_flat(values, name="private_mib"):
    (verdict,) = judge(rows(values, name))
    return verdict.is_flat


def noise(scale):
    return np.random.default_rng(0).normal(0, scale, SAMPLES)


@pytest.mark.parametrize(
    "values",
    [
        np.full(SAMPLES, 500.0),
        500 + noise(40),
        500 + 200 * (np.arange(SAMPLES) % 7 == 0),  # peaks
        500 - 100 * np.exp(-np.arange(SAMPLES) / 30),  # caches that fill at first
        500 + 300 * (np.arange(SAMPLES) > 0.9 * SAMPLES),  # one step, late
        500 - np.arange(SAMPLES) * 0.5,
    ],
    ids=["flat", "noisy", "peaks", "warm-up", "one step", "shrinking"],
)
def test_a_series_that_does_not_grow_is_flat(values):
    assert is_flat(values)


@pytest.mark.parametrize(
    "values",
    [
        500 + np.arange(SAMPLES) * 0.3,
        500 + np.arange(SAMPLES) * 0.3 + noise(40),
        500 + np.arange(SAMPLES) // 40 * 15,
        500 + np.arange(SAMPLES) % 13 * 20 + np.arange(SAMPLES) * 0.3,
    ],
    ids=["leaking", "noisy", "stepping", "sawtooth"],
)
def test_a_series_that_grows_is_not_flat(values):
    assert not is_flat(values)


def test_open_files_that_come_and_go_are_flat_however_many_there_are_at_the_end():
    busier = np.where(np.arange(SAMPLES) > SAMPLES // 2, 1.5, 1)
    files = 20 + np.abs(noise(60)) * busier
    assert slope_of(5.0 * np.arange(SAMPLES), files) * 5 * SAMPLES > 10
    assert is_flat(files, "fd_files")
    assert not is_flat(files + 0.08 * np.arange(SAMPLES), "fd_files")


def test_bounds_are_by_kind_and_progress_has_none():
    grows = np.arange(SAMPLES) * 0.05  # 15 over the judged time
    assert is_flat(500 + grows) and not is_flat(10 + grows, "fd_sockets") and not is_flat(10 + grows, "threads")
    assert judge(rows(grows, "count_batches")) == []


def test_a_few_objects_kept_for_each_save_are_found():
    saves = np.arange(SAMPLES) * 3
    assert is_flat(203_000 + noise(500), "count_objects")
    assert not is_flat(203_000 + noise(500) + 5 * saves, "count_objects")


@pytest.mark.parametrize("leaks_mib", [0, 100])
def test_memory_that_forked_children_share_is_judged_in_samples_without_children(leaks_mib):
    random = np.random.default_rng(0)
    with_child = random.random(SAMPLES) > np.linspace(0.1, 0.9, SAMPLES)  # the machine gets faster
    memory = np.where(with_child, 200, 600) + np.linspace(0, leaks_mib, SAMPLES)
    given = [
        {"seconds": 5.0 * i, "private_mib": float(memory[i]), "children": float(with_child[i])} for i in range(SAMPLES)
    ]
    assert {one.name: one.is_flat for one in judge(given)}["private_mib"] == (leaks_mib == 0)


def test_few_samples_are_not_judged():
    with pytest.raises(ValueError, match="too few"):
        judge(rows(range(9)))


def test_the_slope_ignores_a_fifth_of_outliers():
    times = np.arange(100.0)
    values = 3 * times
    values[::5] = 10**6
    assert slope_of(times, values) == pytest.approx(3, rel=0.01)


@pytest.mark.parametrize(
    ("leak", "series"), [("descriptors", "fd_other"), ("threads", "threads"), ("children", "children")]
)
def test_a_sample_counts_what_a_leak_keeps(tmp_path, leak, series):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from long_runs.leaks import LEAKS\n"
        "leak = LEAKS[sys.argv[2]]()\n"
        "for _ in sys.stdin: leak(); print(flush=True)"
    )
    command = [sys.executable, "-c", program, REPOSITORY / "tests", leak]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    sampler = Sampler(process.pid, tmp_path, tmp_path / "counts.json", tmp_path / "samples.csv", ())
    grandchildren = []
    try:
        found = []
        for _ in range(4):
            process.stdin.write("\n")
            process.stdout.readline()
            found.append(sampler.sample()[series])
            grandchildren = children_of(process.pid)
    finally:
        process.kill()
        process.communicate()
        for pid in grandchildren:
            subprocess.run(["kill", str(pid)], check=False)
    assert found == [found[0] + i for i in range(4)]
    sampler.write()
    assert (tmp_path / "samples.csv").read_text().startswith("seconds,rss_mib")


def test_pages_of_files_are_no_memory_of_the_process(tmp_path):
    with open(tmp_path / "file", "w+b") as file:
        file.write(bytes(2**24))
        file.flush()
        os.fsync(file.fileno())  # a page that is not written yet counts as changed
        before = memory_of(os.getpid())
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert sum(mapped[::4096]) == 0
            after = memory_of(os.getpid())
    assert after["rss_mib"] - before["rss_mib"] > 12
    assert after["private_mib"] - before["private_mib"] < 4 and after["pss_mib"] - before["pss_mib"] < 4


STANDS_STILL = """
import faulthandler, os, signal, sys, time
faulthandler.register(signal.SIGUSR1)

def stand_still():
    time.sleep(300)

if (child := os.fork()) == 0:
    stand_still()
print(child, flush=True)
time.sleep(300)
"""


def test_a_worker_that_stands_still_shows_its_stacks_and_ends_with_the_program():
    class Turns:
        def sample(self):
            return {"count_turns_0": 1}

    program = subprocess.Popen([sys.executable, "-c", STANDS_STILL], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child = int(program.stdout.readline())
    assert watch(program, Turns(), 60, 0.05, hang_s=0.3) == "a thread has ended no turn for 0.3 s"
    assert b"stand_still" in program.communicate()[1]  # the stacks of both may be mixed
    assert eventually(lambda: not os.path.exists(f"/proc/{child}/cwd"))


def test_a_plot_has_tenths_of_a_point_and_its_words_as_they_are(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    rows = [{"seconds": 60.0 * i, "rss_mib": 300 + i / 7} for i in range(40)]
    draw(rows, [], tmp_path / "soak.svg", "python tests/soak.py --hours 1.025")
    drawn = (tmp_path / "soak.svg").read_text()
    assert "--hours 1.025<" in drawn and f"Matplotlib v{matplotlib.__version__}" in drawn
    places = re.findall(r' (?:d|x|y|transform)="([^"]*)"', drawn)
    assert len(places) > 100 and not any(re.search(r"\d\.\d\d", place) for place in places)


def soak(tmp_path, *arguments):
    command = [sys.executable, REPOSITORY / "tests/soak.py", "--hours", "0.02", "--out", tmp_path, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=550)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_soak_has_no_error(tmp_path):
    _, said = soak(tmp_path)  # so short a run is still warming up, so what is flat is not asked
    assert "\n0 errors;" in said and "WRONG" not in said, said
    assert (tmp_path / "soak.svg").stat().st_size < 100_000 and (tmp_path / "samples.csv").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("leak", ["descriptors", "children", "disk", "objects"])
def test_a_leak_that_is_made_on_purpose_is_found(tmp_path, leak):
    assert leak in LEAKS
    code, said = soak(tmp_path, "--leak", leak)
    of_leaks = {"descriptors": "fd_other", "disk": "disk_temporary_mib", "objects": "count_objects"}
    series = of_leaks.get(leak, leak)
    (line,) = (line for line in said.splitlines() if line.startswith(f"{series}:"))
    assert code == 1 and line.endswith("NOT FLAT"), said

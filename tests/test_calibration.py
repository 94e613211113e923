"""Calibration, without a GPU: one process measures, and disturbed results are dropped."""

import errno
import fcntl
import hashlib
import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers import _processes

from gdsdata.data.batches.source import begun_engine
from gdsdata.io import calibration, calibration_file, engine
from gdsdata.io.calibration import CONSTRUCTOR_S, Calibration, Disturbed
from gdsdata.io.options import EngineOptions

DEVICE = torch.device("cuda", 0)
FOUND = Calibration(workers=4, gb_per_s={"page cache, 4 workers": 50.0}, seconds=0.2)
# On a machine that is busy with other tests, in addition to the wait itself.
PATIENCE_S = 2.0


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """Write a file that is large enough, and set a cache of its own."""
    _use(tmp_path, monkeypatch.setenv, monkeypatch.setattr)
    path = tmp_path / "data.bin"
    path.touch()
    os.truncate(path, calibration.SMALLEST_FILE_BYTES)
    return path


def _use(folder: Path, set_environment, set_attribute) -> None:
    set_environment("XDG_CACHE_HOME", str(folder / "cache"))
    set_attribute(calibration, "_found", {})
    set_attribute(calibration, "place_of", lambda path, device: "a GPU")


def _workers(path: Path) -> int:
    return calibration.calibrated(EngineOptions(), str(path), DEVICE).workers


def _measure_slowly(path: str, device: torch.device, gives_up=None) -> Calibration:
    with open(path + ".measured", "a") as file:
        file.write("x")
    time.sleep(0.1)
    return FOUND


def _open_as_a_rank(folder: Path, barrier, answers) -> None:
    _use(folder, os.environ.__setitem__, setattr)
    calibration.calibrate = _measure_slowly
    barrier.wait()
    began = time.monotonic()
    workers = _workers(folder / "data.bin")
    answers.put((workers, time.monotonic() - began))


def test_one_of_the_ranks_that_start_at_once_measures_and_the_others_wait_shortly(data):
    barrier, answers = _processes.Barrier(4), _processes.Queue()
    ranks = [_processes.Process(target=_open_as_a_rank, args=(data.parent, barrier, answers)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    found = [answers.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join(60)
    assert Path(f"{data}.measured").read_text() == "x"
    assert {workers for workers, _ in found} <= {0, 4} and max(took for _, took in found) < CONSTRUCTOR_S + PATIENCE_S
    assert calibration.load() == {"a GPU": FOUND}


def test_a_constructor_waits_no_longer_than_it_says_and_does_not_try_again_at_once(data, monkeypatch):
    may_end, calls = threading.Event(), []

    def hang(path, device, gives_up):
        calls.append(gives_up)
        may_end.wait(60)
        return FOUND

    monkeypatch.setattr(calibration, "calibrate", hang)
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match=f"takes longer than.*gdsdata.io.calibration '{data}' --device cuda:0"):
        assert _workers(data) == 0
    assert CONSTRUCTOR_S <= time.monotonic() - began < CONSTRUCTOR_S + PATIENCE_S
    assert calls[0](), "it was not asked to give up"
    may_end.set()
    (thread,) = [one for one in threading.enumerate() if one.name == "gdsdata-calibration"] or [threading.Thread()]
    if thread.ident is not None:
        thread.join(60)
    assert calibration.load() == {}, "a late result was kept"
    assert _workers(data) == 0 and len(calls) == 1
    monkeypatch.setattr(calibration, "_RETRY_S", 0)
    monkeypatch.setattr(calibration, "calibrate", lambda *_: FOUND)
    assert _workers(data) == 4, "a day later it is tried again"


def test_file_systems_are_looked_up_only_for_calibrations_that_may_be_found(data, monkeypatch):
    looked_up = []
    monkeypatch.setattr(calibration, "place_of", lambda *_: looked_up.append(1) or "a GPU")
    monkeypatch.setattr(calibration, "calibrate", lambda *_: FOUND)
    os.truncate(data, calibration.SMALLEST_FILE_BYTES - 1)
    assert _workers(data) == 0 and not looked_up, "none is kept, and the file is too small to measure"
    os.truncate(data, calibration.SMALLEST_FILE_BYTES)
    assert _workers(data) == 4 and looked_up
    os.truncate(data, 1)
    assert _workers(data) == 4, "one is kept"


def test_a_measurement_that_was_given_up_in_the_future_is_tried_again(data, monkeypatch):
    monkeypatch.setattr(calibration.time, "time", lambda: 2e9)
    calibration._keep_given_up("a GPU")
    monkeypatch.setattr(calibration.time, "time", lambda: 1.9e9)  # the clock was wrong, and is right now
    monkeypatch.setattr(calibration, "calibrate", lambda *_: FOUND)
    assert _workers(data) == 4


def test_a_process_waits_briefly_for_another_ones_measurement(data):
    lock = calibration_file.lock_of_node()
    began = time.monotonic()
    assert _workers(data) == 0
    assert CONSTRUCTOR_S <= time.monotonic() - began < CONSTRUCTOR_S + PATIENCE_S
    calibration._keep("a GPU", FOUND)
    os.close(lock)
    assert _workers(data) == 4


@pytest.mark.parametrize("error", [Disturbed("somebody else was busy"), OSError("no space is left")])
@pytest.mark.filterwarnings("ignore:.*no space is left")
def test_a_failed_measurement_is_not_kept_and_made_again_a_day_later(data, monkeypatch, error):
    calls = []

    def failing(*_):
        calls.append(1)
        raise error

    monkeypatch.setattr(calibration, "calibrate", failing)
    assert [_workers(data), _workers(data)] == [0, 0] and calibration.load() == {}
    assert len(calls) == 1, "each data set waited for a measurement of its own"
    monkeypatch.setattr(calibration, "calibrate", lambda *_: FOUND)
    monkeypatch.setattr(calibration, "_RETRY_S", 0)
    assert _workers(data) == 4 and calibration.load() == {"a GPU": FOUND}


def test_repeats_that_disagree_are_a_disturbance():
    assert calibration._best_of([1.0, 10.0, 10.5, 5.0]) == 10.5
    with pytest.raises(Disturbed, match="the same was measured 12 and 10 fast"):
        calibration._best_of([1.0, 10.0, 12.0, 5.0])


@pytest.mark.parametrize(("others_s", "is_kept"), [(0.0, True), (3600.0, False)])
def test_a_steady_rate_beside_other_processes_is_not_kept(data, monkeypatch, others_s, is_kept):
    """All repeats agree, because another rank slows all of them down alike."""
    monkeypatch.setattr(calibration, "_check_idle", lambda: None)
    monkeypatch.setattr(calibration, "_read_rate", lambda *_: 10.0)
    monkeypatch.setattr(calibration, "_record_rate", lambda *_: 1e6)
    monkeypatch.setattr(calibration, "_reaches_device", lambda *_: False)
    taken = iter([50.0, 50.0 + others_s])
    monkeypatch.setattr(calibration._OtherProcesses, "_seconds", lambda _: next(taken))
    if is_kept:
        assert calibration.calibrate(str(data), torch.device("cpu")).gb_per_s
    else:
        with pytest.raises(Disturbed, match=r"other processes took \d+\.\d cores meanwhile"):
            calibration.calibrate(str(data), torch.device("cpu"))


def test_a_processs_own_work_is_not_that_of_others():
    def work():
        while time.process_time() < own_s + 0.3:
            hashlib.sha256(content).digest()  # without the GIL

    content, cores = bytes(2**20), os.cpu_count()
    began, own_s, others = time.monotonic(), time.process_time(), calibration._OtherProcesses()
    threads = [threading.Thread(target=work) for _ in range(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    others_s, own_s = others._seconds() - others._taken_s, time.process_time() - own_s
    assert own_s > 0.3 and others_s <= cores * (time.monotonic() - began) - own_s + 0.02 * cores


def test_where_there_are_no_locks_nothing_is_measured(data, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("measured without a lock"))
    with pytest.warns(RuntimeWarning, match="cannot be locked, so nothing is calibrated: .*No locks available"):
        assert _workers(data) == 0


def test_without_a_home_folder_nothing_is_measured(data, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "relative")
    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("measured without a lock"))
    with pytest.warns(RuntimeWarning, match="nothing is calibrated: .*has no home folder: set HOME"):
        assert _workers(data) == 0


def test_entries_of_many_threads_are_all_kept(data):
    threads = [threading.Thread(target=calibration._keep, args=(f"GPU {i}", Calibration(workers=i))) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calibration.load() == {f"GPU {i}": Calibration(workers=i) for i in range(16)}
    assert not list(calibration_file.cache_folder().glob("*.tmp"))


def test_a_calibration_that_is_forgotten_during_a_lookup_is_no_error(data, monkeypatch):
    class Forgetful(dict):
        def __setitem__(self, key, value):  # another thread stores something between this and the next step
            super().__setitem__(key, value)
            self.clear()

    monkeypatch.setattr(calibration, "_found", Forgetful())
    assert calibration.calibrated(EngineOptions(), str(data), DEVICE, measure=False) == EngineOptions()


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", '{"version": 1}', '{"version": 1, "calibrations": 3}', '{"version": 1, "calibrations": {"a": 1}}'),
        '{"version": 1, "calibrations": {"a GPU": {"workers": "4"}}, "given_up": {"a GPU": "today"}}',
        '{"version": 1, "calibrations": {"a GPU": {"segment_bytes": -1}}, "given_up": {"a GPU": null}}',
    ],
)
def test_a_file_of_anything_is_no_calibration(data, content):
    calibration_file.cache_folder().mkdir(parents=True)
    calibration_file.cache_path().write_text(content)
    assert calibration.load() == {} and not calibration.given_up_lately("a GPU")
    calibration._keep("a GPU", FOUND)
    assert calibration.load()["a GPU"] == FOUND


def test_the_command_measures_until_it_is_undisturbed_and_keeps_that(data, monkeypatch, capsys):
    outcomes = iter([Disturbed("busy"), FOUND])

    def measure(path, device):
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(calibration, "calibrate", measure)
    monkeypatch.setattr(engine, "resolved", torch.device)
    assert calibration.main([str(data), "--device", "cuda:0"]) == 0
    assert "workers=4" in capsys.readouterr().out
    assert json.loads(calibration_file.cache_path().read_text())["calibrations"]["a GPU"]["workers"] == 4


def test_the_command_says_why_it_keeps_nothing(data, monkeypatch, capsys):
    def disturbed(*_):
        raise Disturbed("9 threads run on 2 cores")

    monkeypatch.setattr(calibration, "calibrate", disturbed)
    monkeypatch.setattr(engine, "resolved", torch.device)
    assert calibration.main([str(data), "--device", "cuda:0"]) == 1
    assert "9 threads run on 2 cores" in capsys.readouterr().err and calibration.load() == {}


@pytest.mark.parametrize(
    ("size_bytes", "begins"), [(1, True), (calibration.SMALLEST_FILE_BYTES, False), (None, False), ("url", True)]
)
def test_an_engine_begins_before_the_index_if_no_measurement_follows(tmp_path, size_bytes, begins):
    path = "s3://bucket/data.bin" if size_bytes == "url" else str(tmp_path / "data.bin")
    if isinstance(size_bytes, int):
        Path(path).touch()
        os.truncate(path, size_bytes)
    found = begun_engine(path, EngineOptions(queue_depth=19), torch.device("cpu"))
    assert (found is not None) == begins
    assert found is None or found is engine.shared_engine(EngineOptions(queue_depth=19), torch.device("cpu"))

"""Programs that end in the middle of something end silently and soon."""

import io
import json
import subprocess
import sys
import tarfile
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers import REPOSITORY, random_bytes, write_records

from gdsdata import Fields, GDSDataset, Reading
from gdsdata.checkpoint.threads import DaemonThreads
from gdsdata.formats import Records
from gdsdata.io import program_end

# The programs are read here, and run in a process of their own.
PROGRAMS = Path(__file__).with_name("interpreter_ends.py")
# For a whole program on a busy machine; Python and torch need a second of processor time to end.
# Storage that hangs answers much later.
MOST_S = 40.0


def of_programs(name: str) -> dict:
    """Return a dict that the programs' module defines, without running the module."""
    text = PROGRAMS.read_text()
    begin = text.index(f"\n{name} = {{") + len(f"\n{name} = ")
    return eval(text[begin : text.index("\n}\n", begin) + 2])


SILENT, LOUD = of_programs("SILENT"), of_programs("LOUD")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, tuple[int, float, str]]:
    """Return exit code, seconds and stderr of every program."""
    folder = tmp_path_factory.mktemp("ends")
    write_records(folder / "0.bin", 4000, 4096)
    with tarfile.open(folder / "0.tar", "w") as tar:
        for i in range(200):
            member = tarfile.TarInfo(f"{i}.txt")
            member.size = 10_000
            tar.addfile(member, io.BytesIO(random_bytes(5000, i).hex().encode()))
    table = pyarrow.table({"a": np.arange(100_000)})
    pyarrow.parquet.write_table(table, folder / "0.parquet", row_group_size=1000)
    command = [sys.executable, str(PROGRAMS), str(folder), str(MOST_S), *SILENT, *LOUD]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=560)
    assert ended.returncode == 0, ended.stderr
    return {name: (code, seconds, stderr) for name, code, seconds, stderr in map(json.loads, ended.stdout.splitlines())}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SILENT)
def test_a_program_ends_in_silence_with(outcomes, name):
    code, seconds, stderr = outcomes[name]
    assert (code, stderr) == (0, ""), f"the process ended after {seconds:.1f} s"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LOUD)
def test_a_program_says_its_own_error_alone_at(outcomes, name):
    _, expected_code, last_line = LOUD[name]
    code, seconds, stderr = outcomes[name]
    assert code == expected_code, f"after {seconds:.1f} s: {stderr}"
    assert stderr.splitlines()[-1:] == ([last_line] if last_line else []), stderr
    assert stderr.count("Traceback") <= 1 and "Exception ignored" not in stderr, stderr


@pytest.mark.parametrize("daemon", [True, False])
def test_a_daemon_thread_whose_executor_has_shut_down_ends_in_silence(tmp_path, monkeypatch, daemon):
    """Python shuts executors down before it stops daemon threads. Other threads raise the error."""
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for i in range(8):
            member = tarfile.TarInfo(f"{i}.txt")
            member.size = 10
            tar.addfile(member, io.BytesIO(bytes(10)))
    refused, raised = threading.Event(), []

    def refuse(self, *_):
        monkeypatch.setattr(program_end, "_is_ending", True)
        refused.set()
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    batches = iter(
        GDSDataset(
            tmp_path / "0.tar", 1, device="cpu", reading=Reading(prefetch=1), fields=Fields(decode={"txt": "txt"})
        )
    )
    next(batches)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    monkeypatch.setattr(threading, "excepthook", raised.append)
    loop = threading.Thread(target=list, args=(batches,), daemon=daemon)
    loop.start()
    loop.join()
    assert refused.is_set()
    assert [one.exc_type for one in raised] == [SystemExit if daemon else RuntimeError]  # SystemExit is silent


@pytest.mark.parametrize("taken", [False, True])
def test_a_daemon_thread_that_loops_is_led_out_of_its_loop_and_joined(tmp_path, monkeypatch, taken):
    """If the thread freed a tensor after Python has ended it, torch would abort the process."""
    write_records(tmp_path / "0.bin", 64, 16)
    dataset = GDSDataset(tmp_path / "0.bin", 4, Records("u1", (16,)), device="cpu")
    is_over, is_there = threading.Event(), threading.Event()

    def loop():
        while not is_over.is_set():
            for _ in dataset if taken else [None]:
                is_there.set()
            if not taken:
                iter(dataset)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    is_there.wait()
    monkeypatch.setattr(program_end, "_is_ending", True)
    program_end._end_all()
    thread.join(5.0)
    ended, _ = not thread.is_alive(), is_over.set()
    assert ended


def test_a_daemon_thread_has_freed_what_a_call_holds_when_its_result_is_known():
    """The program may end then. If the thread freed a tensor later, torch would abort it."""

    class Call:
        def __call__(self):
            assert may_end.wait(20)
            return 1

    may_end, held = threading.Event(), []
    call, threads = Call(), DaemonThreads(1, "test")
    still, result = weakref.ref(call), threads.submit(call)
    del call
    result.add_done_callback(lambda _: held.append(still()))
    may_end.set()
    assert result.result(20) == 1
    threads.submit(lambda: None).result(20)  # behind the callback
    threads.close()
    assert held == [None]

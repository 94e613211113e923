"""The doctor on this machine: a program that ends in time and verifies its transfers."""

import concurrent.futures
import errno
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest
import torch
from helpers import REFUSES_DIRECT, in_new_process, lack_of_uring, refuses_direct, run_script, start_script

from gdsdata import doctor
from gdsdata.doctor import __main__ as program
from gdsdata.doctor import evidence, examination, probes, report, transfers
from gdsdata.errors import IoError
from gdsdata.io import calibration
from gdsdata.io.options import MIB, EngineOptions
from gdsdata.io.tensor import Engine

pytestmark = pytest.mark.usefixtures("quick_programs")

SCRIPT = "import runpy, sys; sys.argv[0] = 'doctor'; runpy.run_module('gdsdata.doctor', run_name='__main__')"
POSIX = transfers.Way("buffered, threads", "any", "cpu", EngineOptions(backend="posix", direct="never"))


@pytest.fixture
def file(tmp_path):
    (tmp_path / "x").write_bytes(bytes(MIB))
    return tmp_path / "x"


def answers(path):
    return {finding.name: finding for finding in doctor.examine(path)}


def left_in(folder):
    return sorted(file.name for file in folder.iterdir())


# --- findings ---------------------------------------------------------------------------------------------------------


def test_each_line_has_its_evidence_and_each_no_a_remedy(tmp_path, file):
    for path in (tmp_path, file):
        found = answers(path)
        assert found["reading"].answer == "yes"
        assert found["io_uring"].answer == ("no" if lack_of_uring() else "yes")
        assert found["direct"].answer == ("no" if refuses_direct(file) else "yes")
        assert found["gpu"].answer == ("yes" if torch.cuda.is_available() else "no")
        assert all(finding.evidence and (finding.remedy or finding.answer != "no") for finding in found.values())
    assert left_in(tmp_path) == ["x"]


def test_a_folder_without_files_is_tried_with_one_that_goes_again(tmp_path):
    assert answers(tmp_path)["reading"].answer == "yes"
    assert left_in(tmp_path) == []


def test_files_below_a_folder_that_may_not_be_written_are_read(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(probes.tempfile, "NamedTemporaryFile", refuse)
    found = probes.PROBES["reading"](str(tmp_path))
    assert found["empty"] and "Permission denied" in found["error"]
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "short").write_bytes(bytes(5))
    assert sum(probes.PROBES["reading"](str(tmp_path))["bytes"].values()) == 5
    (tmp_path / "class" / "long").write_bytes(bytes(MIB))
    assert sum(probes.PROBES["reading"](str(tmp_path))["bytes"].values()) == probes.READ_BYTES


def test_a_file_that_vanishes_while_the_folder_is_looked_at_is_passed_over(tmp_path, monkeypatch):
    for name in ("gone", "here"):
        (tmp_path / name).write_bytes(bytes(MIB))
    entries = [entry for entry in os.scandir(tmp_path) if entry.name == "gone"]
    entries += [entry for entry in os.scandir(tmp_path) if entry.name == "here"]
    monkeypatch.setattr(probes, "_files_below", lambda folder: iter(entries))
    monkeypatch.setattr(os, "access", lambda *_: True)
    (tmp_path / "gone").unlink()
    with probes.file_at(str(tmp_path)) as file:
        assert file == str(tmp_path / "here")


def test_a_disk_without_space_is_no_refusal_of_direct_io(tmp_path, monkeypatch):
    plain = probes.tempfile.NamedTemporaryFile

    def full(**arguments):
        file = plain(**arguments)
        file.write = lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
        return file

    monkeypatch.setattr(probes.tempfile, "NamedTemporaryFile", full)
    found = answers(tmp_path)
    assert found["direct"].answer == found["reading"].answer == "unknown"
    assert "No space left" in found["direct"].evidence and "page cache" not in found["direct"].remedy
    assert left_in(tmp_path) == []
    (tmp_path / "short").write_bytes(b"abc")
    assert answers(tmp_path)["reading"].answer == "yes"


def test_a_disk_that_fails_is_no_refusal_of_direct_io(file, monkeypatch):
    def fail(path):
        raise IoError(errno.EIO, "could not read: Input/output error", path)

    monkeypatch.setattr(probes, "read_direct", fail)
    assert answers(file)["direct"].answer == "unknown"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.mknod(path, stat.S_IFSOCK | 0o600)])
def test_a_pipe_or_socket_is_not_called_empty(tmp_path, make):
    make(tmp_path / "x")
    found = answers(tmp_path / "x")
    assert found["reading"].answer == "unknown" and "and no file" in found["reading"].evidence


def test_a_name_that_is_not_utf_8_is_printed_with_escapes(tmp_path, capsys):
    path = tmp_path / os.fsdecode(b"\xff")
    path.write_bytes(bytes(MIB))
    assert program.main([str(path)]) == 0
    assert f"works: '{tmp_path}/\\udcff'" in capsys.readouterr().out


def test_examining_takes_less_than_two_seconds(file):
    if torch.cuda.is_available():
        torch.cuda.init()  # not the doctor's
    started = time.perf_counter()
    doctor.examine(file)
    assert time.perf_counter() - started < 2


def test_a_refusal_of_direct_io_is_a_no_with_the_systems_reason(file, monkeypatch):
    def refuse(path):
        raise IoError(22, "could not read with O_DIRECT: Invalid argument", path)

    monkeypatch.setattr(probes, "read_direct", refuse)
    finding = answers(file)["direct"]
    assert finding.answer == "no" and "Invalid argument" in finding.evidence and "page cache" in finding.remedy


@pytest.mark.skipif(not REFUSES_DIRECT.exists(), reason=f"there is no {REFUSES_DIRECT}")
def test_a_file_that_refuses_direct_io_is_a_no_and_is_read_all_the_same():
    found = in_new_process(answers, REFUSES_DIRECT)  # not in this process, where data sets would warn of it from now on
    assert found["direct"].answer == "no" and "refuses" in found["direct"].evidence
    assert found["reading"].answer == "yes" and "buffered" in found["reading"].evidence


@pytest.mark.parametrize(("content", "reading", "says"), [(b"x", "yes", "1 bytes"), (b"", "unknown", "empty")])
def test_direct_io_of_a_file_that_is_too_short_is_unknown(tmp_path, content, reading, says):
    (tmp_path / "x").write_bytes(content)
    found = answers(tmp_path / "x")
    assert found["direct"].answer == "unknown"
    assert found["reading"].answer == reading and says in found["reading"].evidence


def test_alignment_is_the_kernels_own_figure(file):
    found = probes.PROBES["alignment"](str(file))
    if "error" in found:
        pytest.skip(found["error"])
    assert (found["offset_bytes"] == 0) == refuses_direct(file)
    assert found["offset_bytes"] in (0, 512, 1024, 2048, 4096, 8192, 16384, 65536)


def test_the_calibration_that_is_kept_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as on a machine with a GPU, which is not asked here
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(probes.engine, "resolved", lambda device: torch.device("cuda", 0))
    host = doctor.ThisHost({"calibration": probes.PROBES["calibration"]}, {"calibration": 10})
    place = doctor.Place(str(tmp_path))
    assert doctor.serving.calibration(host, place).answer == "unknown"
    kept = calibration.place_of(str(tmp_path), torch.device("cuda", 0))
    calibration._keep_given_up(kept)
    found = doctor.serving.calibration(doctor.ThisHost(host._probes, host._limits_s), place)
    assert found.answer == "unknown" and "within the last day a measurement failed" in found.evidence
    calibration._keep(kept, calibration.Calibration(workers=4, gb_per_s={"page cache, 4 workers": 50.0}, seconds=0.6))
    found = doctor.serving.calibration(doctor.ThisHost(host._probes, host._limits_s), place)
    assert found.answer == "yes" and "workers=4" in found.evidence
    assert "50.0 GB/s (page cache, 4 workers)" in found.evidence


# --- the program ------------------------------------------------------------------------------------------------------


def test_as_a_program(tmp_path):
    code, out, _ = run_script(SCRIPT, tmp_path)
    assert code == 0 and out.splitlines()[-1] == f"works: '{tmp_path}', as asked for by --require any"
    lines = out.splitlines()
    for heading, checks in doctor.CHECKS.items():
        assert heading in lines
        for check in checks:
            (line,) = [line for line in lines if line[11:41].strip() == check.question]
            assert line.split()[0] in ("yes", "no", "unknown")


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--frameworks"]])
def test_a_report_that_cannot_be_written_is_an_error_and_no_verdict(tmp_path, arguments):
    command = [sys.executable, "-m", "gdsdata.doctor", str(tmp_path), *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.stderr == "gdsdata.doctor: the report could not be written: No space left on device\n"
    assert done.returncode == 2


def test_misuse_has_exit_status_2(tmp_path, capsys):
    for arguments, says in (
        ([str(tmp_path / "absent")], f"there is no '{tmp_path / 'absent'}'"),
        (["--require", "speed"], "invalid choice: 'speed'"),
    ):
        with pytest.raises(SystemExit) as ended:
            program.main(arguments)
        assert ended.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("requirement", list(doctor.REQUIREMENTS))
def test_exit_status_says_whether_what_was_asked_for_works(tmp_path, file, capsys, requirement):
    found = answers(file)
    expected = all(found[name].answer == "yes" for name in doctor.REQUIREMENTS[requirement])
    assert program.main([str(file), "--require", requirement]) == (0 if expected else 1)
    assert capsys.readouterr().out.splitlines()[-1].startswith("works" if expected else "does not work")


def test_json_has_every_finding_with_its_fields(file, capsys):
    status = program.main([str(file), "--json", "--require", "gds"])
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"version", "path", "require", "works", "findings", "transfers"}
    assert (document["path"], document["require"], document["transfers"]) == (str(file), "gds", [])
    assert document["works"] == (status == 0)
    assert {frozenset(finding) for finding in document["findings"]} == {
        frozenset({"group", "name", "question", "answer", "evidence", "remedy"})
    }
    expected = [(group, check.__name__) for group, checks in doctor.CHECKS.items() for check in checks]
    assert [(finding["group"], finding["name"]) for finding in document["findings"]] == expected
    assert {finding["answer"] for finding in document["findings"]} <= {"yes", "no", "unknown"}


def test_a_recorded_host_says_what_the_host_said(tmp_path, file):
    """So all that a check knows passes through its host."""
    host = doctor.this_host()
    place = doctor.locate(host, file)
    said = doctor.diagnose(host, place)
    host.record(tmp_path / "record")
    replayed = doctor.RecordedHost(tmp_path / "record")
    assert doctor.place_of(replayed, place.path) == place
    assert doctor.diagnose(replayed, place) == said


def test_a_record_has_variables_that_are_not_utf_8(tmp_path, file, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", os.fsdecode(b"/opt/\xff"))
    assert program.main([str(file), "--record", str(tmp_path / "record")]) == 0
    assert b"LD_LIBRARY_PATH=/opt/\xff\n" in (tmp_path / "record/environ").read_bytes()


def test_recording_writes_over_nothing(tmp_path, file, capsys):
    assert program.main([str(file), "--record", str(tmp_path / "record")]) == 0
    assert (tmp_path / "record/proc/self/mountinfo").read_text()
    with pytest.raises(SystemExit) as ended:
        program.main([str(file), "--record", str(tmp_path)])
    assert ended.value.code == 2 and "not there yet" in capsys.readouterr().err


def test_a_record_that_cannot_be_written_says_why(file, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main([str(file), "--record", "/proc/x"])
    assert ended.value.code == 2
    assert "--record cannot write '/proc/x': No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--record", ""], "--record '' is no folder: name one that is not there yet"),
        (["--pid", "-5"], "--pid -5 is no process id: give a number of 1 or more"),
        (["--pid", "0"], "--pid 0 is no process id: give a number of 1 or more"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_before_anything_is_examined(file, capsys, arguments, said):
    host = doctor.ThisHost({}, {})
    with pytest.raises(SystemExit) as ended:
        program.main([str(file), *arguments], host)
    assert ended.value.code == 2 and said in capsys.readouterr().err
    assert host.pid is None


def test_an_empty_path_is_not_the_current_folder(capsys):
    said = "the path is empty: give a file, a folder (the current one is '.'), or a URL"
    with pytest.raises(ValueError, match=re.escape(said)):
        doctor.examine("")
    with pytest.raises(SystemExit) as ended:
        program.main([""])
    assert ended.value.code == 2 and said in capsys.readouterr().err


# --- nothing hangs ----------------------------------------------------------------------------------------------------


def make_tool(folder, name, script):
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


def test_a_tool_that_hangs_is_ended_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    make_tool(tmp_path, "nvidia-smi", f"sleep 300 & echo $! > {tmp_path}/child; wait")
    host = doctor.ThisHost({}, {}, tool_limit_s=0.5)
    started = time.monotonic()
    assert host.tool("nvidia-smi", "-q") is None
    assert host.tool("nvidia-smi", "-q") is None, "a tool that hung is not started again"
    assert time.monotonic() - started < 3
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 5
    while time.monotonic() < until and os.path.exists(f"/proc/{child}"):
        with open(f"/proc/{child}/stat") as state:
            if state.read().rpartition(")")[2].split()[0] == "Z":  # its parent has not waited for it yet
                break
        time.sleep(0.01)
    else:
        assert not os.path.exists(f"/proc/{child}")


def test_tools_that_fail_or_are_not_there_say_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    make_tool(tmp_path, "ethtool", "echo half; exit 71")
    make_tool(tmp_path, "lspci", "echo 00:00.0; exit 0")
    host = doctor.ThisHost({}, {})
    assert host.tool("ethtool", "-S", "eth0") is None
    assert host.tool("no-such-tool") is None
    assert host.tool("lspci", "-D", "-vv") == "00:00.0"


def test_tools_of_the_working_folder_are_not_run(tmp_path, monkeypatch):
    make_tool(tmp_path, "gds_stats", "echo mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f".::{os.environ['PATH']}")
    assert doctor.ThisHost({}, {}).tool("gds_stats") != "mine"


def test_a_path_that_does_not_answer_is_reported_in_time(file, monkeypatch):
    """A stat on an NFS mount whose server is gone behaves so."""
    released, plain = threading.Event(), os.stat

    def hang(path, *arguments, **named):
        if path == str(file):
            released.wait(60)
        return plain(path, *arguments, **named)

    monkeypatch.setattr(examination, "STATUS_LIMIT_S", 0.2)
    monkeypatch.setattr(os, "stat", hang)
    try:
        host = doctor.this_host()
        started = time.monotonic()
        found = {finding.name: finding for finding in doctor.examine(file, host)}
        assert time.monotonic() - started < 10
    finally:
        released.set()
    assert host.left_behind == ["path"]
    assert found["reading"].answer == "no" and "no answer within 0.2 s" in found["reading"].evidence
    assert found["file_system"].answer == "no" and found["file_system"].remedy


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "namei -l"),
        (OSError(errno.ESTALE, "Stale file handle"), "mount it again"),
        (OSError(errno.EIO, "Input/output error"), "its disk or its server works"),
    ],
)
def test_a_path_that_refuses_to_be_looked_at_says_what_to_do_about_it(file, monkeypatch, error, remedy):
    plain = os.stat

    def refuse(path, *arguments, **named):
        if path == str(file):
            raise error
        return plain(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", refuse)
    found = answers(file)
    for check in ("reading", "file_system"):
        assert found[check].answer == "no" and error.strerror in found[check].evidence
        assert remedy in found[check].remedy and "umount -f" not in found[check].remedy


@pytest.mark.whole_end
def test_the_program_ends_though_the_path_never_answers(tmp_path):
    script = """
import os, sys, threading
plain = os.stat
def hang(path, *arguments, **named):
    if path == sys.argv[1]:
        threading.Event().wait()
    return plain(path, *arguments, **named)
os.stat = hang
sys.argv[0] = "doctor"
from gdsdata.doctor.__main__ import run
threading.Thread(target=threading.Event().wait).start()  # as one that no interpreter's end gets rid of
run()
"""
    code, out, _ = run_script(script, tmp_path)
    assert code == 1 and f"'{tmp_path}' gives no answer within 2 s" in " ".join(out.split())


def test_a_probe_that_hangs_is_unknown_and_remembered():
    released = threading.Event()
    host = doctor.ThisHost({"gpu": lambda path: released.wait(60)}, {"gpu": 0.1})
    try:
        found = doctor.serving.gpu(host, doctor.Place("/data"))
    finally:
        released.set()
    assert found.answer == "unknown" and "no answer within 0.1 s" in found.evidence
    assert host.left_behind == ["gpu"]


def test_an_error_of_a_call_within_its_time_is_raised():
    with pytest.raises(ZeroDivisionError):
        evidence.within(5, lambda: 1 // 0)


# --- transfers --------------------------------------------------------------------------------------------------------


def test_each_way_is_written_read_verified_and_gone(tmp_path, file):
    rows = transfers.run(str(file), size_bytes=4 * MIB)
    by_way = {(row.path, row.direction): row for row in rows}
    assert len(by_way) == len(rows) == 2 * len(transfers.ways())
    buffered = by_way["buffered, threads", "write"]
    assert buffered.outcome == "verified" and buffered.served_by["buffered"] == 4 * MIB
    assert buffered.gb_per_s > 0 and buffered.cpu_s_per_gb >= 0
    if not refuses_direct(file):
        direct = by_way["O_DIRECT, threads", "read"]
        assert direct.outcome == "verified" and direct.served_by["direct"] == 4 * MIB
    if not lack_of_uring() and not refuses_direct(file):
        assert by_way["O_DIRECT, io_uring", "read"].outcome == "verified"
    assert left_in(tmp_path) == ["x"] and file.read_bytes() == bytes(MIB)


@pytest.mark.gpu
def test_ways_to_the_gpu_are_verified(tmp_path):
    rows = {(row.path, row.direction): row for row in transfers.run(str(tmp_path), size_bytes=4 * MIB)}
    assert rows["GPU by way of the host", "read"].outcome == "verified"
    assert rows["cuFile", "read"].outcome == "verified" or rows["cuFile", "read"].error


def test_the_programs_test_prints_its_rows(file, capsys, monkeypatch):
    monkeypatch.setattr(transfers, "TEST_BYTES", MIB)
    assert program.main([str(file), "--test"]) == 0
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "buffered, threads" in line and " read " in line]
    assert "verified" in line and line.split()[-1] in ("buffered", "page_cache")
    assert program.main([str(file), "--test", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["outcome"] for row in document["transfers"]} <= {"verified", "not run"}
    assert document["findings"][-1]["name"] == "cpu_use"


def test_corrupt_reads_are_found_and_fail(file, capsys, monkeypatch):
    plain = Engine.read

    def corrupt(engine, path, into, *arguments, **named):
        future = plain(engine, path, into, *arguments, **named)
        future.result()
        into[12345] ^= 1
        return future

    monkeypatch.setattr(Engine, "read", corrupt)
    rows = transfers.run(str(file), [POSIX], size_bytes=MIB)
    assert [row.outcome for row in rows] == ["verified", "CORRUPT"]
    assert "1 bytes differ, the first at offset 12345" in rows[1].error
    assert not transfers.verified(rows, "any", [POSIX])
    assert "12345" in report.as_text([], rows)
    monkeypatch.setattr(transfers, "TEST_BYTES", MIB)
    assert program.main([str(file), "--test"]) == 1
    assert "CORRUPT" in capsys.readouterr().out


def test_corrupt_writes_are_found_though_they_are_read_back_alike(file, monkeypatch):
    """The engine may read its own wrong bytes back as written; the system finds them."""
    plain = Engine.write

    def corrupt(engine, path, tensor, *arguments, **named):
        tensor = tensor.clone()
        tensor[-1] ^= 255
        return plain(engine, path, tensor, *arguments, **named)

    monkeypatch.setattr(Engine, "write", corrupt)
    rows = transfers.run(str(file), [POSIX], size_bytes=MIB)
    assert rows[0].outcome == "CORRUPT" and f"offset {MIB - 1}" in rows[0].error


def test_a_way_that_fails_is_not_run_and_says_why(tmp_path, file):
    options = EngineOptions(backend="posix", direct="always", faults="fail=1,error=5")
    broken = transfers.Way("broken", "direct", "cpu", options)
    rows = transfers.run(str(file), [broken, POSIX], size_bytes=MIB)
    assert [row.outcome for row in rows] == ["not run", "not run", "verified", "verified"]
    assert "Input/output error" in rows[0].error and rows[1].error
    assert transfers.verified(rows, "any", [broken, POSIX]) and not transfers.verified(rows, "direct", [broken, POSIX])
    assert left_in(tmp_path) == ["x"]


def test_a_transfer_that_does_not_end_is_left_behind(tmp_path, file, monkeypatch):
    never = concurrent.futures.Future()
    monkeypatch.setattr(transfers, "TRANSFER_LIMIT_S", 0.1)
    monkeypatch.setattr(Engine, "read", lambda *_, **__: never)
    rows = transfers.run(str(file), [POSIX], size_bytes=MIB)
    assert [row.outcome for row in rows] == ["verified", "not run"] and "no end within" in rows[1].error
    assert transfers.abandoned(rows) and not transfers.abandoned(rows[:1])
    assert left_in(tmp_path) == ["x"]


def test_a_folder_that_may_not_be_written_is_misuse_of_test(file, capsys, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(transfers.tempfile, "mkdtemp", refuse)
    with pytest.raises(SystemExit) as ended:
        program.main([str(file), "--test"])
    assert ended.value.code == 2 and "may be written" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_when_the_test_is_interrupted(tmp_path, number):
    script = """
import os, signal, sys, time
from gdsdata.doctor import __main__ as program, transfers
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background ignores it
plain = transfers._measured
def slow(*arguments):
    row = plain(*arguments)
    print(*os.listdir(sys.argv[1]), flush=True)
    time.sleep(60)
    return row
transfers._measured = slow
sys.argv[1:] = [sys.argv[1], "--test"]
program.run()
"""
    process = start_script(script, tmp_path)
    try:
        assert ".gdsdata-doctor-" in process.stdout.readline()
        process.send_signal(number)
        assert process.wait(timeout=20) == 130
    finally:
        process.kill()
        process.communicate()
    assert left_in(tmp_path) == []


def test_signals_that_are_ignored_stay_ignored_during_the_test(tmp_path, file):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with transfers._folder_beside(str(file)):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) == transfers._interrupt
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_are_as_before_if_no_folder_can_be_made(file, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(transfers.tempfile, "mkdtemp", refuse)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(PermissionError):
        transfers.run(str(file))
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_answer_without_evidence_has_its_line():
    finding = doctor.Finding("gds", "GPUDirect Storage", "no", "", "look at each other no")
    assert "no       GPUDirect Storage" in report.as_text([finding], [])


def row(path, direction="read", cpu=0.1, **served_by):
    return transfers.Transfer(path, direction, 10.0, cpu, served_by, True)


def test_gds_is_verified_only_where_bytes_went_by_dma():
    ways = [transfers.Way("cuFile", "gds", "cuda", EngineOptions())]
    through_host = [row("cuFile", way, gds=0, gds_compat=MIB) for way in ("write", "read")]
    by_dma = [row("cuFile", way, gds=MIB) for way in ("write", "read")]
    assert not transfers.verified(through_host, "gds", ways)
    assert transfers.verified(by_dma, "gds", ways)
    assert not transfers.verified(by_dma[:1], "gds", ways)


@pytest.mark.parametrize(
    ("cufile", "answer", "says"),
    [
        (dict(cpu=0.02, gds=MIB), "yes", "0.020 cpu-s/GB, 0.100 by way of the host"),
        (dict(cpu=0.02, gds_compat=MIB), "no", "none of it by DMA"),
        (dict(cpu=0.09, gds=MIB), "no", "0.090 cpu-s/GB"),
        (None, "unknown", "to compare"),
    ],
)
def test_cpu_use_of_both_ways_shows_a_fallback(cufile, answer, says):
    rows = [row("GPU by way of the host", direct=MIB)] + ([row("cuFile", **cufile)] if cufile else [])
    found = transfers.cpu_use(rows)
    assert found.answer == answer and says in found.evidence and (found.remedy or answer != "no")

"""A training job that is disturbed by a seed keeps what `tests/chaos.py` claims."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections import Counter

import pytest
import torch
from chaos import Broken, Job, summary
from helpers import REPOSITORY


def chaos(*arguments, timeout_s):
    command = [sys.executable, REPOSITORY / "tests/chaos.py", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_jobs_that_are_disturbed_for_minutes_keep_every_claim():
    assert "every claim held" in chaos("--seed", 100, "--minutes", 5, timeout_s=1200)


@pytest.mark.timeout(300)
def test_a_short_job_that_is_disturbed_keeps_every_claim():
    assert "every claim held" in chaos("--seed", 5, "--jobs", 1, "--steps", 15, timeout_s=280)


@pytest.fixture
def job(tmp_path):
    made = Job.__new__(Job)
    made.log, made.committed = tmp_path, 3
    made.order = [[1, 2], [3, 4], [5, 6], [7, 8], [1, 2]]
    made.models = [torch.full((5,), i) for i in range(6)]
    return made


def log(job, *lines):
    (job.log / "000-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job.check_log(0)


def test_the_uninterrupted_order_passes(job):
    log(job, {"restored": 3}, {"step": 4, "numbers": [7, 8]}, {"step": 5, "numbers": [1, 2]}, {"committed": 5})
    assert job.committed == 5


@pytest.mark.parametrize(
    "lines",
    [
        [{"restored": 2}],
        [{"restored": 3}, {"step": 4, "numbers": [5, 6]}],
        [{"restored": 3}, {"step": 5, "numbers": [1, 2]}],
        [{"restored": 3}, {"step": 4, "numbers": [7, 8]}, {"step": 4, "numbers": [7, 8]}],
    ],
    ids=["an older step", "other samples", "a step skipped", "a step repeated"],
)
def test_steps_that_are_lost_repeated_or_skipped_are_found(job, lines):
    with pytest.raises(Broken):
        log(job, *lines)


@pytest.mark.parametrize("damage", ["none", "half a file", "another state"])
def test_checkpoints_that_are_not_what_was_saved_are_found(job, damage):
    stream = io.BytesIO()
    torch.save({"step": 4, "model": job.models[3 if damage == "another state" else 4]}, stream)
    content = stream.getvalue()
    manifest = json.dumps({"step": 4, "files": [{"name": "rank-0.pt", "size_bytes": len(content)}]}).encode()
    content = content[: len(content) // 2] if damage == "half a file" else content
    if damage == "none":
        assert job.check_checkpoint(manifest, lambda name: content, "there") == 4
    else:
        with pytest.raises(Broken):
            job.check_checkpoint(manifest, lambda name: content, "there")


# ------------------------------------------------------------------------------------------------- clocks

CLOCK_SCRIPT = """
import ctypes, os, sys, time
from datetime import datetime

from long_runs import wall_clock

wall_clock.start_again()
clocks = wall_clock.clocks()
begun = time.time()


def shown(call):
    sender, receiver = os.pipe()
    if os.fork() == 0:
        clocks.follow(0)
        os.write(receiver, repr(call()).encode())
        os._exit(0)
    os.wait()
    os.close(receiver)
    return os.read(sender, 10**5).decode()
"""


def with_clocks(tmp_path, body):
    """Run a program whose children have a clock that it moves, and return what it prints."""
    script = tmp_path / "clocks.py"
    script.write_text(CLOCK_SCRIPT + body)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])}
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@needs_compiler
def test_a_clock_is_moved_for_every_reader_in_the_middle_of_a_process(tmp_path):
    said = with_clocks(
        tmp_path,
        """
libc = ctypes.CDLL(None)
libc.time.restype = ctypes.c_long


def read():
    for hours in (5, -30):
        clocks.move(0, hours * 3600)
        now = (ctypes.c_long * 2)()
        libc.gettimeofday(now, None)
        readers = time.time(), datetime.now().timestamp(), libc.time(None), now[0]
        yield [round((one - begun) / 3600) for one in readers]


print(shown(lambda: list(read())), round((time.time() - begun) / 3600))
""",
    )
    assert said.strip() == "[[5, 5, 5, 5], [-30, -30, -30, -30]] 0"


@needs_compiler
def test_a_moved_clock_reaches_the_engines_cache(tmp_path):
    said = with_clocks(
        tmp_path,
        f"""
from pathlib import Path
import gdsdata
from servers.faults import BUCKET, FaultServer

with FaultServer() as server:
    server.put("a.bin", bytes(4096))
    os.environ.update(AWS_ENDPOINT_URL=server.endpoint_url, AWS_ACCESS_KEY_ID=server.access_key)
    os.environ.update(AWS_SECRET_ACCESS_KEY=server.secret_key, AWS_REGION=server.region)
    clocks.move(0, 5 * 3600)

    def read():
        data = gdsdata.GDSDataset(f"s3://{{BUCKET}}/*.bin", 1, format=gdsdata.formats.Records("u1", (4096,)),
                                  device="cpu", cache={str(tmp_path / "cache")!r})
        assert sum(1 for _ in data) == 1
        used = [path.stat().st_mtime for path in Path({str(tmp_path / "cache")!r}).rglob("*.map")]
        return [round((one - begun) / 3600) for one in used]

    print(shown(read), shown(read))  # the first one makes the object's files, the second one uses them
""",
    )
    assert said.strip() == "[0] [5]"


@needs_compiler
@pytest.mark.parametrize(
    ("until_s", "by_s", "waits_s"), [(50, 3600, (0, 40)), (1, -1.5, (2, 60))], ids=["forwards", "backwards"]
)
def test_a_wait_for_a_time_of_the_clock_follows_its_moves(tmp_path, until_s, by_s, waits_s):
    said = with_clocks(
        tmp_path,
        f"""
import threading


class Time(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]


def wait():
    libc, mutex, cond = ctypes.CDLL(None), (ctypes.c_char * 64)(), (ctypes.c_char * 64)()
    until, begun = time.time() + {until_s}, time.monotonic()
    threading.Timer(0.3, lambda: clocks.move(0, {by_s})).start()
    libc.pthread_mutex_lock(mutex)
    libc.pthread_cond_timedwait(cond, mutex, ctypes.byref(Time(int(until), int(until % 1 * 1e9))))
    return time.monotonic() - begun


print(shown(wait))
""",
    )
    assert waits_s[0] < float(said) < waits_s[1]


# ------------------------------------------------------------------------------------------------- the summary


def test_the_summary_counts_events_by_kind():
    counts = Counter(start=9, objects=1, kill=7, fill=2, moved=11)
    said = summary(3, counts, has_disk=True, has_clocks=True)
    assert said == (
        "3 jobs (1 on objects), 9 starts: ranks killed 7, disks full 2, clocks moved in training 11: every claim held"
    )


def test_the_summary_says_what_was_left_out():
    said = summary(1, Counter(start=1), has_disk=False, has_clocks=False)
    assert "full disks were left out" in said and "moved clocks were left out" in said

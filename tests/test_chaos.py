"""A training job that is disturbed by a seed keeps what `tests/chaos.py` claims."""

import io
import json
import subprocess
import sys

import pytest
import torch
from chaos import Broken, Job
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

"""A training job that is disturbed by a seed keeps what `tests/chaos.py` claims."""

import subprocess
import sys

import pytest
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
    said = chaos("--seed", 1, "--jobs", 1, "--steps", 15, timeout_s=280)
    assert "every claim held" in said and "1 starts" not in said

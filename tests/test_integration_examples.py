"""The examples of frameworks stop and resume, as a user would run them."""

import os
import re
import subprocess
import sys

import pytest
from helpers import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("quick_programs")]


def losses(framework, *arguments):
    """Return {step: the digits of its loss}."""
    program = REPOSITORY / "examples" / "integrations" / f"train_{framework}.py"
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, program, *map(str, arguments)]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^step (\d+): loss (\S+)$", done.stdout, re.MULTILINE))


@pytest.mark.parametrize("framework", ["accelerate", "composer", "deepspeed", "lightning", "megatron", "transformers"])
def test_an_example_that_was_stopped_goes_on_with_the_same_losses(tmp_path, framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    whole = losses(framework, "--steps", 40, "--folder", tmp_path / "whole")
    stopped = losses(framework, "--steps", 40, "--stop-at", 25, "--folder", tmp_path / "stopped")
    resumed = losses(framework, "--steps", 40, "--folder", tmp_path / "stopped")
    assert [*stopped, *resumed] == [*whole] == [str(step) for step in range(1, 41)]
    assert {**stopped, **resumed} == whole
    assert float(whole["40"]) < float(whole["1"]) - 1

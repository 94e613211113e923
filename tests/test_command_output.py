"""Reports that cannot be written. The doctor's, on a full disk, is in test_doctor.py."""

import subprocess
import sys

import pytest

from gdsdata.storage.cache import Cache


@pytest.mark.parametrize("program, option", [("top", "--json"), ("top", "--once"), ("cache", "--verify")])
def test_a_report_that_cannot_be_written_is_told_in_words(tmp_path, program, option):
    Cache(str(tmp_path), 2**20)
    command = [sys.executable, "-m", f"gdsdata.{program}", option, *([str(tmp_path)] if program == "cache" else [])]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.stderr == f"gdsdata.{program}: the report could not be written: No space left on device\n"
    assert done.returncode == 2


@pytest.mark.parametrize("program", ["top", "top --once", "cache", "doctor"])
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_report_without_a_standard_output_is_told_in_words(tmp_path, program, closed):
    Cache(str(tmp_path), 2**20)
    path = "" if program.startswith("top") else f"'{tmp_path}'"
    command = f"{sys.executable} -m gdsdata.{program} {path} {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    said = f"gdsdata.{program.split()[0]}: the report could not be written: standard output is closed\n"
    assert (done.returncode, done.stderr) == (2, said if closed == ">&-" else "")

"""Reports that cannot be written, and Ctrl-C. The doctor on a full disk is in test_doctor.py."""

import os
import subprocess
import sys

import pytest
from helpers import REPOSITORY, default_interrupts

from gdsdata import command_output
from gdsdata.storage.cache import Cache


@pytest.mark.parametrize("program, option", [("top", "--json"), ("top", "--once"), ("cache", "--verify")])
def test_a_report_that_cannot_be_written_is_an_error_in_words(tmp_path, program, option):
    Cache(str(tmp_path), 2**20)
    command = [sys.executable, "-m", f"gdsdata.{program}", option, *([str(tmp_path)] if program == "cache" else [])]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.stderr == f"gdsdata.{program}: the report could not be written: No space left on device\n"
    assert done.returncode == 2


@pytest.mark.parametrize("program", ["top", "top --once", "cache", "doctor"])
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_report_without_a_standard_output_is_an_error_in_words(tmp_path, program, closed):
    Cache(str(tmp_path), 2**20)
    path = "" if program.startswith("top") else f"'{tmp_path}'"
    command = f"{sys.executable} -m gdsdata.{program} {path} {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    said = f"gdsdata.{program.split()[0]}: the report could not be written: standard output is closed\n"
    assert (done.returncode, done.stderr) == (2, said if closed == ">&-" else "")


# Python imports it as it starts. It sends Ctrl-C when the module is imported that the last argument
# names.
INTERRUPTING = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == sys.orig_argv[-1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
"""


@pytest.mark.parametrize("is_ignored", [False, True])
@pytest.mark.parametrize(
    ("program", "imported"),
    [
        ("cache", "torch"),
        ("doctor", "torch"),
        ("doctor", "gdsdata.doctor.report"),
        ("top", "gdsdata.observe.live.rates"),
    ],
)
def test_ctrl_c_while_a_program_is_imported_ends_it_quietly(tmp_path, program, imported, is_ignored):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    command = [sys.executable, "-m", f"gdsdata.{program}", "--help", imported]
    with default_interrupts():
        if is_ignored:
            command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0 if is_ignored else 130, "")
    assert bool(done.stdout) == is_ignored


def test_ctrl_c_anywhere_else_in_a_program_ends_it_quietly_too(capfd):
    def interrupted():
        raise KeyboardInterrupt

    assert command_output.status_of(interrupted) == command_output.INTERRUPTED
    assert command_output.status_of(lambda: 1) == 1
    assert capfd.readouterr() == ("", "")

"""`python -m gdsdata.top` beside a program that trains: in a terminal, and as a server."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from importlib.util import find_spec

import pytest
from helpers import REPOSITORY, default_interrupts
from live_view import write_samples

TRAINING = """
import sys, time
import gdsdata

data = gdsdata.GDSDataset(sys.argv[1], batch_size=4, device="cpu", on_break="restart")
print(len(list(data)), flush=True)
while True:
    for batch in data:
        time.sleep(0.01)
"""
PATIENCE_S = 60


@contextlib.contextmanager
def program(arguments, environment, **streams):
    """Start Python, and kill it by its process id at the end if it still runs."""
    with default_interrupts():
        started = subprocess.Popen([sys.executable, *map(str, arguments)], env=environment, **streams)
    with started:
        try:
            yield started
        finally:
            started.kill()


@pytest.fixture
def environment(tmp_path):
    """Return the environment of a program that trains, and of those who watch it."""
    (tmp_path / "run").mkdir(mode=0o700)
    return {
        **os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "run"), "PYTHONPATH": str(REPOSITORY), "TERM": "xterm",
        "GDSDATA_TOP": "1",
    }  # fmt: skip


@pytest.fixture
def training_pid(tmp_path, environment):
    """Yield the process id of a program that trains with the export on."""
    write_samples(tmp_path / "samples")
    with program(["-c", TRAINING, tmp_path / "samples"], environment, stdout=subprocess.PIPE) as training:
        assert training.stdout.readline() == b"10\n"
        yield training.pid


@pytest.fixture
def terminal():
    """Yield both ends of a terminal of 50 lines: what reads its screen, and what a program has."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def screen_with(wanted, ours, until=lambda: False):
    """Return what a terminal shows once it has the pattern or `until` holds, or after a while."""
    shown, ends = "", time.monotonic() + PATIENCE_S
    while not re.search(wanted, shown) and not until() and time.monotonic() < ends:
        if select.select([ours], [], [], 0.2)[0]:
            shown += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(ours, 65536).decode(errors="replace"))
    return shown


def got(url):
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return answer.status, answer.read().decode()


@pytest.mark.skipif(find_spec("rich") is None, reason="rich is not installed")
def test_a_program_that_trains_is_shown_with_rates_in_a_terminal(environment, training_pid, terminal):
    ours, theirs = terminal
    arguments = ["-m", "gdsdata.top", "--pid", training_pid, "--every", "0.3"]
    with program(arguments, environment, stdin=theirs, stdout=theirs, stderr=theirs) as top:
        rates = rf"{training_pid} +– +-c +[1-9][0-9.]* [kM]?B/s +[1-9][0-9.]*/s"  # the speed, and batches
        assert re.search(rates, shown := screen_with(rates, ours)), shown
        top.send_signal(signal.SIGINT)
        screen_with("(?!)", ours, until=lambda: top.poll() is not None)  # or it may wait for room to write
        assert top.wait(PATIENCE_S) == 0


def test_a_program_that_trains_is_served_as_a_page_and_metrics(environment, training_pid):
    arguments = ["-m", "gdsdata.top", "--pid", training_pid, "--serve", "127.0.0.1:0"]
    with program(arguments, environment, stdout=subprocess.PIPE) as top:
        url = top.stdout.readline().decode().split()[0]
        status, page = got(url)
        assert status == 200 and page.startswith("<!DOCTYPE html>")
        batches = rf'gdsdata_batches_total{{[^}}]*pid="{training_pid}"[^}}]*}} ([0-9.]+)'
        counts = [float(re.search(batches, got(f"{url}metrics")[1])[1])]
        until = time.monotonic() + PATIENCE_S
        while counts[-1] == counts[0] and time.monotonic() < until:
            counts.append(float(re.search(batches, got(f"{url}metrics")[1])[1]))
        assert counts[-1] > counts[0] >= 10
        top.send_signal(signal.SIGINT)
        assert top.wait(PATIENCE_S) == 0

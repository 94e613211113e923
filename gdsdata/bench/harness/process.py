"""The process of one row (row.py) as the bench sees it, and Ctrl-C."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gdsdata.bench.measure import system

SAMPLING_SECONDS, ENDING_SECONDS = 0.02, 10
STACKS_SECONDS = 0.5
MODULE_ARGUMENTS = ("-m", f"{__name__.partition('.')[0]}.bench")  # of Python, to start the bench
INTERRUPTED = 128 + signal.SIGINT  # the exit status, as a shell has it


class RowFailed(Exception):
    """A row's process has ended, or answered with an error."""


def environment():
    """Return the environment of a process that is to import this gdsdata."""
    paths = [str(Path(__file__).resolve().parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def without_interrupts():
    """Delay Ctrl-C until this is over.

    A process that is started in it never sees one, and nor do its children: a terminal notifies all
    of them at once, and the bench is the one that ends them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def interrupted_at_end():
    """Hold a Ctrl-C back, and raise it when this is over.

    A process that is started in it sees its own ones as usual.
    """
    came, usual = [], signal.getsignal(signal.SIGINT)
    if not callable(usual):  # SIGINT is ignored, or ends the process
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if came:
        usual(signal.SIGINT, None)


def leave_out_later_interrupts():
    """Let the first Ctrl-C alone interrupt this process: `timeout -s INT` sends two.

    Return whether that is so now. It is not where SIGINT is ignored, or has a handler of its own.
    """

    def interrupt(*_):
        signal.signal(signal.SIGINT, lambda *_: None)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    signal.signal(signal.SIGINT, interrupt)
    return True


@contextlib.contextmanager
def one_interrupt():
    """Let the first Ctrl-C alone interrupt the block."""
    changed = leave_out_later_interrupts()
    try:
        yield
    finally:
        if changed:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def ended_in_order():
    """Turn SIGTERM, as `timeout` sends it, and SIGHUP into SystemExit: files are removed."""

    def end(number, _):
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def checked(answer, log):
    """Return the answer of a row's process; RowFailed for an error, whose trace is logged."""
    if "error" in answer:
        log.write(answer["trace"].encode() + b"\n")
        log.flush()
        raise RowFailed(answer["error"])
    return answer


class RowProcess:
    """The process of one row (row.py) and the pipe to it."""

    def __init__(self, log):
        self.log, self.peak_bytes = log, 0
        self.pipe, its_end = multiprocessing.Pipe()
        command = [sys.executable, "-m", "gdsdata.bench.harness.row", str(its_end.fileno())]
        files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "pass_fds": [its_end.fileno()]}
        with without_interrupts(), its_end:
            self.process = subprocess.Popen(command, env=environment(), **files)

    def send(self, do, **command):
        try:
            self.pipe.send({"do": do, **command})
        except BrokenPipeError:
            raise self.has_ended() from None

    def receive(self, sample_memory=False, timeout=300):
        end = time.monotonic() + timeout
        while not self.pipe.poll(SAMPLING_SECONDS if sample_memory else 1.0):
            if sample_memory:
                self.note_memory()
            if time.monotonic() > end:
                self.kill()
                raise RowFailed(f"no answer for {timeout} s: the process was ended; see rows.log")
        if sample_memory:
            self.note_memory()
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self.has_ended() from None
        return checked(answer, self.log)["ok"]

    def has_ended(self):
        return RowFailed(f"the row's process ended with {self.process.wait()}; see rows.log")

    def ask(self, do, **command):
        self.send(do, **command)
        return self.receive()

    def memory_bytes(self):
        return system.tree_bytes(self.process.pid)

    def note_memory(self):
        self.peak_bytes = max(self.peak_bytes, self.memory_bytes())

    def run(self, **command):
        """Return a timed run's answer, and cpu_seconds, peak_bytes and others_cores."""
        before = self.peak_bytes = self.memory_bytes()
        clock, machine, here = time.monotonic(), system.machine_cpu_seconds(), system.cpu_seconds()
        self.send("run", **command)
        result = self.receive(sample_memory=True)
        result |= self.ask("close")
        own = result["cpu_seconds"] + result.pop("untimed_cpu_seconds", 0.0) + system.cpu_seconds() - here
        used = system.machine_cpu_seconds() - machine - own
        others_cores = max(0.0, used) / (time.monotonic() - clock)
        return result | {"others_cores": others_cores, "peak_bytes": self.peak_bytes - before}

    def dismiss(self):
        """Let it end after its last command."""
        self.pipe.close()

    def kill(self):
        """End it now. Its threads' stacks come to the log first, if it has begun to answer."""
        if self.process.poll() is None:
            self.process.send_signal(system.SHOW_STACKS)
            time.sleep(STACKS_SECONDS)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # The kernel may hold it.
            self.process.wait(ENDING_SECONDS)

    def end(self, within_s=ENDING_SECONDS):
        self.dismiss()
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

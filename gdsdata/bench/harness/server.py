"""A server on the loopback interface, which ends with the process that started it."""

import contextlib
import functools
import os
import socket
import subprocess
from pathlib import Path

from gdsdata.bench.harness.process import without_interrupts
from gdsdata.bench.measure import system

POLLING_SECONDS = 0.01
LAST_WORDS = 2000  # bytes of its output, in an error


class ServerFailed(Exception):
    """A server ended before it listened, or did not listen in time."""


def free_ports(count):
    """Return TCP ports of the loopback interface that were free a moment ago."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class ServerProcess(contextlib.AbstractContextManager):
    """Starts `command`, and returns when something listens at `port`.

    Its output goes to `folder`/server.log. The kernel kills it when the thread that made it ends,
    so make it in a thread that lives as long as the server.

    Raises:
        ServerFailed: it ended, or did not listen within `within_s` seconds.
    """

    def __init__(self, command, port, folder, environment=None, within_s=20):
        self.log, self.port, self.name = Path(folder) / "server.log", port, str(command[0])
        end_with_parent = functools.partial(system.end_with_parent, os.getpid())
        with open(self.log, "wb") as log, without_interrupts():
            self.process = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder,
                env={**os.environ, **(environment or {})}, preexec_fn=end_with_parent,
            )  # fmt: skip
        try:
            self.wait(within_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self):
        return self.process.pid

    def wait(self, within_s):
        for _ in range(int(within_s / POLLING_SECONDS)):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), within_s):
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(POLLING_SECONDS)
                last_words = self.log.read_bytes()[-LAST_WORDS:].decode(errors="replace").strip()
                raise ServerFailed(f"{self.name} ended with {status}: {last_words}")
        raise ServerFailed(f"{self.name}: nothing listens at {self.port} after {within_s} s")

    def close(self):
        """End it by SIGKILL, because some ignore SIGTERM."""
        self.process.kill()
        self.process.wait()

    def __exit__(self, *_):
        self.close()

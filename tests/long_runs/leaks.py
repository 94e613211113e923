"""Leaks made on purpose, to show that the judge finds them: one call leaks once."""

import os
import subprocess
import tempfile
import threading
from collections.abc import Callable

MEMORY_BYTES = 2**20


class Leak:
    """Keeps what a call makes. Each subclass leaks one thing."""

    def __init__(self) -> None:
        self.kept: list[object] = []

    def __call__(self) -> None:
        self.kept.append(self.make())

    def make(self) -> object:
        raise NotImplementedError


class Descriptors(Leak):
    def make(self) -> object:
        return os.open("/dev/null", os.O_RDONLY)


class Memory(Leak):
    def make(self) -> object:
        return b"x" * MEMORY_BYTES  # not zeros: its pages are touched


class Threads(Leak):
    def make(self) -> object:
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        return thread


class Children(Leak):
    def make(self) -> object:
        # It outlives this program, and ends by itself. So it holds no stream that somebody reads.
        return subprocess.Popen(["sleep", "900"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Disk(Leak):
    def make(self) -> object:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(bytes(MEMORY_BYTES))
        return file.name


class Objects(Leak):
    def make(self) -> object:
        return [[] for _ in range(100)]


LEAKS: dict[str, Callable[[], Leak]] = {kind.__name__.lower(): kind for kind in Leak.__subclasses__()}

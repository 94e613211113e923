"""One row's process: it receives commands from a pipe, and answers each.

Every row has a process of its own, kept over its runs. Rows can so take turns, while their memory,
page tables and imports stay apart. Commands:

- `load` makes the row (`row` is module:Class) from the rest of the command: the source, the case's
  settings, the engine's and the device.
- `verify` compares the row's bytes with plain reading, in the table's `dtype`.
- `prepare` frees memory, touches `touched_bytes` and warms CUDA's context.
- `run` is one timed run, of the table's `dtype` and `cache`. All stays open until `close`, which
  takes the process tree's CPU time.
- `device` describes the device, and `pinned_copy` measures copies to it; they need no row.
- Single cases have `open`, `write`, `begin`, `compare`, `calibrate` and `attempt`.
"""

import contextlib
import ctypes
import faulthandler
import gc
import pkgutil
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from gdsdata.bench.measure import device, system
from gdsdata.bench.peers import registry


def trim():
    """Return freed memory to the system, because it would hide the next run's peak."""
    gc.collect()
    if hasattr(system.libc, "malloc_trim"):
        system.libc.malloc_trim(ctypes.c_size_t(0))


class Row:
    """The base of each case's row, which opens, verifies and runs its peer."""

    cpu_used: Any = None  # seconds, by what was timed, if that is not all from the CPU clock's start on
    keeps_device_memory = False  # from run to run, so that no run is timed for getting it from the driver

    def __init__(self, key, source, settings, engine, device_name):
        self.key, self.source, self.settings = key, source, settings
        self.engine, self.device = engine, device_name
        self.peer: Any = None
        self.peer_class: Any = self.find()
        device.open_context(self.device)
        self.set_up()

    def set_up(self):
        """Part of making it."""

    def find(self):
        return registry.find(self.settings.name, self.key, self.source.peer_kind)

    def describe(self):
        peer = self.peer_class
        return {"key": self.key, "name": peer.name or peer.__name__, "setting": peer.setting}

    def prepare(self, touched_bytes):
        self.close()  # what a failed run left
        trim()
        if not self.keeps_device_memory:
            device.release(self.device)
        device.open_context(self.device)
        system.touch_memory(touched_bytes)

    def start_cpu_clock(self):
        self.cpu_before = system.cpu_seconds()

    def now(self):
        """Return the time once the device has done all that was asked of it."""
        device.synchronize(self.device)
        return time.perf_counter()

    def seconds_of(self, call, *arguments):
        started = time.perf_counter()
        call(*arguments)
        return self.now() - started

    def figures(self, size_bytes, seconds, served_before=None, path=None):
        """Return what every run says; bytes that the peer had served before do not count."""
        before, served = served_before or {}, self.peer.served()
        since = {path: count - before.get(path, 0) for path, count in served.items()}
        return {"bytes": size_bytes, "seconds": seconds, "served": since, "path": path or self.peer.path}

    def close(self):
        if self.peer is not None:
            self.peer.close()
        self.peer = None

    def after(self):
        self.close()
        used = system.cpu_seconds() - self.cpu_before
        gc.collect()  # Not the loader's work; mappings must be gone before the cache is dropped.
        if self.cpu_used is None:
            return {"cpu_seconds": used}
        return {"cpu_seconds": self.cpu_used, "untimed_cpu_seconds": max(0.0, used - self.cpu_used)}


def answer_to(row, do, command):
    """Return (the row from now on, the answer)."""
    if do == "load":
        row = pkgutil.resolve_name(command.pop("row"))(**command)
        return row, row.describe()
    if do in ("device", "pinned_copy"):
        return row, getattr(device, {"device": "describe"}.get(do, do))(**command)
    return row, getattr(row, {"close": "after"}.get(do, do))(**command)


def main():
    faulthandler.register(system.SHOW_STACKS)
    row, pipe = None, Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, ConnectionError):  # The bench has closed its end.
        while True:
            command = pipe.recv()
            try:
                row, answer = answer_to(row, command.pop("do"), command)
                said = {"ok": answer}
            except Exception as error:
                said = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            pipe.send(said)


if __name__ == "__main__":
    main()

"""One row's process: `python -m gdsdata.bench.row` reads a JSON command a line and answers with a JSON line.

Every row has a process of its own, kept over its runs, so that rows can take turns while their
memory, page tables and imports stay apart. Commands:

    {"do": "load", "case", "peer": name, "device", ...}    the rest is the case's: LoaderRow,
    LoadRow, ... {"do": "verify", ...}                      compares what the row gives with plain
    reading {"do": "prepare", "touched_bytes"}         gives memory back, touches what will be
    wanted, warms CUDA's context {"do": "open", ...}                        loader, cold: times the
    first batch from construction, reads some more {"do": "run", ...}                         times
    from construction, or from what open left; all stays open ... {"do": "close"}
    ... until here, where the process tree's CPU time is taken {"do": "write" | "begin" | "compare",
    ...} checkpoint: files to load; what a save finds; all bits of what was loaded
                                               (io, compare: what a timed run has read last, or written)

Two more need no row: "device" says what the device is, "pinned_copy" measures copies of pinned
memory to it.
"""

import ctypes
import gc
import importlib
import json
import os
import sys
import traceback

from gdsdata.bench import device, measure


def trim():
    """Gives freed memory back, so that a run's peak does not hide in what the last one left."""
    gc.collect()
    if hasattr(measure.libc, "malloc_trim"):
        measure.libc.malloc_trim(ctypes.c_size_t(0))


class Row:
    """What rows of every case do; the case's own adds how it opens, verifies and runs its peer."""

    def __init__(self, key, peer_class, device_name):
        self.key, self.peer_class, self.device = key, peer_class, device_name
        self.peer = None
        device.open_context(self.device)

    def describe(self):
        peer = self.peer_class
        return {"key": self.key, "name": peer.name or peer.__name__, "setting": peer.setting}

    def prepare(self, touched_bytes, release=True):
        self.close()  # what a failed run left
        trim()
        if release:
            device.release(self.device)
        device.open_context(self.device)
        measure.touch_memory(touched_bytes)

    def start_cpu_clock(self):
        self.cpu_before = measure.cpu_seconds()

    def close(self):
        if self.peer is not None:
            self.peer.close()
        self.peer = None

    def after(self):
        self.close()
        used = measure.cpu_seconds() - self.cpu_before
        gc.collect()  # not the loader's doing; mappings must be gone before the cache is dropped
        return {"cpu_seconds": used}


def row_class(case):
    return getattr(importlib.import_module(f".{case}", __package__), f"{case.capitalize()}Row")


def main():
    # Answers go out on a descriptor of their own: whatever a library prints lands on stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    row = None
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        try:
            if do == "load":
                row = row_class(command.pop("case"))(**command)
                answer = row.describe()
            elif do == "device":
                answer = device.describe(**command)
            elif do == "pinned_copy":
                answer = device.pinned_copy(**command)
            else:
                answer = getattr(row, {"close": "after"}.get(do, do))(**command)
            answers.write(json.dumps({"ok": answer}) + "\n")
        except Exception as error:
            answers.write(
                json.dumps({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}) + "\n"
            )


if __name__ == "__main__":
    main()

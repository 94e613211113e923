"""`profile`: torch's profiler, whose trace also shows the engine's threads."""

from __future__ import annotations

import gzip
import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import torch

from gdsdata.io import engine
from gdsdata.warn import warn

# Rows of a trace are threads, and the system's numbers of threads are below this.
_FIRST_ROW = 1 << 22


class profile(torch.profiler.profile):
    """`torch.profiler.profile`, with a row in its trace for each worker.

    It takes the same arguments and is used in the same way, also with a schedule and
    `torch.profiler.tensorboard_trace_handler`. The workers are those of this process's engines. A
    row has these spans, each with the bytes that were delivered in it:

    - ``gdsdata: page cache``: the worker copied from it
    - ``gdsdata: storage``: it read, wrote (checksums included), or waited for storage
    - ``gdsdata: link``: it waited for copies to or from the GPU
    - ``gdsdata: device``: it waited until the GPU had used memory that is written next

    Between spans the worker mostly had nothing to do. Threads that wait for a batch do a part of
    the work, which has a row of its own.

    A worker's first 65536 spans are kept, and its row's name says how many more there were. Engines
    in a DataLoader's worker processes are not seen.
    """

    _workers: tuple[engine.WorkerSpans, ...] = ()
    _unix_ns = 0  # of the monotonic clock's zero

    def start_trace(self) -> None:
        engine.begin_spans()
        super().start_trace()

    def stop_trace(self) -> None:
        super().stop_trace()
        self._workers, self._unix_ns = tuple(engine.end_spans()), _unix_ns_of_monotonic()

    def export_chrome_trace(self, path: str, *args: Any, **kwargs: Any) -> None:
        super().export_chrome_trace(path, *args, **kwargs)
        if self._workers:
            _add_rows(path, self._workers, self._unix_ns)


def _unix_ns_of_monotonic() -> int:
    """Return the system's clock minus the monotonic one, by the fastest of some tries."""
    tries = []
    for _ in range(5):
        before, unix, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        tries.append((after - before, unix - (before + after) // 2))
    return min(tries)[1]


def _add_rows(path: str, workers: tuple[engine.WorkerSpans, ...], unix_ns: int) -> None:
    """Add rows to a trace that torch wrote."""
    open_file = gzip.open if path.endswith(".gz") else open
    try:
        with open_file(path, "rb") as file:
            text = file.read()
    except OSError:
        text = b""
    base = re.search(rb'"baseTimeNanoseconds":\s*(\d+)', text)
    events = re.search(rb'"traceEvents":\s*\[', text)
    if base is None or events is None:
        warn(f"gdsdata: {path} is no trace as torch writes them: the engine's work is not in it", UserWarning)
        return
    rows = ",\n".join(_events(workers, unix_ns - int(base[1])))
    with open_file(path, "wb") as file:
        file.writelines((text[: events.end()], b"\n", rows.encode(), b",\n", text[events.end() :]))


def _events(workers: tuple[engine.WorkerSpans, ...], shift_ns: int) -> Iterator[str]:
    for i, (name, spans, dropped) in enumerate(workers):
        row = f'"pid": {os.getpid()}, "tid": {_FIRST_ROW + i}'
        said = json.dumps(f"{name}, and {dropped} more spans" if dropped else name)
        yield f'{{"ph": "M", "name": "thread_name", "ts": 0, {row}, "args": {{"name": {said}}}}}'
        yield f'{{"ph": "M", "name": "thread_sort_index", "ts": 0, {row}, "args": {{"sort_index": {_FIRST_ROW + i}}}}}'
        for what, begin_ns, end_ns, count in spans:
            times = f'"ts": {_us(begin_ns + shift_ns)}, "dur": {_us(end_ns - begin_ns)}'
            args = f'"args": {{"bytes": {count}}}' if count else '"args": {}'
            yield f'{{"ph": "X", "cat": "gdsdata", "name": "gdsdata: {what}", {row}, {times}, {args}}}'


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"  # a float has too few digits

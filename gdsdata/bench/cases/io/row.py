"""The row's side of case=io.

The file's bytes follow from their offset (data.pattern). Reads are compared in a pass that is not
timed, and what the last calls of a timed run read once more. Writes are read back and compared,
in both.
"""

import dataclasses
import queue
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from gdsdata.bench.data.pattern import Pattern
from gdsdata.bench.data.transfers import Memory
from gdsdata.bench.harness.row import Row
from gdsdata.bench.measure import device, system

MOST_VERIFIED = 4096  # transfers of the pass that compares; a pass of 4 KiB ones over a long file takes minutes
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "p99_9": 99.9}


class Offsets:
    """Gives several threads their next transfers: one pass, or passes until the time is over."""

    def __init__(self, work, most=None):
        self.offsets, self.taken, self.over = work.offsets()[:most], 0, False
        self.ends = None if work.duration_s is None else time.perf_counter() + work.duration_s
        self.taking = threading.Lock()

    def take(self, count):
        """At most `count` offsets of one pass; none at the end."""
        with self.taking:
            at = self.taken % len(self.offsets)
            if self.taken:  # one call at least
                self.over |= at == 0 if self.ends is None else time.perf_counter() >= self.ends
            found = self.offsets[at : at if self.over else at + count]
            self.taken += len(found)
            return found


class Drive:
    """Has a peer carry transfers, as many in flight as its work says, and times every call."""

    def __init__(self, peer, memory, offsets, on_call=lambda place, offsets: None):
        self.peer, self.memory, self.offsets, self.on_call = peer, memory, offsets, on_call
        self.writes = peer.work.writes
        self.latencies, self.ops = [], 0

    def run(self):
        if self.peer.submit == "async":
            self.keep_futures()
            return
        shares = self.peer.shares()
        places = np.cumsum([0, *shares[:-1]]).tolist()
        with ThreadPoolExecutor(len(shares)) as threads:
            calls = [threads.submit(self.keep_calling, *lane) for lane in zip(places, shares, strict=True)]
        for call in calls:
            latencies, ops = call.result()
            self.latencies += latencies
            self.ops += ops

    def keep_calling(self, place, share):
        latencies, ops = [], 0
        try:
            while len(offsets := self.offsets.take(share)):
                if self.writes:
                    self.memory.stamp(place, offsets)
                before = time.perf_counter()
                self.peer.move(place, offsets)
                latencies.append(time.perf_counter() - before)
                ops += len(offsets)
                self.on_call(place, offsets)
        except BaseException:
            self.offsets.over = True
            raise
        return latencies, ops

    def keep_futures(self):
        """Times each future from its submission to when its own thread sets it done."""
        done, flying = queue.SimpleQueue[Any](), 0

        def start(place):
            offsets = self.offsets.take(1)
            if not len(offsets):
                return 0
            if self.writes:
                self.memory.stamp(place, offsets)
            before = time.perf_counter()
            future = self.peer.start(place, offsets[0])
            future.add_done_callback(lambda future: done.put((future, time.perf_counter() - before, place, offsets)))
            return 1

        for place in range(self.peer.work.depth):
            flying += start(place)
        failed = None
        while flying:
            future, latency, place, offsets = done.get()
            flying -= 1
            if failed := failed or future.exception():
                continue
            self.latencies.append(latency)
            self.ops += 1
            self.on_call(place, offsets)
            flying += start(place)
        if failed:
            raise failed


class IoRow(Row):
    memory: Any = None

    def construct(self, work):
        places = max(work.depth, work.threads) if self.peer_class.submit == "sync" else work.depth
        self.memory = Memory(Pattern(work.seed), work.io_bytes, places, self.device)
        if work.writes:
            self.memory.fill()
        self.peer = self.peer_class(work, self.memory, self.device, self.engine)

    def verify(self, works):
        """Compares one pass (at most MOST_VERIFIED transfers) in each state of the page cache."""
        return {"checked_bytes": sum(self.verify_one(work) for work in works)}

    def verify_one(self, work):
        work = dataclasses.replace(work, duration_s=None)
        if work.cache == "cold":
            system.drop([work.path])
        self.construct(work)
        try:
            check = (lambda place, offsets: None) if work.writes else self.check_now
            offsets = Offsets(work, MOST_VERIFIED)
            drive = Drive(self.peer, self.memory, offsets, check)
            drive.run()
            self.peer.commit()
            due = len(offsets.offsets)
            if drive.ops != due:
                raise ValueError(f"{work.path}: {drive.ops:,} transfers came, {due:,} were due")
            if work.writes:
                return self.read_back(work, offsets.offsets)
            return drive.ops * work.io_bytes
        finally:
            self.close()
            self.memory = None
            if work.writes:
                Path(work.path).unlink(missing_ok=True)

    def check_now(self, place, offsets):
        """Compares, then overwrites the bytes, so that a later transfer of none is found."""
        self.memory.check(place, offsets, self.peer.work.path)
        self.memory.tensor[self.memory.range(place, len(offsets))] = 0
        device.wait_for_stream(self.device)

    def read_back(self, work, offsets):
        system.drop([work.path])
        due = np.zeros(work.slots, bool)
        due[offsets // work.io_bytes] = True
        return Pattern(work.seed).check_file(work.path, work.io_bytes, due)

    def run(self, work):
        self.construct(work)
        self.last: dict[int, np.ndarray] = {}
        served_before, requests_before = self.peer.served(), self.peer.requests()
        self.start_cpu_clock()
        used_before = resource.getrusage(resource.RUSAGE_SELF)
        offsets = Offsets(work)
        drive = Drive(self.peer, self.memory, offsets, self.last.__setitem__)
        started = time.perf_counter()
        drive.run()
        self.peer.commit()
        seconds = self.now() - started
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.done = work, offsets.offsets[: drive.ops]
        requests = self.peer.requests()
        shares = [1] * work.depth if self.peer.submit == "async" else self.peer.shares()
        latencies = np.array(drive.latencies) * 1e6
        return self.figures(drive.ops * work.io_bytes, seconds, served_before) | {
            "ops": drive.ops,
            "iops": drive.ops / seconds,
            "latency_us": float(latencies.mean()),
            **{f"{name}_us": float(np.percentile(latencies, at)) for name, at in PERCENTILES.items()},
            "calls": len(latencies),
            "threads": 1 if self.peer.submit == "async" else len(shares),
            "calls_in_flight": len(shares),
            "transfers_per_call": max(shares),
            "requests_per_op": None if requests is None else (requests - (requests_before or 0)) / drive.ops,
            "cpu_user_s": used.ru_utime - used_before.ru_utime,
            "cpu_system_s": used.ru_stime - used_before.ru_stime,
        }

    def compare(self):
        """Compares the last reads of the timed run, or all its writes, and frees memory."""
        (work, offsets), memory = self.done, self.memory
        try:
            if work.writes:
                self.read_back(work, offsets)
            else:
                for place, last in self.last.items():
                    memory.check(place, last, work.path)
        finally:
            self.memory = None
        return {}

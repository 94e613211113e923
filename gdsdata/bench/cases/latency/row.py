"""The row's side of case=latency."""

import os
import time
from typing import Any

import torch

from gdsdata.bench.data.pieces import add_one, random_bytes, wrong_in_file, wrong_in_tensor
from gdsdata.bench.harness.row import Row
from gdsdata.bench.measure import device, system

LEAST_ITERATIONS = 5  # of a run, however long they take


class LatencyRow(Row):
    """`tensor` is what is written.

    With `verify` its bytes, and the file's, are other ones at each iteration.
    """

    keeps_device_memory = True
    torch_threads: int | None = 1  # Others that compared bytes would still spin while the next call is timed.
    tensor: Any = None
    expected: Any = None

    def set_up(self):
        if self.torch_threads:
            torch.set_num_threads(self.torch_threads)
        self.work, self.path, self.tensor_bytes = self.source.work, self.source.path, self.source.tensor_bytes

    def prepare_work(self, state, check):
        """Makes the file as the state wants it, the peer, and the bytes: all before the clock."""
        self.state, self.check = state, check
        if self.work == "write":
            # Because of bytes behind the tensor, a write goes over a file's, and not to a new file.
            os.truncate(self.path, self.tensor_bytes + (system.PAGE if state == "in_place" else 0))
        if self.expected is None and (check or self.work == "write"):
            self.expected = random_bytes(self.tensor_bytes, self.settings.seed)
        if self.work == "write":
            self.tensor = self.expected.to(self.device, copy=True)
        self.peer = self.peer_class(self.path, self.tensor_bytes, state, self.device, self.engine)
        self.resident, self.cpu_used = [], 0.0

    def close(self):
        self.close_peer()
        self.expected = None

    def close_peer(self):
        super().close()
        self.tensor = None

    def verify(self, dtype):
        """Compares two reads or writes of other bytes in each state with plain reading."""
        checked = 0
        try:
            for state in self.settings.cache if self.work == "read" else self.settings.writes:
                if self.peer_class.can(self.work, state, self.tensor_bytes):
                    self.prepare_work(state, check=True)
                    for _ in range(2):
                        self.once()
                        checked += self.tensor_bytes
                    self.close_peer()
        finally:
            self.close()
        return {"checked_bytes": checked}

    def asked(self):
        """Return (iterations, those before them, seconds of a run, whether each is compared)."""
        return self.settings.iterations, self.settings.warm_up, self.settings.run_seconds, self.settings.verify

    def run(self, dtype, cache):
        iterations, warm_up, run_seconds, verify = self.asked()
        self.start_cpu_clock()
        self.prepare_work(cache, verify)
        for _ in range(warm_up):
            self.once()
        self.cpu_used, self.resident = 0.0, []
        served_before = self.peer.served()
        latencies: list[float] = []
        ends = time.perf_counter() + run_seconds
        while len(latencies) < iterations and (len(latencies) < LEAST_ITERATIONS or time.perf_counter() < ends):
            latencies.append(self.once())
        found = self.figures(
            self.tensor_bytes * len(latencies), sum(latencies), served_before, self.peer.path or self.work
        )
        return found | {"latencies_s": latencies, "resident_before": max(self.resident, default=None)}

    def once(self):
        """Seconds of one read or write, until the device or the storage has all of it."""
        if self.check:
            self.change()
        if self.work == "read":
            drop_or_look = system.drop if self.state == "cold" else system.resident_share
            self.resident.append(drop_or_look([self.path]))
        device.synchronize(self.device)
        cpu_before, started = system.cpu_seconds(), time.perf_counter()
        came = self.peer.read() if self.work == "read" else self.peer.write(self.tensor)
        device.synchronize(self.device)
        elapsed = time.perf_counter() - started
        self.cpu_used += system.cpu_seconds() - cpu_before
        if self.check:
            self.compare(came)
        return elapsed

    def change(self):
        """Changes every byte: those of an earlier iteration must not pass for new ones."""
        add_one(self.expected, None if self.work == "write" else self.path)
        if self.work == "write":
            self.tensor.add_(1)

    def compare(self, came):
        if self.work == "write":
            self.check_file_size()
            wrong, first = wrong_in_file(self.path, self.expected)
            system.drop([self.path])  # Or the next write would find its pages in memory.
        else:
            self.check_size(came)
            wrong, first = wrong_in_tensor(came, self.expected)
        if wrong:
            raise ValueError(
                f"{self.state}: {wrong:,} of {self.tensor_bytes:,} bytes are wrong, the first at {first:,}"
            )

    def check_file_size(self):
        """Raises ValueError if the file is too short, or bytes behind the tensor have changed."""
        with open(self.path, "rb", buffering=0) as file:
            size = os.path.getsize(self.path)
            if size < self.tensor_bytes and self.state != "in_place":
                raise ValueError(f"{self.state}: the file has {size:,} bytes, {self.tensor_bytes:,} were due")
            file.seek(self.tensor_bytes)
            tail = file.read()
        if any(tail) or len(tail) != (system.PAGE if self.state == "in_place" else 0):
            raise ValueError(f"{self.state}: {len(tail)} bytes lie behind the tensor, and not as they lay there")

    def check_size(self, came):
        due = f"{self.tensor_bytes:,} were due on {self.device}"
        if came.nbytes != self.tensor_bytes or came.device.type != torch.device(self.device).type:
            raise ValueError(f"{self.state}: {came.nbytes:,} bytes came on {came.device}, {due}")

"""One rank of a row of case=replicas, in a process of its own."""

import datetime
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from gdsdata.bench.cases.load.row import LoadRow
from gdsdata.bench.cases.loader.row import BatchRow
from gdsdata.bench.harness.row import Row
from gdsdata.bench.measure import device, system

OPENING_BATCHES = 4
TIMEOUT = datetime.timedelta(seconds=280)  # of a collective; `Ranks` ends those that wait before that


class Rank(Row):
    """The base of ranks. It is in the default process group: NCCL for GPUs, gloo for the CPU.

    It ends with the process that started it, even in the middle of a collective.
    """

    def __init__(self, rank, parent, port, **of_row):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # All are on this host.
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(of_row["settings"].ranks))  # as a launcher says it
        super().__init__(**of_row)
        self.join(rank, self.settings.ranks, parent, port)

    def join(self, rank, ranks, parent, port):
        """Enter the process group, and use it once."""
        system.end_with_parent(parent)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
        backend = "nccl" if device.is_cuda(self.device) else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
        self.beside: Any = dist.new_group(backend="gloo", timeout=TIMEOUT)
        ones = torch.ones(ranks, device=self.device)
        dist.all_gather_into_tensor(ones, ones[rank : rank + 1])
        device.synchronize(self.device)

    def meet(self):
        dist.barrier(group=self.beside)

    def timed(self, work):
        """Do the work from a barrier on. `began` and `ended` are of the host's one clock."""
        served_before, stored_before = self.peer.served(), system.storage_bytes()
        device.forget_peak(self.device)
        self.meet()
        began = time.monotonic()
        work()
        device.synchronize(self.device)
        found = self.figures(None, None, served_before)  # The row knows what all ranks have come to.
        return found | {
            "began": began,
            "ended": time.monotonic(),
            "storage_bytes": system.storage_bytes() - stored_before,
            "device_peak_bytes": device.peak_bytes(self.device),
        }


class TensorsRank(Rank, LoadRow):
    keeps_device_memory = False  # The ranks of all rows share the GPUs.

    def construct(self):
        super().construct()
        self.meet()

    def prepare(self, touched_bytes):
        super().prepare(touched_bytes)
        device.reserve(self.device, self.source.bytes)  # No row is timed for getting it from the driver.

    def warm(self):
        """Have one rank warm the files; the others wait for it in `construct`."""
        if dist.get_rank() == 0:
            super().warm()

    def verify(self, dtype):
        try:
            return super().verify(dtype)
        finally:
            device.release(self.device)

    def open(self, dtype):
        """Do nothing: a load begins by opening the file."""

    def run(self, dtype, cache):
        self.start_cpu_clock()
        self.construct()
        return self.timed(self.load) | {"bytes": self.source.bytes}

    def after(self):
        found = super().after()
        device.release(self.device)
        return found


class VolumesRank(Rank, BatchRow):
    def verify_batches(self):
        return self.data.samples  # as many as the memory for them allows

    def open(self, dtype):
        """Make the data set, and take a few batches, so that its memory is there."""
        self.construct(dtype)
        for _ in zip(range(OPENING_BATCHES), self.peer.epoch(0), strict=False):
            pass
        device.synchronize(self.device)

    def run(self, dtype, cache):
        """Take an epoch's batches."""
        self.start_cpu_clock()
        samples: list[int] = []
        found = self.timed(lambda: samples.extend(len(batch) for batch in self.peer.epoch(1)))
        return found | {"bytes": sum(samples) * self.data.sample_bytes, "batches": len(samples)}


class LimitsRank(Rank):
    """Measures what the ranks can do at most."""

    def find(self):
        """Return None: it is no row."""

    def describe(self):
        return {}

    def all_gather(self, seconds):
        """Measure GB/s of the bytes that this rank has in the end."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        part = -(-self.source.bytes // ranks)
        whole = torch.ones(part * ranks, dtype=torch.uint8, device=self.device)
        mine = whole[rank * part : (rank + 1) * part]
        device.synchronize(self.device)
        self.meet()
        took_s = self.seconds_of(dist.all_gather_into_tensor, whole, mine)
        del whole, mine
        device.release(self.device)
        return {"gb_per_s": part * ranks / took_s / 1e9}

    def pinned_copies(self, seconds):
        self.meet()
        return device.pinned_copy(self.device, seconds)

"""Transfers of one size between a file and memory: order, memory, a new file."""

import contextlib
import os
from dataclasses import dataclass

import numpy as np
import torch

from gdsdata.bench.measure import device, limits

MOST_DEPTH, MOST_THREADS = 4096, 256  # The engine has at most 4096 in flight.
RANDOM = {"randread": True, "randwrite": True, "read": False, "write": False}


@dataclass
class Work:
    """One run; sent to a row's process as a dict.

    Attributes:
        path: the file that is read, or written anew.
        cache: "cold" is past the page cache, "warm" out of it.
        depth: transfers in flight.
        threads: of the rows that have a transfer a thread.
        batch_calls: calls that share the depth, in the rows whose calls carry many transfers.
        duration_s: None is one pass over the file.
    """

    path: str
    direction: str
    cache: str
    file_bytes: int
    io_bytes: int
    depth: int
    threads: int
    batch_calls: int
    duration_s: float | None
    seed: int

    @property
    def writes(self):
        return self.direction.endswith("write")

    @property
    def slots(self):
        """Transfers in one pass: whole ones only."""
        return self.file_bytes // self.io_bytes

    def offsets(self):
        """Return the offsets of one pass, in bytes: each transfer of the file once."""
        order = np.arange(self.slots)
        if RANDOM[self.direction]:
            order = np.random.default_rng(self.seed).permutation(self.slots)
        return order * self.io_bytes


class Memory:
    """Touched memory of a run's transfers on the device: `places` of `io_bytes` each."""

    def __init__(self, pattern, io_bytes, places, device_name):
        self.pattern, self.io_bytes, self.on_gpu = pattern, io_bytes, device.is_cuda(device_name)
        if self.on_gpu:
            self.tensor = torch.empty(places * io_bytes, dtype=torch.uint8, device=device_name)
        else:
            self.array = limits.huge_pages(places * io_bytes)
            self.tensor = torch.from_numpy(self.array)

    def fill(self):
        array = np.empty(self.tensor.numel(), np.uint8) if self.on_gpu else self.array
        self.pattern.fill(array)
        if self.on_gpu:
            self.tensor.copy_(torch.from_numpy(array))

    def range(self, place, count=1):
        return slice(place * self.io_bytes, (place + count) * self.io_bytes)

    def stamp(self, place, offsets):
        """Make the places from `place` on what is to be at these offsets."""
        if not self.on_gpu:
            self.pattern.stamp(self.array[self.range(place, len(offsets))], offsets)
            return
        stamps = torch.from_numpy(self.pattern.stamps(offsets, self.io_bytes).view(np.int64))
        words = self.tensor[self.range(place, len(offsets))].view(torch.int64)
        words.view(*stamps.shape, -1)[:, :, 0] = stamps.to(self.tensor.device)

    def check(self, place, offsets, path):
        """Raise ValueError if these places do not hold what is at these offsets."""
        held = self.tensor[self.range(place, len(offsets))].cpu().numpy()
        self.pattern.check(held, offsets, path)


def new_file(path, size_bytes, flags=0):
    """Make a file anew, with its space allocated; return its descriptor."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o644)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError:
        os.close(fd)
        os.unlink(path)
        raise
    return fd

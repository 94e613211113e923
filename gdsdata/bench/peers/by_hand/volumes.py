"""Volumes read by hand, straight into their batches: rows of case=loader."""

import collections
import contextlib
import os
import queue
import threading
from typing import Any

import numpy as np
import torch

from gdsdata.bench.measure import device
from gdsdata.bench.peers.protocols import BatchPeer


class VolumeReader:
    """Reads a file into its place, and its header, with one preadv; checks the header."""

    def __init__(self, source):
        self.files, self.shape, self.dtype = source.files, tuple(source.shape), np.dtype(source.dtype)
        self.headers = source.headers
        with open(source.files[0], "rb") as file:
            self.header = file.read(source.headers[0])

    def empty(self, count):
        return np.empty((count, *self.shape), self.dtype)

    def __call__(self, index, place):
        header = bytearray(self.headers[index])
        fd = os.open(self.files[index], os.O_RDONLY)
        try:
            got = os.preadv(fd, [header, place], 0)
        finally:
            os.close(fd)
        if got != len(header) + place.nbytes or (len(header) == len(self.header) and header != self.header):
            raise ValueError(f"{self.files[index]}: {got} bytes, or another header than {self.files[0]}")


class ReadRing(BatchPeer, serves="loader"):
    """Threads fill a small ring of batches ahead of the caller, and use it again.

    To a GPU the buffers are pinned. A thread waits for the copy out of a buffer before it reads
    into it again.
    """

    key, name = "read_ring", "read ring, 2 threads"
    setting = (
        "by hand: 2 threads preadv files into a ring of 4 batch buffers, used again; a batch is valid until the next "
        "(on a GPU: the copy of it, for good)"
    )
    path, kinds = "read", ("npy",)
    threads, depth = 2, 4

    def open(self):
        self.keeps_batches = self.on_gpu
        self.read = VolumeReader(self.source)
        if self.on_gpu:
            shape = (self.batch_size, *self.source.shape)
            self.ring = [device.pinned(shape, self.source.torch_dtype) for _ in range(self.depth)]
            self.copied = [device.copied_event() for _ in range(self.depth)]
        else:
            self.ring = [torch.from_numpy(self.read.empty(self.batch_size)) for _ in range(self.depth)]
        self.work: queue.SimpleQueue = queue.SimpleQueue()
        self.workers = [threading.Thread(target=self.fill, args=(self.work,), daemon=True) for _ in range(self.threads)]
        for worker in self.workers:
            worker.start()

    def fill(self, work):
        while True:
            item = work.get()
            if item is None:
                return
            index, place, copied, done = item
            try:
                if copied is not None:
                    copied.synchronize()
                self.read(index, place)
                done.put(None)
            except Exception as error:
                done.put(error)

    def epoch(self, epoch):
        order = self.shuffled(epoch)
        flying: collections.deque = collections.deque()  # (a batch's buffer, what its reads came to)

        def ask(at):
            if at < len(order):
                ids, slot, done = order[at].tolist(), at % self.depth, queue.SimpleQueue[Any]()
                buffer = self.ring[slot][: len(ids)]
                flying.append((buffer, done))
                for index, place in zip(ids, buffer.numpy(), strict=True):
                    self.work.put((index, place, self.copied[slot] if self.on_gpu else None, done))

        def next_batch():
            buffer, done = flying.popleft()
            errors = [error for error in [done.get() for _ in range(len(buffer))] if error is not None]
            if errors:
                raise errors[0]
            return buffer

        try:
            for at in range(self.depth):
                ask(at)
            for at in range(len(order)):
                buffer = next_batch()
                if self.on_gpu:
                    buffer = device.send(buffer, self.device)
                    device.record(self.copied[at % self.depth], self.device)
                    ask(at + self.depth)
                yield buffer
                if not self.on_gpu:
                    ask(at + self.depth)
        finally:
            with contextlib.suppress(queue.Empty):  # An epoch that is broken off leaves files in the queue.
                while True:
                    self.work.get_nowait()[-1].put(None)
            while flying:  # The next epoch's reads must not meet these.
                with contextlib.suppress(Exception):
                    next_batch()

    def close(self):
        for _ in self.workers:
            self.work.put(None)
        for worker in self.workers:
            worker.join()
        super().close()


class ReadRing8(ReadRing, serves="loader"):
    key, name = "read_ring_8", "read ring, 8 threads"
    setting = "the same with 8 threads and 8 buffers"
    threads, depth = 8, 8
    devices = ("cuda",)

    @classmethod
    def variants(cls, on_gpu):
        """None where threads would wait for cores; case.rows= has it all the same."""
        return [cls] if len(os.sched_getaffinity(0)) >= 2 * cls.threads else []

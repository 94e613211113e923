"""The row's side of case=tune: a class for big reads, batches and writes each.

A row is made once, and only its options change from run to run. `verify(options)` compares bytes
with plain reading; `open(options)` does all that comes before the clock; `run(seconds, once)` reads
no byte twice if `once` is true.
"""

import contextlib
import functools
import itertools
import os
import time
from abc import ABC, abstractmethod

import numpy as np
import torch

import gdsdata
from gdsdata.bench.cases.loader.row import LoaderRow
from gdsdata.bench.cases.loader.settings import LoaderSettings
from gdsdata.bench.data.checkpoints import checksum
from gdsdata.bench.harness.row import Row
from gdsdata.bench.measure import device as gpu
from gdsdata.bench.peers.gdsdata.batches import Batches as OurBatches
from gdsdata.bench.peers.protocols import Peer, counted

VERIFIED_BYTES = 64 * 2**20  # of files, at each setting; one call at least
VERIFIED_BATCHES_BYTES = 20 * 2**20  # of batches, the same
OPENING_BATCHES = 4


class WrongBytes(ValueError):
    """A setting whose bytes are wrong: an error of gdsdata, and no choice."""


class EngineRow(Row, ABC):
    """Calls of gdsdata.Engine, one after the other, from or to one tensor that is there."""

    path = ""
    places: list

    def set_up(self):
        torch.set_num_threads(1)  # Others that compared bytes would still spin while the next run is timed.
        self.tensor = torch.zeros(self.source.tensor_bytes, dtype=torch.uint8, device=self.device)

    def find(self):
        return Peer

    def verify(self, options):
        self.open(options)
        try:
            return {"checked_bytes": self.compare()}
        finally:
            self.close()

    def open(self, options):
        self.close()
        self.peer = gdsdata.Engine(gdsdata.EngineOptions(**options))
        self.call(self.places[0])  # makes threads and memory

    @abstractmethod
    def call(self, place):
        """Moves the bytes of one place; returns how many, when the device has them."""

    @abstractmethod
    def compare(self):
        """The bytes that were compared. Raises WrongBytes."""

    def run(self, seconds, once):
        self.start_cpu_clock()
        before, done = self.served(), 0
        started = time.perf_counter()
        for place in self.places if once else itertools.cycle(self.places):
            done += self.call(place)
            elapsed = time.perf_counter() - started
            if elapsed >= seconds:
                break
        served = {path: count - before.get(path, 0) for path, count in self.served().items()}
        return {"bytes": done, "seconds": elapsed, "served": served, "path": self.path}

    def served(self):
        (stats,) = self.peer.stats().values()
        return counted(stats)


class Reads(EngineRow):
    """Files from end to end, in reads of `tensor_bytes`; the last one of a file may be shorter."""

    def set_up(self):
        super().set_up()
        most, sizes = self.source.tensor_bytes, [(path, os.path.getsize(path)) for path in self.source.files]
        self.places = [(path, at, min(most, size - at)) for path, size in sizes for at in range(0, size, most)]

    def call(self, place):
        path, offset, size = place
        self.peer.read(path, self.tensor[:size], offset).result()
        gpu.synchronize(self.device)
        return size

    def compare(self):
        checked = 0
        for path, offset, size in self.places:
            if checked + size > VERIFIED_BYTES and checked:
                break
            self.tensor.zero_()
            self.call((path, offset, size))
            if checksum(self.tensor[:size]) != right_sum(path, offset, size):
                raise WrongBytes(f"{path}: the {size:,} bytes from {offset:,} on are not what plain reading gives")
            checked += size
        return checked


@functools.cache
def right_sum(path, offset, size):
    return checksum(torch.from_numpy(np.fromfile(path, np.uint8, size, offset=offset)))


class Writes(EngineRow):
    """A tensor becomes a file, synced, again and again; each takes the place of the one before."""

    path = "write"

    def set_up(self):
        super().set_up()
        torch.manual_seed(self.settings.seed)
        self.tensor.random_(0, 256)
        self.places = [os.path.join(self.source.files[0], "written.bin")]

    def call(self, place):
        self.peer.write(place, self.tensor).result()
        return self.tensor.nbytes

    def verify(self, options):
        self.tensor.bitwise_not_()  # Other bytes than those of the file.
        return super().verify(options)

    def compare(self):
        written = torch.from_file(self.places[0], size=self.tensor.nbytes, dtype=torch.uint8)
        if not torch.equal(written, self.tensor.cpu()):
            raise WrongBytes(f"{self.places[0]}: its {self.tensor.nbytes:,} bytes are not those of the tensor")
        return self.tensor.nbytes

    def close(self):
        super().close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.places[0])


class Batches(Row):
    """Shuffled batches of GDSDataset, as case=loader takes them."""

    def set_up(self):
        kept = max(1, VERIFIED_BATCHES_BYTES // (self.source.batch_size * self.source.source.sample_bytes))
        as_loader = LoaderSettings(seed=self.settings.seed, verify_batches=min(8, kept))
        self.loader = LoaderRow(self.key, self.source, as_loader, {}, self.device)
        torch.set_num_threads(1)

    def find(self):
        return OurBatches

    def verify(self, options):
        self.open(options)  # Options that are impossible are no wrong bytes.
        self.close()
        try:
            found = self.loader.verify("raw")
        except ValueError as error:
            raise WrongBytes(str(error)) from error
        return {name: found[name] for name in ("checked_batches", "engine_depth") if name in found}

    def open(self, options):
        self.loader.engine = options
        self.loader.open("raw", OPENING_BATCHES)

    def run(self, seconds, once):
        epochs, samples = (1, self.source.cold_samples()) if once else (10**6, None)
        self.start_cpu_clock()
        found = self.loader.timed("raw", epochs, seconds, samples)
        return {name: found[name] for name in ("bytes", "seconds", "served", "path")}

    def close(self):
        self.loader.close()

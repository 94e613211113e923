"""Read shuffled records of 4 KiB from one file and from many, in turns within one process.

    python benchmarks/records.py [--files 1 64 1024] [--batches 2048 512 128 32]
        [--rows gdsdata] [--size-gib 2] [--rounds 13] [--device cuda] [--folder F]

`case=loader` of the bench measures each of these in a process of its own, and processes differ in
small batches by up to a half. Here each round takes an epoch of each data set, in random order.
Rows are those of `case=loader`, for example `gdsdata_pinned` and `index_select`. Records become
int64 on the device, and their files are in the page cache. Before the turns, batches of two epochs
are compared with what numpy reads.

- GB/s (1e9 stored bytes) and CPU s/GB are of whole epochs, or of `LIMIT_S` at most. Cells are
  medians, with the lowest and the highest.
- "of 1 file" compares the medians of many files with those of one.
- "next" is the time that `next` takes if a batch is ready, mean and median: the loop does something
  else for half a millisecond before each call.
"""

import argparse
import itertools
import random
import statistics
import time
from pathlib import Path

from frameworks import cell, routes, table

from gdsdata.bench.cases.loader.case import Batches
from gdsdata.bench.cases.loader.row import LoaderRow
from gdsdata.bench.cases.loader.settings import LoaderSettings
from gdsdata.bench.data import sources
from gdsdata.bench.measure import device as devices
from gdsdata.bench.measure import limits, system
from gdsdata.bench.settings import DataSettings

RECORD = 2048  # uint16
LIMIT_S = 1.0  # of a turn
READY_AFTER_S, CALLS = 0.5e-3, 400  # of `next`
BEGUN_AFTER_S = 0.05  # the first batches of an epoch are not ready sooner
COLUMNS = ("row, files, batches of", "GB/s", "CPU s/GB", "of 1 file", "next, us", "path")


class Turns:
    """A row over one data set: epochs of it, one after the other."""

    def __init__(self, key, source, batch_size, device):
        self.key, self.files, self.batch_size, self.device = key, len(source.files), batch_size, device
        data_set = Batches("records", source, batch_size)
        row = LoaderRow(key, data_set, LoaderSettings(name="loader", verify_batches=4), {}, device)
        row.verify("int64")
        self.epoch = row.construct("int64")
        self.row, self.record_bytes, self.turns = row, source.sample_bytes, []

    def take(self):
        """Take an epoch, or as much of it as comes within `LIMIT_S`."""
        peer, records = self.row.peer, 0
        before = peer.served()
        devices.synchronize(self.device)
        cpu_s, started = system.cpu_seconds(), time.perf_counter()
        for batch in peer.epoch(self.epoch):
            records += len(batch)
            if time.perf_counter() - started > LIMIT_S:
                break
        devices.synchronize(self.device)
        seconds, cpu_s = time.perf_counter() - started, system.cpu_seconds() - cpu_s
        self.epoch += 1
        size_gb = records * self.record_bytes / 1e9
        served = {path: count - before.get(path, 0) for path, count in peer.served().items()}
        self.turns.append({"gb_per_s": size_gb / seconds, "cpu_s_per_gb": cpu_s / size_gb, "served": served})

    def next_us(self):
        """Return the mean and the median time of `next` if a batch is ready."""
        batches, taken = iter(self.row.peer.epoch(self.epoch)), []
        next(batches)
        keep_busy(BEGUN_AFTER_S)
        for _ in range(CALLS):
            keep_busy(READY_AFTER_S)
            started = time.perf_counter()
            if next(batches, None) is None:
                break
            taken.append(time.perf_counter() - started)
        return statistics.mean(taken) * 1e6, statistics.median(taken) * 1e6

    @property
    def gb_per_s(self):
        return statistics.median(turn["gb_per_s"] for turn in self.turns)


def keep_busy(seconds):
    """Run Python for so long. A thread that slept would have to wake up first."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def cells_of(one, all_turns):
    """Return the cells of one row of the table."""
    alone = next((it for it in all_turns if (it.key, it.batch_size, it.files) == (one.key, one.batch_size, 1)), None)
    share = f"{one.gb_per_s / alone.gb_per_s:.2f}" if alone not in (None, one) else ""
    path = routes(one.turns) or one.row.peer.path
    cpu = cell([turn["cpu_s_per_gb"] for turn in one.turns], 3)
    rates = cell([turn["gb_per_s"] for turn in one.turns], 1)
    mean_us, median_us = one.next_us()
    return rates, cpu, share, f"{mean_us:.1f}, {median_us:.1f}", path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[2048, 512, 128, 32])
    parser.add_argument("--rows", nargs="+", default=["gdsdata"], help="keys of rows of case=loader")
    parser.add_argument("--size-gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=13)
    parser.add_argument("--device", default="cuda", help="as torch names it")
    parser.add_argument("--folder", type=Path, help="of made data; by default the bench's")
    given = parser.parse_args()
    settings = DataSettings(
        kind="tokens",
        folder=str(given.folder) if given.folder else None,
        size_bytes=round(given.size_gib * 2**30),
        seq_len=RECORD - 1,
        stride=RECORD,
    )
    made = [sources.source_for("tokens", settings, files=files) for files in given.files]
    for source in made:
        system.warm(source.files)
    turns = [
        Turns(key, source, batch_size, given.device)
        for key, source, batch_size in itertools.product(given.rows, made, given.batches)
    ]
    for _ in range(given.rounds):
        for one in random.sample(turns, len(turns)):
            one.take()
    on_gpu = devices.is_cuda(given.device)
    limit = devices.pinned_copy(given.device, 0.5) if on_gpu else limits.memory_copy(0.5)
    print(f"{given.size_gib:g} GiB of records of 4 KiB to {given.device}, {given.rounds} rounds.")
    print(f"{'Pinned' if on_gpu else 'Memory'} copy: {limit['gb_per_s']:.1f} GB/s.")
    table(COLUMNS, [(f"{one.key}, {one.files:,}, {one.batch_size}", cells_of(one, turns)) for one in turns])


if __name__ == "__main__":
    main()

"""The row's side of case=remote: batches of shards that lie in a store."""

import importlib
import multiprocessing
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gdsdata.bench.cases.loader.row import BatchRow
from gdsdata.bench.data.objects import Objects
from gdsdata.bench.data.sources import Source
from gdsdata.bench.measure import raw_http, system

DUE_S, ROUND_TRIPS = 0.1, 3  # A first batch is due within this time and so many round trips.


@dataclass
class StoredSource(Source):
    """A Source whose files are in a store too.

    `signed` are URLs that need no credentials. A loader may keep a cache in `cache_folder`.
    """

    objects: Objects = field(default=None)  # type: ignore[assignment]
    signed: list[str] = field(default_factory=list)
    cache_folder: str = ""

    @property
    def folder_url(self):
        """Return the URL of the folder that all are in."""
        return self.objects.urls[0].rpartition("/")[0]


class ShardsRow(BatchRow):
    def set_up(self):
        super().set_up()
        self.data = replace(self.data, cache_folder=str(Path(self.data.cache_folder) / self.key))

    def empty_cache(self):
        """Remove the loader's cache, which is in a folder of the row's own."""
        folder = Path(self.data.cache_folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def verify(self, dtype):
        self.empty_cache()
        found = super().verify(dtype)
        return {"checked_bytes": found["checked_batches"] * self.batch_size * self.data.sample_bytes, **found}

    def run(self, dtype, cache):
        """Time one epoch, from construction on, with an empty cache or a full one."""
        resident = self.made_ready(dtype, cache)
        self.start_cpu_clock()
        first: Any = None
        started, samples = time.perf_counter(), 0
        self.construct(dtype)
        for batch in self.peer.epoch(0):
            first = first or self.now() - started
            samples += len(batch)
            del batch
        elapsed = self.now() - started
        if samples != self.data.samples:
            raise ValueError(f"{samples:,} samples came, {self.data.samples:,} were due")
        path = self.peer.path if cache == "cold" else "local cache"
        found = self.figures(samples * self.data.sample_bytes, elapsed, path=path)
        more = {"first_batch_ms": first * 1e3, "resident_before": resident, "pieces_per_s": samples / elapsed}
        return found | more

    def made_ready(self, dtype, cache):
        """Empty the cache, or fill it and warm its files; return their share in the page cache."""
        if cache == "cold":
            self.empty_cache()
            return 0.0
        self.construct(dtype)
        for _ in self.peer.epoch(0):
            pass
        self.close()
        cached = [path for path in Path(self.data.cache_folder).rglob("*") if path.is_file() and path.stat().st_size]
        return system.warm(cached or self.data.files)

    def first_batch(self, dtype):
        """Time the first batch from construction on; return the run and the batch."""
        importlib.import_module(self.peer_class.package or "gdsdata")
        self.start_cpu_clock()
        started = time.perf_counter()
        self.construct(dtype)
        batches = iter(self.peer.epoch(0))  # kept, because the end of an epoch that is broken off is not timed
        batch = next(batches)
        elapsed = self.now() - started
        found = {"bytes": batch.nbytes, "seconds": elapsed, "first_batch_ms": elapsed * 1e3}
        found |= {"served": {}, "path": self.peer.path}  # A library may count more than the batch.
        return found | self.after(), batch.cpu().numpy()


def first_batch(settings, dtype):
    multiprocessing.set_start_method(None, force=True)  # Loaders start their workers as in any program.
    return ShardsRow(*settings).first_batch(dtype)


class FirstBatchRow(ShardsRow):
    """Each of its runs is the first batch of a new process."""

    def set_up(self):
        super().set_up()
        sys.dont_write_bytecode = False  # Verifying leaves compiled modules, as an installed package has them.

    def verify_batches(self):
        return 1

    def run(self, dtype, cache):
        found = {"resident_before": self.made_ready(dtype, cache)}
        round_trip_s = raw_http.round_trip_s(self.data.signed[0])
        self.start_cpu_clock()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            settings = self.key, self.source, self.settings, self.engine, self.device
            timed, batch = process.submit(first_batch, settings, dtype).result()
        used = system.cpu_seconds()
        found["untimed_cpu_seconds"] = used - self.cpu_before - timed["cpu_seconds"]
        self.cpu_before = used - timed["cpu_seconds"]
        self.seen: set[int] = set()
        self.compare(0, 0, None, torch.from_numpy(batch), dtype)
        due_s = DUE_S + ROUND_TRIPS * round_trip_s
        timed |= {"path": "local cache"} if cache == "warm" else {}
        return found | timed | {"round_trip_ms": round_trip_s * 1e3, "ratio_to_due": timed["seconds"] / due_s}

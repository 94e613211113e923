"""The row's side of case=remote: batches of shards that lie in a store."""

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gdsdata.bench.cases.loader.row import BatchRow
from gdsdata.bench.data.objects import Objects
from gdsdata.bench.data.sources import Source
from gdsdata.bench.measure import device, system
from gdsdata.bench.peers import registry


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
    def find(self, key):
        return registry.find("remote", key, "shards")

    def empty_cache(self):
        """Remove the loader's cache, which is in a folder of the row's own."""
        folder = Path(self.source.cache_folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def verify(self, dtype, batches):
        self.source.cache_folder = str(Path(self.source.cache_folder) / self.key)
        self.empty_cache()
        found = super().verify(dtype, batches)
        return {"checked_bytes": found["checked_batches"] * self.batch_size * self.source.sample_bytes, **found}

    def run(self, dtype, cache):
        """Time one epoch, from construction on, with an empty cache or a full one."""
        if cache == "cold":
            self.empty_cache()
        else:
            self.fill_cache(dtype)
        resident = self.resident_share()
        self.start_cpu_clock()
        first: Any = None
        started, samples = time.perf_counter(), 0
        self.construct(dtype)
        for batch in self.peer.epoch(0):
            first = first or self.seconds_since(started)
            samples += len(batch)
            del batch
        elapsed = self.seconds_since(started)
        if samples != self.source.samples:
            raise ValueError(f"{samples:,} samples came, {self.source.samples:,} were due")
        said: Any = {"bytes": samples * self.source.sample_bytes, "seconds": elapsed, "pieces_per_s": samples / elapsed}
        said |= {"first_batch_ms": first * 1e3, "resident_before": resident, "served": self.peer.served()}
        return said | {"path": self.peer.path if cache == "cold" else "local cache"}

    def fill_cache(self, dtype):
        """Read an epoch, and close the loader."""
        self.construct(dtype)
        for _ in self.peer.epoch(0):
            pass
        self.close()

    def resident_share(self):
        """Return the share of the cache's files that is in the page cache; 0 without files."""
        files = [path for path in Path(self.source.cache_folder).rglob("*") if path.is_file() and path.stat().st_size]
        return system.resident_share(files) if files else 0.0

    def seconds_since(self, started):
        device.synchronize(self.device)
        return time.perf_counter() - started

"""case=loader: GDSDataset beside the alternatives, on the same files, warm and cold, beside the machine's limits."""

import gc
import time

import numpy as np

from gdsdata.bench import case, copies, data, device, limits, measure, peers, row
from gdsdata.bench.copies import stored_as

VERIFIED_BYTES = 160 * 2**20  # batches that are kept for verifying take no more than this
# Read before a cold run, so that it times the storage and not memory that is touched for the first
# time.
OPENING_BATCHES = 8
# More than any row allocates with the default data sets.
TOUCHED_BYTES = 512 * 2**20


class Loader(copies.Copying, case.Case):
    def sources(self):
        settings = self.settings.data
        if settings.path and settings.kind == "all":
            kinds = [data.kind_of(settings.path)]
        else:
            kinds = ["tokens", "npy"] if settings.kind == "all" else [settings.kind]
        for kind in kinds:
            with self.progress.bytes(f"data: {kind}", settings.size_bytes) as advance:
                source = data.source_for(kind, settings, advance)
            yield source

    def batch_size(self, source):
        return self.case.batch_size or (64 if source.kind == "tokens" else 16)

    def cold_samples(self, source):
        default = 8192 if source.kind == "tokens" else source.samples
        return min(self.case.cold_samples or default, source.samples)

    def about(self, source):
        system, disk = measure.file_system(source.files[0])
        return {
            "summary": source.summary(),
            "files": len(source.files),
            "first_file": source.files[0],
            "samples": source.samples,
            "sample_bytes": source.sample_bytes,
            "file_bytes": source.file_bytes,
            "batch_size": self.batch_size(source),
            "cold_samples": self.cold_samples(source),
            "file_system": system,
            "device": disk,
        }

    def dtypes(self, source, cache):
        dtypes = self.case.dtypes if source.kind == "tokens" else [np.dtype(source.dtype).name]
        return dtypes if cache == "warm" else dtypes[:1]

    def rows_for(self, source, cache):
        return peers.rows_for(source.kind, cache, device.is_cuda(self.device))

    def find(self, key):
        return peers.find(key)

    def load_command(self, source):
        return {
            "source": source.as_dict(),
            "batch_size": self.batch_size(source),
            "seed": self.case.seed,
            "engine": self.settings.engine,
            "copies": self.copies_told(),
        }

    def verify_command(self, row):
        source = row.table.source
        kept = max(1, VERIFIED_BYTES // (self.batch_size(source) * source.sample_bytes))
        return {"dtype": row.table.dtype, "batches": min(self.case.verify_batches, kept)}

    def touched_bytes(self, source):
        return TOUCHED_BYTES

    def run(self, row):
        table, files = row.table, self.read_by(row)
        if table.cache == "warm":
            resident = self.warmed(files)
            limits = {"epochs": self.case.epochs, "seconds": self.case.run_seconds, "samples": None}
            return row.process.run(dtype=table.dtype, **limits) | {"resident_before": resident}
        measure.drop(files.files)
        opened = row.process.ask("open", dtype=table.dtype, batches=OPENING_BATCHES)
        resident = measure.drop(files.files)
        limits = {"epochs": 1, "seconds": self.case.cold_seconds, "samples": self.cold_samples(table.source)}
        return row.process.run(opened, dtype=table.dtype, **limits) | {"resident_before": resident}

    def summary(self, row):
        rates = [run["samples"] / run["seconds"] for run in row.runs]
        return row.summary() | {
            "samples_per_s": measure.spread(rates),
            "first_batch_ms": measure.spread([run["first_batch_ms"] for run in row.runs]),
            "cut": any(run["cut"] for run in row.runs),
        }

    def limit_for(self, table, found):
        rate, name = limits.limit_for(table.source, table.cache, self.cold_samples(table.source), found)
        return rate and rate * table.source.sample_bytes / 1e9, name


# ------------------------------------------------------------------------------------------------ in the row's process


class LoaderRow(row.Row):
    def __init__(self, peer, source, batch_size, seed, engine, device, copies=None):
        self.source = data.Source(**source)
        super().__init__(peer, self.find(peer), device)
        self.truth = self.plain_reading()
        if kind := stored_as(self.peer_class):
            self.source = data.Source(**copies[kind])
        self.batch_size, self.seed, self.engine = batch_size, seed, engine
        self.iterator = None

    def find(self, key):
        return peers.find(key)

    def plain_reading(self):
        return data.Truth(self.source)

    def construct(self, dtype):
        """Also settles the peer; the first epoch that counts."""
        self.peer = self.peer_class(self.source, self.batch_size, dtype, self.seed, self.engine, self.device)
        return self.peer.settle()

    def close(self):
        self.iterator = None
        super().close()

    def verify(self, dtype, batches):
        """The first batches of two epochs against numpy; kept ones are compared only once all have arrived."""
        checked = 0
        try:
            start = self.construct(dtype)
            for epoch in (start, start + 1):
                due = min(batches, -(-self.source.samples // self.batch_size))
                place, kept, expected = -1, [], self.peer.expected_ids(epoch, due)
                self.seen = set()
                for place, (ids, batch) in enumerate(zip(expected, self.peer.epoch(epoch), strict=False)):
                    kept.append((place, ids, batch))
                    if not self.peer.keeps_batches:
                        self.compare(epoch, *kept.pop(), dtype)
                        checked += 1
                    del batch
                for place, ids, batch in kept:
                    self.compare(epoch, place, ids, batch, dtype)
                    checked += 1
                if place + 1 < len(expected):
                    raise ValueError(f"epoch {epoch}: {place + 1} batches came, {len(expected)} were due")
            return {"checked_batches": checked, "keeps_batches": self.peer.keeps_batches, **self.peer.facts()}
        finally:
            self.close()

    def compare(self, epoch, place, ids, batch, dtype):
        """`ids` None: whatever samples these are, none may have come before in the epoch."""
        got = batch.cpu().numpy()
        if ids is None:
            ids = self.truth.ids_of(got, self.seen)
            self.seen.update(ids)
        expected = self.truth.batch(ids, dtype)
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise ValueError(
                f"epoch {epoch}, batch {place}: {got.dtype} {got.shape} came, {expected.dtype} {expected.shape} was due"
            )
        # As bytes: NaN equals itself, and -0.0 differs from 0.0.
        wrong = np.flatnonzero(
            (got.reshape(len(ids), -1).view(np.uint8) != expected.reshape(len(ids), -1).view(np.uint8)).any(1)
        )
        if len(wrong):
            raise ValueError(
                f"epoch {epoch}, batch {place}: {len(wrong)} of {len(ids)} samples are not what numpy reads, "
                f"the first is sample {int(ids[wrong[0]])} at place {int(wrong[0])}"
            )

    def open(self, dtype, batches):
        """The first batch's time, and whether the loader is left open with its memory touched.

        One that maps files is closed: their pages could not be dropped from the cache.
        """
        started = time.perf_counter()
        self.construct(dtype)
        iterator, first = iter(self.peer.epoch(0)), None
        for _ in zip(range(batches), iterator, strict=False):
            first = first or self.now()
        del iterator
        device.synchronize(self.device)
        keep = self.peer.may_stay_open()
        if not keep:
            self.close()
            gc.collect()
        return {"first_batch_ms": (first - started) * 1e3, "kept": keep}

    def now(self):
        """The time once the device has all that was asked for."""
        device.synchronize(self.device)
        return time.perf_counter()

    def run(self, dtype, epochs, seconds, samples):
        self.start_cpu_clock()
        now = time.perf_counter
        samples_an_epoch = self.source.samples
        limit = -(-min(samples or samples_an_epoch, samples_an_epoch) // self.batch_size)
        read, first_batch_s, cut, start = 0, None, False, 0
        started = now()
        if self.peer is None:
            start = self.construct(dtype)
            if start:  # it has settled: what is timed begins here
                first_batch_s, started = self.peer.first_batch_s, now()
                self.start_cpu_clock()
        end = started + seconds
        served_before = self.peer.served()
        for epoch in range(start, start + epochs):
            batches = 0
            self.iterator = iter(self.peer.epoch(epoch))
            for batch in self.iterator:
                batches, read = batches + 1, read + len(batch)
                if first_batch_s is None:
                    first_batch_s = self.now() - started
                if now() > end or batches == limit:
                    break
            if now() > end:
                cut = batches < limit
                break
        elapsed = self.now() - started
        return {
            "samples": read,
            "bytes": read * self.source.sample_bytes,
            "seconds": elapsed,
            "first_batch_ms": first_batch_s * 1e3,
            "cut": cut,
            "served": {path: count - served_before.get(path, 0) for path, count in self.peer.served().items()},
            "path": self.peer.path,
        }

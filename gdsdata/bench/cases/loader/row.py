"""The row's side of case=loader."""

import gc
import time
from typing import Any

import numpy as np

from gdsdata.bench.data import sources
from gdsdata.bench.harness.row import Row
from gdsdata.bench.measure import device

VERIFIED_BYTES = 160 * 2**20  # Batches that are kept for verifying take no more than this.


class BatchRow(Row):
    """Makes the peer of case=loader and case=train, and compares its batches with plain reading."""

    def set_up(self):
        source, kind = self.source, self.peer_class.stored_as
        self.data = source.copies[kind] if kind else source.source  # what the peer reads
        self.batch_size, self.truth = source.batch_size, self.plain_reading()

    def plain_reading(self):
        return sources.Truth(self.source.source)

    def construct(self, dtype):
        """Makes and settles the peer; returns the first epoch that counts."""
        self.peer = self.peer_class(self.data, self.batch_size, dtype, self.settings.seed, self.engine, self.device)
        return self.peer.settle()

    def verify(self, dtype):
        """Compares the first batches of two epochs with numpy; kept ones at the end."""
        checked = 0
        kept_at_most = max(1, VERIFIED_BYTES // (self.batch_size * self.data.sample_bytes))
        try:
            start = self.construct(dtype)
            for epoch in (start, start + 1):
                due = min(self.verify_batches(), kept_at_most, -(-self.data.samples // self.batch_size))
                kept, came, expected = [], 0, self.peer.expected_ids(epoch, due)
                self.seen = set()
                for ids, batch in zip(expected, self.peer.epoch(epoch), strict=False):
                    kept.append((came, ids, batch))
                    came += 1
                    if not self.peer.keeps_batches:
                        self.compare(epoch, *kept.pop(), dtype)
                    del batch
                for place, ids, batch in kept:
                    self.compare(epoch, place, ids, batch, dtype)
                if came < len(expected):
                    raise ValueError(f"epoch {epoch}: {came} batches came, {len(expected)} were due")
                checked += came
            return {"checked_batches": checked, "keeps_batches": self.peer.keeps_batches, **self.peer.facts()}
        finally:
            self.close()

    def verify_batches(self):
        return self.settings.verify_batches

    def compare(self, epoch, place, ids, batch, dtype):
        """Raises ValueError for wrong bytes.

        Without `ids` they follow from the bytes, and none may come twice in an epoch.
        """
        got = batch.cpu().numpy()
        if ids is None:
            ids = self.truth.ids_of(got, self.seen)
            self.seen.update(ids)
        expected, where = self.truth.batch(ids, dtype), f"epoch {epoch}, batch {place}"
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise ValueError(f"{where}: {got.dtype} {got.shape} came, {expected.dtype} {expected.shape} was due")
        # As bytes: NaN equals itself, and -0.0 differs from 0.0.
        got, expected = (values.reshape(len(ids), -1).view(np.uint8) for values in (got, expected))
        wrong = np.flatnonzero((got != expected).any(1))
        if len(wrong):
            raise ValueError(
                f"{where}: {len(wrong)} of {len(ids)} samples are not what numpy reads, the first is sample "
                f"{int(ids[wrong[0]])} at place {int(wrong[0])}"
            )


class LoaderRow(BatchRow):
    iterator: Any = None

    def close(self):
        self.iterator = None
        super().close()

    def open(self, dtype, batches):
        """The first batch's time, and whether the loader is left open with its memory touched.

        One that maps files is closed: their pages could not be dropped from the cache.
        """
        started = time.perf_counter()
        self.construct(dtype)
        first: Any = None
        iterator = iter(self.peer.epoch(0))
        for _ in zip(range(batches), iterator, strict=False):
            first = first or self.now()
        del iterator
        device.synchronize(self.device)
        keep = self.peer.may_stay_open()
        if not keep:
            self.close()
            gc.collect()
        return {"first_batch_ms": (first - started) * 1e3, "kept": keep}

    def rate(self, samples, seconds):
        """GB/s; None without samples or their time."""
        return samples * self.data.sample_bytes / seconds / 1e9 if samples and seconds else None

    def run(self, dtype, cache):
        if cache == "warm":
            return self.timed(dtype, self.settings.epochs, self.settings.run_seconds)
        samples = self.source.cold_samples(self.settings.cold_samples)
        return self.timed(dtype, 1, self.settings.cold_seconds, samples)

    def timed(self, dtype, epochs, seconds, samples=None):
        """Take so many epochs, or so many samples of each, or as many as come within `seconds`."""
        self.start_cpu_clock()
        now = time.perf_counter
        samples_an_epoch = self.data.samples
        limit = -(-min(samples or samples_an_epoch, samples_an_epoch) // self.batch_size)
        read, cut = 0, False
        first_batch_s: Any = None
        first_epoch_s: Any = None
        before_later: Any = None  # samples and seconds of the first epoch
        started = now()
        start = self.construct(dtype) if self.peer is None else 0
        if start:  # It has settled: the time begins here.
            first_batch_s, first_epoch_s = self.peer.first_batch_s, self.peer.first_epoch_s
            before_later, started = (0, 0.0), now()
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
            if before_later is None:
                first_epoch_s = self.now() - started
                before_later = read, first_epoch_s
        elapsed = self.now() - started
        later, later_s = (read - before_later[0], elapsed - before_later[1]) if before_later else (0, 0.0)
        return self.figures(read * self.data.sample_bytes, elapsed, served_before) | {
            "samples": read,
            "first_batch_ms": first_batch_s * 1e3,
            "first_epoch_gb_per_s": self.rate(samples_an_epoch, first_epoch_s),
            "later_gb_per_s": self.rate(later, later_s),
            "cut": cut,
        }

"""One row's process: `python -m gdsdata.bench.row` reads a JSON command a line and answers with a JSON line.

Every row has a process of its own, kept over its runs, so that rows can take turns while their memory, page tables and
imports stay apart. Commands:

    {"do": "load", "peer": name, "source": {...}, "batch_size", "seed", "engine": {...}}
    {"do": "verify", "dtype", "batches"}      compares batches with plain numpy
    {"do": "prepare"}                         gives memory back, touches what will be wanted
    {"do": "open", "dtype", "batches"}        for a cold run: times the first batch from construction, reads some more
    {"do": "run", "dtype", "epochs", "seconds", "samples"}   times from construction, or from what open left; the
                                              loader stays open ...
    {"do": "close"}                           ... until here, where the process tree's CPU time is taken
"""

import ctypes
import gc
import json
import os
import sys
import time
import traceback

import numpy as np

from . import measure

# More than any row allocates with the default data sets.
TOUCHED_BYTES = 512 * 2**20


def trim():
    """Gives freed memory back, so that a run's peak does not hide in what the last one left."""
    gc.collect()
    if hasattr(measure.libc, "malloc_trim"):
        measure.libc.malloc_trim(ctypes.c_size_t(0))


class Row:
    def __init__(self, peer, source, batch_size, seed, engine):
        from . import data, peers

        self.key, self.peer_class = peer, peers.find(peer)
        self.source = data.Source(**source)
        self.truth = data.Truth(self.source)
        self.batch_size, self.seed, self.engine = batch_size, seed, engine
        self.peer = self.iterator = None

    def describe(self):
        peer = self.peer_class
        return {
            "key": self.key,
            "name": peer.name or peer.__name__,
            "setting": peer.setting,
            "keeps_batches": peer.keeps_batches,
        }

    def construct(self, dtype):
        self.peer = self.peer_class(self.source, self.batch_size, dtype, self.seed, self.engine)

    def verify(self, dtype, batches):
        """The first batches of two epochs against numpy; kept ones are compared only once all have arrived."""
        self.construct(dtype)
        checked = 0
        try:
            for epoch in (0, 1):
                due = min(batches, -(-self.source.samples // self.batch_size))
                place, kept, expected = -1, [], self.peer.expected_ids(epoch, due)
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
        finally:
            self.close()
        return {"checked": checked}

    def compare(self, epoch, place, ids, batch, dtype):
        expected = self.truth.batch(ids, dtype)
        got = batch.numpy()
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

    def prepare(self):
        trim()
        measure.touch_memory(TOUCHED_BYTES)

    def open(self, dtype, batches):
        """The first batch's time, and whether the loader is left open with its memory touched.

        One that maps files is closed: their pages could not be dropped from the cache.
        """
        started = time.perf_counter()
        self.construct(dtype)
        iterator, first = iter(self.peer.epoch(0)), None
        for _ in zip(range(batches), iterator, strict=False):
            first = first or time.perf_counter()
        del iterator
        keep = self.peer.may_stay_open()
        if not keep:
            self.close()
            gc.collect()
        return {"first_batch_ms": (first - started) * 1e3, "kept": keep}

    def run(self, dtype, epochs, seconds, samples):
        self.cpu_before = measure.cpu_seconds()
        now = time.perf_counter
        samples_an_epoch = self.source.samples
        limit = -(-min(samples or samples_an_epoch, samples_an_epoch) // self.batch_size)
        whole = limit * self.batch_size >= samples_an_epoch
        read, first, cut = 0, None, False
        started = now()
        end = started + seconds
        if self.peer is None:
            self.construct(dtype)
        served_before = self.peer.served()
        for epoch in range(epochs):
            batches = 0
            self.iterator = iter(self.peer.epoch(epoch))
            for _ in self.iterator:
                batches += 1
                if first is None:
                    first = now()
                if now() > end or batches == limit:
                    break
            read += samples_an_epoch if whole and batches == limit else batches * self.batch_size
            if now() > end:
                cut = batches < limit
                break
        elapsed = now() - started
        return {
            "samples": read,
            "seconds": elapsed,
            "first_batch_ms": (first - started) * 1e3,
            "cut": cut,
            "served": {path: count - served_before.get(path, 0) for path, count in self.peer.served().items()},
            "path": self.peer.path,
        }

    def close(self):
        self.iterator = None
        if self.peer is not None:
            self.peer.close()
        self.peer = None

    def after(self):
        self.close()
        used = measure.cpu_seconds() - self.cpu_before
        gc.collect()  # not the loader's doing; mappings must be gone before the cache is dropped
        return {"cpu_seconds": used}


def main():
    # Answers go out on a descriptor of their own: whatever a library prints lands on stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    row = None
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        try:
            if do == "load":
                row = Row(**command)
                answer = row.describe()
            else:
                answer = getattr(row, {"close": "after"}.get(do, do))(**command)
            answers.write(json.dumps({"ok": answer}) + "\n")
        except Exception as error:
            answers.write(
                json.dumps({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}) + "\n"
            )


if __name__ == "__main__":
    main()

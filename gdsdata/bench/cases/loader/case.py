"""The bench's side of case=loader."""

import numpy as np

from gdsdata.bench.cases.loader.copying import Copying
from gdsdata.bench.cases.loader.row import TOUCHED_BYTES, VERIFIED_BYTES
from gdsdata.bench.data import sources
from gdsdata.bench.measure import limits, system

OPENING_BATCHES = 8  # Read before a cold run, so that it times storage, and not the first touch of memory.


class Loader(Copying):
    def sources(self):
        settings = self.settings.data
        kinds = [settings.kind]
        if settings.kind == "all":
            kinds = [sources.kind_of(settings.path)] if settings.path else ["tokens", "npy"]
        for kind in kinds:
            with self.progress.bytes(f"data: {kind}", settings.size_bytes) as advance:
                source = sources.source_for(kind, settings, advance)
            yield source

    def batch_size(self, source):
        return self.case.batch_size or (64 if source.kind == "tokens" else 16)

    def cold_samples(self, source):
        default = 8192 if source.kind == "tokens" else source.samples
        return min(self.case.cold_samples or default, source.samples)

    def facts(self, source):
        return self.files_facts(source) | {
            "samples": source.samples,
            "sample_bytes": source.sample_bytes,
            "batch_size": self.batch_size(source),
            "cold_samples": self.cold_samples(source),
        }

    def dtypes(self, source, cache):
        dtypes = self.case.dtypes if source.kind == "tokens" else [np.dtype(source.dtype).name]
        return dtypes if cache == "warm" else dtypes[:1]

    def load_command(self, source):
        return {
            "source": source,
            "batch_size": self.batch_size(source),
            "seed": self.case.seed,
            "engine": self.settings.engine,
            "copies": self.copies,
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
            ends = {"epochs": self.case.epochs, "seconds": self.case.run_seconds, "samples": None}
            return row.process.run(dtype=table.dtype, **ends) | {"resident_before": resident}
        system.drop(files.files)
        opened = row.process.ask("open", dtype=table.dtype, batches=OPENING_BATCHES)
        resident = system.drop(files.files)
        ends = {"epochs": 1, "seconds": self.case.cold_seconds, "samples": self.cold_samples(table.source)}
        return row.process.run(opened, dtype=table.dtype, **ends) | {"resident_before": resident}

    def summary(self, row):
        rates = [run["samples"] / run["seconds"] for run in row.runs]
        return row.summary() | {
            "samples_per_s": system.spread(rates),
            "first_batch_ms": row.spread("first_batch_ms"),
            "cut": any(run["cut"] for run in row.runs),
        }

    def limit_for(self, table, found):
        rate, name = limits.limit_for(table.source, table.cache, self.cold_samples(table.source), found)
        return rate and rate * table.source.sample_bytes / 1e9, name

"""The bench's side of case=loader."""

from dataclasses import dataclass

import numpy as np

from gdsdata.bench.cases.loader.copying import Copying, Work
from gdsdata.bench.cases.loader.row import TOUCHED_BYTES, VERIFIED_BYTES
from gdsdata.bench.data import sources
from gdsdata.bench.measure import limits, system
from gdsdata.bench.peers import registry

BATCH_SIZES = {"tokens": [64, 16], "npy": [16]}
OPENING_BATCHES = 8  # Read before a cold run, so that it times storage, and not the first touch of memory.


@dataclass
class Batches(Work):
    """A data set in batches of one size."""

    data_set: str
    batch_size: int


class Loader(Copying):
    def sources(self):
        settings = self.settings.data
        kinds = [settings.kind]
        if settings.kind == "all":
            kinds = [sources.kind_of(settings.path)] if settings.path else ["tokens", "npy"]
        for kind in kinds:
            for files in settings.files if kind == "tokens" else [1]:
                with self.progress.bytes(f"data: {kind}", settings.size_bytes) as advance:
                    source = sources.source_for(kind, settings, advance, files)
                data_set = f"{kind} in {len(source.files):,} file{'s' * (len(source.files) > 1)}"
                for batch_size in self.batch_sizes(source):
                    yield Batches(f"{data_set}, batch {batch_size}", source, data_set, batch_size)

    def batch_sizes(self, source):
        return list(dict.fromkeys(self.case.batch_sizes)) or BATCH_SIZES[source.kind]

    def rows_for(self, source, cache):
        return registry.rows("loader", source.source.kind, cache, self.device)

    def cold_samples(self, source):
        default = 8192 if source.kind == "tokens" else source.samples
        return min(self.case.cold_samples or default, source.samples)

    def facts(self, source):
        return self.files_facts(source) | {
            "samples": source.source.samples,
            "sample_bytes": source.source.sample_bytes,
            "batch_size": source.batch_size,
            "cold_samples": self.cold_samples(source.source),
        }

    def dtypes(self, source, cache):
        dtypes = self.case.dtypes if source.source.kind == "tokens" else [np.dtype(source.source.dtype).name]
        if cache == "warm":
            return dtypes
        return dtypes[:1] if source.batch_size == self.batch_sizes(source.source)[0] else []

    def load_command(self, source):
        return {
            "source": source.source,
            "batch_size": source.batch_size,
            "seed": self.case.seed,
            "engine": self.settings.engine,
            "copies": self.copies,
        }

    def verify_command(self, row):
        source = row.table.source
        kept = max(1, VERIFIED_BYTES // (source.batch_size * source.source.sample_bytes))
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
        ends = {"epochs": 1, "seconds": self.case.cold_seconds, "samples": self.cold_samples(table.source.source)}
        return row.process.run(opened, dtype=table.dtype, **ends) | {"resident_before": resident}

    def summary(self, row):
        rates = [run["samples"] / run["seconds"] for run in row.runs]
        return row.summary() | {
            "data_set": row.table.source.data_set,
            "batch_size": row.table.source.batch_size,
            "samples_per_s": system.spread(rates),
            **{name: row.spread(name) for name in ("first_batch_ms", "first_epoch_gb_per_s", "later_gb_per_s")},
            "cut": any(run["cut"] for run in row.runs),
        }

    def limit_for(self, table, found):
        source = table.source.source
        rate, name = limits.limit_for(source, table.cache, self.cold_samples(source), found)
        return rate and rate * source.sample_bytes / 1e9, name

"""The bench's side of case=loader."""

from dataclasses import dataclass

from gdsdata.bench.cases.loader.copying import Copying
from gdsdata.bench.data import sources
from gdsdata.bench.measure import limits, system

BATCH_SIZES = {"tokens": [64, 16], "npy": [16]}
OPENING_BATCHES = 8  # Read before a cold run, so that it times storage, and not the first touch of memory.


@dataclass
class Batches(sources.DataSet):
    """A data set in batches of one size."""

    data_set: str = ""  # its name, of all sizes

    @property
    def peer_kind(self):
        return self.source.kind


class Loader(Copying):
    of_runs = ("first_batch_ms", "first_epoch_gb_per_s", "later_gb_per_s")

    def sources(self):
        settings = self.settings.data
        kinds = [settings.kind]
        if settings.kind == "all":
            kinds = [sources.kind_of(settings.path)] if settings.path else ["tokens", "npy"]
        for kind in kinds:
            for files in settings.files if kind == "tokens" else [1]:
                source = self.data_set(kind, files=files)
                data_set = f"{kind} in {len(source.files):,} file{'s' * (len(source.files) > 1)}"
                for batch_size in self.batch_sizes(source):
                    yield Batches(f"{data_set}, batch {batch_size}", source, batch_size, data_set=data_set)

    def batch_sizes(self, source):
        return list(dict.fromkeys(self.case.batch_sizes)) or BATCH_SIZES[source.kind]

    def facts(self, source):
        cold_samples = source.cold_samples(self.case.cold_samples)
        return super().facts(source) | {"cold_samples": cold_samples}

    def dtypes(self, source, cache):
        dtypes = self.case.dtypes if source.source.kind == "tokens" else [source.dtype]
        if cache == "warm":
            return dtypes
        return dtypes[:1] if source.batch_size == self.batch_sizes(source.source)[0] else []

    def run(self, row):
        if row.table.cache == "warm":
            return super().run(row)
        system.drop(self.read_by(row).files)
        opened = row.process.ask("open", dtype=row.table.dtype, batches=OPENING_BATCHES)
        return super().run(row) | opened

    def summary(self, row):
        rates = [run["samples"] / run["seconds"] for run in row.runs]
        return super().summary(row) | {
            "data_set": row.table.source.data_set,
            "batch_size": row.table.source.batch_size,
            "samples_per_s": system.spread(rates),
            "cut": any(run["cut"] for run in row.runs),
        }

    def limit_for(self, table, found):
        source, cold_samples = table.source, table.source.cold_samples(self.case.cold_samples)
        return limits.limit_for(source.source, table.cache, cold_samples, found)

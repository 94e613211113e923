"""The bench's side of case=loader."""

from dataclasses import dataclass

from gdsdata.bench.data import sources
from gdsdata.bench.data.copies import copied
from gdsdata.bench.data.made import data_folder
from gdsdata.bench.harness.case import Case
from gdsdata.bench.harness.process import RowFailed
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


class Copying(Case):
    """Makes copies of its sources, DataSets, for rows that read no other format."""

    def missing(self, peer):
        if peer.stored_as and self.settings.data.path and peer.key not in self.case.rows:
            return f"it reads copies of your files, as {peer.stored_as}, which are made if case.rows names it"
        return super().missing(peer)

    def copy_for(self, source, key):
        """The format that a row reads; a user's own class reads the data itself."""
        return next((peer.stored_as for peer in self.rows_for(source, "warm") if peer.key == key), "")

    def start(self, source, names):
        kind_of = {name: kind for name in names if (kind := self.copy_for(source, name))}
        failed: dict[str, RowFailed] = {}
        for kind in sorted(set(kind_of.values())):
            try:
                self.make_copy(source, kind)
            except Exception as error:  # The library that writes it may be broken.
                told = RowFailed(f"volumes could not be written as {kind}: {type(error).__name__}: {error}")
                failed |= {name: told for name in kind_of if kind_of[name] == kind}
        return super().start(source, names) | failed

    def make_copy(self, source, kind):
        original, folder = source.source, data_folder(self.settings.data)
        total = original.samples * original.sample_bytes
        with self.progress.bytes(f"data: {source.kind} as {kind}", total) as advance:
            source.copies[kind] = copied(original, kind, folder, advance)

    def read_by(self, row):
        source = row.table.source
        return source.copies.get(self.copy_for(source, row.key), source)


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

"""Copies of the data for rows that read no other format."""

from gdsdata.bench.data.copies import copied
from gdsdata.bench.data.made import data_folder
from gdsdata.bench.harness.case import Case
from gdsdata.bench.harness.process import RowFailed


class Copying(Case):
    """Makes copies for its rows; its sources are of class DataSet."""

    def missing(self, peer):
        if peer.stored_as and self.settings.data.path and peer.key not in self.case.rows:
            return f"it reads copies of your files, as {peer.stored_as}, which are made if case.rows names it"
        return super().missing(peer)

    def copy_for(self, source, key):
        """The format that a row reads; a user's own class reads the data itself."""
        classes = {peer.key: peer for peer in self.rows_for(source, "warm")}
        return classes[key].stored_as if key in classes else ""

    def start(self, source, names):
        original, folder = source.source, data_folder(self.settings.data)
        kind_of = {name: kind for name in names if (kind := self.copy_for(source, name))}
        total = original.samples * original.sample_bytes
        failures = {}
        for kind in sorted(set(kind_of.values())):
            with self.progress.bytes(f"data: {source.kind} as {kind}", total) as advance:
                try:
                    source.copies[kind] = copied(original, kind, folder, advance)
                except Exception as error:  # The library that writes it may be broken.
                    told = f"volumes could not be written as {kind}: {type(error).__name__}: {error}"
                    failures[kind] = RowFailed(told)
        failed = {name: failures[kind] for name, kind in kind_of.items() if kind in failures}
        return super().start(source, names) | failed

    def read_by(self, row):
        source = row.table.source
        return source.copies.get(self.copy_for(source, row.key), source)

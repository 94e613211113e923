"""LitData: rows of case=loader."""

import os

from gdsdata.bench.peers.registry import serves
from gdsdata.bench.peers.webdataset import Shards, stacked


@serves("loader")
class LitData(Shards):
    key, name, package, stored_as = "litdata", "LitData", "litdata", "litdata"
    setting = "LitData's StreamingDataset over local chunks, shuffle=True, and its StreamingDataLoader"

    def open(self):
        import litdata

        where = self.where() | {"shuffle": True, "seed": self.seed, "drop_last": False}
        self.loader = litdata.StreamingDataLoader(
            litdata.StreamingDataset(**where), batch_size=self.batch_size, collate_fn=stacked, **self.loader_options
        )

    def where(self):
        return {"input_dir": os.path.dirname(self.source.files[0])}

    def may_stay_open(self):
        return False  # It maps chunks.

"""MosaicML Streaming: rows of case=loader."""

import os
import tempfile

from gdsdata.bench.peers.registry import serves
from gdsdata.bench.peers.webdataset import Shards, stacked


@serves("loader")
class Mosaic(Shards):
    key, name, package, stored_as = "mosaic", "MosaicML Streaming", "streaming", "mds"
    setting = "MosaicML's StreamingDataset over local MDS shards, shuffle=True (py1e), and its StreamingDataLoader"

    folder = None

    def open(self):
        import streaming

        streaming.base.util.clean_stale_shared_memory()
        order = {"shuffle": True, "shuffle_algo": "py1e", "shuffle_seed": self.seed}
        dataset = streaming.StreamingDataset(**self.where(), batch_size=self.batch_size, **order)
        self.loader = streaming.StreamingDataLoader(
            dataset, batch_size=self.batch_size, collate_fn=stacked, **self.loader_options
        )

    def where(self):
        # Two of its data sets may not share a folder: this one holds links.
        above = os.path.dirname(os.path.dirname(self.source.files[0]))
        self.folder = tempfile.TemporaryDirectory(dir=above, prefix="links-")
        for file in self.source.files:
            os.link(file, os.path.join(self.folder.name, os.path.basename(file)))
        return {"local": self.folder.name}

    def close(self):
        if self.folder:
            self.folder.cleanup()
        super().close()

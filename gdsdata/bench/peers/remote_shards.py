"""Loaders of shards in a store: rows of case=remote."""

import os
import shutil

from gdsdata.bench.peers.litdata import LitData
from gdsdata.bench.peers.mosaic import Mosaic
from gdsdata.bench.peers.registry import serves
from gdsdata.bench.peers.torch_dataloader import as_it_is
from gdsdata.bench.peers.webdataset import SHUFFLE_BUFFER, Shards, WebDataset, stacked


class FromStore(Shards):
    """Comes before a loader of shards; its source is a StoredSource."""

    path, kinds = "remote", ("shards", "first_batch")


def allow_plain_http(access):
    """Let LitData's client use a store without TLS, for which it has no setting."""
    from litdata.streaming import downloader

    if access.endpoint_url.startswith("http://"):
        options = getattr(downloader, "_OBSTORE_CLIENT_OPTIONS", None) or {}
        downloader._OBSTORE_CLIENT_OPTIONS = {**options, "allow_http": True}


@serves("remote")
class RemoteLitData(FromStore, LitData):
    setting = "LitData's StreamingDataset(s3://..., cache_dir=), shuffle=True, and its StreamingDataLoader"

    def open(self):
        import litdata

        access = self.source.objects.access
        allow_plain_http(access)
        keys = {"aws_access_key_id": access.access_key, "aws_secret_access_key": access.secret_key}
        options = {"endpoint_url": access.endpoint_url or None, "region_name": access.region, **keys}
        dataset = litdata.StreamingDataset(
            self.source.folder_url, cache_dir=self.source.cache_folder, shuffle=True, seed=self.seed, drop_last=False,
            storage_options=options,
        )  # fmt: skip
        self.loader = litdata.StreamingDataLoader(
            dataset, batch_size=self.batch_size, collate_fn=stacked, **self.loader_options
        )


@serves("remote")
class RemoteWebDataset(FromStore, WebDataset):
    setting = f"WebDataset over signed URLs, which it reads by curl, cache_dir=, mixed in a buffer of {SHUFFLE_BUFFER}"

    @classmethod
    def lacks(cls):
        return "" if shutil.which("curl") else "it reads URLs by the program curl, which is missing"

    def open(self):
        import webdataset

        urls = self.source.signed
        shards = webdataset.WebDataset(
            urls, shardshuffle=len(urls), empty_check=False, seed=self.seed, cache_dir=self.source.cache_folder
        )
        batches = shards.shuffle(SHUFFLE_BUFFER).batched(self.batch_size, **self.batching())
        self.loader = webdataset.WebLoader(batches, batch_size=None, collate_fn=as_it_is, **self.loader_options)


@serves("remote")
class RemoteMosaic(FromStore, Mosaic):
    setting = "MosaicML's StreamingDataset(remote=s3://..., local=), shuffle=True (py1e), and its StreamingDataLoader"

    def open(self):
        import streaming

        os.environ.update(self.source.objects.access.environment())
        os.environ["S3_ENDPOINT_URL"] = self.source.objects.access.endpoint_url
        streaming.base.util.clean_stale_shared_memory()
        order = {"shuffle": True, "shuffle_algo": "py1e", "shuffle_seed": self.seed}
        dataset = streaming.StreamingDataset(
            remote=self.source.folder_url, local=self.source.cache_folder, batch_size=self.batch_size, **order
        )
        self.loader = streaming.StreamingDataLoader(
            dataset, batch_size=self.batch_size, collate_fn=stacked, **self.loader_options
        )

    def close(self):
        super(Mosaic, self).close()

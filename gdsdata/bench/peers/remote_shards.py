"""Loaders of shards in a store: rows of case=remote."""

import os
import shutil

from gdsdata.bench.peers.shards import SHUFFLE_BUFFER, LitData, Mosaic, Shards, WebDataset


class FromStore(Shards):
    """Comes before a loader of shards; its source is a StoredSource."""

    path, kinds = "remote", ("shards", "first_batch")


def allow_plain_http(access):
    """Let LitData's client use a store without TLS, for which it has no setting."""
    from litdata.streaming import downloader

    if access.endpoint_url.startswith("http://"):
        options = getattr(downloader, "_OBSTORE_CLIENT_OPTIONS", None) or {}
        downloader._OBSTORE_CLIENT_OPTIONS = {**options, "allow_http": True}


class RemoteLitData(FromStore, LitData, serves="remote"):
    setting = "LitData's StreamingDataset(s3://..., cache_dir=), shuffle=True, and its StreamingDataLoader"

    def where(self):
        access = self.source.objects.access
        allow_plain_http(access)
        keys = {"aws_access_key_id": access.access_key, "aws_secret_access_key": access.secret_key}
        options = {"endpoint_url": access.endpoint_url or None, "region_name": access.region, **keys}
        folders = {"input_dir": self.source.folder_url, "cache_dir": self.source.cache_folder}
        return {**folders, "storage_options": options}


class RemoteWebDataset(FromStore, WebDataset, serves="remote"):
    setting = f"WebDataset over signed URLs, which it reads by curl, cache_dir=, mixed in a buffer of {SHUFFLE_BUFFER}"

    @classmethod
    def lacks(cls):
        return "" if shutil.which("curl") else "it reads URLs by the program curl, which is missing"

    def where(self):
        return {"urls": self.source.signed, "cache_dir": self.source.cache_folder}


class RemoteMosaic(FromStore, Mosaic, serves="remote"):
    setting = "MosaicML's StreamingDataset(remote=s3://..., local=), shuffle=True (py1e), and its StreamingDataLoader"

    def where(self):
        os.environ.update(self.source.objects.access.environment())
        os.environ["S3_ENDPOINT_URL"] = self.source.objects.access.endpoint_url
        return {"remote": self.source.folder_url, "local": self.source.cache_folder}

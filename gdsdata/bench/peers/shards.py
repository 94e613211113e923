"""WebDataset, MosaicML Streaming and LitData: rows of case=loader, train and remote."""

import os
import shutil
import tempfile

import numpy as np
import torch

from gdsdata.bench.data import copies, images
from gdsdata.bench.peers.protocols import ChoosesWorkers, WorkersPeer, worker_counts
from gdsdata.bench.peers.torch_dataloader import as_it_is

SHUFFLE_BUFFER = 256  # samples


class Shards(WorkersPeer):
    """`source` is the copy, whose files are the shards; the loader has its own order."""

    path, knows_ids = "read", False
    kinds: tuple[str, ...] = ("npy",)

    @classmethod
    def variants(cls, on_gpu):
        return [cls.with_workers(count) for count in (0, worker_counts(on_gpu)[-1])]


def stacked(samples):
    return torch.from_numpy(np.stack([sample[copies.FIELD] for sample in samples]))


class StackedMembers:
    """A batch of WebDataset's samples, whose .npy files are alike."""

    def __init__(self, source):
        self.dtype, self.shape, self.bytes = source.dtype, tuple(source.shape), source.sample_bytes

    def __call__(self, samples):
        members = [sample["npy"] for sample in samples]
        arrays = [np.frombuffer(one, self.dtype, offset=len(one) - self.bytes) for one in members]
        return torch.from_numpy(np.stack(arrays).reshape(-1, *self.shape))


class WebDataset(Shards, serves="loader"):
    key, name, package, stored_as = "webdataset", "WebDataset", "webdataset", "tar"
    setting = f"WebDataset over tars of .npy files, mixed in a buffer of {SHUFFLE_BUFFER}, batches put together in it"

    def batching(self):
        return {"collation_fn": StackedMembers(self.source)}

    def open(self):
        import webdataset

        where = self.where()
        order = {"shardshuffle": len(where["urls"]), "seed": self.seed}
        shards = webdataset.WebDataset(**where, **order, empty_check=False)
        batches = shards.shuffle(SHUFFLE_BUFFER).batched(self.batch_size, **self.batching())
        self.loader = webdataset.WebLoader(batches, batch_size=None, collate_fn=as_it_is, **self.loader_options)

    def where(self):
        return {"urls": self.source.files}

    @property
    def data_loader(self):
        return self.loader.pipeline[0]


class WebDatasetVolumes(ChoosesWorkers, WebDataset, serves="train"):
    kinds = ("volumes",)
    setting = f"{WebDataset.setting}, with the number of workers with which the loop was fastest"


def decoded(samples):
    """Return a batch of samples, stacked in a worker."""
    return torch.stack([images.decoded(one["jpg"]) for one in samples])


class WebDatasetImages(WebDatasetVolumes, serves="train"):
    setting = (
        f"WebDataset over the tars, mixed in a buffer of {SHUFFLE_BUFFER}, decoded by torchvision in its workers, with "
        "the number of workers with which the loop was fastest"
    )
    kinds, stored_as = ("images",), ""

    def batching(self):
        return {"collation_fn": decoded, "partial": False}

    def expected_ids(self, epoch, batches):
        """Each worker leaves out its last batch, which is smaller; one is left at least."""
        return [None] * max(1, min(batches, self.source.samples // self.batch_size - max(1, self.workers)))


class Mosaic(Shards, serves="loader"):
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


class LitData(Shards, serves="loader"):
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

"""WebDataset: rows of case=loader and case=train; and what loaders of shards have in common.

Loaders that mix samples as they come have an order of their own: a batch's samples are known by
their bytes.
"""

import numpy as np
import torch

from gdsdata.bench.data import copies, images
from gdsdata.bench.measure import device
from gdsdata.bench.peers.protocols import BatchPeer, ChoosesWorkers, worker_counts, workers_text
from gdsdata.bench.peers.registry import serves
from gdsdata.bench.peers.torch_dataloader import as_it_is, end_workers

SHUFFLE_BUFFER = 256  # samples


class Shards(BatchPeer):
    """`source` is the copy: its files are the shards."""

    path, kinds = "read", ("npy",)
    workers = 0

    @classmethod
    def variants(cls, on_gpu):
        return [cls.with_workers(count) for count in (0, worker_counts(on_gpu)[-1])]

    @property
    def loader_options(self):
        """Arguments of a DataLoader, or of a class that is made like one."""
        return {"num_workers": self.workers, "persistent_workers": self.workers > 0, "pin_memory": self.on_gpu}

    def epoch(self, epoch):
        return map(self.deliver, self.loader)

    def expected_ids(self, epoch, batches):
        return [None] * batches

    def may_stay_open(self):
        return self.workers == 0  # The CPU time of workers is known when they end.

    def close(self):
        end_workers(self.data_loader)  # Not left to the collector: a row with 16 of them has hung there.
        super().close()

    @property
    def data_loader(self):
        return self.loader

    @classmethod
    def with_workers(cls, count):
        said = {"key": f"{cls.key}_{count}", "name": f"{cls.name}, {workers_text(count)}", "workers": count}
        return type(f"{cls.__name__}{count}", (cls,), said)


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


@serves("loader")
class WebDataset(Shards):
    key, name, package, stored_as = "webdataset", "WebDataset", "webdataset", "tar"
    setting = f"WebDataset over tars of .npy files, mixed in a buffer of {SHUFFLE_BUFFER}, batches put together in it"

    def open(self):
        import webdataset

        files = self.source.files
        shards = webdataset.WebDataset(files, shardshuffle=len(files), empty_check=False, seed=self.seed)
        batches = shards.shuffle(SHUFFLE_BUFFER).batched(self.batch_size, collation_fn=StackedMembers(self.source))
        self.loader = webdataset.WebLoader(batches, batch_size=None, collate_fn=as_it_is, **self.loader_options)

    @property
    def data_loader(self):
        return self.loader.pipeline[0]


@serves("train")
class WebDatasetVolumes(ChoosesWorkers, WebDataset):
    kinds = ("volumes",)
    setting = f"{WebDataset.setting}, with the number of workers with which the loop was fastest"

    def epoch(self, epoch):
        return device.copied_ahead(self.loader, self.device)


def decoded(samples):
    """A batch of samples, stacked in a worker."""
    return torch.stack([images.decoded(one["jpg"]) for one in samples])


@serves("train")
class WebDatasetImages(ChoosesWorkers, Shards):
    key, name, package = "webdataset", "WebDataset", "webdataset"
    setting = (
        f"WebDataset over the tars, mixed in a buffer of {SHUFFLE_BUFFER}, decoded by torchvision in its workers, with "
        "the number of workers with which the loop was fastest"
    )
    kinds, stored_as = ("images",), ""

    def open(self):
        import webdataset

        shards = webdataset.WebDataset(self.source.files, shardshuffle=len(self.source.files), empty_check=False)
        batches = shards.shuffle(SHUFFLE_BUFFER).batched(self.batch_size, collation_fn=decoded, partial=False)
        self.loader = webdataset.WebLoader(batches, batch_size=None, collate_fn=as_it_is, **self.loader_options)

    def epoch(self, epoch):
        return device.copied_ahead(self.loader, self.device)

    def expected_ids(self, epoch, batches):
        """Each worker leaves out its last batch, which is smaller; one is left at least."""
        return [None] * max(1, min(batches, self.source.samples // self.batch_size - max(1, self.workers)))

    data_loader = WebDataset.data_loader

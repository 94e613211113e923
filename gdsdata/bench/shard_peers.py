"""Other projects' loaders of volumes: of shards in their own formats (copies.py), and with threads over the files.

Those that mix samples as they come have an order of their own: what a batch has is told by its
bytes.
"""

import contextlib
import os
import tempfile
import time

import numpy as np
import torch

from gdsdata.bench import copies, device, peers

SHUFFLE_BUFFER = 256  # samples
AHEAD = 4  # batches


class Shards(peers.Peer):
    """`source` is the copy: its files are the shards."""

    stored_as = ""  # a format of copies.py
    path = "read"
    workers = 0

    @property
    def loader_options(self):
        """Of a DataLoader, or what is made like one."""
        return {
            "num_workers": self.workers,
            "persistent_workers": self.workers > 0,
            "pin_memory": self.on_gpu,
        }

    def epoch(self, epoch):
        return map(self.deliver, self.loader)

    def expected_ids(self, epoch, batches):
        """None: told by the bytes."""
        return [None] * batches

    def may_stay_open(self):
        return self.workers == 0  # workers' CPU time is known when they end

    def close(self):
        peers.end_workers(self.data_loader)  # now: a row whose 16 were left to the collector has hung for ever
        super().close()

    @property
    def data_loader(self):
        return self.loader

    @classmethod
    def with_workers(cls, count):
        name = f"{cls.name}, {count} worker{'s' * (count != 1)}"
        return type(f"{cls.__name__}{count}", (cls,), {"key": f"{cls.key}_{count}", "name": name, "workers": count})


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


class WebDataset(Shards):
    key, name, package, stored_as = "webdataset", "WebDataset", "webdataset", "tar"
    setting = f"WebDataset over tars of .npy files, mixed in a buffer of {SHUFFLE_BUFFER}, batches put together in it"

    def open(self):
        import webdataset

        files = self.source.files
        shards = webdataset.WebDataset(files, shardshuffle=len(files), empty_check=False, seed=self.seed)
        batches = shards.shuffle(SHUFFLE_BUFFER).batched(self.batch_size, collation_fn=StackedMembers(self.source))
        self.loader = webdataset.WebLoader(batches, batch_size=None, collate_fn=peers.as_it_is, **self.loader_options)

    @property
    def data_loader(self):
        return self.loader.pipeline[0]


class Mosaic(Shards):
    key, name, package, stored_as = "mosaic", "MosaicML Streaming", "streaming", "mds"
    setting = "MosaicML's StreamingDataset over local MDS shards, shuffle=True (py1e), and its StreamingDataLoader"

    def open(self):
        import streaming

        streaming.base.util.clean_stale_shared_memory()
        # Two of its data sets may not share a folder: this one is of links.
        above = os.path.dirname(os.path.dirname(self.source.files[0]))
        self.folder = tempfile.TemporaryDirectory(dir=above, prefix="links-")
        for file in self.source.files:
            os.link(file, os.path.join(self.folder.name, os.path.basename(file)))
        dataset = streaming.StreamingDataset(
            local=self.folder.name,
            shuffle=True,
            shuffle_algo="py1e",
            shuffle_seed=self.seed,
            batch_size=self.batch_size,
        )
        self.loader = streaming.StreamingDataLoader(
            dataset, batch_size=self.batch_size, collate_fn=stacked, **self.loader_options
        )

    def close(self):
        self.folder.cleanup()
        super().close()


class LitData(Shards):
    key, name, package, stored_as = "litdata", "LitData", "litdata", "litdata"
    setting = "LitData's StreamingDataset over local chunks, shuffle=True, and its StreamingDataLoader"

    def open(self):
        import litdata

        folder = os.path.dirname(self.source.files[0])
        dataset = litdata.StreamingDataset(folder, shuffle=True, seed=self.seed, drop_last=False)
        self.loader = litdata.StreamingDataLoader(
            dataset, batch_size=self.batch_size, collate_fn=stacked, **self.loader_options
        )

    def may_stay_open(self):
        return False  # it maps chunks


class Ffcv(Shards):
    """It compiles its reading when that begins, which is not timed; so nothing is cold when its time begins."""

    key, name, package, stored_as = "ffcv", "FFCV", "ffcv", "beton"
    path = "mmap"
    setting = "FFCV's Loader over a .beton file, RANDOM, os_cache, a thread a core; timed once its code is compiled"
    keeps_batches = False

    def open(self):
        from ffcv import transforms
        from ffcv.fields.decoders import NDArrayDecoder
        from ffcv.loader import Loader, OrderOption

        steps = [NDArrayDecoder(), transforms.ToTensor()]
        if self.on_gpu:
            steps.append(transforms.ToDevice(torch.device(self.device), non_blocking=True))
        self.loader = Loader(
            self.source.files[0],
            batch_size=self.batch_size,
            num_workers=len(os.sched_getaffinity(0)),
            os_cache=True,
            order=OrderOption.RANDOM,
            seed=self.seed,
            drop_last=False,
            pipelines={copies.FIELD: steps},
        )

    def settle(self):
        started = time.perf_counter()
        with contextlib.closing(self.epoch(0)) as batches:
            next(batches)
        device.synchronize(self.device)
        self.first_batch_s = time.perf_counter() - started
        return 1

    def epoch(self, epoch):
        reading = iter(self.loader)
        try:
            for (batch,) in reading:
                yield self.widened(batch)
        finally:
            reading.close()
            reading.join()

    def may_stay_open(self):
        return False


class OursInTars(peers.Ours):
    key, name, stored_as = "gdsdata_tar", "gdsdata, tars", "tar"
    setting = "GDSDataset over WebDataset's tars, whose index is kept; a batch is a view of its .npy files"

    def layout(self):
        from gdsdata import formats

        return formats.Tar(index_cache=os.path.dirname(self.source.files[0]) + "-index")

    def may_stay_open(self):
        return False  # it maps what it has read of them

    def epoch(self, epoch):
        dtype = getattr(torch, np.dtype(self.source.dtype).name)
        for batch in super().epoch(epoch):
            members = batch["npy"].values.view(len(batch["npy"].offsets) - 1, -1)
            yield members[:, -self.source.sample_bytes :].view(dtype).view(-1, *self.source.shape)


class Spdl(peers.Peer):
    """Threads that read a batch each; to a GPU by way of pinned memory."""

    key, name, package, path = "spdl", "SPDL", "spdl", "read"
    setting = "SPDL's pipeline: as many threads as cores (8 at most), each reading files into a new batch, in order"

    def open(self):
        self.read = peers.VolumeReader(self.source)
        self.threads = min(8, len(os.sched_getaffinity(0)))

    def batch(self, ids):
        dtype = getattr(torch, np.dtype(self.source.dtype).name)
        batch = torch.empty((len(ids), *self.source.shape), dtype=dtype, pin_memory=self.on_gpu)
        for index, place in zip(ids.tolist(), batch.numpy(), strict=True):
            self.read(index, place)
        return batch

    def epoch(self, epoch):
        return map(self.deliver, self.in_host_memory(epoch))

    def in_host_memory(self, epoch):
        from spdl.pipeline import PipelineBuilder

        order = peers.shuffled(self.source.samples, self.seed, epoch).split(self.batch_size)
        builder = PipelineBuilder().add_source(order).pipe(self.batch, concurrency=self.threads, output_order="input")
        pipeline = builder.add_sink(AHEAD).build(num_threads=self.threads)
        with pipeline.auto_stop():
            yield from pipeline


def rows_for(on_gpu):
    """The classes; of those with worker processes one without and one with as many as cores."""
    most = peers.worker_counts(on_gpu)[-1]
    shards = [peer.with_workers(count) for peer in (WebDataset, Mosaic, LitData) for count in (0, most)]
    return [OursInTars, *shards, Spdl]

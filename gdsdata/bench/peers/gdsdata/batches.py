"""GDSDataset: the rows of case=loader and case=train."""

import itertools
import os
import time

import numpy as np

import gdsdata
from gdsdata import formats
from gdsdata.bench.measure import device
from gdsdata.bench.peers.gdsdata.checkpoints import Async, AsyncOnDevice
from gdsdata.bench.peers.protocols import BatchPeer, counted, saving
from gdsdata.data.order.permutation import Order

SETTLE_SECONDS = 60.0


class Batches(BatchPeer, serves="loader train"):
    key, name = "gdsdata", "gdsdata"
    setting = "GDSDataset as documented; every batch is the caller's to keep"
    shuffle: bool | str = True

    def layout(self):
        source = self.source
        if source.kind == "images":
            return formats.Tar(index_cache=None)
        if source.kind == "npy":
            return formats.Npy(mode="file")
        return formats.Tokens(source.dtype, seq_len=source.shape[0] - 1, stride=source.stride, raw=self.dtype == "raw")

    def sharding(self):
        return gdsdata.Sharding(rank=0, world_size=1)

    def place(self):
        """Return where the data set is, and the arguments that only such a place has."""
        return self.source.files, {}

    def reading(self):
        """Return arguments of gdsdata.Reading."""
        return {}

    def open(self):
        place, more = self.place()
        self.dataset = gdsdata.GDSDataset(
            place,
            batch_size=self.batch_size,
            format=self.layout(),
            shuffle=self.shuffle,
            seed=self.seed,
            device=self.device,
            sharding=self.sharding(),
            fields=gdsdata.Fields(decode={"jpg": "image"} if self.source.kind == "images" else None),
            reading=gdsdata.Reading(gdsdata.EngineOptions(**self.engine), **self.reading()),
            **more,
        )

    def epoch(self, epoch):
        self.dataset.set_epoch(epoch)
        batches = iter(self.dataset)
        return (batch["jpg"] for batch in batches) if self.source.kind == "images" else batches

    def expected_ids(self, epoch, batches):
        if self.source.kind == "images":
            return super().expected_ids(epoch, batches)
        order = Order(
            self.source.samples, self.batch_size, shuffle=True, seed=self.seed, drop_last=False, rank=0, world_size=1
        )
        ids, sizes = order.plan(epoch, 0, batches)
        return np.split(np.asarray(ids), np.cumsum(sizes)[:-1])

    def may_stay_open(self):
        return self.source.kind != "tokens"  # Small records are copied out of a mapping.

    def served(self):
        return counted(self.dataset.stats())

    def facts(self):
        engine = self.dataset.stats()["engine"]
        return {"engine_depth": engine["workers"] * engine["queue_depth"]}

    def verdict(self):
        return str(self.dataset.report())


class PinnedBatches(Batches, serves="loader"):
    """From epoch 1 on the GPU gathers out of page cache registered with CUDA."""

    key, name = "gdsdata_pinned", "gdsdata, residency=pinned"
    setting = 'Reading(residency="pinned"), timed from the second epoch on, once stats()["residency"] says ready'
    caches, devices = ("warm",), ("cuda",)

    def reading(self):
        return {"residency": "pinned"}

    def settle(self):
        started = time.perf_counter()
        self.first_batch_s = self.first_epoch_s = None
        for epoch in itertools.count():
            for _ in self.epoch(epoch):
                if self.first_batch_s is None:
                    device.synchronize(self.device)
                    self.first_batch_s = time.perf_counter() - started
                if time.perf_counter() - started > SETTLE_SECONDS:
                    said = self.dataset.stats().get("residency")
                    raise TimeoutError(f"residency was not ready after {SETTLE_SECONDS:g} s and {epoch} epochs: {said}")
            if self.first_epoch_s is None:
                device.synchronize(self.device)
                self.first_epoch_s = time.perf_counter() - started
            residency = self.dataset.stats()["residency"]
            if residency.get("error"):
                raise RuntimeError(f"residency is not to be had: {residency['error']}")
            if residency["ready"]:
                device.synchronize(self.device)
                return epoch + 1

    def may_stay_open(self):
        return False


class TarBatches(Batches, serves="loader"):
    key, name, stored_as = "gdsdata_tar", "gdsdata, tars", "tar"
    kinds: tuple[str, ...] = ("npy",)
    setting = "GDSDataset over WebDataset's tars, whose index is kept; a batch is a view of its .npy files"

    def layout(self):
        return formats.Tar(index_cache=os.path.dirname(self.source.files[0]) + "-index")

    def may_stay_open(self):
        return False  # It maps what it has read of them.

    def epoch(self, epoch):
        for batch in super().epoch(epoch):
            members = batch["npy"].values.view(len(batch["npy"].offsets) - 1, -1)
            yield members[:, -self.source.sample_bytes :].view(self.source.torch_dtype).view(-1, *self.source.shape)


saving(Batches, Async, "gdsdata_saving")
saving(Batches, AsyncOnDevice, "gdsdata_saving_device", devices=("cuda",))

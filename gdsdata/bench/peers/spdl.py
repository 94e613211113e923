"""SPDL: rows of case=loader and case=train."""

import os

import torch

from gdsdata.bench.measure import device
from gdsdata.bench.peers.by_hand.volumes import VolumeReader
from gdsdata.bench.peers.protocols import BatchPeer

AHEAD = 4  # batches


class Spdl(BatchPeer, serves="loader"):
    """Threads that read a batch each; to a GPU by way of pinned memory."""

    key, name, package, path, kinds = "spdl", "SPDL", "spdl", "read", ("npy",)
    setting = "SPDL's pipeline: as many threads as cores (8 at most), each reading files into a new batch, in order"

    def open(self):
        self.read = VolumeReader(self.source)
        self.threads = min(8, len(os.sched_getaffinity(0)))

    def batch(self, ids):
        shape = (len(ids), *self.source.shape)
        batch = torch.empty(shape, dtype=self.source.torch_dtype, pin_memory=self.on_gpu)
        for index, place in zip(ids.tolist(), batch.numpy(), strict=True):
            self.read(index, place)
        return batch

    def epoch(self, epoch):
        return self.delivered(self.in_host_memory(epoch))

    def in_host_memory(self, epoch):
        from spdl.pipeline import PipelineBuilder

        ids = self.shuffled(epoch)
        builder = PipelineBuilder().add_source(ids).pipe(self.batch, concurrency=self.threads, output_order="input")
        pipeline = builder.add_sink(AHEAD).build(num_threads=self.threads)
        with pipeline.auto_stop():
            yield from pipeline


class SpdlVolumes(Spdl, serves="train"):
    kinds = ("volumes",)

    def delivered(self, batches):
        return device.copied_ahead(batches, self.device)

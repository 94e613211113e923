"""FFCV: a row of case=loader."""

import contextlib
import os
import time

import torch

from gdsdata.bench.data import copies
from gdsdata.bench.measure import device
from gdsdata.bench.peers.protocols import BatchPeer


class Ffcv(BatchPeer, serves="loader"):
    """Compiles code while it first reads, untimed; so its files are never cold."""

    key, name, package, stored_as = "ffcv", "FFCV", "ffcv", "beton"
    path, kinds, caches = "mmap", ("npy",), ("warm",)
    setting = "FFCV's Loader over a .beton file, RANDOM, os_cache, a thread a core; timed once its code is compiled"
    keeps_batches = knows_ids = False

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

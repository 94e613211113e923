"""NVIDIA DALI: rows of case=loader and case=train."""

import os

from gdsdata.bench.measure import device
from gdsdata.bench.peers.protocols import BatchPeer

MOST_THREADS = 16
SHUFFLE_BUFFER = 256  # samples


class Dali(BatchPeer):
    """A pipeline over shuffled files; its iterator owns a batch until the next one."""

    package = "nvidia.dali"
    keeps_batches = False
    reader_device = "cpu"

    def open(self):
        self.iterator = None

    def may_stay_open(self):
        return False

    def expected_ids(self, epoch, batches):
        return super().expected_ids(0, batches)  # the list's order, in every epoch

    def outputs(self):
        """Return the pipeline's output; "reader" starts each epoch with a whole batch."""
        from nvidia.dali import fn

        batch = fn.readers.numpy(
            device=self.reader_device,
            files=[self.source.files[index] for ids in self.shuffled(0) for index in ids.tolist()],
            name="reader",
            pad_last_batch=True,  # The next epoch then starts with the first file.
            **({"dont_use_mmap": False} if self.reader_device == "cpu" else {}),
        )
        return batch.gpu() if self.on_gpu else batch

    def make(self):
        from nvidia.dali import pipeline_def
        from nvidia.dali.plugin.base_iterator import LastBatchPolicy
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        pipeline = pipeline_def(
            batch_size=self.batch_size,
            num_threads=min(MOST_THREADS, len(os.sched_getaffinity(0))),
            device_id=device.index(self.device),
            prefetch_queue_depth=3,
        )(self.outputs)()
        return DALIGenericIterator(
            pipeline, ["batch"], reader_name="reader", last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True
        )

    def epoch(self, epoch):
        iterator, self.iterator = self.iterator, None
        iterator = self.make() if iterator is None else iterator
        for outputs in iterator:
            yield outputs[0]["batch"]
        self.iterator = iterator  # An iterator cannot start again if its epoch was broken off.


class DaliMapped(Dali, serves="loader"):
    key, name = "dali_mmap", "DALI readers.numpy, cpu"
    setting = "DALI: readers.numpy(device='cpu') over mapped files, then .gpu(); one shuffled list for every epoch"
    path, kinds, devices = "mmap", ("npy",), ("cuda",)


class DaliCufile(Dali, serves="loader"):
    key, name = "dali_gpu", "DALI readers.numpy, gpu"
    setting = "DALI: readers.numpy(device='gpu'), which reads with cuFile; one shuffled list for every epoch"
    path, kinds, devices = "cuFile", ("npy",), ("cuda",)
    reader_device = "gpu"


class DaliImages(Dali, serves="train"):
    key, name = "dali", "DALI readers.webdataset"
    setting = f"DALI: readers.webdataset, mixed in a buffer of {SHUFFLE_BUFFER}, decoders.image (on a GPU mixed)"
    path, kinds = "read", ("images",)

    def outputs(self):
        from nvidia.dali import fn, types

        shuffle = {"random_shuffle": True, "initial_fill": SHUFFLE_BUFFER, "pad_last_batch": True}
        stored = fn.readers.webdataset(paths=self.source.files, ext=["jpg"], name="reader", **shuffle)
        return fn.decoders.image(stored, device="mixed" if self.on_gpu else "cpu", output_type=types.RGB)

    def epoch(self, epoch):
        return (batch.permute(0, 3, 1, 2) for batch in super().epoch(epoch))


class DaliVolumes(DaliMapped, serves="train"):
    key, kinds = "dali", ("volumes",)

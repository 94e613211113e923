"""NVIDIA DALI's numpy reader, for volumes on a GPU."""

import os

from gdsdata.bench import peers

MOST_THREADS = 16


class Dali(peers.Peer):
    """A pipeline over the shuffled list of files; DALI's iterator owns its batches until the next one is asked for."""

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
        """What the pipeline gives, of a reader named "reader" whose epochs all start with a whole batch."""
        from nvidia.dali import fn

        order = peers.shuffled(self.source.samples, self.seed, 0).tolist()
        batch = fn.readers.numpy(
            device=self.reader_device,
            files=[self.source.files[index] for index in order],
            name="reader",
            pad_last_batch=True,  # so that the next epoch starts with the first file
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
            device_id=peers.device.index(self.device),
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
        self.iterator = iterator  # an epoch that was broken off leaves one that cannot start again


class DaliMapped(Dali):
    key, name = "dali_mmap", "DALI readers.numpy, cpu"
    setting = "DALI: readers.numpy(device='cpu') over mapped files, then .gpu(); one shuffled list for every epoch"
    path = "mmap"


class DaliCufile(Dali):
    key, name = "dali_gpu", "DALI readers.numpy, gpu"
    setting = "DALI: readers.numpy(device='gpu'), which reads with cuFile; one shuffled list for every epoch"
    path = "cuFile"
    reader_device = "gpu"


ROWS = [DaliMapped, DaliCufile]

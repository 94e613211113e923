"""torch's DataLoader: rows of case=loader and case=train."""

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from gdsdata.bench.data import images
from gdsdata.bench.peers.by_hand.volumes import VolumeReader
from gdsdata.bench.peers.by_hand.windows import WindowGather, open_tokens
from gdsdata.bench.peers.protocols import ChoosesWorkers, WorkersPeer, saving, worker_counts
from gdsdata.bench.peers.torch_checkpoints import DcpAsyncOneAtATime, TorchSaveUnsynced


class Samples(Dataset):
    def __init__(self, source):
        self.samples = source.samples

    def __len__(self):
        return self.samples


class WindowDataset(Samples):
    """A memmap and a slice of it, as a user writes it."""

    def __init__(self, source, as_int64):
        super().__init__(source)
        self.as_int64, self.length, self.stride = as_int64, source.shape[0], source.stride
        self.files = [flat.numpy() for flat in open_tokens(source)]
        self.first_ids = source.first_ids

    def __getitem__(self, index):
        file = 0 if len(self.files) == 1 else int(np.searchsorted(self.first_ids, index, side="right")) - 1
        start = (index - int(self.first_ids[file])) * self.stride
        piece = self.files[file][start : start + self.length]
        return torch.from_numpy(piece.astype(np.int64) if self.as_int64 else np.array(piece))


class BatchedWindowDataset(Samples):
    """Uses torch's batched fetch: one gather a batch."""

    def __init__(self, source, as_int64):
        super().__init__(source)
        self.gather = WindowGather(source, as_int64)

    def __getitems__(self, ids):
        return self.gather(torch.tensor(ids))


class VolumeDataset(Samples):
    def __init__(self, source):
        super().__init__(source)
        self.files = source.files

    def __getitem__(self, index):
        return torch.from_numpy(np.load(self.files[index]))


class BatchedVolumeDataset(VolumeDataset):
    """Reads each file straight into its place in the batch."""

    def __init__(self, source):
        super().__init__(source)
        self.read = VolumeReader(source)

    def __getitems__(self, indices):
        batch = self.read.empty(len(indices))
        for place, index in enumerate(indices):
            self.read(index, batch[place])
        return torch.from_numpy(batch)


def as_it_is(batch):
    return batch


class BatchedLoader(WorkersPeer, serves="loader"):
    key, name = "dataloader_batched", "DataLoader, __getitems__"
    setting = (
        "torch DataLoader, 0 workers, with a batched fetch: index_select for tokens, reads into the batch for volumes"
    )
    path = "mmap"
    batched = True

    def make_dataset(self):
        if self.source.kind == "npy":
            self.path = "read"
            return (BatchedVolumeDataset if self.batched else VolumeDataset)(self.source)
        return (BatchedWindowDataset if self.batched else WindowDataset)(self.source, self.widens_here)

    def open(self):
        dataset = self.make_dataset()
        self.generator = torch.Generator()
        self.loader = DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=RandomSampler(dataset, generator=self.generator),
            collate_fn=as_it_is if self.batched else None,
            **self.loader_options,
        )

    def epoch(self, epoch):
        self.generator.manual_seed(self.seed + epoch)
        return super().epoch(epoch)


class Loader(BatchedLoader, serves="loader"):
    """One sample at a time, as its data set is usually written."""

    key, name = "dataloader", "DataLoader"
    setting = "torch DataLoader over a map-style dataset, in the calling process (on a GPU: pin_memory, copied)"
    batched = False

    @classmethod
    def variants(cls, on_gpu):
        return [cls.with_workers(count) for count in [0, *worker_counts(on_gpu)]]

    @classmethod
    def with_workers(cls, count):
        loader = super().with_workers(count)
        if count:
            loader.setting = f"the same, num_workers={count}, persistent"
        return loader


class Images(Samples):
    """Members of tars, read and decoded one by one, as a user writes it."""

    def __init__(self, source):
        super().__init__(source)
        self.places = images.places(source.files)

    def __getitem__(self, index):
        return images.read(self.places[index])


class TrainingLoader(ChoosesWorkers, BatchedLoader, serves="train"):
    """Images are fetched one by one, other samples by batches."""

    key, name = "dataloader", "DataLoader"
    setting = (
        "torch DataLoader over a map-style dataset (persistent workers; to a GPU from pinned memory, copied a batch "
        "ahead on a stream of its own), with the number of workers with which the loop was fastest, tried before"
    )

    def make_dataset(self):
        if self.source.kind != "images":
            return super().make_dataset()
        self.path, self.batched = "read", False
        return Images(self.source)


saving(TrainingLoader, TorchSaveUnsynced, "dataloader_torch_save")
saving(TrainingLoader, DcpAsyncOneAtATime, "dataloader_dcp")

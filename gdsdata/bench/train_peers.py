"""Who feeds case=train, and who saves its checkpoints.

Loaders are peers as in peers.py, of text and volumes the same ones. Those of images give uint8 (B,
3, height, width), shuffled as each does it: an `expected_ids` of None says that a batch's images
tell themselves which they are.

A row's key is its loader's; where it saves as well, `saver` is a peer of checkpoint_peers'
AsyncPeer.
"""

import itertools
import os

import torch
from torch.utils.data import Dataset

from gdsdata.bench import case, checkpoint_peers, dali, data, device, image_shards, peers, shard_peers

SHUFFLE_BUFFER = 256  # samples, of those who mix what they read in order


class ImageTruth:
    """What images must be, by plain reading; as data.Truth."""

    def __init__(self, source):
        self.places = image_shards.places(source.files)

    def batch(self, ids, dtype):
        return torch.stack([image_shards.read(self.places[index]) for index in ids]).numpy()


def truth_of(source):
    return ImageTruth(source) if source.kind == "images" else data.Truth(source)


class Fed:
    """Comes before a loader's own class: what samples its batches are to have, and its other settings."""

    def expected_ids(self, epoch, batches):
        return [None] * batches if self.source.kind == "images" else super().expected_ids(epoch, batches)


class InWorkers(Fed):
    """The row is measured with the number of worker processes with which the loop is fastest."""

    workers = 0

    @classmethod
    def choices(cls, on_gpu):
        return [cls.with_workers(count) for count in [0, *peers.worker_counts(on_gpu)]]

    @classmethod
    def with_workers(cls, count):
        name = f"{cls.name}, {count} worker{'s' * (count != 1)}"
        return type(f"{cls.__name__}{count}", (cls,), {"workers": count, "name": name})

    def facts(self):
        return super().facts() | {"name": self.name, "workers": self.workers}


class Ceiling(peers.Peer):
    key, name = "ceiling", "zero-I/O ceiling"
    setting = "the same loop on one batch, which stays on the device: no loader can be faster"
    path = "none"

    def open(self):
        self.ids = list(range(self.batch_size))
        self.batch = torch.from_numpy(truth_of(self.source).batch(self.ids, self.dtype)).to(self.device)

    def epoch(self, epoch):
        return itertools.repeat(self.batch, self.source.samples // self.batch_size)

    def expected_ids(self, epoch, batches):
        return [self.ids] * min(batches, self.source.samples // self.batch_size)


class Ours(Fed, peers.Ours):
    def layout(self):
        from gdsdata import formats

        if self.source.kind != "images":
            return super().layout()
        self.decode = {"jpg": "image"}
        return formats.Tar(index_cache=None)

    def epoch(self, epoch):
        batches = super().epoch(epoch)
        return (batch["jpg"] for batch in batches) if self.source.kind == "images" else batches


class Images(Dataset):
    """What a user writes: the places of a tar's members, read and decoded one by one."""

    def __init__(self, source):
        self.places = image_shards.places(source.files)

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        return image_shards.read(self.places[index])


class Loader(InWorkers, peers.Loader):
    """Copies to a GPU go ahead on a stream of their own. Of images it is one of single ones, of others by batches."""

    key, name = "dataloader", "DataLoader"
    setting = (
        "torch DataLoader over a map-style dataset (persistent workers; to a GPU from pinned memory, copied a batch "
        "ahead on a stream of its own), with the number of workers with which the loop was fastest, tried before"
    )

    def make_dataset(self):
        if self.source.kind == "images":
            self.path = "read"
            return Images(self.source)
        self.batched = True
        return super().make_dataset()

    def epoch(self, epoch):
        self.generator.manual_seed(self.seed + epoch)
        return device.copied_ahead(self.loader, self.device)


def decoded(samples):
    """A batch of WebDataset's samples, put together in a worker."""
    return torch.stack([image_shards.decoded(one["jpg"]) for one in samples])


class WebDataset(InWorkers, peers.Peer):
    key, name, package = "webdataset", "WebDataset", "webdataset"
    setting = (
        f"WebDataset over the tars, mixed in a buffer of {SHUFFLE_BUFFER}, decoded by torchvision in its workers, with "
        "the number of workers with which the loop was fastest"
    )
    path = "read"

    def open(self):
        import webdataset

        shards = webdataset.WebDataset(self.source.files, shardshuffle=len(self.source.files), empty_check=False)
        batches = shards.shuffle(SHUFFLE_BUFFER).batched(self.batch_size, collation_fn=decoded, partial=False)
        self.loader = webdataset.WebLoader(
            batches,
            batch_size=None,
            collate_fn=peers.as_it_is,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            pin_memory=self.on_gpu,
        )

    def epoch(self, epoch):
        return device.copied_ahead(self.loader, self.device)

    def expected_ids(self, epoch, batches):
        """At least one: each worker has a last batch that is smaller, and left out."""
        return [None] * max(1, min(batches, self.source.samples // self.batch_size - max(1, self.workers)))


class DaliImages(Fed, dali.Dali):
    key, name = "dali", "DALI readers.webdataset"
    setting = f"DALI: readers.webdataset, mixed in a buffer of {SHUFFLE_BUFFER}, decoders.image (on a GPU mixed)"
    path = "read"

    def outputs(self):
        from nvidia.dali import fn, types

        stored = fn.readers.webdataset(
            paths=self.source.files,
            ext=["jpg"],
            random_shuffle=True,
            initial_fill=SHUFFLE_BUFFER,
            pad_last_batch=True,
            name="reader",
        )
        return fn.decoders.image(stored, device="mixed" if self.on_gpu else "cpu", output_type=types.RGB)

    def epoch(self, epoch):
        return (batch.permute(0, 3, 1, 2) for batch in super().epoch(epoch))


class DaliVolumes(Fed, dali.DaliMapped):
    key = "dali"


class WebDatasetVolumes(InWorkers, shard_peers.WebDataset):
    setting = f"{shard_peers.WebDataset.setting}, with the number of workers with which the loop was fastest"

    def epoch(self, epoch):
        return device.copied_ahead(self.loader, self.device)


class SpdlVolumes(Fed, shard_peers.Spdl):
    def epoch(self, epoch):
        return device.copied_ahead(self.in_host_memory(epoch), self.device)


class TorchSave(checkpoint_peers.AsyncPeer):
    key, name = "torch_save", "torch.save"
    setting = "torch.save over the file of the save before, which is not synced"

    def open(self, folder, state_bytes):
        self.folder = folder

    def save(self, state, step):
        torch.save({"model": state}, os.path.join(self.folder, "checkpoint.pt"))

    def wait(self):
        return self.folder


class DcpAsync(checkpoint_peers.TorchAsync):
    """Waits for the save before: torch has it so that one at a time is under way."""

    saving = None

    def save(self, state, step):
        if self.saving is not None:
            self.wait()
        super().save(state, step)


def saving(loader, saver, key):
    """The row of a loader whose loop also saves."""
    name, setting = f"{loader.name} + {saver.name}", f"the same as {loader.key}, and {saver.setting}"
    attributes = {"key": key, "name": name, "setting": setting, "saver": saver}
    return type(f"{loader.__name__}And{saver.__name__}", (loader,), attributes)


OursSavingOnDevice = saving(Ours, checkpoint_peers.OursAsyncOnDevice, "gdsdata_saving_device")
OURS = [Ours, saving(Ours, checkpoint_peers.OursAsync, "gdsdata_saving"), OursSavingOnDevice]
LOADERS = [Loader, saving(Loader, TorchSave, "dataloader_torch_save"), saving(Loader, DcpAsync, "dataloader_dcp")]
MORE = {"text": [], "volumes": [DaliVolumes, WebDatasetVolumes, SpdlVolumes], "images": [WebDataset, DaliImages]}
ONLY_ON_GPU = {OursSavingOnDevice, DaliVolumes}


def rows_for(work, saves, on_gpu):
    """The classes measured beside each other; with `saves` also those that save checkpoints."""
    rows = [Ceiling, *OURS, *LOADERS, *MORE[work]]
    return [peer for peer in rows if (on_gpu or peer not in ONLY_ON_GPU) and (saves or saver_of(peer) is None)]


def saver_of(peer):
    """The class that saves checkpoints while the peer feeds the loop, or None."""
    return getattr(peer, "saver", None)


def find(key, works=tuple(MORE)):
    """The class of that key, or the one at package.module:Class."""
    known = [peer for work in works for peer in rows_for(work, saves=True, on_gpu=True)]
    return case.find(key, known)

"""GDSDataset, and the loaders that a user would otherwise pick or write, each in its best sensible form.

A peer is a class: `Peer(source, batch_size, dtype, seed, engine)` is all it takes to be ready (its time counts),
`epoch(e)` gives an iterator of tensors (B, *shape), `close()` lets go of files, threads and mappings.
`expected_ids(e, batches)` says in which order samples come, so that a batch can be compared with plain numpy. Where
`keeps_batches` is False a batch need only stay valid until the next one is asked for; else it is the caller's for good.

A peer of your own: case.rows=[gdsdata,my.module:MyPeer].
"""

import contextlib
import importlib
import mmap
import os
import queue
import threading

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler


def shuffled(samples, seed, epoch):
    """The epoch's order, drawn as torch's RandomSampler draws it."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))


def open_windows(source, advice=None):
    """Per file, a tensor (windows, seq_len + 1) over a memmap; windows overlap, nothing is copied."""
    windows = []
    for path, header, count in zip(source.files, source.headers, source.counts, strict=True):
        # Copy on write: torch warns of memory that it could not write to; nothing here writes.
        tokens = np.memmap(path, dtype=source.dtype, mode="c", offset=header)
        if advice is not None:
            tokens._mmap.madvise(advice)
        flat = torch.from_numpy(np.asarray(tokens))
        windows.append(flat.as_strided((count, source.shape[0]), (source.stride, 1)))
    return windows


class Peer:
    key = ""  # its name in case.rows
    name = ""
    setting = ""  # one sentence for the report
    path = ""  # how its bytes come: mmap, read
    keeps_batches = True

    def __init__(self, source, batch_size, dtype, seed, engine=None):
        self.source, self.batch_size, self.dtype, self.seed = source, batch_size, dtype, seed
        self.as_int64 = dtype == "int64"
        self.open()

    def open(self):
        pass

    def epoch(self, epoch):
        raise NotImplementedError

    def expected_ids(self, epoch, batches):
        ids = shuffled(self.source.samples, self.seed, epoch).numpy()
        return [ids[at * self.batch_size : (at + 1) * self.batch_size] for at in range(batches)]

    def served(self):
        """{path: bytes} that served the reads, where the loader counts it."""
        return {}

    def may_stay_open(self):
        """Whether the files' pages can be dropped from the cache while this is open: not those that it maps."""
        return self.path != "mmap"

    def close(self):
        for name in list(vars(self)):
            if name not in ("source", "batch_size", "dtype", "seed", "as_int64"):
                delattr(self, name)


# ------------------------------------------------------------------------------------------------ gdsdata


class Ours(Peer):
    key, name = "gdsdata", "gdsdata"
    setting = "GDSDataset as documented; every batch is the caller's to keep"

    def __init__(self, source, batch_size, dtype, seed, engine=None):
        self.engine = engine or {}
        super().__init__(source, batch_size, dtype, seed)

    def open(self):
        import gdsdata

        source = self.source
        if source.kind == "npy":
            layout = gdsdata.formats.Npy(mode="file")
        else:
            layout = gdsdata.formats.Tokens(
                source.dtype, seq_len=source.shape[0] - 1, stride=source.stride, raw=self.dtype == "raw"
            )
        self.dataset = gdsdata.GDSDataset(
            source.files,
            batch_size=self.batch_size,
            format=layout,
            shuffle=True,
            seed=self.seed,
            device="cpu",
            rank=0,
            world_size=1,
            options=gdsdata.EngineOptions(**self.engine),
        )

    def epoch(self, epoch):
        self.dataset.set_epoch(epoch)
        return iter(self.dataset)

    def expected_ids(self, epoch, batches):
        from gdsdata.order import Order

        order = Order(
            self.source.samples, self.batch_size, shuffle=True, seed=self.seed, drop_last=False, rank=0, world_size=1
        )
        ids, sizes = order.plan(epoch, 0, batches)
        return np.split(np.asarray(ids), np.cumsum(sizes)[:-1])

    def may_stay_open(self):
        return self.source.kind != "tokens"  # small records are copied out of a mapping

    def served(self):
        return {path: count for path, count in self.dataset.stats()["bytes"].items() if count}

    def close(self):
        close = getattr(self.dataset, "close", None)
        if close:
            close()
        super().close()


# ------------------------------------------------------------------------------------------------ torch DataLoader


class WindowDataset(Dataset):
    """What a user writes: a memmap and a slice of it."""

    def __init__(self, source, as_int64):
        self.as_int64 = as_int64
        self.length, self.stride, self.samples = source.shape[0], source.stride, source.samples
        self.files = [
            np.memmap(path, dtype=source.dtype, mode="r", offset=header)
            for path, header in zip(source.files, source.headers, strict=True)
        ]
        self.first_ids = np.concatenate([[0], np.cumsum(source.counts)])

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        file = 0 if len(self.files) == 1 else int(np.searchsorted(self.first_ids, index, side="right")) - 1
        start = (index - int(self.first_ids[file])) * self.stride
        piece = self.files[file][start : start + self.length]
        return torch.from_numpy(piece.astype(np.int64) if self.as_int64 else np.array(piece))


class BatchedWindowDataset(Dataset):
    """The same with torch's batched fetch: one gather a batch."""

    def __init__(self, source, as_int64):
        self.gather = WindowGather(source, as_int64)
        self.samples = source.samples

    def __len__(self):
        return self.samples

    def __getitems__(self, ids):
        return self.gather(torch.tensor(ids))


class VolumeDataset(Dataset):
    def __init__(self, source, as_int64=False):
        self.files = source.files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return torch.from_numpy(np.load(self.files[index]))


class BatchedVolumeDataset(VolumeDataset):
    """Reads each file straight into its place in the batch."""

    def __init__(self, source, as_int64=False):
        super().__init__(source)
        self.read = VolumeReader(source)

    def __getitems__(self, indices):
        batch = self.read.empty(len(indices))
        for place, index in enumerate(indices):
            self.read(index, batch[place])
        return torch.from_numpy(batch)


def as_it_is(batch):
    return batch


class Loader(Peer):
    workers = 0
    batched = False
    path = "mmap"

    def open(self):
        if self.source.kind == "npy":
            self.path = "read"
            dataset = (BatchedVolumeDataset if self.batched else VolumeDataset)(self.source)
        else:
            dataset = (BatchedWindowDataset if self.batched else WindowDataset)(self.source, self.as_int64)
        self.generator = torch.Generator()
        self.loader = DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=RandomSampler(dataset, generator=self.generator),
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            collate_fn=as_it_is if self.batched else None,
        )

    def may_stay_open(self):
        return super().may_stay_open() and self.workers == 0  # workers' CPU time is known when they end

    def epoch(self, epoch):
        self.generator.manual_seed(self.seed + epoch)
        return iter(self.loader)

    def close(self):
        iterator = getattr(self.loader, "_iterator", None)  # persistent workers end with the loader's iterator
        if iterator is not None:
            iterator._shutdown_workers()
        super().close()


class Loader0(Loader):
    key, name = "dataloader_0", "DataLoader, 0 workers"
    setting = "torch DataLoader over a map-style dataset, in the calling process"


class Loader1(Loader):
    key, name = "dataloader_1", "DataLoader, 1 worker"
    setting = "the same, num_workers=1, persistent"
    workers = 1


class Loader2(Loader):
    key, name = "dataloader_2", "DataLoader, 2 workers"
    setting = "the same, num_workers=2, persistent"
    workers = 2


class LoaderBatched(Loader):
    key, name = "dataloader_batched", "DataLoader, __getitems__"
    setting = (
        "torch DataLoader, 0 workers, with a batched fetch: index_select for tokens, reads into the batch for volumes"
    )
    batched = True


# ------------------------------------------------------------------------------------------------ by hand: tokens


class WindowGather:
    """A batch by torch.index_select over strided views of memmaps; several files are gathered one after the other."""

    def __init__(self, source, as_int64, advice=None):
        self.windows, self.as_int64 = open_windows(source, advice), as_int64
        self.first_ids = torch.tensor(np.concatenate([[0], np.cumsum(source.counts)]))

    def __call__(self, ids):
        if len(self.windows) == 1:
            batch = torch.index_select(self.windows[0], 0, ids)
        else:
            batch = torch.empty((len(ids), self.windows[0].shape[1]), dtype=self.windows[0].dtype)
            files = torch.searchsorted(self.first_ids, ids, right=True) - 1
            for file in torch.unique(files).tolist():
                places = torch.nonzero(files == file)[:, 0]
                rows = torch.index_select(self.windows[file], 0, ids[places] - self.first_ids[file])
                batch.numpy()[places.numpy()] = rows.numpy()  # torch has no index_put for uint16
        return batch.to(torch.int64) if self.as_int64 else batch


class IndexSelect(Peer):
    key, name = "index_select", "torch.index_select"
    setting = "by hand: torch.index_select over a strided view of the memmap, on all cores"
    path = "mmap"
    advice = None

    def open(self):
        self.gather = WindowGather(self.source, self.as_int64, self.advice)

    def epoch(self, epoch):
        for ids in shuffled(self.source.samples, self.seed, epoch).split(self.batch_size):
            yield self.gather(ids)


class IndexSelectRandom(IndexSelect):
    key, name = "index_select_random", "torch.index_select, MADV_RANDOM"
    setting = "the same with madvise(MADV_RANDOM): the kernel reads only the pages that are touched"

    advice = mmap.MADV_RANDOM


class NumpyGather(Peer):
    key, name = "numpy", "numpy"
    setting = "by hand: numpy's vectorised gather from a strided view of the memmap"
    path = "mmap"

    def open(self):
        self.windows = []
        for path, header, count in zip(self.source.files, self.source.headers, self.source.counts, strict=True):
            tokens = np.asarray(np.memmap(path, dtype=self.source.dtype, mode="r", offset=header))
            strides = (self.source.stride * tokens.itemsize, tokens.itemsize)
            self.windows.append(np.lib.stride_tricks.as_strided(tokens, (count, self.source.shape[0]), strides))
        self.first_ids = np.concatenate([[0], np.cumsum(self.source.counts)])

    def gather(self, ids):
        if len(self.windows) == 1:
            return self.windows[0][ids]
        batch = np.empty((len(ids), self.source.shape[0]), self.source.dtype)
        files = np.searchsorted(self.first_ids, ids, side="right") - 1
        for file in np.unique(files):
            places = np.nonzero(files == file)[0]
            batch[places] = self.windows[file][ids[places] - self.first_ids[file]]
        return batch

    def epoch(self, epoch):
        order = shuffled(self.source.samples, self.seed, epoch).numpy()
        for at in range(0, len(order), self.batch_size):
            batch = self.gather(order[at : at + self.batch_size])
            yield torch.from_numpy(batch.astype(np.int64) if self.as_int64 else batch)


# ------------------------------------------------------------------------------------------------ by hand: volumes


class VolumeReader:
    """One file into its place with one preadv: the header beside it, to see that it is the one expected."""

    def __init__(self, source):
        self.files, self.shape, self.dtype = source.files, tuple(source.shape), np.dtype(source.dtype)
        self.headers = source.headers
        with open(source.files[0], "rb") as file:
            self.header = file.read(source.headers[0])

    def empty(self, count):
        return np.empty((count, *self.shape), self.dtype)

    def __call__(self, index, place):
        header = bytearray(self.headers[index])
        fd = os.open(self.files[index], os.O_RDONLY)
        try:
            got = os.preadv(fd, [header, place], 0)
        finally:
            os.close(fd)
        if got != len(header) + place.nbytes or (len(header) == len(self.header) and header != self.header):
            raise ValueError(f"{self.files[index]}: {got} bytes, or another header than {self.files[0]}")


class ReadRing(Peer):
    """Two threads fill the batches of a small ring ahead of the caller; the buffers are used again and again."""

    key, name = "read_ring", "read ring, 2 threads"
    setting = (
        "by hand: 2 threads preadv files into a ring of 4 batch buffers, used again; a batch is valid until the next"
    )
    path = "read"
    keeps_batches = False
    threads, depth = 2, 4

    def open(self):
        self.read = VolumeReader(self.source)
        self.ring = [self.read.empty(self.batch_size) for _ in range(self.depth)]
        self.work = queue.SimpleQueue()
        self.workers = [threading.Thread(target=self.fill, args=(self.work,), daemon=True) for _ in range(self.threads)]
        for worker in self.workers:
            worker.start()

    def fill(self, work):
        while True:
            item = work.get()
            if item is None:
                return
            index, place, done = item
            try:
                self.read(index, place)
                done.put(None)
            except Exception as error:
                done.put(error)

    def epoch(self, epoch):
        order = shuffled(self.source.samples, self.seed, epoch).split(self.batch_size)
        flying = []

        def ask(at):
            ids, buffer, done = order[at].tolist(), self.ring[at % self.depth], queue.SimpleQueue()
            for place, index in enumerate(ids):
                self.work.put((index, buffer[place], done))
            flying.append((buffer[: len(ids)], done))

        for at in range(min(self.depth, len(order))):
            ask(at)
        for at in range(len(order)):
            buffer, done = flying.pop(0)
            for _ in range(len(buffer)):
                error = done.get()
                if error is not None:
                    raise error
            yield torch.from_numpy(buffer)
            if at + self.depth < len(order):
                ask(at + self.depth)

    def close(self):
        with contextlib.suppress(queue.Empty):  # a run that ended early leaves files that nobody wants any more
            while True:
                self.work.get_nowait()
        for _ in self.workers:
            self.work.put(None)
        for worker in self.workers:
            worker.join()
        super().close()


def rows_for(kind, cache):
    """The classes measured beside each other."""
    if kind == "npy":
        return [Ours, ReadRing, LoaderBatched, Loader0, Loader1, Loader2]
    cold = [IndexSelectRandom] if cache == "cold" else []
    return [Ours, IndexSelect, *cold, NumpyGather, LoaderBatched, Loader0, Loader1, Loader2]


def is_ours(key):
    return key == Ours.key


def find(key):
    """The class of that key, or the one at package.module:Class."""
    if ":" in key:
        module, _, attribute = key.partition(":")
        return getattr(importlib.import_module(module), attribute)
    known = {peer.key: peer for kind in ("tokens", "npy") for peer in rows_for(kind, "cold")}
    if key not in known:
        raise ValueError(
            f"case.rows: there is no row {key!r}; there are {', '.join(known)}, and package.module:Class for yours"
        )
    return known[key]

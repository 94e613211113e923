"""GDSDataset, and the loaders that a user would otherwise pick or write, each in its best sensible form.

A peer is a class: `Peer(source, batch_size, dtype, seed, engine, device)` is all it takes to be
ready (its time counts), `epoch(e)` gives an iterator of tensors (B, *shape) on the device,
`close()` lets go of files, threads and mappings. `expected_ids(e, batches)` says in which order
samples come, so that a batch can be compared with plain numpy. Where `keeps_batches` is False a
batch need only stay valid until the next one is asked for; else it is the caller's for good. On a
GPU every peer goes through pinned memory, copies without waiting, and widens tokens there.

A peer of your own: case.rows=[gdsdata,my.module:MyPeer].
"""

import contextlib
import functools
import itertools
import mmap
import os
import queue
import re
import threading
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from gdsdata.bench import case, device

SETTLE_SECONDS = 60.0


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
    package = ""  # what has to be installed
    keeps_batches = True

    def __init__(self, source, batch_size, dtype, seed, engine=None, device_name="cpu"):
        self.source, self.batch_size, self.dtype, self.seed = source, batch_size, dtype, seed
        self.engine, self.device = engine or {}, device_name
        self.on_gpu = device.is_cuda(device_name)
        self.as_int64 = dtype == "int64"
        self.widens_here = self.as_int64 and not self.on_gpu  # else the GPU does
        self.open()

    def open(self):
        pass

    def settle(self):
        """What must happen before it is timed; the first epoch to time (`first_batch_s` is set where that is not 0)."""
        return 0

    def epoch(self, epoch):
        raise NotImplementedError

    def deliver(self, batch):
        """The batch on the device, in the dtype wanted."""
        if self.on_gpu:
            batch = device.send(batch, self.device)
        return self.widened(batch)

    def widened(self, batch):
        return batch.to(torch.int64) if self.as_int64 else batch

    def expected_ids(self, epoch, batches):
        ids = shuffled(self.source.samples, self.seed, epoch).numpy()
        return [ids[at * self.batch_size : (at + 1) * self.batch_size] for at in range(batches)]

    def served(self):
        """{path: bytes} that served the reads, where the loader counts it."""
        return {}

    def facts(self):
        """What else results.json should say of it."""
        return {}

    def verdict(self):
        """What the loader itself says of the loop that it feeds: one line, or "" where it says nothing."""
        return ""

    def may_stay_open(self):
        """Whether the files' pages can be dropped from the cache while this is open: not those that it maps."""
        return self.path != "mmap"

    def close(self):
        for name in list(vars(self)):
            if name not in ("source", "batch_size", "dtype", "seed", "engine", "device"):
                delattr(self, name)


# ------------------------------------------------------------------------------------------------ gdsdata


class Ours(Peer):
    key, name = "gdsdata", "gdsdata"
    setting = "GDSDataset as documented; every batch is the caller's to keep"

    residency = None  # as of `gdsdata.Reading`
    decode = None  # as of `gdsdata.Fields`

    def layout(self):
        """The format."""
        from gdsdata import formats

        source = self.source
        if source.kind == "npy":
            return formats.Npy(mode="file")
        return formats.Tokens(source.dtype, seq_len=source.shape[0] - 1, stride=source.stride, raw=self.dtype == "raw")

    def open(self):
        import gdsdata

        self.dataset = gdsdata.GDSDataset(
            self.source.files,
            batch_size=self.batch_size,
            format=self.layout(),
            shuffle=True,
            seed=self.seed,
            device=self.device,
            sharding=gdsdata.Sharding(rank=0, world_size=1),
            fields=gdsdata.Fields(decode=self.decode),
            reading=gdsdata.Reading(gdsdata.EngineOptions(**self.engine), residency=self.residency),
        )

    def epoch(self, epoch):
        self.dataset.set_epoch(epoch)
        return iter(self.dataset)

    def expected_ids(self, epoch, batches):
        from gdsdata.data.order.permutation import Order

        order = Order(
            self.source.samples, self.batch_size, shuffle=True, seed=self.seed, drop_last=False, rank=0, world_size=1
        )
        ids, sizes = order.plan(epoch, 0, batches)
        return np.split(np.asarray(ids), np.cumsum(sizes)[:-1])

    def may_stay_open(self):
        return self.source.kind != "tokens"  # small records are copied out of a mapping

    def served(self):
        return {path: count for path, count in self.dataset.stats()["bytes"].items() if count}

    def facts(self):
        engine = self.dataset.stats()["engine"]
        return {"engine_depth": engine["workers"] * engine["queue_depth"]}

    def verdict(self):
        return str(self.dataset.report())

    def close(self):
        close = getattr(getattr(self, "dataset", None), "close", None)
        if close:
            close()
        super().close()


class OursPinned(Ours):
    """From the second epoch on the GPU gathers out of page cache that is registered with CUDA."""

    key, name = "gdsdata_pinned", "gdsdata, residency=pinned"
    setting = 'Reading(residency="pinned"), timed from the second epoch on, once stats()["residency"] says ready'
    residency = "pinned"

    def settle(self):
        started = time.perf_counter()
        self.first_batch_s = None
        for epoch in itertools.count():
            for _ in self.epoch(epoch):
                if self.first_batch_s is None:
                    device.synchronize(self.device)
                    self.first_batch_s = time.perf_counter() - started
                if time.perf_counter() - started > SETTLE_SECONDS:
                    said = self.dataset.stats().get("residency")
                    raise TimeoutError(f"residency was not ready after {SETTLE_SECONDS:g} s and {epoch} epochs: {said}")
            residency = self.dataset.stats()["residency"]
            if residency.get("error"):
                raise RuntimeError(f"residency is not to be had: {residency['error']}")
            if residency["ready"]:
                device.synchronize(self.device)
                return epoch + 1

    def may_stay_open(self):
        return False


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
    key, name = "dataloader_0", "DataLoader, 0 workers"
    setting = "torch DataLoader over a map-style dataset, in the calling process (on a GPU: pin_memory, then copied)"
    workers = 0
    batched = False
    path = "mmap"

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
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            collate_fn=as_it_is if self.batched else None,
            pin_memory=self.on_gpu,
        )

    def may_stay_open(self):
        return super().may_stay_open() and self.workers == 0  # workers' CPU time is known when they end

    def epoch(self, epoch):
        self.generator.manual_seed(self.seed + epoch)
        return map(self.deliver, self.loader) if self.on_gpu else iter(self.loader)

    def close(self):
        end_workers(self.loader)
        super().close()


def end_workers(loader):
    """Of a DataLoader: persistent ones end with its iterator."""
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator._shutdown_workers()


@functools.cache
def loader_with(workers):
    """The row of a DataLoader with so many worker processes."""
    attributes = {
        "key": f"dataloader_{workers}",
        "name": f"DataLoader, {workers} worker{'s' * (workers > 1)}",
        "setting": f"the same, num_workers={workers}, persistent",
        "workers": workers,
    }
    return type(f"Loader{workers}", (Loader,), attributes)


def worker_counts(on_gpu):
    """One and two worker processes; to a GPU, as many as half the cores and as all of them."""
    cores = len(os.sched_getaffinity(0))
    return sorted({max(1, cores // 2), cores}) if on_gpu else [1, 2]


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
            self.into(batch, ids)
        return batch.to(torch.int64) if self.as_int64 else batch

    def into(self, batch, ids):
        """The same, as stored, into a batch that is there."""
        if len(self.windows) == 1:
            torch.index_select(self.windows[0], 0, ids, out=batch)
            return
        files = torch.searchsorted(self.first_ids, ids, right=True) - 1
        for file in torch.unique(files).tolist():
            places = torch.nonzero(files == file)[:, 0]
            rows = torch.index_select(self.windows[file], 0, ids[places] - self.first_ids[file])
            batch.numpy()[places.numpy()] = rows.numpy()  # torch has no index_put for uint16


class Gather(Peer):
    """Batches gathered on the caller's thread; to a GPU by way of pinned slots that are used again."""

    path = "mmap"

    def open(self):
        if self.on_gpu:
            dtype = getattr(torch, np.dtype(self.source.dtype).name)
            self.slots = device.PinnedSlots(self.device, (self.batch_size, *self.source.shape), dtype)

    def gather(self, ids):
        """A tensor of the caller's, in the dtype wanted."""
        raise NotImplementedError

    def gather_into(self, batch, ids):
        raise NotImplementedError

    def epoch(self, epoch):
        for ids in shuffled(self.source.samples, self.seed, epoch).split(self.batch_size):
            if self.on_gpu:
                batch = self.slots.next()[: len(ids)]
                self.gather_into(batch, ids)
                yield self.widened(self.slots.send(batch))
            else:
                yield self.gather(ids)


class IndexSelect(Gather):
    key, name = "index_select", "torch.index_select"
    setting = "by hand: torch.index_select over a strided view of the memmap, on all cores"
    advice = None

    def open(self):
        super().open()
        self.windows = WindowGather(self.source, self.as_int64, self.advice)

    def gather(self, ids):
        return self.windows(ids)

    def gather_into(self, batch, ids):
        self.windows.into(batch, ids)


class IndexSelectRandom(IndexSelect):
    key, name = "index_select_random", "torch.index_select, MADV_RANDOM"
    setting = "the same with madvise(MADV_RANDOM): the kernel reads only the pages that are touched"

    advice = mmap.MADV_RANDOM


class NumpyGather(Gather):
    key, name = "numpy", "numpy"
    setting = "by hand: numpy's vectorised gather from a strided view of the memmap"

    def open(self):
        super().open()
        self.windows = []
        for path, header, count in zip(self.source.files, self.source.headers, self.source.counts, strict=True):
            tokens = np.asarray(np.memmap(path, dtype=self.source.dtype, mode="r", offset=header))
            strides = (self.source.stride * tokens.itemsize, tokens.itemsize)
            self.windows.append(np.lib.stride_tricks.as_strided(tokens, (count, self.source.shape[0]), strides))
        self.first_ids = np.concatenate([[0], np.cumsum(self.source.counts)])

    def gather(self, ids):
        batch = self.rows(ids.numpy())
        return torch.from_numpy(batch.astype(np.int64) if self.as_int64 else batch)

    def gather_into(self, batch, ids):
        if len(self.windows) == 1 and self.windows[0].flags.c_contiguous:  # else take would copy all windows first
            np.take(self.windows[0], ids.numpy(), axis=0, out=batch.numpy(), mode="clip")
        else:
            batch.numpy()[...] = self.rows(ids.numpy())

    def rows(self, ids):
        if len(self.windows) == 1:
            return self.windows[0][ids]
        batch = np.empty((len(ids), self.source.shape[0]), self.source.dtype)
        files = np.searchsorted(self.first_ids, ids, side="right") - 1
        for file in np.unique(files):
            places = np.nonzero(files == file)[0]
            batch[places] = self.windows[file][ids[places] - self.first_ids[file]]
        return batch


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
    """Threads fill the batches of a small ring ahead of the caller; the buffers are used again and again.

    To a GPU the buffers are pinned, and the threads wait for a buffer's copy to end before they
    read into it again.
    """

    key, name = "read_ring", "read ring, 2 threads"
    setting = (
        "by hand: 2 threads preadv files into a ring of 4 batch buffers, used again; a batch is valid until the next "
        "(on a GPU: the copy of it, for good)"
    )
    path = "read"
    threads, depth = 2, 4

    def open(self):
        self.keeps_batches = self.on_gpu
        self.read = VolumeReader(self.source)
        if self.on_gpu:
            dtype = getattr(torch, np.dtype(self.source.dtype).name)
            shape = (self.batch_size, *self.source.shape)
            self.ring = [device.pinned(shape, dtype) for _ in range(self.depth)]
            self.copied = [device.copied_event() for _ in range(self.depth)]
        else:
            self.ring = [torch.from_numpy(self.read.empty(self.batch_size)) for _ in range(self.depth)]
        self.work = queue.SimpleQueue()
        self.workers = [threading.Thread(target=self.fill, args=(self.work,), daemon=True) for _ in range(self.threads)]
        for worker in self.workers:
            worker.start()

    def fill(self, work):
        while True:
            item = work.get()
            if item is None:
                return
            index, place, copied, done = item
            try:
                if copied is not None:
                    copied.synchronize()
                self.read(index, place)
                done.put(None)
            except Exception as error:
                done.put(error)

    def epoch(self, epoch):
        order = shuffled(self.source.samples, self.seed, epoch).split(self.batch_size)
        flying = []

        def ask(at):
            ids, slot, done = order[at].tolist(), at % self.depth, queue.SimpleQueue()
            buffer = self.ring[slot][: len(ids)]
            for index, place in zip(ids, buffer.numpy(), strict=True):
                self.work.put((index, place, self.copied[slot] if self.on_gpu else None, done))
            flying.append([buffer, done, len(ids)])

        def wait_for(batch):
            _, done, count = batch
            for left in reversed(range(count)):
                error = done.get()
                batch[2] = left
                if error is not None:
                    raise error

        try:
            for at in range(min(self.depth, len(order))):
                ask(at)
            for at in range(len(order)):
                wait_for(flying[0])
                buffer = flying.pop(0)[0]
                if self.on_gpu:
                    buffer = device.send(buffer, self.device)
                    device.record(self.copied[at % self.depth], self.device)
                    if at + self.depth < len(order):
                        ask(at + self.depth)
                yield buffer
                if not self.on_gpu and at + self.depth < len(order):
                    ask(at + self.depth)
        finally:
            with contextlib.suppress(queue.Empty):  # an epoch broken off leaves files that nobody wants any more
                while True:
                    self.work.get_nowait()[-1].put(None)
            for batch in flying:  # the next epoch's reads must not meet those that are under way
                with contextlib.suppress(Exception):
                    wait_for(batch)

    def close(self):
        for _ in self.workers:
            self.work.put(None)
        for worker in self.workers:
            worker.join()
        super().close()


class ReadRing8(ReadRing):
    key, name = "read_ring_8", "read ring, 8 threads"
    setting = "the same with 8 threads and 8 buffers"
    threads, depth = 8, 8


def rows_for(kind, cache, on_gpu=False):
    """The classes measured beside each other."""
    from gdsdata.bench import dali, shard_peers

    ours = [Ours, *([OursPinned] if on_gpu and cache == "warm" else [])]
    loaders = [LoaderBatched, Loader, *map(loader_with, worker_counts(on_gpu))]
    if kind == "npy":
        many_cores = len(os.sched_getaffinity(0)) >= 2 * ReadRing8.threads
        rings = [ReadRing, *([ReadRing8] if on_gpu and many_cores else [])]
        shards = [*shard_peers.rows_for(on_gpu), *([shard_peers.Ffcv] if cache == "warm" else [])]
        return [*ours, *rings, *(dali.ROWS if on_gpu else []), *loaders, *shards]
    cold = [IndexSelectRandom] if cache == "cold" else []
    return [*ours, IndexSelect, *cold, NumpyGather, *loaders]


def find(key):
    """The class of that key, or the one at package.module:Class."""
    if re.fullmatch(r"dataloader_[1-9]\d*", key):
        return loader_with(int(key.rpartition("_")[2]))
    known = [
        peer
        for on_gpu in (False, True)
        for cache in ("warm", "cold")
        for kind in ("tokens", "npy")
        for peer in rows_for(kind, cache, on_gpu)
    ]
    return case.find(key, [*known, ReadRing8])

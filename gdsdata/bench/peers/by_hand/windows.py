"""Windows of tokens gathered by hand from memory maps: rows of case=loader."""

import mmap
from collections.abc import Callable

import numpy as np
import torch

from gdsdata.bench.measure import device
from gdsdata.bench.peers.protocols import BatchPeer, shuffled
from gdsdata.bench.peers.registry import serves


def open_windows(source, advice=None):
    """Map each file as a tensor (windows, seq_len + 1); nothing is copied."""
    windows = []
    for path, header, count in zip(source.files, source.headers, source.counts, strict=True):
        with open(path, "rb") as file:
            # Copy on write: torch warns of read-only memory, though nothing here writes.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if advice is not None:
            mapped.madvise(advice)
        flat = torch.from_numpy(np.frombuffer(mapped, source.dtype, offset=header))
        windows.append(flat.as_strided((count, source.shape[0]), (source.stride, 1)))
    return windows


class WindowGather:
    """A batch by torch.index_select over strided views of memmaps, file after file."""

    def __init__(self, source, as_int64, advice=None):
        self.windows, self.as_int64 = open_windows(source, advice), as_int64
        self.first_ids = torch.from_numpy(source.first_ids)

    def __call__(self, ids):
        if len(self.windows) == 1:
            batch = torch.index_select(self.windows[0], 0, ids)
        else:
            batch = torch.empty((len(ids), self.windows[0].shape[1]), dtype=self.windows[0].dtype)
            self.into(batch, ids)
        return batch.to(torch.int64) if self.as_int64 else batch

    def into(self, batch, ids):
        """Gather into `batch`, in the stored dtype."""
        if len(self.windows) == 1:
            torch.index_select(self.windows[0], 0, ids, out=batch)
            return
        files = torch.searchsorted(self.first_ids, ids, right=True) - 1
        for file in torch.unique(files).tolist():
            places = torch.nonzero(files == file)[:, 0]
            rows = torch.index_select(self.windows[file], 0, ids[places] - self.first_ids[file])
            batch.numpy()[places.numpy()] = rows.numpy()  # torch has no index_put for uint16


class Gather(BatchPeer):
    """Batches gathered on the caller's thread; to a GPU through kept pinned memory.

    A class has gather(ids), which returns a new tensor in the wanted dtype, and gather_into(batch,
    ids) in the stored one.
    """

    path, kinds = "mmap", ("tokens",)
    gather: Callable[..., torch.Tensor]
    gather_into: Callable[..., None]

    def open(self):
        if self.on_gpu:
            dtype = getattr(torch, np.dtype(self.source.dtype).name)
            self.slots = device.PinnedSlots(self.device, (self.batch_size, *self.source.shape), dtype)

    def epoch(self, epoch):
        for ids in shuffled(self.source.samples, self.seed, epoch).split(self.batch_size):
            if self.on_gpu:
                batch = self.slots.next()[: len(ids)]
                self.gather_into(batch, ids)
                yield self.widened(self.slots.send(batch))
            else:
                yield self.gather(ids)


@serves("loader")
class IndexSelect(Gather):
    key, name = "index_select", "torch.index_select"
    setting = "by hand: torch.index_select over a strided view of the memmap, on all cores"
    advice: int | None = None

    def open(self):
        super().open()
        self.windows = WindowGather(self.source, self.as_int64, self.advice)

    def gather(self, ids):
        return self.windows(ids)

    def gather_into(self, batch, ids):
        self.windows.into(batch, ids)


@serves("loader")
class IndexSelectRandom(IndexSelect):
    key, name = "index_select_random", "torch.index_select, MADV_RANDOM"
    setting = "the same with madvise(MADV_RANDOM): the kernel reads only the pages that are touched"
    caches = ("cold",)
    advice = mmap.MADV_RANDOM


@serves("loader")
class NumpyGather(Gather):
    key, name = "numpy", "numpy"
    setting = "by hand: numpy's vectorised gather from a strided view of the memmap"

    def open(self):
        super().open()
        self.windows = [windows.numpy() for windows in open_windows(self.source)]

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
        first_ids = self.source.first_ids
        files = np.searchsorted(first_ids, ids, side="right") - 1
        for file in np.unique(files):
            places = np.nonzero(files == file)[0]
            batch[places] = self.windows[file][ids[places] - first_ids[file]]
        return batch

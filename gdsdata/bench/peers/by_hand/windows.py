"""Windows of tokens gathered by hand from memory maps: rows of case=loader."""

import ctypes
import mmap
import os
from collections.abc import Callable

import numpy as np
import torch

from gdsdata.bench.measure import device, system
from gdsdata.bench.peers.protocols import BatchPeer


def open_tokens(source, advice=None):
    """Map each file as a flat tensor; a mapping keeps no descriptor open."""
    files, dtype = [], source.torch_dtype
    for path, header in zip(source.files, source.headers, strict=True):
        mapped = torch.from_file(path, shared=False, size=os.path.getsize(path) // source.itemsize, dtype=dtype)
        if advice is not None:
            system.libc.madvise(ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.nbytes), advice)
        files.append(mapped[header // source.itemsize :])
    return files


def open_windows(source, advice=None):
    """Map each file as a tensor (windows, seq_len + 1); nothing is copied."""
    return [
        flat.as_strided((count, source.shape[0]), (source.stride, 1), flat.storage_offset())
        for flat, count in zip(open_tokens(source, advice), source.counts, strict=True)
    ]


def copy_rows(windows, first_ids, ids, batch):
    """Copy windows of several files into `batch`; all are numpy arrays."""
    # A slice for each window had 2.3 to 2.8 GB/s, and gathering file by file 1.0 to 2.6. These were
    # windows of 4 KiB in 64 and 1024 files, batches of 32 to 2048, two cores, November 2026.
    files = np.searchsorted(first_ids, ids, side="right") - 1
    rows = ids - first_ids[files]
    for place, (file, row) in enumerate(zip(files.tolist(), rows.tolist(), strict=True)):
        batch[place] = windows[file][row]


class WindowGather:
    """A batch by torch.index_select over a strided view of a memmap; of several, by slices."""

    def __init__(self, source, as_int64, advice=None):
        self.windows, self.as_int64 = open_windows(source, advice), as_int64
        self.arrays, self.first_ids = [windows.numpy() for windows in self.windows], source.first_ids

    def __call__(self, ids):
        batch = torch.empty((len(ids), self.windows[0].shape[1]), dtype=self.windows[0].dtype)
        self.into(batch, ids)
        return batch.to(torch.int64) if self.as_int64 else batch

    def into(self, batch, ids):
        """Gather into `batch`, in the stored dtype."""
        if len(self.windows) == 1:
            torch.index_select(self.windows[0], 0, ids, out=batch)
        else:
            copy_rows(self.arrays, self.first_ids, ids.numpy(), batch.numpy())


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
            shape = (self.batch_size, *self.source.shape)
            self.slots = device.PinnedSlots(self.device, shape, self.source.torch_dtype)

    def epoch(self, epoch):
        for ids in self.shuffled(epoch):
            if self.on_gpu:
                batch = self.slots.next()[: len(ids)]
                self.gather_into(batch, ids)
                yield self.widened(self.slots.send(batch))
            else:
                yield self.gather(ids)


class IndexSelect(Gather, serves="loader"):
    key, name = "index_select", "torch.index_select"
    setting = "by hand: torch.index_select over a strided view of the memmap, on all cores; of several files, slices"
    advice: int | None = None

    def open(self):
        super().open()
        self.gather = WindowGather(self.source, self.as_int64, self.advice)
        self.gather_into = self.gather.into


class IndexSelectRandom(IndexSelect, serves="loader"):
    key, name = "index_select_random", "torch.index_select, MADV_RANDOM"
    setting = "the same with madvise(MADV_RANDOM): the kernel reads only the pages that are touched"
    caches = ("cold",)
    advice = mmap.MADV_RANDOM


class NumpyGather(Gather, serves="loader"):
    key, name = "numpy", "numpy"
    setting = "by hand: numpy's vectorised gather from a strided view of the memmap; of several files, slices"

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
        copy_rows(self.windows, self.source.first_ids, ids, batch)
        return batch

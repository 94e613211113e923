"""kvikio: its settings and path, and rows of case=load, checkpoint, io, tensor and remote.

Host memory always goes by POSIX. Reads use the page cache unless a setting says otherwise, which
versions from 25.12 on have. Whole pages then go with O_DIRECT, if the file system allows it; parts
of pages do not.
"""

import collections
import ctypes
import os
from typing import Any

import numpy as np
import torch

from gdsdata.bench.data.checkpoints import describe_safetensors
from gdsdata.bench.data.made import sync
from gdsdata.bench.data.transfers import new_file
from gdsdata.bench.measure import device
from gdsdata.bench.peers.gdsdata.transfers import CuFile
from gdsdata.bench.peers.object_clients import RemotePeer
from gdsdata.bench.peers.protocols import (
    WHOLE,
    CheckpointPeer,
    LoadPeer,
    Peer,
    TransferPeer,
    UnsyncedTensorPeer,
    flat_bytes,
)
from gdsdata.io import engine

TUNED = {"num_threads": 16, "task_size": 16 * 2**20}


def configure(options):
    """Set kvikio's defaults for files opened later; `compat_mode` by its name."""
    import kvikio
    import kvikio.defaults

    options = dict(options)
    if "compat_mode" in options:
        options["compat_mode"] = getattr(kvikio.CompatMode, options["compat_mode"])
    if options:
        kvikio.defaults.set(options)


def setting(name):
    """Return a default; None if this version has none of that name."""
    import kvikio.defaults

    try:
        return kvikio.defaults.get(name)
    except KeyError:
        return None


def cufile_way():
    """Return the path of a library that uses cuFile, and does not count its bytes."""
    return "cuFile" if engine.cufile_dma_is_possible() else "cuFile, compatibility mode"


def check_moved(path, moved_bytes, due_bytes):
    if moved_bytes != due_bytes:
        raise EOFError(f"{path}: kvikio moved {moved_bytes:,} of {due_bytes:,} bytes")


class OfCuFile(Peer):
    """Comes before a peer that opens a file, by which its `path` is known."""

    package = "kvikio"

    def opened(self, path, mode, writes=False):
        import kvikio.defaults

        file = kvikio.CuFile(path, mode)
        if self.on_gpu and not kvikio.defaults.is_compat_mode_preferred():
            self.path = cufile_way()
        else:
            direct = setting("auto_direct_io_write" if writes else "auto_direct_io_read")
            self.path = "POSIX, O_DIRECT" if direct and file.is_direct_io_supported() else "POSIX"
        return file


class Load(OfCuFile, LoadPeer, serves="load"):
    key, name = "kvikio", "kvikio, defaults"
    setting = "kvikio.CuFile.read into one tensor, defaults"
    devices = ("cuda",)
    options: dict[str, Any] = {}

    def load(self):
        configure(self.options)
        tensor, source = self.buffer(), self.source
        with self.opened(source.path, "r") as file:
            check_moved(source.path, file.read(tensor, source.bytes, source.start), source.bytes)
        return {WHOLE: tensor}


class LoadTuned(Load, serves="load"):
    key, name = "kvikio_16", "kvikio, 16 threads"
    setting = "the same with 16 threads and tasks of 16 MiB"
    options = TUNED


class LoadPosix(Load, serves="load"):
    key, name = "kvikio_posix", "kvikio, 16 threads, POSIX"
    setting = "the same with compat_mode ON: POSIX reads, which use the page cache"
    options = TUNED | {"compat_mode": "ON"}


class Checkpoint(CheckpointPeer, serves="checkpoint"):
    key, name = "kvikio", "kvikio, 16 threads"
    setting = (
        "kvikio.CuFile: pwrite of every tensor into one bare file; pread of every tensor of a safetensors file, whose "
        "header is read by hand; 16 threads, tasks of 16 MiB"
    )
    package, devices = "kvikio", ("cuda",)
    saves, loads = "raw", "safetensors"

    def __init__(self, device_name, engine=None):
        import kvikio.defaults

        super().__init__(device_name, engine)
        configure(TUNED)
        self.way_out = self.way_in = "POSIX" if kvikio.defaults.is_compat_mode_preferred() else "cuFile"

    def save(self, state, path):
        import kvikio

        with kvikio.CuFile(path, "w") as file:
            at, under_way = 0, []
            for flat in map(flat_bytes, state.values()):
                under_way.append(file.pwrite(flat, flat.nbytes, at))
                at += flat.nbytes
            check_moved(path, sum(one.get() for one in under_way), at)

    def load(self, into, path):
        import kvikio

        source = describe_safetensors(path, "", "")
        with kvikio.CuFile(path, "r") as file:
            begins = {name: source.start + begin for name, (begin, _) in source.tensors.items()}
            wanted = [(flat_bytes(tensor), begins[name]) for name, tensor in into.items()]
            under_way = [file.pread(flat, flat.nbytes, begin) for flat, begin in wanted]
            check_moved(path, sum(one.get() for one in under_way), source.bytes)


class Transfers(OfCuFile, TransferPeer, serves="io"):
    """To and from a GPU by way of kvikio's pinned memory."""

    key, name, submit, xfer = "kvikio", "kvikio", "batch", "any"
    setting = (
        "kvikio.CuFile.pread and pwrite by POSIX (O_DIRECT, but for the page cache), batches of futures; as many "
        "threads as case.threads, at most 64"
    )
    options: dict[str, Any] = {"compat_mode": "ON"}

    def open(self):
        work = self.work
        configure(self.options | {"num_threads": min(work.threads, 64)})
        if setting("auto_direct_io_read") is not None:
            direct = work.cache != "warm"
            configure({"auto_direct_io_read": direct, "auto_direct_io_write": direct})
        if work.writes:
            os.close(new_file(work.path, work.file_bytes))
        self.file = self.opened(work.path, "r+" if work.writes else "r", work.writes)
        self.part = self.memory.tensor if self.on_gpu else self.memory.array

    def move(self, place, offsets):
        device.wait_for_stream(self.device)  # which has made what is to be written
        call, size = self.file.pwrite if self.work.writes else self.file.pread, self.work.io_bytes
        futures = [
            call(self.part[self.memory.range(place + index)], size, int(offset)) for index, offset in enumerate(offsets)
        ]
        for future, offset in zip(futures, offsets, strict=True):
            if (moved := future.get()) != size:
                raise OSError(f"{self.work.path}: kvikio moved {moved:,} of {size:,} bytes at offset {offset:,}")

    def commit(self):
        if self.work.writes:
            sync(self.work.path)

    def close(self):
        self.file.close()


class CuFileTransfers(Transfers, serves="io"):
    key, name, xfer = "kvikio_cufile", "kvikio cuFile", "gpu"
    caches, devices = CuFile.caches, CuFile.devices
    setting = "the same by cuFile, which is given transfers of every size"
    options = {"compat_mode": "AUTO", "gds_threshold": 0}  # Its default sends less than 16 KiB by POSIX.
    lacks = CuFile.lacks


class Tensor(OfCuFile, UnsyncedTensorPeer, serves="tensor"):
    key, name = "kvikio", "kvikio"
    setting = "kvikio.CuFile.read into one tensor that is kept, and write; 16 threads and tasks of 16 MiB; then fsync"

    def open(self):
        configure(TUNED)
        self.tensor = self.empty()

    def read(self):
        with self.opened(self.file, "r") as file:
            check_moved(self.file, file.read(self.plain(self.tensor), self.tensor_bytes), self.tensor_bytes)
        return self.tensor

    def store(self, tensor, path):
        with self.opened(path, "r+" if self.state == "in_place" else "w", writes=True) as file:
            check_moved(path, file.write(self.plain(tensor), self.tensor_bytes), self.tensor_bytes)

    def plain(self, tensor):
        return tensor if self.on_gpu else tensor.numpy()


class RemoteHandle(RemotePeer, serves="remote"):
    key, name, package = "kvikio", "kvikio RemoteFile", "kvikio"
    setting = "kvikio.RemoteFile.pread after open_s3, twice as many under way as its threads"

    @classmethod
    def lacks(cls):
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "kvikio needs a CUDA driver, to read into host memory too"
        return ""

    def open(self):
        configure({"num_threads": self.connections})
        self.files = self.opened(zip(self.objects.keys, self.objects.sizes, strict=True))

    def opened(self, sizes):
        """Return {key: file} of (key, size) pairs."""
        import kvikio

        os.environ.update(self.access.environment())
        return {key: kvikio.RemoteFile.open_s3(self.access.bucket, key, size) for key, size in sizes}

    def buffer(self, size_bytes):
        if self.on_gpu:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        return np.empty(size_bytes, np.uint8)

    def read(self, feed, take):
        under_way: collections.deque = collections.deque()

        def take_first():
            place, memory, done = under_way.popleft()
            done.get()
            take(place, memory)

        for place, piece in feed:
            memory = self.buffer(piece.length)
            under_way.append((place, memory, self.files[piece.key].pread(memory, piece.length, piece.offset)))
            if len(under_way) >= 2 * self.connections:
                take_first()
        while under_way:
            take_first()

    def close(self):
        self.files.clear()


class HttpHandle(RemoteHandle, serves="remote"):
    key, name = "kvikio_http", "kvikio RemoteFile, HTTP"
    setting = "the same after open_http of URLs that are signed before"

    def opened(self, sizes):
        import kvikio

        urls = self.access.signed_urls(self.objects.keys)
        return {key: kvikio.RemoteFile.open_http(urls[key], size) for key, size in sizes}

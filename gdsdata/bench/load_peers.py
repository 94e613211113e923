"""read_tensor, and the libraries and hand-written loops that a user would otherwise load a big file with.

A peer is a class: `Peer(source, device, engine)` opens nothing yet; `load()` gives {name: tensor on
the device}, or {WHOLE: one tensor of all data bytes} where a loader knows no safetensors.
`served()` counts bytes by path, where the loader does. What a mapping would only promise on the CPU
is copied, so that every row has moved its bytes.
"""

import functools
import os
import threading

import torch

from gdsdata.bench import case, device, kvikio_ways
from gdsdata.bench.data import read_exactly

WHOLE = ""  # the name of a tensor that is the whole file's data
RING_SLOTS, SLOT_BYTES = 4, 16 * 2**20


class LoadPeer:
    key = ""  # its name in case.rows
    name = ""
    setting = ""  # one sentence for the report
    path = ""  # how its bytes come: mmap, read
    package = ""  # what has to be installed
    on_cpu = False  # can load to the CPU too
    caches = ("warm", "cold")
    reads_torch_file = False

    def __init__(self, source, device_name, engine=None):
        self.source, self.device, self.engine = source, device_name, engine or {}

    def load(self):
        raise NotImplementedError

    def served(self):
        return {}

    def close(self):
        pass

    def copied(self, tensors):
        """On the CPU, copies of tensors that lie in a mapping."""
        return tensors if device.is_cuda(self.device) else {name: tensor.clone() for name, tensor in tensors.items()}

    def buffer(self):
        return torch.empty(self.source.bytes, dtype=torch.uint8, device=self.device)


@functools.cache
def engine_of(options, device_name, path):
    """The engine that read_tensor uses, kept for its counts (and, with other options, for the next run)."""
    from gdsdata.io.calibration import calibrated
    from gdsdata.io.engine import resolved, shared_engine

    where = resolved(device_name)
    return shared_engine(calibrated(options, path, where, measure=False), where)


class Ours(LoadPeer):
    key, name = "gdsdata", "gdsdata"
    setting = "gdsdata.read_tensor of the whole data as one uint8 tensor"
    on_cpu = True

    def __init__(self, source, device_name, engine=None):
        import gdsdata

        super().__init__(source, device_name, engine)
        self.options = gdsdata.EngineOptions(**self.engine)
        self.shared = engine_of(self.options, device_name, source.path)

    def load(self):
        import gdsdata

        source = self.source
        if self.options != gdsdata.EngineOptions():  # which read_tensor does not take
            with gdsdata.Engine(self.options) as engine:
                return {WHOLE: engine.read(source.path, into=self.buffer(), offset=source.start).result()}
        shape = (source.bytes,)
        return {WHOLE: gdsdata.read_tensor(source.path, torch.uint8, shape, offset=source.start, device=self.device)}

    def served(self):
        return {path: count for path, count in self.shared.statistics()["bytes"].items() if count}


class OursTensors(Ours):
    key, name = "gdsdata_engine", "gdsdata, Engine"
    setting = "gdsdata.Engine.read of each tensor, all asked for at once"

    def load(self):
        import gdsdata

        with gdsdata.Engine(self.options) as engine:
            futures = {}
            for name, (begin, end) in self.source.tensors.items():
                tensor = torch.empty(end - begin, dtype=torch.uint8, device=self.device)
                futures[name] = engine.read(self.source.path, into=tensor, offset=self.source.start + begin)
            return {name: future.result() for name, future in futures.items()}


# ------------------------------------------------------------------------------------------------ libraries


class Kvikio(LoadPeer):
    key, name = "kvikio", "kvikio, defaults"
    setting = "kvikio.CuFile.read into one tensor, defaults"
    package = "kvikio"
    options = {}

    def load(self):
        import kvikio

        kvikio_ways.configure(self.options)
        tensor, source = self.buffer(), self.source
        with kvikio.CuFile(source.path, "r") as file:
            self.path = kvikio_ways.way(file, device.is_cuda(self.device), writes=False)
            got = file.read(tensor, source.bytes, source.start)
        if got != source.bytes:
            raise EOFError(f"{source.path}: kvikio read {got:,} of {source.bytes:,} bytes")
        return {WHOLE: tensor}


class KvikioTuned(Kvikio):
    key, name = "kvikio_16", "kvikio, 16 threads"
    setting = "the same with 16 threads and tasks of 16 MiB"
    options = {"num_threads": 16, "task_size": 16 * 2**20}


class KvikioPosix(Kvikio):
    key, name = "kvikio_posix", "kvikio, 16 threads, POSIX"
    setting = "the same with compat_mode ON: POSIX reads, which use the page cache"
    options = {"num_threads": 16, "task_size": 16 * 2**20, "compat_mode": "ON"}


class InstantTensor(LoadPeer):
    key, name = "instanttensor", "InstantTensor"
    setting = "instanttensor.safe_open, defaults: direct I/O on a disk"
    package = "instanttensor"
    path = "direct I/O"
    policy = None

    def load(self):
        import instanttensor

        backend = getattr(instanttensor.BackendPolicy, self.policy) if self.policy else None
        arguments = {"framework": "pt", "device": device.index(self.device), "backend": backend}
        with instanttensor.safe_open(self.source.path, **arguments) as file:
            return dict(file.tensors())


class InstantTensorBuffered(InstantTensor):
    key, name = "instanttensor_buffered", "InstantTensor, buffered"
    setting = "the same with BackendPolicy.BUFFERED: through the page cache"
    path = "read"
    policy = "BUFFERED"


class FastSafetensors(LoadPeer):
    key, name = "fastsafetensors", "fastsafetensors"
    setting = "fastsafetensors.fastsafe_open(nogds=True), every tensor"
    package = "fastsafetensors"
    path = "read"

    def load(self):
        import fastsafetensors

        name = f"cuda:{device.index(self.device)}"
        with fastsafetensors.fastsafe_open(self.source.path, device=name, nogds=True) as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dictionary)


class Safetensors(LoadPeer):
    key, name = "safetensors", "safetensors"
    setting = "safetensors.torch.load_file(device=); on the CPU its tensors are copied out of the mapping"
    package = "safetensors"
    path = "mmap"
    on_cpu = True

    def load(self):
        from safetensors.torch import load_file

        return self.copied(load_file(self.source.path, device=self.device))


class TorchLoad(LoadPeer):
    key, name = "torch_load", "torch.load"
    setting = "torch.load(map_location=) of a .pt file with the same tensors"
    path = "read"
    on_cpu = True
    reads_torch_file = True

    def load(self):
        return torch.load(self.source.torch_file, map_location=self.device)


class TorchLoadMapped(TorchLoad):
    key, name = "torch_load_mmap", "torch.load, mmap"
    setting = "the same with mmap=True; on the CPU its tensors are copied out of the mapping"
    path = "mmap"

    def load(self):
        return self.copied(torch.load(self.source.torch_file, map_location=self.device, mmap=True))


# ------------------------------------------------------------------------------------------------ by hand


class Readinto(LoadPeer):
    """Plain Python: `readinto` the tensor; to a GPU through a ring of pinned buffers, copied without waiting."""

    key, name = "readinto", "Python readinto"
    setting = "by hand: readinto the tensor; to a GPU by way of 4 pinned buffers of 16 MiB, used again"
    path = "read"
    on_cpu = True
    threads = 1

    def load(self):
        target, failed = self.buffer(), []
        share = -(-self.source.bytes // self.threads)
        share += -share % 4096
        threads = [
            threading.Thread(target=self.read, args=(target, begin, min(begin + share, self.source.bytes), failed))
            for begin in range(0, self.source.bytes, share)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return {WHOLE: target}

    def read(self, target, begin, end, failed):
        try:
            with open(self.source.path, "rb", buffering=0) as file:
                file.seek(self.source.start + begin)
                if not device.is_cuda(self.device):
                    read_exactly(file, target[begin:end])
                    return
                slots = device.PinnedSlots(self.device, SLOT_BYTES, torch.uint8, RING_SLOTS)
                for at in range(begin, end, SLOT_BYTES):
                    piece = slots.next()[: min(SLOT_BYTES, end - at)]
                    read_exactly(file, piece)
                    slots.send_to(target[at : at + len(piece)], piece)
                slots.wait()
        except Exception as error:
            failed.append(error)


class ReadintoThreads(Readinto):
    key, name = "readinto_threads", "Python readinto, threads"
    setting = "the same by as many threads as there are cores, 8 at most, each with its part of the file"
    threads = min(8, len(os.sched_getaffinity(0)))


ROWS = [
    Ours,
    OursTensors,
    Kvikio,
    KvikioTuned,
    KvikioPosix,
    InstantTensor,
    InstantTensorBuffered,
    FastSafetensors,
    Safetensors,
    TorchLoad,
    TorchLoadMapped,
    Readinto,
    ReadintoThreads,
]


def find(key):
    """The class of that key, or the one at package.module:Class."""
    return case.find(key, ROWS)

"""Who loads and stores one big tensor: those of case=latency, gdsdata by one path alone, kvikio, torch's GDS, DeepNVMe.

The interface is latency_peers'. Whatever a library wants once (pinned memory, registered buffers,
handles) is kept.
"""

import os

import torch

from gdsdata.bench import case, device, kvikio_ways, latency_peers
from gdsdata.bench.io_peers import CuFile
from gdsdata.bench.latency_peers import LatencyPeer, OursEngine
from gdsdata.bench.load_peers import KvikioTuned

# DeepNVMe's own, of the table in its README (DeepSpeedExamples, deepnvme/file_access).
BLOCK_BYTES, DEPTH, SINGLE_SUBMIT, OVERLAP_EVENTS, THREADS = 2**20, 128, True, True, 1


# ------------------------------------------------------------------------------------------------ gdsdata


class OursDirect(OursEngine):
    key, name = "gdsdata_direct", "gdsdata, bounce buffer"
    setting = "gdsdata_engine with direct=always: O_DIRECT, to and from a GPU by way of host memory"
    forced = {"direct": "always"}
    direct = True

    def __init__(self, path, tensor_bytes, state, device_name, engine=None):
        super().__init__(path, tensor_bytes, state, device_name, (engine or {}) | self.forced)


class OursCuFile(OursDirect):
    key, name = "gdsdata_cufile", "gdsdata, cuFile"
    setting = "gdsdata_engine with direct=always and backend=cufile; the path says what cuFile made of it"
    forced = {"direct": "always", "backend": "cufile"}
    devices, tried = ("cuda",), True

    @classmethod
    def lacks(cls):
        return CuFile.lacks()


# ------------------------------------------------------------------------------------------------ others


class Library(LatencyPeer):
    """One that does not say when its bytes are on storage: they are synced within the time."""

    def write(self, tensor):
        device.wait_for_stream(self.device)  # which has made what is to be written
        if self.state == "in_place":
            self.store(tensor, self.path)
            latency_peers.sync(self.path)
            return
        with latency_peers.replaced(self.path) as temporary:
            self.store(tensor, temporary)
            latency_peers.sync(temporary)

    def store(self, tensor, path):
        """Into the file's first bytes; makes the file where there is none."""
        raise NotImplementedError


class Kvikio(Library):
    key, name, package = "kvikio", "kvikio", "kvikio"
    setting = "kvikio.CuFile.read into one tensor that is kept, and write; 16 threads and tasks of 16 MiB; then fsync"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        kvikio_ways.configure(KvikioTuned.options)
        self.tensor = self.empty()

    def read(self):
        with self.opened(self.path, "r") as file:
            self.check(file.read(self.plain(self.tensor), self.tensor_bytes))
        return self.tensor

    def store(self, tensor, path):
        with self.opened(path, "r+" if self.state == "in_place" else "w") as file:
            self.check(file.write(self.plain(tensor), self.tensor_bytes))

    def opened(self, path, mode):
        import kvikio

        file = kvikio.CuFile(path, mode)
        self.way = kvikio_ways.way(file, device.is_cuda(self.device), mode != "r")
        return file

    def plain(self, tensor):
        return tensor if device.is_cuda(self.device) else tensor.numpy()

    def check(self, moved):
        if moved != self.tensor_bytes:
            raise OSError(f"{self.path}: kvikio moved {moved:,} of {self.tensor_bytes:,} bytes")


class TorchGds(Library):
    key, name = "torch_gds", "torch.cuda.gds"
    setting = "torch.cuda.gds.GdsFile.load_storage into, save_storage out of registered memory that is kept; then fsync"
    devices, tried, direct = ("cuda",), True, True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.way, self.tensor = kvikio_ways.cufile_way(), self.empty()
        torch.cuda.gds.gds_register_buffer(self.tensor.untyped_storage())

    def read(self):
        torch.cuda.gds.GdsFile(self.path, os.O_RDONLY).load_storage(self.tensor.untyped_storage())
        return self.tensor

    def store(self, tensor, path):
        self.tensor.copy_(tensor)
        device.wait_for_stream(self.device)
        torch.cuda.gds.GdsFile(path, os.O_CREAT | os.O_RDWR).save_storage(self.tensor.untyped_storage())

    def close(self):
        torch.cuda.gds.gds_deregister_buffer(self.tensor.untyped_storage())


class DeepNvme(Library):
    """DeepSpeed builds its operator when it is first asked for: that takes a compiler, libaio's header and minutes."""

    key, name, package = "deepnvme_aio", "DeepNVMe, aio_handle", "deepspeed"
    how = f"{BLOCK_BYTES >> 20} MiB, depth {DEPTH}, {THREADS} thread, single submit, overlapped; then fsync"
    setting = f"deepspeed's aio_handle.sync_pread and sync_pwrite by way of locked memory that is kept: {how}"
    builder, handle_name, way = "AsyncIOBuilder", "aio_handle", "O_DIRECT"
    tried, direct = True, True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        import deepspeed.ops.op_builder

        operator = getattr(deepspeed.ops.op_builder, self.builder)().load(verbose=False)
        made = getattr(operator, self.handle_name)
        self.handle = made(BLOCK_BYTES, DEPTH, SINGLE_SUBMIT, OVERLAP_EVENTS, THREADS)
        self.memory = self.locked_memory()

    def locked_memory(self):
        if device.is_cuda(self.device):
            return device.pinned(self.tensor_bytes, torch.uint8)
        return self.handle.new_cpu_locked_tensor(self.tensor_bytes, torch.empty(0, dtype=torch.uint8))

    def read(self):
        self.check(self.handle.sync_pread(self.memory, self.path), self.path)
        return device.send(self.memory, self.device)

    def store(self, tensor, path):
        self.memory.copy_(tensor)
        device.wait_for_stream(self.device)
        self.check(self.handle.sync_pwrite(self.memory, path), path)

    def check(self, done, path):
        if done < 1:
            raise OSError(f"{path}: DeepNVMe's {self.handle_name} says {done}")

    def close(self):
        if not device.is_cuda(self.device):
            self.handle.free_cpu_locked_tensor(self.memory)
        self.handle = self.memory = None


class DeepNvmeGds(DeepNvme):
    key, name = "deepnvme_gds", "DeepNVMe, gds_handle"
    setting = f"deepspeed's gds_handle.sync_pread and sync_pwrite, registered memory that is kept: {DeepNvme.how}"
    builder, handle_name = "GDSBuilder", "gds_handle"
    devices = ("cuda",)

    def locked_memory(self):
        self.way = kvikio_ways.cufile_way()
        memory = self.empty()
        self.handle.pin_device_tensor(memory)
        return memory

    def close(self):
        self.handle.unpin_device_tensor(self.memory)
        self.handle = self.memory = None


ROWS = [
    latency_peers.Ours,
    OursEngine,
    OursDirect,
    OursCuFile,
    latency_peers.Python,
    latency_peers.PythonDirect,
    Kvikio,
    TorchGds,
    DeepNvme,
    DeepNvmeGds,
]


def find(key):
    return case.find(key, ROWS)

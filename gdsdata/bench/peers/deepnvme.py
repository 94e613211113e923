"""DeepNVMe of DeepSpeed: rows of case=tensor."""

import torch

from gdsdata.bench.measure import device
from gdsdata.bench.peers.kvikio import cufile_way
from gdsdata.bench.peers.protocols import UnsyncedTensorPeer

# The settings of the table in DeepNVMe's README (DeepSpeedExamples, deepnvme/file_access).
BLOCK_BYTES, DEPTH, SINGLE_SUBMIT, OVERLAP_EVENTS, THREADS = 2**20, 128, True, True, 1


class DeepNvme(UnsyncedTensorPeer, serves="tensor"):
    """Its operator is built at first use, by a compiler, with libaio, in minutes."""

    key, name, package = "deepnvme_aio", "DeepNVMe, aio_handle", "deepspeed"
    how = f"{BLOCK_BYTES >> 20} MiB, depth {DEPTH}, {THREADS} thread, single submit, overlapped; then fsync"
    setting = f"deepspeed's aio_handle.sync_pread and sync_pwrite by way of locked memory that is kept: {how}"
    builder, handle_name, path = "AsyncIOBuilder", "aio_handle", "O_DIRECT"
    tried, direct = True, True

    def open(self):
        import deepspeed.ops.op_builder

        operator = getattr(deepspeed.ops.op_builder, self.builder)().load(verbose=False)
        made = getattr(operator, self.handle_name)
        self.handle = made(BLOCK_BYTES, DEPTH, SINGLE_SUBMIT, OVERLAP_EVENTS, THREADS)
        self.memory = self.locked_memory()

    def locked_memory(self):
        if self.on_gpu:
            return device.pinned(self.tensor_bytes, torch.uint8)
        return self.handle.new_cpu_locked_tensor(self.tensor_bytes, torch.empty(0, dtype=torch.uint8))

    def read(self):
        self.check(self.handle.sync_pread(self.memory, self.file), self.file)
        return device.send(self.memory, self.device)

    def store(self, tensor, path):
        self.memory.copy_(tensor)
        device.wait_for_stream(self.device)
        self.check(self.handle.sync_pwrite(self.memory, path), path)

    def check(self, done, path):
        if done < 1:
            raise OSError(f"{path}: DeepNVMe's {self.handle_name} says {done}")

    def close(self):
        if not self.on_gpu:
            self.handle.free_cpu_locked_tensor(self.memory)
        self.handle = self.memory = None


class DeepNvmeGds(DeepNvme, serves="tensor"):
    key, name = "deepnvme_gds", "DeepNVMe, gds_handle"
    setting = f"deepspeed's gds_handle.sync_pread and sync_pwrite, registered memory that is kept: {DeepNvme.how}"
    builder, handle_name = "GDSBuilder", "gds_handle"
    devices = ("cuda",)

    def locked_memory(self):
        self.path = cufile_way()
        memory = self.empty()
        self.handle.pin_device_tensor(memory)
        return memory

    def close(self):
        self.handle.unpin_device_tensor(self.memory)
        self.handle = self.memory = None

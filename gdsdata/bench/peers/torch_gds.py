"""torch.cuda.gds: a row of case=tensor."""

import os

import torch

from gdsdata.bench.measure import device
from gdsdata.bench.peers.kvikio import cufile_way
from gdsdata.bench.peers.protocols import UnsyncedTensorPeer


class TorchGds(UnsyncedTensorPeer, serves="tensor"):
    key, name = "torch_gds", "torch.cuda.gds"
    setting = "torch.cuda.gds.GdsFile.load_storage into, save_storage out of registered memory that is kept; then fsync"
    devices, tried, direct = ("cuda",), True, True

    def open(self):
        self.path, self.tensor = cufile_way(), self.empty()
        torch.cuda.gds.gds_register_buffer(self.tensor.untyped_storage())

    def read(self):
        torch.cuda.gds.GdsFile(self.file, os.O_RDONLY).load_storage(self.tensor.untyped_storage())
        return self.tensor

    def store(self, tensor, path):
        self.tensor.copy_(tensor)
        device.wait_for_stream(self.device)
        torch.cuda.gds.GdsFile(path, os.O_CREAT | os.O_RDWR).save_storage(self.tensor.untyped_storage())

    def close(self):
        torch.cuda.gds.gds_deregister_buffer(self.tensor.untyped_storage())

"""The row's side of case=load."""

import time
from typing import Any

import torch

from gdsdata.bench.data import checkpoints
from gdsdata.bench.harness.row import Row
from gdsdata.bench.measure import system
from gdsdata.bench.peers.protocols import WHOLE


class LoadRow(Row):
    keeps_device_memory = True
    tensors: Any = None

    def construct(self):
        self.peer = self.peer_class(self.source, self.device, self.engine)

    def load(self):
        self.tensors = self.peer.load()

    def close(self):
        self.tensors = None
        super().close()

    def verify(self, dtype):
        """Compares each tensor's checksum, taken where it lies, with one by plain reading."""
        self.warm()
        self.construct()
        try:
            first_s = self.seconds_of(self.load)
            flat = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in self.tensors.items()}
            tensors = self.source.tensors
            if WHOLE in flat:
                whole = flat[WHOLE]
                self.check_size(WHOLE, whole, self.source.bytes)
                flat = {name: whole[begin:end] for name, (begin, end) in tensors.items()}
            if flat.keys() != tensors.keys():
                raise ValueError(f"tensors {sorted(flat)} came, {sorted(tensors)} were due")
            for name, (begin, end) in tensors.items():
                self.check_size(name, flat[name], end - begin)
                if checkpoints.checksum(flat[name]) != self.source.checksums[name]:
                    raise ValueError(f"tensor {name!r}: its bytes are not what the file holds")
        finally:
            flat, whole = {}, None
            self.close()
        return {"checked_bytes": self.source.bytes, "first_s": first_s}

    def check_size(self, name, tensor, due_bytes):
        wanted = torch.device(self.device)
        if tensor.numel() != due_bytes or tensor.device.type != wanted.type:
            raise ValueError(
                f"tensor {name!r}: {tensor.numel():,} bytes came on {tensor.device}, {due_bytes:,} were due on {wanted}"
            )

    def warm(self):
        """Warms the files: the load that follows is timed, as the first one in a process."""
        system.warm(self.source.files)

    def run(self, dtype, cache):
        self.start_cpu_clock()
        started = time.perf_counter()
        self.construct()
        served_before = self.peer.served()
        self.load()
        return self.figures(self.source.bytes, self.now() - started, served_before)

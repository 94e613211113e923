"""The base classes of rows of case=replicas."""

from typing import Any

import torch
import torch.distributed

from gdsdata.bench.peers.protocols import LoadPeer, flat_bytes, torch_dcp
from gdsdata.bench.peers.registry import derived


class ReplicaPeer(LoadPeer):
    """Loads a data.checkpoints.OneFormat in one rank of several, which all do so at the same time.

    The default process group has these ranks.
    """

    def empty(self, dtype):
        """Return {name: tensor} to fill; dtype is that of the checkpoint."""
        sizes = {name: (end - begin) // dtype.itemsize for name, (begin, end) in self.source.tensors.items()}
        return {name: torch.empty(size, dtype=dtype, device=self.device) for name, size in sizes.items()}


def by_itself(library, *kinds):
    """Register a LoadPeer as a row of case=replicas: each rank loads by itself."""
    derived(library, serves="replicas", kinds=kinds, setting=f"{library.setting}; each rank by itself")


def in_group(library, how):
    """Register a LoadPeer as a row of case=replicas that loads with the group."""
    said = {"key": f"{library.key}_group", "name": f"{library.name}, distributed"}
    setting = f"{library.setting}; {how}"
    derived(library, serves="replicas", **said, setting=setting, kinds=("safetensors",), together=True)


class BroadcastPeer(ReplicaPeer):
    """Rank 0 loads, and sends each tensor to the others, which know its name and size.

    A class has `library`, a LoadPeer, or `read()`, which returns what rank 0 sends.
    """

    library: Any = None
    path = "rank 0"

    def read(self):
        return self.library(self.source, self.device).load()

    def load(self):
        tensors = self.read() if torch.distributed.get_rank() == 0 else self.empty(torch.uint8)
        broadcasts: list[Any] = [
            torch.distributed.broadcast(flat_bytes(tensors[name]), 0, async_op=True) for name in self.source.tensors
        ]
        for one in broadcasts:
            one.wait()
        return tensors


class DcpPeer(ReplicaPeer):
    """Has torch's DCP fill new tensors from a folder."""

    kinds, path = ("dcp",), "read"

    def open(self):
        torch_dcp()

    def loaded(self, reader, **more):
        tensors = self.empty(torch.bfloat16)
        torch_dcp().load({"model": tensors}, storage_reader=reader, **more)
        return tensors

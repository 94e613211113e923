"""safetensors: rows of case=load and case=checkpoint."""

from gdsdata.bench.peers.protocols import CheckpointPeer, LoadPeer
from gdsdata.bench.peers.replicas import BroadcastPeer, by_itself


class Load(LoadPeer, serves="load"):
    key, name = "safetensors", "safetensors"
    setting = "safetensors.torch.load_file(device=); on the CPU its tensors are copied out of the mapping"
    package = "safetensors"
    path = "mmap"

    def load(self):
        from safetensors.torch import load_file

        return self.copied(load_file(self.source.path, device=self.device))


by_itself(Load, "safetensors")


class LoadedByRank0(BroadcastPeer, serves="replicas"):
    key, name = "safetensors_broadcast", "safetensors, broadcast"
    setting = "rank 0: safetensors.torch.load_file(device=); then torch.distributed.broadcast of each tensor"
    library, kinds = Load, ("safetensors",)


class Checkpoint(CheckpointPeer, serves="checkpoint"):
    key, name = "safetensors", "safetensors"
    setting = "save_file; safe_open(device=), each tensor of which is copied (on the CPU, out of the mapped file)"
    package = "safetensors"
    saves = loads = "safetensors"
    is_stock = True
    way_in = "mmap"

    def save(self, state, path):
        from safetensors.torch import save_file

        save_file(state, path)

    def load(self, into, path):
        from safetensors import safe_open

        with safe_open(path, framework="pt", device=self.device) as file:
            for name, target in into.items():
                target.copy_(file.get_tensor(name))

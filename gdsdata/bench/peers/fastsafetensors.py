"""fastsafetensors: rows of case=load, replicas and checkpoint."""

import torch.distributed

from gdsdata.bench.measure import device
from gdsdata.bench.peers.protocols import LoadPeer, borrowed
from gdsdata.bench.peers.registry import serves
from gdsdata.bench.peers.replicas import by_itself, in_group


@serves("load")
class FastSafetensors(LoadPeer):
    key, name = "fastsafetensors", "fastsafetensors"
    setting = "fastsafetensors.fastsafe_open(nogds=True), every tensor"
    package, devices = "fastsafetensors", ("cuda",)
    path = "read"
    together = False

    def load(self):
        import fastsafetensors

        name = f"cuda:{device.index(self.device)}"
        files, more = self.source.path, {}
        if self.together:
            files, more = {0: [files]}, {"pg": torch.distributed.group.WORLD}
        with fastsafetensors.fastsafe_open(files, device=name, nogds=True, **more) as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dictionary)


serves("replicas")(in_group(FastSafetensors, "pg= of all ranks: rank 0 reads the file, and passes it on"))
serves("replicas")(by_itself(FastSafetensors, "safetensors"))
serves("checkpoint")(borrowed(FastSafetensors))

"""InstantTensor: rows of case=load, replicas and checkpoint."""

import torch.distributed

from gdsdata.bench.measure import device
from gdsdata.bench.peers.protocols import LoadPeer, borrowed
from gdsdata.bench.peers.registry import serves
from gdsdata.bench.peers.replicas import by_itself, in_group


@serves("load")
class InstantTensor(LoadPeer):
    key, name = "instanttensor", "InstantTensor"
    setting = "instanttensor.safe_open, defaults: direct I/O on a disk"
    package, devices = "instanttensor", ("cuda",)
    path = "direct I/O"
    policy = ""
    together = False

    def load(self):
        import instanttensor

        backend = getattr(instanttensor.BackendPolicy, self.policy) if self.policy else None
        arguments = {"framework": "pt", "device": device.index(self.device), "backend": backend}
        if self.together:
            arguments["process_group"] = torch.distributed.group.WORLD
        with instanttensor.safe_open(self.source.path, **arguments) as file:
            return dict(file.tensors())


@serves("load")
class InstantTensorBuffered(InstantTensor):
    key, name = "instanttensor_buffered", "InstantTensor, buffered"
    setting = "the same with BackendPolicy.BUFFERED: through the page cache"
    path = "read"
    policy = "BUFFERED"


for library in (InstantTensor, InstantTensorBuffered):
    serves("replicas")(in_group(library, "process_group= of all ranks"))
for library in (InstantTensor, InstantTensorBuffered):
    serves("replicas")(by_itself(library, "safetensors"))
    serves("checkpoint")(borrowed(library))

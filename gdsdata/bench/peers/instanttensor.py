"""InstantTensor: rows of case=load and case=checkpoint."""

from gdsdata.bench.measure import device
from gdsdata.bench.peers.protocols import LoadPeer, borrowed
from gdsdata.bench.peers.registry import serves


@serves("load")
class InstantTensor(LoadPeer):
    key, name = "instanttensor", "InstantTensor"
    setting = "instanttensor.safe_open, defaults: direct I/O on a disk"
    package, devices = "instanttensor", ("cuda",)
    path = "direct I/O"
    policy = ""

    def load(self):
        import instanttensor

        backend = getattr(instanttensor.BackendPolicy, self.policy) if self.policy else None
        arguments = {"framework": "pt", "device": device.index(self.device), "backend": backend}
        with instanttensor.safe_open(self.source.path, **arguments) as file:
            return dict(file.tensors())


@serves("load")
class InstantTensorBuffered(InstantTensor):
    key, name = "instanttensor_buffered", "InstantTensor, buffered"
    setting = "the same with BackendPolicy.BUFFERED: through the page cache"
    path = "read"
    policy = "BUFFERED"


serves("checkpoint")(borrowed(InstantTensor))
serves("checkpoint")(borrowed(InstantTensorBuffered))

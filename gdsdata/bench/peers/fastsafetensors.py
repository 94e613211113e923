"""fastsafetensors: rows of case=load and case=checkpoint."""

from gdsdata.bench.measure import device
from gdsdata.bench.peers.protocols import LoadPeer, borrowed
from gdsdata.bench.peers.registry import serves


@serves("load")
class FastSafetensors(LoadPeer):
    key, name = "fastsafetensors", "fastsafetensors"
    setting = "fastsafetensors.fastsafe_open(nogds=True), every tensor"
    package, devices = "fastsafetensors", ("cuda",)
    path = "read"

    def load(self):
        import fastsafetensors

        name = f"cuda:{device.index(self.device)}"
        with fastsafetensors.fastsafe_open(self.source.path, device=name, nogds=True) as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dictionary)


serves("checkpoint")(borrowed(FastSafetensors))

"""torchsnapshot: a row of case=checkpoint."""

from gdsdata.bench.peers.protocols import CheckpointPeer, fill
from gdsdata.bench.peers.registry import serves


@serves("checkpoint")
class TorchSnapshot(CheckpointPeer):
    key, name = "torchsnapshot", "torchsnapshot"
    setting = "Snapshot.take and Snapshot.restore, defaults"
    package = "torchsnapshot"
    saves = loads = "torchsnapshot"
    caches = ("new", "warm", "cold")
    is_stock = True

    def save(self, state, path):
        from torchsnapshot import Snapshot, StateDict

        Snapshot.take(path, {"state": StateDict(state)})

    def load(self, into, path):
        from torchsnapshot import Snapshot, StateDict

        restored = StateDict(into)
        Snapshot(path).restore({"state": restored})
        fill({name: target for name, target in into.items() if restored[name] is not target}, restored)

"""Libraries that save checkpoints in formats of their own: rows of case=checkpoint."""

from gdsdata.bench.peers.protocols import CheckpointPeer, fill


class TorchCheckpointing(CheckpointPeer, serves="checkpoint"):
    """Without direct I/O, its default: 0.1.1 then fails if files are no whole pages."""

    key, name = "torch_checkpointing", "torch_checkpointing"
    setting = "CheckpointManager with_sync_save, LocalFileSystemStorageConfig(use_direct_io=False)"
    package = "torch_checkpointing"
    saves = loads = "torch_checkpointing"
    way_in = "mmap"
    caches = ("new", "warm", "cold")
    is_stock = True

    def __init__(self, device_name, engine=None):
        super().__init__(device_name, engine)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        config = CheckpointManager.Config.with_sync_save()
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager(config)

    def save(self, state, path):
        self.manager.save(path, {"state": state})

    def load(self, into, path):
        self.manager.load(path, into={"state": into})

    def close(self):
        self.manager.close()


class TorchSnapshot(CheckpointPeer, serves="checkpoint"):
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

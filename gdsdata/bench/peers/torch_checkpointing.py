"""torch_checkpointing: a row of case=checkpoint."""

import importlib

from gdsdata.bench.peers.protocols import CheckpointPeer
from gdsdata.bench.peers.registry import serves


@serves("checkpoint")
class TorchCheckpointing(CheckpointPeer):
    """Without direct I/O, its default: that fails with EINVAL if a file's length is no multiple of
    a page (0.1.1).
    """

    key, name = "torch_checkpointing", "torch_checkpointing"
    setting = "CheckpointManager with_sync_save, LocalFileSystemStorageConfig(use_direct_io=False)"
    package = "torch_checkpointing"
    saves = loads = "torch_checkpointing"
    way_in = "mmap"
    caches = ("new", "warm", "cold")
    is_stock = True

    def __init__(self, device_name, engine=None):
        super().__init__(device_name, engine)
        manager = importlib.import_module("torch_checkpointing").CheckpointManager
        storage = importlib.import_module("torch_checkpointing.storage.filesystem").LocalFileSystemStorageConfig
        config = manager.Config.with_sync_save()
        config.storage_config = storage(use_direct_io=False)
        self.manager = manager(config)

    def save(self, state, path):
        self.manager.save(path, {"state": state})

    def load(self, into, path):
        self.manager.load(path, into={"state": into})

    def close(self):
        self.manager.close()

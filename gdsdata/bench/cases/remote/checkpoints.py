"""The row's side of case=remote: checkpoints that lie in a store."""

import os
import shutil

from gdsdata.bench.cases.checkpoint.row import CheckpointRow
from gdsdata.bench.data import objects
from gdsdata.bench.peers import registry


class StoredCheckpointRow(CheckpointRow):
    """Paths are URLs. Clients find the store by the environment."""

    def __init__(self, peer, kind, access, folder, **more):
        self.work = kind
        super().__init__(peer, kind, **more)
        self.access, self.folder = access, os.path.join(folder, self.key)
        os.environ.update(access.environment())

    def find(self, key):
        return registry.find("remote", key, self.work)

    def get_ready(self):
        if self.kind == "save" or self.peer_class.fills:
            super().get_ready()

    def load(self, path):
        self.tensors = self.peer.load(self.tensors, path) or self.tensors

    def fetched(self, path):
        """Return a copy of what was saved, by botocore."""
        return objects.fetched(self.access, path, self.folder)

    def remove(self, path):
        objects.delete(self.access, path)
        shutil.rmtree(self.folder, ignore_errors=True)
        return {}

"""The row's side of case=remote: checkpoints that lie in a store."""

import os
import shutil

from gdsdata.bench.cases.checkpoint.row import CheckpointRow
from gdsdata.bench.data import objects


class StoredCheckpointRow(CheckpointRow):
    """Paths are URLs. Clients find the store by the environment."""

    def set_up(self):
        super().set_up()
        self.access, self.folder = self.source.objects.access, self.source.folder / self.key
        os.environ.update(self.access.environment())

    def warm(self):
        """Do nothing: it has no files here."""

    def make_tensors(self):
        if self.kind == "save" or self.peer_class.fills:
            super().make_tensors()

    def load(self, path):
        self.tensors = self.peer.load(self.tensors, path) or self.tensors

    def fetched(self, path):
        """Return a copy of what was saved, by botocore."""
        return objects.fetched(self.access, path, self.folder)

    def remove(self):
        objects.delete(self.access, self.path)
        shutil.rmtree(self.folder, ignore_errors=True)
        return {}

"""The bench's side of case=load."""

from gdsdata.bench.data import checkpoints
from gdsdata.bench.data.made import PIECE_BYTES
from gdsdata.bench.harness.case import Case
from gdsdata.bench.peers import registry


class Load(Case):
    reads_once = True

    def sources(self):
        with self.progress.bytes("data: safetensors", self.settings.data.size_bytes) as advance:
            source = checkpoints.checkpoint_for(self.settings.data, self.case, self.needs_torch_file(), advance)
        with self.progress.bytes("checksums: safetensors", source.bytes) as advance:
            source.checksums = checkpoints.checksums_of(source, advance)
        yield source

    def needs_torch_file(self):
        rows = registry.rows("load", device_name=self.device)
        return any(peer.reads_torch_file for peer in rows if not self.case.rows or peer.key in self.case.rows)

    def rows_for(self, source, cache):
        return [peer for peer in super().rows_for(source, cache) if source.torch_file or not peer.reads_torch_file]

    def host_bytes(self, source):
        return source.bytes + PIECE_BYTES

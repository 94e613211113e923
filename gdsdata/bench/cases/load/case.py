"""The bench's side of case=load."""

from gdsdata.bench.data import checkpoints
from gdsdata.bench.data.made import PIECE_BYTES
from gdsdata.bench.harness.case import Case
from gdsdata.bench.peers import registry


class Load(Case):
    reads_once = True

    def sources(self):
        rows = registry.rows("load", device_name=self.device)
        wanted = [peer for peer in rows if not self.case.rows or peer.key in self.case.rows]
        yield checkpoint_of(self, any(peer.reads_torch_file for peer in wanted))

    def rows_for(self, source, cache):
        return [peer for peer in super().rows_for(source, cache) if source.torch_file or not peer.reads_torch_file]

    def host_bytes(self, source):
        return source.bytes + PIECE_BYTES


def checkpoint_of(case, with_torch_file):
    """Return the Checkpoint of a case's settings, and take its checksums."""
    settings = case.settings
    with case.progress.bytes("data: safetensors", settings.data.size_bytes) as advance:
        source = checkpoints.checkpoint_for(settings.data, settings.case, with_torch_file, advance)
    with case.progress.bytes("checksums: safetensors", source.bytes) as advance:
        source.checksums = checkpoints.checksums_of(source, advance)
    return source

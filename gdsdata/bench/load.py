"""case=load: one big safetensors file into tensors on the device, warm and cold, beside the machine's limits."""

import time

import torch

from gdsdata.bench import case, data, device, limits, load_peers, measure, row

TOUCHED_BYTES = 512 * 2**20


class Load(case.Case):
    def sources(self):
        with self.progress.bytes("data: safetensors", self.settings.data.size_bytes) as advance:
            source = data.checkpoint_for(self.settings.data, self.case, self.needs_torch_file(), advance)
        with self.progress.bytes("checksums: safetensors", source.bytes) as advance:
            source.checksums = data.checksums_of(source, advance)
        yield source

    def needs_torch_file(self):
        rows = [peer for peer in load_peers.ROWS if not self.case.rows or peer.key in self.case.rows]
        return any(peer.reads_torch_file for peer in rows)

    def about(self, source):
        system, disk = measure.file_system(source.files[0])
        return {
            "summary": source.summary(),
            "files": len(source.files),
            "first_file": source.files[0],
            "tensors": len(source.tensors),
            "file_bytes": source.file_bytes,
            "loaded_bytes": source.bytes,
            "file_system": system,
            "device": disk,
        }

    def dtypes(self, source, cache):
        return [source.dtype]

    def rows_for(self, source, cache):
        on_gpu = device.is_cuda(self.device)
        rows = [peer for peer in load_peers.ROWS if (on_gpu or peer.on_cpu) and cache in peer.caches]
        return [peer for peer in rows if source.torch_file or not peer.reads_torch_file]

    def find(self, key):
        return load_peers.find(key)

    def load_command(self, source):
        return {"source": source.as_dict(), "engine": self.settings.engine}

    def touched_bytes(self, source):
        return TOUCHED_BYTES if device.is_cuda(self.device) else source.bytes + data.PIECE_BYTES

    def run(self, row):
        source = row.table.source
        resident = self.warmed(source) if row.table.cache == "warm" else measure.drop(source.files)
        return row.process.run() | {"resident_before": resident}

    def take_limits(self, table, seconds):
        if table.cache == "cold":
            return limits.sequential_reads(table.source.files)
        return super().take_limits(table, seconds)

    def limit_for(self, table, found):
        if table.cache == "warm":
            return limits.warm_limit(found)
        return limits.sequential_limit(found)


# ------------------------------------------------------------------------------------------------ in the row's process


class LoadRow(row.Row):
    def __init__(self, peer, source, engine, device):
        super().__init__(peer, load_peers.find(peer), device)
        self.source, self.engine = data.Checkpoint(**source), engine
        self.tensors = None

    def construct(self):
        self.peer = self.peer_class(self.source, self.device, self.engine)

    def prepare(self, touched_bytes):
        """Torch keeps its device memory: no row is timed for getting it from the driver."""
        super().prepare(touched_bytes, release=False)

    def close(self):
        self.tensors = None
        super().close()

    def verify(self):
        """Compares a checksum of every tensor, taken where it lies, with that of the file's bytes, plainly read."""
        self.construct()
        try:
            flat = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in self.peer.load().items()}
            tensors = self.source.tensors
            if load_peers.WHOLE in flat:
                whole = flat[load_peers.WHOLE]
                self.check_size(load_peers.WHOLE, whole, self.source.bytes)
                flat = {name: whole[begin:end] for name, (begin, end) in tensors.items()}
            if flat.keys() != tensors.keys():
                raise ValueError(f"tensors {sorted(flat)} came, {sorted(tensors)} were due")
            for name, (begin, end) in tensors.items():
                self.check_size(name, flat[name], end - begin)
                if data.checksum(flat[name]) != self.source.checksums[name]:
                    raise ValueError(f"tensor {name!r}: its bytes are not what the file holds")
        finally:
            flat = whole = None
            self.close()
        return {"checked_bytes": self.source.bytes}

    def check_size(self, name, tensor, due_bytes):
        wanted = torch.device(self.device)
        if tensor.numel() != due_bytes or tensor.device.type != wanted.type:
            raise ValueError(
                f"tensor {name!r}: {tensor.numel():,} bytes came on {tensor.device}, {due_bytes:,} were due on {wanted}"
            )

    def run(self):
        self.start_cpu_clock()
        started = time.perf_counter()
        self.construct()
        served_before = self.peer.served()
        self.tensors = self.peer.load()
        device.synchronize(self.device)
        elapsed = time.perf_counter() - started
        served = self.peer.served()
        return {
            "bytes": self.source.bytes,
            "seconds": elapsed,
            "served": {path: count - served_before.get(path, 0) for path, count in served.items()},
            "path": self.peer.path,
        }

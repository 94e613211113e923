"""case=tensor: one big tensor loaded from a file and stored to one, on the CPU and on a GPU: DeepNVMe's table.

Each kind of work on each device is a source of its own, measured as case=latency measures one size,
with its states of the file; who does it is in tensor_peers. A row that only trying shows to be
possible here (an operator that has to be built, cuFile on this file system) loads and stores a
small file first, and is left out, with the reason, if it cannot.
"""

from dataclasses import dataclass
from pathlib import Path

from gdsdata.bench import data, device, latency, limits, measure, tensor_peers
from gdsdata.bench.io import ended_in_order
from gdsdata.bench.process import RowFailed

WORK = {"load": "read", "store": "write"}  # as case=latency calls them
WARM_UP, MOST_SECONDS = 1, 240  # of a run
MEMORY = 6  # tensors: what is written, what is expected, what came, a peer's and the limits' own, and some to spare
TRIED_BYTES = 4 * 2**20
BUILD_SECONDS = 900  # deepspeed's operators, on few cores


@dataclass
class DeviceTensorFile(latency.TensorFile):
    """The file of one tensor on `device`."""

    device: str

    @property
    def kind(self):
        verb = next(verb for verb, work in WORK.items() if work == self.work)
        return f"{verb} {device.kind(self.device)} tensor"


class Tensor(latency.Latency):
    folder_name, peers = "tensor", tensor_peers

    def measure(self):
        self.tries = {}  # why a row cannot be had, or "", by key
        with ended_in_order():
            return super().measure()

    def sources(self):
        size = self.case.size_bytes
        available = measure.available_bytes()
        if MEMORY * size > available:
            raise data.DataError(
                f"case.size_bytes={size} takes {MEMORY * size / 2**20:,.0f} MiB of memory and there are "
                f"{available / 2**20:,.0f}: set it to less"
            )
        data.need_space(self.own.path, f"case.size_bytes={size}", 3 * size, "case.size_bytes=")
        for where in dict.fromkeys(["cpu", self.device]):
            for verb in self.case.work:
                path = str(self.own.path / f"tensor-{verb}-{device.kind(where).lower()}.bin")
                source = DeviceTensorFile(WORK[verb], size, path, where)
                data.write_synced(path, latency.random_bytes(size, self.case.seed).numpy())
                yield source
                Path(path).unlink(missing_ok=True)

    def rows_for(self, source, cache):
        there = "cuda" if device.is_cuda(source.device) else "cpu"
        return [peer for peer in super().rows_for(source, cache) if there in peer.devices]

    def missing(self, peer):
        why = super().missing(peer) or peer.lacks()
        if why or not peer.tried:
            return why
        if peer.key not in self.tries:
            self.tries[peer.key] = self.refusal(peer)
        return self.tries[peer.key]

    def refusal(self, peer):
        """Has the row store and load a small file; what it said if it could not."""
        path = str(self.own.path / "tensor-try.bin")
        where = "cpu" if "cpu" in peer.devices else self.device
        process = self.process(peer.key)
        given = {"case": "tensor", "peer": peer.key, "path": path, "tensor_bytes": TRIED_BYTES, "device": where}
        given |= {"seed": self.case.seed, "engine": self.settings.engine}
        data.write_synced(path, latency.random_bytes(TRIED_BYTES, self.case.seed).numpy())
        try:
            for work, state in (("read", "cold"), ("write", "replaced")):
                process.send("load", work=work, **given)
                process.receive()
                process.send("attempt", state=state)
                process.receive(timeout=BUILD_SECONDS)
        except RowFailed as failed:
            return f"it was tried on a small file, and said {failed}"
        finally:
            Path(path).unlink(missing_ok=True)
        return ""

    def load_command(self, source):
        return super().load_command(source) | {"device": source.device}

    def iterations(self):
        asked = {"iterations": self.case.loop, "warm_up": WARM_UP, "run_seconds": MOST_SECONDS}
        return asked | {"verify": self.case.validate}

    def take_limits(self, table, seconds):
        if table.cache == "warm" and table.source.device == "cpu":
            return {"memory_copy": limits.memory_copy(seconds)}
        return super().take_limits(table, seconds)

    def summary(self, row):
        return super().summary(row) | {"tensor_device": row.table.source.device}

    def compared(self, table, limit, limit_name):
        """Also with their ratio to plain Python, as DeepNVMe's table has it."""
        rows = super().compared(table, limit, limit_name)
        plain = next((row["gb_per_s"] for row in rows if row["key"] == "python"), None)
        for row in rows:
            known = plain and row["gb_per_s"]
            row["ratio_to_python"] = row["gb_per_s"]["median"] / plain["median"] if known else None
        return rows


# ------------------------------------------------------------------------------------------------ in the row's process


class TensorRow(latency.LatencyRow):
    peers = tensor_peers
    torch_threads = None  # copies are those a user gets

    def attempt(self, state):
        """One load or store that nobody compares or times."""
        try:
            self.get_ready(state, check=False)
            self.once()
        finally:
            self.close()
        return {}

"""The bench's side of case=tensor: each kind of work on each device is a source of its own.

It measures as case=latency measures one size. Some rows only show by trying whether they work here:
an operator that has to be built, cuFile on this file system. Such a row loads and stores a small
file first. If it cannot, it is left out, with the reason.
"""

from dataclasses import dataclass

from gdsdata.bench.cases.latency.case import Latency, TensorFile
from gdsdata.bench.data.made import DataError, need_space
from gdsdata.bench.harness.process import RowFailed
from gdsdata.bench.measure import device, system

WORK = {"load": "read", "store": "write"}  # as case=latency calls them
MEMORY = 6  # tensors: what is written, what is expected, what came, a peer's and the limits' own, and some to spare
TRIED_BYTES = 4 * 2**20
BUILD_SECONDS = 900  # deepspeed's operators, on few cores


@dataclass
class DeviceTensorFile(TensorFile):
    """The file of one tensor on `device`."""

    device: str

    @property
    def kind(self):
        verb = next(verb for verb, work in WORK.items() if work == self.work)
        return f"{verb} {device.kind(self.device)} tensor"


class Tensor(Latency):
    ratios = (("ratio_to_python", "python", ()),)  # as DeepNVMe's table has it

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.tries = {}  # why a row cannot be measured, or "", by key

    def sources(self):
        size = self.case.size_bytes
        available = system.available_bytes()
        if MEMORY * size > available:
            raise DataError(
                f"case.size_bytes={size} takes {MEMORY * size / 2**20:,.0f} MiB of memory and there are "
                f"{available / 2**20:,.0f}: set it to less"
            )
        need_space(self.files_folder, f"case.size_bytes={size}", 3 * size, "case.size_bytes=")
        for where in dict.fromkeys(["cpu", self.device]):
            for verb in self.case.work:
                path = self.path(verb, device.kind(where).lower())
                with self.written(DeviceTensorFile(WORK[verb], size, path, where)) as source:
                    yield source

    def missing(self, peer):
        why = super().missing(peer)
        if why or not peer.tried:
            return why
        if peer.key not in self.tries:
            self.tries[peer.key] = self.refusal(peer)
        return self.tries[peer.key]

    def refusal(self, peer):
        """Has the row store and load a small file; returns its error, or ""."""
        process, where = self.process(peer.key), "cpu" if "cpu" in peer.devices else self.device
        try:
            for work, state in (("read", "cold"), ("write", "replaced")):
                with self.written(DeviceTensorFile(work, TRIED_BYTES, self.path("try"), where)) as source:
                    process.ask("load", key=peer.key, **self.load_command(source))
                    process.send("attempt", state=state)
                    process.receive(timeout=BUILD_SECONDS)
        except RowFailed as failed:
            return f"it was tried on a small file, and said {failed}"
        return ""

    def summary(self, row):
        return super().summary(row) | {"tensor_device": row.table.source.device}

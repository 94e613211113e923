"""The settings of case=io, and their small values of quick=true."""

from dataclasses import dataclass

from gdsdata.bench.cases.settings import PAGE_BYTES, CaseSettings, setting, some_of
from gdsdata.bench.data.transfers import MOST_DEPTH, MOST_THREADS


@dataclass
class IoSettings(CaseSettings):
    """Transfers of one size between a file and memory: gdsio's matrix."""

    MAKES = "the file that it reads"

    direction: list[str] = some_of(
        ["read", "write", "randread", "randwrite"],
        "from the file's start on, or in random order; each transfer of it once, and again",
    )
    xfer: list[str] = some_of(
        ["cpu", "cpu_gpu", "gpu"],
        "between storage and the CPU's memory, the GPU's by way of the CPU's, the GPU's straight (cuFile); without "
        "a GPU the first only. `cache` says whether reads find the file in the page cache (warm) or not (cold)",
    )
    submit: list[str] = some_of(
        ["sync", "async", "batch"],
        "transfers in flight are those of `threads` threads, of one thread's futures, or of calls that carry many each",
    )
    file_bytes: int = setting(512 * 2**20, "size of the file that is read or written, and removed at the end")
    io_bytes: list[int] = setting(
        [2**20], "size of one transfer; several: a table each, and a picture over them", distinct=True
    )
    depth: list[int] = setting(
        [32],
        "transfers in flight; several: a table each, and a line each in the picture",
        within=(1, MOST_DEPTH),
        distinct=True,
    )
    threads: int | None = setting(
        None,
        "sync: threads, each with one transfer in flight; null: as many as depth, at most 256",
        within=(1, MOST_THREADS),
    )
    batch_calls: int = setting(
        4,
        "batch: calls that share the depth, so that storage has work while one returns; 1: a batch after the other",
        within=(1, MOST_THREADS),
    )
    duration_s: float | None = setting(2.0, "of each run; null: one pass over the file")
    verify: bool = setting(True, "compare what is read and, read back, what is written, untimed")

    def check(self, data):
        for name, size in (*(("io_bytes", size) for size in self.io_bytes), ("file_bytes", self.file_bytes)):
            if size < PAGE_BYTES or size % PAGE_BYTES:
                raise ValueError(f"case.{name}={size}: must be a multiple of {PAGE_BYTES}, as O_DIRECT wants it")
        if max(self.io_bytes) > self.file_bytes:
            raise ValueError(f"case.io_bytes={max(self.io_bytes)}: more than case.file_bytes={self.file_bytes}")

    def make_small(self):
        super().make_small()
        self.file_bytes = min(self.file_bytes, max(16 * 2**20, *self.io_bytes))
        self.duration_s = min(self.duration_s or 0.1, 0.1)

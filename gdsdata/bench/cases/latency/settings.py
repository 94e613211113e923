"""The settings of case=latency, and their small values of quick=true."""

from dataclasses import dataclass

from gdsdata.bench.cases.settings import CaseSettings, setting, some_of


@dataclass
class LatencySettings(CaseSettings):
    """One tensor, read or written again and again, by size."""

    MAKES = "its files"
    SMALL = {"iterations": 20, "run_seconds": 0.5}

    work: list[str] = some_of(["read", "write"], "read: a file into a tensor; write: a tensor until it is on storage")
    sizes_bytes: list[int] = setting([2**12, 2**16, 2**20, 2**24, 2**27], "of the tensor: a table row for each size")
    iterations: int = setting(
        100,
        "reads or writes that are timed in each of the `repeats` runs. How they are done is set by engine.workers, "
        "engine.queue_depth, engine.segment_bytes and engine.direct (auto: page cache first; always, never: O_DIRECT)",
    )
    warm_up: int = setting(5, "iterations before those, in each run", may_be_0=True)
    run_seconds: float = setting(5.0, "a run ends after this many seconds, if iterations take longer; at most 240")
    writes: list[str] = some_of(
        ["replaced", "in_place"], "replaced: a new file takes the old one's name; in_place: over the bytes of a file"
    )
    verify: bool = setting(
        False, "compare all bytes of every iteration, untimed, each time other ones; false: of two before timing"
    )

    def check(self, data):
        if not self.sizes_bytes or min(self.sizes_bytes) < 1:
            raise ValueError(f"case.sizes_bytes={list(self.sizes_bytes)}: name one size at least, of 1 byte or more")
        if self.run_seconds > 240:
            raise ValueError(f"case.run_seconds={self.run_seconds}: at most 240; repeats= takes more runs")

    def make_small(self):
        super().make_small()
        self.sizes_bytes = [size for size in self.sizes_bytes if size <= 2**20] or [2**20]

"""The settings of case=tensor, and their small values of quick=true."""

from dataclasses import dataclass

from gdsdata.bench.cases.settings import CaseSettings, setting, some_of


@dataclass
class TensorSettings(CaseSettings):
    """One big tensor, on the CPU and on a GPU, loaded from a file and stored: DeepNVMe's table."""

    MAKES = "its files"
    SMALL = {"size_bytes": 16 * 2**20, "loop": 2}

    work: list[str] = some_of(["load", "store"], "load: a file into a tensor; store: a tensor until it is on storage")
    size_bytes: int = setting(2**30, "of the tensor, a multiple of 1 MiB; it takes six times as much memory")
    loop: int = setting(3, "loads or stores that are timed in each of the `repeats` runs, behind one that is not")
    writes: list[str] = some_of(
        ["replaced", "in_place"],
        "of a store. replaced: a new file takes the old one's name; in_place: over the bytes of a file",
    )
    validate: bool = setting(
        False, "compare all bytes of every timed load and store too, each time other ones; false: of two before timing"
    )

    def check(self, data):
        if self.size_bytes % 2**20:
            raise ValueError(f"case.size_bytes={self.size_bytes}: must be a multiple of 1 MiB, as every row takes it")

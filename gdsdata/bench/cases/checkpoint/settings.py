"""The settings of case=checkpoint, and their small values of quick=true."""

from dataclasses import dataclass

from gdsdata.bench.cases.settings import CaseSettings, setting, some_of

LEAST_TENSOR_BYTES = 32 * 2**10  # on the average: some are of 16 KiB
DTYPES = ("bfloat16", "float16", "float32", "float64", "int64", "int32", "int16", "int8", "uint8")


@dataclass
class CheckpointSettings(CaseSettings):
    """Saving and loading a checkpoint of many tensors."""

    MAKES = "what it saves"
    SMALL = {"state_bytes": 64 * 2**20}

    work: list[str] = some_of(
        ["save", "load", "async"],
        "save: until all is on storage; load: into tensors that are there, in each state of `cache`; async: its stall",
    )
    state_bytes: int = setting(2 * 2**30, "what is saved, in all")
    tensors: int = setting(300, "so many tensors; one in ten is of 16 KiB, the others are of equal size")
    dtypes: list[str] = setting(["bfloat16", "float32"], "of the tensors, in turn", choices=DTYPES)
    overwrite: bool = setting(False, "save, once more, to a name where an older checkpoint is, which it replaces")
    written_by: str = setting(
        "gdsdata",
        "load: who wrote the files, for all rows that read the format: gdsdata, or stock (the format's own library)",
        choices=("gdsdata", "stock"),
    )

    def check(self, data):
        if self.state_bytes < self.tensors * LEAST_TENSOR_BYTES:
            raise ValueError(
                f"case.state_bytes={self.state_bytes}: too few for case.tensors={self.tensors}, which take "
                f"{self.tensors * LEAST_TENSOR_BYTES} or more"
            )

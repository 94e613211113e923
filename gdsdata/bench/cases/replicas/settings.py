"""The settings of case=replicas, and their small values of quick=true."""

from dataclasses import dataclass

from gdsdata.bench.cases.settings import CaseSettings, setting, some_of
from gdsdata.bench.measure import device


@dataclass
class ReplicasSettings(CaseSettings):
    """Several ranks load the same checkpoint, all of it, or take the same batches."""

    SMALL = {"tensor_bytes": 4 * 2**20, "batch_size": 2}

    ranks: int = setting(
        2, "so many processes load it, each to a device of its own: cuda:0, cuda:1, ..., or the CPU", within=(2, 64)
    )
    work: list[str] = some_of(
        ["safetensors", "pt", "dcp", "volumes"],
        "a checkpoint as a file of safetensors or torch.save, or as a folder of DCP; batches of volumes (data.shape)",
    )
    batch_size: int = setting(32, "volumes in a batch")
    patience_s: int = setting(
        120, "a load or an epoch may take so long; then the row's ranks are ended", within=(1, 280)
    )
    tensor_bytes: int = setting(64 * 2**20, "size of each bf16 tensor in the made checkpoint")

    def lack(self, device_name):
        return device.lack_of_ranks(device_name, self.ranks)

    def check(self, data):
        if self.tensor_bytes % 2:
            raise ValueError(f"case.tensor_bytes={self.tensor_bytes}: must be even, an element has 2 bytes")
        if data.path and self.work != ["safetensors"]:
            raise ValueError(
                f"data.path={data.path}: case=replicas reads one safetensors file of yours: add case.work=[safetensors]"
            )

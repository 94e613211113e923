"""The settings of case=load, and their small values of quick=true."""

from dataclasses import dataclass

from gdsdata.bench.cases.settings import CaseSettings, setting


@dataclass
class LoadSettings(CaseSettings):
    """One big file into tensors."""

    SMALL = {"tensor_bytes": 4 * 2**20}

    tensor_bytes: int = setting(64 * 2**20, "size of each bf16 tensor in the made safetensors file")

    def check(self, data):
        if self.tensor_bytes % 2:
            raise ValueError(f"case.tensor_bytes={self.tensor_bytes}: must be even, an element has 2 bytes")

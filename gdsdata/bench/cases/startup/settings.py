"""The settings of case=startup, and their small values of quick=true."""

from dataclasses import dataclass

from gdsdata.bench.cases.settings import CaseSettings, setting


@dataclass
class StartupSettings(CaseSettings):
    """From a training script's start to its first step, by part."""

    MAKES = "what it reads"

    state_bytes: list[int] = setting(
        [0, 2**30],
        "size of the checkpoint that is restored, tables for each; 0: none. torch.save's, and safetensors'",
        within=(0, 2**50),
        distinct=True,
    )
    batch_size: int = setting(64, "samples of data.seq_len + 1 tokens in the first batch")
    workers: list[int] = setting(
        [0, 1, 2, 4],
        "DataLoaders with so many worker processes each, a row for each; the notes name the best",
        within=(0, 256),
        distinct=True,
    )
    warm_up: int = setting(1, "runs of each row before those that are timed; quick=true: none", may_be_0=True)

    def check(self, data):
        if data.dtype != "uint16":
            raise ValueError(f"data.dtype={data.dtype}: case=startup reads tokens of uint16")
        if data.stride not in (None, data.seq_len):
            raise ValueError(f"data.stride={data.stride}: case=startup takes windows of seq_len, one behind the other")
        if not data.path and data.size_bytes < 2 * (data.seq_len + 1) * self.batch_size:
            raise ValueError(
                f"data.size_bytes={data.size_bytes}: too few for a batch of case.batch_size={self.batch_size} windows "
                f"of {data.seq_len + 1} tokens"
            )

    def make_small(self):
        super().make_small()
        self.state_bytes = [size for size in self.state_bytes if 0 < size <= 2**24][:1] or [2**24]
        self.cache, self.workers, self.warm_up = self.cache[:1], self.workers[:2], 0

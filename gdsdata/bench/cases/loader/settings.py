"""The settings of case=loader, and their small values of quick=true."""

from dataclasses import dataclass

from gdsdata.bench.cases.settings import CaseSettings, setting, some_of


@dataclass
class LoaderSettings(CaseSettings):
    """Shuffled batches: GDSDataset beside what a user would write."""

    SMALL = {"epochs": 2, "verify_batches": 4, "run_seconds": 0.2, "cold_seconds": 0.5}

    dtypes: list[str] = some_of(
        ["raw", "int64"],
        "what token batches come out as: raw (the file's dtype), int64, or both; cold, the first of them only",
    )
    batch_sizes: list[int] = setting(
        [],
        "samples a batch; each size has its rows in a table; cold, the first of them only; empty: [64,16] for tokens, "
        "[16] for npy",
        within=(1, 2**24),
    )
    epochs: int = setting(5, "a warm run ends after this many epochs ...")
    run_seconds: float = setting(0.8, "... or after this many seconds from construction, whichever is first")
    cold_samples: int | None = setting(
        None, "a cold run reads this many samples, the same for every row; null: 8192 tokens, all volumes"
    )
    cold_seconds: float = setting(5.0, "a cold run is cut off after this many seconds (the report says so)")
    verify_batches: int = setting(16, "batches of every row compared with plain numpy, bit by bit, before timing")

    def check(self, data):
        if data.files != [1] and (data.path or data.kind == "npy"):
            of = "your own files" if data.path else "npy, whose files follow from data.size_bytes and data.shape"
            raise ValueError(f"data.files={list(data.files)}: it splits made tokens, not {of}")

    def make_small(self):
        super().make_small()
        self.cold_samples = min(self.cold_samples or 1024, 1024)

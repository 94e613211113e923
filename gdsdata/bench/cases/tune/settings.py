"""The settings of case=tune, and their small values of quick=true."""

from dataclasses import dataclass

from gdsdata.bench.cases.settings import PAGE_BYTES, CaseSettings, one_of, setting

LEAST_PAIRS = 6  # of turns, in which what was found is confirmed
SEARCHED = ("workers", "queue_depth", "segment_bytes", "direct", "request_bytes", "bounce_bytes")


@dataclass
class TuneSettings(CaseSettings):
    """The best engine.* for a path and device, and what it gains over the default."""

    SMALL = {"budget_s": 8.0, "run_seconds": 0.05, "tensor_bytes": 4 * 2**20}

    cache: list[str] = setting(["cold"], "page cache states; each is a search of its own", choices=("warm", "cold"))
    repeats: int = setting(30, "pairs of turns, at most, in which what was found is compared with the default")
    work: list[str] = setting(
        ["read"],
        "what to tune for: read, big reads into a tensor (any files); batches, shuffled ones of GDSDataset (tokens, "
        "npy); write, a tensor until it is on storage, beside data.path. Each is a search of its own",
        choices=("read", "batches", "write"),
    )
    budget_s: float = setting(60.0, "time for all searches, data not counted; what is not tried by then, a note says")
    run_seconds: float = setting(0.4, "of one turn of one setting; cold, it ends with the files")
    tensor_bytes: int = setting(64 * 2**20, "read, write: of the tensor, and so of one call")
    batch_size: int | None = setting(None, "batches: samples; null: 64 for tokens, 16 for npy")
    workers: list[int] = setting([1, 2, 4, 8, 16], "values of engine.workers to try; an empty list leaves it out")
    queue_depth: list[int] = setting([8, 16, 32, 128, 256], "the same of engine.queue_depth; not where all is warm")
    segment_bytes: list[int] = setting([2**20, 2**21, 2**22, 2**23, 2**24], "the same of engine.segment_bytes")
    direct: list[str] = setting(["auto", "always", "never"], "the same of engine.direct")
    request_bytes: list[int] = setting([], "the same of engine.request_bytes, e.g. [262144,4194304]")
    bounce_bytes: list[int] = setting([], "the same of engine.bounce_bytes, e.g. [67108864]")

    def check(self, data):
        for value in self.direct:
            one_of("case.direct", value, ["auto", "always", "never"])
        for name in SEARCHED:
            if name != "direct" and min(getattr(self, name), default=1) < 1:
                raise ValueError(f"case.{name}={getattr(self, name)}: each must be 1 or more; [] leaves it out")
        if self.repeats < LEAST_PAIRS:
            raise ValueError(f"case.repeats={self.repeats}: fewer than {LEAST_PAIRS} pairs confirm nothing")
        if self.tensor_bytes < PAGE_BYTES:
            raise ValueError(f"case.tensor_bytes={self.tensor_bytes}: must be {PAGE_BYTES} or more")
        if self.rows:
            raise ValueError(
                f"case.rows={self.rows}: case=tune has no rows to choose; case.work= says what to tune for"
            )

    def make_small(self):
        repeats = self.repeats  # Fewer would confirm nothing.
        super().make_small()
        self.repeats = min(repeats, LEAST_PAIRS)
        for name in ("workers", "queue_depth", "segment_bytes"):
            setattr(self, name, getattr(self, name)[:2])

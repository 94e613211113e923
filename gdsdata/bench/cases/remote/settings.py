"""The settings of case=remote, and their small values of quick=true."""

from dataclasses import dataclass

from gdsdata.bench.cases.settings import CaseSettings, setting, some_of


@dataclass
class RemoteSettings(CaseSettings):
    """Objects of a store: ranges, samples, batches of shards, and checkpoints.

    `cache` is that of this case: cold, bytes come from the server; warm, from a loader's own cache
    on the local disk.
    """

    SMALL = {"run_seconds": 0.5, "tune_seconds": 0.2, "objects": 4, "shards": 20}

    work: list[str] = some_of(
        ["ranges", "objects", "samples", "shards", "checkpoints", "first_batch"],
        "ranges: of range_bytes, shuffled; objects: whole; samples: of sample_bytes, shuffled; shards: batches of tars "
        "and of other loaders' formats, from the server (case.cache=[cold]) and from the loader's cache ([warm]); "
        "checkpoints: loaded and saved; first_batch: of many small shards, in a new process",
    )
    endpoint_url: str = setting(
        "",
        "of the store of data.path=s3://BUCKET/PREFIX; empty: AWS_ENDPOINT_URL, or AWS. Without data.path SeaweedFS is "
        "started on the loopback interface, and filled",
    )
    connections: list[int] = setting(
        [4, 16, 64],
        "each row's number of connections is the best of these, and so is the limit's",
        within=(1, 1024),
        distinct=True,
    )
    objects: int = setting(16, "so many objects share data.size_bytes")
    range_bytes: int = setting(2**20, "of work=ranges")
    sample_bytes: int = setting(2**15, "of work=samples")
    batch_size: int = setting(16, "volumes in a batch of work=shards")
    shards: int = setting(1000, "work=first_batch: so many")
    shard_samples: int = setting(4, "work=first_batch: samples of 16 KiB in a shard")
    verify_batches: int = setting(8, "work=shards: batches of two epochs that are compared before timing")
    run_seconds: float = setting(3.0, "a run ends with the pass that this time ends in; shards: with the epoch")
    tune_seconds: float = setting(0.5, "of each number of connections that is tried")

    def check(self, data):
        if data.path and not data.path.startswith("s3://"):
            raise ValueError(f"data.path={data.path}: case=remote reads s3://BUCKET/PREFIX")
        if data.path and not {"ranges", "objects", "samples"} & set(self.work):
            raise ValueError(f"case.work={self.work}: the bench makes what it reads, so leave data.path= out")

    def make_small(self):
        super().make_small()
        self.connections = [min(self.connections)]

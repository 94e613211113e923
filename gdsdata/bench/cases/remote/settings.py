"""The settings of case=remote, and their small values of quick=true."""

from dataclasses import dataclass

from gdsdata.bench.cases.settings import CaseSettings, setting, some_of


@dataclass
class RemoteSettings(CaseSettings):
    """Objects of a store: ranges, whole objects, shuffled samples and batches of shards.

    `cache` is that of this case: cold, bytes come from the server; warm, from a loader's own cache
    on the local disk.
    """

    SMALL = {"run_seconds": 0.5, "tune_seconds": 0.2, "objects": 4}

    work: list[str] = some_of(
        ["ranges", "objects", "samples", "shards"],
        "ranges: of range_bytes, shuffled; objects: whole; samples: of sample_bytes, shuffled; shards: batches of tars "
        "and of other loaders' formats, from the server (case.cache=[cold]) and from the loader's cache ([warm])",
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
    verify_batches: int = setting(8, "work=shards: batches of two epochs that are compared before timing")
    run_seconds: float = setting(3.0, "a run ends with the pass that this time ends in; shards: with the epoch")
    tune_seconds: float = setting(0.5, "of each number of connections that is tried")

    def check_all(self, data):
        super().check_all(data)
        if data.path and not data.path.startswith("s3://"):
            raise ValueError(f"data.path={data.path}: case=remote reads s3://BUCKET/PREFIX")
        if data.path and self.work == ["shards"]:
            raise ValueError("case.work=[shards]: it makes its shards, so leave data.path= out")

    def make_small(self):
        super().make_small()
        self.connections = [min(self.connections)]

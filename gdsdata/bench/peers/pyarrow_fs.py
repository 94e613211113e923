"""pyarrow's S3 file system: a row of case=remote."""

from gdsdata.bench.peers.object_clients import ThreadsPeer
from gdsdata.bench.peers.registry import serves


@serves("remote")
class PyarrowS3(ThreadsPeer):
    key, name, package = "pyarrow", "pyarrow.fs", "pyarrow"
    setting = "read_at of open files of pyarrow.fs.S3FileSystem, by threads"

    def open(self):
        import pyarrow
        import pyarrow.fs

        pyarrow.set_io_thread_count(self.connections)
        scheme, _, address = self.access.endpoint_url.partition("://")
        own = {"endpoint_override": address, "scheme": scheme} if address else {}
        system = pyarrow.fs.S3FileSystem(
            access_key=self.access.access_key, secret_key=self.access.secret_key, region=self.access.region,
            session_token=self.access.token or None, **own,
        )  # fmt: skip
        self.files = {key: system.open_input_file(f"{self.access.bucket}/{key}") for key in self.objects.keys}

    def fetch(self, piece):
        return self.files[piece.key].read_at(piece.length, piece.offset)

    def close(self):
        for file in self.files.values():
            file.close()

"""s3fs, which fsspec opens s3:// with: a row of case=remote."""

from gdsdata.bench.peers.object_clients import TasksPeer
from gdsdata.bench.peers.registry import serves


@serves("remote")
class S3fs(TasksPeer):
    key, name, package = "s3fs", "s3fs", "s3fs"
    setting = "s3fs's _cat_file(start=, end=) by tasks of one event loop"

    async def connect(self):
        import s3fs

        access = self.access
        self.system = s3fs.S3FileSystem(
            key=access.access_key, secret=access.secret_key, token=access.token or None, asynchronous=True,
            endpoint_url=access.endpoint_url or None, skip_instance_cache=True,
            config_kwargs={"max_pool_connections": self.connections},
        )  # fmt: skip
        self.session = await self.system.set_session()

    async def fetch(self, piece):
        path = f"{self.access.bucket}/{piece.key}"
        return await self.system._cat_file(path, start=piece.offset, end=piece.offset + piece.length)

    async def disconnect(self):
        await self.session.close()

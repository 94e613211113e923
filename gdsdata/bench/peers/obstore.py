"""obstore, the Rust crate object_store for Python: a row of case=remote."""

from gdsdata.bench.peers.object_clients import TasksPeer
from gdsdata.bench.peers.registry import serves


def store_of(access):
    from obstore.store import S3Store

    given = {"access_key_id": access.access_key, "secret_access_key": access.secret_key, "region": access.region}
    given |= {"session_token": access.token} if access.token else {}
    if access.endpoint_url:
        given |= {"endpoint": access.endpoint_url, "virtual_hosted_style_request": False}
    return S3Store(access.bucket, **given, client_options={"allow_http": access.endpoint_url.startswith("http://")})


@serves("remote")
class Obstore(TasksPeer):
    key, name, package = "obstore", "obstore", "obstore"
    setting = "obstore.get_range_async by tasks of one event loop"

    async def connect(self):
        self.store = store_of(self.access)

    async def fetch(self, piece):
        return await self.store.get_range_async(piece.key, start=piece.offset, length=piece.length)

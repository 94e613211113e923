"""Clients of an object store: rows of case=remote, and their base classes."""

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gdsdata.bench.peers.protocols import OpenedPeer

TARGET_GBIT_PER_S = 100.0  # of awscrt, whose default of 10 bounds its connections


class Feed:
    """Gives (place, piece) to any number of threads, until it ends.

    Args:
        seconds: pieces come again and again for so long. None: each comes once.
    """

    def __init__(self, pieces, seconds=None):
        self.pieces, self.lock = pieces, threading.Lock()
        self.places = itertools.count() if seconds else iter(range(len(pieces)))
        self.ends = time.perf_counter() + seconds if seconds else None

    def __iter__(self):
        return self

    def __next__(self):
        with self.lock:
            if self.ends and time.perf_counter() > self.ends:
                raise StopIteration
            place = next(self.places) % len(self.pieces)
        return place, self.pieces[place]


class RemotePeer(OpenedPeer):
    """Reads pieces of objects, `connections` of them at a time, to the host or to the device.

    A class has `read(feed, take)`, which calls `take(place, bytes)` for each (place, piece) of the
    feed, from any thread and in any order. The bytes need not be valid after that. A class with an
    order of its own reads as many of the feed's pieces, or for as long, and its place is None.
    """

    kinds: tuple[str, ...] = ("ranges", "objects", "samples")
    caches: tuple[str, ...] = ("cold",)
    path = "remote"
    tunes = True  # its number of connections is chosen by trying

    def __init__(self, objects, connections, device_name, engine=None):
        self.objects, self.access, self.connections = objects, objects.access, connections
        self.device, self.engine = device_name, engine or {}
        self.open()


class ThreadsPeer(RemotePeer):
    """Has `fetch(piece)`, which `connections` threads call."""

    fetch: Callable

    def read(self, feed, take):
        def work():
            for place, piece in feed:
                take(place, self.fetch(piece))

        with ThreadPoolExecutor(self.connections) as threads:
            under_way = [threads.submit(work) for _ in range(self.connections)]
        for one in under_way:
            one.result()


class TasksPeer(RemotePeer):
    """Has the coroutine `fetch(piece)`, which `connections` tasks of one event loop call."""

    fetch: Callable

    def open(self):
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.connect())

    async def connect(self):
        """Do the last part of making it, in the event loop."""

    async def disconnect(self):
        """Part of closing it, in the event loop."""

    def read(self, feed, take):
        async def work():
            for place, piece in feed:
                take(place, await self.fetch(piece))

        async def all_tasks():
            await asyncio.gather(*(work() for _ in range(self.connections)))

        self.loop.run_until_complete(all_tasks())

    def close(self):
        self.loop.run_until_complete(self.disconnect())
        self.loop.close()


class Obstore(TasksPeer, serves="remote"):
    key, name, package = "obstore", "obstore", "obstore"
    setting = "obstore.get_range_async by tasks of one event loop"

    async def connect(self):
        from obstore.store import S3Store

        access, url = self.access, self.access.endpoint_url
        given = {"access_key_id": access.access_key, "secret_access_key": access.secret_key, "region": access.region}
        given |= {"session_token": access.token} if access.token else {}
        given |= {"endpoint": url, "virtual_hosted_style_request": False} if url else {}
        self.store = S3Store(access.bucket, **given, client_options={"allow_http": url.startswith("http://")})

    async def fetch(self, piece):
        return await self.store.get_range_async(piece.key, start=piece.offset, length=piece.length)


class AwsCrt(RemotePeer, serves="remote"):
    key, name, package = "awscrt", "awscrt S3 client", "awscrt"
    setting = f"awscrt.s3.S3Client, throughput_target_gbps={TARGET_GBIT_PER_S:g}, a request a piece, into a bytearray"

    def open(self):
        from awscrt import auth, io, s3

        access, threads = self.access, io.EventLoopGroup(len(os.sched_getaffinity(0)))
        insecure = access.endpoint_url.startswith("http://")
        credentials = auth.AwsCredentialsProvider.new_static(access.access_key, access.secret_key, access.token or None)
        signing = s3.create_default_s3_signing_config(region=access.region, credential_provider=credentials)
        self.client = s3.S3Client(
            bootstrap=io.ClientBootstrap(threads, io.DefaultHostResolver(threads)), region=access.region,
            tls_mode=s3.S3RequestTlsMode.DISABLED if insecure else None, signing_config=signing,
            throughput_target_gbps=TARGET_GBIT_PER_S,
        )  # fmt: skip

    def request(self, piece):
        from awscrt import http

        host, path = f"{self.access.bucket}.s3.{self.access.region}.amazonaws.com", f"/{piece.key}"
        if self.access.endpoint_url:
            host, path = self.access.endpoint_url.partition("://")[2], f"/{self.access.bucket}/{piece.key}"
        return http.HttpRequest("GET", path, http.HttpHeaders([("Host", host), ("Range", piece.range)]))

    def read(self, feed, take):
        free = threading.Semaphore(self.connections)
        errors: list[Exception] = []
        under_way = {}
        for place, piece in feed:
            free.acquire()
            if errors:
                break
            under_way[place] = self.begin(place, piece, take, free, errors)
            under_way.pop(place - 4 * self.connections, None)
        for _ in range(self.connections):
            free.acquire()
        if errors:
            raise errors[0]

    def begin(self, place, piece, take, free, errors):
        from awscrt import s3

        memory = bytearray(piece.length)

        def on_body(chunk, offset, **_):
            memory[offset - piece.offset : offset - piece.offset + len(chunk)] = chunk

        def on_done(error=None, status_code=None, **_):
            try:
                if error:
                    raise OSError(f"{error}, status {status_code}")
                take(place, memory)
            except Exception as reason:
                errors.append(reason)
            finally:
                free.release()

        return self.client.make_request(
            type=s3.S3RequestType.GET_OBJECT, request=self.request(piece), on_body=on_body, on_done=on_done
        )

    def close(self):
        del self.client


class S3fs(TasksPeer, serves="remote"):
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


class PyarrowS3(ThreadsPeer, serves="remote"):
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


class Boto3(ThreadsPeer, serves="remote"):
    key, name, package = "boto3", "boto3", "botocore"
    setting = "get_object(Range=) of botocore's client, by threads that share it"

    def open(self):
        self.client = self.access.client(max_pool_connections=self.connections)

    def fetch(self, piece):
        return self.client.get_object(Bucket=self.access.bucket, Key=piece.key, Range=piece.range)["Body"].read()

    def close(self):
        self.client.close()

"""The base of clients of an object store: rows of case=remote."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable

from gdsdata.bench.peers.protocols import Peer


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


class RemotePeer(Peer):
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

    def open(self):
        """Part of making it."""


class ThreadsPeer(RemotePeer):
    """Has `fetch(piece)`, which `connections` threads call."""

    fetch: Callable

    def read(self, feed, take):
        errors = []

        def work():
            try:
                for place, piece in feed:
                    take(place, self.fetch(piece))
            except Exception as error:  # It is raised in the thread that asked.
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(self.connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class TasksPeer(RemotePeer):
    """Has the coroutine `fetch(piece)`, which `connections` tasks of one event loop call."""

    fetch: Callable

    def open(self):
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.connect())

    async def connect(self):
        """Part of making it, in the event loop."""

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

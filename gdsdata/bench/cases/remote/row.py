"""The row's side of case=remote: pieces of objects."""

import collections
import functools
import threading
import time

import numpy as np
import torch

from gdsdata.bench.data.objects import Truth
from gdsdata.bench.harness.row import Row
from gdsdata.bench.measure import device
from gdsdata.bench.peers.object_clients import Feed

VERIFIED_BYTES = 512 * 2**20  # of one pass over the pieces, at most
FIRST_BYTES = 64  # by which a piece is found whose place is not known
WARM_UP = 2  # pieces for each connection, before a run is timed


class RemoteRow(Row):
    def set_up(self):
        self.objects, self.counts = self.source.objects, self.settings.connections
        self.pieces, self.connections = self.source.pieces(self.settings.seed), max(self.counts)

    def construct(self, connections):
        self.close()
        self.peer = self.peer_class(self.objects, connections, self.device, self.engine)

    def verify(self, dtype):
        """Compare a pass over the pieces with plain reading, and choose the connections."""
        due = self.first_pieces() if self.peer_class.tunes else self.pieces  # or it reads others first
        check = Check(due, Truth(self.objects))
        try:
            self.construct(self.connections)
            self.read(Feed(due), check.take)
            check.end()
            rates = {}
            for count in self.counts if len(self.counts) > 1 and self.peer_class.tunes else []:
                self.construct(count)
                moved, seconds, _ = self.timed(self.settings.tune_seconds)
                rates[count] = moved / seconds / 1e9
            if rates:
                self.connections = max(rates, key=rates.__getitem__)
            tried = {str(count): rate for count, rate in rates.items()}
            connections = self.connections if self.peer_class.tunes else None
            return {"checked_bytes": check.bytes, "connections": connections, "tried_gb_per_s": tried}
        finally:
            self.close()

    def first_pieces(self):
        due: list = []
        total = 0
        for piece in self.pieces:
            if due and total + piece.length > VERIFIED_BYTES:
                break
            due.append(piece)
            total += piece.length
        return due

    def timed(self, seconds):
        """Return bytes, seconds and pieces of a run; connections are opened before."""
        warm_up = Lengths(self.pieces)
        self.read(Feed(self.pieces[: WARM_UP * self.peer.connections]), warm_up.take)
        self.start_cpu_clock()
        lengths, started = Lengths(self.pieces), time.perf_counter()
        self.read(Feed(self.pieces, seconds), lengths.take)
        return sum(lengths.found), time.perf_counter() - started, len(lengths.found)

    def read(self, feed, take):
        """Have the peer read. Pieces are on the device when they are taken."""
        there = ToDevice(self.device, max(piece.length for piece in self.pieces))
        self.peer.read(feed, lambda place, content: take(place, there.of(content)))
        device.synchronize(self.device)

    def run(self, dtype, cache):
        self.construct(self.connections)
        moved, elapsed, count = self.timed(self.settings.run_seconds)
        return self.figures(moved, elapsed) | {"pieces_per_s": count / elapsed}


class ToDevice:
    """Copies pieces that are in host memory to the device, through pinned memory of each thread."""

    def __init__(self, name, most_bytes):
        self.name, self.most_bytes, self.of_thread = name, most_bytes, threading.local()

    def of(self, content):
        """Return a piece on the device. One that is there stays as it is."""
        if not device.is_cuda(self.name) or isinstance(content, torch.Tensor):
            return content
        if not hasattr(self.of_thread, "slots"):
            device.open_context(self.name)
            self.of_thread.slots = device.PinnedSlots(self.name, (self.most_bytes,), torch.uint8, count=2)
        came = np.frombuffer(content, np.uint8)
        part = self.of_thread.slots.next()[: len(came)]
        part.numpy()[:] = came
        return self.of_thread.slots.send(part)


class Lengths:
    """Checks the length of each piece that comes, and nothing else."""

    def __init__(self, pieces):
        self.pieces, self.found = pieces, []

    def take(self, place, content):
        count = content.nbytes if isinstance(content, torch.Tensor) else memoryview(content).nbytes
        piece = self.pieces[place or 0]  # all are of one length if there is no place
        if count != piece.length:
            raise ValueError(f"{piece}: {count:,} bytes came")
        self.found.append(count)


class Check:
    """Compares each piece with the right bytes; each has to come once."""

    def __init__(self, pieces, truth):
        self.pieces, self.truth, self.lock = pieces, truth, threading.Lock()
        self.seen, self.bytes = set(), 0

    @functools.cached_property
    def places(self):
        """Places of the pieces by their first bytes."""
        found = collections.defaultdict(list)
        for place, piece in enumerate(self.pieces):
            found[self.truth.of(piece)[:FIRST_BYTES].tobytes()].append(place)
        return found

    def place_of(self, content):
        """Return the piece that content is, by its bytes, or the first one."""
        alike = self.places.get(bytes(memoryview(content)[:FIRST_BYTES]), [0])
        return next((place for place in alike if place not in self.seen), alike[0])

    def take(self, place, content):
        got = content.cpu().numpy() if isinstance(content, torch.Tensor) else np.frombuffer(content, np.uint8)
        with self.lock:
            place = self.place_of(got) if place is None else place
            piece = self.pieces[place]
            expected = self.truth.of(piece)
            if place in self.seen:
                raise ValueError(f"{piece} came twice")
            self.seen.add(place)
            self.bytes += piece.length
        if len(got) != piece.length:
            raise ValueError(f"{piece}: {len(got):,} bytes came")
        if not np.array_equal(got, expected):
            wrong = np.flatnonzero(got != expected)
            raise ValueError(f"{piece}: {len(wrong):,} bytes are wrong, the first at {piece.offset + int(wrong[0]):,}")

    def end(self):
        if len(self.seen) < len(self.pieces):
            raise ValueError(f"{len(self.seen)} pieces came, {len(self.pieces)} were due")

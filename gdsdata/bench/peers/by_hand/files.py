"""The system's own calls: rows of case=load, latency, tensor and io."""

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from gdsdata.bench.data.pieces import read_exactly
from gdsdata.bench.data.transfers import new_file
from gdsdata.bench.measure import device, limits
from gdsdata.bench.measure.system import PAGE
from gdsdata.bench.peers.protocols import WHOLE, LoadPeer, TensorPeer, TransferPeer, replaced

RING_SLOTS, SLOT_BYTES = 4, 16 * 2**20


class Readinto(LoadPeer, serves="load"):
    key, name = "readinto", "Python readinto"
    setting = "by hand: readinto the tensor; to a GPU by way of 4 pinned buffers of 16 MiB, used again"
    path = "read"
    threads = 1

    def load(self):
        target = self.buffer()
        self.fill(target, 0)
        return {WHOLE: target}

    def fill(self, target, begin):
        """Fill a tensor with the data bytes from `begin` on."""
        share = -(-len(target) // self.threads)
        share += -share % PAGE
        with ThreadPoolExecutor(self.threads) as threads:
            list(threads.map(self.read, target.split(share), range(begin, begin + len(target), share)))

    def read(self, target, begin):
        """Fill a part of the tensor; to a GPU by copies that it does not wait for."""
        with open(self.source.path, "rb", buffering=0) as file:
            file.seek(self.source.start + begin)
            if not self.on_gpu:
                read_exactly(file, target)
                return
            slots = device.PinnedSlots(self.device, SLOT_BYTES, torch.uint8, RING_SLOTS)
            for part in target.split(SLOT_BYTES):
                piece = slots.next()[: len(part)]
                read_exactly(file, piece)
                slots.send_to(part, piece)
            slots.wait()


class ReadintoThreads(Readinto, serves="load"):
    key, name = "readinto_threads", "Python readinto, threads"
    setting = "the same by as many threads as there are cores, 8 at most, each with its part of the file"
    threads = min(8, len(os.sched_getaffinity(0)))


class Python(TensorPeer, serves="latency tensor"):
    """open, readinto into a new tensor; open, write, fsync."""

    key, name = "python", "Python"
    setting = "open and readinto into a new tensor; open, write, fsync (replaced: rename and fsync of the folder too)"
    flags = 0

    def open(self):
        # Bytes go through it to and from a GPU. It is kept, as a program would that knows its cost.
        self.pinned = device.pinned(self.tensor_bytes, torch.uint8) if self.on_gpu else None

    def read(self):
        host = self.empty() if self.pinned is None else self.pinned
        with open(self.file, "rb", buffering=0) as file:
            read_exactly(file, host)
        return host if self.pinned is None else device.send(host, self.device)

    def write(self, tensor):
        self.store(memoryview(self.on_host(tensor).numpy()))

    def on_host(self, tensor):
        return tensor if self.pinned is None else self.pinned.copy_(tensor)

    def store(self, view):
        if self.state == "in_place":
            self.put(self.file, os.O_WRONLY, view)
            return
        with replaced(self.file) as temporary:
            self.put(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, view)

    def put(self, path, flags, view):
        fd, done = os.open(path, flags | self.flags, 0o644), 0
        try:
            while done < len(view):
                done += os.write(fd, view[done:])
            os.fsync(fd)
        finally:
            os.close(fd)


class PythonDirect(Python, serves="latency tensor"):
    """Goes past the page cache, by way of aligned memory that is kept."""

    key, name = "python_direct", "Python, O_DIRECT"
    setting = "the same with O_DIRECT, and one read or write call by way of aligned memory that is kept"
    path = "O_DIRECT"
    caches = ("cold", "replaced", "in_place")
    direct = True
    flags = os.O_DIRECT

    def open(self):
        super().open()
        if self.pinned is not None and self.tensor_bytes % PAGE == 0:  # which begins at a page
            self.memory, self.aligned = self.pinned.numpy(), self.pinned
        else:
            self.memory = limits.huge_pages(-(-self.tensor_bytes // PAGE) * PAGE)
            self.aligned = torch.from_numpy(self.memory)[: self.tensor_bytes]

    @classmethod
    def can(cls, work, state, tensor_bytes):
        # Writes must end at a page too; a read may ask for more than there is.
        return super().can(work, state, tensor_bytes) and (work == "read" or tensor_bytes % PAGE == 0)

    def read(self):
        fd, done = os.open(self.file, os.O_RDONLY | os.O_DIRECT), 0
        try:
            while done < self.tensor_bytes:
                got = os.preadv(fd, [memoryview(self.memory)[done:]], done)
                if not got:
                    raise EOFError(f"{self.file}: {self.tensor_bytes - done} bytes are missing at its end")
                done += got
        finally:
            os.close(fd)
        return self.aligned if self.pinned is None else device.send(self.aligned, self.device)

    def on_host(self, tensor):
        return self.aligned.copy_(tensor)


class Plain(TransferPeer, serves="io"):
    """To and from a GPU each thread has a stream of its own."""

    key, name, xfer = "pread", "plain threads", "any"
    setting = "os.preadv, os.pwritev (O_DIRECT, but for the page cache) and one fsync; to a GPU by pinned memory"

    def open(self):
        flags, self.path = (0, "page cache") if self.work.cache == "warm" else (os.O_DIRECT, "O_DIRECT")
        open_file = self.open_to_write if self.work.writes else self.open_to_read
        try:
            self.fd = open_file(flags)
        except OSError:
            if not flags:
                raise
            self.fd, self.path = open_file(0), "buffered (O_DIRECT refused)"
        self.host = self.memory.tensor
        if self.on_gpu:
            self.host = device.pinned(self.memory.tensor.shape, torch.uint8)
            self.streams = [torch.cuda.Stream(torch.device(self.device)) for _ in self.shares()]
        self.view = memoryview(self.host.numpy())

    def open_to_read(self, flags):
        return os.open(self.work.path, os.O_RDONLY | flags)

    def open_to_write(self, flags):
        return new_file(self.work.path, self.work.file_bytes, flags)

    def copy(self, place, target, source):
        """Copy behind the earlier work of the current stream."""
        stream, part = self.streams[place], self.memory.range(place)
        stream.wait_stream(torch.cuda.current_stream(torch.device(self.device)))
        with torch.cuda.stream(stream):
            target[part].copy_(source[part], non_blocking=True)
        stream.synchronize()

    def move(self, place, offsets):
        part, offset = self.view[self.memory.range(place)], int(offsets[0])
        if self.work.writes:
            if self.on_gpu:
                self.copy(place, self.host, self.memory.tensor)
            moved = os.pwritev(self.fd, [part], offset)
        else:
            moved = os.preadv(self.fd, [part], offset)
            if self.on_gpu:
                self.copy(place, self.memory.tensor, self.host)
        if moved != len(part):
            raise OSError(f"{self.work.path}: {moved:,} of {len(part):,} bytes were moved at offset {offset:,}")

    def commit(self):
        if self.work.writes:
            os.fsync(self.fd)

    def close(self):
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.view, self.host = -1, memoryview(b""), None

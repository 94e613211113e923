"""case=latency: one whole tensor read from a file, or written to one, again and again; by size, beside plain Python.

Each size of each kind of work is a source of its own, with its tables:

    read   warm: the file is in the page cache; cold: its pages are dropped before each read
    write  until the bytes are on storage. replaced: a new file takes the old one's name; in_place:
        over a file's bytes

Only reads and writes themselves are timed, and only their CPU time is counted: not the dropping of
pages before them and the comparing of bytes behind them. engine.workers, queue_depth, segment_bytes
and direct set how the engine works.
"""

import collections
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gdsdata.bench import case, data, device, intervals, latency_peers, limits, measure, row
from gdsdata.bench.own_folder import OwnFolder
from gdsdata.bench.pieces import add_one, random_bytes, wrong_in_file, wrong_in_tensor

FOLDER = "latency"  # within data.folder
LEAST_ITERATIONS = 5  # of a run, however long they take
REQUEST_BYTES, MOST_DEPTH = 2**20, 32  # of the O_DIRECT reads and writes that are measured as a limit
TOUCHED_BYTES = 64 * 2**20  # and twice the tensor


@dataclass
class TensorFile:
    """One tensor's file, and what is done with it."""

    work: str
    tensor_bytes: int
    path: str

    @property
    def kind(self):
        return f"{self.work} {measure.size_text(self.tensor_bytes)}"

    @property
    def files(self):
        return [self.path]

    @property
    def file_bytes(self):
        return self.tensor_bytes


class Latency(case.Case):
    folder_name, peers = FOLDER, latency_peers

    def measure(self):
        settings = self.settings.data
        folder = Path(settings.folder).expanduser() if settings.folder else data.default_folder()
        folder.mkdir(parents=True, exist_ok=True)
        self.latencies = collections.defaultdict(list)  # seconds, by row
        with OwnFolder(folder / self.folder_name) as own:
            self.own = own
            results = super().measure()
        if own.strangers:
            results["notes"].append(f"{own.path} stays: others put {', '.join(own.strangers)} there meanwhile.")
        return results

    def sources(self):
        for work in self.case.work:
            for size in sorted(set(self.case.sizes_bytes)):
                data.need_space(self.own.path, f"case.sizes_bytes=[{size}]", 3 * size, "case.sizes_bytes=")
                source = TensorFile(work, size, str(self.own.path / f"tensor-{work}-{size}.bin"))
                data.write_synced(source.path, random_bytes(size, self.case.seed).numpy())
                yield source
                Path(source.path).unlink(missing_ok=True)

    def about(self, source):
        system, disk = measure.file_system(source.path)
        return {
            "summary": f"a file of {source.tensor_bytes:,} random bytes",
            "work": source.work,
            "tensor_bytes": source.tensor_bytes,
            "first_file": source.path,
            "file_system": system,
            "device": disk,
        }

    def caches(self, source):
        return super().caches(source) if source.work == "read" else self.case.writes

    def dtypes(self, source, cache):
        return ["uint8"]

    def rows_for(self, source, cache):
        refused = limits.direct_alignment(source.path) is None
        rows = [peer for peer in self.peers.ROWS if peer.can(source.work, cache, source.tensor_bytes)]
        left_out = [peer.key for peer in rows if refused and peer.direct]
        if left_out:
            self.notes.append(f"Left out, for the file system refuses O_DIRECT: {', '.join(left_out)}.")
        return [peer for peer in rows if peer.key not in left_out]

    def find(self, key):
        return self.peers.find(key)

    def load_command(self, source):
        return {
            "work": source.work,
            "path": source.path,
            "tensor_bytes": source.tensor_bytes,
            "seed": self.case.seed,
            "engine": self.settings.engine,
        }

    def verify_command(self, row):
        states = self.case.cache if row.table.source.work == "read" else self.case.writes
        return {"states": list(states)}

    def touched_bytes(self, source):
        return TOUCHED_BYTES + 2 * source.tensor_bytes

    def run(self, row):
        source, state = row.table.source, row.table.cache
        if state == "warm":
            self.warmed(source)
        found = row.process.run(state=state, **self.iterations())
        latencies = found.pop("latencies_s")
        self.latencies[row] += latencies
        return found | {"latency_s": intervals.described(latencies)}

    def iterations(self):
        """What a run is told of them."""
        return {name: getattr(self.case, name) for name in ("iterations", "warm_up", "run_seconds", "verify")}

    def summary(self, row):
        size, latencies = row.table.source.tensor_bytes, self.latencies[row]
        return row.summary() | {
            "work": row.table.source.work,
            "tensor_bytes": size,
            "latency_s": intervals.described(latencies) if latencies else None,
            "bandwidth_gb_per_s": intervals.described([size / one / 1e9 for one in latencies]) if latencies else None,
        }

    def take_limits(self, table, seconds):
        """Of a file of the tensor's size: the disk is asked as a reader or a writer does that leaves nothing out."""
        source, state = table.source, table.cache
        if state == "warm":
            return super().take_limits(table, seconds)
        whole = source.tensor_bytes // measure.PAGE * measure.PAGE
        if not whole:
            return {"direct": {"unavailable": f"{source.tensor_bytes} bytes are less than a page"}}
        request = min(whole, REQUEST_BYTES)
        depth = min(whole // request, MOST_DEPTH)
        verb = source.work + (" in place" if state == "in_place" else "")
        name = f"O_DIRECT {verb}, {request >> 10:,} KiB x {depth}"
        measured = limits.measured(name, lambda: self.direct(source, state, request, depth, seconds))
        return {"direct": measured if "unavailable" in measured else measured | {"request_bytes": request}}

    def direct(self, source, state, request, depth, seconds):
        if source.work == "read":
            measure.drop(source.files)  # what was written to verify is still on its way out
            return limits.direct_io(source.files, limits.sequential_requests(source.files, request), depth, seconds)
        found, ends = [], time.perf_counter() + seconds
        while not found or time.perf_counter() < ends:
            if state == "in_place":
                # Within the tensor, and the file's size as it is: who comes next would pay for a
                # change of that.
                offsets = np.arange(source.tensor_bytes // request) * request
                places = np.zeros(len(offsets), np.int64), offsets, np.full(len(offsets), request, np.uint64)
                found.append(limits.direct_io(source.files, lambda _, places=places: places, depth, write=True))
            else:
                found.append(limits.durable_write(self.own.path, source.tensor_bytes, request, depth))
        return sorted(found, key=lambda one: one["gb_per_s"])[len(found) // 2]

    def limit_for(self, table, found):
        if table.cache == "warm":
            return limits.warm_limit(found)
        direct = found["direct"]
        if "unavailable" in direct:
            return None, direct["unavailable"]
        synced = ", synced" if table.source.work == "write" else ""
        request, depth = int(direct["request_bytes"]) >> 10, int(direct["depth"])
        return direct["gb_per_s"], f"O_DIRECT {table.source.work}, {request:,} KiB x {depth}{synced}"


# ------------------------------------------------------------------------------------------------ in the row's process


class LatencyRow(row.Row):
    """`tensor` is what is written. With `verify` its bytes, and the file's, are other ones at each iteration."""

    peers = latency_peers
    torch_threads = 1  # those that compared bytes would still spin while the next call is timed

    def __init__(self, peer, work, path, tensor_bytes, seed, engine, device):
        super().__init__(peer, self.peers.find(peer), device)
        if self.torch_threads:
            torch.set_num_threads(self.torch_threads)
        self.work, self.path, self.tensor_bytes = work, path, tensor_bytes
        self.seed, self.engine = seed, engine
        self.tensor = self.expected = None

    def prepare(self, touched_bytes):
        """Torch keeps its device memory: no row is timed for getting it from the driver."""
        self.tensor = self.expected = None
        super().prepare(touched_bytes, release=False)

    def get_ready(self, state, check):
        """The file as the state wants it, the peer, and the bytes: all before the clock."""
        self.state, self.check = state, check
        if self.work == "write":
            # What lies behind the tensor in a file is why a write goes over its bytes, and not to a
            # file of its own.
            os.truncate(self.path, self.tensor_bytes + (measure.PAGE if state == "in_place" else 0))
        if self.expected is None and (check or self.work == "write"):
            self.expected = random_bytes(self.tensor_bytes, self.seed)
        if self.work == "write":
            self.tensor = self.expected.to(self.device, copy=True)
        self.peer = self.peer_class(self.path, self.tensor_bytes, state, self.device, self.engine)
        self.resident, self.cpu_used = [], 0.0

    def close(self):
        self.close_peer()
        self.expected = None

    def close_peer(self):
        super().close()
        self.tensor = None

    def verify(self, states):
        """One read or write in each state, every byte compared with plain reading, and one more of other bytes."""
        checked = 0
        try:
            for state in states:
                if self.peer_class.can(self.work, state, self.tensor_bytes):
                    self.get_ready(state, check=True)
                    for _ in range(2):
                        self.once()
                        checked += self.tensor_bytes
                    self.close_peer()
        finally:
            self.close()
        return {"checked_bytes": checked}

    def run(self, state, iterations, warm_up, run_seconds, verify):
        self.start_cpu_clock()
        self.get_ready(state, verify)
        for _ in range(warm_up):
            self.once()
        self.cpu_used, self.resident = 0.0, []
        served_before, latencies = self.peer.served(), []
        ends = time.perf_counter() + run_seconds
        while len(latencies) < iterations and (len(latencies) < LEAST_ITERATIONS or time.perf_counter() < ends):
            latencies.append(self.once())
        return {
            "bytes": self.tensor_bytes * len(latencies),
            "seconds": sum(latencies),
            "latencies_s": latencies,
            "resident_before": max(self.resident, default=None),
            "served": {path: count - served_before.get(path, 0) for path, count in self.peer.served().items()},
            "path": self.peer.way or self.work,
        }

    def after(self):
        everything = super().after()["cpu_seconds"]
        return {"cpu_seconds": self.cpu_used, "untimed_cpu_seconds": max(0.0, everything - self.cpu_used)}

    def once(self):
        """Seconds of one read or write, until the device or the storage has all of it."""
        if self.check:
            self.change()
        if self.work == "read":
            drop_or_look = measure.drop if self.state == "cold" else measure.resident_share
            self.resident.append(drop_or_look([self.path]))
        device.synchronize(self.device)
        cpu_before, started = measure.cpu_seconds(), time.perf_counter()
        came = self.peer.read() if self.work == "read" else self.peer.write(self.tensor)
        device.synchronize(self.device)
        elapsed = time.perf_counter() - started
        self.cpu_used += measure.cpu_seconds() - cpu_before
        if self.check:
            self.compare(came)
        return elapsed

    def change(self):
        """Other bytes than before, in all places: those of an earlier iteration must not pass for new ones."""
        add_one(self.expected, None if self.work == "write" else self.path)
        if self.work == "write":
            self.tensor.add_(1)

    def compare(self, came):
        if self.work == "write":
            self.check_file_size()
            wrong, first = wrong_in_file(self.path, self.expected)
            measure.drop([self.path])  # the next write must not find its pages in memory because it was looked at
        else:
            self.check_size(came)
            wrong, first = wrong_in_tensor(came, self.expected)
        if wrong:
            raise ValueError(
                f"{self.state}: {wrong:,} of {self.tensor_bytes:,} bytes are wrong, the first at {first:,}"
            )

    def check_file_size(self):
        """And what lies behind the tensor."""
        with open(self.path, "rb", buffering=0) as file:
            size = os.path.getsize(self.path)
            if size < self.tensor_bytes and self.state != "in_place":
                raise ValueError(f"{self.state}: the file has {size:,} bytes, {self.tensor_bytes:,} were due")
            file.seek(self.tensor_bytes)
            tail = file.read()
        if any(tail) or len(tail) != (measure.PAGE if self.state == "in_place" else 0):
            raise ValueError(f"{self.state}: {len(tail)} bytes lie behind the tensor, and not as they lay there")

    def check_size(self, came):
        wanted = torch.device(self.device)
        if came.nbytes != self.tensor_bytes or came.device.type != wanted.type:
            raise ValueError(
                f"{self.state}: {came.nbytes:,} bytes came on {came.device}, {self.tensor_bytes:,} were due on {wanted}"
            )

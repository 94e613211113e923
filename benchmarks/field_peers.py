"""The rows of benchmarks/fields.py: GDSDataset, hand-written loops and other projects' loaders.

Each loader is set up as its guide says. A row is made once, in a process of its own. Then
`batches()` is called again and again: an endless run of shuffled epochs, until it is closed.

A batch has the form that a training loop can use and that costs the loader least: (values, offsets)
of a whole batch, a list of buffers, or (B, tokens). From worker processes a few tensors cost least,
because they travel in shared memory. Without workers it is the list.
"""

import itertools
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from gdsdata import GDSDataset
from gdsdata.bench.peers.torch_dataloader import as_it_is
from gdsdata.formats import LitData, Mds, Megatron, Tar

BATCH = 64
AHEAD = 4  # batches that a loop reads ahead: as many as GDSDataset does
SHUFFLE_BUFFER = 1000  # samples, for loaders that shuffle in a buffer; WebDataset's guide recommends it
MEGATRON_SEED = 1234


class Data(NamedTuple):
    """The files of one kind that a row reads, and how many samples they hold.

    Attributes:
        kind: tar, mds, litdata, files (one for each sample), or tokens.
        seq_len: tokens of a window, without the last one.
    """

    kind: str
    folder: Path
    samples: int
    seq_len: int = 0

    @property
    def files(self):
        return sorted(str(path) for path in self.folder.iterdir() if path.is_file() and path.name != "index.json")


def count_of(batch):
    """Count the samples of a batch."""
    if isinstance(batch, dict):
        return len(batch["tokens"])
    return len(batch[1]) - 1 if isinstance(batch, tuple) else len(batch)


def samples_of(batch):
    """Return a buffer of each sample's bytes, or of each window's tokens as int64."""
    if isinstance(batch, dict):  # Megatron's: the tokens that are fed, and those to be predicted
        batch = torch.cat([batch["tokens"], batch["labels"][:, -1:]], 1)
    if isinstance(batch, tuple):
        values, offsets = batch
        return [one.numpy() for one in values.split(offsets.diff().tolist())]
    return [np.ascontiguousarray(one) if isinstance(one, torch.Tensor) else one for one in batch]


def joined(samples):
    """Return (values, offsets) of buffers."""
    values = torch.from_numpy(np.concatenate([np.frombuffer(one, np.uint8) for one in samples]))
    return values, torch.tensor([0, *map(len, samples)]).cumsum(0)


def joined_columns(samples):
    return joined([one["jpg"] for one in samples])


def columns(samples):
    return [one["jpg"] for one in samples]


def shuffled_batches(count):
    """Yield lists of ids without end, each epoch in a new order."""
    for epoch in itertools.count():
        order = np.random.default_rng(epoch).permutation(count)
        yield from (order[first : first + BATCH] for first in range(0, count, BATCH))


class Row:
    name = ""
    package = ""  # what pip installs
    workers = 0  # processes

    def __init__(self, data):
        self.data = data
        self.open()

    def batches(self):
        while True:
            yield from self.epoch()

    def served(self):
        """Return {path: bytes}, if the loader counts them."""
        return {}

    def loader(self, dataset, maker=DataLoader, **arguments):
        """Make a DataLoader whose workers stay from epoch to epoch."""
        return maker(dataset, num_workers=self.workers, persistent_workers=self.workers > 0, **arguments)


def with_workers(row, counts):
    """Return the row once for each number of worker processes."""
    names = {0: "no workers", 1: "1 worker", 2: "2 workers"}
    return [type(row.__name__, (row,), {"workers": n, "name": f"{row.name}, {names[n]}"}) for n in counts]


# ---------------------------------------------------------------------------------------------------------- gdsdata


class Ours(Row):
    name = "gdsdata"

    def open(self):
        kind = self.data.kind
        if kind == "tokens":
            made = Megatron(self.data.seq_len)
        else:
            made = {"tar": Tar(index_cache=None), "mds": Mds(), "litdata": LitData()}[kind]
        self.dataset = GDSDataset(self.data.folder, BATCH, made, device="cpu")

    def epoch(self):
        if self.data.kind == "tokens":
            return self.dataset
        return ((batch["jpg"].values, batch["jpg"].offsets) for batch in self.dataset)

    def served(self):
        return {path: count for path, count in self.dataset.stats()["bytes"].items() if count}


class OursAsMegatron(Ours):
    name = "gdsdata, in Megatron's order"

    def open(self):
        windows = Megatron(self.data.seq_len, seed=MEGATRON_SEED)
        self.dataset = GDSDataset(self.data.folder, BATCH, windows, shuffle=False, device="cpu")


# ---------------------------------------------------------------------------------------------------------- by hand


class Pread(Row):
    """A loop by hand: a permutation, and one read a sample into a batch that exists."""

    name = "pread loop"

    def open(self):
        made = {"tar": Tar(index_cache=None), "mds": Mds(), "litdata": LitData()}[self.data.kind]
        self.index = made.index(sorted(map(str, self.data.folder.iterdir())))
        self.descriptors = [os.open(path, os.O_RDONLY) for path in self.index.paths]

    def read(self, ids):
        plan = self.index.plan(ids)  # plan of one field
        offsets = np.cumsum([0, *plan.length])
        values = torch.empty(int(offsets[-1]), dtype=torch.uint8)
        view = memoryview(values.numpy())
        places = plan.source.tolist(), plan.offset.tolist(), offsets[:-1].tolist(), offsets[1:].tolist()
        for file, begin, at, end in zip(*places, strict=True):
            os.preadv(self.descriptors[file], [view[at:end]], begin)
        return values, torch.from_numpy(offsets)

    def batches(self):
        for ids in shuffled_batches(self.data.samples):
            yield self.read(ids)


class PreadAhead(Pread):
    name = "pread loop, 2 threads ahead"

    def batches(self):
        orders = shuffled_batches(self.data.samples)
        with ThreadPoolExecutor(2) as threads:
            flying = deque(threads.submit(self.read, next(orders)) for _ in range(AHEAD))
            while True:
                batch = flying.popleft().result()
                flying.append(threads.submit(self.read, next(orders)))
                yield batch


class Files(Dataset):
    """Files of one sample each, read straight into their place in the batch."""

    def __init__(self, files):
        self.files, self.sizes = files, np.array([os.path.getsize(path) for path in files])

    def __len__(self):
        return len(self.files)

    def __getitems__(self, ids):
        offsets = np.cumsum([0, *self.sizes[ids]])
        values = np.empty(offsets[-1], np.uint8)
        for i, begin, end in zip(ids, offsets[:-1], offsets[1:], strict=True):
            with open(self.files[i], "rb", buffering=0) as file:
                file.readinto(values[begin:end])
        return torch.from_numpy(values), torch.from_numpy(offsets)


class FilesLoader(Row):
    name = "DataLoader over files"

    def open(self):
        self.made = self.loader(Files(self.data.files), batch_size=BATCH, shuffle=True, collate_fn=as_it_is)

    def epoch(self):
        return self.made


# --------------------------------------------------------------------------------------------------- other projects


class WebDataset(Row):
    name, package = "WebDataset", "webdataset"

    def open(self):
        import webdataset

        shards = webdataset.WebDataset(self.data.files, shardshuffle=len(self.data.files), empty_check=False)
        collate = joined_columns if self.workers else columns
        self.made = shards.shuffle(SHUFFLE_BUFFER).batched(BATCH, collation_fn=collate)
        if self.workers:
            self.made = self.loader(self.made, webdataset.WebLoader, batch_size=None, collate_fn=as_it_is)

    def epoch(self):
        return self.made


class Mosaic(Row):
    """MosaicML's data set, which knows its batch size, with MosaicML's loader."""

    name, package, order = "MosaicML Streaming, py1e", "mosaicml-streaming", "py1e"

    def open(self):
        import streaming

        streaming.base.util.clean_stale_shared_memory()
        # Two of its data sets may not share a folder, so each process has a folder of links.
        self.folder = self.data.folder / "cache" / str(os.getpid())
        self.folder.mkdir(parents=True)
        for path in (*self.data.files, self.data.folder / "index.json"):
            os.link(path, self.folder / Path(path).name)
        dataset = streaming.StreamingDataset(
            local=str(self.folder), shuffle=True, shuffle_algo=self.order, batch_size=BATCH
        )
        collate = joined_columns if self.workers else columns
        self.made = self.loader(dataset, streaming.StreamingDataLoader, batch_size=BATCH, collate_fn=collate)

    def epoch(self):
        return self.made


class MosaicPy1s(Mosaic):
    name, order = "MosaicML Streaming, py1s", "py1s"


class Lit(Row):
    name, package = "LitData", "litdata"

    def open(self):
        import litdata

        dataset = litdata.StreamingDataset(str(self.data.folder), shuffle=True)
        collate = joined_columns if self.workers else columns
        self.made = self.loader(dataset, litdata.StreamingDataLoader, batch_size=BATCH, collate_fn=collate)

    def epoch(self):
        return self.made


class Spdl(Row):
    """Threads that each read a whole batch, to take fewer turns of the event loop."""

    name, package = "SPDL over files, 2 threads", "spdl"
    threads = 2

    def open(self):
        import spdl.pipeline

        self.spdl, self.files = spdl.pipeline, Files(self.data.files)

    def batches(self):
        builder = self.spdl.PipelineBuilder().add_source(shuffled_batches(len(self.files)))
        read = builder.pipe(self.files.__getitems__, concurrency=self.threads).add_sink(AHEAD)
        pipeline = read.build(num_threads=self.threads)
        with pipeline.auto_stop():
            yield from pipeline


class Dali(Row):
    """DALI's reader of tar shards, which shuffles in a buffer. A batch lasts until the next one."""

    name, package = "DALI readers.webdataset, read", "nvidia-dali-cuda130"
    maps = False

    def open(self):
        from nvidia.dali import fn, pipeline_def

        @pipeline_def(batch_size=BATCH, num_threads=2, device_id=None, prefetch_queue_depth=AHEAD)
        def samples():
            return fn.readers.webdataset(
                paths=self.data.files,
                ext=["jpg"],
                random_shuffle=True,
                initial_fill=SHUFFLE_BUFFER,
                dont_use_mmap=not self.maps,
            )

        self.pipeline = samples()
        self.pipeline.build()

    def batches(self):
        while True:
            (batch,) = self.pipeline.run()
            yield DaliBatch(batch)


class DaliMapped(Dali):
    """The upper limit for loaders that read: its samples are views of mapped files."""

    name, maps = "DALI readers.webdataset, mapped (moves no bytes)", True


class DaliBatch(list):
    """Samples that become arrays when they are looked at."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return len(self.batch)

    def __iter__(self):
        return (np.array(self.batch.at(place)) for place in range(len(self.batch)))


class MegatronTokenizer:
    """The part of a tokenizer that GPTDataset asks for."""

    vocab_size, eod, pad = 50_000, 0, -1
    unique_identifiers = {"class": "none"}


class MegatronGpt(Row):
    """GPTDataset as Megatron's pretraining uses it: it shuffles when it is made."""

    name, package = "Megatron GPTDataset, DataLoader", "megatron-core"

    def open(self):
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split

        prefix = str(self.data.folder / "tokens")
        config = GPTDatasetConfig(
            random_seed=MEGATRON_SEED,
            sequence_length=self.data.seq_len,
            blend=([prefix], None),
            split="1",
            tokenizer=MegatronTokenizer(),
            path_to_cache=str(self.data.folder / "cache" / str(os.getpid())),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            allow_ambiguous_pad_tokens=True,
        )
        stored = IndexedDataset(prefix)
        documents = np.arange(len(stored), dtype=np.int32)
        windows = GPTDataset(stored, prefix, documents, None, Split.train, config)
        self.made = self.loader(windows, batch_size=BATCH)

    def epoch(self):
        return self.made


class MegatronIndexed(Row):
    """IndexedDataset alone: random windows, each within one document, stacked."""

    name, package = "Megatron IndexedDataset.get", "megatron-core"

    def open(self):
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self.stored = IndexedDataset(str(self.data.folder / "tokens"))
        self.places = inner_windows(self.stored.sequence_lengths, self.data.seq_len)

    def batches(self):
        get, length = self.stored.get, self.data.seq_len + 1
        for ids in shuffled_batches(len(self.places)):
            windows = [get(document, begin, length) for document, begin in self.places[ids].tolist()]
            yield torch.from_numpy(np.stack(windows).astype(np.int64))


def inner_windows(lengths, seq_len):
    """Return int64 (n, 2): document and first token of windows that lie within one document."""
    places = [(i, at) for i, n in enumerate(lengths.tolist()) for at in range(0, n - seq_len, seq_len)]
    return np.array(places, np.int64)


ROWS = {
    "tar": [Ours, Pread, PreadAhead, *with_workers(WebDataset, (0, 1, 2)), Dali, DaliMapped],
    "mds": [Ours, Pread, *with_workers(Mosaic, (0, 1, 2)), *with_workers(MosaicPy1s, (0, 2))],
    "litdata": [Ours, Pread, *with_workers(Lit, (0, 1, 2))],
    "files": [*with_workers(FilesLoader, (0, 1, 2)), Spdl],
    "tokens": [Ours, OursAsMegatron, MegatronIndexed, *with_workers(MegatronGpt, (0, 2))],
}

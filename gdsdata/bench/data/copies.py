"""Volumes in other formats, each written by the library that reads it."""

import contextlib
import dataclasses
import hashlib
import io
import os

import numpy as np

from gdsdata.bench.data import images
from gdsdata.bench.data.made import keep

SHARD_BYTES = 64 * 2**20
FIELD = "x"  # of a sample
PAGE_BYTES = 8 * 2**20  # of FFCV, at least; a sample has to fit into one


def write_tar(target, source, progress, shards=images.SHARDS):
    """WebDataset's: a sample is a member, a .npy file."""

    def content(index):
        stream = io.BytesIO()
        np.save(stream, np.ascontiguousarray(np.load(source.files[index])))
        return stream.getvalue()

    images.write_shards(target, source.samples, content, "npy", lambda index: progress(source.sample_bytes), shards)


def samples_of(source, shards):
    """Return how many samples each of so many shards has."""
    return -(-source.samples // shards)


def write_mds(target, source, progress, shards=None):
    """MosaicML Streaming's."""
    import streaming

    encoding = f"ndarray:{np.dtype(source.dtype).name}:{','.join(map(str, source.shape))}"
    limit = (samples_of(source, shards) + 0.5) * source.sample_bytes if shards else SHARD_BYTES
    with streaming.MDSWriter(out=str(target), columns={FIELD: encoding}, size_limit=int(limit)) as writer:
        for file in source.files:
            writer.write({FIELD: np.load(file)})
            progress(source.sample_bytes)


def write_litdata(target, source, progress, shards=None):
    """LitData's, as its `optimize` writes them."""
    from litdata.streaming.writer import BinaryWriter

    target.mkdir()
    size = {"chunk_size": samples_of(source, shards)} if shards else {"chunk_bytes": SHARD_BYTES}
    writer = BinaryWriter(str(target), **size)
    for index, file in enumerate(source.files):
        writer[index] = {FIELD: np.load(file)}
        progress(source.sample_bytes)
    writer.done()
    writer.merge()


class Tuples:
    """A sample as FFCV's writer wants it, which asks for it in a process of its own."""

    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return (np.load(self.files[index]),)


def write_beton(target, source, progress):
    """FFCV's."""
    from ffcv.fields import NDArrayField
    from ffcv.writer import DatasetWriter

    target.mkdir()
    fields = {FIELD: NDArrayField(np.dtype(source.dtype), tuple(source.shape))}
    page_bytes = max(PAGE_BYTES, 1 << source.sample_bytes.bit_length())
    writer = DatasetWriter(str(target / "volumes.beton"), fields, page_size=page_bytes, num_workers=1)
    with contextlib.redirect_stderr(io.StringIO()):  # it draws a bar
        writer.from_indexed_dataset(Tuples(source.files))
    progress(source.samples * source.sample_bytes)


WRITERS = {"tar": write_tar, "mds": write_mds, "litdata": write_litdata, "beton": write_beton}


def copied(source, kind, folder, progress=lambda count: None, **shards):
    """Return the same volumes in another format, from `folder` or made there.

    Args:
        shards: `shards=` is how many there are; without it, as many as suit the format.
    """
    digest = hashlib.sha256()
    for file in source.files:
        status = os.stat(file)
        digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    name = "-".join([kind, "of", digest.hexdigest()[:16], *map(str, shards.values())])
    parameters = {"kind": kind, "of": digest.hexdigest(), **shards}
    size_bytes = source.samples * source.sample_bytes
    made = keep(folder, name, parameters, size_bytes, lambda target: WRITERS[kind](target, source, progress, **shards))
    files = sorted(str(path.resolve()) for path in made.iterdir())
    origin = f"{source.origin}, as {kind}: {made}"
    file_bytes = sum(map(os.path.getsize, files))
    return dataclasses.replace(source, kind=kind, files=files, headers=[], file_bytes=file_bytes, origin=origin)

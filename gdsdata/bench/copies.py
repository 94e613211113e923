"""Volumes once more, in the files of loaders that read no others; each written by the library that reads it."""

import contextlib
import dataclasses
import hashlib
import io
import os
from pathlib import Path

import numpy as np

from gdsdata.bench import data, image_shards
from gdsdata.bench.process import RowFailed

SHARD_BYTES = 64 * 2**20
FIELD = "x"  # of a sample
PAGE_BYTES = 8 * 2**20  # of FFCV, at least; a sample has to fit into one


def write_tar(target, source, progress):
    """WebDataset's: a sample is a member, a .npy file."""
    target.mkdir()

    def content(index):
        stream = io.BytesIO()
        np.save(stream, np.ascontiguousarray(np.load(source.files[index])))
        return stream.getvalue()

    image_shards.write_shards(target, source.samples, content, "npy", lambda index: progress(source.sample_bytes))


def write_mds(target, source, progress):
    """MosaicML Streaming's."""
    import streaming

    encoding = f"ndarray:{np.dtype(source.dtype).name}:{','.join(map(str, source.shape))}"
    with streaming.MDSWriter(out=str(target), columns={FIELD: encoding}, size_limit=SHARD_BYTES) as writer:
        for file in source.files:
            writer.write({FIELD: np.load(file)})
            progress(source.sample_bytes)


def write_litdata(target, source, progress):
    """LitData's, as its `optimize` writes them."""
    from litdata.streaming.writer import BinaryWriter

    target.mkdir()
    writer = BinaryWriter(str(target), chunk_bytes=SHARD_BYTES)
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


def copied(source, kind, folder, progress=lambda count: None):
    """The Source of the same volumes in another format, made in `folder` unless they are there."""
    digest = hashlib.sha256()
    for file in source.files:
        status = os.stat(file)
        digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    name = f"{kind}-of-{digest.hexdigest()[:16]}"
    parameters = {"maker": data.MAKER, "kind": kind, "of": digest.hexdigest()}
    size_bytes = source.samples * source.sample_bytes
    made = data.keep(folder, name, parameters, size_bytes, lambda target: WRITERS[kind](target, source, progress))
    files = sorted(str(path.resolve()) for path in made.iterdir())
    origin = f"{source.origin}, as {kind}: {made}"
    file_bytes = sum(map(os.path.getsize, files))
    return dataclasses.replace(source, kind=kind, files=files, headers=[], file_bytes=file_bytes, origin=origin)


def stored_as(peer):
    """The format that the row's class reads; "" for the data as it is."""
    return getattr(peer, "stored_as", "")


class Copying:
    """Comes before `case.Case`, whose sources are, or have, a Source: makes the copies that its rows read."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.copies = {}  # Source by format

    def missing(self, peer):
        if stored_as(peer) and self.settings.data.path and peer.key not in self.case.rows:
            return f"it reads copies of your files, as {stored_as(peer)}, which are made if case.rows names it"
        return super().missing(peer)

    def copy_for(self, source, key):
        """The format that the row of that key reads; yours, which only its own process may import, reads the data."""
        classes = {peer.key: peer for peer in self.rows_for(source, "warm")}
        return stored_as(classes.get(key))

    def start(self, source, names):
        original = getattr(source, "source", source)
        folder = Path(self.settings.data.folder or data.default_folder()).expanduser()
        kind_of = {name: kind for name in names if (kind := self.copy_for(source, name))}
        total = original.samples * original.sample_bytes
        self.copies, failures = {}, {}
        for kind in sorted(set(kind_of.values())):
            with self.progress.bytes(f"data: {source.kind} as {kind}", total) as advance:
                try:
                    self.copies[kind] = copied(original, kind, folder, advance)
                except Exception as error:  # of the library that writes it, which may be broken
                    told = f"volumes could not be written as {kind}: {type(error).__name__}: {error}"
                    failures[kind] = RowFailed(told)
        failed = {name: failures[kind] for name, kind in kind_of.items() if kind in failures}
        return super().start(source, names) | failed

    def read_by(self, row):
        """What has the files that the row reads."""
        return self.copies.get(self.copy_for(row.table.source, row.key), row.table.source)

    def copies_told(self):
        """For the row's process."""
        return {kind: copy.as_dict() for kind, copy in self.copies.items()}

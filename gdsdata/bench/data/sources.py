"""Files of batches, how samples lie in them, and what a batch must be."""

import dataclasses
import functools
import glob
import os
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gdsdata.bench.data.made import DataError, data_folder, make

LLMC_MAGIC, LLMC_HEADER_BYTES = 20240520, 1024  # karpathy/llm.c, dev/data/data_common.py: write_datafile


class CaseSource:
    """Files or objects of a case's rows. It is sent to their processes when they start.

    A class has `kind`, its name in tables, `files` and `summary()`.
    """

    @property
    def peer_kind(self: Any) -> str | None:
        """Return the kind of the peers that there are for it (`Peer.kinds`); None: all."""
        return self.kind

    @property
    def file_bytes(self: Any) -> int:
        return sum(map(os.path.getsize, self.files))

    def facts(self):
        """Return more fields of `data` in results.json."""
        return {}


@dataclass
class Source:
    """Files and how samples lie in them. Sample ids count through `files` in order.

    tokens: file i holds `counts[i]` windows of seq_len + 1 tokens at `stride`, from byte
    `headers[i]`. npy: file i is one sample of `shape`, from byte `headers[i]`.
    """

    kind: str
    files: list
    dtype: str
    shape: list
    stride: int
    headers: list
    counts: list
    file_bytes: int
    origin: str

    @functools.cached_property
    def first_ids(self):
        """The id of each file's first sample, and at the end the number of samples."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @property
    def samples(self):
        return sum(self.counts)

    @property
    def itemsize(self):
        return np.dtype(self.dtype).itemsize

    @property
    def torch_dtype(self):
        return getattr(torch, np.dtype(self.dtype).name)

    @property
    def sample_bytes(self):
        return int(np.prod(self.shape)) * self.itemsize

    def summary(self):
        what = f"windows of {self.shape[0]} {self.dtype} tokens at stride {self.stride}"
        if self.kind == "npy":
            what = f"volumes of {'x'.join(map(str, self.shape))} {np.dtype(self.dtype).name}"
        if self.kind == "images":
            what = f"JPEGs of {self.shape[1]}x{self.shape[2]} pixels in tars"
        size = f"{self.file_bytes / 2**20:,.0f} MiB in {len(self.files):,} file(s)"
        return f"{self.samples:,} {what}, {size}; {self.origin}"


@dataclass
class DataSet(CaseSource):
    """A Source in batches, and copies of it for rows that read no other format."""

    kind: str
    source: Source
    batch_size: int
    copies: dict = dataclasses.field(default_factory=dict)  # Source by format

    @property
    def files(self):
        return self.source.files

    @property
    def file_bytes(self):
        return self.source.file_bytes

    @property
    def dtype(self):
        return np.dtype(self.source.dtype).name

    def summary(self):
        return self.source.summary()

    def facts(self):
        source = self.source
        return {"samples": source.samples, "sample_bytes": source.sample_bytes, "batch_size": self.batch_size}

    def cold_samples(self, most=None):
        return min(most or (8192 if self.source.kind == "tokens" else self.source.samples), self.source.samples)


def source_for(kind, settings, progress=lambda count: None, files=1):
    """Return the Source of "tokens" or "npy": the user's own path, or made.

    Args:
        files: of made tokens.
    """
    if settings.path:
        files, origin = expand(settings.path), f"your own: {settings.path}"
    else:
        made = make(kind, data_folder(settings), settings.size_bytes, settings.shape, progress, files)
        files, origin = expand(made), f"Python's standard library sources, tiled: {made}"
    if kind == "npy":
        return describe_npy(files, origin)
    dtype = settings.dtype if settings.path else "uint16"
    return describe_tokens(files, dtype, settings.seq_len, settings.stride, origin)


def expand(path):
    """Return the files of a path, a folder or a glob, sorted."""
    path = os.path.expanduser(str(path))
    if os.path.isdir(path):
        found = [os.path.join(path, name) for name in os.listdir(path) if not name.startswith(".")]
        npy = [name for name in found if name.endswith(".npy")]
        found, wanted = npy or [name for name in found if name.endswith(".bin")], "*.npy or *.bin files"
    else:
        found, wanted = [path] if os.path.isfile(path) else glob.glob(path, recursive=True), "such file"
    files = sorted(os.path.abspath(name) for name in found if os.path.isfile(name))
    if not files:
        raise DataError(f"data.path={path}: no {wanted} there")
    return files


def kind_of(path):
    return "npy" if expand(path)[0].endswith(".npy") else "tokens"


def describe_tokens(files, dtype, seq_len, stride, origin):
    item, stride = np.dtype(dtype).itemsize, stride or seq_len
    kept, headers, counts, total = [], [], [], 0
    for file in files:
        size = os.path.getsize(file)
        with open(file, "rb") as opened:
            start = opened.read(4)
        header = LLMC_HEADER_BYTES if start == np.int32(LLMC_MAGIC).tobytes() and size >= LLMC_HEADER_BYTES else 0
        tokens = (size - header) // item
        if tokens > seq_len:  # A shorter file has no window, in formats.Tokens neither.
            kept.append(file)
            headers.append(header)
            counts.append((tokens - seq_len - 1) // stride + 1)
            total += size
    if not kept:
        these = f"{files[0]}{' and others' * (len(files) > 1)}"
        raise DataError(f"{these}: shorter than one sample of {seq_len + 1} {dtype} tokens")
    return Source("tokens", kept, dtype, [seq_len + 1], stride, headers, counts, total, origin)


def describe_npy(files, origin):
    headers, first = [], read_npy_header(files[0])[:2]
    for file in files:
        shape, dtype, header = read_npy_header(file)
        if (shape, dtype) != first:
            raise DataError(f"{file} is {dtype} {shape}, {files[0]} {first[1]} {first[0]}: batches need equal shapes")
        headers.append(header)
    total = sum(map(os.path.getsize, files))
    return Source("npy", files, first[1].str, first[0], 0, headers, [1] * len(files), total, origin)


def read_npy_header(path):
    """Return (shape, dtype, offset of the values) of a C-ordered npy file."""
    with open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
        except ValueError as error:
            remedy = "give .npy files with data.path=, or read tokens with data=tokens"
            raise DataError(f"{path}: it is no .npy file ({error}): {remedy}") from error
        if fortran or dtype.hasobject:
            raise DataError(
                f"{path}: the bench reads C-ordered arrays of numbers; this one is {dtype}, fortran={fortran}"
            )
        return list(shape), dtype, file.tell()


class Truth:
    """The right bytes of a batch, by the plainest numpy there is. It is never timed."""

    def __init__(self, source):
        self.source = source
        self.ids: dict[int, list[int]] | None = None  # {checksum: ids}, made by the first `ids_of`

    def batch(self, ids, dtype):
        rows = np.stack([self.sample(int(index)) for index in ids])
        return rows.astype(np.int64) if dtype == "int64" else rows

    def ids_of(self, batch, seen):
        """Find the ids of a batch's samples by their bytes, without those in `seen`.

        Raises:
            ValueError: a sample is none of the data's, or came before.
        """
        if self.ids is None:
            self.ids = {}
            for index in range(self.source.samples):
                self.ids.setdefault(zlib.crc32(np.ascontiguousarray(self.sample(index)).data), []).append(index)
        found, seen = [], set(seen)
        for place, one in enumerate(batch):
            alike = self.ids.get(zlib.crc32(np.ascontiguousarray(one).data), [])
            left = [index for index in alike if index not in seen]
            if not left:
                why = "came before in the epoch" if alike else "is none of the data's"
                raise ValueError(f"the sample at place {place} of a batch {why}")
            found.append(left[0])
            seen.add(left[0])
        return found

    def sample(self, index):
        source = self.source
        file = int(np.searchsorted(source.first_ids, index, side="right")) - 1
        if source.kind == "npy":
            return np.load(source.files[file])
        start = source.headers[file] + (index - int(source.first_ids[file])) * source.stride * source.itemsize
        return np.fromfile(source.files[file], source.dtype, source.shape[0], offset=start)

"""Training data of Megatron-core, read by gdsdata. Checkpoints: `gdsdata.integrations.megatron`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from gdsdata.checkpoint.open_object import open_path
from gdsdata.errors import CorruptData
from gdsdata.fork_safe import fork_safe_lock
from gdsdata.integrations.versions import importing
from gdsdata.storage.opened import open_stream

with importing("megatron-core"):
    from megatron.core.datasets import indexed_dataset

__all__ = ["install_bin_reader"]

_COPIED_BYTES = 8 << 20  # of an index at a time


def install_bin_reader() -> None:
    """Have Megatron's data sets read by gdsdata, in this process and in workers made later.

        install_bin_reader()
        config = GPTDatasetConfig(..., mmap_bin_files=False)

    This is for data at ``s3://`` (with an ``object_storage_config``, whose ``bin_chunk_nbytes`` is
    not used), and for files without ``mmap``. ``.idx`` files at ``s3://`` are copied to their cache
    by gdsdata too, so boto3 is not needed. Samples and their order stay as they are.

    Raises:
        RuntimeError: this version of Megatron-core has no such names.
    """
    missing = {"OBJECT_STORAGE_BIN_READERS", "_FileBinReader", "cache_index_file"} - vars(indexed_dataset).keys()
    if missing:
        raise RuntimeError(
            f"this megatron-core has no {', '.join(sorted(missing))} in indexed_dataset, which gdsdata replaces. The "
            "tests ran with megatron-core 0.19: install that, or update gdsdata"
        )
    indexed_dataset.OBJECT_STORAGE_BIN_READERS["s3"] = GDSBinReader
    indexed_dataset._FileBinReader = GDSBinReader
    indexed_dataset.cache_index_file = cache_index_file


class GDSBinReader:
    """Reads a ``.bin`` file, or an object, at a few places, as Megatron's `_BinReader` says.

    The file stays open, and one version of an object is read. It reads at least 256 KiB of an
    object at a time, and ahead of reads that follow one another; Megatron's own reader takes 256
    MiB for each place. Any thread may call it, also in a forked process.

    Args:
        bin_path: of the file, or the URL of the object.
        _: Megatron's settings for objects, which are not used.

    Raises:
        FileNotFoundError, IoError: it cannot be opened.
    """

    def __init__(self, bin_path: str | os.PathLike[str], _: Any = None) -> None:
        self._path = os.fspath(bin_path)
        self._reading = fork_safe_lock()  # guards the two below
        self._process, self._opened = os.getpid(), open_path(self._path)

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray:
        """Return ``count`` numbers of a dtype, from a byte on: a read-only array ``(count,)``.

        Raises:
            IoError: the file cannot be read.
            CorruptData: it ends before, or the object was replaced.
        """
        size_bytes = int(count) * np.dtype(dtype).itemsize
        with self._reading:
            if self._process != os.getpid():
                self._process, self._opened = os.getpid(), open_path(self._path)
            content = self._opened.read(int(offset), size_bytes)
        if len(content) < size_bytes:
            raise CorruptData(
                f"'{self._path}' has {self._opened.size_bytes} bytes, and its index names {size_bytes} bytes from "
                f"{offset} on: the two files do not belong together, or this one is not complete",
                self._path,
                int(offset),
                size_bytes,
            )
        return np.frombuffer(content, dtype)


def cache_index_file(remote_path: str, local_path: str) -> None:
    """Copy an ``.idx`` object to a file, unless another rank does so.

    Rank 0 copies it, and so does a rank that does not see the file. The file is complete as soon as
    it has its name.

    Raises:
        FileNotFoundError, IoError: the object cannot be read, or the file not be written.
    """
    ranks = torch.distributed.is_initialized()
    if ranks and torch.distributed.get_rank() != 0 and os.path.exists(local_path):
        return
    os.makedirs(os.path.dirname(os.path.abspath(local_path)), exist_ok=True)
    unnamed = f"{local_path}.{os.getpid()}.tmp"
    try:
        with open_stream(remote_path) as source, open(unnamed, "wb") as target:
            while content := source.read(_COPIED_BYTES):
                target.write(content)
        os.replace(unnamed, local_path)
    finally:
        if os.path.exists(unnamed):
            os.unlink(unnamed)

"""One tensor, one range of one file."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch

from gdsdata.engine import shared_engine
from gdsdata.options import EngineOptions

_options = EngineOptions()


def read_tensor(
    path: str | os.PathLike[str],
    dtype: torch.dtype,
    shape: Sequence[int],
    offset: int = 0,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Read a tensor's bytes (native byte order, contiguous) from ``path``.

    Args:
        dtype, shape: of the tensor; they say how many bytes are read.
        offset: in bytes; any.
        device: of the result. None: the CPU.

    Raises:
        FileNotFoundError, IoError: the file is not to be had.
        CorruptData: the file ends before the tensor does.
        ValueError: a negative offset or size.
    """
    if offset < 0 or any(size < 0 for size in shape):
        raise ValueError(f"offset={offset} and shape={tuple(shape)} must not be negative")
    tensor = torch.empty(tuple(shape), dtype=dtype)
    _check_end(offset, tensor.nbytes)
    _engine(os.getpid()).read(os.fspath(path), offset, tensor.nbytes, tensor.data_ptr())
    return tensor if device is None else tensor.to(device)


def write_tensor(tensor: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> None:
    """Write a tensor's bytes (native byte order, contiguous) to ``path``; on storage when this returns.

    A tensor that makes a whole file (``offset`` 0, and no longer file there) replaces it atomically: after a crash at
    any moment the path names the old file or the new one. Otherwise the bytes are written over ``path`` from
    ``offset`` on, and a crash meanwhile may leave a part of them.

    Raises:
        IoError: the file cannot be written, or space is lacking: then a file that was to be replaced is untouched.
        ValueError: a negative offset, or a tensor without plain memory (sparse, meta).
    """
    if offset < 0:
        raise ValueError(f"offset={offset} must not be negative")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ValueError(f"a tensor of layout {tensor.layout} on {tensor.device} has no plain memory to write")
    _check_end(offset, tensor.nbytes)
    path = os.fspath(path)
    memory = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if offset == 0 and (not os.path.exists(path) or os.path.getsize(path) <= memory.nbytes):
        _engine(os.getpid()).write_whole(path, memory.nbytes, memory.data_ptr())
    else:
        _engine(os.getpid()).write_range(path, offset, memory.nbytes, memory.data_ptr())


def _check_end(offset: int, size_bytes: int) -> None:
    if offset + size_bytes >= 2**63:
        raise ValueError(f"offset={offset} and {size_bytes} bytes reach beyond 2**63, where no file does")


@functools.lru_cache(maxsize=1)
def _engine(process: int) -> Any:
    """Kept for the next call; made anew in a forked child, where the parent's does not work."""
    return shared_engine(_options)

"""Single tensors, and ranges of files: `Engine`, `read_tensor`, `write_tensor`."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from gdsdata import torch_private
from gdsdata.errors import EngineClosed
from gdsdata.io.calibration import calibrated
from gdsdata.io.calls import ReadCalls
from gdsdata.io.engine import (
    is_remote,
    kept_engine,
    reaches,
    resolved,
    shared_engine,
    stream_of,
    table_of_one,
)
from gdsdata.io.new_memory import new_tensor
from gdsdata.io.options import EngineOptions, options_of
from gdsdata.io.remote_access import local_path
from gdsdata.whole_numbers import whole_number

_PRIORITIES = ("background", "training")


class Engine:
    """Reads ranges of files into tensors, and writes tensors, many at a time.

        with gdsdata.Engine() as engine:
            futures = [engine.read(path, into=tensor) for path, tensor in wanted]
            tensors = [future.result() for future in futures]

    Tensors may be on the CPU or on any CUDA device. Each call returns a `concurrent.futures.Future`
    at once. When it is done, the bytes are in place, for every stream. The tensor's memory must not
    be used before.

    On a GPU, a call comes after the work that the current stream has at that time. So you may write
    a tensor that is still being computed, and read into one that is still in use.

    A read uses the file that has the name when the read is called. For each device, the eight files
    read last stay open until `close`. A read of at most 64 KiB that the page cache has is usually
    done when the call returns, so its callbacks run in the calling thread.

    An `Engine` shares workers and pinned memory with all users of equal ``options`` in this
    process. If training data and these calls both wait, a call of priority "background" (the
    default) gets at least every ninth turn. So a checkpoint does not starve training, and still
    completes.

    Args:
        options: of the engine.
        most_calls: reads in progress at a time for each device, and writes; more are queued.
    """

    def __init__(self, options: EngineOptions | None = None, most_calls: int = 16) -> None:
        most_calls = whole_number("most_calls", most_calls, 1)
        self.options = options_of(options)
        self._process = os.getpid()
        self._engines: dict[torch.device, Any] = {}
        self._reads: dict[torch.device, ReadCalls] = {}
        self._making_reads = threading.Lock()
        self._most_calls = most_calls
        self._writes = ThreadPoolExecutor(most_calls, thread_name_prefix="gdsdata")
        self._closed = False

    def read(
        self, path: str | os.PathLike[str], into: torch.Tensor, offset: int = 0, priority: str = "background"
    ) -> Future[torch.Tensor]:
        """Read ``into.nbytes`` bytes of ``path``, from ``offset`` on, into ``into``.

        The future's result is ``into``. ``offset`` is in bytes, and needs no alignment. ``path``
        may be a URL. The first read of it asks the server for the object's size, and later ones
        read that version of it.

        Raises:
            ValueError: ``into`` is not contiguous or has no plain memory; a negative offset.
            TypeError: ``into`` is no tensor, or an argument has another type.
            EngineClosed: after `close`.
        And from the future:
            FileNotFoundError, IoError: the file cannot be opened or read.
            CorruptData: the file ends before the tensor does, or an object was replaced.
            DeviceError: the GPU's driver refused.
        """
        _check_plain(into, "read into")
        if not into.is_contiguous():
            raise ValueError(f"a tensor of strides {into.stride()} is not contiguous: read into a contiguous one")
        if into.is_conj() or into.is_neg():
            raise ValueError("a conjugate or negative view shows other values than its memory: read into its clone()")
        path, offset = _path_of(path), _checked_offset(offset, into.nbytes)
        engine, before = self._asked(into, path, priority)
        increment_version(into)  # so that autograd notices
        with self._making_reads:
            self._check_open()  # once more: another thread may have closed it
            reads = self._reads.get(into.device)
            if reads is None:
                reads = self._reads[into.device] = ReadCalls(engine, self._most_calls, owner=self)
        return reads.read(path, into, offset, before, priority == "background")

    def write(
        self,
        path: str | os.PathLike[str],
        tensor: torch.Tensor,
        offset: int | None = None,
        priority: str = "background",
    ) -> Future[None]:
        """Write a tensor as `write_tensor` does; it is on storage when the future is done.

        Raises:
            ValueError: ``tensor`` has no plain memory; a negative offset.
            TypeError: ``tensor`` is no tensor, or an argument has another type.
            EngineClosed: after `close`.
        And from the future:
            IoError: the file cannot be written, or the disk is full.
            DeviceError: the GPU's driver refused.
            StallError: nothing has moved for ``stall_timeout_s``.
        """
        _check_plain(tensor, "write")
        plain = _plain(tensor)
        path, offset = _path_of(path), None if offset is None else _checked_offset(offset, plain.nbytes)
        engine, before = self._asked(plain, path, priority)
        timeout_s, is_background = self.options.stall_timeout_s, priority == "background"
        return self._writes.submit(_write, engine, plain, path, offset, before, is_background, timeout_s)

    def close(self) -> None:
        """Wait for all calls to end, and refuse new ones."""
        if self._process == os.getpid():  # in a forked child no call is in progress, and locks may be held for ever
            with self._making_reads:
                self._closed = True
            for reads in self._reads.values():
                reads.close()
        self._closed = True
        self._reads.clear()
        self._writes.shutdown(wait=True)
        self._engines.clear()

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self._engines)) or "none yet"
        state = "closed" if self._closed else "open"
        return f"Engine({state}, devices: {devices}, most_calls={self._most_calls}, {self.options})"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """Return the engine's counts by device, as "engine" in `GDSDataset.stats`."""
        return {str(device): engine.statistics() for device, engine in self._engines.items()}

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("this Engine was closed; make another one")

    def _asked(self, tensor: torch.Tensor, path: str, priority: str) -> tuple[Any, Any]:
        """Return the engine of the tensor's device, and a mark in its current stream."""
        self._check_open()
        if self._process != os.getpid():
            raise EngineClosed("this Engine was made in another process; make one in this one")
        if priority not in _PRIORITIES:
            raise ValueError(f"priority={priority!r} must be one of {', '.join(_PRIORITIES)}")
        engine = self._engines.get(tensor.device)
        if engine is None:  # the first path's file system decides, as it does for data sets
            options = calibrated(self.options, path, tensor.device, measure=False)
            engine = self._engines[tensor.device] = shared_engine(options, tensor.device)
        return engine, engine.mark(stream_of(tensor.device))


def read_tensor(
    path: str | os.PathLike[str],
    dtype: torch.dtype,
    shape: Sequence[int] | int,
    offset: int = 0,
    device: torch.device | str | None = None,
    *,
    options: EngineOptions | None = None,
) -> torch.Tensor:
    """Read a tensor's bytes (native byte order, contiguous) from ``path``.

    Args:
        path: of the file, or the URL of an object, which is read in its newest version.
        dtype, shape: of the tensor; they say how many bytes are read. A number is the size of one
            dimension.
        offset: in bytes; needs no alignment.
        device: of the result. None: the CPU.
        options: of the engine.

    Returns:
        The tensor. Its bytes are in place, for every stream.

    Raises:
        FileNotFoundError, IoError: the file cannot be opened or read.
        CorruptData: the file ends before the tensor does.
        ValueError: a negative offset or size.
        TypeError: an argument has another type.
        BackendUnavailable: there is no such device.
        StallError: nothing has moved for ``options.stall_timeout_s``.
    """
    if not isinstance(dtype, torch.dtype):
        raise _wrong_type("dtype", dtype, "give a torch.dtype, as torch.float32")
    sizes = _sizes_of(shape)
    size_bytes = math.prod(sizes) * dtype.itemsize
    offset = _checked_offset(offset, size_bytes)
    target = resolved("cpu" if device is None else device)
    device = target if reaches(target) else torch.device("cpu")
    path = _path_of(path)
    options = options_of(options)
    engine = kept_engine(calibrated(options, path, device, measure=False), device)
    tensor = new_tensor(sizes, None, dtype, device)
    before = engine.mark(stream_of(device))
    return _read(engine, tensor, path, offset, before, True, options.stall_timeout_s).to(target)


def write_tensor(
    tensor: torch.Tensor,
    path: str | os.PathLike[str],
    offset: int | None = None,
    *,
    options: EngineOptions | None = None,
) -> None:
    """Write a tensor's bytes (native byte order, contiguous) to ``path``.

    They are on storage when this returns.

    Without ``offset`` the tensor becomes the whole file, which replaces an existing one atomically.
    After a crash at any moment the path names the old file or the new one. The new file has the old
    one's mode. With an ``offset``, also 0, the bytes are written over ``path`` from there on, and a
    missing file is made. The file's other bytes stay, so several calls may write parts of one file
    at once. A crash meanwhile may leave a part of the new ones.

    Stream semantics: on a GPU, the tensor is read after the work that its current stream has at the
    call.

    Args:
        tensor: of any dtype and strides; its bytes are written as those of a contiguous one.
        path: of the file.
        offset: in bytes; needs no alignment. None: the tensor is the whole file.
        options: of the engine.

    Raises:
        NotReplaceable: an `IoError`. No new file can replace ``path``: it is a bind-mounted file,
            or its folder is not writable.
        IoError: the file cannot be written, or the disk is full. A file that was to be replaced is
            untouched.
        ValueError: a negative offset, a tensor without plain memory (sparse, meta), or a URL.
        StallError: nothing has moved for ``options.stall_timeout_s``.
        TypeError: ``tensor`` is no tensor, or an argument has another type.
    """
    _check_plain(tensor, "write")
    offset = None if offset is None else _checked_offset(offset, tensor.nbytes)
    plain = _plain(tensor)
    path = _path_of(path)
    options = options_of(options)
    engine = kept_engine(calibrated(options, path, plain.device, measure=False), plain.device)
    _write(engine, plain, path, offset, engine.mark(stream_of(plain.device)), True, options.stall_timeout_s)


def _read(
    engine: Any,
    tensor: torch.Tensor,
    path: str,
    offset: int,
    before: Any,
    background: bool,
    stall_timeout_s: float,
) -> torch.Tensor:
    if not is_remote(path):
        engine.read(path, offset, tensor, before, background, stall_timeout_s)
        return tensor
    table, no_place = table_of_one(path), np.zeros(1, np.int64)
    extent = np.array([offset], np.int64), np.array([tensor.nbytes], np.int64)
    engine.read_many(
        table, np.zeros(1, np.int32), *extent, tensor, no_place, False, before, background, stall_timeout_s
    )
    return tensor


def _write(
    engine: Any,
    tensor: torch.Tensor,
    path: str,
    offset: int | None,
    before: Any,
    background: bool,
    stall_timeout_s: float,
) -> None:
    if is_remote(path):
        raise ValueError(f"{path}: an object is written whole, not in parts: use gdsdata.save(tensor, {path!r})")
    if offset is None and (os.path.isfile(path) or not os.path.exists(path)):  # a device stays one
        engine.write_whole(path, tensor, before, background, stall_timeout_s)
    else:
        engine.write_range(path, offset or 0, tensor, before, background, stall_timeout_s)


def _path_of(path: str | os.PathLike[str]) -> str:
    """Return a path, or the URL of an object, as a string; of a ``file://`` URL its path.

    Raises:
        ValueError: a ``file://`` URL of another host, or a scheme that is not known.
        TypeError: it is no path.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise _wrong_type("path", path, "give a str or an os.PathLike")
    return local_path(os.fsdecode(path))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain if reaches(plain.device) else plain.cpu()


def _check_plain(tensor: torch.Tensor, verb: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a value of type {type(tensor).__name__} is no tensor to {verb}: give a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ValueError(f"a tensor of layout {tensor.layout} on {tensor.device} has no plain memory to {verb}")
    if torch_private.is_zero_tensor(tensor):
        raise ValueError(f"a tensor of zeros by torch._efficientzerotensor has no memory to {verb}: give its clone()")
    if tensor.nbytes > 0 and tensor.data_ptr() == 0:
        raise ValueError(
            f"a tensor of type {type(tensor).__name__} has no memory of its own to {verb}: give the tensor that it "
            "holds, as to_local() of a DTensor"
        )


def _sizes_of(shape: Sequence[int] | int) -> tuple[int, ...]:
    """Return a shape as a tuple.

    Raises:
        TypeError: it is neither a whole number nor several.
        ValueError: one of them is negative, or they are too large for torch.
    """
    try:
        sizes = (shape,) if isinstance(shape, (int, np.integer)) else shape
        found = tuple(whole_number("shape", size) for size in sizes)
    except TypeError:
        raise TypeError(f"shape={shape!r:.100} must be whole numbers, as (3, 224)") from None
    if any(size < 0 for size in found):
        raise ValueError(f"shape={found} must not be negative")
    if math.prod(filter(None, found)) >= 2**63:
        raise ValueError(f"shape={found!r:.100}: torch has no tensor of such sizes: give smaller ones")
    return found


def _checked_offset(offset: int, size_bytes: int) -> int:
    """Return an offset as an int.

    Args:
        offset: what a user gave for it.
        size_bytes: how much is read or written there.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is negative, or reaches too far.
    """
    offset = whole_number("offset", offset, 0)
    if offset + size_bytes >= 2**63:
        raise ValueError(f"offset={offset} and {size_bytes} bytes reach beyond 2**63, where no file does")
    return offset


def _wrong_type(name: str, value: Any, remedy: str) -> TypeError:
    return TypeError(f"{name}={value!r:.100} is of type {type(value).__name__}: {remedy}")

"""The way from Python to the engine: the only module that imports the extension."""

from __future__ import annotations

import atexit
import os
import time
import warnings
import weakref
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from gdsdata.options import EngineOptions

try:
    from gdsdata import _engine
except ImportError as error:
    raise ImportError(
        f"gdsdata's extension could not be loaded ({error}). It is built for one Python version at installation: "
        "install gdsdata again with `pip install --no-build-isolation .`, or run `make build` in a source tree."
    ) from error

if TYPE_CHECKING:
    from gdsdata.formats.index import Index, Sample

ROUTES: tuple[str, ...] = _engine.ROUTES
direct_refusals = _engine.direct_refusals

# DLPack's type codes (dlpack.h): 0 int, 1 uint, 2 float, 5 complex, 6 bool.
_DLPACK_TYPES = {
    **{getattr(torch, f"int{bits}"): (0, bits) for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"uint{bits}"): (1, bits) for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"float{bits}"): (2, bits) for bits in (16, 32, 64)},
    **{getattr(torch, f"complex{bits}"): (5, bits) for bits in (64, 128)},
    torch.bool: (6, 8),
}
_WIDENED = {"u1": "u8_to_i64", "u2": "u16_to_i64", "i2": "i16_to_i64", "i4": "i32_to_i64", "u4": "u32_to_i64"}

# Closed before the interpreter goes: a thread that waits for a batch must not come back to find it gone.
_open_batches: weakref.WeakSet[_engine.Batches] = weakref.WeakSet()


@atexit.register
def _close_batches() -> None:
    for batches in list(_open_batches):
        batches.close()
        waited_until = time.monotonic() + 1.0
        while batches.inside_next and time.monotonic() < waited_until:
            time.sleep(0.002)  # lets the thread come back, and have its EngineClosed


_engines: weakref.WeakValueDictionary[tuple[int, EngineOptions], _engine.Engine] = weakref.WeakValueDictionary()
_warned: set[str] = set()


def shared_engine(options: EngineOptions) -> _engine.Engine:
    """The engine with these options, shared by all who ask for the same in this process, alive while one uses it.

    Raises:
        ValueError: an option is out of range.
        BackendUnavailable: a backend was asked for by name, or ``strict``, and cannot work here.
    """
    key = (os.getpid(), options)
    engine = _engines.get(key)
    if engine is None:
        fields = asdict(options)
        del fields["stall_timeout_s"]
        engine = _engines[key] = _engine.Engine(**fields)
        if engine.fallback_reason:
            warn_once(engine.fallback_reason)
    return engine


def warn_once(message: str) -> None:
    """Warn of a fallback, once for each message in this process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"gdsdata: {message}", RuntimeWarning, stacklevel=3)


def file_table(index: Index) -> _engine.FileTable:
    """The files of an index, opened when they are first read."""
    return _engine.FileTable(index.paths, index.size_bytes, index.mtime_ns)


def buffer_pool(engine: _engine.Engine, sample: Sample, batch_samples: int, slots: int) -> _engine.BufferPool:
    """Memory for batches of ``sample``: those in the slots, one that the consumer uses and one that it just dropped."""
    elements = sample.bytes // sample.dtype.itemsize
    widest_bytes = max(sample.dtype.itemsize, sample.torch_dtype.itemsize)
    return _engine.BufferPool(engine, elements * widest_bytes * batch_samples, slots + 2)


def make_batches(
    engine: _engine.Engine,
    files: _engine.FileTable,
    pool: _engine.BufferPool,
    sample: Sample,
    batch_samples: int,
    slots: int,
    stall_timeout_s: float,
) -> tuple[_engine.Batches, torch.dtype]:
    """A prefetcher of batches of ``sample``, and the dtype of their tensors.

    That is ``sample.torch_dtype`` where the engine can convert on the way, else the dtype of what is stored.
    """
    conversion = _conversion(sample)
    dtype = sample.torch_dtype if conversion in _WIDENED.values() else sample.stored_torch_dtype
    strides, step = [], 1
    for size in sample.shape if sample.fortran_order else reversed(sample.shape):
        strides.append(step)
        step *= size
    if not sample.fortran_order:
        strides.reverse()
    type_code, type_bits = _DLPACK_TYPES[dtype]
    batches = _engine.Batches(
        engine,
        files,
        pool,
        slots=slots,
        sample_bytes=sample.bytes,
        batch_samples=batch_samples,
        conversion=conversion,
        type_code=type_code,
        type_bits=type_bits,
        sample_shape=list(sample.shape),
        sample_strides=strides,
        stall_timeout_s=stall_timeout_s,
    )
    _open_batches.add(batches)
    return batches, dtype


def _conversion(sample: Sample) -> str:
    """What the engine does with each element while it copies it (csrc/base/convert.h)."""
    stored = sample.dtype
    if stored.newbyteorder("=") != stored:
        return f"swap_{stored.itemsize // (2 if stored.kind == 'c' else 1)}"
    if sample.torch_dtype == torch.int64:
        return _WIDENED.get(f"{stored.kind}{stored.itemsize}", "none")
    return "none"

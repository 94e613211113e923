"""The way from Python to the engine: the only module that imports the extension."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from gdsdata.errors import BackendUnavailable
from gdsdata.io import program_end  # noqa: F401 (registers its exit handler first, so that it is called last)
from gdsdata.io.memory_budget import available_bytes, share_bytes
from gdsdata.io.options import EngineOptions

try:
    from gdsdata import _engine
except ImportError as error:
    raise ImportError(
        f"gdsdata's extension could not be loaded ({error}). It is built for one Python version at installation: "
        "install gdsdata again with `pip install --no-build-isolation .`, or run `make build` in a source tree."
    ) from error

if TYPE_CHECKING:
    from gdsdata.formats.index import Index, Sample, SampleIndex

ROUTES: tuple[str, ...] = _engine.ROUTES
Batches = _engine.Batches
BegunRead = _engine.BegunRead
BufferPool = _engine.BufferPool
Engine = _engine.Engine
File = _engine.File
FileTable = _engine.FileTable
Mark = _engine.Mark
Output = _engine.Output
Residence = _engine.Residence
pickle_claims_too_much = _engine.pickle_claims_too_much
crc32_joined = _engine.crc32_joined
crc32c_of_rows = _engine.crc32c_of_rows
direct_refusals = _engine.direct_refusals
noted_fallbacks = _engine.noted_fallbacks
cufile_dma_is_possible = _engine.cufile_dma_is_possible

# DLPack's types (dlpack.h): a code (0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool, and one
# for each smaller float), the bits of an element, and how many elements torch counts as one.
_DLPACK_TYPES = {
    **{getattr(torch, f"int{bits}"): (0, bits, 1) for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"uint{bits}"): (1, bits, 1) for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"float{bits}"): (2, bits, 1) for bits in (16, 32, 64)},
    **{getattr(torch, f"complex{bits}"): (5, bits, 1) for bits in (64, 128)},
    torch.bfloat16: (4, 16, 1),
    torch.bool: (6, 8, 1),
    torch.float8_e4m3fn: (10, 8, 1),
    torch.float8_e4m3fnuz: (11, 8, 1),
    torch.float8_e5m2: (12, 8, 1),
    torch.float8_e5m2fnuz: (13, 8, 1),
    torch.float8_e8m0fnu: (14, 8, 1),
    torch.float4_e2m1fn_x2: (17, 4, 2),
}
# Well below the system's own limit of mappings a process (65530), which others need too.
_MOST_MAPPED_FILES = 30_000
# Where a process may take less than this, each worker's bounce memory is short: 64 MiB of them all
# would be too much.
_SCARCE_BYTES, _SCARCE_BOUNCE_BYTES = 2**29, 4 * 2**20
_REQUEST_EDGES_BYTES = 2 * 65536  # as csrc/engine/engine.cpp demands beside a request
_WIDENED = {"u1": "u8_to_i64", "u2": "u16_to_i64", "i2": "i16_to_i64", "i4": "i32_to_i64", "u4": "u32_to_i64"}

# Closed before the interpreter goes: a thread that waits for a batch must not come back to find it
# gone.
_open_batches: weakref.WeakSet[_engine.Batches] = weakref.WeakSet()
# The same of threads that wait for reads to end, and these: they free tensors.
_open_endings: weakref.WeakSet[_engine.Endings] = weakref.WeakSet()
_threads_of_endings: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
# Kept until the interpreter is gone: freeing a tensor lets the GIL go, and a daemon thread that
# then asks for it back ends the process.
_owners_of_batches: weakref.WeakSet[object] = weakref.WeakSet()
_kept_to_the_end: list[object] = []


@atexit.register
def _close_batches() -> None:
    _kept_to_the_end.extend(_owners_of_batches)
    for batches in list(_open_batches):
        batches.close()
        waited_until = time.monotonic() + 1.0
        while batches.inside_next and time.monotonic() < waited_until:
            time.sleep(0.002)  # lets the thread come back, and have its EngineClosed
    _engine.begin_exit()  # other calls that wait: reads and writes on daemon threads
    for endings in list(_open_endings):
        endings.close()
    waited_until = time.monotonic() + 1.0
    for thread in filter(threading.Thread.is_alive, list(_threads_of_endings)):
        thread.join(max(0.0, waited_until - time.monotonic()))
    while _engine.waiting_calls() and time.monotonic() < waited_until:
        time.sleep(0.002)
    _engine.end_exit()
    _engine.stop_cufile_statistics()


_engines: weakref.WeakValueDictionary[tuple[int, int, EngineOptions], _engine.Engine] = weakref.WeakValueDictionary()
_making_engine = threading.Lock()
_warned: set[str] = set()
# Of each worker, 2 MiB: seconds of a machine at its fastest, minutes of most.
_MOST_SPANS = 1 << 16
# Whose spans are kept, by name: all engines of the process that asked, until it asks for them.
_spanned: tuple[int, list[tuple[str, _engine.Engine]]] | None = None


def shared_engine(options: EngineOptions, device: torch.device) -> _engine.Engine:
    """Return the engine with these options on ``device``; a process has one of each.

    Raises:
        ValueError: an option is out of range.
        BackendUnavailable: a backend was asked for by name, or ``strict``, and cannot work here; no
            such device.
    """
    ordinal = cuda_ordinal(device)
    key = (os.getpid(), ordinal, options)
    with _making_engine:
        engine = _engines.get(key)
        if engine is None:
            if ordinal >= 0:
                _initialise_cuda(device)
                _engine.set_cufile_search_path(cufile_of_wheels())
            fields = asdict(options)
            del fields["stall_timeout_s"], fields["calibrate"]
            if options.bounce_bytes == 0 and share_bytes() < _SCARCE_BYTES:
                fields["bounce_bytes"] = max(_SCARCE_BOUNCE_BYTES, options.request_bytes + _REQUEST_EDGES_BYTES)
            engine = _engines[key] = _engine.Engine(cuda_ordinal=ordinal, **fields)
            if _spanned is not None and _spanned[0] == os.getpid():
                _spanned[1].append(_with_spans(key, engine))
    if engine.fallback_reason:
        warn_once(engine.fallback_reason)
    return engine


def begin_spans() -> None:
    """Keep what the workers of this process's engines do, from now on, anew."""
    global _spanned
    with _making_engine:
        ours = [(key, engine) for key, engine in list(_engines.items()) if key[0] == os.getpid()]
        _spanned = (os.getpid(), [_with_spans(key, engine) for key, engine in ours])


def _with_spans(key: tuple[int, int, EngineOptions], engine: _engine.Engine) -> tuple[str, _engine.Engine]:
    """The name of an engine's device, and the engine, which keeps its workers' spans from now on."""
    engine.begin_spans(_MOST_SPANS)
    return "cpu" if key[1] < 0 else f"cuda:{key[1]}", engine


class WorkerSpans(NamedTuple):
    """What one worker did.

    Attributes:
        name: its own, for people.
        spans: "page cache", "storage", "link" or "device", begin and end in ns on the monotonic
            clock, bytes delivered in it. They do not overlap.
        dropped: how many came after these.
    """

    name: str
    spans: list[tuple[str, int, int, int]]
    dropped: int


def end_spans() -> list[WorkerSpans]:
    """What was kept since `begin_spans`, of workers that did anything."""
    global _spanned
    with _making_engine:
        (process, engines), _spanned = _spanned or (0, []), None
        if process != os.getpid():
            return []
        found = []
        for device, engine in engines:
            *of_workers, of_guest = engine.end_spans()
            found += [WorkerSpans(f"gdsdata worker {i} ({device})", *kept) for i, kept in enumerate(of_workers)]
            found.append(WorkerSpans(f"gdsdata in whoever waits ({device})", *of_guest))
    return [worker for worker in found if worker.spans]


def kept_engine(options: EngineOptions, device: torch.device) -> _engine.Engine:
    """Return `shared_engine`, kept for the next call: its threads cost more than a short call."""
    return _kept_engine(os.getpid(), options, device)


@functools.lru_cache(maxsize=16)
def _kept_engine(process: int, options: EngineOptions, device: torch.device) -> _engine.Engine:
    """Made anew in a forked child, where the parent's does not work."""
    return shared_engine(options, device)


def cuda_ordinal(device: torch.device) -> int:
    """Return the place of a CUDA device (`resolved`) among the visible ones; -1 for the CPU.

    Raises:
        ValueError: a device of another kind.
    """
    if device.type == "cpu":
        return -1
    if device.type != "cuda":
        raise ValueError(f"device={device}: gdsdata knows the CPU and CUDA devices")
    return device.index


def reaches(device: torch.device) -> bool:
    """Whether the engine works on the device; torch copies to and from others."""
    return device.type in ("cpu", "cuda")


def resolved(device: torch.device | str) -> torch.device:
    """The device with its index: "cuda" is the GPU that is current now, and stays it.

    Raises:
        BackendUnavailable: there is no such GPU.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return device
    _initialise_cuda(device)
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _initialise_cuda(device: torch.device) -> None:
    """Initialize torch first: it then owns the device's context, which the engine shares."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise BackendUnavailable(f"device={device} cannot be used here: {why}", (why,)) from error


def cufile_of_wheels() -> list[str]:
    """libcufile as torch's own dependencies bring it, which no loader's path knows."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = list(nvidia.submodule_search_locations or []) if nvidia is not None else []
    return sorted(str(path) for folder in folders for path in Path(folder).glob("*/lib/libcufile.so.0"))


def read_each(descriptor: int, path: str, offsets: Sequence[int], size_bytes: int) -> bytes:
    """What lies at many places of a file, one behind the other; zeros behind its end.

    All are asked for before one is waited for, and pages that were not in the page cache are let go
    again.

    Args:
        descriptor: of the file. path: of it, for errors.
        offsets: in bytes. size_bytes: at each of them.

    Raises:
        IoError: the storage refuses it.
    """
    return _engine.read_each(descriptor, path, np.array(offsets, np.int64), size_bytes).tobytes()


def new_storage(size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Memory that is about to be read into: on the CPU of huge pages where the system has them, for
    touching new memory page by page takes longer than reading it.
    """
    storage = torch.UntypedStorage(size_bytes, device=device)  # type: ignore[no-untyped-call]
    if device.type == "cpu":
        _engine.prefer_huge_pages(storage)
    return storage


def stream_of(device: torch.device) -> int:
    """The handle of the device's current stream in this thread; 0 on the CPU, which has none."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def record_stream(batch: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Say that a zero-copy batch is used on ``stream`` too, other than the one that was current
    when it came.

    Call it before the batch's last reference goes: its memory is then not written again until what
    ``stream`` has been given by that time is done. Batches that are no leases (``zero_copy=False``)
    are torch's own memory: for those, as for all tensors, it is ``batch.record_stream(stream)``,
    which this calls.

    Raises:
        ValueError: ``batch`` is not on a CUDA device.
    """
    if batch.device.type != "cuda":
        raise ValueError(f"record_stream: the batch is on {batch.device}, which has no streams")
    if not _engine.record_stream(batch.data_ptr(), stream.cuda_stream):
        batch.record_stream(stream)


def warn_once(message: str) -> None:
    """Warn of a fallback, once for each message in this process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"gdsdata: {message}", RuntimeWarning, stacklevel=3)


def file_table(index: SampleIndex, in_memory: Mapping[str, int] | None = None) -> _engine.FileTable:
    """The files of an index, opened when they are first read, and behind them some that this
    process itself fills, by path and size in bytes.
    """
    memory = in_memory or {}
    size_bytes = np.concatenate([index.size_bytes, np.fromiter(memory.values(), np.int64, len(memory))])
    any_time = np.full(len(memory), _engine.ANY_TIME, np.int64)
    return _engine.FileTable([*index.paths, *memory], size_bytes, np.concatenate([index.mtime_ns, any_time]))


def table_of_one(path: str) -> _engine.FileTable:
    """A file as a worker finds it when it is first read: if there is none, that is its error."""
    return _engine.FileTable(path)


def endings_of(engine: _engine.Engine, thread: threading.Thread) -> _engine.Endings:
    """What tells a thread of reads that have ended (csrc/engine/endings.h).

    When the program ends it is closed, and the thread waited for, a second at most.
    """
    endings = _engine.Endings(engine)
    _open_endings.add(endings)
    _threads_of_endings.add(thread)
    return endings


def table_of(
    paths: Sequence[str], seen: Sequence[tuple[int, int]], opened: Sequence[_engine.File | None]
) -> _engine.FileTable:
    """These files: ``opened`` ones as they are.

    Others are opened by name when they are read, and are an error unless they are as they were
    ``seen`` (size in bytes, time of change in ns).
    """
    sizes, times = np.array(seen, np.int64).reshape(-1, 2).T
    return _engine.FileTable(list(paths), np.ascontiguousarray(sizes), np.ascontiguousarray(times), list(opened))


def residence_of(engine: _engine.Engine, files: _engine.FileTable, index: Index) -> _engine.Residence:
    """The files of an index, mapped and registered with the engine's GPU in the background.

    Raises:
        BackendUnavailable: they do not fit into memory, or are too many to be mapped at once.
        ValueError: their samples have to be changed on the way, which only the processor does.
    """
    if conversion_of(index.sample).startswith("swap"):
        raise ValueError(
            f'residency="pinned" hands the files to the GPU as they are, but their {index.sample.dtype} is of the '
            "other byte order: leave residency out, or convert the files"
        )
    if len(index.paths) > _MOST_MAPPED_FILES:
        why = f"{len(index.paths)} files cannot be mapped at once, only {_MOST_MAPPED_FILES}: join them into fewer"
        raise BackendUnavailable(f'residency="pinned": {why}', (why,))
    size_bytes, free_bytes = int(index.size_bytes.sum()), _memory_for_pinning()
    if size_bytes > free_bytes:
        why = (
            f"the files have {size_bytes / 1e9:.1f} GB, and of this machine's memory {free_bytes / 1e9:.1f} GB at most "
            "can be pinned for them now"
        )
        raise BackendUnavailable(f'residency="pinned": {why}; leave residency out, or use less data', (why,))
    return _engine.Residence(engine, files)


def _memory_for_pinning() -> int:
    """Bytes that can be pinned without driving the machine, or a control group, out of memory."""
    return int(0.9 * available_bytes())


def buffer_pool(
    engine: _engine.Engine, sample: Sample, batch_samples: int, slots: int, on_cuda: bool
) -> _engine.BufferPool:
    """Return memory for batches: the slots', one in use, and one that was just dropped."""
    element_bytes = sample.dtype.itemsize if on_cuda else max(sample.dtype.itemsize, sample.torch_dtype.itemsize)
    return _engine.BufferPool(engine, sample.bytes // sample.dtype.itemsize * element_bytes * batch_samples, slots + 2)


def make_batches(
    engine: _engine.Engine,
    files: _engine.FileTable,
    pool: _engine.BufferPool,
    sample: Sample,
    batch_samples: int,
    slots: int,
    stall_timeout_s: float,
    on_cuda: bool,
    residence: _engine.Residence | None,
    owner: object = None,
) -> tuple[_engine.Batches, torch.dtype]:
    """A prefetcher of batches of ``sample``, and the dtype of their tensors.

    ``owner`` is kept to the interpreter's end, for a daemon thread may be taking them for it.

    Which one that is says `conversion_on`.
    """
    conversion, dtype = conversion_on(on_cuda, sample)
    strides, step = [], 1
    for size in sample.shape if sample.fortran_order else reversed(sample.shape):
        strides.append(step)
        step *= size
    if not sample.fortran_order:
        strides.reverse()
    batches = _engine.Batches(
        engine,
        files,
        pool,
        slots=slots,
        sample_bytes=sample.bytes,
        batch_samples=batch_samples,
        conversion=conversion,
        type=_DLPACK_TYPES[dtype],
        sample_shape=list(sample.shape),
        sample_strides=strides,
        stall_timeout_s=stall_timeout_s,
        residence=residence,
    )
    _open_batches.add(batches)
    if owner is not None:
        _owners_of_batches.add(owner)
    return batches, dtype


def conversion_on(on_cuda: bool, sample: Sample) -> tuple[str, torch.dtype]:
    """What the engine does with each element of what it reads, and the dtype that comes of it:
    ``sample.torch_dtype`` where it widens them. Not to a GPU, which is sent fewer bytes and casts
    faster.
    """
    conversion = conversion_of(sample)
    if conversion not in _WIDENED.values():
        return conversion, sample.stored_torch_dtype
    return ("none", sample.stored_torch_dtype) if on_cuda else (conversion, sample.torch_dtype)


def conversion_of(sample: Sample) -> str:
    """What the engine does with each element while it copies it (csrc/base/convert.h)."""
    stored = sample.dtype
    if stored.newbyteorder("=") != stored:
        return f"swap_{stored.itemsize // (2 if stored.kind == 'c' else 1)}"
    if sample.torch_dtype == torch.int64:
        return _WIDENED.get(f"{stored.kind}{stored.itemsize}", "none")
    return "none"

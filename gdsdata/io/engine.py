"""Python's access to the engine: the only module that imports the extension."""

from __future__ import annotations

import atexit
import functools
import glob
import importlib.util
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from gdsdata import torch_private
from gdsdata.errors import BackendUnavailable
from gdsdata.fork_safe import fork_safe_lock
from gdsdata.io import program_end  # noqa: F401 (registers its exit handler first, so that it is called last)
from gdsdata.io.budget import available_bytes, processes_here, share_bytes, share_of_cores
from gdsdata.io.conversions import conversion_of, conversion_on
from gdsdata.io.device_names import device_of
from gdsdata.io.dlpack_types import DLPACK_TYPES
from gdsdata.io.options import EngineOptions, staging_for
from gdsdata.warn import warn

try:
    from gdsdata import _engine
except ImportError as error:
    raise ImportError(
        f"gdsdata's extension could not be loaded ({error}). It is built for one Python version at installation: "
        "install gdsdata again with `pip install --no-build-isolation .`, or run `make build` in a source tree."
    ) from error

if TYPE_CHECKING:
    from gdsdata.formats.sample import IndexedFiles, Sample

ROUTES: tuple[str, ...] = _engine.ROUTES
Batches = _engine.Batches
BegunRead = _engine.BegunRead
BlockCache = _engine.BlockCache
BufferPool = _engine.BufferPool
Engine = _engine.Engine
File = _engine.File
FileTable = _engine.FileTable
Mark = _engine.Mark
Output = _engine.Output
PageMemory = _engine.PageMemory
Residence = _engine.Residence
StatePickler = _engine.StatePickler
Stop = _engine.Stop
pickle_claims_too_much = _engine.pickle_claims_too_much
touch = _engine.touch
crc32_joined = _engine.crc32_joined
crc32c_of_rows = _engine.crc32c_of_rows
copy_parts = _engine.copy_parts
crc32_of_parts = _engine.crc32_of_parts
find_files = _engine.find_files
find_names = _engine.find_names
find_statuses = _engine.find_statuses
locate = _engine.locate
object_version = _engine.object_version
unsigned_url = _engine.unsigned_url
http_exchange = _engine.http_exchange
http_refusal = _engine.http_refusal
http_statistics = _engine.http_statistics
use_cache = _engine.use_cache
configure_http = _engine.configure_http
take_access_requests = _engine.take_access_requests
permute = _engine.permute
permute_each = _engine.permute_each
unpack_extents = _engine.unpack_extents
processor_features = _engine.processor_features
direct_refusals = _engine.direct_refusals
noted_fallbacks = _engine.noted_fallbacks
cufile_dma_is_possible = _engine.cufile_dma_is_possible
prefer_huge_pages = _engine.prefer_huge_pages
exchange_capture_mode = _engine.exchange_capture_mode
read_heads = _engine.read_heads

TOP_VARIABLE = "GDSDATA_TOP"  # of the environment: 1 has processes report to `gdsdata.top`

# Well below the system's limit of 65530 mappings a process, because the program needs some too.
_MOST_MAPPED_FILES = 30_000
# If a process may take less memory than this, each worker has little bounce memory: the usual 64
# MiB of all workers would be too much.
_SCARCE_BYTES, _SCARCE_BOUNCE_BYTES = 2**29, 4 * 2**20
# One rank of many may load alone. With 4 workers it has 22 GB/s, with 2 13, with 12 46 (H200).
_LEAST_CORES_OF_GPU = 4
_REQUEST_EDGES_BYTES = 2 * 65536  # as csrc/engine/engine.cpp demands beside a request

# Closed before the interpreter ends: a thread that waits for a batch must return before that.
_open_batches: weakref.WeakSet[_engine.Batches] = weakref.WeakSet()
# Closed, and the threads joined, for the same reason. The threads also free tensors.
_open_endings: weakref.WeakSet[_engine.Endings] = weakref.WeakSet()
_threads_of_endings: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
# Kept until the interpreter has ended. Freeing a tensor releases the GIL, and a daemon thread that
# acquires it again then ends the process.
_owners_of_batches: weakref.WeakSet[object] = weakref.WeakSet()
_kept_to_the_end: list[object] = []


@atexit.register
def _close_batches() -> None:
    _kept_to_the_end.extend(_owners_of_batches)
    for batches in list(_open_batches):
        batches.close()
        waited_until = time.monotonic() + 1.0
        while batches.inside_next and time.monotonic() < waited_until:
            time.sleep(0.002)  # the thread returns with EngineClosed
    _engine.begin_exit()  # ends other waits: for reads and writes, on daemon threads
    for endings in list(_open_endings):
        endings.close()
    waited_until = time.monotonic() + 1.0
    for thread in filter(threading.Thread.is_alive, list(_threads_of_endings)):
        thread.join(max(0.0, waited_until - time.monotonic()))
    while _engine.waiting_calls() and time.monotonic() < waited_until:
        time.sleep(0.002)
    _engine.end_exit()
    _engine.close_http()
    _engine.stop_cufile_statistics()


_engines: weakref.WeakValueDictionary[tuple[int, int, EngineOptions], _engine.Engine] = weakref.WeakValueDictionary()
_making_engine = fork_safe_lock(threading.RLock)  # a signal handler may save while it interrupts the first save
_warned: set[str] = set()
_initialized: set[tuple[int, torch.device]] = set()  # processes, and their devices
# 2 MiB for each worker: seconds of a machine at its fastest, minutes of most.
_MOST_SPANS = 1 << 16
WorkerSpans = tuple[str, list[tuple[str, int, int, int]], int]  # see `end_spans`
# The process that called `begin_spans`, and its engines with their devices' names.
_spanned: tuple[int, list[tuple[str, _engine.Engine]]] | None = None


def shared_engine(options: EngineOptions, device: torch.device) -> _engine.Engine:
    """Return the engine with these options on ``device``; a process has one of each.

    Raises:
        ValueError: an option is out of range.
        BackendUnavailable: the device does not exist; or a backend that is named, or needed with
            ``strict``, cannot work here.
    """
    ordinal = cuda_ordinal(device)
    key = (os.getpid(), ordinal, options)
    with _making_engine:
        engine = _engines.get(key)
        if engine is None:
            if ordinal >= 0:
                _initialize(device)
            if options.backend == "cufile":
                _engine.set_cufile_search_path(cufile_of_wheels())
            fields = vars(options) | staging_for(options, processes_here())
            fields["cores"] = share_of_cores(_LEAST_CORES_OF_GPU if ordinal >= 0 else 1)
            del fields["stall_timeout_s"], fields["calibrate"]
            if options.bounce_bytes == 0 and share_bytes() < _SCARCE_BYTES:
                fields["bounce_bytes"] = max(_SCARCE_BOUNCE_BYTES, options.request_bytes + _REQUEST_EDGES_BYTES)
            engine = _engines.setdefault(key, _engine.Engine(cuda_ordinal=ordinal, **fields))
            if _spanned is not None and _spanned[0] == os.getpid():
                _spanned[1].append(_with_spans(key, engine))
    if engine.fallback_reason:
        warn_once(engine.fallback_reason)
    if os.environ.get(TOP_VARIABLE, "0") not in ("", "0"):
        importlib.import_module("..observe.live.exporter", __package__).start()  # by name: it imports this module
    return engine


def engines_here() -> list[tuple[str, _engine.Engine]]:
    """Return this process's engines, each with the name of its device. Any thread may call it."""
    ours = [(key[1], engine) for key, engine in list(_engines.items()) if key[0] == os.getpid()]
    return [("cpu" if ordinal < 0 else f"cuda:{ordinal}", engine) for ordinal, engine in ours]


def begin_spans() -> None:
    """Keep the spans of this process's workers from now on, and drop older ones."""
    global _spanned
    with _making_engine:
        ours = [(key, engine) for key, engine in list(_engines.items()) if key[0] == os.getpid()]
        _spanned = (os.getpid(), [_with_spans(key, engine) for key, engine in ours])


def _with_spans(key: tuple[int, int, EngineOptions], engine: _engine.Engine) -> tuple[str, _engine.Engine]:
    """Begin an engine's spans; return the name of its device, and the engine."""
    engine.begin_spans(_MOST_SPANS)
    return "cpu" if key[1] < 0 else f"cuda:{key[1]}", engine


def end_spans() -> list[WorkerSpans]:
    """Return the spans since `begin_spans`, of workers that have any.

    Returns:
        For each worker its name, for people; its spans; and how many more spans followed these. A
        span is "page cache", "storage", "link" or "device", its begin and end in ns on the
        monotonic clock, and the bytes delivered in it. They do not overlap.
    """
    global _spanned
    with _making_engine:
        (process, engines), _spanned = _spanned or (0, []), None
        if process != os.getpid():
            return []
        found = []
        for device, engine in engines:
            *of_workers, of_guest = engine.end_spans()
            found += [(f"gdsdata worker {i} ({device})", *kept) for i, kept in enumerate(of_workers)]
            found.append((f"gdsdata in waiting threads ({device})", *of_guest))
    return [(name, spans, dropped) for name, spans, dropped in found if spans]


def kept_engine(options: EngineOptions, device: torch.device) -> _engine.Engine:
    """Return `shared_engine`, kept because its threads cost more than a short call."""
    return _kept_engine(os.getpid(), options, device)


@functools.lru_cache(maxsize=16)
def _kept_engine(process: int, options: EngineOptions, device: torch.device) -> _engine.Engine:
    """Return an engine of this process: the parent's does not work in a forked child."""
    return shared_engine(options, device)


def cuda_ordinal(device: torch.device) -> int:
    """Return a `resolved` CUDA device's place among the visible ones; -1 for the CPU.

    Raises:
        ValueError: a device of another kind.
    """
    if device.type == "cpu":
        return -1
    if device.type != "cuda":
        raise ValueError(f"device={device}: gdsdata knows the CPU and CUDA devices")
    return device.index


def reaches(device: torch.device) -> bool:
    """Return whether the engine works on the device; torch copies to and from others."""
    return device.type in ("cpu", "cuda")


def resolved(device: torch.device | str) -> torch.device:
    """Return the device with its index: "cuda" is the GPU that is current now.

    Raises:
        BackendUnavailable: there is no such device.
    """
    device = device_of(device)
    if device.type in ("cpu", "meta"):
        return device
    _initialize(device)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _initialize(device: torch.device) -> None:
    """Initialize torch first: it then owns the context, which the engine shares."""
    key = os.getpid(), device
    if key in _initialized:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise BackendUnavailable(f"device={device} cannot be used here: {why}", (why,)) from error
    _initialized.add(key)


def cufile_of_wheels() -> list[str]:
    """Return libcufile's paths in torch's dependencies, which no loader searches."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = list(nvidia.submodule_search_locations or []) if nvidia is not None else []
    patterns = [os.path.join(glob.escape(folder), "*", "lib", "libcufile.so.0") for folder in folders]
    return sorted(path for pattern in patterns for path in glob.glob(pattern))  # pathlib takes 0.5 ms longer


def read_each(descriptor: int, path: str, offsets: Sequence[int], size_bytes: int) -> bytes:
    """Return the bytes at several offsets of a file, joined; zeros beyond its end.

    All reads are submitted before the first wait. Pages that were not in the page cache are evicted
    from it again.

    Args:
        descriptor, path: of the file; errors have the path.
        offsets: in bytes.
        size_bytes: how many bytes to read at each offset.

    Raises:
        IoError: the storage refuses a read.
    """
    return _engine.read_each(descriptor, path, np.array(offsets, np.int64), size_bytes).tobytes()


def stream_of(device: torch.device) -> int:
    """Return the handle of the device's current stream in this thread; 0 on the CPU."""
    return torch_private.current_stream_handle(device.index) if device.type == "cuda" else 0


def record_stream(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Note that a GPU's tensor, of a zero-copy batch or torch's own, is used on ``stream`` too."""
    if not _engine.record_stream(tensor.data_ptr(), stream.cuda_stream):
        tensor.record_stream(stream)


def warn_once(message: str) -> None:
    """Warn of a fallback, once for each message in this process."""
    if message not in _warned:
        _warned.add(message)
        warn(f"gdsdata: {message}")


def file_table(index: IndexedFiles, in_memory: Mapping[str, int] | None = None) -> _engine.FileTable:
    """Return a table of an index's files, which are opened when they are first read.

    Behind them are files in memory that this process fills, by path and size in bytes.
    """
    memory = in_memory or {}
    size_bytes = np.concatenate([index.size_bytes, np.fromiter(memory.values(), np.int64, len(memory))])
    mtime_ns = np.concatenate([index.mtime_ns, np.full(len(memory), _engine.ANY_TIME, np.int64)])
    return _reachable(_engine.FileTable(index.joined_paths([*memory]), size_bytes, mtime_ns))


def _reachable(files: _engine.FileTable) -> _engine.FileTable:
    """Return the table; if it has URLs, a thread answers the engine's requests for access."""
    if files.has_remote:
        importlib.import_module(".remote_access", __package__).serve()
    return files


def table_of_one(path: str) -> _engine.FileTable:
    """Return a table of one file, which is opened late, or of an object's newest version."""
    if is_remote(path):
        return importlib.import_module(".remote_access", __package__).table_of(path)
    return _engine.FileTable(path)


def is_remote(path: str) -> bool:
    """Return whether a path is the URL of an object."""
    return "://" in path and _engine.FileTable(path).has_remote


def endings_of(engine: _engine.Engine, thread: threading.Thread) -> _engine.Endings:
    """Return a queue that notifies a thread of completed reads (engine/endings.h).

    When the program ends, it is closed, and the thread is joined within a second.
    """
    endings = _engine.Endings(engine)
    _open_endings.add(endings)
    _threads_of_endings.add(thread)
    return endings


def table_of(
    paths: Sequence[str], seen: Sequence[tuple[int, int]], opened: Sequence[_engine.File | None]
) -> _engine.FileTable:
    """Return a table of files. Those not in ``opened`` are opened when they are read.

    It is an error if another file is not as it was ``seen`` (size in bytes, modification time in
    ns).
    """
    sizes, times = np.ascontiguousarray(np.array(seen, np.int64).reshape(-1, 2).T)
    joined = np.frombuffer(os.fsencode("\0".join(paths)), np.uint8)
    return _reachable(_engine.FileTable(joined, sizes, times, list(opened)))


def residence_of(
    engine: Engine, files: FileTable, index: IndexedFiles, sample: Sample, most_samples: int
) -> _engine.Residence:
    """Map an index's files and register them with the engine's GPU, in the background.

    A slot of the ring has at most ``most_samples`` samples.

    Raises:
        BackendUnavailable: they do not fit into memory, or are too many to be mapped at once.
        ValueError: their samples need a byte swap, which only the processor does.
    """
    if conversion_of(sample).startswith("swap"):
        raise ValueError(
            f'residency="pinned" hands the files to the GPU as they are, but their {sample.dtype} is of the '
            "other byte order: leave residency out, or convert the files"
        )
    if len(index.size_bytes) > _MOST_MAPPED_FILES:
        why = f"{len(index.size_bytes)} files cannot be mapped at once, only {_MOST_MAPPED_FILES}: join them into fewer"
        raise BackendUnavailable(f'residency="pinned": {why}', (why,))
    size_bytes, free_bytes = int(index.size_bytes.sum()), _memory_for_pinning()
    if size_bytes > free_bytes:
        able = f"at most {free_bytes / 1e9:.1f} GB of this machine's memory can be pinned for them now"
        why = f"the files have {size_bytes / 1e9:.1f} GB, and {able}"
        raise BackendUnavailable(f'residency="pinned": {why}; leave residency out, or use less data', (why,))
    return _engine.Residence(engine, files, most_samples)


def _memory_for_pinning() -> int:
    """Return how many bytes can be pinned: the rest of the system needs some too."""
    return int(0.9 * available_bytes())


def buffer_pool(
    engine: _engine.Engine, sample: Sample, batch_samples: int, slots: int, on_cuda: bool
) -> _engine.BufferPool:
    """Return memory for batches: those in slots, one in use, and one just dropped."""
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
    """Return a prefetcher of batches of ``sample``, and the dtype of their tensors.

    ``owner`` is kept to the interpreter's end, because a daemon thread may take batches for it.
    """
    conversion, dtype = conversion_on(on_cuda, sample)
    strides, step = [], 1
    for size in sample.shape if sample.fortran_order else reversed(sample.shape):
        strides.append(step)
        step *= size
    batches = _engine.Batches(
        engine,
        files,
        pool,
        slots=slots,
        sample_bytes=sample.bytes,
        batch_samples=batch_samples,
        conversion=conversion,
        type=DLPACK_TYPES[dtype],
        sample_shape=list(sample.shape),
        sample_strides=strides if sample.fortran_order else strides[::-1],
        stall_timeout_s=stall_timeout_s,
        residence=residence,
    )
    _open_batches.add(batches)
    if owner is not None:
        _owners_of_batches.add(owner)
    return batches, dtype

"""What serves one GPU best from one file system: measured once, and kept.

The engine's own defaults were measured on a few machines. Here, where a data set is first opened for a GPU, choices
that differ from machine to machine are tried on the data set's own files, and one that is clearly better than the
default is kept in ``~/.cache/gdsdata/calibration.json`` (``XDG_CACHE_HOME`` moves it). Deleting that file measures
anew; ``EngineOptions(calibrate=False)`` does without, and a value that was set by hand is never replaced.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdsdata import engine
from gdsdata.errors import GdsdataError
from gdsdata.formats.index import Index, Sample, first_samples
from gdsdata.options import MIB, EngineOptions

VERSION = 1
# A choice has to be so much better than the default to be taken: a busy moment is not to be kept for ever.
CLEARLY_BETTER = 1.15
_READ_BYTES = 256 * MIB  # enough to hide how workers start and end
SMALLEST_FILE_BYTES = _READ_BYTES
_SEGMENTS_STAGED = 3  # have to fit into staging memory: benchmarks/notes/gpu.md
_RECORD_BYTES = 4096
_RECORDS = 2048
_REPEATS = 2
# What was found without measuring, by options, device and file system, until something is measured: to look it up takes
# longer than a short read.
_found: dict[tuple[EngineOptions, torch.device, int], EngineOptions] = {}


@dataclass(frozen=True)
class Calibration:
    """What was chosen, and the figures it was chosen by.

    Attributes:
        backend: ``"cufile"`` where it truly reaches the GPU and was the fastest, else ``"auto"``.
        workers, queue_depth, segment_bytes: as in `EngineOptions`; 0 is the engine's default.
        gb_per_s: of the choices tried, by what was read: "page cache, 8 workers", "storage, cufile".
        records_per_s: random records of 4 KiB past the page cache, by queue depth.
        seconds: that it took.
    """

    backend: str = "auto"
    workers: int = 0
    queue_depth: int = 0
    segment_bytes: int = 0
    gb_per_s: dict[str, float] = field(default_factory=dict)
    records_per_s: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def calibrated(options: EngineOptions, path: str, device: torch.device, measure: bool = True) -> EngineOptions:
    """``options``, with what they leave to gdsdata filled in for files beside ``path`` and this device.

    On the CPU, for files too small to tell and with ``calibrate=False`` they come back as they are; so they do with
    ``measure=False`` where nothing was kept, which this process looks up once a file system.
    """
    if device.type != "cuda" or not options.calibrate:
        return options
    if measure:
        return _calibrated(options, path, device, measure)
    try:
        key = options, device, os.stat(path).st_dev
    except OSError:  # a file that is still to be written
        return _calibrated(options, path, device, measure)
    if key not in _found:
        _found[key] = _calibrated(options, path, device, measure)
    return _found[key]


def _calibrated(options: EngineOptions, path: str, device: torch.device, measure: bool) -> EngineOptions:
    known = load()
    place = place_of(path, device)
    found = known.get(place)
    if found is None:
        if not measure or os.path.getsize(path) < SMALLEST_FILE_BYTES:
            return options
        try:
            found = calibrate(path, device)
        except (GdsdataError, OSError, RuntimeError, MemoryError) as error:  # of them, no memory on the GPU
            engine.warn_once(f"calibration of {place} failed, the defaults are used: {error}")
            return options
        _keep(place, found)
    backend, segment_bytes = options.backend, options.segment_bytes or found.segment_bytes
    if backend == "auto" and found.backend == "cufile" and options.direct != "never":
        backend = "cufile" if engine.cufile_dma_is_possible() else "auto"
    return replace(
        options,
        backend=backend,
        workers=options.workers or found.workers,
        queue_depth=options.queue_depth or found.queue_depth,
        segment_bytes=segment_bytes,
        staging_bytes=max(options.staging_bytes, _SEGMENTS_STAGED * segment_bytes),
    )


def calibrate(path: str, device: torch.device) -> Calibration:
    """Try the choices on ``path``, a file of at least `SMALLEST_FILE_BYTES`.

    Raises:
        IoError, DeviceError, BackendUnavailable: as reading it does.
    """
    started = time.perf_counter()
    into = torch.empty(_READ_BYTES, dtype=torch.uint8, device=device)
    gb_per_s: dict[str, float] = {}

    def rate(name: str, options: EngineOptions) -> float:
        gb_per_s[name] = round(_read_rate(path, into, options), 2)
        return gb_per_s[name]

    cores = len(os.sched_getaffinity(0))
    step = bytearray(4 * MIB)
    with open(path, "rb", buffering=0) as file:  # into the page cache
        for _ in range(_READ_BYTES // len(step)):
            file.readinto(step)
    workers = _better(
        0,
        (4, 16) if cores >= 32 else (4,),
        lambda count: rate(f"page cache, {count or 'default'} workers", EngineOptions(workers=count)),
    )
    segment_bytes = _better(
        0,
        (2 * MIB, 8 * MIB),
        lambda size: rate(
            f"page cache, segments of {size // MIB or 'default'} MiB",
            EngineOptions(workers=workers, segment_bytes=size, staging_bytes=max(13 * MIB, _SEGMENTS_STAGED * size)),
        ),
    )
    backend = "auto"
    if _reaches_device(path, into):
        backend = _better(
            "auto",
            ("cufile",),
            lambda name: rate(f"storage, {name}", EngineOptions(backend=name, workers=workers, direct="always")),
        )
    records_per_s: dict[str, float] = {}

    def records(depth: int) -> float:
        options = EngineOptions(workers=workers, queue_depth=depth, direct="always")
        records_per_s[f"queue depth {depth or 'default'}"] = result = round(_record_rate(path, device, options))
        return result

    try:
        queue_depth = _better(0, (16, 256), records)
    except (GdsdataError, OSError):  # no O_DIRECT here: the depth matters little
        queue_depth = 0
    return Calibration(
        backend, workers, queue_depth, segment_bytes, gb_per_s, records_per_s, round(time.perf_counter() - started, 3)
    )


def load() -> dict[str, Calibration]:
    """What is kept, by device and file system; empty where there is nothing, or nothing that can be read."""
    try:
        kept = json.loads(_path().read_text())
        if kept["version"] != VERSION:
            return {}
        return {key: Calibration(**fields) for key, fields in kept["calibrations"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):  # the last: no home folder
        return {}


def _keep(key: str, calibration: Calibration) -> None:
    _found.clear()
    everything = {"version": VERSION, "calibrations": {name: asdict(kept) for name, kept in load().items()}}
    everything["calibrations"][key] = asdict(calibration)
    try:
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(everything, file, indent=1)
        os.replace(file.name, path)
    except (OSError, RuntimeError) as error:
        engine.warn_once(f"calibration could not be kept and will be measured again: {error}")


def _path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsdata" / "calibration.json"


def place_of(path: str, device: torch.device) -> str:
    """The GPU's kind, the processor's cores and the file system's place: what the figures depend on."""
    real, mount, kind = os.path.realpath(path), "", ""
    with open("/proc/self/mounts") as mounts:
        for line in mounts:
            _, at, file_system, *_ = line.split(" ")
            if (real + "/").startswith(at.rstrip("/") + "/") and len(at) >= len(mount):
                mount, kind = at, file_system
    return f"{torch.cuda.get_device_name(device)}, {len(os.sched_getaffinity(0))} cores, {kind} at {mount}"


def _better(default: Any, others: Iterable[Any], measure: Callable[[Any], float]) -> Any:
    best, best_rate = default, measure(default) * CLEARLY_BETTER
    for other in others:
        rate = measure(other)
        if rate > best_rate:
            best, best_rate = other, rate
    return best


def _read_rate(path: str, into: torch.Tensor, options: EngineOptions) -> float:
    """GB/s of reading the first `_READ_BYTES`, the best of a few; the first makes the engine's memory."""
    shared = engine.shared_engine(options, into.device)
    best = 0.0
    for _ in range(1 + _REPEATS):
        before = shared.mark(engine.stream_of(into.device))
        started = time.perf_counter()
        shared.read(path, 0, into.nbytes, into.data_ptr(), before, False)
        best = max(best, into.nbytes / (time.perf_counter() - started) / 1e9)
    return best


def _reaches_device(path: str, into: torch.Tensor) -> bool:
    """Whether cuFile is there, and moves bytes without the host's memory."""
    if not engine.cufile_dma_is_possible():
        return False
    try:
        shared = engine.shared_engine(EngineOptions(backend="cufile", direct="always", strict=True), into.device)
        shared.read(path, 0, MIB, into.data_ptr(), shared.mark(engine.stream_of(into.device)), False)
    except (GdsdataError, OSError):
        return False
    return shared.statistics()["bytes"]["gds"] > 0


def _record_rate(path: str, device: torch.device, options: EngineOptions) -> float:
    """Random records a second, past the page cache."""
    index = records_of(path, _RECORD_BYTES)
    shared = engine.shared_engine(options, device)
    pool = engine.buffer_pool(shared, index.sample, _RECORDS // 4, 4, on_cuda=True)
    files = engine.file_table(index)
    batches, _ = engine.make_batches(
        shared, files, pool, index.sample, _RECORDS // 4, 4, 60.0, on_cuda=True, residence=None
    )
    try:
        samples = np.random.default_rng(0).integers(0, len(index), _RECORDS)
        best = 0.0
        for _ in range(1 + _REPEATS):  # the first makes the engine's memory
            started = time.perf_counter()
            batches.plan(*index.extents(samples), np.full(4, _RECORDS // 4, np.int64))
            for _ in range(4):
                batches.next(engine.stream_of(device))
            torch.cuda.synchronize(device)
            best = max(best, _RECORDS / (time.perf_counter() - started))
        return best
    finally:
        batches.close()


def records_of(path: str, record_bytes: int) -> Index:
    """A file of anything as records, but for what is left at its end."""
    status = os.stat(path)
    return Index(
        paths=[path],
        size_bytes=np.array([status.st_size]),
        mtime_ns=np.array([status.st_mtime_ns]),
        first_sample=first_samples([status.st_size // record_bytes]),
        base_bytes=np.zeros(1, np.int64),
        stride_bytes=np.full(1, record_bytes, np.int64),
        sample=Sample(np.dtype(np.uint8), (record_bytes,)),
    )

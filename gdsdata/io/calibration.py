"""Measure once what serves a GPU best from a file system, and keep the result.

The engine's defaults were measured on a few machines. When a data set is first opened for a GPU,
the choices that differ from machine to machine are tried on its files. A choice that is clearly
better than the default is kept in ``~/.cache/gdsdata/calibration.json`` (``XDG_CACHE_HOME`` moves
it). If that file is deleted, gdsdata measures again. ``EngineOptions(calibrate=False)`` measures
nothing. A value that a program sets is never replaced.

One process of a node measures at a time, under a lock. A data set's constructor waits for the
result for at most `CONSTRUCTOR_S`. If the measurement takes longer or is disturbed, it is dropped,
the defaults are used, and no constructor measures for a day. To measure beforehand, without that
limit, run ``python -m gdsdata.io.calibration FILE --device cuda:0``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from gdsdata.errors import GdsdataError
from gdsdata.formats.index import records_of
from gdsdata.io import engine
from gdsdata.io.budget import usable_cores
from gdsdata.io.calibration_file import cache_path, change_entry, kept_entries, lock_of_node
from gdsdata.io.options import MIB, STAGED_SEGMENTS, EngineOptions
from gdsdata.values import Value

# A choice must be this much better than the default, so that a busy moment has no lasting effect.
CLEARLY_BETTER = 1.15
_READ_BYTES = 256 * MIB  # enough to hide how workers start and end
SMALLEST_FILE_BYTES = _READ_BYTES
_RECORD_BYTES = 4096
_RECORDS = 2048
_REPEATS = 3
# If the two best repeats differ by a larger factor, something else used the machine meanwhile.
_UNDISTURBED = 1.1
# Cores that other processes may take during a measurement, all together.
_MOST_OTHER_CORES = 1.0
# A data set's constructor waits at most this long for a measurement, its own or another process's.
CONSTRUCTOR_S = 0.3
_LOOK_S = 0.01
# After a constructor got no result, no other one measures for this long.
_RETRY_S = 24 * 3600
# Results without a measurement, by options, device and file system. A new measurement clears them.
# Another lookup would take longer than a short read.
_found: dict[tuple[EngineOptions, torch.device, int], EngineOptions] = {}


class Disturbed(Exception):
    """A measurement must not be kept; the message says why."""


@dataclass(eq=False, repr=False)
class Calibration(Value):
    """A choice, and the figures behind it.

    Attributes:
        backend: ``"cufile"`` if it really reaches the GPU and was the fastest, else ``"auto"``.
        workers, queue_depth, segment_bytes: as in `EngineOptions`; 0 is the engine's default.
        gb_per_s: of each choice that was tried: "page cache, 8 workers", "storage, cufile".
        records_per_s: random records of 4 KiB past the page cache, by queue depth.
        seconds: how long the measurement took.
    """

    backend: str = "auto"
    workers: int = 0
    queue_depth: int = 0
    segment_bytes: int = 0
    gb_per_s: dict[str, float] = field(default_factory=dict)
    records_per_s: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def calibrated(options: EngineOptions, path: str, device: torch.device, measure: bool = True) -> EngineOptions:
    """Return ``options`` with choices for files beside ``path`` and this device.

    They are returned unchanged on the CPU, for files that are too small to measure, and with
    ``calibrate=False``. With ``measure=False`` they are also unchanged if nothing was kept; this
    process looks that up once for each file system.
    """
    if device.type != "cuda" or not options.calibrate:
        return options
    if measure:
        return _calibrated(options, path, device, measure)
    try:
        key = options, device, os.stat(path).st_dev
    except OSError:  # the file is still to be written
        return _calibrated(options, path, device, measure)
    found = _found.get(key)  # another thread may clear it
    if found is None:
        found = _found[key] = _calibrated(options, path, device, measure)
    return found


def _calibrated(options: EngineOptions, path: str, device: torch.device, measure: bool) -> EngineOptions:
    known, measure = load(), measure and os.path.getsize(path) >= SMALLEST_FILE_BYTES
    if not known and not measure:
        return options
    place = place_of(path, device)
    found = known.get(place)
    if found is None and measure:
        found = _measured_within(CONSTRUCTOR_S, path, device, place)
    if found is None:
        return options
    backend, segment_bytes = options.backend, options.segment_bytes or found.segment_bytes
    if backend == "auto" and found.backend == "cufile" and options.direct != "never":
        backend = "cufile" if engine.cufile_dma_is_possible() else "auto"
    return replace(
        options,
        backend=backend,
        workers=options.workers or found.workers,
        queue_depth=options.queue_depth or found.queue_depth,
        segment_bytes=segment_bytes,
        # 0 stays: the engine then chooses what holds these segments.
        staging_bytes=max(options.staging_bytes, STAGED_SEGMENTS * segment_bytes) if options.staging_bytes else 0,
    )


def _measured_within(seconds: float, path: str, device: torch.device, place: str) -> Calibration | None:
    """Return what a process of this node measures in time; None: the defaults."""
    ends = time.monotonic() + seconds
    if given_up_lately(place):
        return None
    try:
        lock = lock_of_node()
    except BlockingIOError:  # another process or thread measures
        while time.monotonic() < ends:
            time.sleep(_LOOK_S)
            if (found := load().get(place)) is not None:
                return found
        return None
    except OSError as error:
        engine.warn_once(
            f"the folder of calibrations cannot be locked, so nothing is calibrated: {error}. {_advice(path, device)}"
        )
        return None
    if (found := load().get(place)) is not None:  # another process has just measured it
        os.close(lock)
        return found
    measured: list[Calibration | Exception] = []
    give_up = threading.Event()

    def measure() -> None:
        try:
            with contextlib.closing(os.fdopen(lock)):
                found = calibrate(path, device, give_up.is_set)
                if not give_up.is_set():
                    _keep(place, found)
                measured.append(found)
        except (GdsdataError, OSError, RuntimeError, MemoryError, Disturbed) as error:  # or no memory on the GPU
            measured.append(error)

    thread = threading.Thread(target=measure, name="gdsdata-calibration")
    thread.start()
    thread.join(max(0.0, ends - time.monotonic()))
    if thread.is_alive():
        give_up.set()
        _keep_given_up(place)
        engine.warn_once(
            f"calibration of {place} takes longer than {seconds} s, so the defaults are used. {_advice(path, device)}"
        )
        return None
    if isinstance(measured[0], Calibration):
        return measured[0]
    _keep_given_up(place)  # or each data set would wait for it
    if not isinstance(measured[0], Disturbed):
        engine.warn_once(f"calibration of {place} failed, the defaults are used: {measured[0]}")
    return None


def _advice(path: str, device: torch.device) -> str:
    return f"To calibrate beforehand: python -m gdsdata.io.calibration '{path}' --device {device}"


def calibrate(path: str, device: torch.device, gives_up: Callable[[], bool] = lambda: False) -> Calibration:
    """Try the choices on ``path``, a file of at least `SMALLEST_FILE_BYTES`.

    Args:
        path: the file.
        device: a GPU.
        gives_up: called between the measurements; True ends them.

    Raises:
        IoError, DeviceError, BackendUnavailable: the file cannot be read into the GPU.
        Disturbed: the machine was busy with something else, or ``gives_up`` returned True.
    """
    started = time.perf_counter()
    _check_idle()
    others = _OtherProcesses()
    into = torch.empty(_READ_BYTES, dtype=torch.uint8, device=device)
    gb_per_s: dict[str, float] = {}

    def rate(name: str, options: EngineOptions) -> float:
        gb_per_s[name] = round(_read_rate(path, into, options, gives_up), 2)
        return gb_per_s[name]

    cores = usable_cores()
    step = bytearray(4 * MIB)
    with open(path, "rb", buffering=0) as file:  # into the page cache
        for _ in range(_READ_BYTES // len(step)):
            _check_wanted(gives_up)
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
            EngineOptions(workers=workers, segment_bytes=size),
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
        records_per_s[f"queue depth {depth or 'default'}"] = result = round(
            _record_rate(path, device, options, gives_up)
        )
        return result

    try:
        queue_depth = _better(0, (16, 256), records)
    except (GdsdataError, OSError):  # without O_DIRECT the depth matters little
        queue_depth = 0
    _check_idle()
    others.check()
    return Calibration(
        backend, workers, queue_depth, segment_bytes, gb_per_s, records_per_s, round(time.perf_counter() - started, 3)
    )


def _check_wanted(gives_up: Callable[[], bool]) -> None:
    if gives_up():
        raise Disturbed("it was given up")


def _check_idle() -> None:
    """Raise `Disturbed` if more threads run here than the machine has cores."""
    with open("/proc/loadavg") as file:
        running = int(file.read().split()[3].split("/")[0])
    cores = os.cpu_count() or 1
    if running > cores:
        raise Disturbed(f"{running} threads run on {cores} cores")


class _OtherProcesses:
    """Watches the CPU time of the machine's other processes, from here on.

    A rank that reads at a steady rate disturbs all repeats alike, so they agree.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._taken_s = self._seconds()

    def check(self) -> None:
        """Raise `Disturbed` if they have taken more than `_MOST_OTHER_CORES`."""
        cores = (self._seconds() - self._taken_s) / (time.monotonic() - self._began)
        if cores > _MOST_OTHER_CORES:
            raise Disturbed(f"other processes took {cores:.1f} cores meanwhile")

    @staticmethod
    def _seconds() -> float:
        with open("/proc/stat") as file:
            user, nice, system, *_ = map(int, file.readline().split()[1:])  # format: proc_stat(5)
        return (user + nice + system) / os.sysconf("SC_CLK_TCK") - time.process_time()


def _best_of(rates: list[float]) -> float:
    """Return the best rate, or raise `Disturbed` if the second best differs."""
    second, best = sorted(rates)[-2:]
    if best > _UNDISTURBED * second:
        raise Disturbed(f"the same was measured {best:.3g} and {second:.3g} fast")
    return best


def load() -> dict[str, Calibration]:
    """Return the kept calibrations that can be read, by device and file system."""
    found = {}
    for key, fields in kept_entries().get("calibrations", {}).items():
        with contextlib.suppress(TypeError, ValueError):
            kept = Calibration(**fields)
            EngineOptions(workers=kept.workers, queue_depth=kept.queue_depth, segment_bytes=kept.segment_bytes)
            found[key] = kept
    return found


def _keep(key: str, calibration: Calibration) -> None:
    _found.clear()
    change_entry("calibrations", key, asdict(calibration))


def _keep_given_up(key: str) -> None:
    change_entry("given_up", key, time.time())


def given_up_lately(place: str) -> bool:
    """Return whether a constructor got no result within the last day, so that none measures now."""
    # One in the future is of a clock that was wrong.
    when = kept_entries().get("given_up", {}).get(place, 0)
    return isinstance(when, (int, float)) and 0 <= time.time() - when < _RETRY_S


def place_of(path: str, device: torch.device) -> str:
    """Return what figures depend on: kind of GPU, number of cores, file system."""
    real, mount, kind = os.path.realpath(path), "", ""
    with open("/proc/self/mounts") as mounts:
        for line in mounts:
            _, at, file_system, *_ = line.split(" ")
            if (real + "/").startswith(at.rstrip("/") + "/") and len(at) >= len(mount):
                mount, kind = at, file_system
    return f"{torch.cuda.get_device_name(device)}, {usable_cores()} cores, {kind} at {mount}"


def _better(default: Any, others: Iterable[Any], measure: Callable[[Any], float]) -> Any:
    best, best_rate = default, measure(default) * CLEARLY_BETTER
    for other in others:
        rate = measure(other)
        if rate > best_rate:
            best, best_rate = other, rate
    return best


def _read_rate(path: str, into: torch.Tensor, options: EngineOptions, gives_up: Callable[[], bool]) -> float:
    """Return GB/s, the best of a few reads. The first allocates the engine's memory."""
    shared = engine.shared_engine(options, into.device)
    rates = []
    for _ in range(1 + _REPEATS):
        _check_wanted(gives_up)
        before = shared.mark(engine.stream_of(into.device))
        started = time.perf_counter()
        shared.read(path, 0, into, before, False)
        rates.append(into.nbytes / (time.perf_counter() - started) / 1e9)
    return _best_of(rates)


def _reaches_device(path: str, into: torch.Tensor) -> bool:
    """Return whether cuFile is available, and moves bytes without the host's memory."""
    if not engine.cufile_dma_is_possible():
        return False
    try:
        shared = engine.shared_engine(EngineOptions(backend="cufile", direct="always", strict=True), into.device)
        shared.read(path, 0, into[:MIB], shared.mark(engine.stream_of(into.device)), False)
    except (GdsdataError, OSError):
        return False
    return shared.statistics()["bytes"]["gds"] > 0


def _record_rate(path: str, device: torch.device, options: EngineOptions, gives_up: Callable[[], bool]) -> float:
    """Return random records a second, read past the page cache."""
    index = records_of(path, _RECORD_BYTES)
    shared = engine.shared_engine(options, device)
    pool = engine.buffer_pool(shared, index.sample, _RECORDS // 4, 4, on_cuda=True)
    files = engine.file_table(index)
    batches, _ = engine.make_batches(
        shared, files, pool, index.sample, _RECORDS // 4, 4, 60.0, on_cuda=True, residence=None
    )
    try:
        samples = np.random.default_rng(0).integers(0, len(index), _RECORDS)
        rates = []
        for _ in range(1 + _REPEATS):  # the first allocates the engine's memory
            _check_wanted(gives_up)
            started = time.perf_counter()
            plan = index.plan(samples)
            batches.plan(plan.source, plan.offset, np.full(4, _RECORDS // 4, np.int64))
            for _ in range(4):
                batches.next(engine.stream_of(device))
            torch.cuda.synchronize(device)
            rates.append(_RECORDS / (time.perf_counter() - started))
        return _best_of(rates)
    finally:
        batches.close()


_ATTEMPTS = 5


def main(arguments: list[str] | None = None) -> int:
    """Measure without a limit of time, and keep the result.

    Returns the exit status.
    """
    parser = argparse.ArgumentParser("python -m gdsdata.io.calibration", description=__doc__.splitlines()[0])
    parser.add_argument("path", help=f"a file of {SMALLEST_FILE_BYTES // MIB} MiB or more, on the file system")
    parser.add_argument("--device", default="cuda", help="the GPU (default: the current one)")
    asked = parser.parse_args(arguments)
    try:
        device = engine.resolved(asked.device)
        if device.type != "cuda" or os.path.getsize(asked.path) < SMALLEST_FILE_BYTES:
            parser.error(f"needs a GPU and a file of {SMALLEST_FILE_BYTES // MIB} MiB or more")
        lock = lock_of_node(wait=True)
    except (GdsdataError, OSError) as error:
        print(f"{asked.path}: {error}", file=sys.stderr)
        return 1
    why: Exception | None = None
    with contextlib.closing(os.fdopen(lock)):
        for _ in range(_ATTEMPTS):
            try:
                found = calibrate(asked.path, device)
            except Disturbed as error:
                why = error
                continue
            except (GdsdataError, OSError, RuntimeError) as error:
                why = error
                break
            _keep(place_of(asked.path, device), found)
            print(f"{place_of(asked.path, device)}: {found}, kept in {cache_path()}")
            return 0
    print(f"{asked.path}: nothing is kept, because the machine was busy or reading failed: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

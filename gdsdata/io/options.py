"""Options of the engine, which are also the schema of the bench's configuration."""

from __future__ import annotations

import numbers
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

from gdsdata.values import Value

_KINDS: dict[type, tuple[Any, str]] = {  # by the type of an option's default
    str: (str, "a str"),
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
}
MIB = 2**20
_LARGEST = 2**62  # so that sums of options do not exceed 64 bits
# A worker fills one segment, copies one, and waits for one: staging memory holds so many.
STAGED_SEGMENTS = 3
# Staging memory of a worker, of one process on a machine and of several
# (docs/design-decisions.md has the measurements). That of all processes together should stay in the
# processor's caches. `benchmarks/once.py` shows it.
_STAGING_BYTES, _STAGING_BYTES_OF_SEVERAL, _SEGMENT_BYTES_OF_SEVERAL = 10 * MIB, 8 * MIB, 2 * MIB


@dataclass(eq=False, repr=False)
class EngineOptions(Value):
    """Options that say how bytes move. Most programs need none.

    The defaults were measured (docs/design-decisions.md). The engine takes at most ``workers *
    bounce_bytes`` of host memory. On a GPU it takes ``workers * (staging_bytes + 1.3 MiB)`` more,
    and 1.3 MiB for short reads. Each data set that is iterated also has ``prefetch + 2`` batches in
    memory. `GDSDataset.stats` reports both.

    The options from ``segment_bytes`` on are for experts, and by keyword only. ``python -m
    gdsdata.bench case=tune`` searches for better values on a machine.

    Attributes:
        backend: ``"uring"`` (io_uring), ``"posix"`` (pread and pwrite), ``"cufile"``, or
            ``"auto"``: the best one that works here. ``"cufile"`` uses GPUDirect Storage for data
            that is not in the page cache, and io_uring for the rest.
        workers: threads that move bytes. 0 chooses. With io_uring it is one for each core of this
            process's share, at most 12 to a GPU and 8 to the CPU. On the CPU the consumer copies
            too, so one fewer. The processes of this job on the machine (``LOCAL_WORLD_SIZE``) share
            the cores that affinities and quotas of control groups allow. To a GPU, each takes up to
            4 of them. With posix it is 8, because each worker has one request in flight.
        queue_depth: requests that one worker keeps in flight, queued writes included. 0: 64.
        direct: ``"auto"`` copies data that is in the page cache, and reads the rest with O_DIRECT
            if the file system allows it. ``"always"`` uses only O_DIRECT. ``"never"`` reads through
            the page cache, which fills it.
        strict: raise an error instead of warning of a fallback (no io_uring, O_DIRECT refused,
            cuFile failed).
        calibrate: on a GPU, let `gdsdata.io.calibration` choose the options that are ``"auto"`` or
            0. It measures once on each file system and remembers.
        stall_timeout_s: raise `StallError` if no awaited byte has moved for this many seconds. All
            of a read may take longer. Futures of `Engine.read` have the timeout of their ``result``
            instead.
        segment_bytes: most bytes of a batch that one worker takes at a time. All workers share a
            batch, in segments of at least 1 MiB. Reads to the CPU have shorter ones if there are
            several workers. 0: 512 KiB, 3 MiB on the way to a GPU, 4 MiB from a GPU, 8 MiB for
            writes from the CPU.
        request_bytes: longest single request to storage.
        bounce_bytes: page-aligned memory of one worker that O_DIRECT reads into and writes from,
            allocated when first needed. 0: the workers share 64 MiB, with at least 16 MiB each. If
            the machine or a control group has less than 1 GiB left, each has 4 MiB. io_uring has
            half of it, or two requests, of writes in flight while it prepares the other half.
        staging_bytes: pinned memory of one worker that bytes pass on their way to a GPU. 0: 10 MiB,
            or three times ``segment_bytes`` or ``request_bytes`` if that is more. If several
            processes of this job run on the machine (``LOCAL_WORLD_SIZE``), it is 8 MiB, with
            segments of 2 MiB both ways. Short reads have 1.3 MiB of their own. Each is allocated
            when first needed.
        coalesce_gap_bytes: one request reads extents that are at most this far apart.
        cufile_batch: give cuFile its requests by its batch interface instead of blocking calls on
            the workers.
        faults: inject faults, for tests: see ``csrc/backend/faulty.h``.
    """

    backend: str = "auto"
    workers: int = 0
    queue_depth: int = 0
    direct: str = "auto"
    strict: bool = False
    calibrate: bool = True
    stall_timeout_s: float = 60.0
    _: KW_ONLY
    segment_bytes: int = 0
    request_bytes: int = MIB
    bounce_bytes: int = 0
    staging_bytes: int = 0
    coalesce_gap_bytes: int = 16384
    cufile_batch: bool = False
    faults: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, (kind, remedy) = getattr(self, field.name), _KINDS[type(field.default)]
            if value is field.default:
                continue
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                shown = f"{field.name}={value!r:.100}"
                raise TypeError(f"EngineOptions({shown}) is of type {type(value).__name__}: give {remedy}")
            if not isinstance(value, (str, bool)) and not value >= 0:
                raise ValueError(f"EngineOptions({field.name}={value}) must not be negative: give 0 or more")
            if isinstance(value, numbers.Integral) and int(value) > _LARGEST:
                raise ValueError(f"EngineOptions({field.name}={value}) is more than 2**62: give less")

    def __repr__(self) -> str:
        """Show only the options that differ from their defaults."""
        changed = [(field.name, getattr(self, field.name)) for field in fields(self)]
        shown = [f"{name}={value!r}" for name, value in changed if value != getattr(type(self), name)]
        return f"EngineOptions({', '.join(shown)})"


_DEFAULTS = EngineOptions()


def options_of(options: EngineOptions | None) -> EngineOptions:
    """Return a user's ``options``, or the defaults for None.

    Raises:
        TypeError: they are something else.
    """
    if options is None:
        return _DEFAULTS
    if not isinstance(options, EngineOptions):
        raise TypeError(f"options={options!r:.60} must be a gdsdata.EngineOptions, as in EngineOptions(workers=4)")
    return options


def staging_for(options: EngineOptions, processes: int) -> dict[str, int]:
    """Return ``staging_bytes`` if ``options`` leave it open, and what changes with it.

    Args:
        options: of the engine.
        processes: how many of this job run on this machine.
    """
    if options.staging_bytes:
        return {}
    longest = max(options.segment_bytes, options.request_bytes)  # a request may be longer than a segment
    least = STAGED_SEGMENTS * longest
    if options.segment_bytes == 0 and processes > 1:
        return {"staging_bytes": max(_STAGING_BYTES_OF_SEVERAL, least), "segment_bytes": _SEGMENT_BYTES_OF_SEVERAL}
    return {"staging_bytes": max(_STAGING_BYTES, least)}

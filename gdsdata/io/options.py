"""Options of the engine, with their units in their names. They double as the schema of the bench's configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields

MIB = 2**20


@dataclass(frozen=True)
class EngineOptions:
    """How bytes move. The defaults were measured (``benchmarks/notes/``); most programs need none of these.

    Host memory is bounded by ``workers * bounce_bytes`` (on a GPU, ``workers * (staging_bytes + 1.3 MiB)`` besides, and
    1.3 MiB for short reads), and the memory of batches by ``prefetch + 2`` of them in each data set that is being
    iterated; both are reported by `GDSDataset.stats`.

    Attributes:
        backend: ``"uring"`` (io_uring), ``"posix"`` (pread and pwrite), ``"cufile"`` (GPUDirect Storage for what is not
            in the page cache, and io_uring for the rest), or ``"auto"``: the better of those that work.
        workers: threads that move bytes. 0: with io_uring one fewer than cores, from 1 to 8 (the consumer copies too,
            rather than sleep); with posix 8, for each has one request in flight.
        queue_depth: requests that one worker keeps in flight, writes that are ready for it included. 0: 64.
        segment_bytes: what a worker takes from a batch at a time, at most: a batch is shared by all workers, but not in
            segments of less than 1 MiB. 0: 1 MiB, 4 MiB on the way to a GPU, and 8 MiB for writes from the CPU.
        request_bytes: longest single request to storage.
        bounce_bytes: page-aligned memory of one worker that O_DIRECT reads into and writes from; taken when first
            needed. 0: 64 MiB shared out among the workers, but 16 MiB at least for each; 4 MiB for each where less than
            1 GiB of memory is left, of the machine or a control group. Of writes io_uring has half as
            much in flight, or two requests, while as much gets ready.
        staging_bytes: pinned memory of one worker where bytes stop over on their way to a GPU. Short reads have 1.3 MiB
            of their own there first; each is taken when it is needed.
        coalesce_gap_bytes: extents at most so far apart are read by one request.
        direct: ``"auto"`` copies what is in the page cache and reads the rest with O_DIRECT where the file system
            allows it; ``"always"`` uses O_DIRECT only; ``"never"`` reads through the page cache, and so fills it.
        strict: raise where a fallback would be taken (no io_uring, O_DIRECT refused, cuFile failed) instead of warning.
        cufile_batch: give cuFile its requests by its batch interface, not by blocking calls on the workers.
        calibrate: on a GPU, let what is left at ``"auto"`` or 0 be chosen by `gdsdata.io.calibration`, which tries it
            once on each file system and remembers.
        stall_timeout_s: raise `StallError` when no byte that is waited for has moved for so long, however long all
            of it takes. Futures of `Engine.read` have the timeout of their ``result``, and none of their own.
        faults: trouble on purpose, for tests: see ``csrc/backend/faulty.h``.
    """

    backend: str = "auto"
    workers: int = 0
    queue_depth: int = 0
    segment_bytes: int = 0
    request_bytes: int = MIB
    bounce_bytes: int = 0
    staging_bytes: int = 13 * MIB
    coalesce_gap_bytes: int = 16384
    direct: str = "auto"
    strict: bool = False
    cufile_batch: bool = False
    calibrate: bool = True
    stall_timeout_s: float = 60.0
    faults: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (str, bool)) and value < 0:
                raise ValueError(f"EngineOptions({field.name}={value}) must not be negative")

"""Options of the engine, with their units in their names. They double as the schema of the bench's configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields

MIB = 2**20


@dataclass(frozen=True)
class EngineOptions:
    """How bytes move. The defaults were measured (``benchmarks/notes/``); most programs need none of these.

    Memory is bounded by ``workers * bounce_bytes`` here, and by ``prefetch + 2`` batches in each data set that is being
    iterated; both are reported by `GDSDataset.stats`.

    Attributes:
        backend: ``"uring"`` (io_uring), ``"posix"`` (pread and pwrite), or ``"auto"``: the better of those that work.
        workers: threads that move bytes. 0: with io_uring one fewer than cores, from 1 to 8 (the consumer copies too,
            rather than sleep); with posix 8, for each has one request in flight.
        queue_depth: requests that one worker keeps in flight.
        segment_bytes: what a worker takes from a batch at a time.
        request_bytes: longest single request to storage.
        bounce_bytes: page-aligned memory of one worker that O_DIRECT reads into; taken when first needed.
        coalesce_gap_bytes: extents at most so far apart are read by one request.
        direct: ``"auto"`` copies what is in the page cache and reads the rest with O_DIRECT where the file system
            allows it; ``"always"`` uses O_DIRECT only; ``"never"`` reads through the page cache, and so fills it.
        strict: raise where a fallback would be taken (no io_uring, O_DIRECT refused) instead of warning.
        stall_timeout_s: raise `StallError` when no read has ended for so long.
        faults: trouble on purpose, for tests: see ``csrc/backend/faulty.h``.
    """

    backend: str = "auto"
    workers: int = 0
    queue_depth: int = 64
    segment_bytes: int = MIB
    request_bytes: int = MIB
    bounce_bytes: int = 16 * MIB
    coalesce_gap_bytes: int = 16384
    direct: str = "auto"
    strict: bool = False
    stall_timeout_s: float = 60.0
    faults: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (str, bool)) and value < 0:
                raise ValueError(f"EngineOptions({field.name}={value}) must not be negative")

"""``--test``: a verified write and read by each available path, and its cost."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gdsdata.doctor.evidence import within
from gdsdata.doctor.finding import Finding
from gdsdata.errors import GdsdataError
from gdsdata.io import engine
from gdsdata.io.options import MIB, EngineOptions
from gdsdata.io.tensor import Engine

TEST_BYTES = 64 * MIB
TRANSFER_LIMIT_S = 60.0
_ENDING_LIMIT_S = 5.0
_WARM_UP_BYTES = MIB
_SILENCE = f"no end within {TRANSFER_LIMIT_S:g} s"
_VIA_HOST, _CUFILE = "GPU by way of the host", "cuFile"
_CHEAPER = 0.5  # the most CPU time of direct transfers, as a share of that through the host: see `cpu_use`


@dataclass(frozen=True)
class Transfer:
    """One row of the test.

    Attributes:
        path: the path that was requested.
        direction: "write" or "read".
        gb_per_s: 1e9 bytes a second, up to the last byte; a write is on storage.
        cpu_s_per_gb: CPU seconds, user and system, of this process's threads for each 1e9 bytes.
        served_by: bytes by the route on which the engine counted them (`gdsdata.io.engine.ROUTES`).
        correct: whether each byte is the one that was written; None if that was not compared.
        error: why it was not compared, or what differs; else empty.
    """

    path: str
    direction: str
    gb_per_s: float = 0.0
    cpu_s_per_gb: float = 0.0
    served_by: dict[str, int] = field(default_factory=dict)
    correct: bool | None = None
    error: str = ""

    @property
    def outcome(self) -> str:
        return {True: "verified", False: "CORRUPT", None: "not run"}[self.correct]


@dataclass(frozen=True)
class Way:
    """A path to test, and the ``--require`` that asks for it."""

    name: str
    requirement: str
    device: str
    options: EngineOptions


def ways() -> list[Way]:
    """Return the paths that this machine may have, those to a GPU included."""
    found = [
        Way("buffered, threads", "any", "cpu", EngineOptions(backend="posix", direct="never")),
        Way("O_DIRECT, threads", "direct", "cpu", EngineOptions(backend="posix", direct="always")),
        Way("O_DIRECT, io_uring", "io_uring", "cpu", EngineOptions(backend="uring", direct="always")),
    ]
    if torch.cuda.is_available():
        found += [
            Way(_VIA_HOST, "gpu", "cuda", EngineOptions(direct="always", calibrate=False)),
            Way(_CUFILE, "gds", "cuda", EngineOptions(backend="cufile", direct="always", calibrate=False)),
        ]
    return found


def run(path: str, tested: Sequence[Way] | None = None, size_bytes: int = TEST_BYTES) -> list[Transfer]:
    """Write and read ``size_bytes`` by each way, in a new folder beside ``path``.

    Raises:
        OSError: the folder cannot be made.
    """
    rows: list[Transfer] = []
    with _folder_beside(path) as folder:
        for way in ways() if tested is None else tested:
            rows += _write_and_read(os.path.join(folder, "data"), way, size_bytes)
    return rows


def verified(rows: Sequence[Transfer], requirement: str, tested: Sequence[Way] | None = None) -> bool:
    """Return whether all bytes were right, and the required path served (gds: DMA)."""
    if any(row.correct is False for row in rows):
        return False
    asked = {way.name for way in (ways() if tested is None else tested) if way.requirement == requirement}
    done = [row for row in rows if row.correct and (requirement == "any" or row.path in asked)]
    if requirement == "gds":
        done = [row for row in done if row.served_by.get("gds")]
    return {row.direction for row in done} == {"write", "read"}


def cpu_use(rows: Sequence[Transfer]) -> Finding:
    """Check that cuFile used DMA, and less CPU time than the path through the host.

    Copies through the host cost several times as much as requests for DMA. Storage vendors publish
    15 % of user time against 3 % at one rate.
    """
    question = "cuFile spares the CPU"
    read = {row.path: row for row in rows if row.direction == "read" and row.correct}
    through_host, cufile = read.get(_VIA_HOST), read.get(_CUFILE)
    if through_host is None or cufile is None:
        return Finding(
            "cpu_use", question, "unknown", "it takes a read by cuFile and one by way of the host to compare"
        )
    said = f"{cufile.cpu_s_per_gb:.3f} cpu-s/GB, {through_host.cpu_s_per_gb:.3f} by way of the host"
    if not cufile.served_by.get("gds"):
        remedy = "cuFile itself went by way of the host: look at cufile.log, and at each other no"
        return Finding("cpu_use", question, "no", f"{said}; none of it by DMA", remedy)
    if cufile.cpu_s_per_gb > _CHEAPER * through_host.cpu_s_per_gb:
        remedy = "compare with more bytes; look at unaligned operations in gds_stats -l 3"
        return Finding("cpu_use", question, "no", said, remedy)
    return Finding("cpu_use", question, "yes", said)


def abandoned(rows: Sequence[Transfer]) -> bool:
    """Return whether a transfer is still in progress, and may never end."""
    return any(row.error == _SILENCE for row in rows)


@contextlib.contextmanager
def _folder_beside(path: str) -> Iterator[str]:
    """Make a temporary folder, which Ctrl-C, SIGTERM and SIGHUP remove too."""
    beside = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP) if in_main}
    # A signal that is ignored, as by nohup, stays so. A handler in C (None) could not be put back.
    replaced = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    folder = tempfile.mkdtemp(dir=beside, prefix=".gdsdata-doctor-")
    try:
        for number in replaced:
            signal.signal(number, _interrupt)
        yield folder
    finally:
        with contextlib.suppress(TimeoutError):
            within(_ENDING_LIMIT_S, lambda: shutil.rmtree(folder, ignore_errors=True))
        for number, handler in replaced.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _write_and_read(path: str, way: Way, size_bytes: int) -> list[Transfer]:
    rows = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fallback is seen in the row's route
            device = engine.resolved(way.device)
            wrote = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8).to(device)
            read = torch.zeros_like(wrote)
            moved = Engine(way.options)
            try:
                moved.write(path, wrote[:_WARM_UP_BYTES]).result(timeout=TRANSFER_LIMIT_S)  # makes threads and memory
                rows.append(_measured(moved, way, "write", size_bytes, lambda: moved.write(path, wrote)))
                rows[0] = _checked(rows[0], _plainly_read(path), wrote.cpu())
                _drop_from_page_cache(path)
                rows.append(_measured(moved, way, "read", size_bytes, lambda: moved.read(path, into=read)))
                rows[1] = _checked(rows[1], read.cpu(), wrote.cpu())
            finally:
                with contextlib.suppress(TimeoutError):
                    within(_ENDING_LIMIT_S, moved.close)
    except concurrent.futures.TimeoutError:
        rows += [Transfer(way.name, direction, error=_SILENCE) for direction in ("write", "read")[len(rows) :]]
    except (GdsdataError, OSError, RuntimeError, MemoryError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        rows += [Transfer(way.name, direction, error=why) for direction in ("write", "read")[len(rows) :]]
    return rows


def _measured(
    moved: Engine, way: Way, direction: str, size_bytes: int, start: Callable[[], concurrent.futures.Future[Any]]
) -> Transfer:
    before = _routes(moved)
    started, cpu = time.perf_counter(), time.process_time()
    start().result(timeout=TRANSFER_LIMIT_S)
    cpu, elapsed = time.process_time() - cpu, time.perf_counter() - started
    after = _routes(moved)
    served_by = {route: after[route] - before[route] for route in after}
    gb = size_bytes / 1e9
    return Transfer(way.name, direction, round(gb / elapsed, 3), round(cpu / gb, 4), served_by)


def _routes(moved: Engine) -> dict[str, int]:
    """Return the bytes so far by route, of an engine that is used on one device."""
    (counts,) = moved.stats().values()
    return dict(counts["bytes"])


def _checked(row: Transfer, got: torch.Tensor, expected: torch.Tensor) -> Transfer:
    correct = torch.equal(got, expected)
    error = ""
    if not correct:
        if got.shape != expected.shape:
            error = f"{got.numel()} bytes were read, {expected.numel()} were written"
        else:
            wrong = (got != expected).nonzero()
            error = f"{len(wrong)} bytes differ, the first at offset {int(wrong[0])}"
    return Transfer(row.path, row.direction, row.gb_per_s, row.cpu_s_per_gb, row.served_by, correct, error)


def _plainly_read(path: str) -> torch.Tensor:
    """Read without the engine, whose writes and reads may be wrong alike."""
    with open(path, "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)


def _drop_from_page_cache(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)

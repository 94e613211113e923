"""Where a training loop's time went: what `GDSDataset.report` says, and what it is worked out from."""

from __future__ import annotations

import operator
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from gdsdata import torch_private

T = TypeVar("T")

# Below this share of a step nobody gains by looking for more.
_NOTICED = 0.02
# Requests as small as this are what a disk does so many of a second, rather than so many bytes.
_SMALL_REQUEST_BYTES = 32 * 1024
# Of the loop's time, what workers do for less than this does not hold the batches up.
_SOME = 0.1

TRAINING, TRANSFORM, STORAGE, SMALL_READS = "training", "transform", "storage", "small reads"
LINK, CPU, RING, CHECKPOINTS = "link", "CPU", "ring too small", "checkpoints"
HANDING_OVER = "handing over"


@dataclass
class StepTimes:
    """A loop's time, as its iterator sees it: added to at each batch, in the thread that takes it.

    Attributes:
        batches: handed out.
        input_s: in which the loop waited for a batch, ``transform=`` included.
        transform_s: of that, in ``transform=``.
        training_s: between a batch and the next time that one was asked for.
        checkpoint_s: of that, in which saves kept this process (`note_checkpoint_stall`).
    """

    batches: int = 0
    input_s: float = 0.0
    transform_s: float = 0.0
    training_s: float = 0.0
    checkpoint_s: float = 0.0
    _asked_at: float = field(default=0.0, repr=False)
    _stalled_before: float = field(default=0.0, repr=False)

    @property
    def elapsed_s(self) -> float:
        return self.input_s + self.training_s

    def asked(self) -> None:
        """A batch is asked for, for the first time in this epoch, or again."""
        self._asked_at = time.perf_counter()

    def transformed(self, transform: Callable[[Any], T], batch: Any) -> T:
        began = time.perf_counter()
        try:
            return transform(batch)
        finally:
            self.transform_s += time.perf_counter() - began

    def handed_out(self) -> None:
        now = time.perf_counter()
        self.batches += 1
        self.input_s += now - self._asked_at
        self._asked_at, self._stalled_before = now, _checkpoints.stall_s

    def trained(self) -> None:
        """What the loop did with the batch is done: it asks for the next one."""
        now = time.perf_counter()
        self.training_s += now - self._asked_at
        self.checkpoint_s += _checkpoints.stall_s - self._stalled_before
        self._asked_at = now


class _Checkpoints:
    """How long saves kept this process's threads so far."""

    def __init__(self) -> None:
        self.stall_s = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self.stall_s += seconds


_checkpoints = _Checkpoints()


def note_checkpoint_stall(seconds: float) -> None:
    """A save kept its caller for so long."""
    _checkpoints.add(seconds)


class WorkerTimes(NamedTuple):
    """What an engine's workers did, in seconds of all of them together.

    Attributes:
        active_s: doing anything at all.
        storage_s: of that, reading, or waiting for storage. link_s: waiting for copies to the GPU. device_s: waiting
            until the GPU is done with batches whose memory comes next. The rest is the processor's: copies out of the
            page cache, conversions.
        requests, storage_bytes: that storage was asked for.
    """

    active_s: float = 0.0
    storage_s: float = 0.0
    link_s: float = 0.0
    device_s: float = 0.0
    requests: int = 0
    storage_bytes: int = 0

    @classmethod
    def of(cls, engine_stats: Mapping[str, Any]) -> WorkerTimes:
        """Of ``stats()["engine"]``, since the engine was made."""
        return cls(
            active_s=engine_stats["worker_active_s"],
            storage_s=engine_stats["worker_storage_s"],
            link_s=engine_stats["worker_link_s"],
            device_s=engine_stats["worker_device_s"],
            requests=engine_stats["requests"],
            storage_bytes=engine_stats["storage_bytes"],
        )

    def plus(self, other: WorkerTimes) -> WorkerTimes:
        return WorkerTimes(*map(operator.add, self, other))

    def minus(self, other: WorkerTimes) -> WorkerTimes:
        return WorkerTimes(*map(operator.sub, self, other))


@dataclass(frozen=True)
class Report:
    """Where the time of a training loop went, since its data set was made.

    Attributes:
        batches: handed out; each is a step.
        step_s: mean time of a step, input and all.
        input_share: of the steps' time, in which the loop waited for its input, 0 to 1. On a GPU the host's waiting:
            work that is queued there may go on meanwhile.
        checkpoint_share: in which saves kept it.
        limiter: what the steps would be faster without: ``"training"`` (the input is there when it is asked for, or
            waits for the GPU to be done with batches before it),
            ``"storage"``, ``"small reads"`` (storage, by their number), ``"link"`` (copies to the GPU), ``"CPU"``
            (copying, converting, decoding), ``"transform"``, ``"ring too small"``, ``"handing over"`` (batches are
            ready, and the loop's own thread takes that long to get each) or ``"checkpoints"``.
        suggestion: what would help.
        gain: how much of a step's time it can save at most, 0 to 1.
        bytes: delivered, by route. gb_per_s: of all of them, over the whole time.
    """

    batches: int
    step_s: float
    input_share: float
    checkpoint_share: float
    limiter: str
    suggestion: str
    gain: float
    bytes: Mapping[str, int]
    gb_per_s: float

    def __str__(self) -> str:
        if not self.batches:
            return "gdsdata: no batch was taken yet"
        total = sum(self.bytes.values())
        routes = ", ".join(f"{route} {count / total:.0%}" for route, count in self.bytes.items() if count)
        saves = f", {self.checkpoint_share:.1%} saves" if self.checkpoint_share else ""
        gain = f" (saves at most {self.gain:.0%})" if self.gain else ""
        steps = f"{self.batches} steps of {1000 * self.step_s:.3g} ms"
        return (
            f"gdsdata: {steps}, {self.input_share:.1%} of it waiting for input{saves}; {self.gb_per_s:.3g} GB/s "
            f"({routes or 'nothing'}); limited by {self.limiter}: {self.suggestion}{gain}"
        )

    def scalars(self) -> dict[str, float]:
        """Its numbers by flat names, as TensorBoard's ``add_scalar`` takes them."""
        numbers = ("batches", "step_s", "input_share", "checkpoint_share", "gain", "gb_per_s")
        return {
            **{f"gdsdata/{name}": float(getattr(self, name)) for name in numbers},
            **{f"gdsdata/bytes/{route}": float(count) for route, count in self.bytes.items()},
        }

    def prometheus(self, **labels: str) -> str:
        """The same in Prometheus's text format, version 0.0.4; the limiter is a label of a gauge that is 1."""
        lines = []
        said = {name: str(value) for name, value in labels.items()}
        for name, value in self.scalars().items():
            if not name.startswith("gdsdata/bytes/"):
                metric = name.replace("/", "_")
                lines += [f"# TYPE {metric} gauge", f"{metric}{_labels(said)} {value!r}"]
        lines.append("# TYPE gdsdata_bytes_total counter")
        lines += [f"gdsdata_bytes_total{_labels({**said, 'route': r})} {count}" for r, count in self.bytes.items()]
        lines += ["# TYPE gdsdata_limiter gauge", f"gdsdata_limiter{_labels({**said, 'limiter': self.limiter})} 1"]
        return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    for name in labels:
        if not re.fullmatch(r"[a-zA-Z_]\w*", name, re.ASCII):
            raise ValueError(f"a label's name is letters, digits and underscores: {name!r}")
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    inner = ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items())
    return f"{{{inner}}}" if inner else ""


def diagnose(
    times: StepTimes,
    workers: WorkerTimes,
    bytes_of: Mapping[str, int],
    ring_full_s: float,
    stall_s: float,
    shuffle: str,
) -> Report:
    """What a loop was limited by.

    Args:
        times: the loop's.
        workers: of the engine that reads for it, over the same time.
        bytes_of: delivered, by route.
        ring_full_s: in which every slot of the ring was ready, so that the workers had nothing to do.
        stall_s: in which the loop waited for a batch that was not ready.
        shuffle: "uniform", "none", or another order's name.
    """
    elapsed_s = max(times.elapsed_s, 1e-9)
    input_share, checkpoint_share = times.input_s / elapsed_s, times.checkpoint_s / elapsed_s
    limiter = _limiter(times, workers, ring_full_s, stall_s, shuffle)
    gain = {
        TRAINING: 0.0,
        CHECKPOINTS: checkpoint_share,
        TRANSFORM: times.transform_s / elapsed_s,
        RING: min(times.input_s - times.transform_s, ring_full_s) / elapsed_s,
    }.get(limiter, (times.input_s - times.transform_s) / elapsed_s)
    return Report(
        times.batches,
        times.elapsed_s / max(times.batches, 1),
        input_share,
        checkpoint_share,
        limiter,
        _GPU_IS_BEHIND if limiter == TRAINING and input_share >= _NOTICED else _SUGGESTIONS[limiter],
        gain,
        dict(bytes_of),
        sum(bytes_of.values()) / 1e9 / elapsed_s,
    )


_SUGGESTIONS = {
    TRAINING: "batches are ready when they are asked for",
    CHECKPOINTS: "save with AsyncCheckpointer, less often, or with more staging_bytes or device_staging_bytes",
    TRANSFORM: "transform= runs in the loop's own thread: do it on the GPU, or in decode=, which runs ahead",
    RING: "batches come and go in bursts: a larger prefetch= bridges them",
    HANDING_OVER: "batches are ready, and taking one costs the loop that: larger ones would help, or zero_copy=True",
    SMALL_READS: 'shuffle="lanes" reads large pieces; or raise EngineOptions.queue_depth',
    STORAGE: "the disk is as fast as it gets: put the files on faster storage, or into memory that caches them",
    LINK: "copies to the GPU wait for its link: fewer bytes a sample (a smaller dtype) would help",
    CPU: "the processor copies, converts or decodes: more cores or EngineOptions.workers would help",
}
# The loop waits, but what it waits for is its own work of earlier steps.
_GPU_IS_BEHIND = "the GPU is behind the loop, and batches wait for it"


def _limiter(times: StepTimes, workers: WorkerTimes, ring_full_s: float, stall_s: float, shuffle: str) -> str:
    elapsed_s = max(times.elapsed_s, 1e-9)
    if times.checkpoint_s > max(times.input_s, _NOTICED * elapsed_s):
        return CHECKPOINTS
    if times.input_s < _NOTICED * elapsed_s:
        return TRAINING
    wait_s = times.input_s - times.transform_s
    if times.transform_s > wait_s:
        return TRANSFORM
    if ring_full_s > wait_s / 2:
        return RING if stall_s > wait_s / 2 else HANDING_OVER
    copying_s = workers.active_s - workers.storage_s - workers.link_s - workers.device_s
    longest_s, longest = max(
        (workers.storage_s, STORAGE), (workers.link_s, LINK), (workers.device_s, TRAINING), (copying_s, CPU)
    )
    if longest_s < _SOME * elapsed_s:  # then it is what Python does with what the engine brings
        return CPU
    is_random = shuffle == "uniform" and workers.requests > 0
    if longest == STORAGE and is_random and workers.storage_bytes < _SMALL_REQUEST_BYTES * workers.requests:
        return SMALL_READS
    return longest


def marked(what: str) -> AbstractContextManager[Any]:
    """A range of this name in torch.profiler's trace, or, under `torch.autograd.profiler.emit_nvtx`, NVTX's."""
    if torch_private.is_profiling():
        return torch.profiler.record_function(what)
    return nullcontext()


class Reporter:
    """Prints a report every so many seconds, and at the end of each epoch; not in worker processes.

    Args:
        every_s: None: never.
        report: gives it.
    """

    def __init__(self, every_s: float | None, report: Callable[[], Report]) -> None:
        self._every_s, self._report, self._process = every_s, report, os.getpid()
        self._next = time.monotonic() + (every_s or 0.0)

    def handed_out(self) -> None:
        if self._every_s is not None and time.monotonic() >= self._next:
            self._print()

    def epoch_ended(self) -> None:
        if self._every_s is not None:
            self._print()

    def _print(self) -> None:
        if os.getpid() != self._process:
            return
        print(self._report(), file=sys.stderr, flush=True)
        self._next = time.monotonic() + (self._every_s or 0.0)

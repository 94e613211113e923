"""Where a training loop's time went: the report of `GDSDataset.report`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gdsdata.observe.times import StepTimes

# A smaller share of a step is not worth a remedy.
_NOTICED = 0.02
# The number of requests, not that of bytes, limits a disk if requests are smaller than this.
_SMALL_REQUEST_BYTES = 32 * 1024
# Work of workers that takes a smaller share of the loop's time does not hold the batches up.
_SOME = 0.1
# A network is slower than a disk: if it has a smaller share of the bytes, the wait is the disk's.
_REMOTE_SHARE = 0.2
# Each throttled response halves the requests in flight, and each round of good ones adds one. At
# this share of throttled responses, about 14 of 64 connections are left.
_THROTTLED_SHARE = 0.01
# A server's round trip costs as much as the bytes of a request of about this size.
_SHORT_REMOTE_BYTES = 2**20

TRAINING, TRANSFORM, STORAGE, SMALL_READS = "training", "transform", "storage", "small reads"
LINK, CPU, RING, CHECKPOINTS = "link", "CPU", "ring too small", "checkpoints"
HANDING_OVER, FIRST_BATCHES = "handing over", "first batches"
NETWORK, THROTTLED = "network", "throttled"


@dataclass(frozen=True)
class Report:
    """Where the time of a training loop went, since its data set was made.

    Attributes:
        batches: handed out; each is a step.
        step_s: mean time of a step, input included.
        input_share: share of the time in which the loop waited for its input, 0 to 1. On a GPU it
            is the host's wait; queued work may go on meanwhile.
        checkpoint_share: share of the time in which saves blocked the loop.
        limiter: what slows the steps down. See below.
        suggestion: what would help.
        gain: how much of a step's time it can save at most, 0 to 1.
        bytes: delivered, by route.
        gb_per_s: of all these bytes, over the whole time.
        network: if objects of a store are read: ``gb_per_s`` that came from servers, and
            ``requests``, ``retries``, ``throttled`` and ``hedges`` of this process meanwhile.

    Limiters:
        - ``"training"``: input is ready when it is requested, or waits until the GPU has used
          earlier batches
        - ``"storage"``, or ``"small reads"``: storage, by the number of reads
        - ``"network"``: the way to a server, or the server
        - ``"throttled"``: a server that refuses requests because they are too many
        - ``"link"``: copies to the GPU
        - ``"CPU"``: copying, converting, decoding
        - ``"transform"``, ``"checkpoints"``
        - ``"ring too small"``: for bursts of batches
        - ``"first batches"``: of each epoch, which nothing was read ahead of
        - ``"handing over"``: batches are ready, and the loop's own thread takes long to get them
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
    network: Mapping[str, float] = field(default_factory=dict)

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
        """Return the numbers by flat names, for TensorBoard's ``add_scalar``."""
        numbers = ("batches", "step_s", "input_share", "checkpoint_share", "gain", "gb_per_s")
        return {
            **{f"gdsdata/{name}": float(getattr(self, name)) for name in numbers},
            **{f"gdsdata/network/{name}": float(value) for name, value in self.network.items()},
            **{f"gdsdata/bytes/{route}": float(count) for route, count in self.bytes.items()},
        }

    def prometheus(self, **labels: str) -> str:
        """Return the same in Prometheus's text format, version 0.0.4.

        The limiter is a label of a gauge that is 1.
        """
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


class WorkerTimes(NamedTuple):
    """The times of an engine's workers, summed over all of them.

    Attributes:
        active_s: time in which they worked.
        storage_s: the part of it in which they read, or waited for storage.
        link_s: the part in which they waited for copies to the GPU.
        device_s: the part in which they waited until the GPU had used batches whose memory is next.
            The rest is the processor's: copies out of the page cache, conversions.
        requests, storage_bytes: of storage.
    """

    active_s: float = 0.0
    storage_s: float = 0.0
    link_s: float = 0.0
    device_s: float = 0.0
    requests: int = 0
    storage_bytes: int = 0


class NetworkUse(NamedTuple):
    """The requests of this process to servers, and what a data set waited for.

    Attributes:
        requests: for ranges of objects, with all that follow.
        retries: requests that were sent again, because they failed.
        throttled: responses of servers that have too many requests (429, 503).
        hedges: requests that were sent twice, because the first was slow.
        bytes: that came from servers.
        other_bytes: that it read from disks, a local cache included.
        pieces_s: time in which its loop waited for pieces of a lane shuffle.
    """

    requests: int = 0
    retries: int = 0
    throttled: int = 0
    hedges: int = 0
    bytes: int = 0
    other_bytes: int = 0
    pieces_s: float = 0.0


def diagnose(
    times: StepTimes,
    workers: WorkerTimes,
    bytes_of: Mapping[str, int],
    ring_full_s: float,
    stall_s: float,
    shuffle: str,
    network: NetworkUse | None = None,
    on_gpu: bool = False,
) -> Report:
    """Find out what limited a loop.

    Args:
        times: of the loop.
        workers: of the engine that reads for it, over the same time.
        bytes_of: delivered, by route.
        ring_full_s: time in which each slot of the ring was ready, and workers had nothing to do.
        stall_s: time in which the loop waited for a batch that was not ready.
        shuffle: "uniform", "none", or another order's name.
        network: if objects of a store are read.
        on_gpu: batches are delivered to a GPU.
    """
    elapsed_s = max(times.elapsed_s, 1e-9)
    input_share, checkpoint_share = times.input_s / elapsed_s, times.checkpoint_s / elapsed_s
    limiter = _limiter(times, workers, ring_full_s, stall_s, shuffle, network)
    gain = {
        TRAINING: 0.0,
        CHECKPOINTS: checkpoint_share,
        TRANSFORM: times.transform_s / elapsed_s,
        FIRST_BATCHES: min(times.first_s, times.input_s - times.transform_s) / elapsed_s,
        RING: min(times.input_s - times.transform_s, ring_full_s) / elapsed_s,
    }.get(limiter, (times.input_s - times.transform_s) / elapsed_s)
    suggestion = _SUGGESTIONS[limiter]
    if limiter == TRAINING and input_share >= _NOTICED:
        suggestion = _GPU_IS_BEHIND
    elif limiter == HANDING_OVER and on_gpu:
        suggestion += ", or Reading(zero_copy=True)"
    elif limiter in (NETWORK, THROTTLED):
        assert network is not None
        suggestion = _suggestion_for(limiter, network, elapsed_s, shuffle)
    return Report(
        times.batches,
        times.elapsed_s / max(times.batches, 1),
        input_share,
        checkpoint_share,
        limiter,
        suggestion,
        gain,
        dict(bytes_of),
        sum(bytes_of.values()) / 1e9 / elapsed_s,
        {} if network is None else _shown(network, elapsed_s),
    )


def _shown(network: NetworkUse, elapsed_s: float) -> dict[str, float]:
    counts = {name: getattr(network, name) for name in ("requests", "retries", "throttled", "hedges")}
    return {"gb_per_s": network.bytes / 1e9 / elapsed_s, **counts}


def _suggestion_for(limiter: str, network: NetworkUse, elapsed_s: float, shuffle: str) -> str:
    """Return what the network gave, and what would help."""
    rate = f"servers gave {network.bytes / 1e9 / elapsed_s:.3g} GB/s in {network.requests} requests"
    seen = f"{rate}, {network.retries} of them retries"
    if limiter == THROTTLED:
        return f"{seen}, and throttled {network.throttled}: {_SUGGESTIONS[THROTTLED]}"
    if shuffle == "uniform" and network.bytes < _SHORT_REMOTE_BYTES * network.requests:
        return f'{seen}: shuffle="lanes" reads larger pieces; {_SUGGESTIONS[NETWORK]}'
    return f"{seen}: {_SUGGESTIONS[NETWORK]}"


_SUGGESTIONS = {
    TRAINING: "batches are ready when they are asked for",
    CHECKPOINTS: "save with AsyncCheckpointer, less often, or with more staging_bytes or device_staging_bytes",
    TRANSFORM: "transform= runs in the loop's own thread: do it on the GPU, by a named decoder in Fields(decode=), or, "
    'with device="cpu", in the workers of DataLoader(dataset, batch_size=None, num_workers=...)',
    RING: "batches come and go in bursts: a larger Reading(prefetch=) bridges them",
    FIRST_BATCHES: "an epoch's first batch has to be read while the loop waits: call iter() on the data set before "
    "you prepare the rest, or train for more steps an epoch",
    HANDING_OVER: "batches are ready, but each takes the loop time to get: try larger ones",
    SMALL_READS: 'shuffle="lanes" reads large pieces; or raise EngineOptions.queue_depth',
    STORAGE: "the disk is as fast as it gets: put the files on faster storage, or into memory that caches them",
    NETWORK: "cache= with room for all of it (cache_bytes=) keeps the bytes for the next epoch, a machine in the "
    "region of the data is nearer, and more processes have more connections; "
    "python -m gdsdata.doctor URL measures the way",
    THROTTLED: "read with fewer processes, cache=, spread the objects over more prefixes, or ask for a higher limit",
    LINK: "copies to the GPU wait for its link: fewer bytes a sample (a smaller dtype) would help",
    CPU: "the processor copies, converts or decodes: more cores or EngineOptions.workers would help",
}
# The loop waits for its own work of earlier steps.
_GPU_IS_BEHIND = "the GPU is behind the loop, and batches wait for it"


def _limiter(
    times: StepTimes,
    workers: WorkerTimes,
    ring_full_s: float,
    stall_s: float,
    shuffle: str,
    network: NetworkUse | None,
) -> str:
    elapsed_s = max(times.elapsed_s, 1e-9)
    if times.checkpoint_s > max(times.input_s, _NOTICED * elapsed_s):
        return CHECKPOINTS
    if times.input_s < _NOTICED * elapsed_s:
        return TRAINING
    wait_s = times.input_s - times.transform_s
    if times.transform_s > wait_s:
        return TRANSFORM
    if ring_full_s > wait_s / 2:
        if stall_s <= wait_s / 2:
            return HANDING_OVER
        return FIRST_BATCHES if times.first_s > wait_s / 2 else RING
    if network is not None and network.bytes <= _REMOTE_SHARE * (network.bytes + network.other_bytes):
        network = None  # then storage is a disk
    if network is not None and network.pieces_s > wait_s / 2:
        return _network_or_throttled(network)
    copying_s = workers.active_s - workers.storage_s - workers.link_s - workers.device_s
    longest_s, longest = max(
        (workers.storage_s, STORAGE), (workers.link_s, LINK), (workers.device_s, TRAINING), (copying_s, CPU)
    )
    if longest_s < _SOME * elapsed_s:  # then Python's work on the engine's bytes takes the time
        return CPU
    if longest == STORAGE and network is not None:
        return _network_or_throttled(network)
    is_random = shuffle == "uniform" and workers.requests > 0
    if longest == STORAGE and is_random and workers.storage_bytes < _SMALL_REQUEST_BYTES * workers.requests:
        return SMALL_READS
    return longest


def _network_or_throttled(network: NetworkUse) -> str:
    return THROTTLED if network.throttled > _THROTTLED_SHARE * network.requests else NETWORK

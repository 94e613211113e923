"""`choose`: the shuffle for ``shuffle="auto"``, which suits the data and its storage."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed

from gdsdata.data.ranks import is_distributed
from gdsdata.formats.index import Index, SampleIndex, records_of
from gdsdata.io import engine
from gdsdata.io.budget import share_bytes
from gdsdata.io.options import MIB, EngineOptions
from gdsdata.storage.urls import have_urls

# Below this much data the pieces would be of a few samples, and an epoch is over in a moment.
_LEAST_BYTES = 256 * MIB
# As long as this, samples are large reads themselves.
_LONG_SAMPLE_BYTES = 512 * 1024
# Uniform is the better shuffle, so lanes must be worth it.
_CLEARLY_FASTER = 2.0
_BATCHES, _BATCH_SAMPLES, _BATCH_PIECES = 4, 256, 8


def choose(index: SampleIndex, ranks: int, found: tuple[str, str] | None = None) -> tuple[str, str]:
    """Return ``"uniform"`` or ``"lanes"``, and the reason in words.

    The choice suits the data and its storage. For objects on a server it follows from their sizes.
    Otherwise, if torch.distributed is initialized, all its processes must call this, and get what
    the first one found. ``found`` is what this process found before that.

    Raises:
        ValueError: there are several ranks, and torch.distributed, by which they would agree, is
            not initialized.
    """
    if have_urls(index.paths):
        return found or _choose_remote(index)
    agree = is_distributed()
    if not agree and ranks > 1:
        raise ValueError(
            f'shuffle="auto" measures, and world_size={ranks} ranks might find different things: initialize '
            'torch.distributed first, or say "uniform" or "lanes"'
        )
    if not agree or torch.distributed.get_world_size() == 1:
        return found or _choose(index, ranks)
    agreed = [(found or _choose(index, ranks)) if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(agreed, src=0)
    (of_first_rank,) = agreed
    assert of_first_rank is not None  # the broadcast has replaced the None of other ranks
    return of_first_rank


def _choose_remote(index: SampleIndex) -> tuple[str, str]:
    if int(np.diff(index.first_sample).max()) < 2:
        return "uniform", "the data is remote, and each sample is an object of its own"
    if index.sample_bytes >= _LONG_SAMPLE_BYTES:
        return "uniform", f"the data is remote, and samples of {index.sample_bytes} bytes are large reads themselves"
    return "lanes", "the data is remote: each request takes a round trip, so pieces of 1 MiB are read"


def _choose(index: SampleIndex, ranks: int) -> tuple[str, str]:
    sample_bytes = index.sample_bytes
    if sample_bytes >= _LONG_SAMPLE_BYTES:
        return "uniform", f"samples of {sample_bytes} bytes are large reads themselves"
    largest = int(index.size_bytes.argmax())
    if index.size_bytes[largest] < 2 * MIB:
        return "uniform", "no file is as long as two pieces of 1 MiB"
    total_bytes = int(index.size_bytes.sum())
    if total_bytes < _LEAST_BYTES:
        return "uniform", f"all files have {total_bytes / MIB:.0f} MiB, less than {_LEAST_BYTES // MIB}"
    singly = _gb_per_s(index.probe(), _BATCH_SAMPLES)
    in_pieces = _gb_per_s(records_of(index.paths[largest], MIB), _BATCH_PIECES)
    held = _share_held(total_bytes, ranks)
    with_lanes = 1 / (held / in_pieces + (1 - held) / singly)
    chosen = "lanes" if with_lanes > _CLEARLY_FASTER * singly else "uniform"
    return chosen, (
        f"samples of {sample_bytes} bytes, read one by one past the page cache, bring {singly:.2f} GB/s here, and "
        f"pieces of 1 MiB {in_pieces:.2f} GB/s, with memory for {held:.0%} of them ({_CLEARLY_FASTER:g} times as much "
        "would be worth lanes)"
    )


def _share_held(total_bytes: int, ranks: int) -> float:
    """Return the share of lanes' pieces that this rank has memory for: the others are of no use."""
    from gdsdata.data.order.lanes import WINDOW_BYTES

    two_windows_bytes = 2 * min(total_bytes, WINDOW_BYTES) / ranks
    return min(1.0, share_bytes() / two_windows_bytes)


def _gb_per_s(index: Index, batch: int) -> float:
    """Read random samples past the page cache, and return the rate."""
    shared = engine.shared_engine(EngineOptions(direct="always"), torch.device("cpu"))
    pool = engine.buffer_pool(shared, index.sample, batch, _BATCHES, False)
    batches, _ = engine.make_batches(
        shared,
        engine.file_table(index),
        pool,
        index.sample,
        batch_samples=batch,
        slots=_BATCHES,
        stall_timeout_s=60.0,
        on_cuda=False,
        residence=None,
    )
    best_s = float("inf")
    try:
        for seed in range(2):  # the first makes the engine's memory
            samples = np.random.default_rng(seed).integers(0, len(index), _BATCHES * batch)
            started_s = time.perf_counter()
            plan = index.plan(samples)
            batches.plan(plan.source, plan.offset, np.full(_BATCHES, batch, np.int64))
            for _ in range(_BATCHES):
                batches.next()
            best_s = min(best_s, time.perf_counter() - started_s)
    finally:
        batches.close()
    return _BATCHES * batch * index.sample.bytes / best_s / 1e9

"""`ShuffleChoice`: the meaning of ``shuffle`` for some data, also of ``"auto"``."""

from __future__ import annotations

import time
from dataclasses import astuple
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed
from torch.utils.data import get_worker_info

from gdsdata.data.ranks import is_distributed
from gdsdata.formats.index import Index, SampleIndex, records_of
from gdsdata.io import engine
from gdsdata.io.memory_budget import share_bytes
from gdsdata.io.options import MIB, EngineOptions
from gdsdata.storage.urls import have_urls

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # typing has it from Python 3.13 on

    from gdsdata.data.order.lanes import Lanes
    from gdsdata.data.order.row_groups import RowGroups, RowGroupShuffle

# Below this much data the pieces would be of a few samples, and an epoch is over in a moment.
_LEAST_BYTES = 256 * MIB
# As long as this, samples are large reads themselves.
_LONG_SAMPLE_BYTES = 512 * 1024
# Uniform is the better shuffle, so lanes must be worth it.
_CLEARLY_FASTER = 2.0
_BATCHES, _BATCH_SAMPLES, _BATCH_PIECES = 4, 256, 8


class ShuffleChoice:
    """The meaning of ``shuffle=``, and when and on which rank ``"auto"`` is decided.

    Attributes:
        asked: what `shape_of` takes; ``"auto"`` until it is chosen.
        reason: for it, in words.
        is_auto: ``"auto"`` was asked for, so what a loaded state says is taken.
    """

    def __init__(self, asked: bool | str | Lanes | RowGroups) -> None:
        self.asked, self.reason, self.is_auto = asked, "as asked for", asked == "auto"
        self._is_final = not self.is_auto

    def shape(self, index: SampleIndex, step_samples: int) -> bool | Lanes | RowGroupShuffle:
        """Return what `permutation.Order` takes; before ``"auto"`` is chosen, True."""
        is_open = self.asked == "auto" and index.group_first_sample is None
        return shape_of(is_open or self.asked, index, step_samples)

    def begin(self, index: SampleIndex, ranks: int, are_given: bool) -> None:
        """Choose when the data set is made, unless there are ranks that cannot agree yet."""
        if index.group_first_sample is not None:
            self.is_auto, self._is_final = False, True  # there is nothing to choose
        elif self.asked == "auto":
            self.reason = "until iteration begins"
            if ranks == 1 or are_given or is_distributed() or have_urls(index.paths):
                self._choose(index, ranks, are_given)

    def agree(self, index: SampleIndex, ranks: int, are_given: bool) -> bool:
        """Choose when iteration begins, if that was not done for all ranks yet.

        Returns:
            Whether this changes anything.

        Raises:
            ValueError: ranks cannot agree here.
        """
        before = self.asked
        if self._is_final:
            return False
        if get_worker_info() is None:
            self._choose(index, ranks, are_given)
        elif ranks > 1:
            raise ValueError(
                'shuffle="auto": the ranks had not agreed on an order when the DataLoader\'s workers began. Make the '
                'data set after init_process_group(), or say "uniform" or "lanes"'
            )
        return self.asked != before

    def _choose(self, index: SampleIndex, ranks: int, are_given: bool) -> None:
        found = None
        if isinstance(self.asked, str) and self.asked != "auto":
            found = self.asked, self.reason
        self.asked, self.reason = choose(index, ranks, found)
        self._is_final = are_given or is_distributed() or have_urls(index.paths)

    def load(self, identity: bool | list[int]) -> None:
        """Take what a state says."""
        self.asked, self.reason, self._is_final = of_identity(identity), "of the state that was loaded", True


def shape_of(
    asked: bool | str | Lanes | RowGroups, index: SampleIndex, step_samples: int
) -> bool | Lanes | RowGroupShuffle:
    """Return what `permutation.Order` takes.

    It is True for ``"uniform"``, and `Lanes` that fit the data for ``"lanes"``. For tables it is a
    `RowGroupShuffle` for all but False.

    Raises:
        ValueError: ``asked`` is nothing of the kind.
    """
    if index.group_first_sample is not None:
        return _of_row_groups(asked, index, index.group_first_sample, step_samples)
    if isinstance(asked, bool):
        return asked
    if asked == "uniform":
        return True
    from gdsdata.data.order.lanes import Lanes

    if asked == "lanes":
        return Lanes.fitting(len(index), index.spacing_bytes, step_samples)
    if isinstance(asked, Lanes):
        return asked
    raise ValueError(f'shuffle={asked!r} must be True or "uniform", "lanes" or a Lanes, "auto", or False')


def identity_of(shuffle: bool | Lanes | RowGroupShuffle) -> bool | list[int]:
    """Return plain numbers that are equal for shuffles that order alike."""
    if isinstance(shuffle, bool):
        return shuffle
    return list(astuple(shuffle)) if is_lanes(shuffle) else shuffle.identity


def of_identity(identity: bool | list[int]) -> bool | Lanes:
    """Return the shuffle that `identity_of` was asked for, if it is not of tables."""
    if isinstance(identity, bool):
        return identity
    from gdsdata.data.order.lanes import Lanes

    return Lanes(*identity)


def is_lanes(shuffle: bool | Lanes | RowGroupShuffle) -> TypeIs[Lanes]:
    """Return whether it is a `Lanes`, which is not imported for a plain order."""
    if isinstance(shuffle, bool):
        return False
    from gdsdata.data.order.lanes import Lanes

    return isinstance(shuffle, Lanes)


def _of_row_groups(
    asked: bool | str | Lanes | RowGroups, index: SampleIndex, group_first_sample: np.ndarray, step_samples: int
) -> bool | RowGroupShuffle:
    from gdsdata.data.order.row_groups import RowGroups, RowGroupShuffle

    if asked is False or len(index) == 0:
        return False
    if asked in (True, "auto", "lanes"):
        asked = RowGroups.fitting(len(index), len(group_first_sample) - 1, index.spacing_bytes, step_samples)
    if isinstance(asked, RowGroups):
        return RowGroupShuffle(asked, group_first_sample)
    reason = ": a row group would be decoded for each of its rows" if asked == "uniform" else ""
    raise ValueError(f"shuffle={asked!r} is not for tables{reason}: use True, or a RowGroups")


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

"""`ShuffleChoice`: the meaning of ``shuffle`` for some data, also of ``"auto"`` (`measured`)."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING

import numpy as np
from torch.utils.data import get_worker_info

from gdsdata.data.ranks import is_distributed
from gdsdata.formats.index import SampleIndex
from gdsdata.storage.urls import have_urls

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # typing has it from Python 3.13 on

    from gdsdata.data.order.lanes import Lanes
    from gdsdata.data.order.row_groups import RowGroups, RowGroupShuffle


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
        from gdsdata.data.order.measured import choose  # late, because only "auto" is measured

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

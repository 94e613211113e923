"""`Epoch`: one epoch of a rank, and which parts of the data its steps need."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gdsdata.data.order import choice
from gdsdata.data.ranks import Share

if TYPE_CHECKING:
    from gdsdata.data.order.lanes import LanePermutation, Lanes
    from gdsdata.data.order.row_groups import RowGroupShuffle, UpcomingGroups


class Epoch(NamedTuple):
    """An epoch of one rank.

    Attributes:
        shuffle: what `permutation.Order` takes.
        samples: in the epoch.
        step_samples: samples in a step of all ranks.
        share: of each step that is this rank's.
        seed, number: choose the order.
    """

    shuffle: bool | Lanes | RowGroupShuffle
    samples: int
    step_samples: int
    share: Share
    seed: int
    number: int

    def lanes(self) -> tuple[LanePermutation, range] | None:
        """Return the permutation of a lane shuffle and the rank's lanes.

        None: it is another shuffle, or a step needs several windows.
        """
        if not choice.is_lanes(self.shuffle) or not self.shuffle.holds(self.step_samples):
            return None
        permutation = self.shuffle.permutation(self.samples, self.step_samples, self.seed, self.number)
        return permutation, self.shuffle.of_rank(*self.share)

    def upcoming_groups(self, group_first_sample: np.ndarray) -> UpcomingGroups:
        """Return what says which row groups the next steps need."""
        from gdsdata.data.order.row_groups import InOrder

        if isinstance(self.shuffle, bool) or choice.is_lanes(self.shuffle):
            return InOrder(group_first_sample, self.step_samples, *self.share)
        return self.shuffle.permutation(self.samples, self.step_samples, self.seed, self.number).of_rank(*self.share)

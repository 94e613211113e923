"""`Epoch`: one epoch of a rank, and which parts of the data its steps need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gdsdata.data.order import choice
from gdsdata.data.ranks import Share

if TYPE_CHECKING:
    from gdsdata.data.order.lanes import LanePermutation, Lanes
    from gdsdata.data.order.row_groups import RowGroupShuffle, UpcomingGroups


def part_of_step(step_samples: int, share: Share, place: int = 0, peers: int = 1) -> range:
    """Return the positions in a step that a process reads.

    Args:
        step_samples: samples in a step of all ranks.
        share: of the step that is this rank's.
        place, peers: of how many processes with this share, which read each batch together, it is
            which. The last ones can have fewer samples, or none.
    """
    batch = step_samples // share.world_size
    most = -(-batch // peers)
    begin = min(place * most, batch)
    first = share.rank * batch
    return range(first + begin, first + min(begin + most, batch))


class Epoch:
    """An epoch of one process.

    Args:
        shuffle: what `permutation.Order` takes.
        samples: in the epoch.
        step_samples: samples in a step of all ranks.
        part: the positions in each step that this process reads.
        seed, number: choose the order.
    """

    def __init__(
        self,
        shuffle: bool | Lanes | RowGroupShuffle,
        samples: int,
        step_samples: int,
        part: range,
        seed: int,
        number: int,
    ) -> None:
        self.shuffle, self.samples, self.step_samples = shuffle, samples, step_samples
        self.part, self.seed, self.number = part, seed, number

    def lanes(self) -> tuple[LanePermutation, range] | None:
        """Return the permutation of a lane shuffle and this process's lanes.

        None: it is another shuffle, or a step needs several windows.
        """
        if not choice.is_lanes(self.shuffle) or not self.shuffle.holds(self.step_samples):
            return None
        permutation = self.shuffle.permutation(self.samples, self.step_samples, self.seed, self.number)
        return permutation, self.shuffle.lanes_of(self.part, self.step_samples)

    def upcoming_groups(self, group_first_sample: np.ndarray) -> UpcomingGroups:
        """Return what says which row groups the next steps need."""
        from gdsdata.data.order.row_groups import InOrder

        if isinstance(self.shuffle, bool) or choice.is_lanes(self.shuffle):
            return InOrder(group_first_sample, self.step_samples, self.part)
        return self.shuffle.permutation(self.samples, self.step_samples, self.seed, self.number).of_part(self.part)

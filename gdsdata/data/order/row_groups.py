"""A shuffle of tables that decodes every row group once.

Rows of some row groups at a time come in a new order.

An epoch's row groups, in a new order, are one behind the other a *line* of rows, which is turned by
another amount each epoch and cut into L equal *lanes*. A lane is given in *windows* of M rows, each
in a new order of its own. Every global batch takes equally many samples of each lane, lane after
lane, as in `lanes`: so a rank, whose share is a slice of the batch, has lanes of its own, and
decodes no other row groups. One that two windows share stays decoded for the second, one that two
lanes share is decoded for each of them.

Windows of different lanes end at different times, so that of few row groups at a time the next ones
have to be decoded. As in `order`, the row at any position is computed from the position; of an
epoch only the row groups' order is kept.
"""

from __future__ import annotations

import zlib
from dataclasses import astuple, dataclass
from typing import Protocol

import numpy as np

from gdsdata.data.order.lanes import lane_places, lanes_of_part
from gdsdata.data.order.permutation import Permutation, epoch_key, mix, mixed, permuted
from gdsdata.distinct import distinct
from gdsdata.whole_numbers import whole_number

_MOST_LANES = 8
_MOST_GROUPS_A_WINDOW = 16
# The decoded row groups that are held at a time, if one rank reads all.
_HELD_BYTES = 2**31
_LARGEST_WINDOW_ROWS = 2**31
# The golden ratio's share of 2**64: multiples of it are spread evenly over a circle, however many
# there are.
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class RowGroups:
    """The shape of a shuffle of row groups.

    A rank that reads l of the lanes holds, decoded, the row groups that l + 1 windows and their
    edges touch: about ``(l + 1) * (window_rows / rows of a row group + 1)`` of them.

    Attributes:
        lanes: L, a divisor of the samples in a global batch. A rank decodes only row groups of its
            own if the number of ranks divides L. With other numbers, neighbors decode those of the
            lane between them too.
        window_rows: M, rows of a lane that are mixed with each other.

    Raises:
        TypeError: one of them is no whole number.
        ValueError: one of them is out of range.
    """

    lanes: int
    window_rows: int

    def __post_init__(self) -> None:
        for name in ("lanes", "window_rows"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
            if not 1 <= getattr(self, name) <= _LARGEST_WINDOW_ROWS:
                raise ValueError(f"{self}: {name} must be in 1 .. {_LARGEST_WINDOW_ROWS}")

    @classmethod
    def fitting(cls, rows: int, groups: int, row_bytes: int, step_samples: int) -> RowGroups:
        """Return a shape for such data.

        It is the same on every rank, and for every number of ranks that share a global batch.

        It has 8 lanes (or the largest divisor of ``step_samples`` below), and windows of as many
        rows as 16 row groups have. If one rank would hold more than 2 GiB that way, windows are
        smaller, down to one row group. Then lanes are fewer.

        Args:
            rows: in all.
            groups: row groups in all.
            row_bytes: of a row when decoded.
            step_samples: samples in a global batch.
        """
        group_rows = -(-rows // groups)
        lane_counts = [lanes for lanes in range(_MOST_LANES, 0, -1) if step_samples % lanes == 0]
        most = _HELD_BYTES // (group_rows * row_bytes)
        lanes = next((lanes for lanes in lane_counts if 2 * (lanes + 1) <= most), lane_counts[-1])
        a_window = max(1, min(_MOST_GROUPS_A_WINDOW, most // (lanes + 1) - 1))
        return cls(lanes, min(a_window * group_rows, max(1, rows // lanes), _LARGEST_WINDOW_ROWS))


@dataclass(frozen=True, eq=False)
class RowGroupShuffle:
    """`RowGroups` of a table: what `order.Order` takes.

    Attributes:
        shape: L and M.
        group_first_row: int64 (G + 1,), id of each row group's first row, then the number of rows.
    """

    shape: RowGroups
    group_first_row: np.ndarray

    @property
    def identity(self) -> list[int]:
        """Numbers that tell it from others: a state of one is of no use to another."""
        return [*astuple(self.shape), zlib.crc32(self.group_first_row.tobytes())]

    def __str__(self) -> str:
        return str(self.shape)

    def permutation(self, samples: int, step_samples: int, seed: int, epoch: int) -> RowGroupPermutation:
        """Return an epoch's bijection, as `permutation.Shuffle` asks for."""
        return RowGroupPermutation(self.shape, self.group_first_row, step_samples, seed, epoch)


class UpcomingGroups(Protocol):
    """An epoch of one rank that can say which row groups its steps need."""

    @property
    def steps_ahead(self) -> int:
        """The steps that use up a row group or two, while the next ones are decoded."""

    def groups(self, first_step: int, last_step: int) -> np.ndarray:
        """Return the row groups for some steps, the last one included: int64, each once."""


class RowGroupPermutation:
    """A bijection on ``range(rows)`` from an epoch's positions to row ids.

    Each lane has ``rows // L`` rows, and what remains, fewer than L of them, ends the epoch. The
    first window of a lane is shorter, by a part of its own, and the last one has what remains.

    Args:
        shape: L and M.
        group_first_row: int64 (G + 1,), id of each row group's first row, then the number of rows;
            rising.
        step_samples: in a global batch.
        seed, epoch: choose the order.

    Raises:
        ValueError: L does not divide ``step_samples``.
    """

    def __init__(self, shape: RowGroups, group_first_row: np.ndarray, step_samples: int, seed: int, epoch: int) -> None:
        if step_samples % shape.lanes:
            raise ValueError(f"{shape}: lanes do not divide the {step_samples} samples of a global batch")
        key = epoch_key(seed, epoch)
        groups = len(group_first_row) - 1
        self._shape, self._step_samples = shape, step_samples
        self._rows = int(group_first_row[-1])
        self._lane_rows = self._rows // shape.lanes
        self._order = Permutation(groups, seed, epoch)(np.arange(groups, dtype=np.int64))
        self._first_row = group_first_row[self._order]
        self._line_first = np.cumsum([0, *np.diff(group_first_row)[self._order]], dtype=np.int64)
        self._shift, self._window_key = mix(key ^ 1) % self._rows, np.uint64(mix(key ^ 2))
        # How many rows the first window of each lane is short of.
        self._short = np.array(
            [(lane * _GOLDEN % 2**64) * shape.window_rows >> 64 for lane in range(shape.lanes)], np.int64
        )

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the ids at ``positions``, each in ``range(rows)``: int64 (m,) both."""
        line = positions.copy()  # the rows that no lane has lie at the line's end, as at the epoch's
        in_lanes = np.flatnonzero(positions < self._shape.lanes * self._lane_rows)
        lane, place = lane_places(positions[in_lanes], self._rows, self._step_samples, self._shape.lanes)
        window, begin, end = self._window_of(lane, place)
        number = (lane << np.int64(32)) + window
        chosen = permuted(place - begin, end - begin, mixed(self._window_key ^ number.view(np.uint64)))
        line[in_lanes] = lane * self._lane_rows + begin + chosen
        line += self._shift
        line -= np.where(line >= self._rows, self._rows, 0)
        nth = np.searchsorted(self._line_first, line, side="right") - 1
        return self._first_row[nth] + line - self._line_first[nth]

    def of_part(self, part: range) -> LanesOfPart:
        """Return the lanes of a part of each step: see `lanes.lanes_of_part`."""
        lanes = self._shape.lanes
        of_part = lanes_of_part(lanes, part, self._step_samples)
        lane = np.arange(of_part.start, of_part.stop, dtype=np.int64)
        # A window of one of its lanes ends in so many steps.
        return LanesOfPart(self, lane, self._shape.window_rows * lanes // (self._step_samples * len(lane)))

    def groups(self, lane: np.ndarray, first_step: int, last_step: int) -> np.ndarray:
        """Return the row groups in some lanes' windows in some steps: int64, each once."""
        a_step = self._step_samples // self._shape.lanes
        places = first_step * a_step, (last_step + 1) * a_step - 1  # they may be more than numpy's numbers hold
        first, last = (np.full_like(lane, min(place, max(0, self._lane_rows - 1))) for place in places)
        begin = lane * self._lane_rows + self._window_of(lane, first)[1]
        end = lane * self._lane_rows + self._window_of(lane, last)[2]
        found = [np.empty(0, np.int64)]
        for line, stop in zip((begin + self._shift).tolist(), (end + self._shift).tolist(), strict=True):
            for low, high in ((line, min(stop, self._rows)), (max(line - self._rows, 0), stop - self._rows)):
                if low < high:  # the line's end and its beginning are neighbors
                    first_nth, end_nth = np.searchsorted(self._line_first, [low, high - 1], side="right")
                    found.append(self._order[first_nth - 1 : end_nth])
        return distinct(np.concatenate(found))

    def _window_of(self, lane: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the window of a place in a lane, and the window's begin and end there."""
        size, short = self._shape.window_rows, self._short[lane]
        window = (place + short) // size
        begin = np.maximum(window * size - short, 0)
        return window, begin, np.minimum((window + 1) * size - short, self._lane_rows)


@dataclass(frozen=True, eq=False)
class LanesOfPart:
    """Some lanes of an epoch, as `UpcomingGroups`."""

    permutation: RowGroupPermutation
    lane: np.ndarray
    steps_ahead: int

    def groups(self, first_step: int, last_step: int) -> np.ndarray:
        return self.permutation.groups(self.lane, first_step, last_step)


class InOrder:
    """A process's epoch in the order of the files, as `UpcomingGroups`.

    Args:
        group_first_row: as in `RowGroupPermutation`.
        step_samples: in a global batch.
        part: the positions in each step that the process reads.
    """

    def __init__(self, group_first_row: np.ndarray, step_samples: int, part: range) -> None:
        rows = int(group_first_row[-1])
        # Lest a product of steps be too large for numpy.
        self._step_samples = min(step_samples, max(1, rows))
        self._first, self._last = min(part.start, rows), min(part.stop, rows)
        self._group_first_row = group_first_row
        self.steps_ahead = 2 * rows // max(1, len(group_first_row) - 1) // self._step_samples

    def groups(self, first_step: int, last_step: int) -> np.ndarray:
        if self._first == self._last:
            return np.empty(0, np.int64)
        begin = np.arange(first_step, last_step + 1, dtype=np.int64) * self._step_samples + self._first
        begin = begin[begin < self._group_first_row[-1]]
        end = np.minimum(begin + (self._last - self._first), self._group_first_row[-1])
        first = np.searchsorted(self._group_first_row, begin, side="right") - 1
        last = np.searchsorted(self._group_first_row, end - 1, side="right") - 1
        inside = np.zeros(len(self._group_first_row) + 1, np.int64)
        np.add.at(inside, first, 1)
        np.add.at(inside, last + 1, -1)
        return np.flatnonzero(np.cumsum(inside) > 0)

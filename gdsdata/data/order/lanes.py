"""A shuffle that reads in large pieces.

Every piece of the data is read once an epoch, and its samples are far apart in time.

A *piece* is a run of consecutive samples, read at once. An epoch's pieces, in a new order, are
dealt to L *lanes*. A lane opens K pieces at a time, its *window*, and gives one sample of each of
them, in a new order, before it gives a second one of any. Every global batch takes equally many
samples of each lane, lane after lane: so a rank, whose share is a slice of the batch, has lanes of
its own, and the pieces that it reads are no other rank's.

As in `order`, nothing is kept: the sample at any position is computed from the position, in 0.2 us.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gdsdata.data.order.permutation import Permutation, epoch_key, mix, mixed, permuted
from gdsdata.whole_numbers import whole_number

_MIB = 2**20
_MOST_LANES = 64
_LEAST_WINDOW_PIECES = 16
WINDOW_BYTES = 2**30
_LARGEST_PIECE_SAMPLES, _LARGEST_WINDOW_PIECES = 2**20, 2**20  # so that no product below exceeds 2**62


@dataclass(frozen=True)
class Lanes:
    """The shape of a lane shuffle.

    Attributes:
        lanes: L, a divisor of the samples in a global batch. A rank reads only pieces of its own
            if the number of ranks divides L. With other numbers, neighbors share the pieces of the
            lane between them.
        window_pieces: K, pieces that a lane has open; more than it gives samples to a batch, or
            batches repeat pieces.
        piece_samples: m, samples in a piece.

    Raises:
        TypeError: one of them is no whole number.
        ValueError: one of them is out of range.
    """

    lanes: int
    window_pieces: int
    piece_samples: int

    def __post_init__(self) -> None:
        for name, most in (
            ("lanes", 2**31),
            ("window_pieces", _LARGEST_WINDOW_PIECES),
            ("piece_samples", _LARGEST_PIECE_SAMPLES),
        ):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{self}: {name} must be in 1 .. {most}")

    @classmethod
    def fitting(
        cls, samples: int, sample_bytes: int, step_samples: int, lanes: int | None = None, piece_bytes: int = _MIB
    ) -> Lanes:
        """Return a shape for such data.

        It is the same on every rank, and for every number of ranks that share a global batch.

        Args:
            samples: in all.
            sample_bytes: from one sample's start to the next one's.
            step_samples: in a global batch.
            lanes: None takes the largest divisor of ``step_samples`` up to 64.
            piece_bytes: of a piece, at most. Windows of a lane have at least 4 pieces for each of
                its samples in a batch, and 16. Pieces are smaller if all lanes' windows would be
                more than 1 GiB, or more than all samples.

        Raises:
            ValueError: ``lanes`` does not divide ``step_samples``, or ``piece_bytes`` is less than
                1.
        """
        if piece_bytes < 1:
            raise ValueError(f"piece_bytes={piece_bytes}: a piece has at least one byte")
        if lanes is None:
            lanes = max(i for i in range(1, _MOST_LANES + 1) if step_samples % i == 0)
        elif lanes < 1 or step_samples % lanes:
            raise ValueError(
                f"lanes={lanes} does not divide the {step_samples} samples of a global batch (batch_size * "
                "world_size): each batch takes equally many of every lane"
            )
        a_batch = step_samples // lanes
        window_pieces = min(a_batch * max(4, -(-_LEAST_WINDOW_PIECES // a_batch)), _LARGEST_WINDOW_PIECES)
        open_pieces = lanes * window_pieces
        piece_bytes = min(piece_bytes, WINDOW_BYTES // open_pieces)
        piece_samples = min(piece_bytes // max(sample_bytes, 1), samples // open_pieces, _LARGEST_PIECE_SAMPLES)
        return cls(lanes, window_pieces, max(1, piece_samples))

    def holds(self, step_samples: int) -> bool:
        """Return whether a window has the samples of a step."""
        return step_samples <= self.lanes * self.window_pieces * self.piece_samples

    def lanes_of(self, part: range, step_samples: int) -> range:
        """Return the lanes that have a part of each step: see `lanes_of_part`."""
        return lanes_of_part(self.lanes, part, step_samples)

    def permutation(self, samples: int, step_samples: int, seed: int, epoch: int) -> LanePermutation:
        """Return an epoch's bijection, as `permutation.Shuffle` asks for."""
        return LanePermutation(self, samples, step_samples, seed, epoch)


def lanes_of_part(lanes: int, part: range, step_samples: int) -> range:
    """Return the lanes that have a part of each step, at least one.

    If the part does not begin and end with lanes, others read the first and the last one too.

    Args:
        lanes: that share a step equally, one behind the other.
        part: positions in a step.
        step_samples: in a step.
    """
    begin = min(part.start, step_samples - 1)
    return range(begin * lanes // step_samples, -(-max(part.stop, begin + 1) * lanes // step_samples))


class LanePermutation:
    """A bijection on ``range(samples)`` from an epoch's positions to sample ids.

    With N samples, pieces of m, L lanes and G samples a step, of which each lane gives G/L:

    - The ids are turned (``id + shift mod N``) by another amount each epoch. So pieces begin
      elsewhere, and the exceptions below meet other samples. One piece has the last ids and the
      first.
    - Each lane has Q = N // m // L of the whole pieces, in their random order.
    - Fewer than L pieces and a shorter one remain. They are a line that is cut into L *short
      pieces* of equal length, one a lane. Fewer than L samples remain of it, and end the epoch. So
      a lane gives N // L samples.
    - A window is K pieces. The lane's last one has what remains, fewer than 2 K, and the short
      piece, whose samples are spread evenly over the window's m rounds.

    Args:
        shape: L, K and m.
        samples: N.
        step_samples: G.
        seed, epoch: choose the order.

    Raises:
        ValueError: L does not divide G.
    """

    def __init__(self, shape: Lanes, samples: int, step_samples: int, seed: int, epoch: int) -> None:
        if step_samples % shape.lanes:
            raise ValueError(f"{shape}: lanes do not divide the {step_samples} samples of a global batch")
        key = epoch_key(seed, epoch)
        self._shape, self._samples, self._step_samples = shape, samples, step_samples
        self._lane_samples = samples // shape.lanes
        self._whole_pieces = samples // shape.piece_samples
        self._lane_pieces = self._whole_pieces // shape.lanes
        self._short_samples = self._lane_samples - self._lane_pieces * shape.piece_samples
        self._windows = max(1, self._lane_pieces // shape.window_pieces)
        self._a_step = step_samples // shape.lanes  # samples of a lane, as in a window of it
        self._a_window = shape.window_pieces * shape.piece_samples
        self._shift = mix(key ^ 1) % samples
        self._round_key, self._piece_key = np.uint64(mix(key ^ 2)), np.uint64(mix(key ^ 3))
        self._pieces = Permutation(self._whole_pieces, seed, epoch) if self._whole_pieces else None

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the ids at ``positions``, each in ``range(samples)``: int64 (m,) both."""
        line = positions.copy()  # the samples that no lane has lie at the line's end, as at the epoch's
        in_lanes = np.flatnonzero(positions < self._shape.lanes * self._lane_samples)
        lanes = lane_places(positions[in_lanes], self._samples, self._step_samples, self._shape.lanes)
        start, size, turn = self._pieces_of(*lanes)
        line[in_lanes] = start + permuted(turn, size, mixed(self._piece_key ^ start.view(np.uint64)))
        return self._ids(line)

    @property
    def windows(self) -> int:
        """Windows of a lane in an epoch."""
        return self._windows

    def window_of(self, step: int) -> int:
        """Return the window that a step begins in."""
        return min(step * self._a_step // self._a_window, self._windows - 1)

    def windows_of(self, steps: np.ndarray) -> np.ndarray:
        """Return the window that each of these steps begins in: int64 (S,) both."""
        return np.minimum(steps * self._a_step // self._a_window, self._windows - 1)

    def steps_within(self, window: int) -> int:
        """Return how many steps need no window behind this one."""
        if window >= self._windows - 1:
            return -(-self._samples // self._step_samples)
        return (window + 1) * self._a_window // self._a_step

    def window_samples(self, lanes: range) -> int:
        """Return the samples in a window of some lanes; the last may have twice as many."""
        return len(lanes) * min(self._a_window, self._lane_samples)

    def reads(self, lanes: range, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the runs of ids of a window of some lanes, ordered by first use.

        Over all windows and lanes every sample is in one run, but for fewer than L that no lane
        has.

        Returns:
            The first id of each run, and how many follow each other from there (int64).
        """
        k, m, short = self._shape.window_pieces, self._shape.piece_samples, self._short_samples
        lane = np.arange(lanes.start, lanes.stop, dtype=np.int64)
        is_last = window == self._windows - 1
        slots = self._lane_pieces - window * k if is_last else k
        place = window * k * m + np.repeat(np.arange(slots, dtype=np.int64), len(lane))
        start, size, _ = self._pieces_of(np.tile(lane, slots), place)  # the first round has a sample of each
        if is_last and short:
            start = np.append(start, self._shape.lanes * self._lane_pieces * m + lane * short)
            size = np.append(size, np.full(len(lane), short, np.int64))
        start, size = _cut(start, size, m - start % m, start + m - start % m)  # a short piece can lie across two
        first = self._ids(start)
        return _cut(first, size, self._samples - first, np.zeros_like(first))

    def _pieces_of(self, lane: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each place's piece: its start on the line, its samples and its turn.

        The turn is how many of the piece's samples came before.
        """
        k, m, short = self._shape.window_pieces, self._shape.piece_samples, self._short_samples
        window = np.minimum(place // (k * m), self._windows - 1)
        is_last = window == self._windows - 1
        pieces = np.where(is_last, self._lane_pieces - window * k, k)
        window_samples = pieces * m + np.where(is_last, short, 0)
        place = place - window * (k * m)
        # Round i of m begins at i * window_samples // m: it has a sample of each piece, and
        # sometimes of the short one.
        round_ = ((place + 1) * m - 1) // window_samples
        begin, end = round_ * window_samples // m, (round_ + 1) * window_samples // m
        round_number = (lane * self._windows + window) * m + round_
        chosen = permuted(place - begin, end - begin, mixed(self._round_key ^ round_number.view(np.uint64)))
        is_short = chosen == pieces
        start = np.where(
            is_short,
            self._shape.lanes * self._lane_pieces * m + lane * short,
            (lane * self._lane_pieces + window * k + chosen) * m,
        )
        return start, np.where(is_short, short, m), np.where(is_short, round_ * short // m, round_)

    def _ids(self, line: np.ndarray) -> np.ndarray:
        """Return the ids of places on the line.

        Whole pieces stand there in the epoch's order, and the shorter one behind them.
        """
        m = self._shape.piece_samples
        ids = line.copy()
        if self._pieces is not None:
            whole = np.flatnonzero(line < self._whole_pieces * m)
            piece, place = np.divmod(line[whole], m)
            ids[whole] = self._pieces(piece) * m + place
        ids += self._shift
        ids -= np.where(ids >= self._samples, self._samples, 0)
        return ids


def lane_places(positions: np.ndarray, samples: int, step_samples: int, lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lane of each position, and the place in it: int64 (m,) each.

    Args:
        positions: int64 (m,), below ``samples // lanes * lanes``.
        samples: of an epoch.
        step_samples: in a global batch, which has equally many of each lane, lane after lane.
        lanes: how many there are.
    """
    a_step = step_samples // lanes
    step, within = np.divmod(positions, step_samples)
    # The last, partial step has fewer of each lane.
    last = samples // lanes % a_step or 1
    size = np.where(positions < samples // step_samples * step_samples, a_step, last)
    lane, place = np.divmod(within, size)
    return lane, step * a_step + place


def _cut(start: np.ndarray, size: np.ndarray, at: np.ndarray, then: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut runs that are longer than ``at`` in two; the second part starts at ``then``."""
    head = np.minimum(size, at)
    starts, sizes = np.stack([start, then], 1).ravel(), np.stack([head, size - head], 1).ravel()
    return starts[sizes > 0], sizes[sizes > 0]

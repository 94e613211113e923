"""The lane shuffle: every sample once, every piece read once, and its samples far apart."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsdata.data.order.lanes import LanePermutation, Lanes
from gdsdata.data.order.permutation import Order

# Checkpoints depend on these: a change here makes every resumed run see other data.
GOLDEN = [49, 21, 8, 85, 26, 92, 2, 63]
GOLDEN_HUGE = [614359543122, 200251723308, 412478759351, 1013360867571]


@st.composite
def shuffles(draw, most_samples=2000):
    """Draw arguments of `LanePermutation` without the epoch."""
    lanes, a_lane = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    return {
        "shape": Lanes(lanes, draw(st.integers(1, 8)), draw(st.integers(1, 12))),
        "samples": draw(st.integers(1, most_samples)),
        "step_samples": lanes * a_lane,
        "seed": draw(st.integers(-(2**70), 2**70)),
    }


def epoch_of(permutation: LanePermutation, samples: int) -> np.ndarray:
    return permutation(np.arange(samples))


def piece_of(permutation: LanePermutation, shape: Lanes, samples: int) -> np.ndarray:
    """Return the run of `reads` that contains each id, or -1 for the few that no lane has.

    Fails if a sample is in two runs.
    """
    owner = np.full(samples, -1)
    for window in range(permutation.windows):
        for number, (first, count) in enumerate(zip(*permutation.reads(range(shape.lanes), window), strict=True)):
            assert 0 <= first < first + count <= samples and count <= shape.piece_samples
            assert (owner[first : first + count] == -1).all()
            owner[first : first + count] = window * 10**6 + number
    return owner


class TestLanePermutation:
    @given(shuffles(), st.integers(0, 2**40))
    @settings(max_examples=300, deadline=None)
    def test_reaches_every_sample_once(self, arguments, epoch):
        ids = epoch_of(LanePermutation(**arguments, epoch=epoch), arguments["samples"])
        assert ids.dtype == np.int64 and (np.sort(ids) == np.arange(arguments["samples"])).all()

    @given(shuffles(), st.data())
    @settings(max_examples=100, deadline=None)
    def test_evaluates_each_position_alone(self, arguments, data):
        samples = arguments["samples"]
        positions = np.array(data.draw(st.lists(st.integers(0, samples - 1), max_size=20)), np.int64)
        permutation = LanePermutation(**arguments, epoch=3)
        before = positions.copy()
        assert (permutation(positions) == epoch_of(permutation, samples)[positions]).all()
        assert (positions == before).all()

    @given(shuffles())
    @settings(max_examples=200, deadline=None)
    def test_reads_every_piece_once_and_all_but_fewer_samples_than_lanes(self, arguments):
        owner = piece_of(LanePermutation(**arguments, epoch=1), arguments["shape"], arguments["samples"])
        assert (owner == -1).sum() == arguments["samples"] % arguments["shape"].lanes

    @given(shuffles())
    @settings(max_examples=200, deadline=None)
    def test_uses_a_piece_only_in_the_window_that_reads_it(self, arguments):
        shape, samples, step_samples = arguments["shape"], arguments["samples"], arguments["step_samples"]
        permutation = LanePermutation(**arguments, epoch=1)
        owner, ids = piece_of(permutation, shape, samples), epoch_of(permutation, samples)
        for step in range(samples // step_samples):
            owners = owner[ids[step * step_samples : (step + 1) * step_samples]] // 10**6
            first, last = permutation.window_of(step), permutation.window_of(step + 1)
            # A step begins in one window. A large step with small windows can end in a later one.
            assert owners.min() >= first and owners.max() <= last
            assert step < permutation.steps_within(int(owners.max()))
            assert not owners.max() or step >= permutation.steps_within(int(owners.max()) - 1)

    def test_reads_pieces_of_the_size_asked_for_but_for_one_a_lane(self):
        shape = Lanes(8, 4, 100)
        counts = LanePermutation(shape, 100_000, 32, 0, 0).reads(range(8), 0)[1]
        assert len(counts) in (32, 33) and sorted(counts)[2:] == [100] * (len(counts) - 2)
        sizes = Counter()
        permutation = LanePermutation(shape, 100_000, 32, 0, 0)
        for window in range(permutation.windows):
            sizes.update(permutation.reads(range(8), window)[1].tolist())
        assert sizes[100] >= 1000 - 8 - 1
        assert sum(size * count for size, count in sizes.items()) == 100_000

    def test_gives_pieces_in_the_order_of_their_first_use(self):
        shape = Lanes(4, 8, 50)
        permutation = LanePermutation(shape, 10_000, 8, 0, 0)
        ids = permutation(np.arange(4 * 8))  # the first round of every lane
        first, count = permutation.reads(range(4), 0)
        used = [int(np.flatnonzero((first <= i) & (i < first + count))[0]) for i in ids]
        # Two samples a lane in each step.
        assert all(abs(place - position) <= 8 for position, place in enumerate(used))

    def test_a_batch_never_has_two_samples_of_a_piece_where_windows_are_whole(self):
        shape, samples = Lanes(8, 16, 64), 8 * 16 * 64 * 4
        for epoch in range(5):
            permutation = LanePermutation(shape, samples, 32, 7, epoch)
            owner, ids = piece_of(permutation, shape, samples), epoch_of(permutation, samples)
            whole = np.bincount(owner % 10**6 * 8 + owner // 10**6).max()
            assert whole == 64
            batches = owner[ids].reshape(-1, 32)
            pieces_a_batch = [len(set(batch.tolist())) for batch in batches]
            # One piece has the last and the first ids, and is read in two parts. This adds pieces,
            # and removes none.
            assert set(pieces_a_batch) == {32}

    def test_every_sample_is_as_likely_at_every_position(self):
        shape, samples, epochs = Lanes(2, 2, 3), 29, 1500
        ids = np.stack([epoch_of(LanePermutation(shape, samples, 4, 11, epoch), samples) for epoch in range(epochs)])
        table = np.stack([np.bincount(column, minlength=samples) for column in ids.T])
        expected, degrees = epochs / samples, samples * (samples - 1)
        chi_square = ((table - expected) ** 2).sum() / expected
        assert abs(chi_square - degrees) / math.sqrt(2 * degrees) < 5

    def test_is_the_same_on_every_machine(self):
        assert LanePermutation(Lanes(2, 4, 5), 103, 4, 0, 0)(np.arange(8)).tolist() == GOLDEN
        huge = LanePermutation(Lanes(64, 16, 256), 2**40 + 1, 256, -1, 2)
        assert huge(np.arange(2**39, 2**39 + 4)).tolist() == GOLDEN_HUGE

    def test_differs_by_epoch_and_by_seed(self):
        base = epoch_of(LanePermutation(Lanes(8, 16, 64), 50_000, 64, 0, 0), 50_000)
        for seed, epoch in ((0, 1), (1, 0), (-1, 0)):
            assert (epoch_of(LanePermutation(Lanes(8, 16, 64), 50_000, 64, seed, epoch), 50_000) == base).sum() < 12


class TestLanes:
    def test_fit_a_shape_that_divides_the_global_batch_whatever_the_ranks(self):
        assert Lanes.fitting(10**7, 4096, 256) == Lanes(64, 16, 256)
        assert Lanes.fitting(10**7, 4096, 1024) == Lanes(64, 64, 64)  # at most 1 GiB of open pieces
        assert Lanes.fitting(10**7, 4096, 96).lanes == 48
        assert Lanes.fitting(10**7, 4096, 97).lanes == 1
        assert Lanes.fitting(10**7, 4096, 256, lanes=8, piece_bytes=8192) == Lanes(8, 128, 2)

    @pytest.mark.parametrize("batch_size", [2**24 + 64, 2**31, 2**40, 2**62])
    def test_fit_a_batch_far_larger_than_all_samples(self, batch_size):
        order = Order(100, batch_size, Lanes.fitting(100, 8, batch_size), 0, False, 0, 1)
        assert sorted(order.samples_of(1, range(1))[0].tolist()) == list(range(100))

    def test_pieces_are_small_for_few_samples_and_one_sample_for_long_samples(self):
        assert Lanes.fitting(5000, 4096, 64).piece_samples == 5000 // (64 * 16)
        assert Lanes.fitting(10, 4096, 4).piece_samples == 1
        assert Lanes.fitting(10**6, 2**22, 64).piece_samples == 1

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Lanes(0, 1, 1), "lanes must be in 1"),
            (lambda: Lanes(1, 0, 1), "window_pieces must be in 1"),
            (lambda: Lanes(1, 1, 2**20 + 1), "piece_samples must be in 1"),
            (lambda: Lanes.fitting(100, 1, 10, lanes=4), "lanes=4 does not divide the 10 samples of a global batch"),
            (lambda: Lanes.fitting(100, 1, 10, piece_bytes=0), "piece_bytes=0: a piece has at least one byte"),
            (lambda: Order(100, 3, Lanes(2, 4, 5), 0, False, 0, 1), "do not divide the 3 samples of a global batch"),
        ],
    )
    def test_refuse_what_makes_no_shape(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()


class TestRanks:
    def test_global_batches_are_the_same_on_any_number_of_ranks(self):
        def steps(world_size):
            size = 64 // world_size
            orders = [Order(5003, size, Lanes(16, 8, 7), 9, False, rank, world_size) for rank in range(world_size)]
            plans = [order.plan(4, 0, 5003 // 64)[0].reshape(-1, size) for order in orders]
            return np.concatenate(plans, 1)

        assert len(np.unique(steps(1))) == 5003 // 64 * 64
        for world_size in (2, 4, 8, 16, 32, 64):
            assert (steps(world_size) == steps(1)).all()

    @pytest.mark.parametrize("world_size", [1, 2, 4, 8])
    def test_ranks_that_divide_the_lanes_never_read_the_same_piece(self, world_size):
        shape, samples = Lanes(8, 4, 10), 8 * 4 * 10 * 5
        owner = piece_of(LanePermutation(shape, samples, 16, 3, 2), shape, samples)
        ranks = [Order(samples, 16 // world_size, shape, 3, False, r, world_size) for r in range(world_size)]
        read = [set(owner[order.plan(2, 0, len(order))[0]].tolist()) for order in ranks]
        assert sum(map(len, read)) == len(set.union(*read)) == len(set(owner.tolist()))

    def test_any_part_of_an_epoch_can_be_planned_alone(self):
        order = Order(1009, 8, Lanes(8, 4, 5), 1, False, 1, 2)
        whole = np.split(order.plan(0, 0, len(order))[0], np.cumsum(order.plan(0, 0, len(order))[1])[:-1])
        for first, count, step in ((0, 3, 1), (17, 4, 2), (60, len(order) - 60, 1), (1, 9, 7)):
            samples, sizes = order.plan(0, first, count, step)
            expected = whole[first::step][:count]
            assert samples.tolist() == np.concatenate(expected).tolist()
            assert sizes.tolist() == list(map(len, expected))

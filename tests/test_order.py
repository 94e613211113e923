"""The epoch's order: a bijection for every n, and fair, repeatable shares for every rank."""

import math
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsdata.data.order.permutation import Order, Permutation

EDGES = sorted({m for k in range(13) for m in (2**k - 1, 2**k, 2**k + 1)} - {0} | {3, 7, 97, 1009, 4099, 10_007})
HUGE = [2**32 - 1, 2**32, 2**32 + 1, 10**12 + 39, 2**53 + 1, 2**62 - 1, 2**62]
MASK = 2**64 - 1

# Checkpoints depend on these: a change here makes every resumed run see other data.
GOLDEN_10 = [9, 2, 8, 6, 7, 4, 0, 1, 5, 3]
GOLDEN_MILLION = [523075, 646583, 498592, 606277, 863660, 333024, 608634, 174247]
GOLDEN_HUGE = [958733224671, 296095692425, 1013816798479, 368557708437, 729306721447, 192521515426]


def preimage(permutation: Permutation, value: int) -> int:
    """Return the position of ``value``: undo the rounds one by one with Python's own integers."""
    n, a, b = (int(x) for x in (permutation._n, permutation._a, permutation._b))
    while True:
        left, right = divmod(value, b)
        left_radix, right_radix = a, b
        for key in map(int, reversed(permutation._keys)):
            left, right, left_radix, right_radix = right, left, right_radix, left_radix
            mixed = (right + key) * 0xBF58476D1CE4E5B9 & MASK
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
            left = (left - ((mixed >> 32) * left_radix >> 32)) % left_radix
        value = left * b + right
        if value < n:
            return value


def chi_square_z(counts: np.ndarray, degrees: int) -> float:
    """Return the z-score of the chi-square of ``counts`` under equal chances."""
    expected = counts.mean()
    return float((((counts - expected) ** 2).sum() / expected - degrees) / math.sqrt(2 * degrees))


def epoch_of(order: Order, epoch: int = 0) -> list[list[int]]:
    samples, sizes = order.plan(epoch, 0, len(order))
    return [batch.tolist() for batch in np.split(samples, np.cumsum(sizes)[:-1])]


class TestPermutation:
    @pytest.mark.parametrize("n", EDGES)
    def test_reaches_every_number_once_at_the_edges(self, n):
        assert (np.sort(Permutation(n, seed=1, epoch=2)(np.arange(n))) == np.arange(n)).all()

    @given(st.integers(1, 5000), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
    @settings(max_examples=100, deadline=None)
    def test_reaches_every_number_once_for_any_key(self, n, seed, epoch):
        assert (np.sort(Permutation(n, seed, epoch)(np.arange(n))) == np.arange(n)).all()

    @pytest.mark.parametrize("n", HUGE)
    def test_stays_in_range_without_collisions_where_n_is_huge(self, n):
        positions = np.unique(np.random.default_rng(0).integers(0, n, 50_000))
        images = Permutation(n, seed=3, epoch=0)(positions)
        assert images.dtype == np.int64
        assert images.min() >= 0 and images.max() < n
        assert len(np.unique(images)) == len(positions)

    @given(st.integers(1, 2**62), st.integers(0, 2**64), st.data())
    @settings(max_examples=100, deadline=None)
    def test_can_be_undone(self, n, seed, data):
        permutation = Permutation(n, seed, epoch=7)
        row = permutation._b * data.draw(st.integers(0, permutation._a - 1))
        ends = [position for position in (row - 1, row, row + 1) if 0 <= position < n]
        positions = ends + data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
        images = permutation(np.array(positions, np.int64)).tolist()
        assert [preimage(permutation, image) for image in images] == positions

    def test_is_the_same_on_every_machine(self):
        assert Permutation(10, 0, 0)(np.arange(10)).tolist() == GOLDEN_10
        assert Permutation(1_000_003, 42, 5)(np.arange(8)).tolist() == GOLDEN_MILLION
        assert Permutation(2**40 + 1, -1, 2)(np.arange(6)).tolist() == GOLDEN_HUGE

    def test_evaluates_each_position_alone(self):
        whole = Permutation(10_007, 1, 1)(np.arange(10_007))
        positions = np.random.default_rng(1).permutation(10_007)[:300]
        assert (Permutation(10_007, 1, 1)(positions) == whole[positions]).all()
        assert Permutation(10_007, 1, 1)(positions[:0]).shape == (0,)

    def test_leaves_its_argument_alone(self):
        positions = np.arange(100)
        Permutation(100, 0, 0)(positions)
        assert (positions == np.arange(100)).all()

    def test_differs_by_epoch_and_by_seed(self):
        n, positions = 100_000, np.arange(100_000)
        base = Permutation(n, 0, 0)(positions)
        for seed, epoch in ((0, 1), (1, 0), (1, 1), (-1, 0)):
            # Two independent shuffles agree at one place on average.
            assert (Permutation(n, seed, epoch)(positions) == base).sum() < 10

    @pytest.mark.parametrize("n", [3, 10, 64, 1001])
    def test_puts_every_number_at_every_position_equally_often(self, n):
        images = np.stack([Permutation(n, seed=11, epoch=epoch)(np.arange(n)) for epoch in range(1500)])
        table = np.stack([np.bincount(column, minlength=n) for column in images.T[:20]])
        assert abs(chi_square_z(table, degrees=len(table) * (n - 1))) < 5

    @pytest.mark.parametrize("n", [10, 64, 1001, 10**6, 10**10])
    def test_does_not_keep_neighbors_together(self, n):
        positions = np.arange(min(n, 10_000))
        images = [Permutation(n, seed=5, epoch=epoch)(positions) for epoch in range(500)]
        steps = np.concatenate([np.diff(image) % n for image in images])
        bins = min(n - 1, 1000)
        counts = np.bincount((steps - 1) * bins // (n - 1), minlength=bins)
        assert abs(chi_square_z(counts, degrees=bins - 1)) < 5

    def test_scatters_a_batch_over_the_whole_range(self):
        counts = np.bincount(Permutation(10**9, seed=0, epoch=0)(np.arange(100_000)) // 10**6, minlength=1000)
        assert abs(chi_square_z(counts, degrees=999)) < 5

    @pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
    def test_refuses_a_size_it_cannot_serve(self, n):
        with pytest.raises(ValueError, match="is not in 1 .. 2"):
            Permutation(n, 0, 0)


@st.composite
def order_arguments(draw):
    """Draw arguments of `Order` without the rank, for at least one batch."""
    batch_size, world_size, drop_last = draw(st.integers(1, 20)), draw(st.integers(1, 7)), draw(st.booleans())
    return {
        "samples": draw(st.integers(batch_size * world_size if drop_last else world_size, 600)),
        "batch_size": batch_size,
        "world_size": world_size,
        "shuffle": draw(st.booleans()),
        "drop_last": drop_last,
        "seed": draw(st.integers(0, 2**64)),
    }


class TestOrder:
    @given(order_arguments(), st.integers(0, 3))
    @settings(max_examples=200, deadline=None)
    def test_ranks_get_disjoint_and_equally_long_shares_of_all_but_a_remainder(self, arguments, epoch):
        world_size = arguments["world_size"]
        shares = [epoch_of(Order(**arguments, rank=rank), epoch) for rank in range(world_size)]
        sizes = [[len(batch) for batch in share] for share in shares]
        assert all(size == sizes[0] for size in sizes)
        assert min(sizes[0]) > 0 and sizes[0][:-1] == [arguments["batch_size"]] * (len(sizes[0]) - 1)

        seen = [sample for share in shares for batch in share for sample in batch]
        assert len(set(seen)) == len(seen) and set(seen) <= set(range(arguments["samples"]))
        wholes = world_size * (arguments["batch_size"] if arguments["drop_last"] else 1)
        assert len(seen) == arguments["samples"] - arguments["samples"] % wholes

    @given(order_arguments(), st.data())
    @settings(max_examples=200, deadline=None)
    def test_any_part_of_an_epoch_can_be_planned_alone(self, arguments, data):
        order = Order(**arguments, rank=data.draw(st.integers(0, arguments["world_size"] - 1)))
        first, step = data.draw(st.integers(0, len(order))), data.draw(st.integers(1, 4))
        batches = data.draw(st.integers(0, len(range(first, len(order), step))))
        samples, sizes = order.plan(1, first, batches, step)
        expected = epoch_of(order, 1)[first::step][:batches]
        assert samples.dtype == sizes.dtype == np.int64
        assert sizes.tolist() == [len(batch) for batch in expected]
        assert samples.tolist() == [sample for batch in expected for sample in batch]

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_global_batches_depend_on_the_product_of_ranks_and_batch_size_alone(self, shuffle):
        def global_batches(world_size):
            shares = [
                epoch_of(Order(1000, 24 // world_size, shuffle, 9, True, rank, world_size), epoch=4)
                for rank in range(world_size)
            ]
            return [sum(step, []) for step in zip(*shares, strict=True)]

        assert len(global_batches(1)) == 1000 // 24
        for world_size in (2, 3, 4, 6, 8, 12, 24):
            assert global_batches(world_size) == global_batches(1)

    def test_without_shuffle_ranks_take_slices_in_the_order_of_ids(self):
        shares = [epoch_of(Order(11, 2, False, 0, False, rank, 2)) for rank in range(2)]
        # Two whole steps of four, then one sample each of the three left.
        assert shares == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]

    def test_drop_last_leaves_out_the_partial_step(self):
        assert epoch_of(Order(11, 2, False, 0, True, 1, 2)) == [[2, 3], [6, 7]]

    @pytest.mark.parametrize(
        ("uneven", "last"),
        [("drop", [[8], [9]]), ("pad", [[8, 9], [10, 0]]), ("repeat", [[8, 9, 10, 0], [1, 2, 3, 4]])],
    )
    def test_an_uneven_end_is_dropped_or_padded_or_repeated_as_asked(self, uneven, last):
        shares = [epoch_of(Order(11, 4, False, 0, False, rank, 2, uneven)) for rank in range(2)]
        assert shares == [[[0, 1, 2, 3], last[0]], [[4, 5, 6, 7], last[1]]]

    @given(order_arguments(), st.sampled_from(["pad", "repeat"]))
    @settings(max_examples=200, deadline=None)
    def test_with_pad_or_repeat_every_sample_comes_and_ranks_have_equal_batches(self, arguments, uneven):
        arguments |= {"drop_last": False, "uneven": uneven}
        samples, batch_size, world_size = (arguments[name] for name in ("samples", "batch_size", "world_size"))
        shares = [epoch_of(Order(**arguments, rank=rank), 2) for rank in range(world_size)]
        sizes = [[len(batch) for batch in share] for share in shares]
        assert all(size == sizes[0] for size in sizes)
        assert len(shares[0]) == -(-samples // (batch_size * world_size))
        seen = [sample for share in shares for batch in share for sample in batch]
        assert set(seen) == set(range(samples))
        if uneven == "pad":
            assert len(seen) - samples < world_size
        else:
            assert set(sizes[0]) == {batch_size}

    def test_a_batch_far_larger_than_all_samples_costs_what_the_samples_cost(self):
        tracemalloc.start()
        for size in (10**9, 2**40, 2**61):
            order = Order(1000, size, shuffle=True, seed=1, drop_last=False, rank=1, world_size=2)
            (batch,) = epoch_of(order)
            assert len(batch) == order.largest_batch == 500
        assert tracemalloc.get_traced_memory()[1] < 10**6
        tracemalloc.stop()

    def test_the_samples_left_out_are_others_in_the_next_epoch(self):
        def left_out(epoch):
            shares = [epoch_of(Order(11, 2, True, 0, False, rank, 4), epoch) for rank in range(4)]
            return set(range(11)) - {sample for share in shares for batch in share for sample in batch}

        assert all(len(left_out(epoch)) == 3 for epoch in range(20))
        assert set().union(*(left_out(epoch) for epoch in range(20))) == set(range(11))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"batch_size": 0}, "batch_size=0: a batch has at least one sample"),
            ({"batch_size": sys.maxsize}, r"batch_size=\d+: the batches of world_size=2 ranks have at most 2\*\*62"),
            ({"world_size": 0}, "world_size=0: there is at least one rank"),
            ({"rank": 2}, r"rank=2 is not in range\(world_size=2\)"),
            ({"rank": -1}, r"rank=-1 is not in range\(world_size=2\)"),
            ({"samples": 0}, "0 samples"),
            ({"samples": 1}, r"1 samples make no batch .* of world_size=2 ranks, .* Sharding\(uneven=\"pad\"\)"),
            ({"uneven": "wait"}, "uneven='wait' is none of drop, pad, repeat"),
            ({"uneven": "pad", "drop_last": True}, "uneven='pad' says how to fill the step that drop_last=True"),
            ({"samples": 7, "drop_last": True}, "7 samples make no batch .* takes 8 .* or drop_last=False"),
        ],
    )
    def test_refuses_arguments_that_make_no_batches(self, change, message):
        arguments = {"samples": 100, "batch_size": 4, "drop_last": False, "rank": 0, "world_size": 2} | change
        with pytest.raises(ValueError, match=message):
            Order(**arguments, shuffle=True, seed=0)

    @pytest.mark.parametrize(("first", "batches", "step"), [(-1, 1, 1), (0, 4, 1), (3, 1, 1), (2, -1, 1), (1, 2, 2)])
    def test_refuses_to_plan_outside_the_epoch(self, first, batches, step):
        with pytest.raises(ValueError, match="reaches outside the epoch's 3 batches"):
            Order(12, 4, True, 0, False, 0, 1).plan(0, first, batches, step)

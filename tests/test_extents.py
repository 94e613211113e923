"""Extents in few bytes a sample are those that were put in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdsdata.formats.extents import Extents, ExtentsBuilder
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.io import engine

GIB = 2**30


@st.composite
def wide(draw, most_samples=40):
    """Begins and lengths of fields: of any size, in any order, aligned or not, some missing."""
    count, fields = draw(st.integers(1, most_samples)), draw(st.integers(1, 4))
    alignment = draw(st.sampled_from([1, 2, 512, 4096, 2**20]))
    most = draw(st.sampled_from([0, 3, 1000, 2**16, 2**24, 5 * GIB, 2**47, 2**63 - 1]))
    begin = draw(st.lists(st.integers(0, most // alignment), min_size=count * fields, max_size=count * fields))
    longest = draw(st.sampled_from([0, 1, 254, 255, 256, 2**16, 2**32, 2**62, 2**63 - 1]))
    least = draw(st.sampled_from([-1, 0, longest // 2, longest]))
    length = draw(st.lists(st.integers(least, longest), min_size=count * fields, max_size=count * fields))
    return np.array(begin).reshape(count, fields) * alignment, np.array(length).reshape(count, fields)


def tar_like(lengths):
    """Members in order, each behind a header of 512 bytes and up to the next multiple of 512."""
    taken = 512 + -(-lengths.reshape(-1) // 512) * 512
    return (np.cumsum(taken) - taken + 512).reshape(lengths.shape)


def assert_same(found, begin, length):
    assert found.begin.dtype == found.length.dtype == np.int64
    assert np.array_equal(found.length, length)
    assert np.array_equal(found.begin[length >= 0], begin[length >= 0])


@given(wide(), st.data())
def test_extents_come_out_as_they_went_in(content, data):
    begin, length = content
    extents = Extents.of(begin, length)
    assert len(extents) == len(begin) and extents.rows.nbytes <= begin.nbytes + length.nbytes
    assert_same(extents.wide(), begin, length)
    samples = np.array(data.draw(st.lists(st.integers(0, len(begin) - 1))), np.int64)
    assert_same(extents.take(samples), begin[samples], length[samples])
    first, end = sorted(data.draw(st.tuples(*[st.integers(0, len(begin))] * 2)))
    assert_same(extents[first:end].wide(), begin[first:end], length[first:end])
    of_samples = np.concatenate(list(extents.sample_bytes()))
    assert np.array_equal(of_samples, np.maximum(length, 0).sum(1))
    for field in range(begin.shape[1]):
        assert extents.lacks_everywhere(field) == (length[:, field] < 0).all()


@given(wide(), st.data())
def test_parts_that_are_joined_are_the_whole_in_every_byte(content, data):
    begin, length = content
    cuts = sorted(data.draw(st.lists(st.integers(0, len(begin)), max_size=4)))
    parts = [slice(*cut) for cut in zip([0, *cuts], [*cuts, len(begin)], strict=True)]
    whole = Extents.of(begin, length)
    builder = ExtentsBuilder()
    for part in parts:
        builder.add(begin[part], length[part])
    for found in (builder.extents(), Extents.joined(Extents.of(begin[part], length[part]) for part in parts)):
        assert np.array_equal(found.rows, whole.rows) and np.array_equal(found.least, whole.least)
        assert found.widths == whole.widths and found.order == whole.order
        assert (found.alignment, found.has_gaps) == (whole.alignment, whole.has_gaps)


@given(wide())
def test_a_plan_is_that_of_the_wide_arrays(content):
    begin, length = content
    one = np.ones(2, np.int64)
    fields = tuple(Field(str(i)) for i in range(begin.shape[1]))
    first_sample = np.array([0, len(begin) // 2, len(begin)])
    index = FieldIndex(["a", "b"], one, one, first_sample, fields, Extents.of(begin, length))
    samples = np.arange(len(begin))[::-1]
    plan = index.plan(samples)
    assert np.array_equal(plan.length, length[samples].reshape(-1))
    there = plan.length >= 0
    assert np.array_equal(plan.offset[there], begin[samples].reshape(-1)[there])
    assert np.array_equal(plan.source, np.repeat(samples >= len(begin) // 2, len(fields)))


@pytest.mark.parametrize(
    "least, greatest, bytes_a_sample",
    [
        ((1000, 1), (2**16 - 1, 3), 2 + 2 + 1),
        ((1000, 1), (2**24 - 1, 3), 3 + 3 + 1),
        ((1000, 1), (2**29 - 1, 2**10), 4 + 4 + 2),
        ((1000, 1), (3 * GIB, GIB), 4 + 4 + 4),
        ((1000, 3), (1000, 3), 2 + 0 + 0),
    ],
)
def test_the_bytes_of_a_tars_samples(least, greatest, bytes_a_sample):
    """A begin, in units of 512; what the lengths need; nothing for the second member's place."""
    chosen = np.random.default_rng(0)
    length = chosen.integers(least, np.array(greatest) + 1, (700, 2))
    length[0], length[1] = least, greatest
    begin = tar_like(length)
    extents = Extents.of(begin, length)
    assert_same(extents.wide(), begin, length)
    assert extents.rows.shape[1] == bytes_a_sample


def test_members_and_shards_beyond_4_gib():
    length = np.full((700, 2), 1000)
    length[5, 0], length[9, 1] = 40 * GIB, 2**40
    begin = tar_like(length)
    extents = Extents.of(begin, length)
    assert_same(extents.wide(), begin, length)
    assert extents.rows.shape[1] == 4 + 5 + 5


def test_two_fields_of_any_order_in_files_below_4_gib_take_17_bytes():
    """The second begin is counted from the first one's end, in either direction."""
    begin, length = np.random.default_rng(0).integers(0, 2**32, (2, 5000, 2))
    begin[:2] = [[0, 2**32 - 1], [2**32 - 1, 0]]
    extents = Extents.of(begin, length)
    assert_same(extents.wide(), begin, length)
    assert extents.rows.shape[1] == 17


def test_fields_that_lie_in_another_order_take_no_more():
    length = np.random.default_rng(0).integers(1, 2**16, (1000, 3))
    begin = tar_like(length)
    there_and_back = [2, 0, 1]
    turned = Extents.of(begin[:, there_and_back], length[:, there_and_back])
    assert turned.rows.shape == Extents.of(begin, length).rows.shape
    assert_same(turned.wide(), begin[:, there_and_back], length[:, there_and_back])


def test_a_missing_field_costs_a_byte_at_most():
    length = np.random.default_rng(0).integers(1, 100, (1000, 3))
    begin = tar_like(length)
    length[::7, 1] = -1
    found = Extents.of(begin, length)
    assert_same(found.wide(), begin, length)
    assert found.has_gaps and found.rows.shape[1] <= Extents.of(begin, np.abs(length)).rows.shape[1] + 1


def test_no_samples_have_extents_too():
    nothing = np.empty((0, 2), np.int64)
    extents = Extents.of(nothing, nothing)
    assert len(extents) == 0 and list(extents.sample_bytes()) == []
    assert_same(extents.take(np.empty(0, np.int64)), nothing, nothing)


def test_samples_that_are_not_there_get_the_first_or_the_last_ones_extents():
    """A plan checks no sample, so memory outside of the rows must not be read."""
    length = np.random.default_rng(0).integers(1, 2**16, (100, 2))
    begin = tar_like(length)
    found = Extents.of(begin, length).take(np.array([-1, -(2**63), 100, 2**63 - 1]))
    assert_same(found, begin[[0, 0, -1, -1]], length[[0, 0, -1, -1]])


@pytest.mark.parametrize(
    "wrong",
    [
        dict(rows=np.zeros((3, 4), np.uint8)),
        dict(rows=np.zeros(15, np.uint8)),
        dict(rows=np.zeros((0, 5), np.uint8)),
        dict(widths=np.array([5, 0, -1, 1])),
        dict(widths=np.array([9, 0, 0, -4])),
        dict(widths=np.array([5])),
        dict(least=np.zeros(3, np.int64)),
        dict(order=np.array([0, 2])),
        dict(order=np.array([-1, 0])),
        dict(alignment=3),
        dict(alignment=0),
        dict(alignment=-512),
    ],
)
def test_rows_that_are_not_as_their_columns_say_are_refused(wrong):
    sound = dict(
        rows=np.zeros((3, 5), np.uint8),
        samples=np.arange(3),
        widths=np.array([4, 1, 0, 0]),
        least=np.zeros(4, np.int64),
        order=np.array([0, 1]),
        alignment=512,
    )
    assert engine.unpack_extents(**sound)[0].shape == (3, 2)
    with pytest.raises(ValueError, match="unpack_extents takes rows of columns"):
        engine.unpack_extents(**{**sound, **wrong})

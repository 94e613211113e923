"""A split is a contiguous part of the samples, for every format and shuffle."""

from itertools import pairwise

import numpy as np
import pytest
from helpers import assert_same_batches, grouped, write_records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sources import SOURCES
from test_identity import flat, state_behind, unpacked_within  # noqa: F401 (a fixture)

from gdsdata import GDSDataset, RowGroups
from gdsdata.data.order.lanes import Lanes
from gdsdata.formats import Records

many = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(folder, format, **arguments) -> GDSDataset:
    given = {"batch_size": 1, "format": format, "device": "cpu", "ragged": "list", "shuffle": False, **arguments}
    return GDSDataset(folder, **grouped(given))


def samples_of(dataset) -> list[bytes]:
    """Return each sample's bytes; batches have one sample."""
    found = []
    for batch in dataset:
        values = batch.values() if isinstance(batch, dict) else [batch]
        tensors = [one for value in values for one in (value if isinstance(value, list) else [value])]
        found.append(b"|".join(tensor.numpy().tobytes() for tensor in tensors))
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_adjacent_splits_have_every_sample_once_and_in_the_order_of_the_files(tmp_path, name):
    source = SOURCES[name]
    source.write(tmp_path)
    everything = samples_of(read(tmp_path, source.format()))
    for bounds in ([0, 0.5, 1], [0, 0.1, 0.37, 0.9, 1]):
        parts = [read(tmp_path, source.format(), split=one) for one in pairwise(bounds)]
        assert [sample for part in parts for sample in samples_of(part)] == everything
        assert sum(part.samples for part in parts) == len(everything)


@pytest.mark.parametrize("name", ["records", "megatron windows", "megatron's order", "tar", "parquet"])
@pytest.mark.parametrize("shuffle", [True, "lanes"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_shuffled_split_has_the_samples_of_one_that_is_not(tmp_path, name, shuffle, world_size):
    source = SOURCES[name]
    source.write(tmp_path)
    for split in ((0, 0.6), (0.6, 1)):
        expected = sorted(samples_of(read(tmp_path, source.format(), split=split)))
        arguments = dict(split=split, shuffle=shuffle, uneven="pad", world_size=world_size)
        ranks = [read(tmp_path, source.format(), rank=rank, **arguments) for rank in range(world_size)]
        got = [sample for rank in ranks for sample in samples_of(rank)]
        assert set(got) == set(expected) and len(got) - len(expected) < world_size


@pytest.mark.parametrize("shape", [RowGroups(2, 7), RowGroups(1, 100)])
def test_row_groups_are_shared_by_the_splits_that_divide_them(tmp_path, shape):
    source = SOURCES["parquet"]
    source.write(tmp_path)
    everything = sorted(samples_of(read(tmp_path, source.format())))
    parts = [read(tmp_path, source.format(), split=one, shuffle=shape, batch_size=2) for one in ((0, 0.55), (0.55, 1))]
    values = [value for part in parts for batch in part for value in batch["x"].tolist()]
    assert sorted(values) == sorted(np.frombuffer(sample[:8], np.int64)[0] for sample in everything)


def test_lanes_read_the_pieces_of_a_split_alone(tmp_path):
    data = write_records(tmp_path / "0.bin", 400, 4096)
    part = read(tmp_path, Records("u1", (4096,)), split=(0.25, 0.5), shuffle=Lanes(2, 8, 4), batch_size=4)
    got = np.concatenate([batch.numpy() for batch in part])
    assert sorted(map(bytes, got)) == sorted(map(bytes, data[100:200]))
    assert sum(part.stats()["piece_bytes"].values()) < 1.5 * 100 * 4096


@many
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    cuts=st.lists(st.floats(0, 1), min_size=0, max_size=4),
)
def test_cuts_anywhere_leave_nothing_out_and_nothing_twice(tmp_path, counts, cuts):
    for path in tmp_path.glob("*.bin"):
        path.unlink()
    data = np.concatenate([write_records(tmp_path / f"{i}.bin", count, 8, i) for i, count in enumerate(counts)])
    bounds, got = sorted({0.0, 1.0, *cuts}), []
    for one in pairwise(bounds):
        try:
            got += read(tmp_path, Records("u1", (8,)), split=one)
        except ValueError as error:
            assert f"of the {len(data)} samples of " in str(error) and "it has none" in str(error)
    assert_same_batches(got, np.split(data, len(data)))


@pytest.mark.parametrize("split", [(0.5, 0.5), (0.9, 0.1), (-0.1, 1), (0, 1.1), (0, float("nan"))])
def test_a_split_out_of_range_is_refused_in_words(tmp_path, split):
    write_records(tmp_path / "0.bin", 10, 8)
    with pytest.raises(ValueError, match="the part begins and ends within 0 and 1"):
        read(tmp_path, Records("u1", (8,)), split=split)


def test_numbers_of_numpy_are_bounds(tmp_path):
    write_records(tmp_path / "0.bin", 10, 8)
    assert read(tmp_path, Records("u1", (8,)), split=(0, np.float32(0.9))).samples == 9
    assert read(tmp_path, Records("u1", (8,)), split=(np.float64(0.5), np.int64(1))).samples == 5


def test_a_state_of_one_split_is_refused_by_another_of_as_many_samples(tmp_path):
    write_records(tmp_path / "0.bin", 40, 8)
    first, second = (read(tmp_path, Records("u1", (8,)), split=split) for split in ((0, 0.5), (0.5, 1)))
    state = state_behind(first)
    read(tmp_path, Records("u1", (8,)), split=[0, 0.5]).load_state_dict(state)
    with pytest.raises(ValueError, match=r"split was \[0.0, 0.5\] and is \[0.5, 1.0\]"):
        second.load_state_dict(state)
    rest = flat(first)
    first.load_state_dict(state)
    assert_same_batches(flat(first), rest[2:])

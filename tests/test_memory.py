"""Memory of a pool is reused once no view of it is left, and never before."""

import io
import pickle
import random
import tarfile

import torch
from helpers import MIB, anonymous_bytes, random_bytes

import gdsdata
from gdsdata.io.memory import MemoryPool


def shard(path, samples: int) -> str:
    """Write a WebDataset shard of one field whose size differs."""
    dice = random.Random(samples)
    with tarfile.open(path, "w") as tar:
        for number in range(samples):
            content = random_bytes(dice.randrange(200_000, 300_000), seed=number)
            member = tarfile.TarInfo(f"{number:05}.bin")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return str(path)


def test_memory_is_reused_once_no_view_of_it_is_left():
    pool = MemoryPool(4)
    first, second = pool.take(2 * MIB), pool.take(2 * MIB)
    places = first.data_ptr(), second.data_ptr()
    assert places[0] != places[1] and all(place % 4096 == 0 for place in places)
    part = first[10:20].view(torch.int16)  # keeps all of it
    del first
    assert pool.take(2 * MIB).data_ptr() not in places
    del part
    assert pool.take(2 * MIB).data_ptr() == places[0]


def test_the_pool_is_last_in_first_out_and_keeps_a_limited_number():
    pool = MemoryPool(2)
    taken = [pool.take(MIB) for _ in range(5)]
    places = [one.data_ptr() for one in taken]
    while taken:
        taken.pop(0)
    again = [pool.take(MIB) for _ in range(2)]
    assert [one.data_ptr() for one in again] == [places[4], places[3]]
    assert len(pool._spare) == 0


def test_a_buffer_that_is_too_small_makes_way_for_a_larger_one():
    pool = MemoryPool(4)
    pool.take(MIB)
    larger = pool.take(10 * MIB)
    assert larger.shape == (10 * MIB,) and larger.fill_(7).sum() == 7 * 10 * MIB
    assert len(pool._spare) == 0
    assert pool.take(0).shape == (0,)


def test_short_ones_take_no_more_than_they_are():
    pool = MemoryPool(4)
    before = anonymous_bytes()
    kept = [pool.take(10_000).fill_(1) for _ in range(2000)]
    assert anonymous_bytes() - before < 30 * MIB, "20 MB were asked for"
    kept += [pool.take(MIB + 1).fill_(1) for _ in range(50)]
    assert anonymous_bytes() - before < 90 * MIB, "52 MB more were asked for"
    assert len(kept) == 2050


def test_batches_that_are_kept_stay_as_they_were_while_others_come_and_go(tmp_path):
    dataset = gdsdata.GDSDataset(shard(tmp_path / "0.tar", 300), 16, device="cpu")
    dice, kept = random.Random(0), []
    for _ in range(4):
        for batch in dataset:
            if dice.random() < 0.3:
                kept.append((batch["bin"].values, batch["bin"].values.clone()))
    assert len(kept) > 10
    for values, as_they_were in kept:
        assert torch.equal(values, as_they_were)


def test_a_pickled_data_set_leaves_its_memory_pool_behind(tmp_path):
    dataset = gdsdata.GDSDataset(shard(tmp_path / "0.tar", 40), 8, device="cpu", shuffle=False)
    first = next(iter(dataset))["bin"].values
    other = pickle.loads(pickle.dumps(dataset))
    assert other._samples.source._memory is None
    assert torch.equal(next(iter(other))["bin"].values, first)

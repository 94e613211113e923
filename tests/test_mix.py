"""Mix: each prefix has the right shares, for any interruption, position and number of ranks."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import eventually, grouped, in_new_process, reading_threads
from hypothesis import given
from hypothesis import strategies as st
from test_tfrecord import record
from torch.utils.data import DataLoader

from gdsdata import GDSDataset, Mix
from gdsdata.data.order.blend import Blend
from gdsdata.errors import CorruptData
from gdsdata.formats import Records, TFRecord

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

COUNTS = (90, 41, 23)  # records of the three sources, whose batches have 4, 3 and 2 of them
SIZES = (4, 3, 2)
WIDTHS = (3, 1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write three files of int64 records of 3, 1 and 2 numbers that encode source and sample."""
    folder = tmp_path_factory.mktemp("mix")
    for source, (count, width) in enumerate(zip(COUNTS, WIDTHS, strict=True)):
        (1000 * source + np.arange(count * width).reshape(count, width) // width).tofile(folder / f"{source}.bin")
    return folder


def sources(folder, **arguments):
    sizes = arguments.pop("sizes", SIZES)
    return [
        GDSDataset(
            folder / f"{i}.bin", sizes[i], Records("i8", (WIDTHS[i],)), seed=5, device="cpu", **grouped(arguments)
        )
        for i in range(3)
    ]


def mix(folder, weights=(0.5, 0.3, 0.2), stop="all_exhausted", **arguments):
    return Mix(sources(folder, **arguments), weights, stop)


def taken(batches):
    """Return each batch's source, and its samples in order."""
    return [(int(batch[0, 0]) // 1000, (batch[:, 0] % 1000).tolist()) for batch in batches]


def epochs(dataset, number):
    return [batch for _ in range(number) for batch in taken(dataset)]


# ---------------------------------------------------------------------------------------------------- proportions

some_weights = st.lists(st.floats(1e-3, 1e3) | st.sampled_from([0.0, 1.0, 1e-9]), min_size=1, max_size=9).filter(any)


@given(some_weights, st.integers(0, 2**40))
def test_every_prefix_has_each_source_by_its_weight(weights, begin):
    blend, positions = Blend(weights), begin + np.arange(2000)
    order, turns = blend.sources(positions)
    shares = np.array(weights) / sum(weights)
    had = np.array(blend.counts(begin)) + np.cumsum(order[:, None] == np.arange(len(weights)), 0)
    drift = 3 * begin * 2.0**-31  # shares are whole multiples of 2 ** -31
    bound = (1 if len(weights) <= 3 else 1.68) + drift
    assert (np.abs(had - (positions[:, None] + 1) * shares) < bound + 1e-6).all()
    assert had[-1].tolist() == blend.counts(begin + 2000)
    assert (turns == had[np.arange(2000), order] - 1).all()
    assert not had[:, np.array(weights) == 0].any()


@given(some_weights, st.integers(1, 500))
def test_the_place_of_a_turn_is_found(weights, turns):
    source = int(np.argmax(weights))
    blend = Blend(weights)
    first, last = blend.first_with(source, turns), blend.last_with(source, turns)
    assert blend.counts(first)[source] == turns == blend.counts(last)[source]
    assert blend.counts(first - 1)[source] == turns - 1 and blend.counts(last + 1)[source] == turns + 1


def test_batches_come_whole_from_one_source_by_the_weights(folder):
    got = taken(mix(folder, (0.5, 0.3, 0.2), stop=40))
    assert [sum(source == i for source, _ in got) for i in range(3)] == [20, 12, 8]
    assert all(len(samples) <= SIZES[source] for source, samples in got)


def test_a_source_of_weight_0_never_comes(folder):
    assert {source for source, _ in taken(mix(folder, (1, 0, 1)))} == {0, 2}


def test_without_weights_all_sources_end_together(folder):
    blended = Mix(sources(folder))
    got = taken(blended)
    per_source = [sorted(sample for i, samples in got for sample in samples if i == source) for source in range(3)]
    missing = [count - len(set(found)) for count, found in zip(COUNTS, per_source, strict=True)]
    assert min(missing) == 0 and all(few <= 2 * size for few, size in zip(missing, SIZES, strict=True))
    assert len(got) == len(blended)


# ------------------------------------------------------------------------------------------------- where epochs end


def test_the_first_source_that_is_exhausted_ends_the_epoch(folder):
    blended = mix(folder, (1, 1, 1), stop="first_exhausted")
    got = taken(blended)
    samples = [sample for source, some in got for sample in some if source == 2]
    assert sorted(samples) == list(range(23))  # the third has the fewest batches: each sample once
    assert len(got) == len(blended) and 3 * 12 <= len(got) <= 3 * 13


def test_the_last_source_that_is_exhausted_ends_the_epoch_and_shorter_ones_start_over(folder):
    blended = mix(folder, (1, 1, 1), stop="all_exhausted")
    got = taken(blended)
    of = [[samples for source, samples in got if source == i] for i in range(3)]
    assert sorted(itertools.chain(*of[0])) == list(range(90)) and got[-1][0] == 0
    alone = sources(folder)[2]
    assert of[2] == [samples for _, samples in epochs(alone, 2)][: len(of[2])] and len(of[2]) > len(alone)
    assert len(got) == len(blended)


def test_a_number_of_batches_ends_the_epoch_and_the_next_goes_on_with_what_is_left(folder):
    blended = mix(folder, (1, 1, 2), stop=7)
    long = mix(folder, (1, 1, 2), stop=21)
    assert len(blended) == 7 and epochs(blended, 3) == taken(long)
    assert len(mix(folder, (1, 1, 2), stop=np.int64(7))) == 7


def test_set_epoch_begins_any_epoch(folder):
    blended = mix(folder)
    whole = epochs(blended, 3)
    again = mix(folder)
    again.set_epoch(2)
    assert taken(again) == whole[2 * len(blended) :]
    with pytest.raises(ValueError, match="epoch=-1"):
        blended.set_epoch(-1)


def test_iterating_leaves_the_sources_own_places_alone(folder):
    blended = mix(folder)
    before = [source.state_dict() for source in blended.sources]
    list(blended)
    assert [source.state_dict() for source in blended.sources] == before


# -------------------------------------------------------------------------------------------------- resume, ranks


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", 50])
def test_a_run_cut_anywhere_goes_on_as_if_it_had_not_been(folder, stop):
    whole = epochs(mix(folder, stop=stop), 3)
    rng = np.random.default_rng(3)
    for cut in rng.integers(1, len(whole), 8).tolist():
        first, got = mix(folder, stop=stop), []
        while len(got) < cut:
            got += taken(itertools.islice(iter(first), cut - len(got)))
        second = mix(folder, stop=stop)
        second.load_state_dict(first.state_dict())
        assert got + epochs(second, 4)[: len(whole) - cut] == whole


def test_ranks_take_the_same_source_at_the_same_step_and_share_its_samples(folder):
    ranks = [taken(mix(folder, (0.5, 0.3, 0.2), rank=rank, world_size=2)) for rank in range(2)]
    whole = taken(mix(folder, (0.5, 0.3, 0.2), sizes=[2 * size for size in SIZES]))
    assert len(ranks[0]) == len(ranks[1]) == len(whole)
    for (source, one), (other_source, other), (expected, samples) in zip(*ranks, whole, strict=True):
        assert source == other_source == expected and len(one) == len(other)
        assert one + other == samples[: 2 * len(one)]


def test_a_state_goes_on_with_other_ranks_at_the_same_global_batch(folder):
    arguments = dict(drop_last=True, stop="all_exhausted")
    first = mix(folder, sizes=(4, 4, 2), **arguments)
    before = taken(itertools.islice(iter(first), 11))
    ranks = [mix(folder, sizes=(2, 2, 1), rank=rank, world_size=2, **arguments) for rank in range(2)]
    for one in ranks:
        one.load_state_dict(first.state_dict())
    rest = [(i, a + b) for (i, a), (_, b) in zip(*map(taken, ranks), strict=True)]
    assert before + rest == taken(mix(folder, sizes=(4, 4, 2), **arguments))


def stretch(dataset, turns):
    """Return source, samples and turns so far of each batch, until so many turns are over."""
    got, over = [], 0
    while over < turns:
        for batch in dataset:
            state = dataset.state_dict()
            over = state["epoch"] * dataset._epoch_turns() + state["batches"]
            got += [(*taken([batch])[0], over)]
            if over >= turns:
                break
    return got


def of_ranks(folder, world_size, state, turns, weights, stop):
    """Return what a state goes on with, on so many ranks: their samples of each step together."""
    ranks = [
        Mix(
            sources(folder, sizes=(4 // world_size,) * 3, rank=rank, world_size=world_size),
            weights,
            stop,
            on_break="continue",
        )
        for rank in range(world_size)
    ]
    for one in ranks:
        one.load_state_dict(state)
    got = [stretch(one, turns) for one in ranks]
    states = [one.state_dict() for one in ranks]
    assert all(one["weights"] == state["weights"] for one in states)
    assert all(one["source_batches"] == state["source_batches"] for one in states)
    steps = [(step[0][0], sum((samples for _, samples, _ in step), [])) for step in zip(*got, strict=True)]
    return steps, states[0]


# The sources leave 2, 1 and 3 samples behind their steps of 4. So on two ranks the second one has
# a batch less than on one rank, and on four ranks all of them have.
@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", 7])
@pytest.mark.parametrize("weights", [None, (1, 2, 3)])
@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)])
def test_a_state_goes_on_with_ranks_for_which_the_last_step_is_too_short(folder, before, after, weights, stop):
    fresh = Mix(sources(folder, sizes=(4 // before,) * 3, rank=0, world_size=before), weights, stop)
    start, turns = fresh.state_dict(), 70
    whole, _ = of_ranks(folder, before, start, turns, weights, stop)
    cut = 9
    first, state = of_ranks(folder, before, start, cut, weights, stop)
    rest, last = of_ranks(folder, after, state, turns, weights, stop)
    expected = [
        (source, samples[: len(samples) // after * after])
        for source, samples in whole[len(first) :]
        if len(samples) >= after
    ]
    got = [(source, samples[: len(samples) // before * before]) for source, samples in rest]
    assert got == [(source, samples[: len(samples) // before * before]) for source, samples in expected]
    again, _ = of_ranks(folder, before, last, turns + 20, weights, stop)
    longer, _ = of_ranks(folder, before, start, turns + 20, weights, stop)
    assert again == longer[len(longer) - len(again) :] and len(again) >= 15


def test_an_epoch_is_as_long_as_it_says_if_steps_are_passed_over(folder):
    start = Mix(sources(folder, sizes=(4, 4, 4)), on_break="restart").state_dict()
    one = Mix(sources(folder, sizes=(1, 1, 1), rank=3, world_size=4))
    one.load_state_dict(start)
    lengths = []
    for epoch in range(6):
        assert one.state_dict()["epoch"] == epoch
        expected = len(one)
        lengths.append(len(list(one)))
        assert lengths[-1] == expected
    assert sum(start["source_batches"]) * 6 > sum(lengths) == 6 * (22 + 10 + 5) == 6 * sum(one._served)


def test_a_state_that_ends_with_steps_that_are_passed_over_begins_the_next_epoch(folder):
    first = Mix(sources(folder, sizes=(4, 4, 4)), on_break="restart")
    batches = iter(first)
    for _ in range(len(first) - 1):
        next(batches)
    whole = taken(Mix(sources(folder, sizes=(1, 1, 1), rank=0, world_size=4)))
    one = Mix(sources(folder, sizes=(1, 1, 1), rank=0, world_size=4))
    one.load_state_dict(first.state_dict())
    assert one.state_dict()["epoch"] == 1 and len(taken(one)) == len(whole) == 37


def of_workers(folder, state):
    one = Mix(sources(folder, sizes=(1, 1, 1), rank=1, world_size=4))
    one.load_state_dict(state)
    return taken(DataLoader(one, batch_size=None, num_workers=2)), len(one)


def test_a_dataloaders_workers_pass_over_the_same_steps(folder):
    start = Mix(sources(folder, sizes=(4, 4, 4))).state_dict()
    one = Mix(sources(folder, sizes=(1, 1, 1), rank=1, world_size=4))
    one.load_state_dict(start)
    got, length = in_new_process(of_workers, folder, start)
    assert sorted(got) == sorted(taken(one)) and len(got) == length == 37


def test_a_state_that_is_loaded_before_the_ranks_are_known_keeps_its_order(folder, monkeypatch):
    first = Mix(sources(folder, sizes=(4, 4, 4)))
    batches = iter(first)
    for _ in range(5):
        next(batches)
    known = Mix(sources(folder, sizes=(1, 1, 1), rank=2, world_size=4))
    late = Mix(sources(folder, sizes=(1, 1, 1)))
    for one in (known, late):
        one.load_state_dict(first.state_dict())
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert taken(late) == taken(known)


def test_numbers_of_batches_that_no_number_of_ranks_makes_are_refused(folder):
    state = Mix(sources(folder, sizes=(4, 4, 4))).state_dict()
    for wrong in ([21, 11, 6], [24, 11, 6], [True, 11, 6], [23, 11], None, "23"):
        with pytest.raises(ValueError, match="of another mix: (weights|source_batches) was"):
            Mix(sources(folder, sizes=(4, 4, 4))).load_state_dict({**state, "source_batches": wrong})
    with pytest.raises(ValueError, match=r"another mix: weights was .* is \[1.0, 1.0, 1.0\]. Make .* weights=\["):
        Mix(sources(folder, sizes=(4, 4, 4)), (1, 1, 1)).load_state_dict(state)
    with pytest.raises(ValueError, match="another mix: stop was 'first_exhausted' and is 5. Make .* stop='first"):
        Mix(sources(folder, sizes=(4, 4, 4)), stop=5).load_state_dict(state)


def test_a_state_of_another_mix_is_refused(folder):
    state = mix(folder).state_dict()
    with pytest.raises(ValueError, match="weights was"):
        mix(folder, (1, 1, 1)).load_state_dict(state)
    with pytest.raises(ValueError, match="stop was 'all_exhausted'"):
        mix(folder, stop=9).load_state_dict(state)
    other = mix(folder)
    other.sources[1]._samples._seed = 6
    with pytest.raises(ValueError, match="source 1: .* seed was 5 and is 6"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="of 2 sources"):
        mix(folder).load_state_dict({**state, "sources": state["sources"][:2]})
    with pytest.raises(ValueError, match="no state of a Mix"):
        mix(folder).load_state_dict({"version": 1})


def test_the_state_of_a_mix_and_of_its_source_are_distinguished(folder):
    blended = mix(folder)
    with pytest.raises(ValueError, match="the state is of a single GDSDataset, and this is a Mix"):
        blended.load_state_dict(blended.sources[0].state_dict())
    with pytest.raises(ValueError, match="the state is of a Mix, and this is a single GDSDataset"):
        blended.sources[0].load_state_dict(blended.state_dict())


# ------------------------------------------------------------------------------------------------------ DataLoader


def loaded(folder, workers, number):
    return epochs(DataLoader(mix(folder, stop=31), batch_size=None, num_workers=workers), number)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_gives_the_same_batches_in_the_same_order(folder, workers):
    assert in_new_process(loaded, folder, workers, 2) == epochs(mix(folder, stop=31), 2)


def cut_stateful(folder, workers, cut):
    loader = StatefulDataLoader(mix(folder, stop=31), batch_size=None, num_workers=workers)
    got = taken(itertools.islice(iter(loader), cut))
    return got, loader.state_dict()


def resumed_stateful(folder, workers, state):
    loader = StatefulDataLoader(mix(folder, stop=31), batch_size=None, num_workers=workers)
    loader.load_state_dict(state)
    return epochs(loader, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_with_the_next_batch(folder, workers):
    got, state = in_new_process(cut_stateful, folder, workers, 17)
    assert got + in_new_process(resumed_stateful, folder, workers, state) == epochs(mix(folder, stop=31), 2)


# ---------------------------------------------------------------------------------------------------- ends, errors


def test_breaking_off_ends_the_sources_readers(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(b"".join(record(bytes([i])) for i in range(50)))
    fields = [GDSDataset(tmp_path / "a.tfrecord", 2, TFRecord(), seed=i, device="cpu") for i in range(2)]
    before = reading_threads()
    for _ in range(10):
        batches = iter(Mix(fields, [1, 1]))
        next(batches), next(batches)
        batches.close()
    assert eventually(lambda: reading_threads() <= before)
    assert all(source._iteration.running is None for source in fields)


def test_a_sources_error_is_raised_and_the_mix_continues_once_it_is_mended(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    blended = mix(tmp_path, (2, 1, 1))
    whole = taken(mix(tmp_path, (2, 1, 1)))
    (tmp_path / "1.bin").write_bytes(b"")
    with pytest.raises(CorruptData, match=r"1\.bin"):
        list(blended)
    (tmp_path / "1.bin").write_bytes((folder / "1.bin").read_bytes())
    assert taken(blended) == whole


@pytest.mark.parametrize("weights", [(1, -1, 1), (0, 0, 0), (math.nan, 1, 1), (math.inf, 1, 1), (1, 1, 10**400)])
def test_weights_that_are_none_are_refused(folder, weights):
    with pytest.raises(ValueError, match="finite, at least 0, and not all 0"):
        mix(folder, weights)


def test_mistakes_are_errors_at_once(folder):
    some = sources(folder)
    with pytest.raises(ValueError, match="2 weights for 3 sources"):
        Mix(some, [1, 1])
    with pytest.raises(ValueError, match="no sources"):
        Mix([])
    with pytest.raises(ValueError, match="source 1 is a list"):
        Mix([some[0], [1]])
    with pytest.raises(ValueError, match="source 1 is of rank 1 of 2, and source 0 of rank 0 of 1"):
        Mix([some[0], *sources(folder, rank=1, world_size=2)])
    for stop in ("last", 0, -3, True, 2.5):
        with pytest.raises(ValueError, match="stop="):
            Mix(some, stop=stop)


@pytest.mark.parametrize(
    "weights, words",
    [
        ("abc", "weights='abc' must be a list of numbers, one for each source"),
        (3, "weights=3 must be a list of numbers, one for each source"),
        ({0: 1, 1: 1, 2: 1}, "weights={0: 1, 1: 1, 2: 1} must be a list of numbers, one for each source"),
        ((1, "2", 1), "weights[1]='2' must be a number"),
        ((1, 1, None), "weights[2]=None must be a number"),
    ],
)
def test_weights_of_another_type_are_refused_in_words(folder, weights, words):
    with pytest.raises(TypeError) as error:
        mix(folder, weights)
    assert str(error.value) == words


@pytest.mark.parametrize("given", [7, "x.npy", {"one": 1}, GDSDataset])
def test_sources_that_are_no_list_are_refused_in_words(folder, given):
    given = sources(folder)[0] if given is GDSDataset else given
    with pytest.raises(TypeError, match=r"^sources=.* must be a list of GDSDatasets, as in Mix\(\[one, two\]\)$"):
        Mix(given)


def test_sources_and_weights_may_be_generators(folder):
    of_generators = Mix(iter(sources(folder)), iter((5, 3, 2)))
    assert taken(of_generators) == taken(Mix(sources(folder), (5, 3, 2)))


def test_stats_count_batches_by_source(folder):
    blended = mix(folder, (2, 1, 1), stop=8)
    list(blended)
    stats = blended.stats()
    assert stats["batches"] == [4, 2, 2] == [one["batches"] for one in stats["sources"]]
    assert stats["stall_s"] == sum(one["stall_s"] for one in stats["sources"])


def test_sources_of_other_fields_come_as_they_are(folder, tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(20 * record(b"abc"))
    fields = GDSDataset(tmp_path / "a.tfrecord", 4, TFRecord(), device="cpu")
    kinds = [type(batch) for batch in Mix([sources(folder)[0], fields], [1, 1], stop=6)]
    assert kinds.count(dict) == 3 and kinds.count(torch.Tensor) == 3


@pytest.mark.parametrize("stop", [0, -1, 2**61 + 1, 2**63, 2.5, "never"])
def test_a_stop_that_is_none_is_refused(folder, stop):
    with pytest.raises(ValueError, match=f"stop={stop!r}: .*a number of batches"):
        mix(folder, (1, 1, 1), stop=stop)

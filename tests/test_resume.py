"""A state counts the batches that were handed out, and resumes with the next one anywhere."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from helpers import MIB, arrays, assert_same_batches, grouped, in_new_process, write_records
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from gdsdata import EngineOptions, GDSDataset, Mix
from gdsdata.formats import Records, Tokens

RECORDS = Records("u1", (64,))


@pytest.fixture
def folder(tmp_path) -> Path:
    """Write 103 records of 64 bytes: 13 batches of 8, the last one of 7."""
    write_records(tmp_path / "0.bin", 100, 64, 0)
    write_records(tmp_path / "1.bin", 3, 64, 1)
    return tmp_path


def read(folder: Path, **arguments) -> GDSDataset:
    return GDSDataset(folder, **grouped({"batch_size": 8, "format": RECORDS, "device": "cpu", **arguments}))


def epochs_of(dataset, count: int) -> list[np.ndarray]:
    return [batch for _ in range(count) for batch in arrays(dataset)]


def taken(iterable, count: int) -> list[np.ndarray]:
    """Take the first batches of an iterator, and drop the iterator."""
    batches = iter(iterable)
    return arrays(next(batches) for _ in range(count))


def epochs_from_state(folder: Path, arguments: dict, state: str, epochs: int) -> list[np.ndarray]:
    dataset = read(folder, **arguments)
    dataset.load_state_dict(json.loads(state))
    return epochs_of(dataset, epochs)


# ------------------------------------------------------------------------------------------------------ the state


def test_a_state_is_small_and_plain(folder):
    dataset = read(folder)
    states = [dataset.state_dict(), *(dataset.state_dict() for _ in dataset), dataset.state_dict()]
    for state in states:
        assert json.loads(json.dumps(state)) == state and len(json.dumps(state)) < 700
    assert len({json.dumps(state) for state in states[:-1]}) == 14 and states[-1]["epoch"] == 1


def test_a_state_counts_what_was_handed_out_and_not_what_was_read_ahead(folder):
    dataset = read(folder, prefetch=8)
    batches = iter(dataset)
    assert dataset.state_dict()["batches"] == 0
    for handed_out in range(1, 13):
        next(batches)
        assert dataset.state_dict()["batches"] == handed_out
    next(batches)
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["batches"]) == (1, 0)
    with pytest.raises(StopIteration):
        next(batches)
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["batches"]) == (1, 0)


def test_a_state_is_of_the_newest_iterator_whatever_older_ones_do(folder):
    dataset = read(folder)
    older = iter(dataset)
    for _ in range(5):
        next(older)
    newer = iter(dataset)
    next(newer)
    next(older)
    assert dataset.state_dict()["batches"] == 1
    for _ in older:
        pass
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["batches"]) == (0, 1)


@pytest.mark.parametrize("before", [2, 12])
def test_a_loaded_state_holds_if_an_older_iterator_goes_on(folder, before):
    """With 12 batches before, the older iterator even ends its epoch."""
    dataset = read(folder)
    taken(dataset, 5)
    state = dataset.state_dict()
    dataset = read(folder)
    older = iter(dataset)
    for _ in range(before):
        next(older)
    dataset.load_state_dict(state)
    next(older)
    assert dataset.state_dict() == state
    dataset.set_epoch(0)
    assert dataset.state_dict() == state
    assert_same_batches(arrays(dataset), epochs_of(read(folder), 1)[5:])


def test_set_epoch_twice_around_the_end_of_an_older_iterator(folder):
    dataset = read(folder)
    older = iter(dataset)
    dataset.set_epoch(3)
    assert len(list(older)) == 13
    dataset.set_epoch(3)
    assert dataset.state_dict()["epoch"] == 3


def test_set_epoch_of_an_iterator_that_has_just_begun_changes_nothing(folder):
    dataset = read(folder)
    batches = iter(dataset)
    dataset.set_epoch(0)
    next(batches)
    assert dataset.state_dict()["batches"] == 1
    assert_same_batches(arrays(dataset), epochs_of(read(folder), 1))


@pytest.mark.parametrize("kind", ["data set", "mix"])
def test_an_epoch_that_was_set_holds_if_an_older_iterator_goes_on(folder, kind):
    make = read if kind == "data set" else mixed
    dataset = make(folder)
    older = iter(dataset)
    next(older)
    dataset.set_epoch(5)
    for _ in older:
        pass
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["batches"]) == (5, 0)
    dataset = make(folder)
    older = iter(dataset)
    taken(older, 2)
    dataset.set_epoch(0)
    next(older)
    assert_same_batches(arrays(dataset), epochs_of(make(folder), 1))


def test_a_state_is_kept_when_the_loop_is_left(folder):
    dataset = read(folder)
    for done, _ in enumerate(dataset, 1):
        if done == 4:
            break
    assert dataset.state_dict()["batches"] == 4


def test_a_state_loaded_and_taken_again_is_the_same(folder):
    dataset = read(folder)
    taken(dataset, 5)
    state = dataset.state_dict()
    other = read(folder)
    other.load_state_dict(state)
    assert other.state_dict() == state
    iter(other)
    assert other.state_dict() == state


# ------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("seed", range(6))
def test_an_epoch_cut_anywhere_continues_in_a_new_process_with_the_next_batch(tmp_path, seed):
    choose = random.Random(seed)
    (tmp_path / "0.bin").write_bytes(np.random.default_rng(seed).bytes(2 * choose.randrange(30_000, MIB)))
    arguments = dict(
        format=Tokens("uint16", seq_len=choose.randrange(16, 100), stride=choose.choice([None, 40])),
        batch_size=choose.randrange(1, 200),
        shuffle=choose.random() < 0.8,
        seed=seed,
        drop_last=choose.random() < 0.5,
        prefetch=choose.randrange(1, 10),
    )
    dataset = read(tmp_path, **arguments)
    uninterrupted = epochs_of(read(tmp_path, **arguments), 2)
    cut = choose.randrange(len(dataset) + 1)
    before = taken(dataset, cut)
    arguments["prefetch"] = choose.randrange(1, 10)  # no part of the state
    epochs = 1 if cut == len(dataset) else 2  # after the last batch comes the next epoch
    after = in_new_process(epochs_from_state, tmp_path, arguments, json.dumps(dataset.state_dict()), epochs)
    assert_same_batches([*before, *after], uninterrupted)


@pytest.mark.parametrize("finished", [1, 2])
def test_a_state_of_a_finished_epoch_continues_with_the_next_epoch_in_a_new_process(folder, finished):
    dataset = read(folder)
    epochs_of(dataset, finished)
    after = in_new_process(epochs_from_state, folder, {}, json.dumps(dataset.state_dict()), 2)
    assert_same_batches(after, epochs_of(read(folder), finished + 2)[13 * finished :])


def test_an_epoch_may_be_cut_again_and_again(folder):
    dataset, got = read(folder), []
    for count in (1, 0, 4, 2, 5):
        got += taken(dataset, count)
        state = dataset.state_dict()
        dataset = read(folder)
        dataset.load_state_dict(state)
    assert_same_batches([*got, *arrays(dataset)], arrays(read(folder)))


def test_only_the_first_iterator_after_a_load_continues(folder):
    dataset = read(folder)
    taken(dataset, 5)
    other = read(folder)
    other.load_state_dict(dataset.state_dict())
    first, second = taken(other, 1), taken(other, 1)
    whole = arrays(read(folder))
    assert_same_batches([*first, *second], [whole[5], whole[0]])


def resumed(make, folder, *calls):
    """Resume epoch 2 after 5 batches. ``calls`` are "load" or set_epoch's epochs."""
    dataset, other = make(folder), make(folder)
    dataset.set_epoch(2)
    taken(dataset, 5)
    for call in calls:
        if call == "load":
            other.load_state_dict(dataset.state_dict())
        else:
            other.set_epoch(call)
    return other


def mixed(folder: Path) -> Mix:
    return Mix([read(folder, seed=1), read(folder, seed=2)], stop=13)


@pytest.mark.parametrize("make", [read, mixed], ids=lambda make: make.__name__)
@pytest.mark.parametrize("calls", [("load", 2), ("load", 2, 2), (2, "load"), (0, "load", 2)], ids=str)
def test_set_epoch_of_the_loaded_epoch_keeps_the_place(folder, make, calls):
    other, whole = resumed(make, folder, *calls), epochs_of(make(folder), 4)
    assert other.state_dict()["batches"] == 5
    assert_same_batches(arrays(other), whole[2 * 13 + 5 : 3 * 13])
    other.set_epoch(2)  # the loaded place was used once: this is the whole epoch again
    assert_same_batches(epochs_of(other, 2), whole[2 * 13 :])


@pytest.mark.parametrize("make", [read, mixed], ids=lambda make: make.__name__)
@pytest.mark.parametrize("calls", [("load", 3), ("load", 1), ("load", 3, 2)], ids=str)
def test_set_epoch_of_another_epoch_begins_at_its_beginning(folder, make, calls):
    other = resumed(make, folder, *calls)
    assert other.state_dict()["batches"] == 0
    assert_same_batches(arrays(other), epochs_of(make(folder), 4)[13 * calls[-1] : 13 * (calls[-1] + 1)])


def resume_stateful_loader_with_set_epoch(folder: Path, workers: int, state: dict) -> list[np.ndarray]:
    dataset = read(folder)
    loader = loader_of(dataset, workers, StatefulDataLoader)
    loader.load_state_dict(state)
    dataset.set_epoch(0)
    return arrays(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_before_a_resumed_stateful_loader_keeps_the_place(folder, workers):
    before, state = in_new_process(cut_stateful_loader, folder, workers, 5)
    after = in_new_process(resume_stateful_loader_with_set_epoch, folder, workers, state)
    assert_same_batches([*before, *after], arrays(read(folder)))


@pytest.mark.parametrize(("batch_size", "world_size"), [(4, 2), (2, 4), (8, 1), (1, 8)])
def test_another_world_size_continues_with_the_same_global_batches(folder, batch_size, world_size):
    dataset = read(folder, rank=1, world_size=2, batch_size=4)
    taken(dataset, 5)
    state = dataset.state_dict()
    ranks = [read(folder, rank=rank, world_size=world_size, batch_size=batch_size) for rank in range(world_size)]
    for rank in ranks:
        rank.load_state_dict(state)
    steps = [np.concatenate(shares) for shares in zip(*map(arrays, ranks), strict=True)]
    whole = arrays(read(folder))
    # In the last, partial step each rank has an equal share, so the number of ranks decides how
    # many samples are left out.
    assert_same_batches(steps[:7], whole[5:12])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(batch_size=7), "batch_size * world_size was 8 and is 7"),
        (dict(rank=0, world_size=2), "batch_size * world_size was 8 and is 16"),
        (dict(seed=1), "seed was 0 and is 1"),
        (dict(shuffle=False), "shuffle was True and is False"),
        (dict(drop_last=True), "drop_last was False and is True"),
        (dict(format=Records("u1", (32,))), "samples was 103 and is 206"),
    ],
    ids=str,
)
def test_a_state_of_another_order_is_refused_in_words(folder, change, words):
    other = read(folder, **change)
    untouched = other.state_dict()
    with pytest.raises(ValueError) as error:
        other.load_state_dict(read(folder).state_dict())
    assert "the state is of another data set or order, and cannot be resumed here: " in str(error.value)
    assert words in str(error.value) and other.state_dict() == untouched


def test_a_state_of_another_version_is_refused_in_words(folder):
    for state in ({}, {**read(folder).state_dict(), "version": 2}):
        with pytest.raises(ValueError, match="no state of a GDSDataset that this version knows"):
            read(folder).load_state_dict(state)


@pytest.mark.parametrize("kind", ["data set", "mix"])
@pytest.mark.parametrize("name", ["epoch", "batches", "workers"])
def test_a_state_whose_numbers_cannot_be_is_refused_in_words(folder, kind, name):
    dataset = read(folder) if kind == "data set" else mixed(folder)
    state = dataset.state_dict()
    for value in (-1, "1", 1.5, None, True, 2**63):
        with pytest.raises(ValueError, match=rf"the state's '{name}' is {value!r}, and should be a whole number"):
            dataset.load_state_dict({**state, name: value})
    del state[name]
    with pytest.raises(ValueError, match=rf"the state's '{name}' is missing"):
        dataset.load_state_dict(state)
    assert dataset.state_dict()[name] == 0


# ----------------------------------------------------------------------------------------------- torch's DataLoader

# Worker processes are forked from new processes, because pytest's has threads.


def loader_of(dataset: GDSDataset, workers: int, kind: type[DataLoader] = DataLoader, **arguments) -> DataLoader:
    method = "fork" if workers else None
    return kind(dataset, batch_size=None, num_workers=workers, multiprocessing_context=method, **arguments)


def epochs_of_a_loader(folder: Path, workers: int, epochs: int, set_epoch: bool, persistent: bool) -> list[np.ndarray]:
    dataset = read(folder)
    arrays(read(folder))  # the workers inherit an engine that was used
    loader = loader_of(dataset, workers, persistent_workers=persistent)
    got = []
    for epoch in range(epochs):
        if set_epoch:
            dataset.set_epoch(epoch)
        got += arrays(loader)
    assert len(loader) == len(dataset)
    return got


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_a_data_loader_gives_the_same_batches_in_the_same_order(folder, workers):
    got = in_new_process(epochs_of_a_loader, folder, workers, 1, False, False)
    assert_same_batches(got, arrays(read(folder)))


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_reaches_the_workers_of_a_data_loader(folder, workers):
    got = in_new_process(epochs_of_a_loader, folder, workers, 3, True, False)
    assert_same_batches(got, epochs_of(read(folder), 3))


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True), (2, False)])
def test_each_epoch_of_a_data_loader_is_a_new_order(folder, workers, persistent):
    got = in_new_process(epochs_of_a_loader, folder, workers, 3, False, persistent)
    assert_same_batches(got, epochs_of(read(folder), 3))


def more_workers_than_batches(folder: Path) -> list[np.ndarray]:
    return arrays(loader_of(read(folder, batch_size=60), 4))


def test_more_workers_than_batches_do_no_harm(folder):
    assert_same_batches(in_new_process(more_workers_than_batches, folder), arrays(read(folder, batch_size=60)))


def test_a_spawned_worker_gives_the_same_batches(folder):
    loader = DataLoader(read(folder), batch_size=None, num_workers=1, multiprocessing_context="forkserver")
    assert_same_batches(arrays(loader), arrays(read(folder)))


def error_of_a_state_without_workers_in_workers(folder: Path) -> str:
    dataset = read(folder)
    taken(dataset, 3)
    other = read(folder)
    other.load_state_dict(dataset.state_dict())
    try:
        arrays(loader_of(other, 2))
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_state_of_another_number_of_workers_is_refused_in_words(folder):
    message = in_new_process(error_of_a_state_without_workers_in_workers, folder)
    assert "the state was taken with num_workers=0 and cannot be resumed with 2" in message
    assert "because each worker counts its own batches" in message


def error_of_cuda_in_workers(folder: Path) -> str:
    try:
        arrays(loader_of(read(folder, device="cuda"), 1))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.gpu
def test_workers_refuse_cuda_and_say_what_to_do(folder):
    message = in_new_process(error_of_cuda_in_workers, folder)
    assert "device=cuda:0 does not work in a DataLoader's worker processes: use num_workers=0" in message


# ---------------------------------------------------------------------------------- torchdata's StatefulDataLoader


def cut_stateful_loader(folder: Path, workers: int, cut: int) -> tuple[list[np.ndarray], dict]:
    """Return the batches up to ``cut`` (of 13; beyond them: the epoch's end), and the state."""
    loader = loader_of(read(folder), workers, StatefulDataLoader)
    got = []
    for batch in loader:
        got.append(batch.numpy().copy())
        if len(got) == cut:
            break
    return got, loader.state_dict()


def resume_stateful_loader(folder: Path, workers: int, state: dict, epochs: int) -> list[np.ndarray]:
    loader = loader_of(read(folder), workers, StatefulDataLoader)
    loader.load_state_dict(state)
    return epochs_of(loader, epochs)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cut", [1, 6, 12])
def test_a_stateful_loader_cut_mid_epoch_continues_with_the_next_batch(folder, workers, cut):
    before, state = in_new_process(cut_stateful_loader, folder, workers, cut)
    after = in_new_process(resume_stateful_loader, folder, workers, state, 1)
    assert_same_batches([*before, *after], arrays(read(folder)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_resumed_mid_epoch_goes_on_to_the_next_epoch(folder, workers):
    before, state = in_new_process(cut_stateful_loader, folder, workers, 5)
    after = in_new_process(resume_stateful_loader, folder, workers, state, 2)
    assert_same_batches([*before, *after], epochs_of(read(folder), 2))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_whose_epoch_ended_continues_with_the_next_epoch(folder, workers):
    before, state = in_new_process(cut_stateful_loader, folder, workers, 14)  # never broken off
    after = in_new_process(resume_stateful_loader, folder, workers, state, 1)
    assert_same_batches([*before, *after], epochs_of(read(folder), 2))


def test_faults_on_the_way_change_nothing_for_a_resumed_run(folder):
    shaky = EngineOptions(direct="never", faults="seed=5,shorten=0.5,interrupt=0.3,late=0.3,late_ms=2,reorder=0.5")
    dataset = read(folder, options=shaky)
    before = taken(dataset, 6)
    other = read(folder, options=shaky)
    other.load_state_dict(dataset.state_dict())
    assert_same_batches([*before, *arrays(other)], arrays(read(folder)))

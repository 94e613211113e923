"""An epoch ends after its last batch, in any kind of loop, and the next one has another order."""

import functools
import itertools
import json
import os
import resource
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import arrays, assert_same_batches, grouped, in_new_process, write_records
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from gdsdata import GDSDataset, Mix
from gdsdata.data.epoch_dataset import EpochDataset
from gdsdata.data.progress import Progress
from gdsdata.formats import Records

BATCHES = 13


def read(folder: Path, **arguments) -> GDSDataset:
    """Make a data set of 103 records: 13 batches of 8, the last one of 7."""
    if not (folder / "0.bin").exists():
        write_records(folder / "0.bin", 103, 64)
    return GDSDataset(
        folder / "0.bin", **grouped({"batch_size": 8, "format": Records("u1", (64,)), "device": "cpu", **arguments})
    )


def mixed(folder: Path) -> Mix:
    return Mix([read(folder, seed=1), read(folder, seed=2)], stop=BATCHES)


# ------------------------------------------------------------------------------- loops that take exactly len() batches


def by_for(batches):
    return [batch.numpy().copy() for batch in batches]


def by_zip(batches):
    return [batch.numpy().copy() for _, batch in zip(range(len(batches)), batches, strict=False)]


def by_islice(batches):
    return [batch.numpy().copy() for batch in itertools.islice(batches, len(batches))]


def by_next(batches):
    taken = iter(batches)
    return [next(taken).numpy().copy() for _ in range(len(batches))]


LOOPS = [by_for, by_zip, by_islice, by_next]


def epochs_by(loop, make, folder: Path, count: int) -> list[np.ndarray]:
    batches = make(folder)
    return [batch for _ in range(count) for batch in loop(batches)]


def loader(folder: Path, workers: int = 0, kind=DataLoader, dataset=read, **arguments):
    method = "fork" if workers else None
    return kind(dataset(folder), batch_size=None, num_workers=workers, multiprocessing_context=method, **arguments)


def loader_with_workers(folder: Path):
    return loader(folder, 2)


def loader_with_persistent_workers(folder: Path):
    return loader(folder, 2, persistent_workers=True)


def loader_with_more_workers_than_batches(folder: Path):
    return loader(folder, BATCHES + 2)


def stateful_loader(folder: Path):
    return loader(folder, 0, StatefulDataLoader)


def stateful_loader_with_workers(folder: Path):
    return loader(folder, 2, StatefulDataLoader)


def loader_of_a_mix(folder: Path):
    return loader(folder, 2, dataset=mixed)


IN_ONE_PROCESS = [read, mixed, loader, stateful_loader]
IN_WORKERS = [
    loader_with_workers,
    loader_with_persistent_workers,
    loader_with_more_workers_than_batches,
    stateful_loader_with_workers,
    loader_of_a_mix,
]


def name_of(function):
    return function.__name__


@pytest.mark.parametrize("loop", LOOPS, ids=name_of)
@pytest.mark.parametrize("make", IN_ONE_PROCESS, ids=name_of)
def test_three_epochs_are_the_same_however_a_loop_ends(tmp_path, make, loop):
    expected = epochs_by(by_for, mixed if make is mixed else read, tmp_path, 3)
    assert expected[0].tobytes() != expected[BATCHES].tobytes() != expected[2 * BATCHES].tobytes()
    assert_same_batches(epochs_by(loop, make, tmp_path, 3), expected)


@pytest.mark.parametrize("make", IN_WORKERS, ids=name_of)
def test_three_epochs_of_workers_are_the_same_in_a_loop_of_exactly_len_batches(tmp_path, make):
    expected = epochs_by(by_for, mixed if make is loader_of_a_mix else read, tmp_path, 3)
    assert_same_batches(in_new_process(epochs_by, by_zip, make, tmp_path, 3), expected)


@pytest.mark.parametrize("loop", LOOPS, ids=name_of)
def test_an_epoch_of_a_single_batch_ends_behind_it(tmp_path, loop):
    dataset = read(tmp_path, batch_size=103)
    got = [batch for _ in range(3) for batch in loop(dataset)]
    assert len(got) == 3 and len({batch.tobytes() for batch in got}) == 3
    assert dataset.state_dict()["epoch"] == 3


# -------------------------------------------------------------------------------------------- what the last batch sees


@pytest.mark.parametrize("make", [read, mixed], ids=name_of)
def test_while_the_last_batch_is_trained_on_the_state_is_the_next_epochs(tmp_path, make):
    dataset = make(tmp_path)
    states = [dataset.state_dict() for _ in dataset]
    assert [(state["epoch"], state["batches"]) for state in states] == [*((0, i) for i in range(1, BATCHES)), (1, 0)]


@pytest.mark.parametrize("make", [read, mixed], ids=name_of)
def test_a_state_behind_the_last_batch_goes_on_with_the_whole_next_epoch(tmp_path, make):
    dataset, other = make(tmp_path), make(tmp_path)
    by_next(dataset)
    other.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert_same_batches(by_for(other), epochs_by(by_for, make, tmp_path, 2)[BATCHES:])


@pytest.mark.parametrize("make", [read, mixed], ids=name_of)
def test_a_state_that_counts_all_batches_of_an_epoch_means_the_next_one(tmp_path, make):
    """Older versions wrote such states after the last batch."""
    dataset = make(tmp_path)
    dataset.load_state_dict({**make(tmp_path).state_dict(), "batches": BATCHES})
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["batches"]) == (1, 0)
    assert_same_batches(by_for(dataset), epochs_by(by_for, make, tmp_path, 2)[BATCHES:])


@pytest.mark.parametrize("make", [read, mixed], ids=name_of)
def test_an_epoch_resumed_in_the_middle_ends_behind_its_last_batch(tmp_path, make):
    dataset, resumed = make(tmp_path), make(tmp_path)
    batches = iter(dataset)
    before = arrays(next(batches) for _ in range(6))
    resumed.load_state_dict(dataset.state_dict())
    batches = iter(resumed)
    rest = arrays(next(batches) for _ in range(BATCHES - 6))
    assert_same_batches([*before, *rest, *by_next(resumed)], epochs_by(by_for, make, tmp_path, 2))


def test_the_last_batch_outlives_the_reading_that_ends_with_it(tmp_path):
    dataset = read(tmp_path)
    batches = iter(dataset)
    for _ in range(BATCHES):
        last = next(batches)
    assert dataset._iteration.running is None  # closed, although no further batch was asked for
    expected = epochs_by(by_for, read, tmp_path, 1)[-1]
    by_for(dataset)  # reuses the memory that it released
    assert_same_batches([last], [expected])
    assert dataset.stats()["batches"] == 2 * BATCHES
    with pytest.raises(StopIteration):
        next(batches)


def test_the_report_of_an_epoch_comes_with_its_last_batch(tmp_path, capfd):
    by_next(read(tmp_path, report_every_s=3600))
    assert capfd.readouterr().err.count("gdsdata: 13 steps") == 1
    by_for(read(tmp_path, report_every_s=3600))
    assert capfd.readouterr().err.count("gdsdata: 13 steps") == 1


# ------------------------------------------------------------------------------------------------- epochs broken off


def first_batches(batches, count: int) -> list[np.ndarray]:
    return [batch.numpy().copy() for batch in itertools.islice(batches, count)]


@pytest.mark.parametrize("make", [read, mixed], ids=name_of)
def test_an_epoch_broken_off_starts_again_and_warns_once(tmp_path, make):
    dataset = make(tmp_path)
    first = first_batches(dataset, 4)
    with pytest.warns(UserWarning, match="epoch 0 was broken off after 4 of 13 batches and starts again") as warned:
        again = first_batches(dataset, 4)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert 'on_break="continue"' in str(warned[0].message) and 'on_break="restart"' in str(warned[0].message)
    assert_same_batches(again, first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_batches(first_batches(dataset, 4), first)


def whole_epochs(dataset):
    by_for(dataset), by_next(dataset), iter(dataset), iter(dataset)


def resumed_on_purpose(dataset):
    first_batches(dataset, 3)
    dataset.load_state_dict(dataset.state_dict())
    first_batches(dataset, 3)
    dataset.set_epoch(0)
    iter(dataset)


@pytest.mark.parametrize("loop", [whole_epochs, resumed_on_purpose], ids=name_of)
@pytest.mark.parametrize("make", [read, mixed], ids=name_of)
def test_no_warning_if_no_batch_comes_again_by_accident(tmp_path, make, loop):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop(make(tmp_path))


def read_on(folder: Path, on_break: str | None = "continue") -> GDSDataset:
    return read(folder, on_break=on_break)


def mixed_on(folder: Path, on_break: str | None = "continue") -> Mix:
    return Mix([read(folder, seed=1), read(folder, seed=2)], stop=BATCHES, on_break=on_break)


def loader_on(folder: Path) -> DataLoader:
    return loader(folder, dataset=read_on)


@pytest.mark.parametrize(("make", "whole"), [(read_on, read), (mixed_on, mixed), (loader_on, read)])
def test_an_epoch_broken_off_continues_if_asked_to(tmp_path, make, whole):
    dataset = make(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = [batch for _ in range(9) for batch in first_batches(dataset, 3)]
    # 13 batches are four loops of 3 and one of 1: an iterator never gives batches of two epochs.
    assert_same_batches(got, epochs_by(by_for, whole, tmp_path, 2)[: len(got)])
    assert len(got) == 13 + 4 * 3


@pytest.mark.parametrize(("make", "whole"), [(read_on, read), (mixed_on, mixed)])
def test_a_state_of_an_epoch_that_continues_is_where_it_continues(tmp_path, make, whole):
    dataset, other = make(tmp_path), make(tmp_path)
    got = first_batches(dataset, 3) + first_batches(dataset, 3)
    dataset.set_epoch(0)  # frameworks call it before each loop
    other.load_state_dict(dataset.state_dict())
    expected = epochs_by(by_for, whole, tmp_path, 1)
    assert_same_batches([*got, *by_for(dataset)], expected)
    assert_same_batches([*got, *by_for(other)], expected)
    dataset.set_epoch(0)
    assert_same_batches(by_for(dataset), expected)


@pytest.mark.parametrize("make", [read_on, mixed_on], ids=name_of)
def test_a_broken_off_epoch_may_be_asked_to_start_again_in_silence(tmp_path, make):
    dataset = make(tmp_path, "restart")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_batches(first_batches(dataset, 3), first_batches(dataset, 3))


@pytest.mark.parametrize("make", [read_on, mixed_on], ids=name_of)
def test_another_on_break_is_refused(tmp_path, make):
    with pytest.raises(ValueError, match="on_break='resume' must be None, 'restart' or 'continue'"):
        make(tmp_path, "resume")


# ----------------------------------------------------------------------------------------------------- in workers


def error_of(function) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def states_beside_workers(folder: Path, make) -> list[Any]:
    dataset = make(folder)
    batches = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
    said = [dataset.state_dict()["batches"]]
    for _ in batches:
        said.append(error_of(dataset.state_dict))
        break
    by_for(batches)
    said.append(error_of(dataset.state_dict))  # even here: workers read the last batches ahead of the loop
    dataset.set_epoch(2)
    said.append(dataset.state_dict()["epoch"])
    first_batches(DataLoader(dataset, batch_size=None), 4)
    said.append(dataset.state_dict()["batches"])
    return said


@pytest.mark.parametrize("make", [read, mixed], ids=name_of)
def test_a_state_that_only_workers_know_is_refused_in_words(tmp_path, make):
    before, amid, behind, epoch, batches = in_new_process(states_beside_workers, tmp_path, make)
    assert (before, epoch, batches) == (0, 2, 4)
    for said in (amid, behind):
        assert said.startswith("RuntimeError: ") and "worker processes" in said
        assert all(remedy in said for remedy in ("StatefulDataLoader", "num_workers=0", "set_epoch"))


def state_of_a_stateful_loader(folder: Path) -> int:
    batches = loader(folder, 2, StatefulDataLoader)
    first_batches(batches, 5)
    return batches.state_dict()["_snapshot"]["_snapshot_step"]


def test_the_state_that_is_advised_can_be_had(tmp_path):
    assert in_new_process(state_of_a_stateful_loader, tmp_path) == 5


def epochs_after_a_move(folder: Path, persistent: bool, move) -> list[list[np.ndarray]]:
    """Return two epochs behind `move(dataset)`, which comes while a worker reads ahead."""
    gate = folder / "gate"

    def wait(batch):
        while not gate.exists():
            time.sleep(0.01)
        return batch

    def gated(folder):
        return read(folder, transform=wait)

    batches = loader(folder, 1, dataset=gated, persistent_workers=persistent, prefetch_factor=2 * BATCHES)
    iterator = iter(batches)  # the worker is given the whole epoch to read
    time.sleep(0.2)  # it begins
    move(batches.dataset)
    gate.touch()
    if persistent:
        time.sleep(0.3)  # it ends the epoch that it has begun
    del iterator
    return [by_for(batches) for _ in range(2)]


def epochs_after_set_epoch(folder: Path, persistent: bool):
    return epochs_after_a_move(folder, persistent, lambda dataset: dataset.set_epoch(5))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_read_ahead_do_not_undo_set_epoch(tmp_path, persistent):
    first, second = in_new_process(epochs_after_set_epoch, tmp_path, persistent)
    dataset = read(tmp_path)
    for epoch, found in ((5, first), (6, second)):
        dataset.set_epoch(epoch)
        assert_same_batches(found, by_for(dataset))


def epochs_around_set_epoch(folder: Path, method: str) -> list[list[np.ndarray]]:
    """Return an epoch in which set_epoch(5) comes before a worker begins, and two more."""
    gate = folder / "gate"
    late = functools.partial(wait_in_second_worker, gate)
    batches = DataLoader(
        read(folder), batch_size=None, num_workers=2, multiprocessing_context=method, worker_init_fn=late
    )
    iterator = iter(batches)
    first = next(iterator).numpy().copy()
    batches.dataset.set_epoch(5)
    gate.touch()
    return [[first, *by_for(iterator)], by_for(batches), by_for(batches)]


def wait_in_second_worker(gate: Path, worker: int) -> None:
    while worker == 1 and not gate.exists():
        time.sleep(0.01)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_begins_behind_set_epoch_reads_the_epoch_of_its_iterator(tmp_path, method):
    dataset = read(tmp_path)
    for epoch, found in zip((0, 5, 6), in_new_process(epochs_around_set_epoch, tmp_path, method), strict=True):
        dataset.set_epoch(epoch)
        assert_same_batches(found, by_for(dataset))


def epochs_made_without_shared_memory(folder: Path) -> list[list[np.ndarray]]:
    """Return an epoch of this process, then two of workers that it forks."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # no object in /dev/shm may be larger
    try:
        with pytest.raises(RuntimeError):
            torch.zeros(4097, dtype=torch.uint8).share_memory_()
        dataset = read(folder)
        first = by_for(dataset)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    batches = loader(folder, 2, dataset=lambda _: dataset)
    return [first, by_for(batches), by_for(batches)]


def test_epochs_go_on_in_workers_if_there_was_no_place_in_dev_shm(tmp_path):
    write_records(tmp_path / "0.bin", 103, 64)
    found = in_new_process(epochs_made_without_shared_memory, tmp_path)
    dataset = read(tmp_path)
    for batches in found:
        assert_same_batches(batches, by_for(dataset))


class LateInSecondWorker(GDSDataset):
    """In the second worker, its second iterator waits for the file `gate` beside the data."""

    def __iter__(self):
        worker, gate = get_worker_info(), Path(self._samples.paths[0]).with_name("gate")
        self.begun = getattr(self, "begun", 0) + 1
        while worker is not None and worker.id == 1 and self.begun == 2 and not gate.exists():
            time.sleep(0.01)
        return super().__iter__()


def read_late(folder: Path, **arguments) -> GDSDataset:
    """Make a data set of the file that `read` has written."""
    return LateInSecondWorker(folder / "0.bin", format=Records("u1", (64,)), device="cpu", **arguments)


def wait_until(is_so) -> None:
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def epochs_if_a_worker_ends_its_share_first(folder: Path) -> list[list[np.ndarray]]:
    """Return two epochs of three batches, after a loop in which only worker 1 ended its share."""
    make = functools.partial(read_late, batch_size=40, on_break="restart")
    batches = loader(folder, 2, dataset=make, persistent_workers=True, prefetch_factor=1)
    iter(batches)  # each worker reads one batch, which is all that worker 1 has
    iterator = iter(batches)
    first = next(iterator).numpy().copy()  # worker 0 is asked for its second and last batch
    wait_until(lambda: batches.dataset._progress._rows()[0, 0] == 1)
    (folder / "gate").touch()
    return [[first, *by_for(iterator)], by_for(batches)]


def test_persistent_workers_read_one_epoch_if_one_ends_its_share_before_another_begins(tmp_path):
    dataset = read(tmp_path, batch_size=40)
    for found in in_new_process(epochs_if_a_worker_ends_its_share_first, tmp_path):
        assert_same_batches(found, by_for(dataset))


def epochs_if_set_epoch_comes_between_workers(folder: Path) -> list[list[np.ndarray]]:
    """Return the second epoch, in which set_epoch(5) comes before worker 1 begins, and two more."""
    make = functools.partial(read_late, batch_size=8)
    batches = loader(folder, 2, dataset=make, persistent_workers=True)
    by_for(batches)
    iterator = iter(batches)
    first = next(iterator).numpy().copy()
    batches.dataset.set_epoch(5)
    (folder / "gate").touch()
    return [[first, *by_for(iterator)], by_for(batches), by_for(batches)]


def test_persistent_workers_read_one_epoch_if_set_epoch_comes_between_them(tmp_path):
    dataset = read(tmp_path)
    epochs = in_new_process(epochs_if_set_epoch_comes_between_workers, tmp_path)
    for epoch, found in zip((1, 5, 6), epochs, strict=True):
        dataset.set_epoch(epoch)
        assert_same_batches(found, by_for(dataset))


def persistent_workers_after_a_load(folder: Path, make, state: dict) -> tuple[str, list[np.ndarray]]:
    batches = loader(folder, 2, dataset=make, persistent_workers=True)
    by_for(batches)
    batches.dataset.load_state_dict(state)
    said = error_of(lambda: by_for(batches))
    batches.dataset.set_epoch(1)
    return said, by_for(batches)


@pytest.mark.parametrize("make", [read, mixed], ids=name_of)
def test_persistent_workers_refuse_a_place_that_was_loaded_behind_their_start(tmp_path, make):
    dataset = make(tmp_path)
    first_batches(dataset, 5)
    said, found = in_new_process(persistent_workers_after_a_load, tmp_path, make, dataset.state_dict())
    assert said.startswith("ValueError: ") and "make the DataLoader again after load_state_dict()" in said
    assert_same_batches(found, epochs_by(by_for, make, tmp_path, 2)[BATCHES:])


def error_with_another_number_of_workers(folder: Path) -> str:
    batches, fewer = (loader(folder, workers, StatefulDataLoader) for workers in (2, 1))
    first_batches(batches, 3)
    fewer.load_state_dict(batches.state_dict())
    return error_of(lambda: by_for(fewer))


def test_a_stateful_loader_with_another_number_of_workers_is_refused_in_words(tmp_path):
    said = in_new_process(error_with_another_number_of_workers, tmp_path)
    assert "the state was taken with num_workers=2 and cannot be resumed with 1" in said


class Endless(IterableDataset):
    def __init__(self, dataset: GDSDataset) -> None:
        self.dataset = dataset

    def __iter__(self):
        while True:
            yield from self.dataset


def endless_batches(folder: Path) -> list[np.ndarray]:
    """Return eight batches of epochs of three, if worker 1 reads four before worker 0 reads one."""
    gate, calls = folder / "gate", itertools.count(1)

    def late_in_first_worker(batch):
        while get_worker_info().id == 0 and not gate.exists():
            time.sleep(0.01)
        if get_worker_info().id == 1 and next(calls) == 4:
            gate.touch()
        return batch

    dataset = Endless(read(folder, batch_size=40, transform=late_in_first_worker))
    return first_batches(loader(folder, 2, dataset=lambda _: dataset, prefetch_factor=4), 8)


def test_a_wrapper_without_end_has_each_worker_read_its_share_of_epoch_after_epoch(tmp_path):
    found = in_new_process(endless_batches, tmp_path)
    expected = epochs_by(by_for, lambda folder: read(folder, batch_size=40), tmp_path, 4)
    assert_same_batches(found[::2], [expected[i] for i in (0, 2, 3, 5)])
    assert_same_batches(found[1::2], [expected[i] for i in (1, 4, 7, 10)])


def error_of_continuing_in_workers(folder: Path) -> str:
    return error_of(lambda: by_for(loader(folder, 2, dataset=read_on)))


def test_workers_refuse_to_continue_a_broken_off_epoch(tmp_path):
    said = in_new_process(error_of_continuing_in_workers, tmp_path)
    assert 'on_break="continue" does not work in a DataLoader\'s worker processes' in said and "num_workers=0" in said


def warnings_of_workers(folder: Path, persistent: bool) -> list[str]:
    """Return the workers' warnings on stderr from three loops that each stop after a batch."""
    with open(folder / "stderr", "w") as file:
        os.dup2(file.fileno(), 2)
        batches = loader(folder, 2, persistent_workers=persistent, prefetch_factor=1)
        for _ in range(3):
            first_batches(batches, 1)
        del batches
    return [line for line in (folder / "stderr").read_text().splitlines() if "broken off" in line]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_warn_once_of_an_epoch_broken_off(tmp_path, persistent):
    (said,) = in_new_process(warnings_of_workers, tmp_path, persistent)
    assert "UserWarning" in said and "starts again" in said


def test_workers_begin_the_same_epoch_if_only_one_of_them_had_ended_its_share(monkeypatch):
    """Worker 1 of 2 had handed out its whole share when the loop was broken off, worker 0 not."""
    progress, shares = Progress(), (7, 6)

    def epochs_begun(*taken: int) -> list[int]:
        """Begin an epoch in both workers, and let each hand out so many batches."""
        begun = []
        for worker in range(2):
            info = SimpleNamespace(id=worker, num_workers=2, seed=worker)
            monkeypatch.setattr("gdsdata.data.progress.get_worker_info", lambda info=info: info)
            begun.append((info, progress.begin(BATCHES, 8)))
            assert len(begun[-1][1].numbers) == shares[worker]
        for (info, iterator), given in zip(begun, taken, strict=True):
            monkeypatch.setattr("gdsdata.data.progress.get_worker_info", lambda info=info: info)
            progress._newest = iterator  # a process has one worker
            progress.handed_out(iterator, given)
        return [iterator.epoch for _, iterator in begun]

    assert epochs_begun(6, 6) == [0, 0]
    assert epochs_begun(7, 5) == [0, 0]  # the other way round
    assert epochs_begun(7, 6) == [0, 0]
    assert epochs_begun(7, 6) == [1, 1]


def cut_stateful_loader(folder: Path, workers: int) -> tuple[list[np.ndarray], dict]:
    batches = loader(folder, workers, StatefulDataLoader)
    return by_next(batches), batches.state_dict()


def two_epochs_from(folder: Path, workers: int, state: dict) -> tuple[list[np.ndarray], list[np.ndarray]]:
    batches = loader(folder, workers, StatefulDataLoader)
    batches.load_state_dict(state)
    return by_for(batches), by_for(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_cut_behind_the_last_batch_goes_on_with_the_next_epoch(tmp_path, workers):
    _, state = in_new_process(cut_stateful_loader, tmp_path, workers)
    first, second = in_new_process(two_epochs_from, tmp_path, workers, state)
    assert_same_batches([*first, *second], epochs_by(by_for, read, tmp_path, 3)[BATCHES:])


def test_a_stateful_loader_with_workers_cut_behind_the_last_batch_ends_its_epoch_first(tmp_path):
    """A worker cannot know whether the others have batches left: it resumes with an empty rest."""
    _, state = in_new_process(cut_stateful_loader, tmp_path, 2)
    first, second = in_new_process(two_epochs_from, tmp_path, 2, state)
    assert not first
    assert_same_batches(second, epochs_by(by_for, read, tmp_path, 2)[BATCHES:])


def test_a_data_set_without_the_methods_of_an_epoch_cannot_be_made():
    class Incomplete(EpochDataset):
        def __len__(self) -> int:
            return 1

    with pytest.raises(TypeError, match="abstract methods _batches_of, _step_samples"):
        Incomplete()

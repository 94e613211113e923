"""``shuffle``, ``uneven``, ``device_mesh``: the same global batches on any ranks, cut anywhere."""

import json
import os
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from helpers import (
    MIB,
    arrays,
    assert_same_batches,
    drop_cache,
    eventually,
    exit_code_of_fork,
    grouped,
    random_bytes,
    served_by,
    warm_cache,
    write_records,
)

from gdsdata import EngineOptions, GDSDataset, Lanes, Reading
from gdsdata.data.batches import pieces
from gdsdata.data.batches.piece_memory import SpareMemory
from gdsdata.data.batches.pieces import OpenPieces
from gdsdata.data.order import measured
from gdsdata.errors import CorruptData, StallError
from gdsdata.formats import Npy, Records, Safetensors, Tokens

RECORDS = Records("u1", (64,))
SHAPE = Lanes(8, 4, 5)  # pieces of five samples, so that even small data has many windows


@pytest.fixture
def folder(tmp_path) -> Path:
    """Write 1003 records of 64 bytes in three files: 62 batches of 16, and 11 samples."""
    for number, count in enumerate((400, 3, 600)):
        write_records(tmp_path / f"{number}.bin", count, 64, number)
    return tmp_path


def read(folder: Path, **arguments) -> GDSDataset:
    return GDSDataset(
        folder, **grouped({"batch_size": 16, "format": RECORDS, "device": "cpu", "shuffle": SHAPE, **arguments})
    )


def steps_of(folder: Path, world_size: int, state: str | None = None, **arguments) -> list[np.ndarray]:
    """Return the global batches of 16 samples that these ranks read, for the rest of an epoch."""
    shares = []
    for rank in range(world_size):
        dataset = read(folder, batch_size=16 // world_size, rank=rank, world_size=world_size, **arguments)
        if state is not None:
            dataset.load_state_dict(json.loads(state))
        shares.append(arrays(dataset))
    return [np.concatenate(step) for step in zip(*shares, strict=True)]


def rows(batches) -> list[bytes]:
    return sorted(row.tobytes() for batch in batches for row in batch)


def stored(folder: Path) -> list[bytes]:
    return rows([np.concatenate([np.fromfile(path, np.uint8) for path in sorted(folder.iterdir())]).reshape(-1, 64)])


# ------------------------------------------------------------------------------------------------------ the orders


@pytest.mark.parametrize("shuffle", ["uniform", "lanes", SHAPE, "auto", False])
def test_every_sample_comes_once_an_epoch(folder, shuffle):
    assert rows(arrays(read(folder, shuffle=shuffle))) == stored(folder)


def test_uniform_is_another_name_for_true(folder):
    assert_same_batches(arrays(read(folder, shuffle="uniform")), arrays(read(folder, shuffle=True)))
    other = read(folder, shuffle=True)
    other.load_state_dict(read(folder, shuffle="uniform").state_dict())


def test_another_epoch_of_lanes_is_another_order(folder):
    dataset = read(folder)
    first, second = arrays(dataset), arrays(dataset)
    assert rows(first) == rows(second) and not np.array_equal(first[0], second[0])


def test_an_unknown_shuffle_is_refused_in_words(folder):
    with pytest.raises(ValueError, match=r'shuffle=\'buffer\' must be True or "uniform", "lanes"'):
        read(folder, shuffle="buffer")


# -------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("shuffle", [SHAPE, "lanes", "uniform"], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_a_run_cut_at_random_places_goes_on_alike_on_other_numbers_of_ranks(folder, shuffle, seed):
    choose = random.Random(seed)
    whole = steps_of(folder, 1, shuffle=shuffle, seed=seed)[:62]
    state, done = None, 0
    while done < 62:
        ranks = choose.choice([1, 2, 4, 8])
        rank = choose.randrange(ranks)  # the state of any rank will do
        dataset = read(folder, batch_size=16 // ranks, rank=rank, world_size=ranks, shuffle=shuffle, seed=seed)
        if state is not None:
            dataset.load_state_dict(json.loads(state))
        cut, batches = choose.randrange(done + 1, 63), iter(dataset)
        for _ in range(cut - done):
            next(batches)
        state, done = json.dumps(dataset.state_dict()), cut
        assert len(state) < 700
        for after in (1, 2, 4, 8):
            rest = steps_of(folder, after, state, shuffle=shuffle, seed=seed)
            assert_same_batches(rest[: 62 - cut], whole[cut:])


def test_a_state_of_other_lanes_is_refused_in_words(folder):
    state = read(folder).state_dict()
    for shuffle, words in (
        (Lanes(8, 4, 6), r"shuffle was \[8, 4, 5\] and is \[8, 4, 6\]"),
        (True, r"shuffle was \[8, 4, 5\] and is True"),
    ):
        with pytest.raises(ValueError, match=words):
            read(folder, shuffle=shuffle).load_state_dict(state)


def test_auto_continues_with_the_shuffle_of_the_state_it_is_given(folder):
    dataset = read(folder)
    batches = iter(dataset)
    for _ in range(20):
        next(batches)
    other = read(folder, shuffle="auto")
    other.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert_same_batches(arrays(other), arrays(read(folder))[20:])
    assert "of the state that was loaded" in other.stats()["shuffle"]


def test_a_state_from_before_there_was_a_choice_of_uneven_ends_is_one_that_drops(folder):
    state = read(folder).state_dict()
    del state["uneven"]
    read(folder).load_state_dict(state)
    with pytest.raises(ValueError, match="uneven was 'drop' and is 'pad'"):
        read(folder, uneven="pad").load_state_dict(state)


# ------------------------------------------------------------------------------------------------------ uneven ends


@pytest.mark.parametrize("shuffle", [True, SHAPE, False], ids=str)
@pytest.mark.parametrize(("uneven", "last"), [("drop", 8), ("pad", 12), ("repeat", 16)])
def test_four_ranks_have_equal_ends(folder, shuffle, uneven, last):
    steps = steps_of(folder, 4, shuffle=shuffle, uneven=uneven)  # fails if ranks have different numbers of batches
    assert [len(step) for step in steps] == [16] * 62 + [last]
    assert len(set(rows(steps))) == (1000 if uneven == "drop" else 1003)


# -------------------------------------------------------------------------------------------------- reading in pieces


def test_every_byte_is_read_once_in_pieces(tmp_path):
    for number in range(3):
        write_records(tmp_path / f"{number}.bin", 10_000, 1000, number)
    dataset = GDSDataset(tmp_path, 32, Records("u1", (1000,)), device="cpu", shuffle=Lanes(8, 16, 50))
    dataset.samples  # noqa: B018  (indexes the files)
    index, permutation = dataset._samples.index, Lanes(8, 16, 50).permutation(30_000, 32, 0, 0)
    opened = OpenPieces(index, permutation, range(8), EngineOptions(direct="always"), 60.0)
    read, runs = np.zeros(30_000_000, np.uint8), 0
    for number in range(permutation.windows):
        window = opened._fetch(number)
        assert all(call.result().all() for call in window.calls)
        for begin, end in zip(window.begin, window.end, strict=True):
            read[begin:end] += 1
            runs += 1
    opened.close()
    assert (read == 1).all()
    assert runs <= 600 + 8 * 2 + 3 + 1  # pieces, short ones of each lane, ends of files, the turn
    assert 30_000_000 <= sum(opened.bytes.values()) <= 30_000_000 + runs * 2 * 4096


@pytest.fixture
def short_calls(monkeypatch):
    """Have each call of the engine read few pieces."""
    monkeypatch.setattr(pieces, "_FIRST_CALL_BYTES", 8 * 4096)
    monkeypatch.setattr(pieces, "_CALL_BYTES", 16 * 4096)


def test_a_batch_waits_for_its_own_pieces_alone(folder, monkeypatch, short_calls):
    read_now, may_read = OpenPieces._read, threading.Event()

    def read_late(self, memory, file, begin_bytes, length_bytes, place):
        if place[0] >= 24 * 4096:  # of the 32 pieces that the first batches are chosen from
            may_read.wait(60)
        return read_now(self, memory, file, begin_bytes, length_bytes, place)

    monkeypatch.setattr(OpenPieces, "_read", read_late)
    dataset = read(folder)
    batches = iter(dataset)
    first = next(batches)
    assert not may_read.is_set()
    may_read.set()
    assert rows([first.numpy(), *arrays(batches)]) == stored(folder)
    assert served_by(dataset) == {"page_cache": 1003 * 64}


def test_memory_is_filled_anew_when_all_that_was_read_there_has_arrived(folder, monkeypatch, short_calls):
    dataset = read(folder)
    dataset.samples  # noqa: B018  (indexes the files)
    permutation = SHAPE.permutation(1003, 16, 0, 0)
    opened = OpenPieces(dataset._samples.index, permutation, range(8), EngineOptions(direct="always"), 60.0)
    read_now, begun, may_read = OpenPieces._read, threading.Event(), threading.Event()

    def read_late(self, *arguments):
        if not begun.is_set():
            begun.set()
            may_read.wait(60)
        return read_now(self, *arguments)

    monkeypatch.setattr(OpenPieces, "_read", read_late)
    opened._fetch(0)
    assert begun.wait(10)
    with ThreadPoolExecutor(1) as thread:
        later = thread.submit(opened._fetch, 2)  # which has the same memory
        with pytest.raises(NotDone):
            later.result(0.3)
        may_read.set()
        window = later.result()
    assert all(call.result().all() for call in window.calls)
    line = np.concatenate([np.fromfile(path, np.uint8) for path in sorted(folder.iterdir())])
    found = np.frombuffer(opened._memories[0].mapping, np.uint8)
    for begin, end, at in zip(window.begin, window.end, window.memory_begin, strict=True):
        assert (found[at : at + end - begin] == line[begin:end]).all()
    del found
    opened.close()


def test_an_epoch_takes_over_the_memory_of_one_that_was_read_to_its_end(folder):
    dataset = read(folder, options=EngineOptions(direct="always"))
    assert rows(arrays(dataset)) == stored(folder)
    (left,) = dataset._samples.source._spare_pieces._pairs
    batches = iter(dataset)
    first = next(batches)
    assert dataset._samples.source._spare_pieces._pairs == []
    assert rows([first.numpy(), *arrays(batches)]) == stored(folder)
    assert dataset._samples.source._spare_pieces._pairs == [left]


def test_memory_that_reads_may_still_write_into_is_not_taken_over(folder, monkeypatch, short_calls):
    read_now, is_late = OpenPieces._read, threading.Event()

    def read_late(self, memory, file, begin_bytes, length_bytes, place):
        if is_late.is_set() and place[0] >= 24 * 4096:  # the first batch does not wait for these
            time.sleep(2)
        return read_now(self, memory, file, begin_bytes, length_bytes, place)

    monkeypatch.setattr(OpenPieces, "_read", read_late)
    dataset = read(folder, options=EngineOptions(direct="always"))
    is_late.set()
    for _ in dataset:
        break
    assert dataset._samples.source._spare_pieces._pairs == []
    is_late.clear()
    assert rows(arrays(dataset)) == stored(folder)


def test_two_epochs_at_a_time_have_memory_of_their_own(folder):
    dataset = read(folder, options=EngineOptions(direct="always"))
    assert rows(arrays(dataset)) == stored(folder)
    one, other = [], []
    for a, b in zip(*(dataset.batches(epoch, np.arange(len(dataset))) for epoch in range(2)), strict=True):
        one.append(a.numpy().copy())
        other.append(b.numpy().copy())
    assert rows(one) == rows(other) == stored(folder)


def test_a_fork_does_not_write_into_memory_that_its_parent_keeps():
    spare = SpareMemory()
    pair = spare.take(8192)
    spare.leave(pair)

    def has_new_memory():
        return spare.size_bytes == 0 and spare.take(4096)[0] is not pair[0]

    assert exit_code_of_fork(lambda: None if has_new_memory() else os._exit(1)) == 0
    assert spare.take(4096) is pair


@pytest.mark.parametrize("stride", [2, 3, 5])
def test_a_worker_of_a_data_loader_leaves_windows_out(tmp_path, stride):
    write_records(tmp_path / "0.bin", 2000, 64, 0)
    whole = arrays(read(tmp_path, shuffle=Lanes(4, 4, 1)))  # each step is a window
    for first in range(stride):
        dataset = read(tmp_path, shuffle=Lanes(4, 4, 1), options=EngineOptions(direct="always"))
        steps = np.arange(first, len(whole), stride)
        for step, batch in zip(steps, dataset.batches(0, steps), strict=True):
            assert (batch.numpy() == whole[step]).all()


def test_steps_of_a_last_window_that_waits_for_room_are_not_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "_SLACK", 0)
    monkeypatch.setattr(pieces, "_SLACK_BYTES", 16 * 4096)
    write_records(tmp_path / "0.bin", 8 * 4 * 5 * 4 - 8 * 5, 4096, 0)  # three windows, the last one of nearly two
    dataset = GDSDataset(tmp_path, 16, Records("u1", (4096,)), device="cpu", shuffle=SHAPE)
    dataset.samples  # noqa: B018  (indexes the files)
    permutation = SHAPE.permutation(dataset.samples, 16, 0, 0)
    opened = OpenPieces(dataset._samples.index, permutation, range(8), EngineOptions(direct="always"), 60.0)
    last, steps = permutation.windows - 1, range(-(-dataset.samples // 16))
    before = permutation.steps_within(last - 1)

    def all_are_read():
        return all(one.done() and one.result().is_local for one in opened._held.values())

    opened.reach(permutation.steps_within(last - 2))
    assert eventually(all_are_read)
    assert opened._held[last].result().begun < len(opened._held[last].result().begin)
    assert opened.steps_in_memory(steps) == before < len(steps)
    opened.reach(before)
    assert eventually(all_are_read)
    assert opened.steps_in_memory(steps) == len(steps)
    opened.close()


def test_a_last_window_that_had_room_beside_the_one_before_it_is_not_fetched_again(folder):
    dataset = read(folder)
    dataset.samples  # noqa: B018  (indexes the files)
    permutation = SHAPE.permutation(1003, 16, 0, 0)
    opened = OpenPieces(dataset._samples.index, permutation, range(8), EngineOptions(direct="always"), 60.0)
    last = permutation.windows - 1
    assert last > 0
    opened.reach(permutation.steps_within(last - 2))
    fetched = dict(opened._held)
    assert last in fetched
    assert all(window.result().has_room for window in fetched.values())
    opened.reach(permutation.steps_within(last - 1))
    assert opened._held[last] is fetched[last]
    opened.close()


def test_samples_whose_fields_lie_apart_come_from_no_window_that_passes_before(tmp_path):
    """Runs that join such fields overlap those of other pieces, which other windows have too."""
    for number in range(2):
        arrays_of_file = {"x": np.full((15, 3), number + 1.0), "y": np.arange(15)}
        safetensors.numpy.save_file(arrays_of_file, tmp_path / f"{number}.safetensors")
    index = Safetensors("rows", ("x", "y")).index(sorted(map(str, tmp_path.glob("*.safetensors"))))
    shape = Lanes(1, 4, 3)
    for seed in range(10):
        permutation = shape.permutation(30, 9, seed, 0)
        opened = OpenPieces(index, permutation, range(1), EngineOptions(direct="always"), 60.0)
        opened.reach(0)
        assert permutation.windows == 2
        positions = np.arange(30)
        steps = positions // 9
        local = opened.local(index.plan(permutation(positions)), steps)
        passed = local.of_pieces(permutation.windows_of(steps))  # so many windows have, when the step is read
        assert set(passed) == {0, 1}
        assert (local.source >= len(index.paths) + passed).all(), seed
        opened.close()


_WINDOWS_OF_TOKENS = {"format": Tokens("u1", 64, stride=4), "shuffle": Lanes(4, 2, 2), "batch_size": 4, "seed": 1}


@pytest.mark.parametrize(
    ("size_bytes", "arguments"),
    [
        (83 * 64, {"shuffle": Lanes(2, 4, 5), "batch_size": 8, "uneven": "repeat"}),
        (83 * 64, {"shuffle": Lanes(1, 8, 5), "batch_size": 4, "uneven": "pad", "rank": 1, "world_size": 2}),
        (33 * 4 + 65, _WINDOWS_OF_TOKENS),
    ],
    ids=["repeat", "pad", "windows of tokens that overlap"],
)
def test_a_last_step_is_read_from_no_window_that_passes_before_it(tmp_path, size_bytes, arguments):
    """It has samples of the first window, or of no lane. The first window has the bytes of both."""
    (tmp_path / "0.bin").write_bytes(random_bytes(size_bytes, 0))
    expected = read(tmp_path, **arguments, options=EngineOptions(direct="never"))
    dataset = read(tmp_path, **arguments, prefetch=1, options=EngineOptions(direct="always"))
    assert len(dataset) * expected._samples.step_samples > expected.samples  # the last step is a partial one
    for _ in range(3):
        batches = iter(dataset)
        first = next(batches)
        held = dataset._iteration.running.pieces._held
        assert len(held) == 2
        assert eventually(lambda held=held: all(one.done() and one.result().is_local for one in held.values()))
        assert_same_batches([first, *batches], list(expected))


def test_pieces_are_closed_while_a_window_waits_for_reads_that_never_begin(folder, monkeypatch, short_calls):
    dataset = read(folder)
    dataset.samples  # noqa: B018  (indexes the files)
    permutation = SHAPE.permutation(1003, 16, 0, 0)
    opened = OpenPieces(dataset._samples.index, permutation, range(8), EngineOptions(), 60.0)
    may_read = threading.Event()
    monkeypatch.setattr(OpenPieces, "_read", lambda *arguments: may_read.wait(60))
    assert len(opened._fetch(0).calls) > 2  # more than there are threads
    later = opened._fetchers.submit(opened._fetch, 2)
    with pytest.raises(NotDone):
        later.result(0.2)
    opened.stop()
    may_read.set()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(opened.close).result(20)


def test_samples_of_lanes_come_from_pieces_in_memory(tmp_path):
    (tmp_path / "0.bin").write_bytes(random_bytes(64 * MIB))
    if not drop_cache(tmp_path / "0.bin"):
        pytest.skip("this file system keeps its files in memory")
    records = Records("u1", (2048,))
    singly = GDSDataset(tmp_path, 64, records, device="cpu", reading=Reading(options=EngineOptions(queue_depth=61)))
    whole = rows(arrays(singly))
    assert served_by(singly) == {"direct": 64 * MIB}
    drop_cache(tmp_path / "0.bin")
    lanes = GDSDataset(tmp_path, 64, records, device="cpu", shuffle=Lanes(16, 8, 16))
    assert rows(arrays(lanes)) == whole
    assert served_by(lanes) == {"page_cache": 64 * MIB}
    by_route = {route: count for route, count in lanes.stats()["piece_bytes"].items() if count}
    assert 64 * MIB <= by_route["direct"] <= 66 * MIB and len(by_route) == 1
    # Two windows of 128 pieces of 32 KiB; the last window takes the rest. A piece touches up to two
    # more pages.
    most_bytes = 2 * 2 * 128 * 40 * 1024
    assert 8 * MIB <= lanes.stats()["piece_memory_bytes"] <= most_bytes
    for _ in range(2):  # epochs in the memory that the one before has left
        drop_cache(tmp_path / "0.bin")
        assert rows(arrays(lanes)) == whole
    assert lanes.stats()["piece_memory_bytes"] <= most_bytes


@pytest.mark.parametrize("direct", ["always", "never"])
def test_pieces_are_read_as_the_options_say(folder, direct):
    dataset = read(folder, options=EngineOptions(direct=direct))
    dataset.samples  # noqa: B018  (indexes the files)
    drop_cache(*folder.iterdir())
    assert rows(arrays(dataset)) == stored(folder)
    assert served_by(dataset)["page_cache"] >= 62 * 16 * 64  # the samples behind the last whole turn are in no piece
    assert sum(dataset.stats()["piece_bytes"].values()) > 0


def test_pieces_in_the_page_cache_stay_there(folder):
    files, read_bytes = sorted(folder.iterdir()), [0]
    dataset = read(folder)
    dataset.samples  # noqa: B018  (indexes the files)
    for cold in ([], files[:1], files):
        warm_cache(*files)
        if cold and not drop_cache(*cold):
            pytest.skip("this file system keeps its files in memory")
        assert rows(arrays(dataset)) == stored(folder)
        read_bytes.append(sum(dataset.stats()["piece_bytes"].values()))  # of all epochs
        assert (dataset.stats()["piece_memory_bytes"] > 0) == bool(cold)
    of_none, of_one, of_all = np.diff(read_bytes)
    assert of_all > of_one > of_none == 0


def test_samples_of_pieces_that_leave_the_page_cache_are_read_one_by_one(folder, monkeypatch):
    read_now = OpenPieces._read

    def evicted(self, *what):
        is_read = read_now(self, *what)
        drop_cache(*folder.iterdir())
        return is_read

    monkeypatch.setattr(OpenPieces, "_read", evicted)
    dataset = read(folder)
    dataset.samples  # noqa: B018  (indexes the files)
    warm_cache(*folder.iterdir())
    assert rows(arrays(dataset)) == stored(folder)


def test_a_file_that_was_cut_short_since_is_named(folder):
    dataset, path = read(folder), max(folder.iterdir())
    os.truncate(path, 64)
    with pytest.raises(CorruptData, match=re.escape(str(path))):
        arrays(dataset)


def test_pieces_that_fail_are_read_sample_by_sample(folder, monkeypatch):
    monkeypatch.setattr(OpenPieces, "_read", lambda self, memory, file, *ranges: np.zeros(len(file), bool))
    dataset = read(folder)
    assert rows(arrays(dataset)) == stored(folder)
    assert sum(dataset.stats()["piece_bytes"].values()) == 0


def test_storage_that_gives_no_piece_is_a_stall_and_one_that_is_slow_is_none(folder):
    late = EngineOptions(direct="always", faults="late=1,late_ms=700", stall_timeout_s=0.2)
    with pytest.raises(StallError, match="no pieces for 0.2 s"):
        next(iter(read(folder, options=late)))
    slow = EngineOptions(direct="always", faults="late=1,late_ms=30", stall_timeout_s=0.2)
    assert rows(arrays(read(folder, options=slow))) == stored(folder)


def test_a_loop_left_early_ends_the_threads_that_read_ahead(folder):
    before = set(threading.enumerate())
    for _ in read(folder):
        break
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name.startswith("gdsdata-pieces")]


# ------------------------------------------------------------------------------------------------------------- auto


@pytest.mark.parametrize(
    ("singly", "in_pieces", "memory_mib", "chosen"),
    [
        (0.2, 2.0, 9999, "lanes"),
        (1.5, 2.0, 9999, "uniform"),
        (1.0, 2.0, 9999, "uniform"),
        (0.2, 2.0, 400, "lanes"),
        (0.2, 2.0, 300, "uniform"),  # the others, read one by one, take half of the time that they take in all
    ],
)
def test_auto_takes_lanes_where_large_reads_are_clearly_faster(
    tmp_path, monkeypatch, singly, in_pieces, memory_mib, chosen
):
    with open(tmp_path / "0.bin", "wb") as file:
        file.truncate(300 * MIB)
    monkeypatch.setattr(measured, "share_bytes", lambda: memory_mib * MIB)
    monkeypatch.setattr(measured, "_gb_per_s", lambda index, batch: in_pieces if index.sample.bytes == MIB else singly)
    dataset = GDSDataset(tmp_path, 64, Records("u1", (4096,)), device="cpu", shuffle="auto")
    said = dataset.stats()["shuffle"]
    assert said.startswith("Lanes(lanes=64" if chosen == "lanes" else "uniform: ")
    assert f"bring {singly:.2f} GB/s here, and pieces of 1 MiB {in_pieces:.2f} GB/s" in said
    assert f"memory for {min(1, memory_mib / 600):.0%} of them" in said


def test_auto_measures_what_the_storage_is_good_at(tmp_path):
    (tmp_path / "0.bin").write_bytes(random_bytes(MIB) * 256)
    chosen, reason = measured.choose(Records("u1", (1024,)).index([str(tmp_path / "0.bin")]), 1)
    assert chosen in ("uniform", "lanes") and "samples of 1024 bytes, read one by one past the page cache" in reason


def test_auto_takes_uniform_where_pieces_gain_nothing(tmp_path):
    write_records(tmp_path / "0.bin", 4, MIB, 0)
    assert (
        "large reads themselves"
        in GDSDataset(tmp_path, 2, Records("u1", (MIB,)), device="cpu", shuffle="auto").stats()["shuffle"]
    )
    (tmp_path / "files").mkdir()
    for number in range(4):
        np.save(tmp_path / "files" / f"{number}.npy", np.zeros(8))
    dataset = GDSDataset(tmp_path / "files", 2, Npy(), device="cpu", shuffle="auto")
    assert "uniform: no file is as long as two pieces" in dataset.stats()["shuffle"]


def test_auto_on_ranks_that_cannot_agree_is_refused_in_words(folder):
    with pytest.raises(ValueError, match="world_size=2 ranks might find different things: initialize torch.distrib"):
        read(folder, shuffle="auto", rank=0, world_size=2)


# ------------------------------------------------------------------------------------------------------ device meshes


def test_a_dp_dim_without_a_mesh_is_refused_in_words(folder):
    with pytest.raises(ValueError, match="dp_dim='dp' is a dimension of a device_mesh, which is not given"):
        read(folder, dp_dim="dp")

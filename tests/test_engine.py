"""`gdsdata.Engine`: many concurrent reads and writes with futures, without a GPU."""

import concurrent.futures
import contextlib
import ctypes
import errno
import gc
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import fake_gpu
import pytest
import torch
from helpers import (
    MIB,
    eventually,
    exit_code_of_fork,
    grouped,
    in_new_process,
    random_bytes,
    require_direct,
    threads,
    write_records,
)
from torch.testing._internal.two_tensor import TwoTensor

import gdsdata
from gdsdata import EngineOptions, GDSDataset
from gdsdata.errors import BackendUnavailable, CorruptData, EngineClosed, IoError
from gdsdata.formats import Records
from gdsdata.io import calls
from gdsdata.io.calls import ReadCalls
from gdsdata.io.engine import engines_here, processor_features, shared_engine

pytestmark = pytest.mark.usefixtures("quick_programs")


def tensor_of(i: int) -> torch.Tensor:
    """Make a tensor so small that torch starts no threads, which a forked child would wait for."""
    return torch.full((20_000 + 100 * i + i % 3,), i, dtype=torch.int32)


@pytest.fixture
def late(tmp_path) -> EngineOptions:
    """Return options with which each request takes 0.3 s. The file is "x", of 1 MiB."""
    (tmp_path / "x").write_bytes(random_bytes(MIB))
    require_direct(tmp_path / "x")
    return EngineOptions(direct="always", workers=2, faults="late=1,late_ms=300")


# -------------------------------------------------------------------------------------------------- there and back


def test_many_writes_and_reads_at_once_come_back_as_they_went(tmp_path):
    # An engine of its own, for its counts.
    with gdsdata.Engine(EngineOptions(workers=3), most_calls=8) as engine:
        written = [engine.write(tmp_path / str(i), tensor_of(i)) for i in range(40)]
        assert [future.result() for future in written] == [None] * 40
        into = [torch.empty_like(tensor_of(i)) for i in range(40)]
        futures = [engine.read(tmp_path / str(i), tensor) for i, tensor in enumerate(into)]
        for i, future in enumerate(futures):
            assert future.result() is into[i] and torch.equal(into[i], tensor_of(i))
        assert set(engine.stats()) == {"cpu"}
        assert engine.stats()["cpu"]["errors"] == 0 and engine.stats()["cpu"]["transfers"] >= 80


@pytest.mark.parametrize("size", [0, 1, 511, 512, 4095, 4096, 4097, MIB + 1])
@pytest.mark.parametrize("offset", [0, 1, 4096, MIB + 3])
def test_ranges_of_any_size_and_offset(tmp_path, size, offset):
    data = random_bytes(size + 1)[:size]
    with gdsdata.Engine() as engine:
        tensor = torch.frombuffer(bytearray(data + b"-"), dtype=torch.uint8)[:size]
        engine.write(tmp_path / "x", tensor, offset).result()
        into = torch.zeros(size, dtype=torch.uint8)
        assert engine.read(tmp_path / "x", into, offset).result() is into
    assert bytes(into.numpy()) == data


@pytest.mark.parametrize("old_bytes", [None, 0, 1, 2 * MIB])
def test_ranges_of_one_file_may_be_written_and_read_all_at_once(tmp_path, old_bytes):
    data = torch.frombuffer(bytearray(random_bytes(2 * MIB)), dtype=torch.uint8)
    if old_bytes is not None:
        (tmp_path / "x").write_bytes(bytes(old_bytes))
    parts = list(zip(data.split(70_001), range(0, 2 * MIB, 70_001), strict=True))
    with gdsdata.Engine() as engine:
        futures = [engine.write(tmp_path / "x", part, offset) for part, offset in parts]
        concurrent.futures.wait(futures)
        into = torch.empty_like(data)
        reads = [
            engine.read(tmp_path / "x", part, offset)
            for part, offset in zip(into.split(50_003), range(0, 2 * MIB, 50_003), strict=True)
        ]
        for future in futures + reads:
            future.result()
    assert torch.equal(into, data)


def test_a_view_is_written_as_the_values_that_it_shows(tmp_path):
    tensor = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4).transpose(0, 2).requires_grad_()
    with gdsdata.Engine() as engine:
        engine.write(tmp_path / "x", tensor).result()
        again = engine.read(tmp_path / "x", torch.empty(4, 3, 2)).result()
    assert torch.equal(again, tensor.detach())


def test_autograd_notices_a_read_into_a_tensor_that_a_graph_has_saved(tmp_path):
    gdsdata.write_tensor(torch.ones(3), tmp_path / "x")
    factor = torch.zeros(3)
    product = (torch.zeros(3, requires_grad=True) * factor).sum()
    with gdsdata.Engine() as engine:
        engine.read(tmp_path / "x", factor).result()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_call_returns_before_storage_does_and_the_future_after(tmp_path, late):
    with gdsdata.Engine(late) as engine:
        into = torch.zeros(MIB, dtype=torch.uint8)
        began = time.monotonic()
        future = engine.read(tmp_path / "x", into)
        assert time.monotonic() - began < 0.2 and not future.done()
        assert bytes(future.result().numpy()) == (tmp_path / "x").read_bytes()
        assert time.monotonic() - began >= 0.29


def test_a_late_read_holds_up_no_other_ones_future(tmp_path):
    (tmp_path / "x").write_bytes(random_bytes(MIB))
    require_direct(tmp_path / "x")
    some_late = EngineOptions(direct="always", faults="late=0.5,late_ms=500,seed=3", coalesce_gap_bytes=0)
    with gdsdata.Engine(some_late) as engine:
        into = torch.empty(16, 4096, dtype=torch.uint8)
        futures = [engine.read(tmp_path / "x", part, 8192 * i) for i, part in enumerate(into)]
        time.sleep(0.25)
        done = [future.done() for future in futures]
        first_late = done.index(False)
        assert any(done[first_late:])
        concurrent.futures.wait(futures)


def test_a_few_cached_bytes_are_there_when_the_future_is(tmp_path):
    content = random_bytes(200_000)
    (tmp_path / "x").write_bytes(content)
    with gdsdata.Engine() as engine:
        for size, offset in [(1, 0), (4096, 4096), (64 << 10, 12_345)]:
            future = engine.read(tmp_path / "x", torch.empty(size, dtype=torch.uint8), offset)
            assert future.done() and not future.running() and not future.cancel()
            assert bytes(future.result().numpy()) == content[offset:][:size]
        future = engine.read(tmp_path / "x", torch.empty(10, dtype=torch.uint8), 199_995)
        assert isinstance(future.exception(), CorruptData)


def test_a_few_bytes_behind_queued_reads_wait_their_turn(tmp_path, late):
    with gdsdata.Engine(late, most_calls=1) as engine:
        futures = [engine.read(tmp_path / "x", torch.empty(100, dtype=torch.uint8), i) for i in range(3)]
        assert not any(future.done() for future in futures)
        for i, future in enumerate(futures):
            assert bytes(future.result(20).numpy()) == (tmp_path / "x").read_bytes()[i : i + 100]


def test_reads_of_a_few_cached_bytes_by_many_threads_are_right(tmp_path):
    content = random_bytes(300_000)
    (tmp_path / "x").write_bytes(content)

    def read_some(thread: int) -> bool:
        offsets = range(thread, 200_000, 1999)
        found = [engine.read(tmp_path / "x", torch.empty(5000, dtype=torch.uint8), offset) for offset in offsets]
        return all(
            bytes(future.result(20).numpy()) == content[offset:][:5000]
            for future, offset in zip(found, offsets, strict=True)
        )

    with gdsdata.Engine(most_calls=4) as engine, concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(read_some, range(6)))


def test_a_callback_of_a_future_may_read(tmp_path):
    (tmp_path / "x").write_bytes(random_bytes(1000))
    into, last = torch.empty(1000, 1, dtype=torch.uint8), concurrent.futures.Future()
    with gdsdata.Engine(most_calls=2) as engine:

        def read_next(i, before=None):
            if i == len(into):
                return last.set_result(None)
            engine.read(tmp_path / "x", into[i], i).add_done_callback(lambda done: read_next(i + 1, done.result()))

        read_next(0)
        last.result(20)
    assert bytes(into.flatten().numpy()) == (tmp_path / "x").read_bytes()


def test_a_caller_gets_its_result_while_the_notifying_thread_is_blocked(tmp_path, late):
    is_blocked, go_on = threading.Event(), threading.Event()

    def hold_up(_):  # blocks the thread that completes futures
        is_blocked.set()
        assert go_on.wait(60)

    with gdsdata.Engine(late, most_calls=1) as engine:
        engine.read(tmp_path / "x", torch.empty(1, dtype=torch.uint8)).add_done_callback(hold_up)
        assert is_blocked.wait(60)
        try:
            for _ in range(3):  # more than may be in flight: each read makes room for the next
                found = engine.read(tmp_path / "x", torch.empty(MIB, dtype=torch.uint8)).result(20)
                assert bytes(found.numpy()) == (tmp_path / "x").read_bytes()
            error = engine.read(tmp_path / "x", torch.empty(2 * MIB, dtype=torch.uint8)).exception(20)
            assert isinstance(error, CorruptData)
        finally:
            go_on.set()


@pytest.mark.parametrize("most_calls", [1, 4])
@pytest.mark.parametrize("act", ["result", "close"])
def test_a_callback_may_wait_for_other_reads_and_may_close(tmp_path, late, act, most_calls):
    acted, into = concurrent.futures.Future(), torch.empty(4, 1000, dtype=torch.uint8)
    engine = gdsdata.Engine(late, most_calls)
    first, *_, last = futures = [engine.read(tmp_path / "x", one, i) for i, one in enumerate(into)]

    def wait(_):
        engine.close() if act == "close" else last.result()
        acted.set_result((last.done(), threading.current_thread().name))

    first.add_done_callback(wait)
    assert acted.result(20) == (True, "gdsdata-reads")
    assert concurrent.futures.wait(futures, 20).not_done == set()
    engine.close()
    assert bytes(into[3].numpy()) == (tmp_path / "x").read_bytes()[3:1003]


def test_close_waits_for_a_caller_that_is_completing_its_own_future(tmp_path, late, monkeypatch):
    completing, complete = threading.Event(), calls._complete

    def complete_late(*call):
        completing.set()
        time.sleep(0.3)
        complete(*call)

    monkeypatch.setattr(calls, "_complete", complete_late)
    # The waiting caller is faster than the thread.
    monkeypatch.setattr(ReadCalls, "_complete_futures", lambda calls: calls._endings.take())
    engine = gdsdata.Engine(late)
    future = engine.read(tmp_path / "x", torch.empty(MIB, dtype=torch.uint8))
    waiting = threading.Thread(target=future.result)
    waiting.start()
    assert completing.wait(20)
    engine.close()
    assert future.done()
    waiting.join()


def test_a_result_is_waited_for_no_longer_than_is_said(tmp_path, late):
    with gdsdata.Engine(late) as engine:
        future = engine.read(tmp_path / "x", torch.empty(MIB, dtype=torch.uint8))
        began = time.monotonic()
        for call in (future.result, future.exception):
            with pytest.raises(concurrent.futures.TimeoutError):
                call(0.05)
        assert time.monotonic() - began < 0.25
        assert bytes(future.result(20).numpy()) == (tmp_path / "x").read_bytes()


def test_a_read_whose_caller_is_interrupted_at_its_end_is_completed_all_the_same(tmp_path, late, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with gdsdata.Engine(late) as engine:
        monkeypatch.setattr(ReadCalls, "_complete_one", interrupt)
        future = engine.read(tmp_path / "x", torch.empty(MIB, dtype=torch.uint8))
        with pytest.raises(KeyboardInterrupt):
            future.result(20)
        assert concurrent.futures.wait([future], 20).done
        assert bytes(future.result().numpy()) == (tmp_path / "x").read_bytes()


def test_many_may_wait_for_one_result(tmp_path, late):
    with gdsdata.Engine(late) as engine, concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            future = engine.read(tmp_path / "x", torch.empty(MIB, dtype=torch.uint8))
            found = [one.result(20) for one in [pool.submit(future.result) for _ in range(8)]]
            assert all(one is found[0] for one in found)


def test_the_file_is_the_one_that_has_the_name_when_it_is_asked_for(tmp_path):
    path = tmp_path / "x"
    with gdsdata.Engine() as engine:
        for content in (b"first", b"other", b"longer than those"):  # each is renamed into place, then changed in place
            (tmp_path / "new").write_bytes(content)
            (tmp_path / "new").rename(path)
            for found in (content, content[::-1]):
                path.write_bytes(found)
                into = torch.empty(len(found), dtype=torch.uint8)
                assert bytes(engine.read(path, into).result().numpy()) == found
        path.write_bytes(b"short")
        with pytest.raises(CorruptData):
            engine.read(path, torch.empty(6, dtype=torch.uint8)).result()
        path.unlink()
        with pytest.raises(FileNotFoundError):
            engine.read(path, torch.empty(1, dtype=torch.uint8)).result()


def descriptors_kept(folder: Path) -> tuple[int, int]:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    into, many = torch.empty(1, dtype=torch.uint8), [folder / str(i) for i in range(100)]
    with gdsdata.Engine(EngineOptions(workers=1)) as engine:
        engine.read(many[0], into).result()
        before = count()
        for path in many:
            engine.read(path, into).result()
        kept = count() - before
    return kept, count() - before


def test_few_of_the_files_that_were_read_stay_open(tmp_path):
    for i in range(100):
        (tmp_path / str(i)).write_bytes(b"x")
    kept, after = in_new_process(descriptors_kept, tmp_path)
    assert kept <= 24 and after <= 0


def test_a_read_that_waits_its_turn_can_be_canceled_as_any_future(tmp_path, late):
    with gdsdata.Engine(late, most_calls=1) as engine:
        first, second = (engine.read(tmp_path / "x", torch.empty(MIB, dtype=torch.uint8)) for _ in range(2))
        assert second.cancel()
        first.result()
    assert second.cancelled()


def test_no_more_calls_than_asked_for_are_under_way(tmp_path, late):
    with gdsdata.Engine(late, most_calls=2) as engine:
        futures = [engine.read(tmp_path / "x", torch.empty(100, dtype=torch.uint8)) for _ in range(6)]
        time.sleep(0.45)
        assert sum(future.done() for future in futures) <= 2
        concurrent.futures.wait(futures)


def test_threads_may_share_one(tmp_path):
    def there_and_back(i: int) -> bool:
        engine.write(tmp_path / str(i), tensor_of(i)).result()
        return torch.equal(engine.read(tmp_path / str(i), torch.empty_like(tensor_of(i))).result(), tensor_of(i))

    with gdsdata.Engine(most_calls=4) as engine, concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(there_and_back, range(32)))


# ------------------------------------------------------------------------------------------------------- priorities


@pytest.mark.parametrize("priority", ["background", "training"])
def test_either_priority_reads_and_writes(tmp_path, priority):
    with gdsdata.Engine() as engine:
        engine.write(tmp_path / "x", tensor_of(1), priority=priority).result()
        assert torch.equal(
            engine.read(tmp_path / "x", torch.empty_like(tensor_of(1)), priority=priority).result(), tensor_of(1)
        )


def test_another_priority_is_refused_in_words(tmp_path):
    with gdsdata.Engine() as engine, pytest.raises(ValueError, match="priority='urgent' must be one of background, tr"):
        engine.read(tmp_path / "x", torch.empty(1), priority="urgent")


def test_training_goes_first_and_the_background_ends_too(tmp_path):
    (tmp_path / "x").write_bytes(random_bytes(MIB))
    require_direct(tmp_path / "x")
    one_by_one = dict(workers=1, queue_depth=1, segment_bytes=65536, request_bytes=65536)
    options = EngineOptions(direct="always", faults="late=1,late_ms=2", **one_by_one)  # 16 requests a background read
    with gdsdata.Engine(options, most_calls=40) as engine:
        whole = torch.empty(MIB, dtype=torch.uint8)
        background = [engine.read(tmp_path / "x", whole) for _ in range(16)]
        next(concurrent.futures.as_completed(background))  # all of them are queued by now, because the queue is shared
        training = [
            engine.read(tmp_path / "x", torch.empty(1000, dtype=torch.uint8), offset, priority="training")
            for offset in range(20)
        ]
        concurrent.futures.wait(training)
        still_going = sum(not future.done() for future in background)
        concurrent.futures.wait(background)
    assert still_going >= 8, "training waited for the background"
    assert bytes(whole.numpy()) == (tmp_path / "x").read_bytes()


# ---------------------------------------------------------------------------------------------------- errors, ends


def test_errors_come_in_the_future_and_others_go_on(tmp_path):
    (tmp_path / "x").write_bytes(bytes(100))
    with gdsdata.Engine() as engine:
        missing = engine.read(tmp_path / "absent", torch.empty(1))
        beyond = engine.read(tmp_path / "x", torch.empty(101, dtype=torch.uint8))
        behind = engine.read(tmp_path / "x", torch.empty(1, dtype=torch.uint8), offset=100)
        empty = engine.read(tmp_path / "absent", torch.empty(0))
        folder = engine.write(tmp_path / "absent" / "x", torch.empty(1))
        replaced = engine.write(tmp_path, torch.empty(1))
        good = engine.read(tmp_path / "x", torch.empty(100, dtype=torch.uint8))
        assert isinstance(missing.exception(), FileNotFoundError) and missing.exception().errno == errno.ENOENT
        assert isinstance(empty.exception(), FileNotFoundError)
        assert isinstance(beyond.exception(), CorruptData) and isinstance(behind.exception(), CorruptData)
        assert isinstance(folder.exception(), FileNotFoundError)
        assert isinstance(replaced.exception(), IoError)
        assert good.result().sum() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def wrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that holds others, as a DTensor does."""
    return TwoTensor(tensor, tensor.clone())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda engine, path: engine.read(path, torch.empty(4, 4).t()), r"of strides \(1, 4\) is not contiguous"),
        (lambda engine, path: engine.read(path, torch.empty(1), offset=-1), "offset=-1 must be 0 or more"),
        (lambda engine, path: engine.read(path, torch.empty(1, device="meta")), "no plain memory to read into"),
        (lambda engine, path: engine.write(path, torch.eye(2).to_sparse()), "no plain memory to write"),
        (lambda engine, path: engine.read(path, torch._efficientzerotensor(1)), "zeros .* no memory to read into"),
        (lambda engine, path: engine.read(path, wrapped(torch.empty(1))), "type TwoTensor has no memory of"),
        (lambda engine, path: engine.write(path, wrapped(torch.empty(1))), "type TwoTensor has no memory of"),
        (lambda engine, path: engine.read(path, torch.empty(1, dtype=torch.cfloat).conj()), "a conjugate or negative"),
        (lambda engine, path: engine.read(path, torch._neg_view(torch.empty(1))), "a conjugate or negative view"),
        (lambda engine, path: engine.write(path, torch.empty(1), offset=2**63), "where no file does"),
    ],
    ids=[
        *("not contiguous", "negative offset", "meta", "sparse", "zeros", "read into a wrapper", "write a wrapper"),
        *("conjugate view", "negative view", "far offset"),
    ],
)
def test_a_bad_argument_is_refused_at_once_in_words(tmp_path, call, words):
    with gdsdata.Engine() as engine, pytest.raises(ValueError, match=words):
        call(engine, tmp_path / "x")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"options": {"workers": 1}}, r"options=\{'workers': 1\} must be a gdsdata.EngineOptions"),
        ({"options": {}}, r"options=\{\} must be a gdsdata.EngineOptions"),
        ({"most_calls": "3"}, "most_calls='3' must be a whole number"),
        ({"most_calls": 2.5}, "most_calls=2.5 must be a whole number"),
        ({"most_calls": True}, "most_calls=True must be a whole number"),
    ],
)
def test_an_argument_of_another_type_is_refused_in_words(arguments, words):
    with pytest.raises(TypeError, match=f"^{words}"):
        gdsdata.Engine(**arguments)


def test_it_takes_at_least_one_call():
    with pytest.raises(ValueError, match="most_calls=0 must be 1 or more"):
        gdsdata.Engine(most_calls=0)


def test_an_option_that_makes_no_sense_is_an_error_at_the_first_call(tmp_path):
    with (
        gdsdata.Engine(EngineOptions(backend="magic")) as engine,
        pytest.raises(ValueError, match="no backend is called 'magic'"),
    ):
        engine.read(tmp_path / "x", torch.empty(1))


def test_a_backend_for_gpus_is_refused_on_the_cpu(tmp_path):
    with gdsdata.Engine(EngineOptions(backend="cufile")) as engine, pytest.raises((BackendUnavailable, ValueError)):
        engine.read(tmp_path / "x", torch.empty(1))


def test_close_waits_for_earlier_calls_and_refuses_new_ones(tmp_path, late):
    engine = gdsdata.Engine(late)
    future = engine.read(tmp_path / "x", torch.empty(MIB, dtype=torch.uint8))
    engine.close()
    assert future.done() and not future.exception()
    with pytest.raises(EngineClosed, match="this Engine was closed; make another one"):
        engine.read(tmp_path / "x", torch.empty(1))
    engine.close()  # a second close does nothing


def test_reads_asked_for_while_it_is_closed_end_or_are_refused(tmp_path):
    (tmp_path / "x").write_bytes(bytes(100))
    for _ in range(30):
        engine, futures = gdsdata.Engine(), []

        def read_until_it_is_closed(engine=engine, futures=futures):
            with contextlib.suppress(EngineClosed):
                while True:
                    futures.append(engine.read(tmp_path / "x", torch.empty(100, dtype=torch.uint8)))

        readers = [threading.Thread(target=read_until_it_is_closed) for _ in range(3)]
        for reader in readers:
            reader.start()
        engine.close()
        for reader in readers:
            reader.join()
        assert all(future.result(20) is not None for future in futures)


def left_by_engines(folder: Path) -> int:
    before = threads()
    for i in range(20):
        with gdsdata.Engine(EngineOptions(workers=2)) as engine:
            engine.write(folder / "x", tensor_of(i)).result()
            engine.read(folder / "x", torch.empty_like(tensor_of(i)))
    deadline = time.monotonic() + 5
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return threads() - before


def test_a_closed_engine_leaves_no_thread(tmp_path):
    torch.ones(10).add_(1)
    assert in_new_process(left_by_engines, tmp_path) <= 0


def left_by_dropped_engines(folder: Path) -> int:
    before = threads()
    for i in range(5):
        engine = gdsdata.Engine(EngineOptions(workers=2))
        engine.write(folder / "x", tensor_of(i)).result()
        future = engine.read(folder / "x", torch.empty_like(tensor_of(i)))
        del engine
        assert torch.equal(future.result(), tensor_of(i))
    deadline = time.monotonic() + 5
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return threads() - before


def test_one_that_is_dropped_ends_its_reads_and_leaves_no_thread(tmp_path):
    torch.ones(10).add_(1)
    assert in_new_process(left_by_dropped_engines, tmp_path) <= 0


@pytest.mark.parametrize("late_ms", [0, 30_000])
@pytest.mark.whole_end
def test_a_program_may_end_with_one_open_and_reads_on_their_way(tmp_path, late_ms):
    (tmp_path / "x").write_bytes(bytes(4096))
    require_direct(tmp_path / "x")
    script = """
import sys, torch, gdsdata
faults = f"late=1,late_ms={sys.argv[2]}" if sys.argv[2] != "0" else ""
engine = gdsdata.Engine(gdsdata.EngineOptions(direct="always", faults=faults))
into = torch.zeros(4096, dtype=torch.uint8)
future = engine.read(sys.argv[1], into)
if not faults:
    future.result()
print("ended")
"""
    command = [sys.executable, "-c", script, str(tmp_path / "x"), str(late_ms)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_one_that_was_never_used_makes_nothing(tmp_path):
    before = threading.active_count()
    with gdsdata.Engine() as engine:
        assert engine.stats() == {}
    assert threading.active_count() == before


def use_after_a_fork(folder: Path) -> list[int]:
    engine = gdsdata.Engine(EngineOptions(workers=2))
    engine.write(folder / "x", tensor_of(0)).result()
    engine.read(folder / "x", torch.empty_like(tensor_of(0))).result()  # its thread is asleep at the fork

    def use_the_parents() -> None:
        with contextlib.suppress(EngineClosed):
            engine.read(folder / "x", torch.empty(1))
            raise AssertionError("it was read")

    def close_the_parents() -> None:
        engine.close()

    def use_another() -> None:
        with gdsdata.Engine(EngineOptions(workers=2)) as mine:
            assert torch.equal(mine.read(folder / "x", torch.empty_like(tensor_of(0))).result(), tensor_of(0))

    codes = [exit_code_of_fork(child) for child in (use_the_parents, close_the_parents, use_another)]
    assert torch.equal(engine.read(folder / "x", torch.empty_like(tensor_of(0))).result(), tensor_of(0))
    engine.close()
    return codes


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_its_own_and_the_parents_goes_on(tmp_path):
    assert in_new_process(use_after_a_fork, tmp_path) == [0, 0, 0]


# -------------------------------------------------------------------------------------------- workers share the work

SLOW_READS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/uio.h>
#include <unistd.h>
ssize_t preadv64(int fd, const struct iovec *memory, int count, off_t offset) {
    usleep(100000);
    ssize_t (*plain)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, "preadv64");
    return plain(fd, memory, count, offset);
}
ssize_t preadv(int fd, const struct iovec *memory, int count, off_t offset) {
    return preadv64(fd, memory, count, offset);
}
"""


def test_workers_that_can_do_one_request_at_a_time_take_one_segment_each(tmp_path):
    """16 reads of 0.1 s by 8 workers take 0.2 s.

    If a worker took as many segments as it does with io_uring, others would have none.
    """
    (tmp_path / "x").write_bytes(random_bytes(16 * MIB))
    require_direct(tmp_path / "x")
    (tmp_path / "slow.c").write_text(SLOW_READS)
    compiler, library = os.environ.get("CC", "cc"), str(tmp_path / "slow.so")
    if shutil.which(compiler) is None:
        pytest.skip("no C compiler is here to build the slow reads")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, str(tmp_path / "slow.c"), "-ldl"], check=True)
    script = """
import sys, time, torch, gdsdata
options = gdsdata.EngineOptions(backend="posix", workers=8, direct="always", segment_bytes=2**20)
with gdsdata.Engine(options) as engine:
    for _ in range(2):
        began = time.perf_counter()
        engine.read(sys.argv[1], into=torch.empty(2**24, dtype=torch.uint8)).result()
        print(time.perf_counter() - began)
"""
    environment = {**os.environ, "LD_PRELOAD": library}
    command = [sys.executable, "-c", script, str(tmp_path / "x")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    took = float(done.stdout.split()[-1])
    assert 0.2 <= took < 0.5, "less: the reads were not slow"


def test_a_call_does_not_wait_for_another_ones_storage(tmp_path):
    """The one worker submits later calls while it waits for the first call's bytes."""
    path = tmp_path / "x"
    path.write_bytes(bytes(4096))
    options = EngineOptions(workers=1, direct="always", faults="late=1,late_ms=20")

    def read_ten(engine, after_s):
        time.sleep(after_s)
        for _ in range(10):
            engine.read(path, into=torch.empty(4096, dtype=torch.uint8)).result()

    took = []
    with gdsdata.Engine(options) as engine, concurrent.futures.ThreadPoolExecutor(4) as callers:
        engine.read(path, into=torch.empty(4096, dtype=torch.uint8)).result()
        for _ in range(5):  # other programs may delay a round
            began = time.perf_counter()
            for call in [callers.submit(read_ten, engine, 0.005 * i) for i in range(4)]:
                call.result()
            took.append(time.perf_counter() - began)
    assert 0.2 <= min(took) < 0.35, f"{took}: in turns they took 0.41"


def resident_growth_of_a_read(path):
    def resident_bytes():
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    options = EngineOptions(workers=1, direct="always")
    target, before = torch.zeros(MIB, dtype=torch.uint8), resident_bytes()
    with gdsdata.Engine(options) as engine:
        engine.read(path, into=target).result()
        return resident_bytes() - before


def test_a_small_read_does_not_take_all_bounce_memory(tmp_path):
    """Zeroing a worker's 64 MiB would take longer than the read."""
    (tmp_path / "x").write_bytes(random_bytes(MIB))
    require_direct(tmp_path / "x")
    assert in_new_process(resident_growth_of_a_read, tmp_path / "x") < 32 * MIB


# ------------------------------------------------------------------------------------------------ over a fake GPU


class DeviceMemory:
    """The attributes of a tensor that a read uses, over memory of the fake driver."""

    def __init__(self, fake, size_bytes):
        self.nbytes, self._address = size_bytes, ctypes.c_uint64()
        context = ctypes.c_void_p()
        for code in (
            fake.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
            fake.cuCtxSetCurrent(context),
            fake.cuMemAlloc_v2(ctypes.byref(self._address), ctypes.c_size_t(size_bytes)),
        ):
            assert code == 0

    def data_ptr(self):
        return self._address.value


def reads_over_a_slow_link(driver: Path, path: Path) -> list[bool]:
    """Return for each read whether its bytes had arrived when its future completed."""
    fake = fake_gpu.install(driver)
    shared = shared_engine(EngineOptions(workers=2), torch.device(fake_gpu.DEVICE))
    targets = [DeviceMemory(fake, 100_000) for _ in range(6)]
    fake.fake_cuda_set_link_bytes_per_s(2_000_000)
    calls, content, there = ReadCalls(shared, 3, owner=shared_engine), path.read_bytes(), {}

    def note(i, into):
        there[i] = ctypes.string_at(into.data_ptr(), into.nbytes) == content[1000 * i :][:100_000]

    for i, into in enumerate(targets):
        future = calls.read(str(path), into, 1000 * i, shared.mark(0), False)
        future.add_done_callback(lambda future, i=i: note(i, future.result()))
    calls.close()
    return [there[i] for i in range(len(targets))]


def test_reads_to_a_gpu_are_done_when_their_copies_are(tmp_path, fake_driver):
    (tmp_path / "x").write_bytes(random_bytes(200_000))
    assert in_new_process(reads_over_a_slow_link, fake_driver, tmp_path / "x") == [True] * 6


def reads_of_callers_that_wait(driver: Path, path: Path) -> list[bool]:
    """Return for each read whether its bytes had arrived.

    Four threads read at the same time; the last read waits while the calls are closed.
    """
    fake = fake_gpu.install(driver)
    shared = shared_engine(EngineOptions(workers=2), torch.device(fake_gpu.DEVICE))
    calls, content = ReadCalls(shared, 16, owner=shared_engine), path.read_bytes()

    def is_there(into, offset):
        return ctypes.string_at(into.data_ptr(), into.nbytes) == content[offset:][: into.nbytes]

    def read_some(thread):
        into = DeviceMemory(fake, 50_000)
        for offset in range(thread, 100_000, 2003):
            yield is_there(calls.read(str(path), into, offset, shared.mark(0), False).result(), offset)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        there = sum(threads.map(lambda thread: list(read_some(thread)), range(4)), [])
    fake.fake_cuda_keep_busy(0, 300_000)
    into = DeviceMemory(fake, 50_000)
    future = calls.read(str(path), into, 7, shared.mark(0), False)
    caller = threading.Thread(target=lambda: there.append(is_there(future.result(), 7)))
    caller.start()
    calls.close()
    there.append(future.done() and is_there(into, 7))
    caller.join()
    return there


def names_of_threads(driver, path):
    fake_gpu.install(driver)
    arguments = grouped(dict(options=EngineOptions(workers=3, calibrate=False)))
    batches = iter(GDSDataset(path, 8, Records("u1", (1000,)), device=fake_gpu.DEVICE, **arguments))
    next(batches)

    def names() -> list[str]:
        found = []
        for comm in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # the thread has ended
                found.append(comm.read_text().strip())
        return sorted(name for name in found if name.startswith("gdsdata"))

    eventually(lambda: len(names()) >= 4)  # a thread that has not run yet has its parent's name
    return names()


def test_the_engines_threads_show_their_names(tmp_path, fake_driver):
    write_records(tmp_path / "x", 32, 1000)
    names = in_new_process(names_of_threads, fake_driver, tmp_path / "x")
    assert names == ["gdsdata-filler", *["gdsdata-worker"] * 3]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names are those of x86-64")
def test_it_finds_the_vector_instructions_of_the_processor():
    flags = set(re.search(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    flags_of = {name: {name} for name in ("avx", "avx2")}
    flags_of["avx512"] = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    flags_of |= {"pclmul": {"pclmulqdq", "sse4_1"}, "crc32c": {"sse4_2"}}
    assert processor_features() == [name for name, its in flags_of.items() if its <= flags]


def finds_of_data_sets(driver, path):
    """Return whether the first data set's engine is left, and whether the second found it."""
    fake_gpu.install(driver)

    def engine_after(workers: int) -> weakref.ref:
        options = EngineOptions(workers=workers, calibrate=False)
        arguments = grouped(dict(shuffle=False, options=options))
        assert len(list(GDSDataset(path, 8, Records("u1", (1000,)), device=fake_gpu.DEVICE, **arguments))) == 4
        gc.collect()
        ((_, found),) = engines_here()
        return weakref.ref(found)

    first = engine_after(2)
    is_found = engine_after(2)() is first()
    engine_after(3)
    return first() is not None, is_found


def test_the_next_data_set_of_a_gpu_finds_the_engine_of_the_one_before(tmp_path, fake_driver):
    write_records(tmp_path / "x", 32, 1000)
    is_left, is_found = in_new_process(finds_of_data_sets, fake_driver, tmp_path / "x")
    assert is_found and not is_left, "other options make a new engine, which replaces the first one"


def test_reads_to_a_gpu_are_right_for_callers_that_wait_and_while_it_closes(tmp_path, fake_driver):
    (tmp_path / "x").write_bytes(random_bytes(200_000))
    assert in_new_process(reads_of_callers_that_wait, fake_driver, tmp_path / "x") == [True] * 202

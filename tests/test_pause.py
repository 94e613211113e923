"""Python's garbage collector while checkpoints are saved and loaded."""

import gc
import os
import pickle
import signal
import threading
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import eventually

import gdsdata
from gdsdata.checkpoint import pause
from gdsdata.checkpoint.pause import collector_paused, collector_resumed

STATE = {"a": torch.arange(5000.0), "b": torch.ones(3)}


@pytest.fixture(autouse=True)
def collector_is_on_before_and_after():
    assert gc.isenabled()
    yield
    was_on = gc.isenabled()
    gc.enable()
    assert was_on, "the test left the collector off"


class SeesTheCollector:
    """Pickled, it notes whether the collector is on."""

    def __init__(self):
        self.seen = []

    def __reduce__(self):
        self.seen.append(gc.isenabled())
        return dict, ()


def test_the_collector_is_off_within_and_on_again_after():
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_is_on_again_after_an_error():
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_a_decorated_function_pauses_at_every_call_and_when_it_calls_itself():
    @collector_paused()
    def depth_first(depth):
        below = depth_first(depth - 1) if depth else []
        return [*below, gc.isenabled()]

    for _ in range(2):
        assert depth_first(2) == [False] * 3
        assert gc.isenabled()


def test_a_collector_that_the_user_had_off_stays_off():
    gc.disable()
    try:
        with collector_paused(), collector_resumed():
            assert not gc.isenabled()
        with collector_resumed():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_thread_that_waits_lets_others_collect_and_pauses_again_behind_it():
    with collector_paused():
        with collector_paused(), collector_resumed():
            assert gc.isenabled()
        assert not gc.isenabled()


def test_what_was_held_off_does_not_come_before_storage_is_asked():
    collections = []

    def note(phase, info):
        collections.append(info["generation"])

    def make(count):
        return [[i] for i in range(count)]

    gc.collect()
    kept = []
    while gc.get_count()[1] <= gc.get_threshold()[1]:  # until the next collection is one of older objects, too
        kept.append(make(100))
    with collector_paused():
        kept.append(make(10_000))
        gc.callbacks.append(note)
        try:
            with collector_resumed():
                asked = make(100)
                before, collections[:] = set(collections), []
                others = [make(1000) for _ in range(100)]
                assert collections, "others' garbage is collected meanwhile"
        finally:
            gc.callbacks.remove(note)
    assert before == {0} and kept and others and asked


def test_the_pause_of_threads_ends_with_the_last_one():
    inside, go_on = threading.Barrier(3), [threading.Event(), threading.Event()]
    seen_in_wait = []

    def pause_until(event, waits):
        with collector_paused():
            inside.wait(10)
            event.wait(10)
            if waits:
                with collector_resumed():
                    seen_in_wait.append(gc.isenabled())

    threads = [threading.Thread(target=pause_until, args=(event, i == 0)) for i, event in enumerate(go_on)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    for thread, event, on_then in zip(threads, go_on, (False, True), strict=True):
        assert not gc.isenabled()
        event.set()
        thread.join(10)
        assert gc.isenabled() == on_then
    assert seen_in_wait == [False], "the other one had not ended"


@pytest.mark.parametrize("line", ["disable", "isenabled", "enable"])
def test_ctrl_c_at_any_place_leaves_the_collector_on_and_later_pauses_whole(monkeypatch, line):
    class Interrupted:
        def __getattr__(self, name):
            def call():
                found = getattr(gc, name)()
                if name == line:
                    monkeypatch.setattr(pause, "gc", gc)
                    raise KeyboardInterrupt
                return found

            return call

    monkeypatch.setattr(pause, "gc", Interrupted())
    with pytest.raises(KeyboardInterrupt), collector_paused():
        pass
    assert gc.isenabled()
    test_the_collector_is_off_within_and_on_again_after()


def test_a_signal_handler_may_save_while_a_pause_begins(monkeypatch, tmp_path):
    """As one of SIGTERM does, before its machine is taken away."""

    class Signalled:
        def __getattr__(self, name):
            if name == "disable":
                monkeypatch.setattr(pause, "gc", gc)
                signal.raise_signal(signal.SIGUSR1)
            return getattr(gc, name)

    before = signal.signal(signal.SIGUSR1, lambda *_: gdsdata.save(STATE, tmp_path / "last.pt"))
    try:
        monkeypatch.setattr(pause, "gc", Signalled())
        with collector_paused():
            assert not gc.isenabled()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (tmp_path / "last.pt").exists() and gc.isenabled()


def test_a_child_forked_within_a_pause_collects():
    with collector_paused():
        child = os.fork()
        if child == 0:
            ends_well = gc.isenabled()
            with collector_paused():
                ends_well = ends_well and not gc.isenabled()
            os._exit(0 if ends_well and gc.isenabled() else 1)
        assert not gc.isenabled()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_that_leaves_the_pause_it_was_forked_in_collects():
    child = None
    with collector_paused():
        child = os.fork()
    if child == 0:
        os._exit(0 if gc.isenabled() and not pause._pausing else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ------------------------------------------------------------------------------------------------ who pauses


def save(state, path):
    gdsdata.save(state, path / "a.pt")


def save_by_hook(state, path):
    with gdsdata.torch_hooks():
        torch.save(state, path / "a.pt")


def save_in_the_background(state, path):
    with gdsdata.AsyncCheckpointer(path) as checkpointer:
        checkpointer.save(1, {"state": state})


@pytest.mark.parametrize("save_it", [save, save_by_hook, save_in_the_background])
def test_the_collector_waits_while_a_state_is_pickled(tmp_path, save_it):
    sees = SeesTheCollector()
    save_it({**STATE, "sees": sees}, tmp_path)
    assert sees.seen == [False]
    assert gc.isenabled()


@pytest.fixture
def seen_in_waits(monkeypatch):
    """Whether the collector was on in each call that waits for storage. A save's threads begin theirs while the saving
    one still has others to prepare: it comes on when that one waits, too."""
    from gdsdata import engine
    from gdsdata.checkpoint import reading

    found = []

    class Output:
        def __init__(self, *arguments):
            self._output = made(*arguments)

        def write(self, *arguments):
            found.append(eventually(gc.isenabled))
            return self._output.write(*arguments)

        def commit(self):
            found.append(gc.isenabled())
            return self._output.commit()

    def read(self, *arguments):
        found.append(gc.isenabled())
        return read_before(self, *arguments)

    made, read_before = engine.Output, reading.Reading._read
    monkeypatch.setattr(engine, "Output", Output)
    monkeypatch.setattr(reading.Reading, "_read", read)
    return found


class SeesTheCollectorPlanning:
    fails = False

    def create_local_plan(self):
        self.seen = gc.isenabled()
        if self.fails:
            raise KeyError("a planner of its own")
        return super().create_local_plan()


class LoadPlanner(SeesTheCollectorPlanning, dcp.DefaultLoadPlanner):
    pass


class SavePlanner(SeesTheCollectorPlanning, dcp.DefaultSavePlanner):
    pass


def test_the_collector_waits_while_dcp_plans(tmp_path):
    saving, loading = SavePlanner(), LoadPlanner()
    dcp.save(STATE, storage_writer=gdsdata.GDSStorageWriter(tmp_path), planner=saving)
    assert saving.seen is False and gc.isenabled()
    dcp.load(STATE, storage_reader=gdsdata.GDSStorageReader(tmp_path), planner=loading)
    assert loading.seen is False and gc.isenabled()


def test_who_looks_at_the_metadata_alone_has_the_collector_again_soon(tmp_path):
    dcp.save(STATE, storage_writer=gdsdata.GDSStorageWriter(tmp_path))
    gdsdata.GDSStorageReader(tmp_path).read_metadata()
    assert eventually(gc.isenabled)


def test_a_long_pause_ends_by_itself():
    long = pause.LongPause()
    long.begin(0.05)
    assert eventually(gc.isenabled)
    long.begin(60)
    assert not gc.isenabled()
    long.end()
    assert gc.isenabled()


def test_a_reader_and_a_writer_that_have_done_their_work_are_pickled(tmp_path):
    writer, reader = gdsdata.GDSStorageWriter(tmp_path), gdsdata.GDSStorageReader(tmp_path)
    dcp.save(STATE, storage_writer=writer)
    dcp.load(STATE, storage_reader=reader)
    assert [pickle.loads(pickle.dumps(one)).path for one in (writer, reader)] == [tmp_path, tmp_path]


def test_a_planner_that_fails_leaves_the_collector_off_for_no_longer_than_the_pause_lasts(tmp_path):
    planner = SavePlanner()
    planner.fails = True
    with pytest.raises(dcp.api.CheckpointException):
        dcp.save(STATE, storage_writer=gdsdata.GDSStorageWriter(tmp_path), planner=planner)
    assert planner.seen is False and eventually(gc.isenabled)
    dcp.save(STATE, storage_writer=gdsdata.GDSStorageWriter(tmp_path))
    planner = LoadPlanner()
    planner.fails = True
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(STATE, storage_reader=gdsdata.GDSStorageReader(tmp_path), planner=planner)
    assert planner.seen is False and eventually(gc.isenabled)


def test_the_collector_is_on_where_there_is_no_checkpoint_to_plan_for(tmp_path):
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(STATE, storage_reader=gdsdata.GDSStorageReader(tmp_path))
    assert gc.isenabled()


def test_a_long_pause_that_is_begun_again_lasts_anew_and_ends_once():
    long = pause.LongPause()
    long.begin(60)
    long.begin(60)
    assert not gc.isenabled()
    long.end()
    long.end()
    assert gc.isenabled()


@pytest.mark.parametrize(("first_s", "then_s"), [(0.05, 0.3), (60, 0.3)])
def test_a_long_pause_that_is_begun_again_ends_by_itself_when_the_last_one_does(first_s, then_s):
    long = pause.LongPause()
    long.begin(first_s)
    long.begin(then_s)
    time.sleep(0.15)
    assert not gc.isenabled()
    assert eventually(gc.isenabled)
    pickle.dumps(long)


def test_the_collector_is_on_while_storage_is_waited_for(tmp_path, seen_in_waits):
    """Training goes on meanwhile where another thread saves, and its garbage may hold memory of a GPU."""
    for path in (tmp_path / "a.pt", tmp_path / "a.safetensors"):
        gdsdata.save(STATE, path)
        assert seen_in_waits and all(seen_in_waits)
        seen_in_waits.clear()
        gdsdata.load(path)
        gdsdata.load(path, into={name: torch.empty_like(one) for name, one in STATE.items()})
        assert len(seen_in_waits) == 2 and all(seen_in_waits)
        seen_in_waits.clear()


def test_the_collector_is_on_while_a_save_of_dcp_in_the_background_waits_for_storage(tmp_path, seen_in_waits):
    dcp.async_save(dict(STATE), storage_writer=gdsdata.GDSStorageWriter(tmp_path / "a"), no_dist=True).result()
    assert seen_in_waits and all(seen_in_waits)
    seen_in_waits.clear()
    dcp.load(dict(STATE), storage_reader=gdsdata.GDSStorageReader(tmp_path / "a"), no_dist=True)
    assert seen_in_waits and all(seen_in_waits)

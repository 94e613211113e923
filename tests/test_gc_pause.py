"""Python's garbage collector while checkpoints are saved and loaded."""

import contextlib
import gc
import json
import os
import pickle
import signal
import threading
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import eventually, interrupted_at_call

import gdsdata
import gdsdata.safetensors
from gdsdata.checkpoint import gc_pause
from gdsdata.checkpoint.gc_pause import collector_paused, collector_resumed
from gdsdata.checkpoint.safetensors.weights import open_weights
from gdsdata.formats.parsers import safetensors_header

STATE = {"a": torch.arange(5000.0), "b": torch.ones(3)}


THRESHOLDS = gc.get_threshold()


@pytest.fixture(autouse=True)
def collector_is_on_before_and_after():
    assert gc.isenabled()
    yield
    left = gc.isenabled(), gc.get_threshold()
    gc.enable()
    gc.set_threshold(*THRESHOLDS)
    assert left == (True, THRESHOLDS), "the test left the collector off, or changed"


def collects() -> bool:
    """Return whether many new objects cause a collection."""
    seen = []

    def note(phase, info):
        seen.append(phase)

    gc.callbacks.append(note)
    try:
        _ = [[i] for i in range(3 * THRESHOLDS[0])]
    finally:
        gc.callbacks.remove(note)
    return bool(seen)


class DisablesWhenLoaded:
    def __reduce__(self):
        return gc.disable, ()


class SeesTheCollector:
    """Notes, when it is pickled, whether the collector is on."""

    def __init__(self):
        self.seen = []

    def __reduce__(self):
        self.seen.append(collects())
        return dict, ()


def test_the_collector_is_off_within_and_on_again_after():
    with collector_paused():
        assert not collects()
    assert collects()


def test_the_collector_is_on_again_after_an_error():
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert collects()


def test_a_decorated_function_pauses_at_every_call_and_when_it_calls_itself():
    @collector_paused()
    def depth_first(depth):
        below = depth_first(depth - 1) if depth else []
        return [*below, collects()]

    for _ in range(2):
        assert depth_first(2) == [False] * 3
        assert collects()


@pytest.fixture
def counted():
    """Count the collections by generation."""
    seen = []

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


@pytest.mark.parametrize(
    ("turn_off", "turn_on"),
    [(gc.disable, gc.enable), (lambda: gc.set_threshold(0), lambda: gc.set_threshold(*THRESHOLDS))],
)
def test_a_collector_that_the_user_had_off_stays_off_and_never_runs(counted, turn_off, turn_on):
    turn_off()
    try:
        before = gc.isenabled(), gc.get_threshold()
        counted.clear()
        with collector_paused(), collector_resumed():
            assert not collects()
        with collector_resumed():
            assert not collects()
        assert not collects() and not counted
        assert (gc.isenabled(), gc.get_threshold()) == before
    finally:
        turn_on()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("then", [True, False])
def test_gc_enable_and_disable_during_a_pause_are_kept(before, then):
    (gc.enable if before else gc.disable)()
    try:
        with collector_paused():
            (gc.enable if then else gc.disable)()
            assert not collects()
            with collector_resumed():
                assert collects() == then
        assert gc.isenabled() == then and collects() == then
    finally:
        gc.enable()


def test_a_threshold_that_the_user_sets_during_a_pause_is_kept():
    for thresholds in ((3000, 20, 20), (0, 10, 10)):
        with collector_paused():
            gc.set_threshold(*thresholds)
            with collector_resumed():
                assert gc.get_threshold()[0] == thresholds[0]
            with collector_paused():
                pass
        assert gc.get_threshold() == thresholds
    gc.set_threshold(*THRESHOLDS)


@pytest.mark.parametrize("where", ["save", "load", "background", "dcp save", "dcp load"])
def test_gc_disable_in_the_middle_of_a_checkpoint_call_lasts(tmp_path, where):
    class Disables:
        def __reduce__(self):
            gc.disable()
            return dict, ()

    class Disabling(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, item):
            gc.disable()
            return super().resolve_tensor(item)

    state = {**STATE, "x": Disables()} if where.startswith(("save", "back")) else dict(STATE)
    try:
        if where == "save":
            gdsdata.save(state, tmp_path / "x.pt")
        elif where == "load":
            gdsdata.save({**STATE, "x": DisablesWhenLoaded()}, tmp_path / "x.pt")
            gdsdata.load(tmp_path / "x.pt", weights_only=False)
        elif where == "background":
            with gdsdata.AsyncCheckpointer(tmp_path) as checkpointer:
                checkpointer.save(1, state)
        else:
            planner = SavePlanner()
            planner.call = gc.disable
            dcp.save(state, storage_writer=gdsdata.GDSStorageWriter(tmp_path), planner=planner, no_dist=True)
            if where == "dcp load":
                gc.enable()
                dcp.load(state, storage_reader=gdsdata.GDSStorageReader(tmp_path), planner=Disabling(), no_dist=True)
        assert not gc.isenabled() and not collects()
    finally:
        gc.enable()
    assert collects()


def test_a_thread_that_waits_lets_others_collect_and_pauses_again_behind_it():
    with collector_paused():
        with collector_paused(), collector_resumed():
            assert collects()
        assert not collects()


def test_delayed_collections_of_older_objects_wait_until_storage_is_asked():
    collections = []

    def note(phase, info):
        collections.append(info["generation"])

    def make(count):
        return [[i] for i in range(count)]

    gc.collect()
    kept = []
    while gc.get_count()[1] <= gc.get_threshold()[1]:  # until the next collection includes older objects
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


@pytest.mark.parametrize("made", [1, 200], ids=["few objects", "many objects"])
def test_garbage_of_the_middle_generation_goes_while_a_program_saves_all_the_time(made):
    class Cycle:
        def __init__(self):
            self.itself = self

    gc.collect()
    gc.set_threshold(100, 5, THRESHOLDS[2])
    try:
        alive = []
        for _ in range(1000):
            cycle = Cycle()
            with collector_paused():
                kept = [[i] for i in range(made)]
            alive.append(weakref.ref(cycle))
            del cycle
        assert kept and sum(one() is not None for one in alive) < 800
    finally:
        gc.set_threshold(*THRESHOLDS)


def test_the_pause_of_threads_ends_with_the_last_one():
    inside, go_on = threading.Barrier(3), [threading.Event(), threading.Event()]
    seen_in_wait = []

    def pause_until(event, waits):
        with collector_paused():
            inside.wait(10)
            event.wait(10)
            if waits:
                with collector_resumed():
                    seen_in_wait.append(collects())

    threads = [threading.Thread(target=pause_until, args=(event, i == 0)) for i, event in enumerate(go_on)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    for thread, event, on_then in zip(threads, go_on, (False, True), strict=True):
        assert not collects()
        event.set()
        thread.join(10)
        assert collects() == on_then
    assert seen_in_wait == [False], "the other pause had not ended"


@pytest.mark.parametrize("line", ["set_threshold", "get_threshold", "isenabled", "collect"])
@pytest.mark.parametrize("time", [1, 2, 3])
def test_ctrl_c_at_any_place_leaves_the_collector_on_and_later_pauses_whole(monkeypatch, line, time):
    calls = []

    class Interrupted:
        def __getattr__(self, name):
            def call(*arguments):
                found = getattr(gc, name)(*arguments)
                calls.append(name)
                if name == line and calls.count(line) == time:
                    monkeypatch.setattr(gc_pause, "gc", gc)
                    raise KeyboardInterrupt
                return found

            return call

    monkeypatch.setattr(gc_pause, "gc", Interrupted())
    try:
        with collector_paused():
            pass
    except KeyboardInterrupt:
        pass
    else:
        assert calls.count(line) < time, "the line was not interrupted"
    monkeypatch.setattr(gc_pause, "gc", gc)
    assert collects()
    test_the_collector_is_off_within_and_on_again_after()


@contextlib.contextmanager
def paused_and_resumed():
    with collector_paused(), collector_resumed():
        yield


def test_ctrl_c_as_a_call_begins_leaves_the_collector_on():
    """Python handles a signal that came during a long call as the next call begins."""
    number = 1
    while interrupted_at_call(number, paused_and_resumed, gc_pause):
        gc.collect()  # a block whose end was interrupted ends here
        assert collects(), f"call {number}"
        test_the_collector_is_off_within_and_on_again_after()
        number += 1
    assert number > 10


def test_a_signal_handler_may_save_while_a_pause_begins(monkeypatch, tmp_path):
    """A handler of SIGTERM does so before its machine is taken away."""

    class Signalled:
        def __getattr__(self, name):
            if name == "set_threshold":
                monkeypatch.setattr(gc_pause, "gc", gc)
                signal.raise_signal(signal.SIGUSR1)
            return getattr(gc, name)

    before = signal.signal(signal.SIGUSR1, lambda *_: gdsdata.save(STATE, tmp_path / "last.pt"))
    try:
        monkeypatch.setattr(gc_pause, "gc", Signalled())
        with collector_paused():
            assert not collects()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (tmp_path / "last.pt").exists() and collects()


def test_a_child_forked_within_a_pause_collects():
    with collector_paused():
        child = os.fork()
        if child == 0:
            ends_well = collects()
            with collector_paused():
                ends_well = ends_well and not collects()
            os._exit(0 if ends_well and collects() else 1)
        assert not collects()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_that_leaves_the_pause_it_was_forked_in_collects():
    child = None
    with collector_paused():
        child = os.fork()
    if child == 0:
        os._exit(0 if collects() and not gc_pause._pausing else 1)
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
    assert collects()


def test_a_restore_collects_no_more_often_for_many_tensors(tmp_path):
    """Each of 200,000 tensors took 3 us for collections behind the load, some of them full."""

    def collections(tensors):
        state = {"state": {f"{i}": torch.full((1,), float(i)) for i in range(tensors)}}
        with gdsdata.AsyncCheckpointer(tmp_path / f"{tensors}") as checkpointer:
            checkpointer.save(1, state)
            checkpointer.wait()
            target = {"state": {name: torch.zeros(1) for name in state["state"]}}
            gc.collect()
            before = sum(generation["collections"] for generation in gc.get_stats())
            assert checkpointer.restore(target) == 1
            after = sum(generation["collections"] for generation in gc.get_stats())
        assert all(map(torch.equal, target["state"].values(), state["state"].values()))
        return after - before

    assert collections(10_000) <= collections(10) + 3  # one for each of three pauses


@pytest.mark.parametrize("opened", ["load_file", "safe_open", "weights", "index"])
def test_the_collector_waits_while_headers_are_parsed(tmp_path, monkeypatch, opened):
    """With 20,000 tensors, full collections took half of `load_file` before."""
    gdsdata.safetensors.save_file(STATE, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(STATE, "a.safetensors")}))
    seen, parse = [], safetensors_header.parse

    def watched(*arguments, **more):
        seen.append(collects())
        return parse(*arguments, **more)

    monkeypatch.setattr(safetensors_header, "parse", watched)
    if opened == "load_file":
        gdsdata.safetensors.load_file(tmp_path / "a.safetensors")
    elif opened == "safe_open":
        gdsdata.safetensors.safe_open(tmp_path / "a.safetensors", "pt").keys()
    elif opened == "weights":
        open_weights([str(tmp_path / "a.safetensors")])
    else:
        gdsdata.load(index)
    assert seen == [False]
    assert collects()


@pytest.fixture
def seen_in_waits(monkeypatch):
    """Record, in each call that waits for storage, whether the collector was on.

    A save's threads call write while the saving thread still prepares others. The collector is
    enabled when that thread waits, too.
    """
    from gdsdata.checkpoint import tensor_reader
    from gdsdata.io import engine

    found = []

    class Output:
        def __init__(self, *arguments):
            self._output = made(*arguments)

        def write(self, *arguments, **named):
            found.append(eventually(collects))
            return self._output.write(*arguments, **named)

        def commit(self):
            found.append(collects())
            return self._output.commit()

    def read(self, *arguments):
        found.append(collects())
        return read_before(self, *arguments)

    made, read_before = engine.Output, tensor_reader.TensorReader._read
    monkeypatch.setattr(engine, "Output", Output)
    monkeypatch.setattr(tensor_reader.TensorReader, "_read", read)
    return found


class Planning:
    """A planner of the user's own. A test replaces `call`."""

    @staticmethod
    def call():
        pass

    def create_local_plan(self):
        self.call()
        return super().create_local_plan()


class LoadPlanner(Planning, dcp.DefaultLoadPlanner):
    pass


class SavePlanner(Planning, dcp.DefaultSavePlanner):
    pass


def test_the_collector_waits_while_metadata_is_unpickled_and_gdsdatas_planners_plan(tmp_path, monkeypatch):
    seen = {}

    def watched(owner, name):
        original = getattr(owner, name)

        def call(*arguments, **more):
            seen.setdefault((owner, name), collects())
            return original(*arguments, **more)

        monkeypatch.setattr(owner, name, call)

    from gdsdata.checkpoint.dcp import planner

    watched(dcp.FileSystemReader, "read_metadata")
    watched(planner, "_flattened")
    watched(planner, "_write_of_all")
    watched(planner, "_read_of_all")
    watched(planner, "_global_plan_of_one_rank")
    writer, reader = gdsdata.GDSStorageWriter(tmp_path), gdsdata.GDSStorageReader(tmp_path)
    dcp.save(dict(STATE), storage_writer=writer, planner=gdsdata.GDSSavePlanner(), no_dist=True)
    dcp.load(dict(STATE), storage_reader=reader, planner=gdsdata.GDSLoadPlanner(), no_dist=True)
    assert len(seen) == 5 and not any(seen.values()), seen
    assert collects()


def test_between_the_calls_of_a_reader_or_writer_the_collector_is_the_programs(tmp_path):
    """Torch's own planners and other ranks may take long between the calls, or fail."""
    seen = []

    def see():
        seen.append(collects())

    saving, loading = SavePlanner(), LoadPlanner()
    saving.call = loading.call = see
    dcp.save(dict(STATE), storage_writer=gdsdata.GDSStorageWriter(tmp_path), planner=saving, no_dist=True)
    dcp.load(dict(STATE), storage_reader=gdsdata.GDSStorageReader(tmp_path), planner=loading, no_dist=True)
    assert seen == [True, True]


def test_a_dcp_call_that_fails_leaves_the_collector_on_at_once(tmp_path):
    def fail():
        raise KeyError("a planner of its own")

    saving, loading = SavePlanner(), LoadPlanner()
    saving.call = loading.call = fail
    with pytest.raises(dcp.api.CheckpointException):
        dcp.save(dict(STATE), storage_writer=gdsdata.GDSStorageWriter(tmp_path), planner=saving, no_dist=True)
    assert collects()
    dcp.save(dict(STATE), storage_writer=gdsdata.GDSStorageWriter(tmp_path), no_dist=True)
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(dict(STATE), storage_reader=gdsdata.GDSStorageReader(tmp_path), planner=loading, no_dist=True)
    assert collects()
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(dict(STATE), storage_reader=gdsdata.GDSStorageReader(tmp_path / "none"), no_dist=True)
    assert collects()


def test_a_reader_and_a_writer_that_have_done_their_work_are_pickled(tmp_path):
    writer, reader = gdsdata.GDSStorageWriter(tmp_path), gdsdata.GDSStorageReader(tmp_path)
    dcp.save(STATE, storage_writer=writer)
    dcp.load(STATE, storage_reader=reader)
    assert [pickle.loads(pickle.dumps(one)).path for one in (writer, reader)] == [tmp_path, tmp_path]


def test_the_collector_is_on_while_storage_is_waited_for(tmp_path, seen_in_waits):
    """Other threads may train during a background save, and their garbage may hold GPU memory."""
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

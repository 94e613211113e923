"""Begin and end: however an iterator ends, nothing hangs and no resource is left."""

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    BACKENDS,
    MIB,
    anonymous_bytes,
    arrays,
    assert_same_batches,
    descriptors,
    eventually,
    exit_code_of_fork,
    grouped,
    in_new_process,
    interrupted_at_call,
    require_direct,
    run_script,
    start_script,
    threads,
    write_records,
)

from gdsdata import EngineOptions, GDSDataset, fork_safe, read_tensor, write_tensor
from gdsdata.errors import EngineClosed, GdsdataError
from gdsdata.fork_safe import fork_safe_lock
from gdsdata.formats import Records

pytestmark = pytest.mark.usefixtures("quick_programs")

RECORD_BYTES = 65536


@pytest.fixture
def records(tmp_path) -> np.ndarray:
    """Write 48 records of 64 KiB in tmp_path: 12 batches of 256 KiB."""
    return write_records(tmp_path / "0.bin", 48, RECORD_BYTES)


@pytest.fixture
def storage(tmp_path, records) -> None:
    """Require O_DIRECT, so that every read reaches storage and its faults: the file is cached."""
    require_direct(tmp_path / "0.bin")


def read(folder: Path, batch_size: int = 4, **arguments) -> GDSDataset:
    records = Records("u1", (RECORD_BYTES,))
    return GDSDataset(folder / "0.bin", batch_size, records, shuffle=False, device="cpu", **grouped(arguments))


def epoch_of(records: np.ndarray) -> list[np.ndarray]:
    return np.split(records, 12)


# ------------------------------------------------------------------------------------------------ nothing is left


def whole_epoch(folder: Path, options: EngineOptions) -> None:
    for _ in read(folder, options=options):
        pass


def break_out_of_the_loop(folder: Path, options: EngineOptions) -> None:
    for _ in read(folder, options=options):
        break


def raise_in_the_loop(folder: Path, options: EngineOptions) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for _ in read(folder, options=options):
            raise ZeroDivisionError


def delete_the_data_set_first(folder: Path, options: EngineOptions) -> None:
    dataset = read(folder, options=options)
    batches = iter(dataset)
    next(batches)
    del dataset
    next(batches)


def never_start_the_iterator(folder: Path, options: EngineOptions) -> None:
    iter(read(folder, options=options))


def hold_a_batch_beyond_the_end(folder: Path, options: EngineOptions) -> None:
    batches = iter(read(folder, options=options))
    batch = next(batches)
    del batches
    batch.numpy()[:] = 1  # torch would start threads for it


def run_into_a_missing_file(folder: Path, options: EngineOptions) -> None:
    dataset = read(folder, options=options)
    os.rename(folder / "0.bin", folder / "away")
    with contextlib.suppress(FileNotFoundError):
        for _ in dataset:
            pass
    os.rename(folder / "away", folder / "0.bin")


def run_into_a_failing_disk(folder: Path, options: EngineOptions) -> None:
    dataset = read(folder, options=EngineOptions(backend=options.backend, direct="always", faults="fail=1"))
    with contextlib.suppress(GdsdataError):
        for _ in dataset:
            pass


def left_by(action: Callable, folder: Path, backend: str, times: int) -> dict[str, int]:
    """Return how many threads, descriptors and anonymous bytes a repeated action leaves."""
    options = EngineOptions(backend=backend, workers=2)
    torch.ones(10).add_(1)
    threads_before, descriptors_before = threads(), descriptors()
    for _ in range(3):  # what is allocated once and kept (heaps of threads, imports) is no leak
        action(folder, options)
    gc.collect()
    bytes_before = anonymous_bytes()
    for _ in range(times):
        action(folder, options)
    gc.collect()
    eventually(lambda: threads() <= threads_before)  # the kernel ends io_uring's helpers a moment later
    return {
        "threads": threads() - threads_before,
        "descriptors": descriptors() - descriptors_before,
        "bytes": anonymous_bytes() - bytes_before,
    }


ACTIONS = [
    *(whole_epoch, break_out_of_the_loop, raise_in_the_loop, delete_the_data_set_first, never_start_the_iterator),
    *(hold_a_batch_beyond_the_end, run_into_a_missing_file, run_into_a_failing_disk),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_no_thread_descriptor_or_memory_is_left_by(tmp_path, storage, action, backend):
    left = in_new_process(left_by, action, tmp_path, backend, 50)
    assert left["threads"] <= 0 and left["descriptors"] <= 0
    assert left["bytes"] < 4 * MIB  # 50 lost batches would be 12 MiB, 50 lost rings 50 MiB


def left_by_one_data_set(folder: Path, backend: str) -> tuple[int, int, int]:
    """Do the same for 50 loops over one data set that stays, all of them broken off."""
    dataset = read(folder, options=EngineOptions(backend=backend, workers=2))
    break_out = lambda: next(iter(dataset))  # noqa: E731
    break_out()
    before = threads(), descriptors(), anonymous_bytes()
    for _ in range(50):
        break_out()
    return tuple(after - one for after, one in zip((threads(), descriptors(), anonymous_bytes()), before, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_loops_broken_off_leave_no_more_than_the_first_one(tmp_path, records, backend):
    more_threads, more_descriptors, more_bytes = in_new_process(left_by_one_data_set, tmp_path, backend)
    assert more_threads <= 0 and more_descriptors <= 0 and more_bytes < 4 * MIB


def left_by_tensors(folder: Path) -> tuple[int, int, int]:
    def there_and_back() -> None:
        write_tensor(torch.zeros(MIB, dtype=torch.uint8), folder / "x")
        write_tensor(torch.ones(5000, dtype=torch.uint8), folder / "x", 3)
        read_tensor(folder / "x", torch.uint8, (MIB,))
        with contextlib.suppress(GdsdataError):
            read_tensor(folder / "x", torch.uint8, (MIB + 1,))

    for _ in range(40):  # bounce memory is touched bit by bit
        there_and_back()
    before = threads(), descriptors(), anonymous_bytes()
    for _ in range(60):
        there_and_back()
    # A worker closes the file just after it has notified the caller.
    eventually(lambda: threads() <= before[0] and descriptors() <= before[1])
    return tuple(after - one for after, one in zip((threads(), descriptors(), anonymous_bytes()), before, strict=True))


def test_tensors_read_and_written_leave_no_thread_descriptor_or_memory(tmp_path):
    more_threads, more_descriptors, more_bytes = in_new_process(left_by_tensors, tmp_path)
    assert more_threads <= 0 and more_descriptors <= 0
    assert more_bytes < 16 * MIB  # 60 lost tensors would be 60 MiB


def test_data_sets_with_equal_options_share_one_engine(tmp_path, records):
    counts = in_new_process(threads_of_data_sets, tmp_path)
    assert counts["none"] < counts["one"] == counts["ten"]


def threads_of_data_sets(folder: Path) -> dict[str, int]:
    counts, options = {"none": threads()}, EngineOptions(backend="posix", workers=3)
    iterators = [iter(read(folder, options=options))]
    next(iterators[0])
    counts["one"] = threads()
    iterators += [iter(read(folder, options=options)) for _ in range(9)]
    for batches in iterators:
        next(batches)
    counts["ten"] = threads()
    return counts


def test_making_a_data_set_starts_no_thread(tmp_path, records):
    assert in_new_process(threads_of_a_new_data_set, tmp_path) == 0


def threads_of_a_new_data_set(folder: Path) -> int:
    before = threads()
    dataset = read(folder)
    len(dataset), dataset.state_dict()
    return threads() - before


def test_batches_read_ahead_but_not_taken_stay_in_the_epoch(tmp_path, records):
    assert in_new_process(batches_behind_one_that_nobody_asked, tmp_path) == 12


def batches_behind_one_that_nobody_asked(folder: Path) -> int:
    dataset = read(folder)
    batches = iter(dataset)
    while not any(dataset.stats()["engine"]["bytes"].values()):  # the test's process may take a minute
        time.sleep(0.001)
    del batches
    return len(list(dataset))


# --------------------------------------------------------------------------------------------------------- Ctrl-C

LOOP = f"""
import signal, sys, time
import gdsdata
from gdsdata.formats import Records
signal.signal(signal.SIGINT, signal.default_int_handler)
path, faults, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
dataset = gdsdata.GDSDataset(path, 4, Records("u1", ({RECORD_BYTES},)), device="cpu",
                             reading=gdsdata.Reading(gdsdata.EngineOptions(direct="always", faults=faults)))
if faults:
    print("waiting", flush=True)
for batch in dataset:
    print("in the loop", flush=True)
    time.sleep(pause)
print("not interrupted")
"""


@pytest.mark.parametrize(
    ("line", "faults", "pause"),
    [("in the loop", "", 60), ("waiting", "late=1,late_ms=20000", 0)],
    ids=["in the loop", "blocked in next"],
)
@pytest.mark.whole_end
def test_ctrl_c_ends_a_program(tmp_path, storage, line, faults, pause):
    process = start_script(LOOP, tmp_path / "0.bin", faults, pause)
    assert process.stdout.readline() == f"{line}\n", process.stderr.read()
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    stdout, stderr = process.communicate(timeout=30)
    assert time.monotonic() - began < 8
    assert process.returncode == -signal.SIGINT and stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert "not interrupted" not in stdout


def seconds_to_a_keyboard_interrupt(folder: Path, options: EngineOptions, batch_size: int = 4) -> float:
    """Return the seconds from SIGINT to the end of a loop and its iterator on slow storage."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dataset = read(folder, batch_size, options=options)
    sent = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.3, interrupt).start()
    try:
        for _ in dataset:
            pass
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]
    raise AssertionError("not interrupted")


@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_does_not_wait_for_storage_that_hangs(tmp_path, storage, backend):
    options = EngineOptions(backend=backend, direct="always", faults="late=1,late_ms=4000")
    assert in_new_process(seconds_to_a_keyboard_interrupt, tmp_path, options) < 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_drops_the_requests_that_were_not_started(tmp_path, storage, backend):
    # One batch of 48 requests, one after another, each late. Only those in flight are waited for.
    options = EngineOptions(
        backend=backend,
        direct="always",
        workers=1,
        queue_depth=1,
        request_bytes=65536,
        segment_bytes=16 * MIB,
        faults="late=1,late_ms=100",
    )
    assert in_new_process(seconds_to_a_keyboard_interrupt, tmp_path, options, 48) < 1


def test_ctrl_c_leaves_a_data_set_that_can_be_iterated_again(tmp_path, storage, records):
    outcome = in_new_process(epoch_after_ctrl_c, tmp_path)
    assert_same_batches(outcome, epoch_of(records))


def epoch_after_ctrl_c(folder: Path) -> list[np.ndarray]:
    dataset = read(folder, prefetch=6, options=EngineOptions(direct="always", faults="late=1,late_ms=300"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        arrays(dataset)
    except KeyboardInterrupt:
        return arrays(dataset)
    raise AssertionError("not interrupted")


# ----------------------------------------------------------------------------------------------- interpreter exit

PROGRAM = f"""
import sys, threading, time
import gdsdata
from gdsdata.formats import Records
def read(**options):
    return gdsdata.GDSDataset(sys.argv[1], 4, Records("u1", ({RECORD_BYTES},)), device="cpu",
                              reading=gdsdata.Reading(gdsdata.EngineOptions(**options)))
"""


@pytest.mark.whole_end
def test_the_interpreter_ends_with_iterators_alive_and_batches_held(tmp_path, storage):
    program = """
iterators = [iter(read()), iter(read(backend="posix")), iter(read(direct="always"))]
held = [next(batches) for batches in iterators for _ in range(3)]
cycle = [held, iterators]; cycle.append(cycle)
"""
    assert run_script(PROGRAM + program, tmp_path / "0.bin") == (0, "", "")


@pytest.mark.whole_end
def test_the_interpreter_ends_by_an_exception_in_the_loop(tmp_path, records):
    program = """
for batch in read():
    raise ZeroDivisionError("mine")
"""
    code, _, stderr = run_script(PROGRAM + program, tmp_path / "0.bin")
    assert code == 1 and stderr.splitlines()[-1] == "ZeroDivisionError: mine"


@pytest.mark.whole_end
def test_the_interpreter_ends_while_a_daemon_thread_waits_for_a_batch(tmp_path, storage):
    program = """
batches = iter(read(direct="always", faults="late=1,late_ms=1000"))
threading.Thread(target=next, args=(batches,), daemon=True).start()
time.sleep(0.2)
"""
    code, _, stderr = run_script(PROGRAM + program, tmp_path / "0.bin")
    assert code == 0, "the thread came back into an interpreter that was gone"
    assert not stderr or "EngineClosed" in stderr or "Exception in thread" in stderr


@pytest.mark.whole_end
def test_the_thread_that_completes_futures_ends_before_the_interpreter(tmp_path):
    """If it did not, torch would end the process: it releases the GIL when it frees a tensor."""
    (tmp_path / "a").write_bytes(bytes(1000))
    program = """
import sys, time, torch, gdsdata
values = torch.ones(300, 300)
def busy(_):
    until = time.monotonic() + 0.4
    while time.monotonic() < until:
        values @ values
engine = gdsdata.Engine()
engine.read(sys.argv[1], torch.empty(1000, dtype=torch.uint8)).add_done_callback(busy)
"""
    assert run_script(program, tmp_path / "a") == (0, "", "")


@pytest.mark.whole_end
def test_a_daemon_thread_does_not_free_the_data_set_while_the_interpreter_ends(tmp_path, storage):
    # Freeing a tensor may release the GIL. A thread that now takes it again ends the process.
    program = """
class Watched(gdsdata.GDSDataset):
    def __del__(self):
        print(threading.current_thread() is threading.main_thread())
options = gdsdata.EngineOptions(direct="always", faults="late=1,late_ms=1000")
batches = iter(Watched(sys.argv[1], 4, Records("u1", (512,)), device="cpu", reading=gdsdata.Reading(options)))
threading.Thread(target=next, args=(batches,), daemon=True).start()
time.sleep(0.2)
"""
    code, stdout, stderr = run_script(PROGRAM + program, tmp_path / "0.bin")
    assert (code, stdout) in [(0, "True\n"), (0, "")], stderr


@pytest.mark.parametrize("call", ["read(path, 0, ", "write_whole(path, "])
@pytest.mark.whole_end
def test_the_interpreter_ends_while_a_daemon_thread_reads_or_writes(tmp_path, storage, call):
    program = f"""
import sys, threading, time, torch, gdsdata
from gdsdata.io.engine import shared_engine
options = gdsdata.EngineOptions(direct="always", faults="late=1,late_ms=1500")
engine, path, tensor = shared_engine(options, torch.device("cpu")), sys.argv[1], torch.zeros(4096, dtype=torch.uint8)
before = engine.mark(0)
threading.Thread(target=lambda: engine.{call}tensor, before, True), daemon=True).start()
time.sleep(0.2)
"""
    code, _, stderr = run_script(program, tmp_path / "0.bin")
    assert code == 0, f"the thread came back into an interpreter that was gone: {stderr}"
    assert not stderr or "EngineClosed" in stderr or "Exception in thread" in stderr


@pytest.mark.whole_end
def test_a_forked_child_ends_like_any_program(tmp_path, records):
    program = """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of fork with threads, from Python 3.12 on
batches = iter(read())
held = next(batches)
child = os.fork()
if child == 0:
    mine = [next(iter(read())), held]
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert sum(1 for _ in batches) == 11
"""
    assert run_script(PROGRAM + program, tmp_path / "0.bin") == (0, "", "")


# ----------------------------------------------------------------------------------------------------------- fork

# Each runs in a process of its own, because a forked child would lack the threads of pytest's.


def fork_before_use(folder: Path, expected: np.ndarray) -> list[int]:
    dataset = read(folder)
    child = exit_code_of_fork(lambda: assert_same_batches(dataset, epoch_of(expected)))
    assert_same_batches(dataset, epoch_of(expected))
    return [child]


def fork_after_use(folder: Path, expected: np.ndarray) -> list[int]:
    dataset = read(folder)
    codes = []
    for _ in range(5):
        next(iter(dataset))
        codes.append(exit_code_of_fork(lambda: assert_same_batches(dataset, epoch_of(expected))))
    dataset.set_epoch(0)
    assert_same_batches(dataset, epoch_of(expected))
    return codes


def fork_while_iterating(folder: Path, expected: np.ndarray) -> list[int]:
    """The child iterates this data set and another one, and reads a state."""

    def child() -> None:
        state = dataset.state_dict()
        assert (state["epoch"], state["batches"]) == divmod(len(got), 12)
        assert_same_batches(dataset, epoch_of(expected))
        assert_same_batches(read(folder), epoch_of(expected))
        assert dataset.stats()["batches"] >= 12

    dataset, got, codes = read(folder), [], []
    for batch in dataset:
        got.append(batch.numpy().copy())
        codes.append(exit_code_of_fork(child))
    assert_same_batches(got, epoch_of(expected))
    return codes


def fork_and_drop(folder: Path, expected: np.ndarray) -> list[int]:
    """The child drops the parent's iterator and batches, without effect on the parent's reads."""
    dataset, got, codes, held = read(folder, prefetch=8), [], [], []
    batches = iter(dataset)

    def child() -> None:
        nonlocal batches
        batches = None
        held.clear()
        gc.collect()

    for _ in range(12):
        held.append(next(batches))
        got.append(held[-1].numpy().copy())
        codes.append(exit_code_of_fork(child))
    assert_same_batches(got, epoch_of(expected))
    return codes


def fork_and_use_tensors(folder: Path, expected: np.ndarray) -> list[int]:
    def there_and_back() -> None:
        path = folder / str(os.getpid())
        write_tensor(torch.arange(1000), path)
        assert torch.equal(read_tensor(path, torch.int64, (1000,)), torch.arange(1000))

    there_and_back()
    return [exit_code_of_fork(there_and_back) for _ in range(5)]


def fork_and_touch_the_parents_iterator(folder: Path, expected: np.ndarray) -> list[int]:
    """The child gets batches that were ready, or `EngineClosed`, but no wait and no wrong bytes."""

    def child() -> None:
        count = len(got)
        try:
            for batch in batches:
                assert batch.numpy().tobytes() == epoch_of(expected)[count].tobytes()
                count += 1
        except EngineClosed as error:
            assert "does not work in its forked child" in str(error)
        else:
            assert count == 12, "a part of the epoch is missing, with no error"

    dataset, got, codes = read(folder, prefetch=2), [], []
    batches = iter(dataset)
    for batch in batches:
        got.append(batch.numpy().copy())
        codes.append(exit_code_of_fork(child))
    assert_same_batches(got, epoch_of(expected))
    return codes


def fork_and_touch_an_iterator_that_waits_for_its_disk(folder: Path, expected: np.ndarray) -> list[int]:
    def child() -> None:
        try:
            next(batches)
        except EngineClosed as error:
            assert "does not work in its forked child" in str(error)
        else:
            raise AssertionError("a batch came out of nowhere")

    dataset = read(folder, prefetch=2, options=EngineOptions(direct="always", faults="late=1,late_ms=200"))
    batches = iter(dataset)
    first = arrays(next(batches) for _ in range(6))  # the next two are in flight, and all others are planned
    codes = [exit_code_of_fork(child, timeout_s=3)]
    assert_same_batches([*first, *arrays(batches)], epoch_of(expected))
    return codes


FORKS = [
    *(fork_before_use, fork_after_use, fork_while_iterating, fork_and_drop, fork_and_use_tensors),
    *(fork_and_touch_the_parents_iterator, fork_and_touch_an_iterator_that_waits_for_its_disk),
]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("forks", FORKS, ids=lambda forks: forks.__name__)
def test_parent_and_child_both_get_their_batches_after(tmp_path, storage, records, forks):
    codes = in_new_process(forks, tmp_path, records)
    assert set(codes) == {0}, f"exit codes of the children: {codes}"


# --------------------------------------------------------------------------------------------- iterators together


def test_two_iterators_of_one_data_set_do_not_disturb_each_other(tmp_path, records):
    dataset = read(tmp_path)
    ahead, behind, got = iter(dataset), iter(dataset), ([], [])
    got[0].extend(arrays(next(ahead) for _ in range(5)))
    for one, other in zip(ahead, behind, strict=False):
        got[0].append(one.numpy().copy())
        got[1].append(other.numpy().copy())
    got[1].extend(arrays(behind))
    # zip takes one more from the first than from the second only at its end, so none is lost.
    assert_same_batches(got[0], epoch_of(records))
    assert_same_batches(got[1], epoch_of(records))


@pytest.mark.parametrize("shared", [True, False], ids=["one data set", "a data set each"])
def test_iterators_in_several_threads_each_get_a_whole_epoch(tmp_path, records, shared):
    dataset = read(tmp_path)
    start = threading.Barrier(6)

    def epoch(_: int) -> list[np.ndarray]:
        mine = dataset if shared else read(tmp_path)
        batches = iter(mine)
        start.wait()
        return arrays(batches)

    with ThreadPoolExecutor(6) as pool:
        epochs = list(pool.map(epoch, range(6)))
    for one in epochs:
        assert_same_batches(one, epoch_of(records))
    if shared:
        assert dataset.stats()["batches"] == 6 * 12


def test_an_iterator_may_move_from_thread_to_thread(tmp_path, records):
    batches = iter(read(tmp_path))
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        got = [(one, other)[i % 2].submit(next, batches).result().numpy().copy() for i in range(11)]
        del batches
        gc.collect()
    assert_same_batches(got, epoch_of(records)[:11])


def test_the_garbage_collector_may_end_an_iterator_in_a_cycle(tmp_path, records):
    dataset = read(tmp_path)
    for _ in range(5):
        batches = iter(dataset)
        next(batches)
        cycle = [batches]
        cycle.append(cycle)
        del batches, cycle
        gc.collect()
    assert_same_batches(dataset, epoch_of(records))


def test_other_threads_run_while_one_waits_for_a_batch(tmp_path, storage):
    dataset = read(tmp_path, options=EngineOptions(direct="always", faults="late=1,late_ms=300"))
    ticks, waiting = 0, ThreadPoolExecutor(1).submit(next, iter(dataset))
    while not waiting.done():
        time.sleep(0.005)
        ticks += 1
    assert ticks > 10 and waiting.result().shape == (4, RECORD_BYTES)


# Importing `gdsdata.slow` or `slow` lasts until a fork.
SLOW_MODULES = """
import importlib, os, signal, sys, threading, time, types
from importlib.machinery import ModuleSpec

class Slow:
    def find_spec(self, name, path, target=None):
        return ModuleSpec(name, self) if name in ("gdsdata.slow", "slow") else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        begun.set()
        forking.wait()
        time.sleep(0.2)  # until after a fork that does not wait

begun, forking = threading.Event(), threading.Event()
sys.meta_path.insert(0, Slow())
"""
FORKS_DURING_AN_IMPORT = f"""{SLOW_MODULES}
import gdsdata.io.engine
os.register_at_fork(before=forking.set)  # called before those that were registered earlier
other = threading.Thread(target=importlib.import_module, args=["gdsdata.slow"])
other.start()
begun.wait()
if (child := os.fork()) == 0:
    signal.alarm(10)  # ends the child, if its import waits for a thread that it does not have
    importlib.import_module("gdsdata.slow")
    os._exit(0)
other.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_is_forked_while_a_thread_imports_a_module_can_import_it_too():
    assert run_script(FORKS_DURING_AN_IMPORT) == (0, "0\n", "")


FORKS_DURING_A_FIRST_CALL = (
    SLOW_MODULES
    + """
class Credentials:
    token, expires_on, expiry, access_key, secret_key = "token", 4e9, None, "key", "secret"
    def __init__(self, **named):
        import slow  # as these packages import parts of themselves
    def get_token(self, scope):
        return self
    def refresh(self, request):
        pass
    def get_credentials(self):
        return self
    get_frozen_credentials = get_credentials

def package(name, **attributes):
    sys.modules[name] = module = types.ModuleType(name)
    vars(module).update(attributes)

package("azure.identity", DefaultAzureCredential=Credentials)
package("google.auth", default=lambda **named: (Credentials(), "project"))
package("botocore.session", Session=Credentials)
from gdsdata.storage import aws_chain, azure_chain, google_chain
find = {
    "az": azure_chain._token_of_azure_identity,
    "gs": google_chain._token_of_google_auth,
    "s3": lambda: aws_chain._keys_of_botocore(None, "s3://bucket"),
}[sys.argv[1]]
os.register_at_fork(before=forking.set)  # called before those that were registered earlier
other = threading.Thread(target=find)
other.start()
begun.wait()
if (child := os.fork()) == 0:
    signal.alarm(10)  # ends the child, if it waits for a thread that it does not have
    find()
    os._exit(0)
other.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
)


@pytest.mark.parametrize("scheme", ["az", "gs", "s3"])
def test_a_child_that_is_forked_while_a_thread_first_looks_for_credentials_finds_some(scheme):
    assert run_script(FORKS_DURING_A_FIRST_CALL, scheme) == (0, "0\n", "")


FORKS_WITH_A_DATA_SET = """
import os, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import gdsdata

class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        by.append(os.getpid())
        return operation(*arguments, **(named or {}))

dataset = gdsdata.GDSDataset(sys.argv[1], 4, gdsdata.formats.Records("uint8", (65536,)), device="cpu")
by = []
with Seen():
    if (child := os.fork()) == 0:
        os._exit(os.getpid() in by)
    torch.zeros(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.getpid() in by)
"""


@pytest.mark.usefixtures("records")
def test_a_forked_child_calls_no_operation_of_torch_by_itself(tmp_path):
    # Another thread may be in the first call of one: the child would wait forever for its end.
    assert run_script(FORKS_WITH_A_DATA_SET, tmp_path / "0.bin") == (0, "0 True\n", "")


FORKS_DURING_A_LOOK = """
import os, signal, sys, threading
import gdsdata
from gdsdata.data.batches import source

def wait_and_look(paths):
    begun.set()
    forked.wait()
    return look(paths)

begun, forked, look = threading.Event(), threading.Event(), source.have_urls
format = gdsdata.formats.Records("uint8", (65536,))
one, other = (gdsdata.GDSDataset(sys.argv[1], 4, format, device="cpu") for _ in range(2))
source.have_urls = wait_and_look
thread = threading.Thread(target=list, args=[one])
thread.start()
looks = begun.wait(10)
source.have_urls = look
if (child := os.fork()) == 0:
    signal.alarm(10)  # ends the child, if it waits for a thread that it does not have
    os._exit(len(list(other)))
forked.set()
thread.join()
print(looks, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.usefixtures("records")
def test_a_child_that_is_forked_while_a_thread_looks_at_its_files_reads_others(tmp_path):
    assert run_script(FORKS_DURING_A_LOOK, tmp_path / "0.bin") == (0, "True 12\n", "")


FORKS_DURING_A_SHARING = """
import os, signal, threading
import torch
import gdsdata.io.engine

class Held(torch.UntypedStorage):
    @property
    def _cdata(self):  # which torch asks for under its lock
        if threading.current_thread() is thread:
            begun.set()
            forked.wait()
        return super()._cdata

begun, forked = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: Held(8).share_memory_())
thread.start()
begins = begun.wait(10)
if (child := os.fork()) == 0:
    signal.alarm(10)  # ends the child, if it waits for a thread that it does not have
    os._exit(torch.ones(3).share_memory_().sum().int().item())
forked.set()
thread.join()
print(begins, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_is_forked_while_a_thread_shares_a_tensor_can_share_others():
    assert run_script(FORKS_DURING_A_SHARING) == (0, "True 3\n", "")


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_ctrl_c_as_a_lock_is_taken_or_released_leaves_it_free_and_so_does_a_fork(make):
    lock, number = fork_safe_lock(make), 1

    def is_free():
        with ThreadPoolExecutor(1) as other:  # the owner of an RLock may take it again
            return other.submit(lock.acquire, False).result()

    while interrupted_at_call(number, lambda: lock, fork_safe):
        number += 1
    with lock:
        assert not is_free()
        assert exit_code_of_fork(lambda: is_free() or 1 / 0) == 0
    assert is_free()

"""Helpers of several test modules: data, the page cache, processes, and a process's resources."""

import contextlib
import ctypes
import faulthandler
import gc
import inspect
import itertools
import mmap
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import tracemalloc
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quick_programs
import torch

import gdsdata
from gdsdata.errors import BackendUnavailable
from gdsdata.io.engine import shared_engine

REPOSITORY = Path(__file__).resolve().parents[1]
MIB = 2**20

# A file that anyone may read, and whose file system (sysfs) refuses O_DIRECT.
REFUSES_DIRECT = Path("/sys/kernel/btf/vmlinux")


# ---------------------------------------------------------------------------------------------------------- data


def engine_can_pickle() -> bool:
    """Return whether this torch has DLPack's exchange, by which the engine pickles tensors."""
    return hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


def dcp_names_lost_metadata() -> bool:
    """Return whether a load by DCP raises the error of metadata that it cannot read.

    torch 2.9 logs it, and raises an ``AssertionError`` without a message.
    """
    from torch.distributed.checkpoint import state_dict_loader  # late: takes half a second

    return "metadata_exc" in inspect.getsource(state_dict_loader)


def random_bytes(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(count)


def write_records(path: Path, count: int, record_bytes: int, seed: int = 0) -> np.ndarray:
    """Write ``count`` random records, and return them as uint8 ``(count, record_bytes)``."""
    path.write_bytes(random_bytes(count * record_bytes, seed))
    return np.fromfile(path, np.uint8).reshape(count, record_bytes)


def arrays(batches: Iterable[torch.Tensor]) -> list[np.ndarray]:
    """Copy each batch as it comes."""
    return [batch.cpu().numpy().copy() for batch in batches]


def assert_same_batches(got: Iterable[Any], expected: Iterable[Any]) -> None:
    """Compare number, order, dtype, shape and every byte on any device. A NaN equals itself."""
    got, expected = list(map(_on_the_cpu, got)), list(map(_on_the_cpu, expected))
    assert [(batch.dtype, batch.shape) for batch in got] == [(batch.dtype, batch.shape) for batch in expected]
    different = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a.tobytes() != b.tobytes()]
    assert not different, f"of {len(expected)} batches, these differ: {different}"


def _on_the_cpu(batch: Any) -> np.ndarray:
    return np.asarray(batch.cpu() if isinstance(batch, torch.Tensor) else batch)


class default_interrupts:
    """Restores SIGINT's default. A shell that runs the tests in the background ignores it."""

    def __enter__(self):
        self.before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self.before)


def note_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, *names: str) -> list[str]:
    """Return a list that grows by a name when that function of a module or class is called."""
    called: list[str] = []
    for name in names:
        its = getattr(owner, name)

        def noted(*given: Any, its: Callable = its, name: str = name, **named: Any) -> Any:
            called.append(name)
            return its(*given, **named)

        monkeypatch.setattr(owner, name, noted)
    return called


# ---------------------------------------------------------------------------------------------- what is there to use


def lack_of_uring() -> str:
    """Return the reason why io_uring cannot be used here, or ""."""
    try:
        shared_engine(gdsdata.EngineOptions(backend="uring"), torch.device("cpu"))
    except BackendUnavailable as reason:
        return str(reason)
    return ""


needs_uring = pytest.mark.skipif(bool(lack_of_uring()), reason=f"no io_uring here: {lack_of_uring()}")
BACKENDS = ["posix", pytest.param("uring", marks=needs_uring)]


def served_by(dataset: gdsdata.GDSDataset) -> dict[str, int]:
    """Return the bytes of each route that served any."""
    return {route: count for route, count in dataset.stats()["bytes"].items() if count}


def refuses_direct(path: Path) -> bool:
    """Return whether the file system of the file ``path`` refuses O_DIRECT."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return True
    return False


def require_direct(path: Path) -> None:
    """Skip the test if the file system of the file ``path`` refuses O_DIRECT."""
    if refuses_direct(path):
        pytest.skip("this file system refuses O_DIRECT")


def drop_cache(*paths: Path) -> bool:
    """Drop the files from the page cache. Returns whether they left it; on tmpfs they cannot."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # dirty pages stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return not any(map(resident_pages, paths))


def resident_pages(path: Path) -> int:
    """Count the file's pages in the page cache, by mincore(2), which touches none."""
    if path.stat().st_size == 0:
        return 0
    view = np.memmap(path, np.uint8, mode="c")
    pages = ctypes.create_string_buffer(-(-view.size // mmap.PAGESIZE))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.size), pages) == 0
    return sum(page & 1 for page in pages.raw)


def warm_cache(*paths: Path) -> None:
    for path in paths:
        path.read_bytes()


# ----------------------------------------------------------------------------------------------- other processes

# The server has imported torch: a new process takes 0.2 s instead of 2. Optimizers and FSDP would
# import torch._dynamo at their first use: 1.9 s of CPU time for a rank that saves a sharded model.
_TORCH = ("torch.utils.data", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo")
_processes = multiprocessing.get_context("forkserver")
if multiprocessing.parent_process() is None:
    _processes.set_forkserver_preload([*_TORCH, *quick_programs.GDSDATA, "hypothesis", "pytest"])
else:  # the workers of a loader need less
    _processes.set_forkserver_preload(["torch.utils.data", "gdsdata", "pytest"])


def new_pipe() -> tuple[multiprocessing.connection.Connection, multiprocessing.connection.Connection]:
    """Return a pipe to a process of `new_process`: the end that receives, and the other."""
    return _processes.Pipe(duplex=False)


def new_process(function: Callable, arguments: tuple) -> multiprocessing.process.BaseProcess:
    """Return a process, not started, that has not used gdsdata. Its caller ends it."""
    return _processes.Process(target=function, args=arguments)


def in_new_process(function: Callable, *arguments: Any, timeout_s: float = 60) -> Any:
    """Call ``function`` in a new process that has not used gdsdata, and return its result.

    ``function`` is of a module's top level. It starts workers by the method that a program starts
    them by. Fails if it raises, dies of a signal, or takes longer than ``timeout_s``: then its
    stacks are on stderr.
    """
    receiver, sender = _processes.Pipe(duplex=False)
    method = multiprocessing.get_start_method()
    process = _processes.Process(target=_answer, args=(sender, method, timeout_s, function, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            pytest.fail(f"{function.__name__} still ran after {timeout_s} s")
        result, error = receiver.recv()
        process.join(timeout_s)  # it tidies up after itself
    except EOFError:
        process.join()
        pytest.fail(f"{function.__name__} ended its process with exit code {process.exitcode} (-N: signal N)")
    finally:
        process.kill()
        process.join()
    if error is not None:
        pytest.fail(f"in a new process:\n{error}")
    return result


def _answer(
    sender: multiprocessing.connection.Connection,
    method: str,
    timeout_s: float,
    function: Callable,
    arguments: tuple,
) -> None:
    multiprocessing.set_start_method(method, force=True)  # it was "forkserver": another server for each process
    faulthandler.dump_traceback_later(0.9 * timeout_s, file=2)
    try:
        sender.send((function(*arguments), None))
    except BaseException:
        sender.send((None, traceback.format_exc()))


def start_script(script: str, *arguments: Any, environment: Mapping[str, str] | None = None) -> subprocess.Popen:
    """Start a Python interpreter that runs ``script`` with ``sys.argv[1:]``.

    ``environment`` is added to that of this process.
    """
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_script(
    script: str, *arguments: Any, timeout_s: float = 30, environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of `start_script`. A hang fails."""
    process = start_script(script, *arguments, environment=environment)
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        pytest.fail(f"still running after {timeout_s} s; stdout: {stdout!r}, stderr: {stderr!r}")
    return process.returncode, stdout, stderr


def torchrun(
    ranks: int, script: str | Path, *arguments: Any, timeout_s: float = 80, restarts: int = 0, **environment: str
) -> tuple[int, str]:
    """Run ranks on this machine, and return exit code and output. A hang ends all and fails.

    ``environment`` is added to that of this process.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    added = {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo", quick_programs.NESTED: "1"}
    process = quick_programs.Popen(
        [*command, f"--max-restarts={restarts}", str(script), *map(str, arguments)],
        env={**os.environ, **added, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:  # a test's own timeout and Ctrl-C, too
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            pytest.fail(f"{ranks} ranks still ran after {timeout_s} s:\n{said}")
        raise
    return process.returncode, said


def exit_code_of_fork(child: Callable[[], Any], timeout_s: float = 10) -> int:
    """Fork, run ``child`` in the child, and return its exit code.

    The code is 0, 1 for an exception, or -N for signal N. The child skips the interpreter's end,
    which would act on the parent's resources. A hang fails.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if not eventually(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None, timeout_s):
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        raise AssertionError(f"the forked child still ran after {timeout_s} s")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def sharded(seed: int, mesh: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return an FSDP2 model on this mesh that has made a step, and its optimizer."""
    from torch.distributed.fsdp import fully_shard  # late: few tests need it

    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(700, 700) for _ in range(4)))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 700)).sum().backward()
    optimizer.step()
    return model, optimizer


# ------------------------------------------------------------------------------------------ what a process holds


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def anonymous_bytes() -> int:
    """Return the bytes of this process that no file backs."""
    return _status_bytes("RssAnon")


def peak_bytes() -> int:
    """Return the largest resident memory since `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def few_bytes_of_python(most_bytes: int) -> Iterator[None]:
    """Assert that Python and NumPy allocate no more than this in the block, in all threads."""
    gc.collect()
    tracemalloc.start()
    try:
        yield
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    others = [one.name for one in threading.enumerate()]  # any of them may have allocated
    assert peak_bytes <= most_bytes, f"{peak_bytes} bytes, and {most_bytes} are few; threads: {', '.join(others)}"


def _status_bytes(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def interrupted_at_call(number: int, context: Callable[[], Any], *modules: types.ModuleType) -> bool:
    """Enter and leave a context, and raise KeyboardInterrupt in some modules at one of their calls.

    Python handles signals as its own functions begin, and behind calls of others.

    Returns:
        Whether there are so many calls.
    """
    files = {module.__file__ for module in modules}
    calls = itertools.count(1)

    def interrupt(frame: types.FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename in files and next(calls) == number:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with context():
            pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def reading_threads() -> set[threading.Thread]:
    """Return the threads that now read batches with fields, also those of other tests."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("gdsdata-fields")}


def eventually(condition: Callable[[], bool], timeout_s: float = 5) -> bool:
    """Return whether ``condition`` becomes true in time: the kernel tidies up a moment later."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


GROUPS = {"sharding": gdsdata.Sharding, "fields": gdsdata.Fields, "reading": gdsdata.Reading}


def forget_stores() -> None:
    """Forget the stores, the objects and the cache of this process."""
    from gdsdata.io import remote_access
    from gdsdata.storage import objects, settings, stores

    for kept in (stores._stores, stores._options, settings._options_of, objects._known, objects._listed):
        kept.clear()
    settings._folder_of_derived = None
    remote_access.use_cache(None, None)


def grouped(arguments: dict) -> dict:
    """Put arguments of GDSDataset into their groups. A test's parameters name them alone."""
    by_group = {
        group: kind(**{name: arguments[name] for name in kind._fields if name in arguments})
        for group, kind in GROUPS.items()
    }
    given = {group: values for group, values in by_group.items() if arguments.keys() & set(values._fields)}
    inner = {name for kind in GROUPS.values() for name in kind._fields}
    return {**{name: value for name, value in arguments.items() if name not in inner}, **given}

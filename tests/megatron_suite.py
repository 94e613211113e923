"""Megatron-LM's own tests of checkpoints on CPUs, with its strategies and with gdsdata's.

    make test-megatron MEGATRON=~/Megatron-LM

The folder is a checkout of Megatron-LM: its package lacks the tests. They are written for GPUs,
NCCL and, most of them, eight ranks. Here eight processes run each test over gloo, and CUDA's names
lead to the CPU. Each runs with the stock strategies of the format `torch_dist`, and again with
`GDSSaveStrategy` and `GDSLoadStrategy` in their places. The exit status is 1 if a test passes with
the stock ones alone, or if gdsdata wrote and read nothing. A test that passes with neither says
nothing about gdsdata: it needs a GPU, a package that is not there, or another torch. `--log FILE`
says why a test did not pass. Processes are forked where Megatron would spawn them.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
import typing
from pathlib import Path
from unittest import mock

import pytest
import torch
import typing_extensions

RANKS, LIMIT_SECONDS = 8, 60
# Some ranks may find removed what they look for, and fail, while the others wait for them.
RACES = {"test_remove_sharded_tensors": 3}  # attempts
NO_END = f"no end in {LIMIT_SECONDS} s"
TESTS = "tests/unit_tests/dist_checkpointing"
# Left out: tests of models and optimizers, which want Transformer Engine or Apex, of local
# checkpoints, and of Megatron's arguments.
FILES = (
    "test_serialization.py", "test_torch_dist.py", "test_fully_parallel.py", "test_nonpersistent.py", "test_strict.py",
    "test_integrity.py", "test_replication.py", "test_global_metadata_reuse.py", "test_async_save.py",
    "test_checkpointable.py", "test_safe_globals.py", "test_mapping.py", "test_validation.py",
)  # fmt: skip
STRATEGIES = {
    "TorchDistSaveShardedStrategy": "GDSSaveStrategy",
    "TorchDistLoadShardedStrategy": "GDSLoadStrategy",
}


class OnTheCPU(torch.overrides.TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU."""

    def __torch_function__(self, function, types, given=(), named=None):
        if function is torch.Tensor.cuda:
            return given[0]
        named = {name: on_the_cpu(value) for name, value in (named or {}).items()}
        return function(*map(on_the_cpu, given), **named)


def on_the_cpu(value):
    is_device = isinstance(value, (str, torch.device))
    return "cpu" if is_device and str(value).startswith("cuda") else value


def prepare(checkout):
    """Let this process import Megatron-LM and its tests, and take CUDA's names for the CPU's."""
    os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    torch.set_num_threads(1)
    sys.path.insert(0, str(checkout))
    download = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    download.download_and_extract_asset = lambda **_: None
    sys.modules[download.__name__] = download
    typing.override = typing_extensions.override  # Python 3.12 has it
    for name, stands_in in {
        "set_device": lambda _: None,
        "device_count": lambda: RANKS,
        "current_device": lambda: "cpu",
        "synchronize": lambda *_: None,
        "memory_allocated": lambda *_: 0,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "Stream": mock.MagicMock,
        "current_stream": mock.MagicMock(),
        "stream": lambda _: contextlib.nullcontext(),
    }.items():
        setattr(torch.cuda, name, stands_in)
    torch.nn.Module.cuda = lambda self, *_: self
    start_group, context = torch.distributed.init_process_group, multiprocessing.get_context
    torch.distributed.init_process_group = lambda backend=None, **named: start_group(backend="gloo", **named)
    # A process that spawns would import torch and Megatron anew, on each rank and in each test.
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)
    torch.multiprocessing.get_context = multiprocessing.get_context
    OnTheCPU().__enter__()
    for name in ("gdsdata.integrations.megatron", TESTS.replace("/", ".")):  # once for all forks
        importlib.import_module(name)


def use_gdsdata():
    """Put gdsdata's strategies where Megatron's modules and tests have theirs.

    Returns:
        A list that grows with each plan that this process writes or reads by gdsdata.
    """
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    from gdsdata import GDSStorageReader, GDSStorageWriter
    from gdsdata.integrations import megatron

    served = []
    for kind, name in ((GDSStorageWriter, "write_items"), (GDSStorageReader, "read_data")):
        its = getattr(kind, name)
        setattr(kind, name, lambda *given, its=its, name=name: (served.append(name), its(*given))[1])

    for stock, ours in STRATEGIES.items():
        replaced = getattr(strategies, stock)
        for name, module in list(sys.modules.items()):
            if name.startswith(("megatron.", "tests.")) and vars(module).get(stock) is replaced:
                setattr(module, stock, getattr(megatron, ours))
    return served


class Recorder:
    """Keeps how each test ended, as a plug-in of pytest. `meet` is called when a test has ended."""

    def __init__(self, meet):
        self.names, self.ended, self.meet = [], {}, meet

    def pytest_collection_modifyitems(self, items):
        self.names = [item.nodeid for item in items]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self):
        self.meet()

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            why = "" if report.passed else str(report.longrepr)
            if self.ended.get(report.nodeid, ["passed"])[0] != "failed":
                self.ended[report.nodeid] = [report.outcome, why]


def pytest_in(checkout, *arguments, meet=lambda: None):
    recorder = Recorder(meet)
    os.chdir(checkout)
    settings = ["-q", "--assert=plain", "-p", "no:cacheprovider", "--rootdir", str(checkout), "-c", os.devnull]
    pytest.main([*settings, *arguments], plugins=[recorder])
    return recorder


def in_a_fork(work, said):
    """Run `work` in a child, with a group of processes of its own; return its pid."""
    child = os.fork()
    if child:
        return child
    try:
        os.setpgid(0, 0)
        output = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def wait_for(children):
    """Wait until all have ended. Those that do not end in time are killed, with their children."""
    ends, left = time.monotonic() + LIMIT_SECONDS, set(children)
    while left and time.monotonic() < ends:
        left = {child for child in left if os.waitpid(child, os.WNOHANG) == (0, 0)}
        time.sleep(0.02)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    for child in left:
        os.waitpid(child, 0)


def collected(checkout, files, folder):
    """Return the names of the tests in `files`."""

    def collect():
        (folder / "names.json").write_text(json.dumps(pytest_in(checkout, "--collect-only", *files).names))

    wait_for([in_a_fork(collect, folder / "said")])
    names = json.loads((folder / "names.json").read_text()) if (folder / "names.json").exists() else []
    return names or sys.exit((folder / "said").read_text())


def free_port():
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("localhost", 0))
        return taken.getsockname()[1]


def run_test(checkout, name, strategies, folder):
    """Run a test on all ranks, each a new fork of this process.

    Returns:
        "passed", "failed" or "skipped", what ranks said if it did not pass, and how many plans
        gdsdata has written or read.
    """
    port = free_port()

    def meet(number):
        """Wait for all ranks: rank 0 is about to remove the folder that they share."""
        (folder / f"ended{number}").touch()
        while len(list(folder.glob("ended*"))) < RANKS:
            time.sleep(0.01)

    def rank(number):
        from tests.unit_tests.test_utilities import Utils

        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), WORLD_SIZE=str(RANKS))
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number))
        Utils.rank, Utils.world_size = number, RANKS
        Utils.initialize_distributed()  # A few tests leave that to one that ran before.
        folder_of_tests = str(folder / "shared" / str(number))
        ended, served = ["failed", "it did not run"], []
        try:
            served = use_gdsdata() if strategies == "gdsdata" else []
            recorder = pytest_in(checkout, name, "--basetemp", folder_of_tests, meet=lambda: meet(number))
            ended = recorder.ended.get(name, ended)
        except Exception:
            ended = ["failed", traceback.format_exc()]
        (folder / f"{number}.json").write_text(json.dumps([*ended, len(served)]))

    (folder / "shared").mkdir()
    wait_for([in_a_fork(lambda number=number: rank(number), folder / f"said{number}") for number in range(RANKS)])
    ended = []
    for number in range(RANKS):
        result = folder / f"{number}.json"
        ended.append(json.loads(result.read_text()) if result.exists() else ["failed", NO_END, 0])
    outcomes = [outcome for outcome, _, _ in ended]
    worst = next(outcome for outcome in ("failed", "skipped", "passed") if outcome in outcomes)
    said = [f"rank {number}: {why}" for number, (outcome, why, _) in enumerate(ended) if outcome == worst and why]
    return worst, "\n".join(said), sum(served for _, _, served in ended)


def run_tests(checkout, files, strategies, log):
    """Run tests with each of the strategies.

    Returns:
        {name: {strategies: outcome}}, and how many plans gdsdata has written or read.
    """
    found, served = {}, 0
    with tempfile.TemporaryDirectory(prefix="gdsdata-megatron-") as temporary:
        for name in collected(checkout, [str(checkout / TESTS / file) for file in files], Path(temporary)):
            found[name] = {}
            for one in strategies:
                for _ in range(RACES.get(name.rpartition("::")[2], 1)):
                    with tempfile.TemporaryDirectory(dir=temporary) as folder:
                        found[name][one], why, plans = run_test(checkout, name, one, Path(folder))
                    if NO_END not in why:
                        break
                    print(f"{name}, {one}: {NO_END}", flush=True)
                served += plans
                if log and why:
                    with open(log, "a") as file:
                        print(f"--- {name}, {one}\n{why}\n", file=file)
            print(name.removeprefix(f"{TESTS}/"), *found[name].values(), flush=True)
    return found, served


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a folder with Megatron-LM")
    parser.add_argument("files", nargs="*", default=FILES, help=f"tests below {TESTS}, or files of them")
    parser.add_argument("--strategies", nargs="+", choices=["stock", "gdsdata"], default=["stock", "gdsdata"])
    parser.add_argument("--log", type=Path)
    chosen = parser.parse_args()
    checkout = chosen.checkout.expanduser().resolve()
    if not (checkout / TESTS).is_dir():
        parser.error(f"{checkout} is no checkout of Megatron-LM: it has no folder {TESTS}")
    prepare(checkout)
    found, served = run_tests(checkout, chosen.files, chosen.strategies, chosen.log)
    for one in chosen.strategies:
        outcomes = [ended[one] for ended in found.values()]
        print(f"{one}: {', '.join(f'{outcomes.count(kind)} {kind}' for kind in ('passed', 'failed', 'skipped'))}")
    worse = [name for name, ended in found.items() if ended.get("stock") == "passed" != ended.get("gdsdata", "passed")]
    for name in worse:
        print(f"passes with the stock strategies alone: {name}")
    if "gdsdata" in chosen.strategies:
        print(f"gdsdata wrote or read {served} plans")
    return 1 if worse or ("gdsdata" in chosen.strategies and not served) else 0


if __name__ == "__main__":
    sys.exit(main())

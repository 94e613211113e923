"""A save killed at each of its steps, or at random, leaves the old or the new checkpoint intact.

As a script, this module forks children that save and are killed. A fork needs no new interpreter.
"""

import ctypes
import importlib
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import gdsdata
from gdsdata import EngineOptions

# 150 kills take a minute of two idle processors, and longer on busy ones.
TIMEOUT_S = 500
pytestmark = [pytest.mark.timeout(TIMEOUT_S + 10), pytest.mark.usefixtures("quick_programs")]

KINDS = ["pt", "safetensors", "dcp", "folder"]
# Its calls can be counted, because they pass through libc. io_uring's do not.
POSIX = EngineOptions(backend="posix", workers=1)
OLD, NEW, TORN = 10, 11, 1


LONG_STEP = 2  # its state is longer than others, and so is the leftover of a killed save
FIXED_PROCESS_ID = 2**22  # one more than the largest possible id


def state_of(step: int) -> dict[str, torch.Tensor]:
    counts = {"a": 1_100_001 if step == LONG_STEP else 700_001, "b": 3, "c": 0, "d": 5000}
    return {name: torch.full((count,), float(step)) for name, count in counts.items()}


def save(kind: str, folder: Path, step: int, options: EngineOptions) -> None:
    if kind == "folder":
        with gdsdata.AsyncCheckpointer(folder, keep_last=1, staging_bytes="2MiB", options=options) as checkpointer:
            checkpointer.save(step, {"state": state_of(step)}).result()
    elif kind == "dcp":
        dcp.save(state_of(step), storage_writer=gdsdata.GDSStorageWriter(folder / "dcp", options=options), no_dist=True)
    else:
        gdsdata.save(state_of(step), folder / f"x.{kind}", options=options)


def load(kind: str, folder: Path) -> int:
    """Load the checkpoint with every reader, and return its step. A torn one is an error."""
    if kind == "folder":
        checkpointer = gdsdata.AsyncCheckpointer(folder)
        for step in checkpointer.steps():  # each step that is listed must be complete
            found = state_of(step)
            for tensor in found.values():
                tensor.zero_()
            assert checkpointer.restore({"state": found}, step, verify=True) == step == int(found["a"][0])
        assert checkpointer.restore({"state": found}) == step
    elif kind == "dcp":
        reader = dcp.FileSystemReader(folder / "dcp")
        shapes = {name: about.size for name, about in reader.read_metadata().state_dict_metadata.items()}
        found = {name: torch.zeros(shape) for name, shape in shapes.items()}
        dcp.load(found, storage_reader=reader, no_dist=True)
    elif kind == "pt":
        found = torch.load(folder / "x.pt")
        assert torch.equal(gdsdata.load(folder / "x.pt", verify=True)["a"], found["a"])
    else:
        found = load_file(folder / "x.safetensors")
    step = int(found["a"][0])
    assert all(torch.equal(found[name], tensor) for name, tensor in state_of(step).items()), (
        "tensors of different steps are mixed"
    )
    return step


def in_child(work, *arguments) -> int:
    """Fork a process that ends with ``work``'s result, and return its id."""
    if child := os.fork():
        return child
    code = TORN
    try:
        code = work(*arguments) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def import_what_is_imported_by(work) -> None:
    """Let a child work, and import its modules: each later child would import them again."""
    reader, writer = os.pipe()

    def names_of_modules() -> None:
        work()
        with open(writer, "w") as names:
            names.write("\n".join(sys.modules))

    child = in_child(names_of_modules)
    os.close(writer)
    with open(reader) as names:
        modules = names.read().split()
    assert code_of(child) == 0
    for module in modules:
        if module not in sys.modules:
            importlib.import_module(module)


def files_in(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


# ------------------------------------------------------------------------------------------------ as a script


def kill_at_every_step(kind: str, folder: Path, loses: bool, same_id: bool) -> None:
    """Kill a save before each of the system calls by which it changes something.

    ``same_id``: every process that saves has the same id, as in a container that is started again.
    """
    points = ctypes.CDLL(None)  # crash_points.c, which was preloaded
    base, work, counted = folder / "base", folder / "work", folder / "points"
    base.mkdir()
    if same_id:
        points.crash_points_fix_process_id(FIXED_PROCESS_ID)
    import_what_is_imported_by(lambda: (save(kind, base, 1, POSIX), load(kind, base)))

    def save_and_die(at: int) -> None:
        points.crash_points_begin(os.fsencode(work), ctypes.c_long(at), ctypes.c_int(loses))
        save(kind, work, LONG_STEP, POSIX)
        counted.write_text(str(points.crash_points_count()))
        points.crash_points_die()

    def look() -> int:
        return {1: OLD, LONG_STEP: NEW}[load(kind, work)]

    def save_again() -> None:
        save(kind, work, 3, POSIX)
        assert load(kind, work) == 3
        assert files_in(work) == files_in(base), "something was left behind"

    def found_after(at: int) -> int:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work)
        assert code_of(in_child(save_and_die, at)) == -signal.SIGKILL
        code = code_of(in_child(look))
        assert code in (OLD, NEW), f"killed at call {at}"
        assert code_of(in_child(save_again)) == 0, f"saved again after a kill at call {at}"
        return code

    assert found_after(0) == NEW, "a save that has returned is not there"
    found = [found_after(at) for at in range(1, int(counted.read_text()) + 1)]
    assert found == sorted(found), "new, and then old again"
    print(f"{len(found)} kills: {found.count(OLD)} left the old one and {found.count(NEW)} the new one")
    assert found.count(OLD) >= 5


def kill_at_random(kind: str, folder: Path, kills: int, seed: int) -> None:
    """Kill a process that saves one checkpoint after the other."""
    generator = random.Random(seed)
    step, found = 0, 0
    code_of(in_child(save, kind, folder, 0, EngineOptions()))

    def save_for_ever(saved_steps: int, step: int) -> None:
        while True:
            step += 1
            save(kind, folder, step, EngineOptions())
            os.write(saved_steps, step.to_bytes(8, "little"))

    def look() -> None:
        os.write(answer, load(kind, folder).to_bytes(8, "little"))

    for _ in range(kills):
        reader, saved_steps = os.pipe()
        child = in_child(save_for_ever, saved_steps, found)
        os.close(saved_steps)
        if generator.random() < 0.9:  # in most rounds, wait for the first save
            select.select([reader], [], [], 10)
        time.sleep(generator.random() * 0.04)
        os.kill(child, signal.SIGKILL)
        assert code_of(child) == -signal.SIGKILL
        saved = b""
        while more := os.read(reader, 1 << 16):
            saved += more
        os.close(reader)
        step = int.from_bytes(saved[-8:], "little") if saved else found
        looked, answer = os.pipe()
        assert code_of(in_child(look)) == 0
        found = int.from_bytes(os.read(looked, 8), "little")
        os.close(looked), os.close(answer)
        assert found in (step, step + 1), f"{step} was saved, and {found} is there"
    print(f"{kills} kills, up to step {found}")


# ------------------------------------------------------------------------------------------------ the tests


def run(call: str) -> None:
    imports = "import warnings; from pathlib import Path; import test_crashes"
    script = f"{imports}; warnings.simplefilter('ignore'); test_crashes.{call}"
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    print(ended.stdout)


@pytest.fixture(scope="module")
def crash_points(tmp_path_factory) -> Path:
    """The library that counts a program's system calls, to preload."""
    library = tmp_path_factory.mktemp("crash_points") / "crash_points.so"
    source = Path(__file__).parent / "crash_points.c"
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


MORE_KILLS = {"folder": 150, "pt": 60, "safetensors": 40, "dcp": 50}


CRASHES = [
    pytest.param(False, False, id="what was written stays", marks=pytest.mark.slow),
    pytest.param(True, False, id="what was not synced is lost"),
    pytest.param(False, True, id="what was written stays and every process has the same id"),
]


@pytest.mark.parametrize(("loses", "same_id"), CRASHES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_killed_at_any_step_leaves_the_old_or_the_new_one(
    tmp_path, crash_points, monkeypatch, kind, loses, same_id
):
    monkeypatch.setenv("LD_PRELOAD", str(crash_points))  # here, so that one preloaded process forks for all tests
    run(f"kill_at_every_step({kind!r}, Path({str(tmp_path)!r}), {loses}, {same_id})")


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        *[(kind, 4) for kind in KINDS],
        *[pytest.param(*both, marks=pytest.mark.slow) for both in MORE_KILLS.items()],
    ],
)
def test_saves_killed_at_random_moments_leave_the_old_or_the_new_one(tmp_path, kind, kills):
    run(f"kill_at_random({kind!r}, Path({str(tmp_path)!r}), {kills}, seed=0)")

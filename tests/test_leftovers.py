"""A save beside other saves of its name, finished or not, gives one complete file of one state."""

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import REPOSITORY, in_new_process, run_script
from safetensors.torch import load_file

import gdsdata
from gdsdata.checkpoint.file_writer import TEMPORARY
from gdsdata.errors import IoError
from gdsdata.io import engine

pytestmark = [
    pytest.mark.usefixtures("quick_programs"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

NAMES = ["x.pt", "x.safetensors", "x.bin"]
HOUR_S = 3600


def save(path: Path, value: float, count: int = 1000) -> None:
    tensor = torch.full((count,), float(value))
    gdsdata.write_tensor(tensor, path) if path.suffix == ".bin" else gdsdata.save({"a": tensor}, path)


def check(path: Path, value: float, count: int = 1000) -> None:
    """Check the value with stock readers, and that nothing lies behind it."""
    if path.suffix == ".bin":
        assert path.read_bytes() == torch.full((count,), float(value)).numpy().tobytes()
        return
    found = torch.load(path) if path.suffix == ".pt" else load_file(path)
    assert torch.equal(found["a"], torch.full((count,), float(value)))
    assert torch.equal(gdsdata.load(path, verify=True)["a"], found["a"])


def temporaries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.endswith(".tmp")}


class BeingSaved:
    """Another process that is in the middle of a save of ``path``."""

    def __init__(self, path: Path, content_bytes: int = 1 << 20) -> None:
        self._answers, answers = os.pipe()
        asked, self._commands = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            output = engine.Output(str(path), content_bytes)
            os.write(answers, b"begun")
            if os.read(asked, 1) == b"c":
                output.commit()
            os._exit(0)
        os.close(answers), os.close(asked)
        assert os.read(self._answers, 5) == b"begun"

    def commit(self) -> None:
        os.write(self._commands, b"c")
        assert self._ended() == 0

    def kill(self) -> None:
        os.kill(self._child, signal.SIGKILL)
        assert self._ended() == -signal.SIGKILL

    def _ended(self) -> int:
        os.close(self._commands), os.close(self._answers)
        return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])


# ------------------------------------------------------------------------------------------ of processes that are gone


def save_beside_leftovers_of_this_process(folder: Path, name: str) -> None:
    for number in range(4):
        (folder / f"{name}.{os.getpid()}-{number}.tmp").write_bytes(os.urandom(400_000))
    save(folder / name, 3)
    check(folder / name, 3)


@pytest.mark.parametrize("name", NAMES)
def test_a_longer_leftover_of_a_process_with_this_id_gets_into_no_file(tmp_path, name):
    in_new_process(save_beside_leftovers_of_this_process, tmp_path, name)


def save_dcp_beside_leftovers_of_this_process(folder: Path) -> None:
    for number in range(4):
        for name in ("__0_0.distcp", ".metadata"):
            (folder / f"{name}.{os.getpid()}-{number}.tmp").write_bytes(os.urandom(400_000))
    dcp.save({"a": torch.arange(1000)}, storage_writer=gdsdata.GDSStorageWriter(folder), no_dist=True)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sizes.keys() == {"__0_0.distcp", ".metadata"} and max(sizes.values()) < 50_000
    found = {"a": torch.zeros(1000, dtype=torch.int64)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert torch.equal(found["a"], torch.arange(1000))


def test_a_longer_leftover_gets_into_no_file_of_dcp(tmp_path):
    in_new_process(save_dcp_beside_leftovers_of_this_process, tmp_path)


@pytest.mark.parametrize("name", [*NAMES, "a" * 245 + ".bin", "\u00e9" * 122 + ".bin"])
def test_the_leftover_of_a_killed_save_goes_with_the_next_save_of_that_name(tmp_path, name):
    other = tmp_path / "y.pt"
    for path in (tmp_path / name, other):
        BeingSaved(path).kill()
    (leftover,) = temporaries(tmp_path) - {one for one in temporaries(tmp_path) if one.startswith("y.pt")}
    if len(os.fsencode(name)) < 200:
        assert re.fullmatch(re.escape(name) + TEMPORARY, leftover)
    save(tmp_path / name, 1)
    check(tmp_path / name, 1)
    assert len(temporaries(tmp_path)) == 1, "the temporary file of another name stays"
    save(other, 2)
    assert not temporaries(tmp_path)


@pytest.mark.parametrize("kernel", ["00000000", "deadbeef"])
@pytest.mark.parametrize("name", NAMES)
def test_a_leftover_without_a_reliable_lock_is_removed_when_it_is_old(tmp_path, name, kernel):
    """The kernel is another host's, whose locks may not reach this one, or locks do not exist."""
    patience_s = HOUR_S if kernel == "deadbeef" else 24 * HOUR_S
    young, old = (tmp_path / f"{name}.{digit * 16}-{kernel}.tmp" for digit in "ab")
    for path, age_s in ((young, patience_s - 60), (old, patience_s + 60)):
        path.write_bytes(b"?")
        os.utime(path, (time.time() - age_s,) * 2)
    save(tmp_path / name, 1)
    assert temporaries(tmp_path) == {young.name}


def test_a_leftover_of_an_earlier_version_goes_when_it_is_a_day_old(tmp_path):
    young, old = (tmp_path / f"x.pt.{number}-0.tmp" for number in (1, 2))
    for path, age_s in ((young, 23 * HOUR_S), (old, 25 * HOUR_S)):
        path.write_bytes(b"?")
        os.utime(path, (time.time() - age_s,) * 2)
    save(tmp_path / "x.pt", 1)
    assert temporaries(tmp_path) == {young.name}


def test_other_files_are_none_of_its_business(tmp_path):
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    ours = f"{'a' * 16}-{kernel}.tmp"
    theirs = [
        "x.pt.tmp", "x.pt.bak", "x.pt.1.tmp", "x.pt.1-.tmp", "x.pt.1-b.tmp", f"y.pt.{ours}", f"x.pt{ours}",
        f"x.pt.{ours}.bak", f"x.pt.a{ours}", f"x.pt.{'g' * 16}-{kernel}.tmp", f"x.pt.{'A' * 16}-{kernel}.tmp",
        f".x.pt.{ours}", f"ax.pt.{ours}",
    ]  # fmt: skip
    for name in theirs:
        (tmp_path / name).write_bytes(b"?")
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / f"x.pt.{'b' * 16}-{kernel}.tmp").mkdir()
    (tmp_path / f"x.pt.{'c' * 16}-{kernel}.tmp").symlink_to("x.pt.bak")
    (tmp_path / f"x.pt.{ours}").write_bytes(b"?")
    before = {path.name for path in tmp_path.iterdir()} - {f"x.pt.{ours}"}
    save(tmp_path / "x.pt", 1)
    assert {path.name for path in tmp_path.iterdir()} == before | {"x.pt"}


def test_leftovers_in_a_large_folder_are_found_without_listing_it_for_each_save(tmp_path, preloaded):
    library = preloaded("count_readdir.c")
    script = """
import ctypes, sys
from pathlib import Path
import torch
from gdsdata import write_tensor
folder, count = Path(sys.argv[1]), ctypes.CDLL(None).count_of_readdir
for i in range(5000):
    (folder / str(i)).touch()
for i in (7, 8):
    (folder / f"new-{i}.{'a' * 16}-deadbeef.tmp").touch()
    __import__("os").utime(folder / f"new-{i}.{'a' * 16}-deadbeef.tmp", (0, 0))
before = count()
for i in range(20):
    write_tensor(torch.zeros(3), folder / f"new-{i}")
print(count() - before, [path.name for path in folder.glob("*.tmp")])
"""
    code, said, errors = run_script(script, tmp_path, environment={"LD_PRELOAD": str(library)})
    assert code == 0, errors
    entries, left = said.split(maxsplit=1)
    assert left == "[]\n"
    assert 5000 <= int(entries) <= 5 * 5100, "20 saves listed it at most five times"


# --------------------------------------------------------------------------------------------- of processes that live


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_another_process_is_writing_stays_and_can_be_committed(tmp_path, name):
    others = [BeingSaved(tmp_path / name) for _ in range(2)]
    theirs = temporaries(tmp_path)
    for value in (1, 2):
        save(tmp_path / name, value)
        check(tmp_path / name, value)
    assert temporaries(tmp_path) == theirs and len(theirs) == 2
    others[0].commit()
    assert (tmp_path / name).read_bytes() == bytes(1 << 20)
    others[1].kill()
    save(tmp_path / name, 3)
    check(tmp_path / name, 3)
    assert not temporaries(tmp_path)


def test_a_forked_child_removes_nothing_of_its_parents_save(tmp_path):
    output = engine.Output(str(tmp_path / "x"), 5)
    if (child := os.fork()) == 0:
        del output
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    output.commit()
    assert (tmp_path / "x").read_bytes() == bytes(5)


def test_a_temporary_file_that_is_removed_during_a_save_is_an_error(tmp_path):
    output = engine.Output(str(tmp_path / "x"), 5)
    (name,) = temporaries(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(IoError, match=f"could not save '{tmp_path}/x': its temporary file '.*' was removed"):
        output.commit()


def test_without_locks_saves_succeed_and_keep_files_that_may_be_in_use(tmp_path, preloaded):
    script = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_leftovers import HOUR_S, NAMES, BeingSaved, check, engine, save, temporaries
for name in NAMES:
    path = Path(sys.argv[1]) / name
    other = BeingSaved(path)
    (theirs,) = temporaries(path.parent)
    assert "-00000000.tmp" in theirs, theirs
    save(path, 1)
    check(path, 1)
    assert temporaries(path.parent) == {theirs}, name
    os.utime(path.parent / theirs, (time.time() - 25 * HOUR_S,) * 2)
    other.kill()
    save(path, 2)
    check(path, 2)
    assert not temporaries(path.parent), name
print("done")
"""
    environment = {"LD_PRELOAD": str(preloaded("no_locks.c")), "NO_LOCKS_ERRNO": "37"}
    ended = run_script(script, tmp_path, Path(__file__).parent, environment=environment)
    assert ended == (0, "done\n", "")


# EINTR is tmpfs's answer to any signal before Linux 6.10, EPERM that of a container's profile.
@pytest.mark.parametrize("refusal", [errno.EINTR, errno.EPERM, errno.EINVAL])
def test_a_save_succeeds_where_no_space_can_be_reserved_in_advance(tmp_path, preloaded, refusal):
    script = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_leftovers import NAMES, check, save
for name in NAMES:
    save(Path(sys.argv[1]) / name, 1)
    check(Path(sys.argv[1]) / name, 1)
print("done")
"""
    environment = {"LD_PRELOAD": str(preloaded("no_fallocate.c")), "FALLOCATE_ERRNO": str(refusal)}
    assert run_script(script, tmp_path, Path(__file__).parent, environment=environment) == (0, "done\n", "")


@pytest.mark.parametrize("refusal", [{}, {"FTRUNCATE_ERRNO": str(errno.EIO)}], ids=["in its midst", "at its beginning"])
def test_a_save_that_fails_leaves_nothing_where_a_close_makes_files(tmp_path, preloaded, refusal):
    script = """
import os, sys
from gdsdata.io import engine
try:
    engine.Output(sys.argv[1] + "/x", 5)
except OSError as error:
    print(error.errno)
print(os.listdir(sys.argv[1]))
"""
    environment = {"LD_PRELOAD": str(preloaded("streaming_fs.c")), **refusal}
    said = "".join(f"{number}\n" for number in refusal.values())
    assert run_script(script, tmp_path, environment=environment) == (0, f"{said}[]\n", "")


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_files_are_only_streamed_hooks_leave_saves_to_torch(tmp_path, preloaded, refusal):
    script = """
import os, sys, warnings
import torch
import gdsdata
from gdsdata.errors import NotReplaceable
path, tensor = sys.argv[1] + "/x.pt", torch.arange(1000)
with warnings.catch_warnings(record=True) as warned, gdsdata.torch_hooks():
    torch.save(tensor, path)
assert torch.equal(torch.load(path), tensor)
(warning,) = warned
assert "takes files only from their beginning to their end" in str(warning.message), warning
try:
    gdsdata.save(tensor, path)
except NotReplaceable as error:
    assert "save to another folder" in str(error), error
else:
    raise AssertionError
print(os.listdir(sys.argv[1]))
"""
    environment = {"LD_PRELOAD": str(preloaded("streaming_fs.c")), "FTRUNCATE_ERRNO": str(refusal)}
    assert run_script(script, tmp_path, environment=environment) == (0, "['x.pt']\n", "")


def count_of(name: str, value: float) -> int:
    """Return the size of this container's state."""
    return int(400_000 * value)


# A fork in a new namespace of process ids is its process 1, and ends with this program.
SAVING_CONTAINER = """
import ctypes, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from test_leftovers import CLONE_NEWPID, PR_SET_PDEATHSIG, count_of, save
libc = ctypes.CDLL(None)
assert libc.unshare(CLONE_NEWPID) == 0
if process_1 := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(process_1, 0)[1]))
libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
assert os.getpid() == 1
path, value = Path(sys.argv[1]) / sys.argv[2], float(sys.argv[3])
count = count_of(path.name, value)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(12):
    save(path, value, count)
"""
CLONE_NEWPID, PR_SET_PDEATHSIG = 0x20000000, 1


@pytest.mark.parametrize("name", NAMES)
def test_two_containers_of_equal_process_ids_may_save_one_name(tmp_path, name):
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    if os.geteuid() != 0 or subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip("a process id of its own takes root, and a container that permits it")
    with contextlib.ExitStack() as ends:
        containers = []
        for value in (1, 2):
            command = [sys.executable, "-c", SAVING_CONTAINER, tmp_path, name, str(value), Path(__file__).parent]
            container = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            ends.callback(container.kill)
            containers.append(container)
        for container in containers:
            assert container.stdout.readline() == "ready\n", container.communicate()
        for container in containers:
            container.stdin.write("go\n")
            container.stdin.flush()
        for container in containers:
            assert container.communicate(timeout=60)[1] == "" and container.returncode == 0
    assert not temporaries(tmp_path)
    if name == "x.bin":
        last = gdsdata.read_tensor(tmp_path / name, torch.float32, (1,))[0].item()
    else:
        last = gdsdata.load(tmp_path / name)["a"][0].item()
    check(tmp_path / name, last, count_of(name, last))


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that builds a library of this folder for LD_PRELOAD."""
    folder = tmp_path_factory.mktemp("preloaded")

    def build(source: str) -> Path:
        library = folder / f"{source}.so"
        compiler = os.environ.get("CC", "cc")
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, Path(__file__).parent / source, "-ldl"]
        subprocess.run(command, check=True)
        return library

    return build

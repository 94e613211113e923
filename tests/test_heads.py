"""The first bytes of many files, by more threads if the storage is slow."""

import errno
import itertools
import os
import stat
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import descriptors, random_bytes, run_script

import gdsdata
from gdsdata import GDSDataset, Reading
from gdsdata.errors import IoError
from gdsdata.storage import heads, opened
from gdsdata.storage.heads import read_heads
from gdsdata.storage.opened import open_file


@pytest.fixture(params=[False, True], ids=["fast storage", "slow storage"])
def is_slow(request, monkeypatch):
    """The first files take less, or more, than the time from which on many threads are used.

    A few files are read at once.
    """
    monkeypatch.setattr(heads, "_SLOW_S", -1.0 if request.param else 60.0)
    monkeypatch.setattr(heads, "_FILES_AT_ONCE", 50)
    monkeypatch.setattr(heads, "_SLOW_FILES_AT_ONCE", 50)
    return request.param


def write_parquet(path, rows):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"a": pa.FixedSizeListArray.from_arrays(rows.ravel(), 4)})
    pytest.importorskip("pyarrow.parquet").write_table(table, path)


def write_npz(path, rows):
    np.savez(path, a=rows)


WRITERS = {"x.npy": np.save, "x.npz": write_npz, "x.parquet": write_parquet}


@pytest.fixture
def paths(tmp_path):
    found = [tmp_path / f"{i:03}" for i in range(300)]
    for i, path in enumerate(found):
        path.write_bytes(random_bytes(i % 50, i))
        os.utime(path, ns=(0, 10**9 + i))
    return list(map(str, found))


@pytest.mark.parametrize("count", [0, 1, 64, 65, 81, 300])
@pytest.mark.parametrize("head_bytes", [0, 20])
def test_heads_sizes_and_times_are_those_of_the_files_in_their_order(paths, is_slow, count, head_bytes):
    before = descriptors(), threading.active_count()
    found, size_bytes, mtime_ns = read_heads(paths[:count], head_bytes)
    assert found == [random_bytes(i % 50, i)[:head_bytes] for i in range(count)]
    assert size_bytes.tolist() == [i % 50 for i in range(count)]
    assert mtime_ns.tolist() == [10**9 + i for i in range(count)]
    assert (descriptors(), threading.active_count()) == before


@pytest.mark.parametrize(("cores", "if_fast"), [(1, 1), (2, 2), (128, 8)])
def test_slow_storage_is_read_by_16_threads_and_memory_by_as_many_as_there_are_cores(
    paths, is_slow, cores, if_fast, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    used, stock = set(), heads.engine.read_heads
    monkeypatch.setattr(heads.engine, "read_heads", lambda *a: (used.add(a[-1]), stock(*a))[1])
    read_heads(paths, 8)
    assert used == {16 if is_slow else if_fast}


@pytest.mark.parametrize("count", [1, 64, 65, 300])
def test_statuses_are_those_of_the_system(paths, is_slow, count, tmp_path):
    some = [*paths[: count - 1], str(tmp_path / "nowhere"), str(tmp_path), str(tmp_path / "a" / "b")]
    modes, size_bytes, mtime_ns = heads.statuses_of(some)
    assert size_bytes.tolist() == [*(i % 50 for i in range(count - 1)), -1, os.stat(tmp_path).st_size, -1]
    assert mtime_ns.tolist() == [*(10**9 + i for i in range(count - 1)), 0, os.stat(tmp_path).st_mtime_ns, 0]
    kinds = [stat.S_IFMT(mode) for mode in modes.tolist()]
    assert kinds == [*[stat.S_IFREG] * (count - 1), 0, stat.S_IFDIR, 0]


@pytest.mark.parametrize("head_bytes", [0, 8])
@pytest.mark.parametrize("place", [0, 70, 299])
def test_a_path_that_is_no_file_is_an_error_that_names_it(paths, is_slow, tmp_path, place, head_bytes):
    os.mkfifo(tmp_path / "pipe")
    before = descriptors()

    def refused(path, kind, reason):
        with pytest.raises(kind, match=reason) as caught:
            read_heads([*paths[:place], str(path), *paths[place:]], head_bytes)
        return caught.value

    refused(tmp_path / "nowhere", FileNotFoundError, "nowhere")
    refused(tmp_path / "pipe", IoError, "it is a pipe")
    error = refused(tmp_path, IoError, f"indexing {tmp_path}: reading its first {head_bytes} bytes failed: Is a dir")
    assert (error.path, error.offset, error.length) == (str(tmp_path), 0, head_bytes)
    os.symlink("loop", tmp_path / "loop")
    refused(tmp_path / "loop", IoError, f"indexing {tmp_path}/loop: it cannot be opened: Too many levels of symbolic")
    assert descriptors() <= before  # what tests before this one left may close meanwhile


def test_only_a_file_that_failed_is_read_again(paths, is_slow, tmp_path, monkeypatch):
    read, heads_of = [], heads._heads_of
    monkeypatch.setattr(heads, "_heads_of", lambda some, count: (read.append(len(some)), heads_of(some, count))[1])
    with pytest.raises(FileNotFoundError):
        read_heads([*paths[:250], str(tmp_path / "nowhere"), *paths[250:]], 8)
    assert read == [64, 1]


def test_files_that_failed_once_are_read(paths, is_slow, monkeypatch):
    expected, stock = read_heads(paths, 8), heads.engine.read_heads

    def failing(*arguments):
        _, rows, *found = stock(*arguments)
        failed = arguments[1] // 2
        rows[failed:] = 255  # what lies behind may not have been read
        return failed, rows, *found

    monkeypatch.setattr(heads.engine, "read_heads", failing)
    found = read_heads(paths, 8)
    assert found[0] == expected[0]
    assert all(map(np.array_equal, found[1:], expected[1:]))


def test_heads_are_read_while_few_descriptors_are_left(tmp_path):
    """16 threads share the descriptors that the process may still open, and wait for each other."""
    code, out, error = run_script(FEW_DESCRIPTORS, tmp_path, timeout_s=60)
    assert (code, out, error) == (0, "300 0 299\n", "")


FEW_DESCRIPTORS = """
import os, resource, sys
from gdsdata.storage import heads
heads._SLOW_S = -1.0
paths = [f"{sys.argv[1]}/{i}" for i in range(300)]
for i, path in enumerate(paths):
    with open(path, "wb") as file:
        file.write(bytes(i))
highest = max(map(int, os.listdir("/proc/self/fd")))
heads._FILES_TRIED = 1
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
found, sizes, _ = heads.read_heads(paths, 300)
print(len(found), [len(head) for head in found] == list(range(300)) and sizes[0], sizes[-1])
"""


@pytest.mark.parametrize(("limit", "data_sets"), [(64, 1), (128, 2)])
def test_data_sets_of_many_files_are_made_with_few_descriptors(tmp_path, limit, data_sets):
    """The files that an earlier data set keeps open hold descriptors too."""
    code, out, error = run_script(FEW_DESCRIPTORS_OF_DATA_SETS, tmp_path, limit, data_sets, timeout_s=60)
    assert (code, out, error) == (0, f"{[300] * data_sets}\n", "")


FEW_DESCRIPTORS_OF_DATA_SETS = """
import resource, sys
import gdsdata
folder, limit, data_sets = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
seen, kept = [], []
for number in range(data_sets):
    for i in range(300):
        with open(f"{folder}/{number}-{i}", "wb") as file:
            file.write(i.to_bytes(2, "little"))
    kept.append(gdsdata.GDSDataset(f"{folder}/{number}-*", 8, gdsdata.formats.Records("<u2", ()), device="cpu"))
    seen.append(len({int(one) for batch in kept[-1] for one in batch}))
print(seen)
"""


@pytest.mark.parametrize("name", WRITERS)
def test_storage_that_reads_less_than_it_is_asked_for_gives_whole_files(tmp_path, monkeypatch, name):
    rows = np.arange(40, dtype=np.int64).reshape(10, 4)
    WRITERS[name](tmp_path / name, rows)
    whole_read = os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, offset: whole_read(file, min(length, 7), offset))
    dataset = GDSDataset(tmp_path / name, 10, shuffle=False, device="cpu", reading=Reading(index_cache=None))
    (batch,) = dataset
    values = batch["a"] if isinstance(batch, dict) else batch
    assert values.numpy().tobytes() == rows.tobytes()


@pytest.mark.parametrize("name", ["x.npz", "x.safetensors"])
def test_storage_that_loses_an_open_file_is_an_error_that_names_it(tmp_path, monkeypatch, name):
    gdsdata.save({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    np.savez(tmp_path / "x.npz", a=np.ones(2))
    read = gdsdata.load if name == "x.safetensors" else (lambda path: open_file(str(path)))

    def stale(descriptor):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    before = descriptors()
    monkeypatch.setattr(os, "fstat", stale)
    with pytest.raises(IoError, match=f"{name}.*: Stale file handle") as error:
        read(tmp_path / name)
    assert error.value.errno == errno.ESTALE and error.value.filename == str(tmp_path / name)
    del error
    monkeypatch.undo()
    assert descriptors() == before


def test_a_name_with_a_nul_is_an_error_that_names_it(paths):
    with pytest.raises(ValueError, match=r"'a\\x00b' contains a NUL"):
        heads.statuses_of([*paths, "a\0b"])


def test_files_are_looked_at_side_by_side_in_order_and_not_far_ahead_of_their_use(monkeypatch):
    monkeypatch.setattr(opened, "_AHEAD", 2)
    begun, together = [], threading.Barrier(4, timeout=20)

    def look(path):
        begun.append(path)
        if len(begun) <= 4:
            together.wait()
        return path

    paths = [str(i) for i in range(100)]
    most_ahead, found = 0, []
    for one in opened.of_each(look, paths, 4):
        found.append(one)
        most_ahead = max(most_ahead, len(begun) - len(found))
    assert found == paths == sorted(begun, key=int)
    assert most_ahead <= 2 * 4


@pytest.mark.parametrize("computed_s, alone", [(0.1, 1), (0.6, 5)])
def test_files_are_looked_at_by_threads_only_if_they_wait(monkeypatch, computed_s, alone):
    """Looking at each file takes 1 s."""
    clocks = {"perf_counter": itertools.count(), "thread_time": itertools.count(step=computed_s)}
    monkeypatch.setattr(opened, "time", SimpleNamespace(**{name: clock.__next__ for name, clock in clocks.items()}))
    together = threading.Barrier(2, timeout=20)

    def look(path):
        if int(path) >= alone:
            together.wait()
        return path, threading.current_thread() is threading.main_thread()

    found = list(opened.of_each(look, [str(i) for i in range(5)], 2, only_if_slow=True))
    assert found == [(str(i), i < alone) for i in range(5)]


def test_files_behind_one_that_cannot_be_looked_at_are_left_alone():
    begun = []

    def look(path):
        begun.append(path)
        return 1 // int(path != "3")

    found = opened.of_each(look, [str(i) for i in range(1000)], 2)
    assert [next(found) for _ in range(3)] == [1, 1, 1]
    with pytest.raises(ZeroDivisionError):
        next(found)
    assert len(begun) < 20

"""The first bytes of many files, by more threads if the storage is slow."""

import os
import stat
import threading

import pytest
from helpers import descriptors, random_bytes

from gdsdata.errors import IoError
from gdsdata.storage import heads
from gdsdata.storage.heads import read_heads


@pytest.fixture(params=[False, True], ids=["fast storage", "slow storage"])
def is_slow(request, monkeypatch):
    """Every part is read in less, or in more, than the time from which threads are used."""
    monkeypatch.setattr(heads, "_SLOW_S", -1.0 if request.param else 60.0)
    return request.param


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


def test_more_threads_than_cores_read_if_the_storage_is_slow(paths, is_slow, monkeypatch):
    used, cores = [], len(os.sched_getaffinity(0))
    stock = heads.engine.read_heads
    monkeypatch.setattr(heads.engine, "read_heads", lambda *a: (used.append(a[-1]), stock(*a))[1])
    read_heads(paths, 8)
    assert used == [max(cores, 16) if is_slow else min(cores, 8)]


@pytest.mark.parametrize("count", [1, 64, 65, 300])
def test_statuses_are_those_of_the_system(paths, is_slow, count, tmp_path):
    some = [*paths[: count - 1], str(tmp_path / "nowhere"), str(tmp_path), str(tmp_path / "a" / "b")]
    modes, size_bytes, mtime_ns = heads.statuses_of(some)
    assert size_bytes.tolist() == [*(i % 50 for i in range(count - 1)), -1, os.stat(tmp_path).st_size, -1]
    assert mtime_ns.tolist() == [*(10**9 + i for i in range(count - 1)), 0, os.stat(tmp_path).st_mtime_ns, 0]
    kinds = [stat.S_IFMT(mode) for mode in modes.tolist()]
    assert kinds == [*[stat.S_IFREG] * (count - 1), 0, stat.S_IFDIR, 0]


def test_a_pipe_among_many_files_is_refused_without_a_wait(paths, is_slow, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(IoError, match="it is a pipe"):
        read_heads([*paths, str(tmp_path / "pipe")], 8)


@pytest.mark.parametrize("place", [0, 70, 299])
def test_a_missing_file_and_an_unreadable_one_have_different_errors(paths, is_slow, tmp_path, place):
    before = descriptors()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_heads([*paths[:place], str(tmp_path / "nowhere"), *paths[place:]], 8)
    with pytest.raises(IoError, match=f"indexing {tmp_path}: reading its first 8 bytes failed: Is a dir") as caught:
        read_heads([*paths[:place], str(tmp_path), *paths[place:]], 8)
    assert (caught.value.path, caught.value.offset, caught.value.length) == (str(tmp_path), 0, 8)
    assert descriptors() == before

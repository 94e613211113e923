"""The first bytes of many files: one after another, or by threads if the storage is slow."""

import os
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


def test_threads_read_only_if_the_storage_is_slow(paths, is_slow, monkeypatch):
    used = set()
    heads_of = heads._heads_of
    monkeypatch.setattr(heads, "_heads_of", lambda *a: (used.add(threading.current_thread().name), heads_of(*a))[1])
    read_heads(paths, 8)
    assert (len(used) > 1) == is_slow


@pytest.mark.parametrize("place", [0, 70, 299])
def test_a_missing_file_and_an_unreadable_one_have_different_errors(paths, is_slow, tmp_path, place):
    before = descriptors()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_heads([*paths[:place], str(tmp_path / "nowhere"), *paths[place:]], 8)
    with pytest.raises(IoError, match=f"indexing {tmp_path}: reading its first 8 bytes failed: Is a dir") as caught:
        read_heads([*paths[:place], str(tmp_path), *paths[place:]], 8)
    assert (caught.value.path, caught.value.offset, caught.value.length) == (str(tmp_path), 0, 8)
    assert descriptors() == before

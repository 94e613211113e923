"""Faults while the local cache fills: right bytes or the right error, and no part of a block."""

import contextlib
import errno
import hashlib
import os
import time

import pytest
from helpers import MIB, anonymous_bytes
from servers.fault_kinds import Plan
from test_remote_faults import MOST_S, begin, reach, reached_server

from gdsdata import GDSDataset, Reading
from gdsdata import cache as program
from gdsdata.errors import IoError
from gdsdata.formats import Records
from gdsdata.io import remote_access
from gdsdata.storage import settings
from gdsdata.storage.cache import Cache

# An object is one sample and one block, so each fault hits a request that fills the cache.
OBJECT_BYTES = 64 * 2**10
BATCH = 16
AT_ONCE = 64
# The ring, the blocks on their way, and what allocators and the server in this process keep.
MORE_BYTES = 64 * MIB

KINDS = ["slow", "stall"]


@pytest.fixture
def server(monkeypatch):
    with reached_server(monkeypatch) as running:
        yield running


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(settings, "_folder_of_derived", None)
    yield str(tmp_path / "cache")
    remote_access.use_cache(None, None)


def make_objects(server, count):
    keys = [f"train/{number:05}.bin" for number in range(count)]
    for key in keys:
        server.make(key, OBJECT_BYTES)
    return keys


def digests_of_epoch(data):
    """Read an epoch within its memory, and return the digests of its samples, sorted."""
    found, before = [], anonymous_bytes()
    for batch in data:
        found += [hashlib.md5(sample).hexdigest() for sample in batch.numpy()]
        assert anonymous_bytes() <= before + data.stats()["ring_bytes"] + MORE_BYTES
    return sorted(found)


def verified_blocks(folder, capsys):
    """Have the program verify the cache, and return how many blocks are right; none is wrong."""
    capsys.readouterr()
    status, output = program.main([folder, "--verify"]), capsys.readouterr().out
    assert status == 0, output
    return int(output.partition("verified: ")[2].split()[0])


def assert_connections_are_few(server):
    """Every connection that the client still has is one that it can use again."""
    assert server.counts()["open"] <= AT_ONCE
    sockets = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            sockets += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    assert sockets <= 2 * AT_ONCE + 32  # both ends are in this process, and a few others


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_fills_through_faults_serves_the_next_epoch(server, folder, kind, capsys):
    fills(server, folder, kind, 30, capsys)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_fills_through_1000_faults_serves_the_next_epoch(server, folder, kind, capsys):
    fills(server, folder, kind, 1000, capsys)


def fills(server, folder, kind, count, capsys):
    keys = make_objects(server, 5 * count // 2)
    expected = sorted(hashlib.md5(server.content(key)).hexdigest() for key in keys)
    data = GDSDataset(
        server.url("train/"), BATCH, Records("u1", (OBJECT_BYTES,)), device="cpu", seed=count,
        reading=Reading(cache=folder, cache_bytes="1GiB"),
    )  # fmt: skip
    reach(server, stall_timeout_s=0.2)
    server.plan = Plan(seed=count, share=0.5, kinds=(kind,), in_a_row=2, slow_bytes_per_s=400_000)
    assert digests_of_epoch(data) == expected
    assert server.counts()["faults"][kind] >= count
    assert data.stats()["bytes"]["cache_fill"] == len(keys) * OBJECT_BYTES
    assert verified_blocks(folder, capsys) == len(keys)
    server.forget()
    assert digests_of_epoch(data) == expected
    assert server.counts()["ranges"] == 0
    assert_connections_are_few(server)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_is_late_is_an_error_and_is_fetched_again(server, folder, kind, capsys):
    fails(server, folder, kind, 30, capsys)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_1000_blocks_that_are_late_are_errors_and_are_fetched_again(server, folder, kind, capsys):
    fails(server, folder, kind, 1000, capsys)


def fails(server, folder, kind, count, capsys):
    keys = make_objects(server, 5 * count // 2)
    late = set()
    Cache(folder, "1GiB")
    remote_access.use_cache(folder, None)
    reach(server, stall_timeout_s=0.2, deadline_s=0.3)
    server.plan = Plan(seed=count, share=0.5, kinds=(kind,), in_a_row=None, slow_bytes_per_s=20_000)
    for key, reading in reads(server, keys):
        try:
            assert reading.result() == server.content(key)
        except IoError as error:
            assert (error.errno, error.path) == (errno.ETIMEDOUT, server.url(key))
            assert "too little by the deadline" in str(error)
            late.add(key)
    assert len(late) >= count // 4
    assert server.counts()["faults"][kind] >= count
    assert verified_blocks(folder, capsys) == len(keys) - len(late)
    assert {one.held_bytes for one in Cache(folder).objects()} <= {0, OBJECT_BYTES}
    server.plan = Plan()
    server.forget()
    reach(server)
    for key, reading in reads(server, keys):
        assert reading.result() == server.content(key)
    assert {record.key for record in server.records} == late
    assert verified_blocks(folder, capsys) == len(keys)
    assert_connections_are_few(server)


def reads(server, keys):
    """Read whole objects, so many at a time, each within its deadline."""
    for first in range(0, len(keys), AT_ONCE):
        started, some = time.monotonic(), keys[first : first + AT_ONCE]
        begun = [begin(server, 0, OBJECT_BYTES, key, OBJECT_BYTES) for key in some]
        yield from zip(some, begun, strict=True)
        assert time.monotonic() - started < MOST_S

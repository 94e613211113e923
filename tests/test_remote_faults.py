"""Ranges from a server that fails in every way: the right bytes or the right error, in time."""

import contextlib
import errno
import logging
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import MIB, descriptors, eventually, exit_code_of_fork, start_script
from servers.fault_kinds import Plan
from servers.faults import FaultServer

from gdsdata import GDSDataset, _engine
from gdsdata.errors import CorruptData, IoError
from gdsdata.formats import Records
from gdsdata.storage import objects, ranges, stores
from gdsdata.storage.secret import Keys

SIZE = 8 * MIB
DEADLINE_S = 20.0
# A read ends within its deadline, a stall, and what a busy machine adds.
MOST_S = 45.0
SECRET = "a-secret-of-tests"
LONGEST_RANGE = 20_000

# The server recovers from these: the bytes are right.
PASSING = [
    "reset_before", "close_before", "reset_within", "silence", "stall", "slow", "short", "short_length", "wrong_range",
    "chunked", "compressed", "garbage_headers", "huge_headers", "status_429", "status_429_retry_after", "status_500",
    "status_503", "status_503_retry_after", "expired",
]  # fmt: skip
# These are errors at once: their class, errno, and what their text says.
LASTING = {
    "status_403": (IoError, errno.EACCES, "status 403, AccessDenied"),
    "status_404": (FileNotFoundError, errno.ENOENT, "status 404, NoSuchKey"),
    "whole": (IoError, errno.EOPNOTSUPP, "does not serve ranges"),
    "other_version": (CorruptData, None, "was replaced since it was indexed"),
}
# The cache sees only whether a range arrived, so a few kinds show what it does.
UNCACHED = {*PASSING, *LASTING} - {"reset_within", "status_503", "expired", "status_404", "other_version"}


@contextlib.contextmanager
def reached_server(monkeypatch):
    """Run a server that this process reads from, with short time limits."""
    monkeypatch.setattr(stores, "_options", {})
    monkeypatch.setattr(stores, "_stores", {})
    with FaultServer() as running:
        reach(running)
        yield running
    objects.forget("s3://")
    _engine.configure_http()


@pytest.fixture
def server(monkeypatch):
    with reached_server(monkeypatch) as running:
        running.make("made.bin", SIZE)
        yield running


def reach(server, **options):
    """Have this process read the server's objects, and give up soon."""
    keys = Keys(access_key_id=server.access_key, secret_access_key=server.secret_key)
    stores.configure("s3", endpoint_url=server.endpoint_url, region=server.region, credentials=keys)
    quick = {"deadline_s": DEADLINE_S, "stall_timeout_s": 0.4, "least_backoff_s": 0.001, "most_backoff_s": 0.05}
    _engine.configure_http(**{**quick, **options})


@pytest.fixture(params=["streamed", "cached"])
def cache(request, tmp_path):
    kind = request.node.callspec.params.get("kind", "")
    if request.param == "cached":
        if kind in UNCACHED and request.node.get_closest_marker("slow") is None:
            pytest.skip("the slow variant does this one")
        _engine.use_cache(str(tmp_path / "cache"), 2**30, 64 << 10)
    yield request.param
    _engine.use_cache(None, 0, 0)


def begin(server, offset, length, key="made.bin", size=SIZE):
    identity = objects.Identity(size, server.content_.objects[f"{server.bucket}/{key}"].etag)
    return ranges.BegunRange(ranges.table_of(server.url(key), identity), offset, length)


def some_ranges(seed, count):
    draw = random.Random(seed)
    for _ in range(count):
        offset = draw.randrange(SIZE - 1)
        yield offset, draw.randint(1, min(LONGEST_RANGE, SIZE - offset))


def read_until_faults(server, kind, count, check):
    """Read ranges, 64 at a time, until a kind of fault came so often.

    Each read ends in `check(begun, offset, length)`, within its deadline.
    """
    for seed in range(10_000):
        # Objects that no cache has. Ranges of one object share a signature, which would expire for
        # all of them again and again.
        keys = [f"{kind}-{seed}-{i}.bin" for i in range(64 if kind == "expired" else 1)] * 64
        for key in set(keys):
            server.make(key, SIZE)
        started = time.monotonic()
        begun = [(begin(server, *one, key), key, *one) for key, one in zip(keys, some_ranges(seed, 64), strict=False)]
        for one in begun:
            check(*one)
        assert time.monotonic() - started < MOST_S
        if server.counts()["faults"].get(kind, 0) >= count:
            return


def assert_nothing_is_left(server, before):
    """Every connection that the client still has is one that it can use again.

    The first test of a process also begins the engine, whose threads have descriptors of their own.
    """
    counts = server.counts()
    assert counts["open"] <= 64
    assert descriptors() <= before + 2 * 64 + 16 + 2 * os.cpu_count()


@pytest.mark.parametrize("kind", PASSING)
def test_bytes_are_right_whatever_happens_on_their_way(server, cache, kind):
    passes(server, kind, 30)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", PASSING)
def test_bytes_are_right_after_1000_faults(server, cache, kind):
    passes(server, kind, 1000)


def passes(server, kind, count):
    before = descriptors()
    server.plan = Plan(seed=count, share=0.5, kinds=(kind,), in_a_row=2, retry_after_s=0, slow_bytes_per_s=100_000)

    def check(reading, key, offset, length):
        assert reading.result() == server.content(key, offset, length)

    read_until_faults(server, kind, count, check)
    assert_nothing_is_left(server, before)


@pytest.mark.parametrize("kind", LASTING)
def test_errors_say_what_happened_and_where(server, cache, kind):
    fails(server, kind, 30)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", LASTING)
def test_errors_are_right_after_1000_faults(server, cache, kind):
    fails(server, kind, 1000)


def fails(server, kind, count):
    before = descriptors()
    server.plan = Plan(seed=count, share=0.5, kinds=(kind,), in_a_row=None)
    expected, number, text = LASTING[kind]
    outcomes = {"right": 0, "wrong": 0}

    def check(reading, key, offset, length):
        try:
            assert reading.result() == server.content(key, offset, length)
            outcomes["right"] += 1
        except (OSError, CorruptData) as error:
            outcomes["wrong"] += 1
            assert type(error) is expected, error
            assert text in str(error) and server.url(key) in str(error), error
            assert error.path == server.url(key)
            assert number is None or error.errno == number
            assert SECRET not in str(error) and "X-Amz" not in str(error)
            if expected is not FileNotFoundError:
                # If they are cached, it is about the blocks that the range lies in.
                assert error.offset < offset + length and offset < error.offset + error.length

    read_until_faults(server, kind, count, check)
    assert outcomes["right"] and outcomes["wrong"]
    assert_nothing_is_left(server, before)


def test_a_refusal_names_the_request(server):
    server.plan = Plan(share=1.0, kinds=("status_404",), in_a_row=None)
    with pytest.raises(FileNotFoundError, match=r"request id \S+"):
        begin(server, 0, 100).result()


def test_a_storm_is_sat_out(server, cache):
    """All requests of a while are refused; the client asks for less, and loses nothing."""
    server.plan = Plan(seed=1, share=0.05, kinds=("status_503",), in_a_row=None, storm=40)
    begun = [(begin(server, *one), *one) for one in some_ranges(3, 300)]
    for reading, offset, length in begun:
        assert reading.result() == server.content("made.bin", offset, length)
    assert _engine.http_statistics()["throttled"] > 0


def test_a_server_that_never_answers_is_an_error_by_the_deadline(server):
    reach(server, deadline_s=1.0)
    server.plan = Plan(share=1.0, kinds=("silence",), in_a_row=None)
    started = time.monotonic()
    with pytest.raises(IoError, match="sent nothing for 400 ms") as caught:
        begin(server, 0, 100).result()
    assert caught.value.errno == errno.ETIMEDOUT
    assert time.monotonic() - started < 10.0


def test_a_server_that_stalls_after_some_bytes_again_and_again_is_read_to_the_end(server, cache):
    """Twelve attempts without a byte are an error; these have bytes each."""
    reach(server, stall_timeout_s=0.05)
    server.fail_next("stall", 14)
    assert begin(server, MIB, MIB).result() == server.content("made.bin", MIB, MIB)
    assert server.counts()["faults"]["stall"] == 14


def test_a_read_that_is_canceled_leaves_no_connection_and_asks_no_more(server):
    server.plan = Plan(share=1.0, kinds=("silence",), in_a_row=None)
    begun = [begin(server, *one) for one in some_ranges(4, 32)]
    assert eventually(lambda: server.counts()["open"] > 0)
    for reading in begun:
        reading.cancel()
    retries = _engine.http_statistics()["retries"]
    server.plan = Plan()
    assert begin(server, 5, 50).result() == server.content("made.bin", 5, 50)
    assert eventually(lambda: server.counts()["open"] <= 32, 15)
    assert _engine.http_statistics()["retries"] == retries


def test_credentials_that_end_in_the_middle_of_an_epoch_are_renewed(server, cache):
    record = 4096
    data = GDSDataset(server.url("made.bin"), 16, Records("u1", (record,)), device="cpu", shuffle=False)
    got = []
    for step, batch in enumerate(data):
        got.append(np.asarray(batch).tobytes())
        if step % 40 == 10:
            server.expire_signatures()
    assert b"".join(got) == server.content("made.bin")
    assert server.counts()["statuses"].get("403", 0) > 0 or cache == "cached"


def test_no_log_has_a_secret(server, caplog):
    caplog.set_level(logging.DEBUG)
    server.plan = Plan(seed=5, share=0.5, kinds=("reset_before", "status_503", "expired"), in_a_row=2)
    for offset, length in some_ranges(6, 20):
        begin(server, offset, length).result()
    assert SECRET not in caplog.text and "Signature=" not in caplog.text


# ------------------------------------------------------------------------------------------- processes

REACHES = """
import sys
import time
import numpy as np
from gdsdata import _engine
from gdsdata.storage import objects, ranges, stores
from gdsdata.storage.secret import Keys
endpoint, cache, size, etag, seed = sys.argv[1:]
MIB = 2**20
url, identity = "s3://bucket/made.bin", objects.Identity(int(size), etag)
stores.configure("s3", endpoint_url=endpoint, region="us-east-1",
                 credentials=Keys(access_key_id="gdsdata", secret_access_key="a-secret-of-tests"))
_engine.use_cache(cache or None, 2**30, 64 << 10)
"""
FILL = """
order = np.random.default_rng(int(seed)).permutation(int(size) // (256 << 10))
print("reads", flush=True)
for first in range(0, len(order), 8):
    some = order[first : first + 8].tolist()
    begun = [ranges.BegunRange(ranges.table_of(url, identity), i * (256 << 10), 256 << 10) for i in some]
    for one in begun:
        one.result()
"""
END = """
begun = [ranges.BegunRange(ranges.table_of(url, identity), i * MIB, 1000) for i in range(2)]
while not _engine.http_statistics()["requests"]:
    time.sleep(0.01)
print("reads", flush=True)
"""


def killed_and_right(server, folder: Path, times: int):
    etag = server.content_.objects[f"{server.bucket}/made.bin"].etag
    expected = server.content("made.bin")
    draw = random.Random(times)
    kills = verified = 0
    for seed in range(times):
        cache = str(folder / f"cache-{verified}")
        filling = start_script(REACHES + FILL, server.endpoint_url, cache, SIZE, etag, seed)
        assert filling.stdout.readline() == "reads\n"
        time.sleep(draw.uniform(0, 0.25))
        filling.send_signal(signal.SIGKILL)
        kills += filling.wait() == -signal.SIGKILL
        for pipe in (filling.stdout, filling.stderr):
            pipe.close()
        if draw.random() < 0.5 and seed + 1 < times:
            continue  # another one goes on filling this cache
        _engine.use_cache(cache, 2**30, 64 << 10)
        begun = [(begin(server, offset, MIB), offset) for offset in range(0, SIZE, MIB)]
        for one, offset in begun:
            assert one.result() == expected[offset : offset + MIB]
        verified += 1
    assert kills > times // 2


@pytest.mark.usefixtures("quick_programs")
def test_a_process_that_is_killed_while_it_fills_the_cache_leaves_right_bytes(server, tmp_path):
    server.link.delay_s, server.link.bytes_per_s = 0.005, 20e6
    try:
        killed_and_right(server, tmp_path, 5)
    finally:
        _engine.use_cache(None, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("quick_programs")
def test_50_processes_that_are_killed_while_they_fill_the_cache_leave_right_bytes(server, tmp_path):
    server.link.delay_s, server.link.bytes_per_s = 0.005, 20e6
    try:
        killed_and_right(server, tmp_path, 50)
    finally:
        _engine.use_cache(None, 0, 0)


@pytest.mark.whole_end
@pytest.mark.usefixtures("quick_programs")
@pytest.mark.parametrize("cached", [False, True])
def test_a_program_ends_in_silence_and_soon_while_requests_are_in_flight(server, tmp_path, cached):
    server.plan = Plan(share=1.0, kinds=("silence",), in_a_row=None)
    etag = server.content_.objects[f"{server.bucket}/made.bin"].etag
    cache = str(tmp_path) if cached else ""
    with start_script(REACHES + END, server.endpoint_url, cache, SIZE, etag, 0) as program:
        assert program.stdout.readline() == "reads\n"
        assert (program.wait(30), program.stderr.read()) == (0, "")


def test_a_forked_child_reads_by_a_client_of_its_own(server, cache):
    assert begin(server, 0, 1000).result() == server.content("made.bin", 0, 1000)
    server.plan = Plan(share=1.0, kinds=("silence",), in_a_row=1)
    begun = begin(server, 3 * MIB, 1000)  # the parent's request is in flight
    assert eventually(lambda: server.counts()["faults"])
    server.plan = Plan()
    expected = server.content("made.bin", MIB, MIB)

    def read():
        assert begin(server, MIB, MIB).result() == expected

    assert exit_code_of_fork(read, 30) == 0
    assert begun.result() == server.content("made.bin", 3 * MIB, 1000)

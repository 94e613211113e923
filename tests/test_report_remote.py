"""`GDSDataset.report` and `stats` of objects: what the network gave, and who throttled."""

import pytest
from helpers import grouped
from servers.fault_kinds import Plan
from servers.faults import FaultServer, Link

from gdsdata import GDSDataset, Lanes
from gdsdata.formats import Records
from gdsdata.io import engine
from gdsdata.observe.report import CPU, NETWORK, STORAGE, THROTTLED, TRAINING, NetworkUse, WorkerTimes, diagnose
from gdsdata.observe.times import StepTimes
from gdsdata.storage import objects

KIB, MIB = 2**10, 2**20


@pytest.fixture
def faults(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engine.configure_http(least_backoff_s=0.02, most_backoff_s=0.1, hedge=False)
    with FaultServer() as server:
        yield server
    objects.forget("http://")
    engine.configure_http()


def records(server, size_bytes, **arguments):
    server.make("x.bin", size_bytes)
    arguments = {"device": "cpu", "shuffle": False, **arguments}
    return GDSDataset(server.url("x.bin", "http"), 8, Records("u1", (16 * KIB,)), **grouped(arguments))


def report_of(data, step=lambda batch: None):
    for batch in data:
        step(batch)
    return data.report()


@pytest.mark.parametrize("shuffle", [False, True, Lanes(lanes=2, window_pieces=5, piece_samples=4)])
def test_slow_connections_are_the_network(faults, shuffle):
    faults.link = Link(delay_s=0.02, bytes_per_s=1e6)
    data = records(faults, 4 * MIB, shuffle=shuffle)
    report = report_of(data)
    assert report.limiter == NETWORK and report.input_share > 0.5
    assert report.network["requests"] > 0 and report.network["throttled"] == 0
    assert "GB/s in" in report.suggestion and "cache=" in report.suggestion and "doctor URL" in report.suggestion
    assert ("lanes" in report.suggestion) == (shuffle is True)
    found = data.stats()
    assert found["bytes"]["remote"] + found["piece_bytes"]["remote"] == 4 * MIB
    assert {"requests", "retries", "throttled", "hedges"} <= set(found["network"])


def test_a_server_that_refuses_requests_is_named(faults):
    data = records(faults, 4 * MIB)
    faults.plan = Plan(seed=1, share=0.5, kinds=("status_503",), in_a_row=2)
    faults.link = Link(delay_s=0.01)
    report = report_of(data)
    assert report.limiter == THROTTLED and report.network["throttled"] > 0
    assert report.network["retries"] >= report.network["throttled"]
    assert "throttled" in report.suggestion and "fewer processes" in report.suggestion


def test_a_cache_that_is_filled_waits_for_the_network(faults, tmp_path):
    faults.link = Link(delay_s=0.02, bytes_per_s=2e6)
    data = records(faults, 4 * MIB, cache=tmp_path / "blocks", cache_bytes="1GiB")
    try:
        report = report_of(data)
        first = data.stats()["bytes"]
        for _ in data:
            pass
        again = data.stats()["bytes"]
    finally:
        engine.use_cache(None, 0, MIB)
    assert report.limiter == NETWORK and report.network["gb_per_s"] > 0
    assert "cache= with room for all of it (cache_bytes=)" in report.suggestion, "it has one, of 1 GiB"
    assert first["cache_fill"] > 0 and sum(first.values()) == 4 * MIB
    assert again["cache_fill"] == first["cache_fill"] and sum(again.values()) == 8 * MIB


def test_local_files_have_no_network(tmp_path):
    (tmp_path / "x").write_bytes(bytes(MIB))
    data = GDSDataset(tmp_path / "x", 8, Records("u1", (16 * KIB,)), device="cpu")
    assert report_of(data).network == {} and "network" not in data.stats()


def diagnosed(network, input_s=5.0, **found):
    times = StepTimes(100, input_s, 0.0, 5.0, 0.0)
    bytes_of = {"remote": network.bytes, "direct": network.other_bytes}
    return diagnose(times, WorkerTimes(**found), bytes_of, 0.0, 5.0, "none", network)


@pytest.mark.parametrize(
    ("limiter", "network", "found"),
    [
        (NETWORK, {"bytes": 10**9}, {"active_s": 8, "storage_s": 6}),
        (NETWORK, {"bytes": 10**9, "throttled": 1}, {"active_s": 8, "storage_s": 6}),
        (THROTTLED, {"bytes": 10**9, "throttled": 20}, {"active_s": 8, "storage_s": 6}),
        (CPU, {"bytes": 10**9, "throttled": 20}, {"active_s": 8, "storage_s": 1}),
        (STORAGE, {"bytes": 10**8, "other_bytes": 10**9}, {"active_s": 8, "storage_s": 6}),
        (NETWORK, {"bytes": 10**9, "pieces_s": 4.0}, {}),
        (CPU, {"bytes": 10**9, "pieces_s": 1.0}, {}),
        (TRAINING, {"bytes": 10**9, "throttled": 20}, {"input_s": 0.05, "active_s": 8, "storage_s": 6}),
    ],
)
def test_the_bytes_from_servers_decide_what_storage_means(limiter, network, found):
    report = diagnosed(NetworkUse(requests=1000, **network), **found)
    assert report.limiter == limiter and report.suggestion


def test_the_numbers_of_the_network_are_exported():
    report = diagnosed(NetworkUse(requests=7, retries=2, bytes=10**9), active_s=8, storage_s=6)
    assert report.network == {"gb_per_s": 0.1, "requests": 7, "retries": 2, "throttled": 0, "hedges": 0}
    assert "0.1 GB/s in 7 requests, 2 of them retries" in str(report)
    assert report.scalars()["gdsdata/network/retries"] == 2.0
    assert "gdsdata_network_requests 7.0" in report.prometheus()

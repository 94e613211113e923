"""The live view: rates, and what the terminal, the page and Prometheus are given."""

import io
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from live_view import own, own_sockets, write_samples

import gdsdata
from gdsdata import top
from gdsdata.observe import live
from gdsdata.observe.live import client, metrics, rates, sections, server, terminal, words


@pytest.fixture
def sockets(tmp_path, monkeypatch):
    yield from own_sockets(tmp_path, monkeypatch)


@pytest.fixture
def samples(tmp_path):
    return write_samples(tmp_path / "samples")


# ------------------------------------------------------------------------------------------------- rates


def snapshot(clock_s, pid=1, **changed):
    engine = {"id": 1, "device": "cpu", "workers": 2, "bytes": {"direct": 0}, "storage_bytes": 0, "requests": 0}
    engine |= {"errors": 0, **{f"worker_{what}_s": 0.0 for what in ("active", "storage", "link", "device")}}
    found = {
        "version": 1, "gdsdata": "0.1.0", "pid": pid, "parent_pid": 0, "host": "a", "program": "train.py",
        "rank": pid, "world_size": 2, "loader_worker": None, "started_s": 0.0, "time_s": clock_s, "clock_s": clock_s,
        "data_sets": [], "engines": [engine], "saves": [], "cache": None, "network": {}, "stores": {},
    }  # fmt: skip
    engine |= {name: value for name, value in changed.items() if name in engine}
    return found | {name: value for name, value in changed.items() if name not in engine}


def data_set(batches, id=0, **changed):
    found = {"id": id, "source": "/d/a.npy", "files": 1, "epoch": 0, "epoch_batch": batches, "epoch_batches": 100}
    found |= {"ring": {"slots": 4, "ready": 3, "filling": 1}, "bytes": {"direct": 10 * batches}, "batches": batches}
    found |= {"stalls": 0, "stall_s": 0.0, "ring_full_s": 0.0, "ready_sum": 3.0 * batches, "input_s": 0.0}
    return found | {"transform_s": 0.0, "training_s": 0.0, "checkpoint_s": 0.0} | changed


def viewed(*pairs):
    before, now = zip(*pairs, strict=True)
    answers = client.Answers(list(now), [])
    return rates.view_of(answers, {rates.key_of(one): one for one in before if one is not None})


def test_rates_are_differences_of_counters_over_the_processs_own_time():
    before = snapshot(10.0, bytes={"direct": 1000}, worker_active_s=1.0, data_sets=[data_set(10, input_s=1.0)])
    now = snapshot(12.0, bytes={"direct": 5000}, worker_active_s=3.0)
    now["data_sets"] = [data_set(20, input_s=1.5, training_s=1.5)]
    (process,) = viewed((before, now))["processes"]
    assert process["routes"] == {"direct": {"bytes": 5000, "bytes_per_s": 2000.0}}
    assert (process["batches_per_s"], process["input_share"]) == (5.0, 0.25)
    assert process["workers"]["active"] == 0.5  # 2 s of 2 workers in 2 s
    (at,) = process["data_sets"]
    assert (at["batches_per_s"], at["bytes_per_s"], at["mean_ready"]) == (5.0, 50.0, 3.0)


def test_a_process_that_is_seen_first_has_no_rates():
    (process,) = viewed((None, snapshot(10.0, bytes={"direct": 1000}, data_sets=[data_set(3)])))["processes"]
    assert process["routes"] == {"direct": {"bytes": 1000, "bytes_per_s": None}}
    assert process["batches_per_s"] is process["input_share"] is process["data_sets"][0]["batches_per_s"] is None


def test_a_new_data_set_counts_from_nothing_and_an_ended_one_no_more():
    before = snapshot(10.0, data_sets=[data_set(50, id=0)])
    now = snapshot(11.0, data_sets=[data_set(7, id=1)])
    (process,) = viewed((before, now))["processes"]
    assert process["batches_per_s"] == 7.0


def test_the_number_of_an_ended_process_may_come_again():
    before, now = snapshot(10.0, bytes={"direct": 9000}), snapshot(11.0, bytes={"direct": 10}, started_s=10.5)
    assert viewed((before, now))["sum"]["routes"]["direct"]["bytes_per_s"] is None


def test_ranks_are_summed_and_a_shared_cache_is_counted_once():
    cache = dict.fromkeys(("filled_bytes", "evicted_bytes", "damaged_blocks", "refused_blocks", "most_bytes"), 0)
    cache |= {"folder": "/c", "used_bytes": 500}
    pairs = [
        (snapshot(10.0, pid, cache=cache), snapshot(11.0, pid, bytes={"direct": 100 * pid}, cache=cache))
        for pid in (1, 2)
    ]
    view = viewed(*pairs)
    assert view["sum"]["routes"]["direct"] == {"bytes": 300, "bytes_per_s": 300.0}
    assert (view["sum"]["processes"], view["sum"]["cache_bytes"], view["sum"]["workers"]["count"]) == (2, 500, 4)
    assert "2 processes" in sections.plain(view)


def test_many_readers_cost_no_more_than_one():
    asked = []
    sampler = rates.Sampler(lambda: asked.append(1) or client.Answers([], []), least_s=60)
    assert sampler.view() is sampler.view()
    assert sampler.answers() == ([], [])
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("count", "said"), [(None, "–"), (0, "0 B"), (999, "999 B"), (1234567, "1.23 MB"), (999.9e6, "1000 MB")]
)
def test_sizes_have_three_digits_and_a_unit(count, said):
    assert words.size(count) == said


# ------------------------------------------------------------------------------------------------- the command


def test_once_prints_one_view_with_rates(sockets, samples, capsys):
    live.start()
    dataset = gdsdata.GDSDataset(samples, batch_size=4, device="cpu")
    list(dataset)
    assert top.main(["--once", "--pid", str(os.getpid()), "--every", "0.01"]) == 0
    said = capsys.readouterr().out
    assert "Processes" in said and "page cache" in said and "samples/000.npy and 39 more" in said


def test_a_name_that_is_not_utf_8_is_printed_with_escapes(sockets, samples, capsys):
    samples = samples.rename(samples.parent / os.fsdecode(b"\xff"))
    live.start()
    dataset = gdsdata.GDSDataset(samples, batch_size=4, device="cpu")
    list(dataset)
    assert top.main(["--once", "--pid", str(os.getpid()), "--every", "0.01"]) == 0
    assert "\\udcff" in capsys.readouterr().out


def test_json_is_one_line_of_snapshots(sockets, capsys):
    live.start()
    assert top.main(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["version"], [one["pid"] for one in said["processes"]]) == (1, [os.getpid()])


def test_without_a_process_it_says_how_to_have_one(sockets, capsys):
    assert top.main(["--once"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("No process of this user exports its numbers.") and "GDSDATA_TOP=1" in said


def test_a_process_that_does_not_export_is_named_while_another_one_does(sockets, capsys):
    live.start()
    assert top.main(["--once", "--pid", "4711"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("Process 4711 exports no numbers to this user.") and "GDSDATA_TOP=1" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--every", "0"], "must be more than 0"),
        (["--pid", "-5"], "--pid -5 is no process id: give a number of 1 or more"),
        (["--every", "1e20"], "must be more than 0, and at most 86400"),
        (["--allow-remote"], "--allow-remote is for --serve"),
        (["--serve", "0.0.0.0:8000"], "other machines reach this address"),
        (["--serve", "example.org:8000"], "give an IP address"),
        (["--serve", "127.0.0.1"], "write it as 127.0.0.1:8000"),
        (["--serve", "127.0.0.1:70000"], "write it as 127.0.0.1:8000"),
    ],
)
def test_wrong_arguments_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        top.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_terminal_draws_what_a_pipe_gets(sockets):
    console = pytest.importorskip("rich.console").Console(record=True, width=200, file=io.StringIO())
    view = viewed((snapshot(1.0), snapshot(2.0, bytes={"direct": 5_000_000}, data_sets=[data_set(7)])))
    console.print(terminal.drawn(view))
    said = console.export_text()
    assert "5 MB/s" in said and "3 ready" in said and "epoch 0, batch 7 of 100" in said
    views = []

    class Views:
        def view(self):
            views.append(view)
            return view

    def sleep(seconds):
        if len(views) == 3:
            raise KeyboardInterrupt

    terminal.watch(Views(), 1.0, sleep)
    assert len(views) == 3


def test_without_rich_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.table", None)
    with pytest.raises(ImportError, match=r"pip install 'gdsdata\[top\]', or use --once"):
        terminal.drawn(viewed((None, snapshot(1.0))))


# ------------------------------------------------------------------------------------------------- the page


@pytest.fixture
def served(sockets):
    """Return the URL of a server of this process's numbers."""
    live.start()
    one = server.Server("127.0.0.1", 0, rates.Sampler(client.ask, least_s=0.0))
    thread = threading.Thread(target=one.serve_forever, args=(0.01,))
    thread.start()
    yield one.url
    one.shutdown()
    thread.join()
    one.server_close()


def got(url, method="GET", **headers):
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def test_the_page_the_view_and_the_metrics_are_served(served):
    status, headers, page = got(served)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"<script src" not in page and b"http://" not in page.replace(b"http://www.w3.org/2000/svg", b"")
    assert "script-src 'sha256-" in headers["Content-Security-Policy"]
    _, headers, view = got(f"{served}view.json")
    assert [one["pid"] for one in json.loads(view)["processes"]] == [os.getpid()]
    assert "Access-Control-Allow-Origin" not in headers
    _, headers, text = got(f"{served}metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert b"gdsdata_processes 1\n" in text
    assert got(f"{served}other")[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1.evil.example", ""])
def test_a_request_for_another_name_is_refused(served, host):
    for path in ("", "view.json", "metrics"):
        assert got(f"{served}{path}", Host=host)[0] == 421


def test_localhost_is_a_name_of_a_loopback_address(served):
    port = served.rstrip("/").rpartition(":")[2]
    assert got(f"{served}view.json", Host=f"LOCALHOST:{port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_the_server_is_read_only(served, method):
    assert got(served, method)[0] == 501


def test_a_head_has_no_body(served):
    status, headers, body = got(f"{served}metrics", "HEAD")
    assert (status, body) == (200, b"") and int(headers["Content-Length"]) > 100


def test_an_unspecified_address_takes_addresses_and_no_names():
    one = server.Server("0.0.0.0", 0, rates.Sampler(client.ask))
    one.server_close()
    assert one.is_for_here("10.1.2.3:8000") and one.is_for_here("[fe80::1]:8000")
    assert not one.is_for_here("evil.example:8000") and not one.is_for_here("")


def test_a_client_leaves_out_the_port_of_http():
    one = server.Server("127.0.0.1", 0, rates.Sampler(client.ask))
    one.server_close()
    assert not one.is_for_here("127.0.0.1")
    one.server_port = 80
    assert one.is_for_here("127.0.0.1") and one.is_for_here("localhost") and one.is_for_here("127.0.0.1:80")
    assert not one.is_for_here("evil.example") and not one.is_for_here("127.0.0.1:8000")


@pytest.mark.parametrize(
    ("where", "parsed"),
    [
        ("8000", ("127.0.0.1", 8000)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("localhost:1", ("127.0.0.1", 1)),
        ("[::1]:8000", ("::1", 8000)),
        ("[0:0:0:0:0:0:0:1]:8000", ("::1", 8000)),  # as browsers write it in the Host header
    ],
)
def test_addresses_are_parsed(where, parsed):
    assert server.parsed(where) == parsed


# ------------------------------------------------------------------------------------------------- Prometheus


def test_the_metrics_are_what_prometheus_parses(sockets, samples, tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    live.start()
    dataset = gdsdata.GDSDataset(samples, batch_size=4, device="cpu")
    list(dataset)
    checkpointer = gdsdata.AsyncCheckpointer(tmp_path / 'a "quoted" \\ folder')
    text = metrics.text(client.ask(os.getpid()))
    checkpointer.close()
    families = {one.name: one for one in parser.text_string_to_metric_families(text)}
    at = {one["id"]: one for one in own()["data_sets"]}
    batches = {int(one.labels["data_set"]): one.value for one in families["gdsdata_batches"].samples}
    assert batches == {number: one["batches"] for number, one in at.items()} and 10 in batches.values()
    assert families["gdsdata_bytes"].type == "counter" and families["gdsdata_ring_slots"].type == "gauge"
    folders = {one.labels["folder"] for one in families["gdsdata_saves"].samples}
    assert str(tmp_path / 'a "quoted" \\ folder') in folders
    for name, family in families.items():
        assert family.documentation.endswith(".") and name.startswith("gdsdata_")
        assert family.type == "gauge" or all(one.name.endswith("_total") for one in family.samples)


def test_a_snapshot_takes_little_time(sockets, samples):
    """A bound that only a wrong way of counting would miss: 0.3 ms were measured."""
    live.start()
    list(gdsdata.GDSDataset(samples, batch_size=4, device="cpu"))
    took = []
    for _ in range(5):
        began = time.perf_counter()
        own()
        took.append(time.perf_counter() - began)
    assert min(took) < 0.25

"""`gdsdata.profile`: torch's traces, with the work of the engine's threads at the right times."""

import gzip
import json
import os
import time

import pytest
import torch
from helpers import write_records
from torch.profiler import ProfilerActivity, record_function, schedule, tensorboard_trace_handler

import gdsdata
from gdsdata import EngineOptions, GDSDataset, Reading
from gdsdata.formats import Records
from gdsdata.io import engine
from gdsdata.observe import trace

RECORD_BYTES, RECORDS = 65536, 256
WAITING = "gdsdata: waiting for a batch"
# The two clocks differ by some microseconds, and by more if a busy machine stops the thread that
# compares them.
CLOCKS_AGREE_US = 500


def records(folder, **options):
    path = folder / "records"
    if not path.exists():
        write_records(path, RECORDS, RECORD_BYTES)
    options = EngineOptions(workers=2, **options)
    return GDSDataset(
        path, 16, Records("u1", (RECORD_BYTES,)), shuffle=False, device="cpu", reading=Reading(options=options)
    )


def profiled(**arguments):
    return gdsdata.profile(activities=[ProfilerActivity.CPU], **arguments)


def events_of(path):
    open_file = gzip.open if str(path).endswith(".gz") else open
    with open_file(path, "rt") as file:
        return json.load(file)["traceEvents"]


def exported(profile, path):
    profile.export_chrome_trace(str(path))
    return events_of(path)


def engines_spans(events):
    return [event for event in events if event.get("cat") == "gdsdata"]


def row_names(events):
    named = [event for event in events if event["name"] == "thread_name"]
    return {event["tid"]: event["args"]["name"] for event in named if "gdsdata" in event["args"]["name"]}


def bytes_of(spans):
    return sum(span["args"].get("bytes", 0) for span in spans)


def ends(span):
    return span["ts"] + span["dur"]


def lies_in(span, one):
    return one["ts"] - CLOCKS_AGREE_US <= span["ts"] and ends(span) <= ends(one) + CLOCKS_AGREE_US


def test_a_trace_of_a_loop_shows_where_every_byte_came_from(tmp_path):
    data = records(tmp_path, direct="always")
    with profiled() as profile:
        for _ in torch.utils.data.DataLoader(data, batch_size=None):
            time.sleep(0.001)
    events = exported(profile, tmp_path / "trace.json")
    spans = engines_spans(events)
    assert bytes_of(spans) == RECORDS * RECORD_BYTES
    assert {span["name"] for span in spans if bytes_of([span])} == {"gdsdata: storage"}
    rows = row_names(events)
    assert {span["tid"] for span in spans} == set(rows) and {span["pid"] for span in spans} == {os.getpid()}
    assert any(name.startswith("gdsdata worker") for name in rows.values())
    waits = [event for event in events if event["name"] == WAITING]
    assert len(waits) == len(data) and any(event["name"].startswith("aten::") for event in events)
    assert any(wait["ts"] < ends(span) and span["ts"] < ends(wait) for wait in waits for span in spans)


@pytest.mark.parametrize("faults", ["", "late=1,late_ms=20"])
def test_the_engines_spans_lie_in_the_range_that_waited_for_them(tmp_path, faults):
    content = write_records(tmp_path / "tensor", 64, RECORD_BYTES)
    options = EngineOptions(workers=2, direct="always" if faults else "auto", faults=faults)
    tensor = torch.empty(content.shape, dtype=torch.uint8)
    with gdsdata.Engine(options) as reader:
        reader.read(tmp_path / "tensor", tensor).result()  # the first read makes the backend
        with profiled() as profile:
            for i in range(10):
                time.sleep(0.01)
                with record_function(f"read {i}"):
                    reader.read(tmp_path / "tensor", tensor).result()
    events = exported(profile, tmp_path / "trace.json")
    ranges = [event for event in events if event["name"].startswith("read ")]
    spans = engines_spans(events)
    assert len(ranges) == 10
    for span in spans:
        assert sum(lies_in(span, one) for one in ranges) == 1, span
    for one in ranges:
        inside = [span for span in spans if lies_in(span, one)]
        assert bytes_of(inside) == content.nbytes
    if faults:
        assert sum(span["dur"] for span in spans) > sum(one["dur"] for one in ranges) / 2


def test_a_row_does_one_thing_at_a_time(tmp_path):
    data = records(tmp_path)
    with profiled() as profile:
        list(data)
    spans = engines_spans(exported(profile, tmp_path / "trace.json"))
    assert bytes_of(spans) == RECORDS * RECORD_BYTES
    for row in {span["tid"] for span in spans}:
        own = sorted((span["ts"], ends(span)) for span in spans if span["tid"] == row)
        assert all(end <= begin + 0.01 for (_, end), (begin, _) in zip(own, own[1:], strict=False))


def test_each_cycle_of_a_schedule_has_its_own_in_whatever_file_its_handler_writes(tmp_path):
    handler = tensorboard_trace_handler(str(tmp_path / "traces"), "me", use_gzip=True)
    data = records(tmp_path)
    with profiled(schedule=schedule(wait=1, warmup=1, active=2), on_trace_ready=handler) as profile:
        for _ in range(8):
            list(data)
            profile.step()
    written = list((tmp_path / "traces").iterdir())
    assert len(written) == 2
    for path in written:
        assert bytes_of(engines_spans(events_of(path))) == 2 * RECORDS * RECORD_BYTES


def test_engines_that_are_made_meanwhile_are_seen_and_those_that_go_too(tmp_path):
    with profiled() as profile:
        for most in (2**20, 2**21):
            list(records(tmp_path, request_bytes=most))
    assert bytes_of(engines_spans(exported(profile, tmp_path / "trace.json"))) == 2 * RECORDS * RECORD_BYTES


def test_dropped_spans_are_counted_in_the_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "_MOST_SPANS", 1)
    data = records(tmp_path)
    with profiled() as profile:
        list(data)
    events = exported(profile, tmp_path / "trace.json.gz")
    spans, rows = engines_spans(events), row_names(events)
    assert len(spans) == len(rows) <= 3
    assert any(" more spans" in name for name in rows.values())


def test_nothing_is_kept_without_a_profile(tmp_path):
    data = records(tmp_path)
    list(data)
    assert engine.end_spans() == []
    with profiled() as profile:
        pass
    list(data)
    assert engines_spans(exported(profile, tmp_path / "trace.json")) == []


def test_a_file_that_is_no_trace_is_left_alone_with_a_warning(tmp_path):
    (tmp_path / "trace").write_bytes(b"\xff{}")
    for name in ("trace", "none", "trace.gz"):
        with pytest.warns(UserWarning, match="not in it"):
            trace._add_rows(str(tmp_path / name), (), 0)
    assert (tmp_path / "trace").read_bytes() == b"\xff{}" and os.listdir(tmp_path) == ["trace"]


@pytest.mark.gpu
def test_a_trace_of_a_gpu_has_its_workers(tmp_path):
    write_records(tmp_path / "records", RECORDS, RECORD_BYTES)
    options = EngineOptions(workers=2, calibrate=False)
    data = GDSDataset(
        tmp_path / "records", 16, Records("u1", (RECORD_BYTES,)), device="cuda:0", reading=Reading(options=options)
    )
    with gdsdata.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profile:
        list(data)
        torch.cuda.synchronize()
    events = exported(profile, tmp_path / "trace.json")
    assert bytes_of(engines_spans(events)) == RECORDS * RECORD_BYTES
    assert set(row_names(events).values()) <= {f"gdsdata worker {i} (cuda:0)" for i in range(2)}

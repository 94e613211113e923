"""case=io of the bench: rows of every type and direction, their bytes, refusals and cleanup."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import torch
from test_bench import MIB, REPOSITORY, bench, on_disk, results_in, small

from gdsdata.bench import cases, settings
from gdsdata.bench import run as bench_run
from gdsdata.bench.cases.io.case import Io, Transfers, native_aio
from gdsdata.bench.cases.io.report import IoLayout
from gdsdata.bench.cases.io.row import IoRow
from gdsdata.bench.data.pattern import Pattern
from gdsdata.bench.data.transfers import Memory, Work
from gdsdata.bench.harness import tables
from gdsdata.bench.measure import limits
from gdsdata.bench.peers import kvikio, registry
from gdsdata.bench.peers.gdsdata.transfers import options_for
from gdsdata.io import engine

pytestmark = pytest.mark.usefixtures("quick_programs")

KIB = 2**10
DIRECTIONS = ["read", "write", "randread", "randwrite"]
CPU_ROWS = [peer for peer in registry.rows("io") if peer.xfer == "any" and not peer.package]


def work_on(path, direction="read", cache="cold", **changes):
    chosen = {
        "file_bytes": MIB + 16 * KIB, "io_bytes": 64 * KIB, "depth": 6, "threads": 3, "batch_calls": 4,
        "duration_s": None, "seed": 5,
    }  # fmt: skip
    return Work(str(path), direction, "direct" if direction.endswith("write") else cache, **(chosen | changes))


def row_of(peer):
    source = Transfers("read", "read", "cpu", "", 0)
    return IoRow(peer.key, source, cases.IoSettings(), {}, "cpu")


def made(path, work):
    Pattern(work.seed).write_file(path, work.file_bytes)
    return work


# ------------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("peer", CPU_ROWS, ids=lambda peer: peer.key)
def test_one_pass_carries_every_whole_transfer_once(tmp_path, peer, direction):
    work, row = work_on(tmp_path / "file", direction), row_of(peer)
    if not work.writes:
        made(work.path, work)
    assert row.verify([work]) == {"checked_bytes": MIB}, "the last 16 KiB of the file are no whole transfer"
    found = row.run(work)
    assert found["ops"] == 16 and found["bytes"] == 16 * work.io_bytes
    assert found["iops"] == pytest.approx(16 / found["seconds"])
    assert 0 < found["p50_us"] <= found["p90_us"] <= found["p99_us"] <= found["p99_9_us"] <= found["seconds"] * 1e6
    assert found["threads"] == {"sync": 3, "async": 1, "batch": 4}[peer.submit]
    assert found["transfers_per_call"] == (2 if peer.submit == "batch" else 1)
    if tables.is_ours(peer.key):
        assert sum(found["served"].values()) == MIB, "the engine counts these bytes"
        assert found["requests_per_op"] > 0
    else:
        assert found["path"]
    row.compare()
    row.after()
    assert os.listdir(tmp_path) == ["file"], "no temporary stays"


@pytest.mark.parametrize("peer", CPU_ROWS, ids=lambda peer: peer.key)
def test_a_run_with_a_time_passes_over_the_file_again(tmp_path, peer):
    work = made(tmp_path / "file", work_on(tmp_path / "file", "randread", "warm", duration_s=0.1))
    row = row_of(peer)
    found = row.run(work)
    row.compare()
    row.after()
    assert found["ops"] > 16 and found["bytes"] == found["ops"] * work.io_bytes
    assert 0.1 <= found["seconds"] < 5
    if tables.is_ours(peer.key):
        assert found["served"]["page_cache"] + found["served"]["buffered"] == found["bytes"]


@pytest.mark.parametrize("cache", ["cold", "warm"])
@pytest.mark.parametrize("peer", CPU_ROWS, ids=lambda peer: peer.key)
def test_a_byte_changed_in_the_file_is_found_with_its_offset(tmp_path, peer, cache):
    work = made(tmp_path / "file", work_on(tmp_path / "file", "randread", cache))
    place = 300_001
    with open(work.path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))
        os.fsync(file.fileno())
    said = f"the byte at offset 300,001 is {byte ^ 0x10:#04x}, {byte:#04x} was due; 1 of the 65,536 bytes from offset"
    with pytest.raises(ValueError, match=f"{said} 262,144 on differ"):
        row_of(peer).verify([work])
    timed = row_of(peer)
    timed.run(work_on(work.path, "read", cache, io_bytes=MIB, depth=1, threads=1))
    with pytest.raises(ValueError, match="the byte at offset 300,001"):
        timed.compare()  # compares what the last call has read
    timed.after()


@pytest.mark.parametrize("peer", CPU_ROWS, ids=lambda peer: peer.key)
def test_written_bytes_that_belong_elsewhere_are_found(tmp_path, monkeypatch, peer):
    work, row = work_on(tmp_path / "file", "randwrite"), row_of(peer)
    stamp = Memory.stamp
    monkeypatch.setattr(Memory, "stamp", lambda memory, place, offsets: stamp(memory, place, offsets ^ 4096))
    with pytest.raises(ValueError, match=r"the byte at offset \d.* was due"):
        row.verify([work])
    assert os.listdir(tmp_path) == []
    row.run(work)
    with pytest.raises(ValueError, match="was due"):
        row.compare()
    row.after()


@pytest.mark.parametrize("peer", CPU_ROWS, ids=lambda peer: peer.key)
def test_an_error_of_one_transfer_ends_the_run(tmp_path, peer):
    work = made(tmp_path / "file", work_on(tmp_path / "file", duration_s=20.0))
    os.truncate(work.path, 500 * KIB)
    started = time.monotonic()
    with pytest.raises(Exception, match=r"file.*(ends|bytes were moved)"):
        row_of(peer).run(work)
    assert time.monotonic() - started < 10


def test_random_orders_hold_each_transfer_once_and_follow_the_seed(tmp_path):
    first, again, other = (work_on("x", "randread", seed=seed).offsets() for seed in (1, 1, 2))
    assert sorted(first) == list(range(0, MIB, 64 * KIB)) == work_on("x", "read").offsets().tolist()
    assert (first == again).all() and (first != other).any()


def test_settings_of_the_user_override_those_of_the_transfer_type():
    cold, warm = work_on("x"), work_on("x", cache="warm")
    chosen = options_for(cold, {"workers": 3}, None, batches=False)
    assert (chosen.direct, chosen.workers, chosen.queue_depth, chosen.coalesce_gap_bytes) == ("always", 3, 64, 0)
    assert options_for(warm, {}, None, batches=False).direct == "never"
    chosen = options_for(cold, {"direct": "never", "queue_depth": 2, "coalesce_gap_bytes": 9}, None, False)
    assert (chosen.direct, chosen.queue_depth, chosen.coalesce_gap_bytes) == ("never", 2, 9)
    chosen = options_for(cold, {}, "cufile", batches=True)
    assert chosen.backend == "cufile" and chosen.cufile_batch


def test_rows_follow_the_transfer_types(tmp_path):
    def keys(xfer, submit, cache, on_gpu):
        asked = Io(settings.Settings(engine={}, case=cases.IoSettings(xfer=xfer, submit=submit)), tmp_path, None)
        source = Transfers("read", "read", "cuda" if on_gpu else "cpu", "x", MIB)
        return [peer.key for peer in asked.rows_for(source, cache)]

    every = ["cpu", "cpu_gpu", "gpu"], ["sync", "async", "batch"]
    assert keys(*every, "cold", False) == ["gdsdata_sync", "gdsdata_async", "gdsdata_batch", "pread", "kvikio"]
    on_gpu = ["gdsdata_cufile_sync", "gdsdata_cufile_async", "gdsdata_cufile_batch", "kvikio_cufile"]
    assert set(keys(*every, "cold", True)) - set(keys(*every, "cold", False)) == set(on_gpu)
    assert keys(["gpu"], ["sync"], "direct", True) == on_gpu[:1]
    assert keys(["gpu"], ["batch"], "warm", True) == [], "kvikio by cuFile does not read the page cache"
    assert keys(["gpu"], ["sync"], "warm", True) == [], "cuFile does not read the page cache"
    assert keys(["cpu"], ["sync"], "cold", True) == []


# ------------------------------------------------------------------------------------------------ the page cache

BUFFERED = """
import os
from gdsdata.bench.peers.by_hand.files import Plain

class Buffered(Plain):
    key = name = "buffered"

    def open_to_read(self, flags):
        return os.open(self.work.path, os.O_RDONLY)
"""


def test_reads_that_fill_the_page_cache_are_marked_and_nobody_is_compared_with_them(tmp_path, monkeypatch):
    on_disk(tmp_path)
    (tmp_path / "buffered_io.py").write_text(BUFFERED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    chosen = small(
        tmp_path, cases.IoSettings, case_rows=["pread", "buffered_io:Buffered"], case_file_bytes=4 * MIB,
        case_io_bytes=[65536], case_direction=["read"], case_cache=["cold", "warm"], case_depth=[2],
    )  # fmt: skip
    assert bench_run.main(chosen, tmp_path) == 0
    results = results_in(tmp_path)
    rows = {(row["key"], row["cache"]): row for row in results["rows"]}
    buffered, direct = rows["buffered_io:Buffered", "cold"], rows["pread", "cold"]
    assert buffered["through_cache"] and buffered["xfer_type"] == "page cache->CPU"
    assert buffered["cached_share"]["median"] > 0.9
    assert not direct["through_cache"] and direct["cached_share"]["max"] == 0
    assert not any(row["through_cache"] for (_, cache), row in rows.items() if cache == "warm"), (
        "rows of a warm cache use it on purpose"
    )
    assert direct["best_peer"] == buffered["best_peer"] == "pread"
    said = r"read 64 KiB x 2, cold: of what buffered moved, up to \d+% was in the page cache afterwards"
    assert any(re.search(said, note) for note in results["notes"])
    assert "| buffered (page cache) |" in (tmp_path / "report.md").read_text()


class StandIn:
    """kvikio's interface, over os.preadv. `old` has no setting for O_DIRECT."""

    CompatMode = types.SimpleNamespace(ON="ON", AUTO="AUTO")

    def __init__(self, compat=False, old=False):
        self.set_to = {"gds_threshold": 16384, "compat_mode": "AUTO", "num_threads": 1}
        self.set_to |= {} if old else {"auto_direct_io_read": False, "auto_direct_io_write": True}
        self.compat = compat
        self.defaults = types.SimpleNamespace(
            set=self.set, get=self.set_to.__getitem__, is_compat_mode_preferred=self.prefers_compat
        )

    def set(self, options):
        assert options.keys() <= self.set_to.keys()
        self.set_to |= options

    def prefers_compat(self):
        return self.compat or self.set_to["compat_mode"] == "ON"

    def CuFile(self, path, flags):
        opened = dict(self.set_to)
        direct = opened.get("auto_direct_io_read") or opened.get("auto_direct_io_write")
        return types.SimpleNamespace(is_direct_io_supported=lambda: bool(direct), close=lambda: None)


def kvikio_path(monkeypatch, tmp_path, peer=kvikio.Transfers, device_name="cpu", stand_in=None, **changes):
    """Return the path that the row reports, and kvikio's settings when it opened its file."""
    stand_in = stand_in or StandIn()
    monkeypatch.setitem(sys.modules, "kvikio", stand_in)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", stand_in.defaults)
    memory = types.SimpleNamespace(tensor=None, array=None)
    work = made(tmp_path / "file", work_on(tmp_path / "file", **changes))
    return peer(work, memory, device_name, {}).path, stand_in.set_to


def test_kvikio_goes_past_the_page_cache_where_it_is_to(tmp_path, monkeypatch):
    path, found = kvikio_path(monkeypatch, tmp_path)
    assert path == "POSIX, O_DIRECT" and found["auto_direct_io_read"] and found["num_threads"] == 3
    assert kvikio_path(monkeypatch, tmp_path, direction="write")[0] == "POSIX, O_DIRECT"
    path, found = kvikio_path(monkeypatch, tmp_path, cache="warm")
    assert path == "POSIX" and not found["auto_direct_io_read"]
    old = StandIn(old=True)
    assert kvikio_path(monkeypatch, tmp_path, stand_in=old)[0] == "POSIX", (
        "an old kvikio cannot, and its path shows that"
    )


def test_kvikio_over_the_hosts_memory_is_posix_and_only_straight_to_a_gpu_cufile(tmp_path, monkeypatch):
    path, found = kvikio_path(monkeypatch, tmp_path, device_name="cuda")
    assert path == "POSIX, O_DIRECT" and found["compat_mode"] == "ON", "bytes go from storage by way of the CPU"
    straight = {"peer": kvikio.CuFileTransfers, "device_name": "cuda"}
    for dma, said in ((True, "cuFile"), (False, "cuFile, compatibility mode")):
        monkeypatch.setattr(engine, "cufile_dma_is_possible", lambda dma=dma: dma)
        path, found = kvikio_path(monkeypatch, tmp_path, **straight)
        assert path == said and found["gds_threshold"] == 0 and found["compat_mode"] == "AUTO"
    compat = StandIn(compat=True)
    assert kvikio_path(monkeypatch, tmp_path, stand_in=compat, **straight)[0] == "POSIX, O_DIRECT"


# ------------------------------------------------------------------------------------------------ the file's bytes


def test_a_files_bytes_follow_from_their_offset_whatever_the_pieces(tmp_path):
    pattern, path = Pattern(3), tmp_path / "file"
    pattern.write_file(path, 3 * MIB + 4096)
    content = np.fromfile(path, np.uint8)
    pattern.check(content, [0], path)
    for size in (4096, 3 * 4096):
        pattern.check(content[MIB : MIB + size], [MIB], path)
        memory = np.concatenate([content[2 * MIB : 2 * MIB + size], content[:size]])
        pattern.check(memory, [2 * MIB, 0], path)
        with pytest.raises(ValueError, match="the byte at offset "):
            pattern.check(memory, [0, 2 * MIB], path)
    with pytest.raises(ValueError, match="the byte at offset 0 is"):
        Pattern(4).check(content[:4096], [0], path)
    sectors = content.view(np.uint64).reshape(-1, 64)[:, 0]
    assert len(np.unique(sectors)) == len(sectors), "each sector differs from all others"


def test_only_what_was_written_is_compared(tmp_path):
    pattern, path = Pattern(0), tmp_path / "file"
    pattern.write_file(path, 16 * 4096)
    with open(path, "r+b") as file:
        file.seek(5 * 4096)
        file.write(bytes(4096))
    due = np.ones(16, bool)
    with pytest.raises(ValueError, match="the byte at offset 20,480 is 0x00"):
        pattern.check_file(path, 4096, due)
    due[5] = False
    assert pattern.check_file(path, 4096, due) == 15 * 4096
    os.truncate(path, 15 * 4096)
    with pytest.raises(EOFError, match="it ends at 61,440"):
        pattern.check_file(path, 4096, due)


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.mark.slow
def test_quick_run_sweeps_verifies_draws_and_leaves_nothing(tmp_path):
    out, folder = tmp_path / "out", tmp_path / "data"
    folder.mkdir()
    (folder / "io-of-mine").write_text("stays")
    done = bench(
        "case=io", "quick=true", "case.io_bytes=[4096,262144]", "case.depth=[2]", "case.direction=[randread,write]",
        "case.file_bytes=1048576", f"data.folder={folder}", f"hydra.run.dir={out}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + (out / "rows.log").read_text()
    assert os.listdir(folder) == ["io-of-mine"]
    results = results_in(out)
    assert results["verified"] is True
    keys = {peer.key for peer in CPU_ROWS}
    tables = {}
    for row in results["rows"]:
        tables.setdefault((row["data"], row["cache"], row["io_bytes"], row["depth"]), set()).add(row["key"])
        run = row["runs"][0]
        assert run["ops"] * row["io_bytes"] == run["bytes"] and row["checked_bytes"] >= MIB
        assert row["cpu_user_s"]["median"] + row["cpu_system_s"]["median"] > 0 and row["path"]
    states = {("write", "direct"), *(("random read", cache) for cache in ("warm", "cold"))}
    if ("random read", "cold", 4096, 2) not in tables:
        assert any("no cold tables" in note for note in results["notes"])
        states.remove(("random read", "cold"))
    assert tables.keys() == {(*state, size, depth) for state in states for size in (4096, 262144) for depth in (2,)}
    assert all(found >= keys for found in tables.values())
    types = {row["xfer_type"] for row in results["rows"]}
    assert {"page cache->CPU, async", "CPU->storage", "CPU->storage, batch"} <= types
    assert any("Transfers to and from a GPU were left out, for device.name=cpu." in note for note in results["notes"])
    written = (out / "report.md").read_text()
    for part in (
        "| IoType | XferType | Threads | DataSetSize (KiB) | IOSize (KiB) | GiB/sec |", "| Avg_Latency (usecs) | p50 |",
        "| total_time (secs) |", "random read, 4 KiB x 2 in flight, out of the page cache, file of 1 MiB",
        "one thread's futures",
    ):  # fmt: skip
        assert part in written
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_a_sweep_has_a_line_for_each_depth_and_a_point_for_each_size(tmp_path):
    spread = {"median": 1.0, "min": 0.5, "max": 2.0}
    results = {
        "rows": [
            {"data": data, "cache": cache, "name": name, "io_bytes": size, "depth": depth, "gb_per_s": spread}
            for data, cache in (("read", "warm"), ("read", "cold"), ("write", "direct"))
            for name in ("a", "b")
            for size in (4096, 65536, MIB)
            for depth in (1, 32)
        ]
    }
    results["rows"][0]["gb_per_s"] = None  # it failed
    results["rows"] += [dict(results["rows"][-1], name="cached", through_cache=True)]
    layout = IoLayout(results)
    assert layout.is_sweep() and not IoLayout({"rows": results["rows"][:1]}).is_sweep()
    found = layout.sweep()
    assert list(found) == [("read", "warm"), ("read", "cold"), ("write", "direct")]
    assert list(found["write", "direct"]) == ["a", "b"], "a row through the page cache is no point of O_DIRECT"
    assert [size for size, _ in found["read", "warm"]["a"][1]] == [65536, MIB]
    assert [size for size, _ in found["write", "direct"]["b"][32]] == [4096, 65536, MIB]
    assert found["write", "direct"]["b"][32][0][1]["median"] == pytest.approx(1e9 / 2**30)
    layout.plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    for row in results["rows"]:
        row["gb_per_s"] = None
    layout.plot(tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists(), "if all rows failed, there is nothing to draw"


@pytest.mark.slow
def test_a_run_that_is_not_compared_says_so_and_is_no_failure(tmp_path, capsys):
    rows = ["gdsdata_batch", "pread"]
    chosen = small(
        tmp_path, cases.IoSettings, case_rows=rows, case_verify=False, case_direction=["read"],
        case_cache=["warm"], case_duration_s=None, case_file_bytes=MIB, case_io_bytes=[65536],
    )  # fmt: skip
    assert bench_run.main(chosen, tmp_path) == 0
    results = results_in(tmp_path)
    assert results["verified"] is None and [row["key"] for row in results["rows"]] == rows
    assert [row["runs"][0]["ops"] for row in results["rows"]] == [16, 16]
    assert "Bytes: not compared, for case.verify=false" in (tmp_path / "report.md").read_text()
    assert results["rows"][0]["served_bytes"]["page_cache"] == MIB, "warm means warm"


WRONG = """
from gdsdata.bench.peers.by_hand.files import Plain

class Lazy(Plain):
    name = "lazy"
    moved = 0

    def move(self, place, offsets):
        self.moved += 1
        if self.moved % 5:
            super().move(place, offsets)
"""


def test_a_row_that_leaves_a_transfer_out_fails_the_bench(tmp_path, monkeypatch, capsys):
    (tmp_path / "lazy_io.py").write_text(WRONG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    chosen = small(
        tmp_path, cases.IoSettings, case_rows=["lazy_io:Lazy"], case_file_bytes=MIB, case_io_bytes=[65536],
        case_cache=["warm"], case_depth=[2],
    )  # fmt: skip
    assert bench_run.main(chosen, tmp_path) == 1
    said = capsys.readouterr().out
    for kind in ("read", "write", "random read", "random write"):
        assert f"FAILED: {kind}, lazy: ValueError: " in said
    assert all(row["gb_per_s"] is None for row in results_in(tmp_path)["rows"]), "a row that fails has no time"
    assert os.listdir(tmp_path / "data") == []


def test_a_run_that_gets_sigterm_removes_its_files(tmp_path):
    folder = tmp_path / "data"
    command = [sys.executable, "-m", "gdsdata.bench", "case=io", "case.duration_s=60", f"data.folder={folder}"]
    command += ["case.rows=[pread]", "case.file_bytes=1048576", f"hydra.run.dir={tmp_path}/out", "case.verify=false"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **quiet) as run:
        ends = time.monotonic() + 60
        while not list(folder.glob("*/read.bin")) and time.monotonic() < ends:
            time.sleep(0.05)
        assert list(folder.glob("*/read.bin")), "the run has not begun"
        run.send_signal(signal.SIGTERM)
        assert run.wait(80) == 128 + signal.SIGTERM
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"direction": ["read", "reads"]}, r"case\.direction=reads: use read or write or randread or randwrite"),
        ({"direction": []}, r"case\.direction=\[\]: name at least one of read"),
        ({"xfer": ["disk"]}, r"case\.xfer=disk: use cpu or cpu_gpu or gpu"),
        ({"submit": ["later"]}, r"case\.submit=later: use sync or async or batch"),
        ({"io_bytes": []}, r"case\.io_bytes=\[\]: name at least one, and none twice"),
        ({"io_bytes": [4096, 1000]}, r"case\.io_bytes=1000: must be a multiple of 4096, as O_DIRECT wants it"),
        ({"file_bytes": MIB + 1}, r"case\.file_bytes=1048577: must be a multiple of 4096"),
        ({"io_bytes": [MIB], "file_bytes": 4096}, r"case\.io_bytes=1048576: more than case\.file_bytes=4096"),
        ({"depth": [1, 0]}, r"case\.depth=0: must be from 1 to 4096"),
        ({"depth": [8, 8]}, r"case\.depth=\[8, 8\]: name at least one, and none twice"),
        ({"threads": 1000}, r"case\.threads=1000: must be from 1 to 256"),
        ({"threads": 0}, r"case\.threads=0: must be more than 0"),
        ({"batch_calls": 0}, r"case\.batch_calls=0: must be more than 0"),
        ({"duration_s": 0.0}, r"case\.duration_s=0\.0: must be more than 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, said):
    chosen = settings.Settings(engine={}, case=cases.IoSettings(**fields))
    with pytest.raises(ValueError, match=said):
        settings.check(chosen)


def test_a_file_of_the_users_is_refused(tmp_path):
    chosen = settings.Settings(engine={}, case=cases.IoSettings())
    chosen.data.path = "/x"
    with pytest.raises(ValueError, match=r"data\.path=/x: case=io makes the file that it reads; data\.folder= says"):
        settings.check(chosen)


@pytest.mark.parametrize("direction", ["randread", "write"])
def test_the_limit_moves_the_same_transfers_and_leaves_no_file(tmp_path, direction):
    work = work_on(tmp_path / "file", direction)
    if not work.writes:
        made(work.path, work)
    found = limits.measured("native AIO", lambda: native_aio(work, 0.05))
    if "unavailable" in found:
        pytest.skip(found["unavailable"])
    assert found["mean_bytes"] == work.io_bytes and found["depth"] == work.depth and found["gb_per_s"] > 0
    assert os.listdir(tmp_path) == ([] if work.writes else ["file"])


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_every_transfer_type_of_a_gpu_is_verified(tmp_path):
    done = bench(
        "case=io", "quick=true", "device=cuda", "case.io_bytes=[65536]", "case.depth=[4]",
        f"data.folder={tmp_path}/data", f"hydra.run.dir={tmp_path}/out", cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "out" / "rows.log").read_text()
    results = results_in(tmp_path / "out")
    types = {row["xfer_type"] for row in results["rows"]}
    assert {"storage->CPU->GPU", "page cache->CPU->GPU, batch", "GPU->CPU->storage, async", "storage->CPU"} <= types
    assert results["verified"] is True and torch.cuda.is_available()


def test_the_check_beside_fio_says_where_fio_comes_from(tmp_path):
    script = REPOSITORY / "benchmarks" / "fio_check.py"
    if not script.is_file():
        pytest.skip("there are no sources here")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 1 and "no fio in PATH; it comes with `apt-get install fio`" in ran.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_the_check_beside_fio_prints_its_ratio(tmp_path):
    script = [sys.executable, REPOSITORY / "benchmarks" / "fio_check.py", "--only", "read", "--folder", tmp_path]
    script += ["--rounds", "1", "--seconds", "0.2", "--file-bytes", str(16 * MIB)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    rows = {line.split("|")[1].strip(): line.split("|") for line in ran.stdout.splitlines() if line.startswith("| ")}
    assert float(rows["fio, huge pages"][-2]) == 1.0 and float(rows["gdsdata_batch"][-2]) > 0.05
    assert os.listdir(tmp_path) == []

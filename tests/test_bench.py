"""The bench: its data sets, what it measures with, the peers' bytes, and whole runs."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gdsdata.bench import data, limits, loader, measure, peers, settings

REPOSITORY = Path(__file__).resolve().parents[1]
MIB = 2**20


def bench(*overrides, cwd):
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "gdsdata.bench", *overrides]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=110)


def small(tmp_path, **fields):
    """Settings for a run of a second or two in this process."""
    chosen = settings.made_small(settings.Settings(engine={}))
    chosen.data.folder = str(tmp_path / "data")
    chosen.data.size_bytes = 4 * MIB
    chosen.case.limit_seconds = 0.1
    for name, value in fields.items():
        group, _, field = name.partition("_")
        assert hasattr(getattr(chosen, group), field)
        setattr(getattr(chosen, group), field, value)
    return settings.check(chosen)


def results_in(folder):
    return json.loads((folder / "results.json").read_text())


def on_disk(tmp_path):
    if measure.file_system(tmp_path)[0] in ("tmpfs", "ramfs", "overlay"):
        pytest.skip("the temporary folder is not on a disk's file system")


# ------------------------------------------------------------------------------------------------ whole runs


def test_quick_run_makes_all_artefacts_and_verifies_bytes(tmp_path):
    out = tmp_path / "out"
    rows = "case.rows=[gdsdata,index_select,read_ring]"
    done = bench("quick=true", rows, f"data.folder={tmp_path}/data", f"hydra.run.dir={out}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"Report: {out / 'report.md'}"
    assert done.stderr == "", "quiet where stderr is no terminal"

    results = results_in(out)
    assert results["verified"] is True
    assert {(row["data"], row["dtype"], row["cache"]) for row in results["rows"]} == {
        ("tokens", "raw", "warm"),
        ("tokens", "int64", "warm"),
        ("tokens", "raw", "cold"),
        ("npy", "float32", "warm"),
        ("npy", "float32", "cold"),
    }
    for row in results["rows"]:
        assert row["checked_batches"] > 0
        assert row["samples_per_s"]["median"] > 0
        assert row["gb_per_s"]["median"] < 1000
        assert 0 < row["first_batch_ms"]["median"] < 60_000
        assert row["cpu_s_per_gb"]["median"] > 0
        assert row["peak_bytes"] >= 0
        assert row["ratio_to_best_peer"] > 0
    best = [row for row in results["rows"] if row["key"] == row["best_peer"]]
    assert best and all(row["ratio_to_best_peer"] == 1.0 for row in best)
    ours = [row for row in results["rows"] if row["key"] == "gdsdata"]
    assert all(sum(row["served_bytes"].values()) > 0 for row in ours), "says which path served its bytes"
    assert results["limits"]["tokens"]["raw, warm"]["memory_copy"]["gb_per_s"] > 0.5
    assert {"cpu", "cores", "memory_bytes", "kernel"} <= results["machine"].keys()
    assert {"torch", "numpy", "python"} <= results["versions"].keys()

    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    report = (out / "report.md").read_text()
    for part in ("tokens, int64, batches of 64, shuffled, warm cache", "torch.index_select", "Limit: memory copy"):
        assert part in report


WRONG = """
from gdsdata.bench.peers import NumpyGather

class Wrong(NumpyGather):
    name = "wrong"

    def gather(self, ids):
        batch = super().gather(ids).copy()
        batch[-1, -1] ^= 1
        return batch

class Reusing(NumpyGather):
    name = "reusing"

    def gather(self, ids):
        batch = super().gather(ids)
        if not hasattr(self, "buffer"):
            self.buffer = batch.copy()
        self.buffer[: len(batch)] = batch
        return self.buffer[: len(batch)]
"""


def test_a_peer_with_wrong_bytes_fails_the_bench(tmp_path, monkeypatch, capsys):
    (tmp_path / "wrong_peer.py").write_text(WRONG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = ["numpy", "wrong_peer:Wrong", "wrong_peer:Reusing"]
    chosen = small(tmp_path, data_kind="tokens", case_rows=rows, case_dtypes=["raw"], case_cache=["warm"])
    assert loader.main(chosen, tmp_path) == 1
    said = capsys.readouterr().out
    assert "FAILED: tokens, wrong: ValueError: epoch 0, batch 0: 1 of 64 samples are not what numpy reads" in said
    assert "FAILED: tokens, reusing: " in said, "a batch that the caller may keep was overwritten"
    assert said.splitlines()[-1].endswith("report.md")
    results = results_in(tmp_path)
    assert results["verified"] is False
    by_name = {row["name"]: row for row in results["rows"]}
    assert by_name["numpy"]["samples_per_s"] and by_name["numpy"]["verified"]
    assert by_name["wrong"]["samples_per_s"] is None, "what fails is not timed"
    assert "FAILED" in (tmp_path / "report.md").read_text()


def test_own_path_is_read_and_recognised(tmp_path, capsys):
    volumes = tmp_path / "mine"
    volumes.mkdir()
    for index in range(20):
        np.save(volumes / f"{index}.npy", np.random.default_rng(index).standard_normal((3, 50)))
    rows = ["gdsdata", "read_ring", "dataloader_0"]
    chosen = small(tmp_path, data_path=str(volumes), case_rows=rows, case_cache=["warm"])
    assert loader.main(chosen, tmp_path) == 0, capsys.readouterr().out
    results = results_in(tmp_path)
    assert list(results["data"]) == ["npy"]
    assert results["data"]["npy"]["samples"] == 20
    assert {row["dtype"] for row in results["rows"]} == {"float64"}
    assert not (tmp_path / "data").exists(), "nothing is made when data.path is given"


@pytest.mark.parametrize(
    "override, said",
    [
        ("case.epoch=1", "Key 'epoch' not in 'CaseSettings'"),
        ("case.epochs=many", "'many' of type 'str' could not be converted to Integer"),
        ("case.epochs=0", "gdsdata.bench: case.epochs=0: must be more than 0"),
        ("case.rows=[nmpy]", "there is no row 'nmpy'; there are gdsdata"),
        ("data.path=/nowhere/*.bin", "data.path=/nowhere/*.bin: no such file there"),
    ],
)
def test_wrong_overrides_are_refused_with_a_reason(tmp_path, monkeypatch, capsys, override, said):
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    from gdsdata.bench import __main__ as command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gdsdata.bench", override, f"hydra.run.dir={tmp_path}/out"])
    GlobalHydra.instance().clear()
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code not in (0, None)
    assert said in capsys.readouterr().err
    assert hydra.__version__


def test_help_explains_every_setting():
    text = settings.help_text()
    groups = {"case": settings.CaseSettings, "data": settings.DataSettings, "device": settings.DeviceSettings}
    groups["engine"] = settings.engine_schema()
    for group, cls in groups.items():
        for field in dataclasses.fields(cls):
            line = next(line for line in text.splitlines() if line.startswith(f"  {group}.{field.name}="))
            assert len(line.split(maxsplit=1)) == 2, f"{group}.{field.name} has no explanation"


# ------------------------------------------------------------------------------------------------ data sets


def test_making_data_is_atomic_and_reused(tmp_path):
    class Interrupted(Exception):
        pass

    def interrupt(count):
        raise Interrupted

    for kind in ("tokens", "npy"):
        folder = tmp_path / kind
        with pytest.raises(Interrupted):
            data.make(kind, folder, 4 * MIB, [128, 64, 64], interrupt)
        assert list(folder.iterdir()) == [], "an interrupted making leaves nothing"

        (folder / "tokens-uint16-4194304.bin.tmp-999999999").write_bytes(b"left by a killed process")
        made = data.make(kind, folder, 4 * MIB, [128, 64, 64])
        before = made.stat().st_mtime_ns
        assert data.make(kind, folder, 4 * MIB, [128, 64, 64], interrupt) == made
        assert made.stat().st_mtime_ns == before
        files = data.expand(made)
        content = Path(files[-1]).read_bytes()

        with open(files[-1], "r+b") as file:  # damaged: made anew
            file.truncate(100)
        assert data.make(kind, folder, 4 * MIB, [128, 64, 64]) == made
        assert Path(files[-1]).read_bytes() == content

        made_without_manifest = folder / f"{made.name}.json"
        made_without_manifest.unlink()
        with pytest.raises(Interrupted):
            data.make(kind, folder, 4 * MIB, [128, 64, 64], interrupt)
    assert not list((tmp_path / "tokens").glob("*.tmp-*")), "what killed processes left is removed"


def test_made_data_is_real_text(tmp_path):
    tokens = np.fromfile(data.make("tokens", tmp_path, 2 * MIB, []), np.uint16)
    assert len(tokens) == MIB
    assert b"import" in tokens.astype(np.uint8).tobytes()
    volumes = data.expand(data.make("npy", tmp_path, 4 * MIB, [128, 64, 64]))
    assert len(volumes) == 2
    first = np.load(volumes[0])
    assert first.shape == (128, 64, 64) and first.dtype == np.float32 and 0 < first.mean() < 1


def test_too_little_space_is_said_before_writing(tmp_path):
    with pytest.raises(data.DataError, match=r"MiB free and the tokens data set needs .* set data\.folder="):
        data.make("tokens", tmp_path, 2**60, [])
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ peers


def several_token_files(tmp_path):
    """Of unequal length, one with llm.c's header, one too short for a window, one with an odd tail."""
    generator = np.random.default_rng(0)
    for name, tokens in (("a", 33), ("b", 5), ("c", 200), ("e", 9)):
        generator.integers(0, 2**16, tokens, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    header = np.zeros(256, np.int32)
    header[:3] = data.LLMC_MAGIC, 1, 57
    with open(tmp_path / "d.bin", "wb") as file:
        file.write(header.tobytes() + generator.integers(0, 2**16, 57, dtype=np.uint16).tobytes())
    return data.describe_tokens(data.expand(tmp_path), "uint16", 8, 4, "test")


@pytest.mark.parametrize("dtype", ["raw", "int64"])
@pytest.mark.parametrize("peer", [peer for peer in peers.rows_for("tokens", "cold") if not peers.is_ours(peer.key)])
def test_peers_gather_windows_of_several_files(tmp_path, peer, dtype):
    source = several_token_files(tmp_path)
    assert source.counts == [7, 48, 13, 1]
    truth, opened = data.Truth(source), peer(source, 16, dtype, seed=3)
    try:
        for epoch in (0, 1):
            batches = list(opened.epoch(epoch))
            expected = opened.expected_ids(epoch, len(batches))
            assert sorted(np.concatenate(expected)) == list(range(69))
            for ids, batch in zip(expected, batches, strict=True):
                assert batch.dtype == (torch.int64 if dtype == "int64" else torch.uint16)
                np.testing.assert_array_equal(batch.numpy(), truth.batch(ids, dtype))
    finally:
        opened.close()


def test_ring_of_reads_raises_what_its_threads_met(tmp_path):
    for index in range(6):
        np.save(tmp_path / f"{index}.npy", np.full((4, 4), index, np.float32))
    source = data.describe_npy(data.expand(tmp_path), "test")
    (tmp_path / "3.npy").write_bytes((tmp_path / "3.npy").read_bytes()[:-1])
    ring = peers.ReadRing(source, 2, "float32", seed=0)
    try:
        with pytest.raises(ValueError, match=r"3\.npy"):
            list(ring.epoch(0))
    finally:
        ring.close()


# ------------------------------------------------------------------------------------------------ measuring


def test_drop_really_drops_and_warm_really_warms(tmp_path):
    on_disk(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 * MIB + 100))
    assert measure.warm([path]) == 1.0
    assert measure.drop([path]) == 0.0
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.seek(MIB)
        file.read(1)
        resident, size = measure.resident_bytes(path)
    assert size == 4 * MIB + 100
    assert 0 < resident < MIB
    assert measure.warm([path]) == 1.0


def test_drop_says_so_when_a_mapping_keeps_pages(tmp_path):
    on_disk(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.sum() == 0
    assert measure.drop([path]) > 0.5
    del mapped
    assert measure.drop([path]) == 0.0


def test_memory_of_children_counts_and_shared_pages_count_once():
    code = "import os, sys; a = bytearray(64 << 20); os.fork(); print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        child.stdout.readline()
        child.stdout.readline()
        assert 64 * MIB <= measure.tree_bytes(child.pid) < 110 * MIB
        child.stdin.close()


def test_limits_are_plausible(tmp_path):
    on_disk(tmp_path)
    assert 0.3 < limits.take_turn(None, "warm", 0.1)["memory_copy"]["gb_per_s"] < 2000
    made = data.make("tokens", tmp_path, 8 * MIB, [])
    source = data.describe_tokens([str(made)], "uint16", 1024, None, "test")
    measure.warm(source.files)
    found = limits.over_turns([limits.take_turn(source, "cold", 0.1) for _ in range(2)])
    if "unavailable" in found["direct_sequential"]:
        pytest.skip(found["direct_sequential"]["unavailable"])
    assert found["direct_sequential"]["request_bytes"] == MIB
    assert 0.005 < found["direct_sequential"]["gb_per_s"] < 100
    for depth in (32, 64):
        one = found[f"direct_random_{depth}"]
        assert 50 < one["per_s"] < 20e6
        assert 2050 <= one["mean_bytes"] <= 8192
    assert found["direct_random_64"]["per_s"] > 2 * found["direct_sequential"]["per_s"]


def test_the_limit_is_the_faster_way_to_the_samples():
    source = data.Source("tokens", ["x"], "uint16", [1025], 1024, [0], [100_000], 200_000_000, "test")
    found = {"direct_sequential": {"gb_per_s": 2.0}}
    found |= {"direct_random_32": {"per_s": 40_000.0}, "direct_random_64": {"per_s": 50_000.0}}
    # The whole set takes 0.1 s: 1,000 samples are fetched sooner one by one, 100,000 are not.
    assert limits.limit_for(source, "cold", 1_000, found) == (50_000.0, "O_DIRECT, one sample x 64")
    rate, name = limits.limit_for(source, "cold", 100_000, found)
    assert rate == pytest.approx(1e6) and "whole set" in name
    rate, name = limits.limit_for(source, "warm", 1_000, {"memory_copy": {"gb_per_s": 20.5}})
    assert rate == pytest.approx(1e7) and name == "memory copy"
    assert limits.limit_for(source, "cold", 1_000, {"direct_sequential": {"unavailable": "why"}}) == (None, "why")

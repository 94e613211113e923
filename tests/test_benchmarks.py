"""Scripts in benchmarks/, on little data.

A row has figures only if all that it read was what had been written.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from helpers import REPOSITORY, torchrun

BENCHMARKS = REPOSITORY / "benchmarks"
pytestmark = [
    pytest.mark.usefixtures("quick_programs"),
    pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="there are no sources here"),
]


def rows_of(script, *arguments, within_s=110):
    """Return the rows of all printed tables: {first cell: other cells}. Later rows win."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / script, "--rounds", "1", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=within_s,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line.strip("|").split("|") for line in ran.stdout.splitlines() if line.startswith("| ")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines}


def figure(cell):
    return float(cell.replace(",", ""))


def test_every_row_of_many_tensors_has_figures(tmp_path):
    pytest.importorskip("safetensors")
    rows = rows_of("many_tensors.py", "--tensors", 50, "--folder", tmp_path)
    kinds = (".pt", ".safetensors", "DCP")
    both = [rows[f"{work}, {kind}"] for work in ("save", "load") for kind in kinds]
    assert all(figure(cell) > 0 for cells in both for cell in cells) and len(rows) == 2 + len(both)
    assert figure(rows["stall of `AsyncCheckpointer.save`, beyond a copy of the bytes"][0]) < 1e6


def test_records_of_one_file_and_of_many_take_turns_in_one_process(tmp_path):
    some = ("--files", 1, 3, "--batches", 16, "--rows", "gdsdata", "index_select", "--size-gib", 2**-10)
    cpu, of_1_file, next_us, path = 1, 2, 3, 4
    rows = rows_of("records.py", "--folder", tmp_path, "--device", "cpu", *some)
    for name in ("gdsdata, 1, 16", "gdsdata, 3, 16", "index_select, 1, 16", "index_select, 3, 16"):
        assert float(rows[name][cpu]) > 0, rows[name]
    assert rows["gdsdata, 1, 16"][of_1_file] == "" != rows["gdsdata, 3, 16"][of_1_file]
    assert all(float(cell) > 0 for cell in rows["gdsdata, 3, 16"][next_us].split(", "))
    assert rows["gdsdata, 3, 16"][path] == "page_cache 100%"


@pytest.mark.slow
def test_first_and_later_loads_of_each_kind_of_checkpoint_are_measured(tmp_path):
    kinds = ("safetensors", "pt", "dcp", "shards")
    rows = rows_of(
        "loads.py", "--folder", tmp_path, "--device", "cpu", "--size-gib", 2**-10, "--tensors", 6, "--later", 1
    )
    for kind in kinds:
        first_ms, _, later_ms, _, cpu, path = rows[kind]
        assert float(first_ms) > 0 and float(later_ms) > 0 and float(cpu) > 0 and path == "page_cache 100%", rows[kind]


@pytest.mark.slow
@pytest.mark.timeout(200)  # twenty processes start
def test_first_and_later_starts_of_every_kind_of_data_are_measured(tmp_path):
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler is here to build the slow opens")
    counts = {"--npy": 30, "--tar": 300, "--mds": 3, "--litdata": 3, "--parquet": 2, "--slow": 20, "--open-ms": 4}
    options = [word for option in counts.items() for word in option]
    rows = rows_of("index_starts.py", *options, "--folder", tmp_path, within_s=190)
    files = {"npy": 30, "tar": 1, "mds": 4, "litdata": 4, "parquet": 2}
    samples = {"npy": 30, "tar": 300, "mds": 300, "litdata": 300, "parquet": 2000}
    for kind in files:
        cells, slow = rows[kind], rows[f"{kind}, opens of 4 ms"]
        assert [figure(cell) for cell in cells[:2]] == [files[kind], samples[kind]]
        assert all(figure(cell) > 0 for cell in (cells[2], cells[5], cells[8]))
        assert figure(slow[0]) in (20, 21) and figure(slow[1]) == (20 if kind == "npy" else 2000)
        assert figure(slow[2]) >= 0.004 * 20 / 16, "less: the opens were not slow"
    assert len(rows) == 1 + 2 * len(files) and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_samples_with_fields_are_verified_beside_a_loop_by_hand(tmp_path):
    rows = rows_of("fields.py", "--folder", tmp_path, "--only", "tar", "index", "--samples", 100)
    for name in ("gdsdata", "pread loop", "pread loop, 2 threads ahead"):
        assert figure(rows[name][0]) > 0, rows[name]
    assert "page_cache" in rows["gdsdata"][-1]
    assert figure(rows["gdsdata, its headers"][0]) > figure(rows["gdsdata, kept of the last time"][0]) / 10
    if find_spec("webdataset") is None:
        assert rows["WebDataset, 2 workers"][0] == "not installed: pip install webdataset"


@pytest.mark.slow
def test_ranks_that_read_once_are_measured_beside_ranks_by_themselves(tmp_path):
    small = ("--size-gib", 2**-7, "--records-bytes", 2**22, "--cache", "cold", "--section", "load", "hsdp", "records")
    rows = rows_of("once.py", "--ranks", 2, "--device", "cpu", "--folder", tmp_path, *small)
    storage_x = 2
    assert float(rows["gdsdata, by itself"][storage_x].split()[0]) > 1.9
    assert float(rows["gdsdata, read once"][storage_x].split()[0]) < 1.1
    for name in ("torch DCP", "gdsdata", "index_select by hand"):
        assert figure(rows[name][0].split()[0]) > 0, rows[name]


@pytest.mark.slow
def test_indexes_of_many_samples_are_loaded_by_several_processes_and_planned(tmp_path):
    some = ("--samples", "2e4", "1e5", "--files", "1e5", "--processes", 2)
    rows = rows_of("scale.py", "--folder", tmp_path, *some)
    for samples in ("2e4", "1e5"):
        bytes_a_sample, _, _, resident_mb, own_mb = map(figure, rows[samples])
        assert 7 <= bytes_a_sample < 8 and own_mb <= resident_mb <= 1
    for name in ("2e4, two fields", "1e5, two fields", "1e5, one size"):
        assert all(figure(cell) > 0 for cell in rows[name])
    assert not list(tmp_path.iterdir())


@pytest.fixture
def restore_times(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("restore_times")


def test_predicted_restores_keep_to_the_rates_of_storage_and_network(restore_times):
    rates, gb = restore_times.Rates(agreement_us=0.0), 16
    for gpus, kind in itertools.product([1, 2, 8, 16, 64], ["disk", "shared", "store"]):
        nodes, on_node = -(-gpus // 8), min(gpus, 8)
        of_node = rates.storage(kind, nodes)
        alone = restore_times.seconds_alone(gb * 1e9, gpus, kind, rates)
        node, job = (restore_times.seconds_together(gb * 1e9, gpus, kind, once, rates) for once in ("node", "job"))
        passed_on = gb * (1 - 1 / on_node) / rates.peer
        assert alone >= 0.999 * gb / min(rates.link, of_node / on_node)
        assert node >= 0.999 * max(gb / min(of_node, on_node * rates.link), passed_on)
        assert job >= 0.999 * max(gb / min(nodes * of_node, gpus * rates.link), passed_on)
        assert node <= alone
    slower = restore_times.seconds_together(gb * 1e9, 64, "store", "job", rates._replace(agreement_us=1000.0))
    assert slower > job


def test_predicted_restores_are_within_a_fifth_of_measured_ones(restore_times):
    for one in restore_times.MEASURED:
        for seconds, by in zip((one.alone_s, one.together_s), restore_times.predicted(one), strict=True):
            assert seconds is None or by == pytest.approx(seconds, rel=0.2), one.name


@pytest.mark.slow
def test_predicted_restores_are_compared_with_loads(tmp_path):
    code, said = torchrun(2, BENCHMARKS / "restore_times.py", "--check", "--gb", 0.2, "--folder", tmp_path)
    assert code == 0, said
    rows = [line.strip("|").split("|") for line in said.splitlines() if line.startswith("| ")]
    assert [int(row[0]) for row in rows[1:]] == [1, 2]
    assert all(figure(cell) > 0 for row in rows[1:] for cell in row[1:])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("row", ["Ours", "Pread"])
def test_a_row_that_gives_other_bytes_than_were_written_is_refused(tmp_path, monkeypatch, row):
    monkeypatch.syspath_prepend(BENCHMARKS)
    fields, peers = import_module("fields"), import_module("field_peers")
    data = peers.Data("litdata", fields.made("litdata", tmp_path, 100), 100)
    fields.check(getattr(peers, row)(data), data)
    shard = data.folder / "chunk-0-2.bin"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match="1 samples of a batch are not what was written"):
        fields.check(getattr(peers, row)(data), data)


@pytest.mark.slow
def test_a_training_loop_says_how_idle_its_device_is(tmp_path):
    small = ("--array-kib", 16, "--batch", 4, "--samples", 32, "--steps", 20, "--step-ms", 2)
    only = ("gdsdata", "DataLoader over files")
    rows = rows_of("training.py", "--device", "cpu", "--folder", tmp_path, "--case", "arrays", *small, "--only", *only)
    for name in only:
        batches_per_s, alone_ms, idle, slower = rows[name]
        assert figure(batches_per_s) > 0 and figure(alone_ms) > 0 and figure(slower.rstrip("x ")) > 0, rows[name]
        assert figure(idle.split()[0]) < 100


def test_a_loaded_model_with_other_values_than_were_saved_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    loads = import_module("framework_loads")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "model.safetensors"}}')
    kind, module = loads.Model(tmp_path, "cpu", 0, False), torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.empty(30, 50, dtype=torch.bfloat16))
    bits = module.weight.data.view(-1).view(torch.int16)
    bits.copy_(loads.values("weight", 0, len(bits), "cpu"))
    assert module.weight.isfinite().all() and module.weight.unique().numel() > 500
    loads.check(module, kind)
    bits[-1] ^= 1
    with pytest.raises(ValueError, match="weight: the values from 0 to 1500 are not what was saved"):
        loads.check(module, kind)
    module.other = torch.nn.Parameter(torch.empty(3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"other tensors than the files: \['other'\]"):
        loads.check(module, kind)


def test_a_checkpoint_with_other_tensors_than_were_saved_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    saves, expected = import_module("framework_saves"), {"a": torch.zeros(3), "b": torch.ones(2)}
    saves.compare({name: one.clone() for name, one in expected.items()}, expected)
    with pytest.raises(ValueError, match="b is not what was saved"):
        saves.compare({"a": torch.zeros(3), "b": torch.tensor([1.0, 2.0])}, expected)
    with pytest.raises(ValueError, match=r"other tensors than were saved: \['b'\]"):
        saves.compare({"a": torch.zeros(3)}, expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("section", "only"),
    [
        ("load", ("gdsdata `from_pretrained`", "safetensors `load_file`")),
        ("checkpoint", ("hf_trainer.use", "AsyncGDSCheckpointIO")),
        ("train", ("transformers: gdsdata", "lightning: DataLoader")),
    ],
)
def test_frameworks_are_measured_and_what_they_read_and_wrote_is_verified(tmp_path, section, only):
    for name in ("transformers", "lightning"):
        pytest.importorskip(name)
    small = ("--size-gb", 0.02, "--saves", 2, "--steps", 10, "--batch", 2, "--volume-kib", 64, "--workers", 1)
    found = tmp_path / "found.json"
    where = ("--device", "cpu", "--folder", tmp_path, "--json", found)
    rows = rows_of("frameworks.py", *where, "--section", section, *small, "--only", *only, within_s=280)
    measured = [cells for name, cells in rows.items() if any(part in name for part in only)]
    assert all(any(part in name for name in rows) for part in only), rows
    assert all(figure(cells[0]) > 0 for cells in measured), measured
    assert all(one["error"] is None for one in json.loads(found.read_text())["sections"][section]["rows"].values())


class StoppedTurns:
    """Turns of rows. The third one is stopped in the middle, as by `timeout`."""

    taken = 0

    def __init__(self, name, *_):
        self.name, self.error, self.results = name, None, []

    def made(self):
        return self

    def take(self):
        StoppedTurns.taken += 1
        if self.taken == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        self.results.append({"seconds": 2.0, "cpu_s": 1, "own_bytes": 1, "rss_bytes": 1, "device_bytes": 1})

    def end(self):
        pass


@pytest.mark.parametrize("stops", ["in a turn", "before its first turn", "before its model is saved"])
def test_a_stopped_run_prints_the_turns_that_it_took_and_begins_no_other_section(tmp_path, monkeypatch, capsys, stops):
    def save(*_):
        if stops == "before its model is saved":
            raise KeyboardInterrupt
        (tmp_path / "llama-0.001-cpu" / "model.safetensors").write_bytes(bytes(1 << 20))

    def warm(_):
        if stops == "before its first turn":
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.syspath_prepend(BENCHMARKS)
    frameworks = import_module("frameworks")
    monkeypatch.setattr(StoppedTurns, "taken", 0)
    monkeypatch.setattr(frameworks, "Turns", StoppedTurns)
    monkeypatch.setattr(frameworks, "only_turn", save)
    monkeypatch.setattr(frameworks.system, "warm", warm)
    where = ["--device", "cpu", "--folder", str(tmp_path), "--size-gb", "0.001"]
    monkeypatch.setattr(sys, "argv", ["frameworks.py", *where, "--section", "load", "train"])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        frameworks.main()
    finally:
        signal.signal(signal.SIGTERM, handler)
    said = capsys.readouterr().out
    assert "Stopped: turns are missing." in said and "## train" not in said
    rows = [line for line in said.splitlines() if line.startswith("| ") and "| 2.00 " in line]
    assert len(rows) == (1 if stops == "in a turn" else 0)
    assert said.count("no turn") == {"in a turn": 5, "before its first turn": 6}.get(stops, 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_is_far_is_used_at_its_rate_and_training_does_not_wait():
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / "far_network.py", "--connections", "4", "--mib", "512", "--steps", "200"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    read, train = ran.stdout.splitlines()
    assert float(read.split()[1]) >= 0.8, ran.stdout
    assert float(train.split()[2].rstrip("%")) < 1.0, ran.stdout

"""case=replicas of the bench: ranks that load together, ranks that fail, and whole runs."""

import json
import os
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_bench import MIB

from gdsdata.bench import cases, settings
from gdsdata.bench import run as bench_run
from gdsdata.bench.cases.all.case import All
from gdsdata.bench.cases.replicas import ranks
from gdsdata.bench.cases.replicas.case import Replicas
from gdsdata.bench.cases.replicas.ranks import Ranks
from gdsdata.bench.data import checkpoints
from gdsdata.bench.harness.tables import Table
from gdsdata.bench.measure import device
from gdsdata.bench.peers import registry

FAULTY = """
import os
import torch
import torch.distributed as dist
from gdsdata.bench.peers.safetensors import Load

class Wrong(Load):
    key = name = "wrong"

    def load(self):
        tensors = super().load()
        if dist.get_rank() == 1:
            tensors["tensor_00001"].view(torch.int16)[5] += 1
        return tensors

class Fails(Load):
    key = name = "fails"

    def load(self):
        if dist.get_rank() == 1:
            raise OSError("this rank has no file")
        dist.barrier()

class Hangs(Load):
    key = name = "hangs"

    def load(self):
        if dist.get_rank() == 0:
            dist.barrier()
        return super().load()

class Dies(Load):
    key = name = "dies"

    def load(self):
        if dist.get_rank() == 1:
            os._exit(9)
        dist.barrier()
"""


@pytest.fixture(autouse=True)
def nested_programs(monkeypatch, quick_programs):
    """Rows start ranks: those are forks too."""
    monkeypatch.setenv("QUICK_PROGRAMS_NESTED", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def small(tmp_path, **fields):
    """Settings for a run of a few seconds."""
    chosen = settings.Settings(engine={"direct": "always"}, case=cases.ReplicasSettings(**fields), quick=True)
    chosen.data.folder, chosen.data.size_bytes = str(tmp_path / "data"), 4 * MIB
    chosen.case.tensor_bytes, chosen.case.limit_seconds = 2**20, 0.05
    return settings.made_small(settings.check(chosen))


def results_of(chosen, folder):
    folder.mkdir()
    status = bench_run.main(chosen, folder)
    return status, json.loads((folder / "results.json").read_text())


# ------------------------------------------------------------------------------------------------ whole runs


def test_ranks_get_all_bytes_and_read_storage_once_together(tmp_path, capsys):
    rows = ["gdsdata", "gdsdata_alone"]
    chosen = small(tmp_path, rows=rows, work=["safetensors"], cache=["cold"])
    status, results = results_of(chosen, tmp_path / "out")
    assert status == 0 and results["verified"], results["rows"]
    together, alone = results["rows"]
    assert [together["key"], alone["key"]] == rows
    for row, times in ((together, 1), (alone, 2)):
        assert row["checked_bytes"] == 4 * MIB and row["first_s"] > 0 and row["peak_bytes"] > 0
        assert row["storage_x"]["median"] == pytest.approx(times, rel=0.2)
    assert alone["ratio_to_alone"] == 1 and together["ratio_to_alone"] > 0
    (of_table,) = results["limits"]["safetensors"].values()
    assert of_table["all_gather"]["gb_per_s"] > 0
    shown = capsys.readouterr().out
    assert "storage x" in shown and "4 MiB of bf16 in 4 tensors, to 2 ranks on cpu, cold cache" in shown
    assert "all_gather of the same bytes" in shown


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_row_on_the_cpu_verifies_in_every_format(tmp_path):
    chosen = small(tmp_path, ranks=3)
    chosen.data.shape = [16, 64, 64]
    status, results = results_of(chosen, tmp_path / "out")
    assert status == 0 and results["verified"], results["rows"]
    for kind in ("safetensors", "pt", "dcp", "volumes"):
        for cache in ("warm", "cold"):
            expected = {peer.key for peer in registry.rows("replicas", kind, cache) if not registry.missing(peer)}
            assert {row["key"] for row in results["rows"] if (row["data"], row["cache"]) == (kind, cache)} == expected


def test_a_rank_that_fails_ends_its_row_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "faulty_ranks.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(tmp_path)
    rows = ["torch_load_mmap", *(f"faulty_ranks:{name}" for name in ("Wrong", "Fails", "Hangs", "Dies"))]
    began = time.monotonic()
    chosen = small(tmp_path, rows=rows, work=["pt"], cache=["warm"], patience_s=6)
    status, results = results_of(chosen, tmp_path / "out")
    assert status != 0 and time.monotonic() - began < 90, "no rank waits for the end of a timeout"
    errors = {row["key"]: row["error"] for row in results["rows"]}
    assert errors.pop("torch_load_mmap") is None
    assert "rank 1: ValueError: tensor 'tensor_00001'" in errors["faulty_ranks:Wrong"]
    assert "rank 1: OSError: this rank has no file" in errors["faulty_ranks:Fails"]
    assert errors["faulty_ranks:Hangs"].endswith("rank 0: no answer within 6 s")
    assert "rank 1: the row's process ended with 9" in errors["faulty_ranks:Dies"]


class HeldProcess:
    """A process that the kernel holds: it is killed, and does not end."""

    killed = False

    def kill(self):
        self.killed = True

    def wait(self, timeout=None):
        assert timeout is not None, "each wait for it has a timeout"
        raise subprocess.TimeoutExpired("rank", timeout)


@pytest.mark.parametrize("end", [Ranks.end, Ranks.kill])
def test_ranks_that_the_kernel_holds_do_not_hold_the_bench(monkeypatch, end):
    monkeypatch.setattr(ranks, "RowProcess", lambda log: SimpleNamespace(process=HeldProcess()))
    held = Ranks(None, cases.ReplicasSettings(ranks=3), "cpu")
    end(held)
    assert [one.process.killed for one in held.ranks] == [True] * 3


# ------------------------------------------------------------------------------------------------ one rank's work


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_made_folder_of_dcp_has_the_tensors_of_the_file(tmp_path):
    chosen = small(tmp_path)
    made = checkpoints.checkpoint_for(chosen.data, chosen.case, True)
    folder = checkpoints.in_format("dcp", made, chosen.data)
    into = {name: torch.zeros(2**19, dtype=torch.bfloat16) for name in made.tensors}
    dcp.load({"model": into}, checkpoint_id=folder.place, no_dist=True)
    sums = checkpoints.checksums_of(made)
    assert {name: checkpoints.checksum(tensor.view(torch.uint8)) for name, tensor in into.items()} == sums
    assert len(folder.files) == 1 + checkpoints.DCP_FILES and folder.kind == "dcp"
    assert checkpoints.in_format("pt", made, chosen.data).files == [made.torch_file]


@pytest.mark.parametrize("kind", ["safetensors", "pt", "dcp"])
@pytest.mark.parametrize("device_name", ["cpu", "cuda"])
def test_each_format_has_rows_together_and_by_itself(kind, device_name):
    keys = [peer.key for peer in registry.rows("replicas", kind, "warm", device_name)]
    assert keys[:2] == ["gdsdata", "gdsdata_alone"] and len(set(keys)) == len(keys)
    assert any(key.endswith("broadcast") for key in keys)
    assert ("orbax" in keys) == (kind == "dcp" and device_name == "cpu")
    assert ("instanttensor_group" in keys) == (kind == "safetensors" and device_name == "cuda")
    together, alone = (registry.find("replicas", key, kind) for key in keys[:2])
    assert together.together and not alone.together


# ------------------------------------------------------------------------------------------------ limits and settings


def test_the_limit_of_ranks_is_all_links_or_their_share_of_a_memory_copy(tmp_path):
    case = Replicas(small(tmp_path), tmp_path, None)
    gathered = {"all_gather": {"gb_per_s": 500.0}}
    warm, cold = Table(None, "bf16", "warm"), Table(None, "bf16", "cold")
    links = {"pinned_copy": {"gb_per_s": 55.0}, "pinned_copies": {"gb_per_s": 108.0}}
    assert case.limit_for(warm, links | gathered) == (108.0, "pinned copies to 2 GPUs at once")
    lost = links | {"pinned_copies": {"unavailable": "lost"}}
    assert case.limit_for(warm, lost | gathered) == (None, "lost")
    copied = {"memory_copy": {"gb_per_s": 14.0}}
    assert case.limit_for(warm, copied | gathered) == (7.0, "memory copy, shared by 2 ranks")
    disk = {"direct_sequential": {"gb_per_s": 2.0}}
    assert case.limit_for(cold, disk | gathered) == (2.0, "O_DIRECT, 1 MiB x 32")


def test_fewer_gpus_than_ranks_are_refused_and_left_out_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    chosen = small(tmp_path)
    assert chosen.case.lack("cpu") == "" and "use device=cuda" in chosen.case.lack("cuda:1")
    assert "torch sees 1" in chosen.case.lack("cuda") and device.lack_of_ranks("cuda", 1) == ""
    chosen.device.name = "cuda"
    with pytest.raises(ValueError, match="each rank needs a GPU of its own"):
        next(Replicas(chosen, tmp_path, None).sources())
    everything = settings.Settings(engine={}, case=cases.AllSettings(), device=chosen.device)
    notes = []
    assert "replicas" not in All(everything, tmp_path, None).measurable(notes)
    assert len(notes) == 1 and notes[0].startswith("case=replicas was left out")


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"ranks": 1}, r"case\.ranks=1: must be from 2 to 64"),
        ({"work": ["onnx"]}, r"case\.work=onnx: use safetensors or pt or dcp or volumes"),
        ({"tensor_bytes": 3}, r"must be even"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        settings.check(settings.Settings(engine={}, case=cases.ReplicasSettings(**fields)))


def test_a_file_of_ones_own_is_of_safetensors_alone():
    chosen = settings.Settings(engine={}, case=cases.ReplicasSettings())
    chosen.data.path = "/x.safetensors"
    with pytest.raises(ValueError, match=r"add case\.work=\[safetensors\]"):
        settings.check(chosen)

"""The examples run as a user would run them."""

import argparse
import os
import re
import runpy
import signal
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import torchrun
from torch.utils.data import DataLoader, Dataset

import gdsdata

pytestmark = pytest.mark.usefixtures("quick_programs", "programs_that_train")

ROOT = Path(__file__).resolve().parents[1]
WINDOWS = 16 * 16  # an epoch of 16 batches


def run(command, on_gpu=False, ends_with=0, **more):
    """Return a command's stdout and stderr.

    By default it runs on the CPU, so that its losses are the same on every machine. ``more`` is
    added to its environment.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    hidden = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    # With such small networks, OpenMP's threads wait longer than they compute if other tests run
    # too.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **hidden, **more}
    result = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == ends_with, result.stderr
    return result.stdout, result.stderr


def example(name, *arguments, **how):
    """Return the example's output."""
    return run([sys.executable, ROOT / "examples" / name, *arguments], **how)[0]


def losses(output):
    """Return {step: the digits of its loss}."""
    return dict(re.findall(r"^step (\d+): loss (\S+)$", output, re.MULTILINE))


@pytest.fixture(scope="module")
def short_epochs(tmp_path_factory):
    """Return arguments for a text so small that an epoch is 16 batches."""
    path = tmp_path_factory.mktemp("data") / "text.bin"
    text = Path(argparse.__file__).read_bytes()[: WINDOWS * 64 + 1]
    assert len(text) == WINDOWS * 64 + 1
    gdsdata.write_tensor(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.uint16), path)
    return ["--steps", 30, "--print-every", 1, "--data", path]


@pytest.fixture(scope="module")
def uninterrupted(short_epochs, tmp_path_factory):
    return losses(example("train_bytes.py", *short_epochs, "--checkpoint", tmp_path_factory.mktemp("whole") / "it.pt"))


def test_train_bytes_loss_falls(uninterrupted):
    assert list(uninterrupted) == [str(step) for step in range(1, 31)]
    assert float(uninterrupted["1"]) > 5
    assert float(uninterrupted["30"]) < 3.5


def test_train_bytes_resumes_in_mid_epoch_with_the_same_losses(short_epochs, uninterrupted, tmp_path):
    arguments = [*short_epochs, "--checkpoint", tmp_path / "stopped.pt"]
    stopped = losses(example("train_bytes.py", *arguments, "--stop-at", 22))
    place = torch.load(tmp_path / "stopped.pt", weights_only=True)["dataset"]
    assert (place["epoch"], place["batches"]) == (1, 6)  # of 16
    resumed = losses(example("train_bytes.py", *arguments, "--resume"))
    assert list(resumed) == [str(step) for step in range(23, 31)]
    assert {**stopped, **resumed} == uninterrupted
    assert [path.name for path in tmp_path.iterdir()] == ["stopped.pt"]


def test_train_bytes_makes_its_data_from_the_standard_library(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert losses(example("train_bytes.py", "--steps", 1))
    made = sorted((tmp_path / "gdsdata").iterdir())
    assert [path.name for path in made] == ["train_bytes.bin", "train_bytes.pt"]
    tokens = gdsdata.read_tensor(made[0], torch.uint16, (made[0].stat().st_size // 2,))
    assert len(tokens) > 1_000_000
    assert tokens.to(torch.int32).max() < 256


def test_resume_training_goes_on_with_the_same_losses_after_a_kill_in_a_save(tmp_path):
    steps = ["--steps", 45]
    whole = example("resume_training.py", *steps, "--folder", tmp_path / "whole")
    assert whole.startswith("from step 0\n") and len(losses(whole)) == 45
    assert float(losses(whole)["45"]) < float(losses(whole)["1"]) - 1
    arguments = [*steps, "--folder", tmp_path / "killed"]
    killed = example("resume_training.py", *arguments, "--kill-in-save", 30, ends_with=-signal.SIGKILL)
    resumed = example("resume_training.py", *arguments)
    begun = int(re.match(r"from step (\d+)\n", resumed)[1])
    assert begun in (0, 10, 20)  # the save of step 30 was not complete; on a busy machine, nor were those before
    assert list(losses(killed)) == [str(step) for step in range(1, 31)]
    assert list(losses(resumed)) == [str(step) for step in range(begun + 1, 46)]
    assert {**losses(killed), **losses(resumed)} == losses(whole)
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == ["lock", "step-30", "step-40"]
    assert example("resume_training.py", *arguments).startswith("from step 40\n")


def test_train_bytes_refuses_to_resume_before_there_is_a_checkpoint(short_epochs, tmp_path):
    arguments = [*short_epochs, "--checkpoint", tmp_path / "none.pt", "--resume"]
    error = run([sys.executable, ROOT / "examples" / "train_bytes.py", *arguments], ends_with=2)[1]
    assert f"--resume: there is no {tmp_path / 'none.pt'}" in error and "Traceback" not in error


@pytest.mark.parametrize("name", ["own_format.py", "nifti.py"])
def test_examples_of_formats_have_a_usage_line(name):
    error = run([sys.executable, ROOT / "examples" / name], ends_with=2)[1]
    assert error.startswith(f"usage: {name} [-h] folder\n") and "Traceback" not in error
    assert f"usage: {name} [-h] folder\n" in example(name, "--help")


def test_own_format_reads_idx_files_and_refuses_a_cut_one(tmp_path):
    images = bytes(range(256)) * 28 * 28
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", 256, 28, 28) + images)
    lines = example("own_format.py", tmp_path).splitlines()
    assert lines == ["(64, 28, 28) torch.uint8 cpu"] * 8
    (tmp_path / "b").write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", 256, 28, 28) + images[:-1])
    assert example("own_format.py", tmp_path, ends_with=1) == ""


VOLUMES = ["--volumes", 16, "--side", 16, "--epochs", 3]


def epochs_of(output):
    """Return the digits of each epoch's mean loss."""
    return re.findall(r"^epoch \d+: loss (\S+)", output, re.MULTILINE)


def test_train_volumes_has_the_same_losses_with_either_loader(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours = example("train_volumes.py", *VOLUMES, "--in-order")
    theirs = example("train_volumes.py", *VOLUMES, "--in-order", "--loader", "dataloader", "--workers", 1)
    assert len(epochs_of(ours)) == 3
    assert epochs_of(ours) == epochs_of(theirs)
    assert float(epochs_of(ours)[-1]) < float(epochs_of(ours)[0])
    for loader, output in (("gdsdata", ours), ("dataloader", theirs)):
        assert f"{loader} on cpu: 6 steps, the first after" in output
    assert f"served by: {{'page_cache': {3 * 16 * 2 * 16**3}}}" in ours
    assert "gdsdata: 6 steps of" in ours
    assert [path.name for path in (tmp_path / "gdsdata").iterdir()] == ["train_volumes-16x16"]


def test_train_volumes_says_what_is_wrong_with_its_arguments(tmp_path):
    for arguments, said in (
        (["--data", tmp_path], f"--data {tmp_path} has no .npy files"),
        (["--side", 30], "--side 30 is no multiple of 4"),
    ):
        command = [sys.executable, ROOT / "examples" / "train_volumes.py", *arguments]
        assert said in run(command, ends_with=2)[1]


IMAGES = ["--images", 320, "--batch-size", 16, "--epochs", 3, "--size", 32]


def right_of_held_out(output):
    """Return how many of a hundred are right."""
    return float(re.search(r"^held out: (\S+)% of 64 images right$", output, re.MULTILINE)[1])


def test_train_images_learns_to_classify_images_that_it_was_not_shown(tmp_path, monkeypatch):
    pytest.importorskip("torchvision")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    output = example("train_images.py", *IMAGES)
    assert ": 256 images in 4 shards, and 4.tar held out" in output
    assert len(epochs_of(output)) == 3
    assert float(epochs_of(output)[-1]) < float(epochs_of(output)[0])
    assert right_of_held_out(output) > 60  # four classes
    assert "gdsdata: 48 steps of" in output
    assert "decoded by the processor | served by: {'page_cache': " in output


def test_train_images_wants_a_shard_to_hold_out(tmp_path):
    (tmp_path / "only.tar").touch()
    said = run([sys.executable, ROOT / "examples" / "train_images.py", "--data", tmp_path], ends_with=2)[1]
    assert f"--data {tmp_path} has 1 .tar files: one is held out, so two are the fewest" in said


ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "0"}
OF_FSDP = ["--steps", 10, "--save-every", 5, "--global-batch", 8]


def fsdp(ranks, folder, *arguments, ends_with=0, on_gpu=False, **how):
    """Return train_fsdp.py's output and {step: (its loss, the checksum of its bytes)}.

    One rank starts without torchrun.
    """
    command = [ROOT / "examples" / "train_fsdp.py", *OF_FSDP, "--folder", folder, *arguments]
    if ranks == 1:
        alone = {**ALONE, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        output, _ = run([sys.executable, *command], on_gpu=on_gpu, ends_with=ends_with, **alone)
    else:
        exit_code, output = torchrun(ranks, *command, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", **how)
        assert exit_code == ends_with, output
    steps = re.findall(r"^step (\d+): loss (\S+) of bytes (\S+)$", output, re.MULTILINE)
    return output, {int(step): (float(loss), number) for step, loss, number in steps}


def bytes_of_fsdp():
    """Return {step: the checksum of train_fsdp.py's bytes}, from one uninterrupted data set."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokens = gdsdata.formats.Tokens("uint8", 64)
    dataset = gdsdata.GDSDataset(
        library, 8, tokens, seed=0, device="cpu", sharding=gdsdata.Sharding(rank=0, world_size=1)
    )
    powers = torch.tensor([pow(31, i, 2**31) for i in range(65)])
    return {
        step: f"{(batch * powers).sum().item() % 2**32:08x}" for step, batch in zip(range(1, 11), dataset, strict=False)
    }


@pytest.mark.slow
def test_train_fsdp_killed_on_two_ranks_goes_on_with_one_batch_for_batch(tmp_path):
    _, killed = fsdp(2, tmp_path, "--kill-at", 9, ends_with=1)
    said, resumed = fsdp(1, tmp_path)
    assert "from step 5 on 1 ranks, cpu, 8 samples a step\n" in said
    assert list(killed)[:8] == list(range(1, 9)) and 10 not in killed
    assert list(resumed) == list(range(6, 11))
    expected = bytes_of_fsdp()
    assert len(set(expected.values())) == 10
    assert {step: number for step, (_, number) in {**killed, **resumed}.items()} == expected
    for step in killed.keys() & resumed.keys():  # steps that both have trained
        assert resumed[step][0] == pytest.approx(killed[step][0], rel=1e-4), step
    assert resumed[10][0] < killed[1][0] - 1
    files = [path.name for path in tmp_path.glob("*.distcp")]
    assert len(files) == 1 and (tmp_path / ".metadata").exists()  # the two ranks' files are gone


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_train_fsdp_broken_off_anywhere_has_the_losses_of_a_run_that_was_not(tmp_path):
    _, whole = fsdp(2, tmp_path / "whole")
    said, again = fsdp(2, tmp_path / "it", "--kill-at", 7, restarts=1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert "from step 0 on 2 ranks" in said and "from step 5 on 2 ranks" in said  # torchrun started it again
    assert again == whole  # digit for digit
    fsdp(1, tmp_path / "other", "--kill-at", 7, ends_with=-signal.SIGKILL)
    _, grown = fsdp(2, tmp_path / "other")
    assert list(grown) == list(range(6, 11))
    for step, (loss, number) in grown.items():
        assert (loss, number) == (pytest.approx(whole[step][0], rel=1e-4), whole[step][1])


@pytest.mark.slow
def test_train_fsdp_goes_on_with_replicas(tmp_path):
    """Two replicas of two shards continue what two shards have saved."""
    _, whole = fsdp(2, tmp_path / "whole")
    fsdp(2, tmp_path / "it", "--steps", 5)
    said, resumed = fsdp(4, tmp_path / "it", "--replicas", 2)
    assert "from step 5 on 4 ranks" in said and list(resumed) == list(range(6, 11))
    for step, (loss, number) in resumed.items():
        assert (loss, number) == (pytest.approx(whole[step][0], rel=1e-4), whole[step][1])


@pytest.mark.gpu
def test_train_fsdp_goes_on_with_the_same_batches_on_a_gpu(tmp_path):
    _, whole = fsdp(1, tmp_path / "whole")
    fsdp(1, tmp_path / "it", "--steps", 4)
    said, resumed = fsdp(1, tmp_path / "it", on_gpu=True)
    assert "from step 4 on 1 ranks, cuda" in said
    for step in range(5, 11):
        assert resumed[step] == (pytest.approx(whole[step][0], rel=1e-2), whole[step][1])


def test_train_fsdp_says_how_it_is_started():
    said = run([sys.executable, ROOT / "examples" / "train_fsdp.py"], ends_with=2)[1]
    assert "start it with torchrun --nproc-per-node=N examples/train_fsdp.py" in said


def test_analytics_groups_columns_of_parquet_and_csv_as_pyarrow_does(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check_analytics(example("analytics_parquet.py", "--rows", 70_000), "cpu")


@pytest.mark.gpu
def test_analytics_groups_columns_on_a_gpu(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check_analytics(example("analytics_parquet.py", "--rows", 70_000, on_gpu=True), "cuda")


def check_analytics(output, device):
    """Compare the example's answers for its 70,000 rows with numpy's answers for its CSV."""
    written = Path(os.environ["XDG_CACHE_HOME"]) / "gdsdata" / "analytics_parquet-70000" / "trips.csv"
    zones, fares = np.loadtxt(written, delimiter=",", skiprows=1, usecols=(0, 1)).T
    sums = np.bincount(zones.astype(int), fares)
    top = np.argsort(-sums)[:3]
    in_parquet, in_csv = output.split("CSV: ")
    for answer in (in_parquet, in_csv):
        assert f"  70,000 rows on {device} in " in answer
        assert f"  {len(np.unique(zones))} groups there in" in answer
        said = re.findall(r"^  zone (\d+): (\S+) rows, sum (\S+), mean (\S+), max (\S+)$", answer, re.MULTILINE)
        assert [tuple(float(one.replace(",", "")) for one in line) for line in said] == [
            (zone, len(of), round(of.sum(), 2), round(of.mean(), 4), of.max())
            for zone, of in ((zone, fares[zones == zone]) for zone in top)
        ]
    read, of_all = (int(found.replace(",", "")) for found in re.search(r"(\S+) of (\S+) bytes", in_parquet).groups())
    assert read < of_all / 3  # other columns were not read
    assert f"served by: {{'page_cache': {read}}}" in in_parquet


def test_analytics_says_which_column_does_not_fit(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    table = pyarrow.table({"zone": [1, 2], "fare": [0.5, None], "note": ["a", "b"]})
    parquet.write_table(table, tmp_path / "t.parquet")
    csv.write_csv(table, tmp_path / "t.csv")
    for name, arguments, said in (
        ("t.parquet", ["--key", "no"], "t.parquet has no column 'no': it has zone, fare, note"),
        ("t.csv", ["--key", "fare"], "t.csv: column 'fare' is of double, and --key takes whole numbers"),
        ("t.csv", [], "column 'fare' has empty values"),
        ("t.parquet", [], "column 'fare' has nulls"),
    ):
        command = [sys.executable, ROOT / "examples" / "analytics_parquet.py", tmp_path / name, *arguments]
        error = run(command, ends_with=1)[1]
        assert said in error and "Traceback" not in error


@pytest.mark.gpu
def test_train_images_decodes_on_a_gpu(tmp_path, monkeypatch):
    pytest.importorskip("torchvision")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    output = example("train_images.py", *IMAGES, on_gpu=True)
    assert right_of_held_out(output) > 60
    assert "learned from, on cuda\n" in output
    assert "decoded by nvJPEG, those it takes; others by the processor" in output


def sides_of_the_swap():
    """Return both sides of the diff in docs/guide/data-sets.md."""
    page = ROOT / "docs" / "guide" / "data-sets.md"
    if not page.exists():
        pytest.skip("no docs/ beside these tests")
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = diff.splitlines()
    assert {line[0] for line in lines} == set(" +-")
    return ["\n".join(line[1:] for line in lines if line[0] != left_out) + "\n" for left_out in "+-"]


def test_the_swap_in_the_guide_is_lines_of_train_volumes():
    program = {line.strip() for line in (ROOT / "examples" / "train_volumes.py").read_text().splitlines()}
    for side in sides_of_the_swap():
        assert {line.strip() for line in side.splitlines()} <= program


def test_both_sides_of_the_swap_in_the_guide_run_and_give_the_same(tmp_path):
    written = np.random.default_rng(0).integers(0, 256, (10, 2, 3, 4, 5), np.uint8)
    paths = [tmp_path / f"{i}.npy" for i in range(10)]
    for path, volume in zip(paths, written, strict=True):
        np.save(path, volume)
    found = []
    for side in sides_of_the_swap():
        args = argparse.Namespace(batch_size=4, in_order=True, epochs=2, workers=0, device="cpu")
        known = {"args": args, "paths": paths, "seen": [], "gdsdata": gdsdata, "np": np, "torch": torch, "Path": Path}
        known |= {"DataLoader": DataLoader, "Dataset": Dataset}
        exec(side + "        seen.append((scan, mask))\n", known)
        found.append([torch.cat(of_epochs) for of_epochs in zip(*known["seen"], strict=True)])
    for before, after, channel in zip(*found, (0, 1), strict=True):
        assert torch.equal(before, after)
        volumes = torch.from_numpy(written[:, channel : channel + 1]).float() / (255 if channel == 0 else 1)
        assert torch.equal(after, torch.cat([volumes, volumes]))  # two epochs


def test_the_documentation_names_every_example_and_they_are_short():
    page = ROOT / "docs" / "README.md"
    if not page.exists():
        pytest.skip("no docs/ beside these tests")
    named = set(re.findall(r"examples/(\w+\.py)", page.read_text()))
    assert named == {path.name for path in (ROOT / "examples").glob("*.py")}
    for name in named:
        assert len((ROOT / "examples" / name).read_text().splitlines()) < 150, name


@pytest.mark.gpu
def test_train_volumes_on_a_gpu_finds_what_it_finds_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    on_cpu, on_gpu = (epochs_of(example("train_volumes.py", *VOLUMES, on_gpu=on_gpu)) for on_gpu in (False, True))
    assert len(on_gpu) == 3
    for theirs, ours in zip(on_cpu, on_gpu, strict=True):
        assert float(ours) == pytest.approx(float(theirs), rel=0.02)


@pytest.mark.parametrize("state", ["--warm", "--validate"])
def test_load_store_tensor_prints_rates_and_the_path_that_served_and_leaves_no_file(tmp_path, state):
    lines = example("load_store_tensor.py", "--folder", tmp_path, "--mb-size", 2, "--loop", 2, state).splitlines()
    rate = r"store +(\d+\.\d\d) GB/s  load +(\d+\.\d\d) GB/s"
    assert re.fullmatch(rf"cpu    Python   {rate}  page cache", lines[0])
    ours = re.fullmatch(rf"cpu    gdsdata  {rate}  (\w+(, \w+)*)", lines[1])
    assert ours and set(ours[3].split(", ")) <= {"page_cache", "direct", "buffered"}
    if state == "--warm":
        assert "page_cache" in ours[3]
    assert lines[2:] == (["all bytes are right"] if state == "--validate" else [])
    assert os.listdir(tmp_path) == []


def test_load_store_tensor_finds_wrong_bytes_and_refuses_no_iterations(tmp_path):
    """It runs in this process, with a library that stores too few bytes."""
    code = "import sys, runpy; sys.argv[1:] = ['--folder', sys.argv[1], '--mb-size', '1', '--validate']\n"
    code += "import gdsdata; whole = gdsdata.Engine.write\n"
    code += "gdsdata.Engine.write = lambda self, path, tensor: whole(self, path, tensor.clone().fill_(7))\n"
    code += f"runpy.run_path({str(ROOT / 'examples' / 'load_store_tensor.py')!r}, run_name='__main__')\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "gdsdata, store: the bytes are not those of the tensor" in done.stderr
    assert os.listdir(tmp_path) == []
    assert example("load_store_tensor.py", "--loop", 0, ends_with=2) == ""


# ------------------------------------------------------------------------------------- train_remote.py


@pytest.mark.timeout(300)
def test_train_remote_is_cold_then_cached_then_resumed_on_two_ranks_with_the_same_losses(seaweedfs, tmp_path):
    data = tmp_path / "made"
    data.mkdir()
    runpy.run_path(str(ROOT / "examples" / "train_remote.py"))["make_data"](data)
    for path in filter(Path.is_file, data.rglob("*")):
        seaweedfs.put(f"train/{path.relative_to(data)}", path.read_bytes())
    arguments = ["--url", seaweedfs.url("train"), "--state", tmp_path / "it.pt"]
    cached = [*arguments, "--cache", tmp_path / "cache"]
    options = {**seaweedfs.environment(), "XDG_CACHE_HOME": str(tmp_path / "home")}

    from_server = r"from the server: (\d+) bytes"
    cold = example("train_remote.py", *cached, "--steps", 12, **options)
    again = example("train_remote.py", *cached, "--steps", 12, "--stop-at", 5, **options)
    assert int(re.search(from_server, cold)[1]) > 0 and int(re.search(from_server, again)[1]) == 0
    expected = losses(cold)
    assert list(losses(again).items()) == list(expected.items())[:5]

    code, said = torchrun(2, ROOT / "examples" / "train_remote.py", *cached, "--steps", 12, "--resume", **options)
    resumed = losses(said)
    assert code == 0, said
    assert list(resumed) == [str(step) for step in range(6, 13)]
    for step, loss in resumed.items():
        assert float(loss) == pytest.approx(float(expected[step]), rel=1e-3)
    assert (
        losses(example("train_remote.py", *arguments, "--steps", 12, "--resume", **options)).items() <= expected.items()
    )

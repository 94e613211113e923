"""The examples run as a user would run them."""

import argparse
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gdsdata

ROOT = Path(__file__).resolve().parents[1]
WINDOWS = 40 * 16  # an epoch of 40 batches


def example(name, *arguments, ends_with=0):
    """What the example printed. On the CPU, so that its losses are the same wherever this runs."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == ends_with, result.stderr
    return result.stdout


def losses(output):
    """{step: the digits of its loss}."""
    return dict(re.findall(r"^step (\d+): loss (\S+)$", output, re.MULTILINE))


@pytest.fixture(scope="module")
def short_epochs(tmp_path_factory):
    """Arguments for a text so small that an epoch is 40 batches."""
    path = tmp_path_factory.mktemp("data") / "text.bin"
    text = Path(argparse.__file__).read_bytes()[: WINDOWS * 64 + 1]
    assert len(text) == WINDOWS * 64 + 1
    gdsdata.write_tensor(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.uint16), path)
    return ["--steps", 60, "--print-every", 1, "--data", path]


@pytest.fixture(scope="module")
def uninterrupted(short_epochs, tmp_path_factory):
    return losses(example("train_bytes.py", *short_epochs, "--checkpoint", tmp_path_factory.mktemp("whole") / "it.pt"))


def test_train_bytes_loss_falls(uninterrupted):
    assert list(uninterrupted) == [str(step) for step in range(1, 61)]
    assert float(uninterrupted["1"]) > 5
    assert float(uninterrupted["60"]) < 3.5


def test_train_bytes_resumes_in_mid_epoch_with_the_same_losses(short_epochs, uninterrupted, tmp_path):
    arguments = [*short_epochs, "--checkpoint", tmp_path / "stopped.pt"]
    stopped = losses(example("train_bytes.py", *arguments, "--stop-at", 50))
    place = torch.load(tmp_path / "stopped.pt", weights_only=True)["dataset"]
    assert (place["epoch"], place["batches"]) == (1, 10)  # of 40
    resumed = losses(example("train_bytes.py", *arguments, "--resume"))
    assert list(resumed) == [str(step) for step in range(51, 61)]
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
    assert resumed.startswith("from step 20\n")  # the save of step 30 had not come to its end
    assert list(losses(killed)) == [str(step) for step in range(1, 31)]
    assert list(losses(resumed)) == [str(step) for step in range(21, 46)]
    assert {**losses(killed), **losses(resumed)} == losses(whole)
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == ["lock", "step-30", "step-40"]


def test_own_format_reads_idx_files_and_refuses_a_cut_one(tmp_path):
    images = bytes(range(256)) * 28 * 28
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", 256, 28, 28) + images)
    lines = example("own_format.py", tmp_path).splitlines()
    assert lines == ["(64, 28, 28) torch.uint8 cpu"] * 8
    (tmp_path / "b").write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", 256, 28, 28) + images[:-1])
    assert example("own_format.py", tmp_path, ends_with=1) == ""

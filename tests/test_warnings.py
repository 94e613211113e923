"""Warnings show the line of the program that called gdsdata."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from gdsdata import GDSDataset, Reading, save, torch_private
from gdsdata.data import ranks
from gdsdata.formats import Tokens


@pytest.fixture
def small_tokens(tmp_path):
    path = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 50_257, 4096).astype("<u2").tofile(path)
    return str(path)


@pytest.mark.parametrize("index_cache", [None, "kept"])
def test_tokens_of_another_dtype(small_tokens, tmp_path, index_cache):
    reading = Reading(index_cache=index_cache and str(tmp_path / index_cache))
    with pytest.warns(RuntimeWarning, match="seem to be of uint16") as warned:
        GDSDataset(small_tokens, batch_size=1, format=Tokens("int64", seq_len=8), reading=reading)
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize("through_torch", [False, True])
def test_an_epoch_that_was_broken_off(small_tokens, through_torch):
    dataset = GDSDataset(small_tokens, batch_size=1, format=Tokens("uint16", seq_len=64))
    batches = torch.utils.data.DataLoader(dataset, batch_size=None) if through_torch else dataset
    next(iter(batches))
    with pytest.warns(UserWarning, match="was broken off") as warned:
        next(iter(batches))
    assert [warning.filename for warning in warned] == [__file__]


def test_ranks_that_srun_did_not_start(monkeypatch, small_tokens):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    monkeypatch.delenv("SLURM_STEPID", raising=False)
    ranks._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="srun did not start") as warned:
        GDSDataset(small_tokens, batch_size=1, format=Tokens("uint16", seq_len=64))
    assert [warning.filename for warning in warned] == [__file__]


def test_a_newer_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", "99.0")
    torch_private.warn_if_newer.cache_clear()
    with pytest.warns(RuntimeWarning, match="checked with torch") as warned:
        save({"weight": torch.zeros(1)}, tmp_path / "state.pt")
    assert [warning.filename for warning in warned] == [__file__]


def test_python_shows_the_deprecation_of_an_old_spelling_in_a_script(small_tokens):
    script = f"""
        from gdsdata import GDSDataset, formats
        GDSDataset({small_tokens!r}, batch_size=1, format=formats.Tokens("uint16", seq_len=64), rank=0, world_size=1)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert "<string>:3: DeprecationWarning: GDSDataset(rank=, world_size=...) is an old spelling" in done.stderr

"""Each framework resumes in the middle of an epoch with the losses of an uninterrupted run."""

import json
import warnings
from pathlib import Path
from typing import NamedTuple

import integrations_script as script
import pytest
import quick_programs
import torch
from helpers import torchrun

FRAMEWORKS = list(script.TRAINERS)
# Packages of frameworks that are not named as theirs.
PACKAGES = {"fabric": "lightning", "transformers-background": "transformers"}


def need(framework):
    package = PACKAGES.get(framework, framework)
    pytest.importorskip(package, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    script.write_data(folder)
    return folder


class TwoRanks(NamedTuple):
    """Two processes: what each saw, and the folder of their checkpoints."""

    seen: list
    folder: Path


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def of_two_ranks(request, tmp_path_factory):
    """Have two processes train: one launch for all frameworks."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs")
    for name in FRAMEWORKS:
        need(name)
    folder = tmp_path_factory.mktemp(request.param)
    script.write_data(folder)
    with quick_programs.importing("accelerate", "lightning.pytorch", "transformers.trainer", "torch._dynamo"):
        code, said = torchrun(2, script.__file__, folder, OMP_NUM_THREADS="1", TRAIN_ON=request.param)
    assert code == 0, said
    return TwoRanks([json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)], folder)


def numbers(seen, epoch):
    """Return the samples of an epoch."""
    return [number for batch, _ in seen[epoch * 13 : (epoch + 1) * 13] for number in batch]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_process_resumes_in_mid_epoch_with_the_same_losses(folder, tmp_path, framework):
    need(framework)
    runs = script.runs_of(framework, folder, tmp_path)
    assert len(runs["stopped"]) == script.STOP_AFTER  # 13 batches, and 6 of the second epoch
    assert runs["stopped"] + runs["resumed"] == runs["whole"]
    first, second = numbers(runs["whole"], 0), numbers(runs["whole"], 1)
    assert sorted(first) == sorted(second) == list(range(script.SAMPLES)) and first != second


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_processes_resume_in_mid_epoch_with_the_same_losses(of_two_ranks, framework):
    ranks = [seen[framework] for seen in of_two_ranks.seen]
    for runs in ranks:
        assert len(runs["stopped"]) == script.STOP_AFTER
        assert runs["stopped"] + runs["resumed"] == runs["whole"]
    for epoch in range(2):
        together = sum((numbers(runs["whole"], epoch) for runs in ranks), [])
        assert len(set(together)) == len(together) == script.SAMPLES - 1  # an odd one is left out


def test_two_processes_refuse_a_loader_that_accelerate_prepared(of_two_ranks):
    for seen in of_two_ranks.seen:
        for said in seen["accelerate's own loaders"]:
            assert "gdsdata.integrations.accelerate.prepare(accelerator, dataset)" in said


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_process_continues_the_global_batches_of_two(of_two_ranks, framework):
    folder = of_two_ranks.folder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the Trainer, about batch sizes
        alone = script.TRAINERS[framework](folder, folder / framework / "stopped", resumes=True)
    ranks = [seen[framework]["resumed"] for seen in of_two_ranks.seen]
    together = [sorted(sum((numbers for numbers, _ in batches), [])) for batches in zip(*ranks, strict=True)]
    assert [sorted(numbers) for numbers, _ in alone[:-1]] == together[:-1]  # the last one has an odd sample more
    assert set(alone[-1][0]) > set(together[-1])

"""Checkpoints of the Trainer of transformers that are written while it trains."""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import integrations_script as script
import pytest
import quick_programs
import torch
from helpers import eventually, torchrun

from gdsdata import EngineOptions, safetensors
from gdsdata.checkpoint.background.file_saves import FileSaves
from gdsdata.checkpoint.background.save_job import SaveJob
from gdsdata.checkpoint.deferred import deferring
from gdsdata.errors import IoError
from gdsdata.io import engine

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")  # a Trainer needs it

from safetensors.torch import load_file  # noqa: E402
from test_hf_trainer import batches_of, data_of, trainer_of  # noqa: E402

from gdsdata.integrations import hf_trainer, hf_trainer_background  # noqa: E402
from gdsdata.integrations.hf_trainer_folders import remove_old  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_programs")

FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "gdsdata_dataset.pt"]


@pytest.fixture(scope="module", autouse=True)
def programs_have_a_trainer():
    with quick_programs.importing("test_hf_trainer", "transformers.trainer", "torch._dynamo"):
        yield


@pytest.fixture
def folder(tmp_path):
    script.write_data(tmp_path)
    return tmp_path


def background(folder, **arguments):
    """Return a Trainer of 13 batches that saves after 5 and 10 of them, and at the end."""
    return hf_trainer.use(trainer_of(folder, **arguments), train=data_of(folder), checkpoints="background")


def checkpoints(folder):
    """Return the names of the checkpoints, and which of them are complete."""
    found = sorted((folder / "run").glob("checkpoint-*"), key=lambda one: int(one.name.partition("-")[2]))
    return {one.name: (one / "trainer_state.json").exists() for one in found}


class Gate:
    """Holds the writing of files until it is opened.

    From the ``fails_at``th file on, there is an error.
    """

    def __init__(self, monkeypatch, fails_at=None):
        self.opened, self.paths = threading.Event(), []
        write = SaveJob.write

        def gated(job, path, *arguments):
            assert self.opened.wait(60)
            self.paths.append(path)
            if fails_at is not None and len(self.paths) >= fails_at:
                raise IoError(errno.ENOSPC, "the disk is full", path)
            return write(job, path, *arguments)

        monkeypatch.setattr(SaveJob, "write", gated)


class AtStep(transformers.TrainerCallback):
    """Calls a function after a step."""

    def __init__(self, step, function):
        self.step, self.function = step, function

    def on_step_end(self, arguments, state, control, **_):
        if state.global_step == self.step:
            self.function()


def test_its_files_are_those_of_a_save_that_training_waits_for(folder, tmp_path):
    background(folder).train()
    (folder / "run").rename(folder / "in-background")
    hf_trainer.use(trainer_of(folder), train=data_of(folder)).train()
    for step in (5, 10, 13):
        one, other = (folder / run / f"checkpoint-{step}" for run in ("in-background", "run"))
        assert sorted(os.listdir(one)) == sorted(os.listdir(other)) and set(FILES) < set(os.listdir(one))
        for name in FILES:
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
        states = [json.loads((place / "trainer_state.json").read_text()) for place in (one, other)]
        assert states[0]["global_step"] == states[1]["global_step"] == step


def test_training_goes_on_before_a_checkpoint_is_complete(folder, monkeypatch):
    gate, seen = Gate(monkeypatch), []

    def look():
        seen.append(checkpoints(folder))
        seen.append([name for name in FILES if (folder / "run" / "checkpoint-5" / name).exists()])
        gate.opened.set()

    trainer = background(folder)
    trainer.add_callback(AtStep(9, look))
    trainer.train()
    assert seen == [{"checkpoint-5": False}, []]
    assert checkpoints(folder) == {"checkpoint-5": True, "checkpoint-10": True, "checkpoint-13": True}


def test_old_checkpoints_go_when_the_new_one_is_complete(folder, monkeypatch):
    gate, seen = Gate(monkeypatch), []
    gate.opened.set()

    def hold():
        assert eventually(lambda: checkpoints(folder)["checkpoint-5"], 60)
        gate.opened.clear()

    trainer = background(folder, save_total_limit=1)
    trainer.add_callback(AtStep(8, hold))
    trainer.add_callback(AtStep(12, lambda: (seen.append(checkpoints(folder)), gate.opened.set())))
    trainer.train()
    assert seen == [{"checkpoint-5": True, "checkpoint-10": False}]
    assert checkpoints(folder) == {"checkpoint-13": True}
    assert trainer.args.save_total_limit == 1


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 9])
def test_as_many_checkpoints_stay_as_the_limit_says(tmp_path, limit):
    (tmp_path / "checkpoint-2").write_text("no folder")
    (tmp_path / "checkpoint-7").mkdir()  # whose save did not end
    for saved in range(1, 7):
        (tmp_path / f"checkpoint-{10 * saved}").mkdir()
        (tmp_path / f"checkpoint-{10 * saved}" / "trainer_state.json").touch()
        remove_old(str(tmp_path / f"checkpoint-{10 * saved}"), limit, None)
        left = {one.name for one in tmp_path.iterdir() if one.is_dir()}
        assert left == {f"checkpoint-{10 * one}" for one in range(max(saved - limit, 0) + 1, saved + 1)}


def test_a_checkpoint_that_cannot_be_removed_does_not_keep_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "_warned", set())
    for step in (2, 3, 4):
        (tmp_path / "elsewhere" / f"checkpoint-{step}").mkdir(parents=True)
    (tmp_path / "checkpoint-1").symlink_to(tmp_path / "elsewhere")
    for step in (2, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    with pytest.warns(RuntimeWarning, match="checkpoint-1' could not be removed"):
        remove_old(str(tmp_path / "checkpoint-3"), 1, None)
    assert not (tmp_path / "checkpoint-2").exists() and (tmp_path / "checkpoint-3").exists()


def test_a_second_save_of_a_step_waits_until_the_first_one_is_complete(folder, monkeypatch):
    gate, ended, complete = Gate(monkeypatch), [], hf_trainer_background._complete

    class Twice(transformers.TrainerCallback):
        def on_step_end(self, arguments, state, control, **_):
            if state.global_step == 6:
                trainer._save_checkpoint(trainer.model, None)
                threading.Timer(0.5, gate.opened.set).start()
                trainer._save_checkpoint(trainer.model, None)
                assert len(ended) == 1

    monkeypatch.setattr(hf_trainer_background, "_complete", lambda *those: ended.append(complete(*those)))
    trainer = background(folder, save_strategy="no")
    trainer.add_callback(Twice)
    trainer.train()
    assert len(ended) == 2 and checkpoints(folder) == {"checkpoint-6": True}


def test_the_arguments_are_saved_as_they_are_and_paths_may_be_odd(folder, monkeypatch):
    monkeypatch.chdir(folder)
    trainer = background(folder, save_total_limit=4)
    trainer.args.output_dir = "run//"
    trainer.add_callback(AtStep(7, lambda: os.chdir("/")))
    trainer.add_callback(AtStep(9, lambda: os.chdir(folder)))
    trainer.train()
    assert checkpoints(folder) == {"checkpoint-5": True, "checkpoint-10": True, "checkpoint-13": True}
    saved = torch.load(folder / "run" / "checkpoint-10" / "training_args.bin", weights_only=False)
    assert saved.save_total_limit == trainer.args.save_total_limit == 4


def test_a_trainer_may_go_back_to_saves_that_it_waits_for(folder, monkeypatch):
    trainer = hf_trainer.use(background(folder))
    Gate(monkeypatch)  # which would hold what is written in the background
    trainer.train()
    assert all(checkpoints(folder).values()) and len(checkpoints(folder)) == 3


OF_ANOTHER = "RuntimeError: another process could not write a checkpoint"


@pytest.mark.parametrize(
    "storage, errors",
    [
        ("slow", [None, None]),
        ("full", ["IoError: the disk is full", OF_ANOTHER]),
        ("twice", ["IoError: the disk is full", OF_ANOTHER]),
        ("late", [None, None]),
        ("refuses", [OF_ANOTHER, "OSError: [Errno 5] rank 1 cannot write"]),
    ],
)
def test_a_checkpoint_is_complete_when_all_ranks_have_written_and_all_learn_of_an_error(folder, storage, errors):
    code, said = torchrun(2, Path(__file__).parent / "hf_trainer_ranks.py", folder, storage, OMP_NUM_THREADS="1")
    assert code == 0, said
    ended = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [is_complete for _, is_complete, _ in ended] == [errors == [None, None]] * 2
    assert all(found == error or found.startswith(error) for (found, *_), error in zip(ended, errors, strict=True))
    assert ended[0][2] == ([True] if errors == [None, None] else [])


def test_the_best_checkpoint_stays_and_is_loaded(folder):
    found = itertools.chain([3.0, 1.0], itertools.repeat(2.0))
    trainer = background(
        folder,
        evaluate=data_of(folder),
        eval_strategy="steps",
        eval_steps=5,
        save_total_limit=1,
        max_steps=15,
        num_train_epochs=2,
        load_best_model_at_end=True,
        metric_for_best_model="error",
        greater_is_better=False,
    )
    trainer.evaluate = lambda *_, **__: {"eval_error": next(found)}
    trainer._evaluate = lambda *_, **__: trainer.evaluate()
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-10")
    assert checkpoints(folder) == {"checkpoint-10": True}


def test_a_save_that_failed_is_an_error_and_no_checkpoint_is_lost(folder, monkeypatch):
    gate = Gate(monkeypatch, fails_at=8)  # in the second checkpoint
    gate.opened.set()
    trainer = background(folder, save_total_limit=1)
    with pytest.raises(IoError, match="the disk is full"):
        trainer.train()
    assert checkpoints(folder)["checkpoint-5"] and not checkpoints(folder).get("checkpoint-10")
    monkeypatch.undo()
    resumed = background(folder)
    with pytest.warns(RuntimeWarning, match="checkpoint-1[03]' has no trainer_state.json"):
        resumed.train(resume_from_checkpoint=True)
    assert batches_of(resumed) == batches_of(trainer)[5:] + batches_of(resumed)[len(batches_of(trainer)) - 5 :]
    assert checkpoints(folder)["checkpoint-13"]


def test_a_run_without_a_complete_checkpoint_says_so(folder):
    (folder / "run" / "checkpoint-5").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="none of the 1 checkpoints in .* train without resume_from_checkpoint"):
        background(folder).train(resume_from_checkpoint=True)


def test_an_error_of_the_training_is_not_hidden_by_one_of_a_save(folder, monkeypatch):
    gate = Gate(monkeypatch, fails_at=1)

    def fail():
        gate.opened.set()
        raise ZeroDivisionError("of the training")

    trainer = background(folder)
    trainer.add_callback(AtStep(6, fail))
    with pytest.raises(ZeroDivisionError, match="of the training"):
        trainer.train()
    assert checkpoints(folder) == {"checkpoint-5": False}
    assert not [one for one in threading.enumerate() if one.name.startswith("gdsdata-save")]


def test_saves_after_the_training_are_on_storage_when_they_return(folder, monkeypatch):
    trainer = background(folder, save_strategy="no")
    trainer.train()
    Gate(monkeypatch)  # which would hold what is written in the background
    trainer.save_model(str(folder / "model"))
    assert (folder / "model" / "model.safetensors").exists()


def test_views_are_saved_with_their_values_and_tensors_may_change_after_the_call(tmp_path):
    complex_ones = torch.view_as_complex(torch.arange(20_000.0).reshape(-1, 2))
    tensors = {"conjugate": complex_ones.conj(), "empty": torch.zeros(0, 3), "plain": torch.arange(3_000_000)}
    tensors["short"] = torch.ones(3, dtype=torch.bool)
    expected = {name: one.clone() for name, one in tensors.items()}
    saves = FileSaves(str(tmp_path), 4 << 20, EngineOptions())
    with deferring(saves, tmp_path):
        safetensors.save_file(tensors, tmp_path / "x.safetensors")
    for one in (complex_ones, tensors["plain"], tensors["short"]):
        one.zero_()
    saves.raise_unseen()
    saves.close()
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_another_word_for_checkpoints_is_refused(folder):
    with pytest.raises(ValueError, match="checkpoints='async' is none of True, False and \"background\""):
        hf_trainer.use(trainer_of(folder), train=data_of(folder), checkpoints="async")


KILLED = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from gdsdata.checkpoint.background.save_job import SaveJob
import test_hf_trainer_background as tests
write = SaveJob.write
def slow(job, path, *arguments):
    time.sleep(0.15)
    print(path, flush=True)
    return write(job, path, *arguments)
SaveJob.write = slow
tests.background(Path(sys.argv[1]), save_total_limit=1, save_steps=2).train()
"""


@pytest.mark.parametrize("files", [8, 11, 13])
def test_a_kill_while_it_writes_leaves_a_checkpoint_to_resume_from(folder, files):
    command = [sys.executable, "-c", KILLED, str(folder), os.path.dirname(__file__)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        for _ in range(files):
            assert process.stdout.readline(), "it ended early"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert True in checkpoints(folder).values()
    resumed = background(folder, save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    whole = [batch["values"][:, 0].tolist() for batch in data_of(folder)]
    step = max(int(name.partition("-")[2]) for name, is_complete in checkpoints(folder).items() if is_complete)
    assert batches_of(resumed) == whole[step:]

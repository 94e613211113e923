"""Torchtitan trains from data sets, saves in the background, and resumes with the same losses.

These tests need the package. It wants huggingface_hub below 2, so install it in an environment of
its own:

    pip install torchtitan==0.3.0   # and some 60 MB of other packages
    pytest -m "" tests/test_torchtitan.py

`torchtitan_script` says what they cannot show without a GPU.
"""

import importlib.metadata
import itertools
import json
import os
import threading
from pathlib import Path

import fsspec
import pytest
import torch
import torchtitan_script as script
from folder_store import FolderStore, install
from helpers import torchrun

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
script.on_cpu()

from torch.distributed.checkpoint import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.stateful import Stateful  # noqa: E402
from torchtitan.components.checkpointer.dcp import CheckpointManager  # noqa: E402

from gdsdata import GDSStorageWriter  # noqa: E402
from gdsdata.checkpoint import open_object  # noqa: E402
from gdsdata.errors import IoError  # noqa: E402
from gdsdata.integrations.torchtitan import GDSCheckpointManager  # noqa: E402
from gdsdata.integrations.torchtitan_data import GDSDataLoader  # noqa: E402
from gdsdata.storage import stores  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def one_process():
    """Be the one rank of a process group, as a program under torchrun is."""
    before = {name: os.environ.get(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
    threaded = torch.autograd.is_multithreading_enabled()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    torch.autograd.set_multithreading_enabled(threaded)
    torch.use_deterministic_algorithms(False)
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("titan")
    script.write_data(folder)
    return folder


# --- the trainer ------------------------------------------------------------------------------------------------------


def test_one_process_resumes_in_mid_epoch_with_the_same_losses(folder, tmp_path):
    (tmp_path / "tokens.bin").symlink_to(folder / "tokens.bin")
    whole, stopped, resumed = (script.run(name, tmp_path) for name in ("whole", "stopped", "resumed"))
    assert list(whole) == list(range(1, script.STEPS + 1)) and list(stopped) == list(range(1, script.STOP_AT + 1))
    assert list(resumed) == list(range(7, script.STEPS + 1))  # behind the checkpoint of step 6
    assert {**stopped, **resumed} == whole
    assert whole[12] < whole[1]


def test_a_run_ends_with_its_data(folder, tmp_path):
    config = script.configured(folder, tmp_path, "--dataloader.no-infinite")
    trainer, losses = script.train(config)
    assert list(losses) == list(range(1, script.BATCHES + 1)) and trainer.step == script.BATCHES + 1
    assert {one.name for one in (tmp_path / "checkpoint").iterdir()} == {"step-3"}


def ranks_of(folder, run, ranks=2, device="cpu"):
    code, said = torchrun(ranks, script.__file__, folder, run, device, OMP_NUM_THREADS="1")
    assert code == 0, said
    return [json.loads((folder / f"{run}-rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_gpus_a_run_that_was_stopped_resumes_with_the_same_losses(folder, tmp_path, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    (tmp_path / "tokens.bin").symlink_to(folder / "tokens.bin")
    (whole, *_), (stopped, *_), (resumed, *_) = (
        ranks_of(tmp_path, run, ranks, "cuda") for run in ("whole", "stopped", "resumed")
    )
    assert [*stopped, *resumed] == [*map(str, range(1, 9)), *map(str, range(7, 13))]
    assert {**stopped, **resumed} == whole
    assert whole["12"] < whole["1"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_resume_in_mid_epoch_and_one_goes_on(folder):
    (whole, same), (stopped, _), (resumed, _) = (ranks_of(folder, run) for run in ("whole", "stopped", "resumed"))
    assert whole == same  # torchtitan logs the mean of all ranks
    assert [*stopped, *resumed] == [*map(str, range(1, 9)), *map(str, range(7, 13))]
    assert {**stopped, **resumed} == whole
    config = script.configured(folder, folder / "whole", "--checkpoint.load-step", "6")
    _, alone = script.train(config)
    assert list(alone) == list(range(7, 13))
    assert alone == pytest.approx({step: whole[str(step)] for step in alone}, rel=1e-3)  # sums of another order


@pytest.mark.slow
def test_a_rank_that_cannot_save_is_an_error_on_all_ranks(folder):
    for said in ranks_of(folder, "failing"):
        assert "CheckpointException" in said and "the disk is full" in said
    checkpoints = folder / "failing" / "checkpoint"
    assert sorted(one.parent.name for one in checkpoints.glob("*/.metadata")) == ["step-3"]


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Number(Stateful):
    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]


def manager_of(place, kind=GDSCheckpointManager, **options):
    """Return a manager of a small model. Its folder is ``place/checkpoint``."""
    torch.manual_seed(1)
    return kind(
        kind.Config(enable=True, interval=1, **options),
        dataloader=Number(),
        model_parts=[torch.nn.Linear(64, 64)],
        optimizers=Number(),
        lr_schedulers=Number(),
        states={"train_state": Number()},
        sd_adapter=None,
        base_folder=str(place),
    )


def step(manager, number):
    """Train a step, and save."""
    weights = manager.states["model"].state_dict()["weight"]
    weights.fill_(number)
    manager.states["train_state"].value = number
    manager.save(number)
    weights.fill_(-1)  # what is saved was copied


def loaded(manager, number=-1):
    """Return the step that a new manager loads, and check all of its state."""
    assert manager.load(number)
    found = manager.states["train_state"].value
    assert manager.states["model"].state_dict()["weight"].unique().tolist() == [found]
    return found


def complete(folder):
    return sorted(int(one.parent.name.removeprefix("step-")) for one in folder.glob("checkpoint/*/.metadata"))


@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_a_state_is_saved_and_loaded(tmp_path, mode):
    manager = manager_of(tmp_path, async_mode=mode)
    for number in (1, 2):
        step(manager, number)
    manager.close()
    assert complete(tmp_path) == [1, 2]
    assert loaded(manager_of(tmp_path)) == 2 and loaded(manager_of(tmp_path), 1) == 1


@pytest.mark.parametrize("saves, loads", [(GDSCheckpointManager, CheckpointManager), (CheckpointManager, None)])
def test_each_of_both_managers_reads_what_the_other_has_saved(tmp_path, saves, loads):
    manager = manager_of(tmp_path, saves)
    step(manager, 3)
    manager.close()
    assert loaded(manager_of(tmp_path, loads or GDSCheckpointManager)) == 3


def test_checkpoints_may_be_objects(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_stores", {})
    monkeypatch.setattr(open_object, "OpenObject", open_object.OpenObject)  # `install` replaces both
    store = install(FolderStore(tmp_path))

    def opened(url):  # by fsspec, which would need a package for s3
        return fsspec.filesystem("file"), store.path(url.removeprefix("s3://bucket/"))

    monkeypatch.setattr("torchtitan.tools.filesystem._resolve", opened)
    manager = manager_of(tmp_path, folder="s3://bucket/run", keep_latest_k=2)
    for number in range(1, 5):
        step(manager, number)
    manager.maybe_wait_for_saving()
    manager.close()
    assert {one.partition("/__")[0] for one in store.names() if "/__" in one} == {"run/step-3", "run/step-4"}
    assert loaded(manager_of(tmp_path, folder="s3://bucket/run")) == 4


def test_close_waits_for_the_save_in_progress(tmp_path, monkeypatch):
    manager, finish = manager_of(tmp_path), GDSStorageWriter.finish
    may_end = threading.Event()

    def late(writer, *arguments, **named):
        assert may_end.wait(60)
        finish(writer, *arguments, **named)

    monkeypatch.setattr(GDSStorageWriter, "finish", late)
    step(manager, 1)
    assert complete(tmp_path) == []
    may_end.set()
    manager.close()
    assert complete(tmp_path) == [1]


def refuse(monkeypatch, method, where):
    """Have a method of the writer fail for a checkpoint."""
    its = getattr(GDSStorageWriter, method)

    def refused(writer, *arguments, **named):
        if where in str(writer.path):
            raise IoError(28, "the disk is full", str(writer.path))
        return its(writer, *arguments, **named)

    monkeypatch.setattr(GDSStorageWriter, method, refused)


@pytest.mark.parametrize("method", ["write_items", "finish"])
def test_a_failed_save_is_an_error_and_leaves_the_older_checkpoint(tmp_path, monkeypatch, method):
    manager = manager_of(tmp_path)
    step(manager, 1)
    manager.maybe_wait_for_saving()
    refuse(monkeypatch, method, "step-2")
    step(manager, 2)
    with pytest.raises(CheckpointException, match="the disk is full"):
        step(manager, 3)
    manager.close()  # the error was raised once
    assert complete(tmp_path) == [1] and loaded(manager_of(tmp_path)) == 1


def test_close_raises_the_error_of_the_last_save(tmp_path, monkeypatch):
    manager = manager_of(tmp_path)
    refuse(monkeypatch, "write_items", "step-1")
    step(manager, 1)
    with pytest.raises(CheckpointException, match="the disk is full"):
        manager.close()
    assert not manager.purge_thread.is_alive()


def test_incomplete_checkpoints_do_not_count_as_kept_ones(tmp_path, monkeypatch):
    first = manager_of(tmp_path, keep_latest_k=2)
    for number in (1, 2):
        step(first, number)
    first.close()
    for name in ("step-3", "step-4"):  # of runs that were killed
        (tmp_path / "checkpoint" / name).mkdir()
    (tmp_path / "checkpoint" / "step-x").mkdir()  # none of torchtitan's
    again = manager_of(tmp_path, keep_latest_k=2)
    refuse(monkeypatch, "finish", "step-5")
    step(again, 5)
    with pytest.raises(CheckpointException):
        again.close()
    assert complete(tmp_path) == [1, 2]
    monkeypatch.undo()
    again = manager_of(tmp_path, keep_latest_k=2)
    for number in (6, 7, 8):
        step(again, number)
    again.maybe_wait_for_saving()
    again.close()
    assert complete(tmp_path) == [7, 8]
    assert {one.name for one in (tmp_path / "checkpoint").iterdir()} == {"step-7", "step-8", "step-x"}


def test_a_disabled_manager_does_nothing(tmp_path):
    manager = GDSCheckpointManager.Config().build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    )
    assert not manager.save(1) and not manager.load()
    manager.close()


def test_the_mode_that_needs_a_process_is_refused():
    with pytest.raises(ValueError, match='pass "async"'):
        GDSCheckpointManager.Config(async_mode="async_with_pinned_mem")


# --- data -------------------------------------------------------------------------------------------------------------


def loader_of(path, rank=0, ranks=1, batch=4, **options):
    config = GDSDataLoader.Config(dataset_path=str(path), dtype="uint8", **options)
    return config.build(
        dp_world_size=ranks, dp_rank=rank, seq_len=8, local_batch_size=batch, tokenizer=None, snapshot_every_n_steps=1
    )


def test_labels_are_the_next_tokens(folder):
    (inputs, labels), *_ = loader_of(folder / "tokens.bin", infinite=False)
    assert inputs["input"].shape == labels.shape == (4, 8) and inputs["input"].dtype == labels.dtype == torch.int64
    assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])
    assert torch.equal(inputs["positions"], torch.arange(8).repeat(4, 1))
    assert all(one.device.type == "cpu" and one.is_contiguous() for one in (*inputs.values(), labels))


def test_documents_begin_at_position_zero_and_predict_no_other_document(tmp_path):
    bytes_of = [5, 0, 7, 7, 0, 0, 9, 9, 9]
    (tmp_path / "a.bin").write_bytes(bytes(bytes_of))
    ((inputs, labels),) = loader_of(tmp_path / "a.bin", batch=1, infinite=False, document_end=0)
    assert inputs["positions"].tolist() == [[0, 1, 0, 1, 2, 0, 0, 1]]
    assert labels.tolist() == [[0, -100, 7, 0, -100, -100, 9, 9]]


def test_an_infinite_loader_begins_another_epoch_in_a_new_order(folder):
    batches = len(list(loader_of(folder / "tokens.bin", infinite=False)))
    two = list(itertools.islice(loader_of(folder / "tokens.bin"), 2 * batches))
    first, second = (torch.cat([inputs["input"] for inputs, _ in two[i : i + batches]]) for i in (0, batches))
    assert not torch.equal(first, second)
    assert sorted(first.tolist()) == sorted(second.tolist())


def test_another_number_of_ranks_continues_the_global_batches(folder):
    whole = [sorted(inputs["input"].tolist()) for inputs, _ in loader_of(folder / "tokens.bin", infinite=False)]
    ranks = [loader_of(folder / "tokens.bin", rank, 2, batch=2, infinite=False) for rank in range(2)]
    begun = [list(itertools.islice(one, 5)) for one in ranks]
    states = [one.state_dict() for one in ranks]
    assert states[0] == states[1]
    alone = loader_of(folder / "tokens.bin", infinite=False)
    alone.load_state_dict(states[1])
    together = [sorted(a[0]["input"].tolist() + b[0]["input"].tolist()) for a, b in zip(*begun, strict=True)]
    assert together + [sorted(inputs["input"].tolist()) for inputs, _ in alone] == whole


def test_a_loader_of_no_known_data_is_refused(folder):
    with pytest.raises(ValueError, match="dataset='c4'.*tokens and megatron"):
        loader_of(folder / "tokens.bin", dataset="c4")
    with pytest.raises(ValueError, match="say where the files are"):
        GDSDataLoader.Config().build(dp_world_size=1, dp_rank=0, seq_len=8, local_batch_size=1)


def test_the_version_is_the_one_that_the_documentation_names():
    version = importlib.metadata.version("torchtitan")
    guide = (Path(script.__file__).parents[1] / "docs" / "guide" / "frameworks.md").read_text()
    assert f"torchtitan {version}" in guide

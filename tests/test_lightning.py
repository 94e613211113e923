"""Checkpoints of Lightning and Fabric, and data sets in both."""

import errno
import pickle
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from folder_store import FolderStore, install
from torch.utils.data import DataLoader

from gdsdata import GDSDataset
from gdsdata.checkpoint import open_object
from gdsdata.checkpoint.background.save_job import SaveJob
from gdsdata.errors import IoError
from gdsdata.formats import Records
from gdsdata.storage import stores

lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # workers, loggers and a missing validation

from lightning.pytorch.plugins.io import AsyncCheckpointIO  # noqa: E402

from gdsdata.integrations.lightning import GDSCheckpointIO  # noqa: E402
from gdsdata.integrations.lightning_async import AsyncGDSCheckpointIO  # noqa: E402

KINDS = [GDSCheckpointIO, AsyncGDSCheckpointIO, lambda: AsyncCheckpointIO(GDSCheckpointIO())]


def state_of(value=1.0):
    return {"state_dict": {"weight": torch.full((5,), value)}, "epoch": 3, "callbacks": {}}


@pytest.fixture
def data(tmp_path):
    torch.arange(103, dtype=torch.float32).numpy().tofile(tmp_path / "0.bin")
    return GDSDataset(tmp_path / "0.bin", 8, Records("f4", (1,)), device="cpu")


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("kind", KINDS, ids=["sync", "async", "Lightning's async"])
def test_a_checkpoint_is_a_file_of_torch(tmp_path, kind):
    plugin, path = kind(), tmp_path / "new" / "last.ckpt"
    state = state_of()
    plugin.save_checkpoint(state, path)
    state["state_dict"]["weight"].fill_(2)  # what training does next
    plugin.teardown()
    for found in (plugin.load_checkpoint(path), torch.load(path)):
        assert found["epoch"] == 3 and found["callbacks"] == {}
        assert torch.equal(found["state_dict"]["weight"], torch.ones(5)) or kind is GDSCheckpointIO
    plugin.remove_checkpoint(path)
    plugin.teardown()
    assert not path.exists()


def test_a_missing_checkpoint_is_an_error_to_load_and_none_to_remove(tmp_path):
    plugin = GDSCheckpointIO()
    plugin.remove_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "none.ckpt")
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / "0.distcp").touch()
    plugin.remove_checkpoint(tmp_path / "sharded")
    assert not (tmp_path / "sharded").exists()


def test_devices_and_objects_of_a_load_are_as_asked_for(tmp_path):
    plugin, path = GDSCheckpointIO(), tmp_path / "a.ckpt"
    plugin.save_checkpoint({**state_of(), "lock": torch.nn.Linear(1, 1)}, f"file://{path}")
    words = "which weights_only=True does not allow. If you trust the file, call trainer.fit or fabric.load with"
    with pytest.raises(pickle.UnpicklingError, match=words):
        plugin.load_checkpoint(path)
    assert type(plugin.load_checkpoint(path, weights_only=False)["lock"]) is torch.nn.Linear
    plugin.save_checkpoint(state_of(), path)
    for location in ("cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, place: storage):
        assert torch.equal(plugin.load_checkpoint(path, location)["state_dict"]["weight"], torch.ones(5))
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({}, path, storage_options={"key": "x"})


@pytest.mark.parametrize("kind", [GDSCheckpointIO, AsyncGDSCheckpointIO])
def test_a_checkpoint_may_be_an_object(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(stores, "_stores", {})
    monkeypatch.setattr(open_object, "OpenObject", open_object.OpenObject)  # `install` replaces both
    install(FolderStore(tmp_path / "bucket", part_bytes=64 << 10))
    plugin, url = kind(), "s3://bucket/run/last.ckpt"
    plugin.save_checkpoint(state_of(), url)
    assert plugin.load_checkpoint(url)["epoch"] == 3
    plugin.remove_checkpoint(url)
    assert not list((tmp_path / "bucket" / "run").iterdir())


def test_an_old_checkpoint_stays_if_the_one_after_it_failed(tmp_path, monkeypatch):
    plugin, old, new = AsyncGDSCheckpointIO("64MiB"), tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    plugin.save_checkpoint(state_of(), old)
    assert plugin.load_checkpoint(old)["epoch"] == 3  # waits
    fails = threading.Event()

    def write(*_):
        fails.wait(30)
        raise IoError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(SaveJob, "write", write)
    plugin.save_checkpoint(state_of(), new)
    plugin.remove_checkpoint(old)
    fails.set()
    with pytest.raises(IoError, match="the disk is full"):
        plugin.teardown()
    assert old.exists() and not new.exists()
    plugin.teardown()  # its error was seen


# ---------------------------------------------------------------------------------------------------------- training


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def test_programs_that_import_pytorch_lightning_use_the_same_plugins(tmp_path, data):
    pytorch_lightning = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")

    class Same(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        training_step, configure_optimizers = Module.training_step, Module.configure_optimizers

    for kind in (GDSCheckpointIO, AsyncGDSCheckpointIO):
        place = tmp_path / kind.__name__
        settings = {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": place}
        trainer = pytorch_lightning.Trainer(accelerator="cpu", max_epochs=1, logger=False, plugins=[kind()], **settings)
        trainer.fit(Same(), data)
        assert type(trainer.strategy.checkpoint_io) is kind
        (saved,) = place.rglob("*.ckpt")
        assert kind().load_checkpoint(saved)["global_step"] == trainer.global_step == 13


ALONE = """
import sys
sys.modules["lightning"] = None  # as if it were not installed
from gdsdata.integrations.lightning import GDSCheckpointIO
from gdsdata.integrations.lightning_async import AsyncGDSCheckpointIO
import pytorch_lightning
for kind in (GDSCheckpointIO, AsyncGDSCheckpointIO):
    trainer = pytorch_lightning.Trainer(accelerator="cpu", logger=False, plugins=[kind()])
    assert type(trainer.strategy.checkpoint_io) is kind
"""


def test_pytorch_lightning_alone_is_enough():
    pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], capture_output=True, text=True, timeout=80)
    assert done.returncode == 0, done.stderr


def test_the_trainer_saves_in_the_background_and_its_bar_has_a_length(tmp_path, data):
    bar = lightning.pytorch.callbacks.TQDMProgressBar()
    saves = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path, "{step}", monitor="step", mode="max", every_n_train_steps=4, save_top_k=2
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[bar, saves],
        plugins=[AsyncGDSCheckpointIO()],
        logger=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Module(), data)
    assert bar.train_progress_bar.total == 13
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=12.ckpt", "step=8.ckpt"]


@pytest.mark.parametrize("saved", [{}, {"every_n_train_steps": 13}], ids=["after it", "after its last batch"])
@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_steps": 39}])
def test_a_checkpoint_of_an_epochs_end_is_resumed_with_the_next_batches(tmp_path, length, saved):
    seen = []
    torch.arange(103, dtype=torch.float32).numpy().tofile(tmp_path / "0.bin")

    class Noting(Module):
        def training_step(self, batch, number):
            seen.append(batch[:, 0].tolist())
            return super().training_step(batch, number)

    def batches_of(**more):
        seen.clear()
        trainer = lightning.Trainer(
            accelerator="cpu",
            callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, **saved)],
            logger=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            **length,
        )
        trainer.fit(Noting(), GDSDataset(tmp_path / "0.bin", 8, Records("f4", (1,)), device="cpu"), **more)
        return seen[:]

    whole = batches_of()
    assert batches_of(ckpt_path=tmp_path / "epoch=0.ckpt") == whole[len(whole) // 3 :]


@pytest.mark.parametrize(
    ("length", "saved_at"),
    [
        (length, at)
        for length in ({}, {"max_steps": 39}, {"limit_train_batches": 12})
        for at in (5, 13, 18, None)
        if at or "max_steps" not in length  # Lightning itself leaves an epoch out, also with a DataLoader
    ],
    ids=str,
)
def test_a_schedule_by_estimated_stepping_batches_resumes_with_the_next_batches(tmp_path, length, saved_at):
    """Such a schedule has Lightning make the iterator before it restores the place."""
    seen = []
    torch.arange(103, dtype=torch.float32).numpy().tofile(tmp_path / "0.bin")

    class Scheduled(Module):
        def training_step(self, batch, number):
            seen.append(batch[:, 0].tolist())
            return super().training_step(batch, number)

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            rate = torch.optim.lr_scheduler.LinearLR(
                optimizer, total_iters=int(self.trainer.estimated_stepping_batches)
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}

    def batches_of(**more):
        seen.clear()
        trainer = lightning.Trainer(
            accelerator="cpu",
            callbacks=[
                lightning.pytorch.callbacks.ModelCheckpoint(
                    tmp_path, "{step}", save_top_k=-1, every_n_train_steps=saved_at
                )
            ],
            logger=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            max_epochs=3,
            **length,
        )
        data = GDSDataset(tmp_path / "0.bin", 8, Records("f4", (1,)), device="cpu", on_break="restart")
        trainer.fit(Scheduled(), data, **more)
        return seen[:]

    whole = batches_of()
    steps = saved_at or len(whole) // 3
    assert batches_of(ckpt_path=tmp_path / f"step={steps}.ckpt") == whole[steps:]


def test_an_evaluation_of_some_batches_is_no_epoch_that_was_broken_off(tmp_path, data):
    """The sanity check takes two batches, and ``limit_val_batches`` the same ones each time."""
    seen = []

    class Evaluated(Module):
        def validation_step(self, batch, number):
            seen.append(batch[0, 0].item())

        def test_step(self, batch, number):
            self.validation_step(batch, number)

    def made(**arguments):
        return GDSDataset(tmp_path / "0.bin", 8, Records("f4", (1,)), shuffle=False, device="cpu", **arguments)

    settings = dict(accelerator="cpu", logger=False, enable_model_summary=False, enable_progress_bar=False)
    warnings.filterwarnings("error", "gdsdata")  # pytest restores the filters
    limits = dict(max_epochs=2, limit_val_batches=3, limit_test_batches=2, enable_checkpointing=False)
    trainer = lightning.Trainer(**settings, **limits)
    trainer.fit(Evaluated(), data, made())
    assert seen == [0, 8] + [0, 8, 16] * 2
    seen.clear()
    test = made()
    for _ in range(2):
        trainer.test(Evaluated(), test, verbose=False)
    assert seen == [0, 8] * 2
    seen.clear()
    test = made(on_break="continue")
    for _ in range(2):
        trainer.test(Evaluated(), test, verbose=False)
    assert seen == [0, 8, 16, 24]


def test_fabric_takes_a_data_set_in_a_dataloader_and_saves_through_gdsdata(tmp_path, data):
    fabric = lightning.Fabric(accelerator="cpu", plugins=[GDSCheckpointIO()])
    fabric.launch()
    with pytest.raises(TypeError, match="PyTorch DataLoader"):  # Fabric's, as docs/guide/frameworks.md says
        fabric.setup_dataloaders(data)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=None))
    assert [len(batch) for batch in loader] == [8] * 12 + [7]
    fabric.save(tmp_path / "fabric.ckpt", {"data": data.state_dict(), "step": 13})
    found = {"data": None, "step": 0}
    fabric.load(tmp_path / "fabric.ckpt", found)
    assert found == {"data": data.state_dict(), "step": 13}

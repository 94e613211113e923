"""Epochs, resuming and partial epochs in the training loops of Lightning and accelerate."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY, grouped
from torch.utils.data import DataLoader

from gdsdata import GDSDataset, Sharding
from gdsdata.formats import Records

SAMPLES, BATCHES = 103, 13


@pytest.fixture
def folder(tmp_path) -> Path:
    """Write 103 records, each its own number as a float32: 13 batches of 8, the last one of 7."""
    torch.arange(SAMPLES, dtype=torch.float32).numpy().tofile(tmp_path / "0.bin")
    return tmp_path


def read(folder: Path, **arguments) -> GDSDataset:
    return GDSDataset(folder / "0.bin", 8, Records("f4", (1,)), device="cpu", **grouped(arguments))


def numbers(batch: torch.Tensor) -> list[int]:
    return batch[:, 0].int().tolist()


def epochs(folder: Path, count: int) -> list[list[int]]:
    dataset = read(folder)
    return [[number for batch in dataset for number in numbers(batch)] for _ in range(count)]


def loader_of(dataset: GDSDataset, workers: int = 0) -> DataLoader:
    method = "fork" if workers else None
    return DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=method)


# --------------------------------------------------------------------------------------------------------- Lightning


@pytest.fixture
def lightning():
    lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # workers, loggers and a missing validation
        yield lightning


@pytest.fixture
def train(lightning, folder):
    """Return a function that trains with a `Trainer` and returns what each epoch saw."""

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(1, 1), {}

        def training_step(self, batch, _):
            self.seen.setdefault(self.current_epoch, []).extend(numbers(batch))
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-9)

    def train(batches, max_epochs, resume_from=None, **arguments):
        trainer = lightning.Trainer(
            **dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False),
            **dict(default_root_dir=folder, max_epochs=max_epochs, enable_checkpointing="callbacks" in arguments),
            **arguments,
        )
        module = Module()
        trainer.fit(module, batches, ckpt_path=resume_from)
        return list(module.seen.values())

    return train


@pytest.mark.parametrize("workers", [0, 2, None], ids=["DataLoader", "2 workers", "the data set itself"])
def test_lightning_sees_every_sample_in_a_new_order_in_each_epoch(folder, train, workers):
    seen = train(read(folder) if workers is None else loader_of(read(folder), workers), 3)
    assert seen == epochs(folder, 3)
    assert all(sorted(epoch) == list(range(SAMPLES)) for epoch in seen) and seen[0] != seen[1] != seen[2]


def test_lightnings_limit_train_batches_sees_all_of_the_data_if_asked_to(folder, train):
    seen = train(loader_of(read(folder, on_break="continue")), 4, limit_train_batches=3)
    assert sum(seen, []) == epochs(folder, 1)[0][: 4 * 3 * 8]


def test_lightnings_limit_train_batches_warns_that_it_sees_the_same_again(folder, train):
    with pytest.warns(UserWarning, match="broken off after 3 of 13 batches"):
        seen = train(loader_of(read(folder)), 3, limit_train_batches=3)
    assert seen == [epochs(folder, 1)[0][: 3 * 8]] * 3


@pytest.mark.parametrize("steps", [5, BATCHES, BATCHES + 4])
def test_lightning_resumes_a_data_set_behind_the_batches_that_it_trained_on(folder, lightning, train, steps):
    """Lightning saves and loads the data set's state as a loader's."""
    save = lightning.callbacks.ModelCheckpoint(folder, "last", every_n_train_steps=steps)
    seen = train(read(folder), -1, max_steps=steps, callbacks=[save])
    rest = train(read(folder), 3, resume_from=folder / "last.ckpt")
    assert sum(seen, []) + sum(rest, []) == sum(epochs(folder, 3), [])


DISTRIBUTED = """
import json, sys, torch
import lightning.pytorch as lightning
from gdsdata import GDSDataset
from gdsdata.formats import Records

folder = sys.argv[1]

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, batch, _):
        self.seen += batch[:, 0].int().tolist()
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-9)

    def on_fit_end(self):
        with open(f"{folder}/rank-{self.global_rank}.json", "w") as file:
            json.dump(self.seen, file)

if __name__ == "__main__":
    dataset = GDSDataset(f"{folder}/0.bin", 4, Records("f4", (1,)), device="cpu")  # one process, when rank 0 makes it
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=sys.argv[2], max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )
    trainer.fit(Module(), dataset)
"""


@pytest.mark.slow  # two processes that import Lightning
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_the_ranks_that_lightning_launches_read_their_shares(lightning, folder, strategy):
    script = folder / "script.py"
    script.write_text(DISTRIBUTED)
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, script, folder, strategy],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        alone = GDSDataset(
            folder / "0.bin", 4, Records("f4", (1,)), device="cpu", sharding=Sharding(rank=rank, world_size=2)
        )
        expected = [number for _ in range(2) for batch in alone for number in numbers(batch)]
        assert json.loads((folder / f"rank-{rank}.json").read_text()) == expected


# -------------------------------------------------------------------------------------------------------- accelerate


@pytest.fixture
def prepared():
    """Return the function by which accelerate prepares a loader."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    configuration = accelerate.utils.DataLoaderConfiguration(dispatch_batches=False)
    return accelerate.Accelerator(cpu=True, dataloader_config=configuration).prepare


@pytest.mark.parametrize("workers", [0, 2])
def test_accelerate_sees_every_sample_in_a_new_order_in_each_epoch(folder, prepared, workers):
    loader = prepared(loader_of(read(folder), workers))
    seen = [[number for batch in loader for number in numbers(batch)] for _ in range(3)]
    assert seen == epochs(folder, 3)


def test_accelerate_in_a_loop_of_exactly_len_batches_goes_on_to_the_next_epoch(folder, prepared):
    loader = prepared(loader_of(read(folder)))
    seen = []
    for _ in range(3):
        batches = iter(loader)
        seen.append([number for _ in range(len(loader)) for number in numbers(next(batches))])
        del batches
        loader.set_epoch(len(seen))  # accelerate would count on only if its iterator were asked once more
    assert seen == epochs(folder, 3)


def test_accelerate_resumes_an_epoch_though_it_sets_the_epoch_first(folder, prepared):
    dataset = read(folder)
    dataset.set_epoch(1)
    batches = iter(dataset)
    before = [number for _ in range(5) for number in numbers(next(batches))]
    resumed = read(folder)
    resumed.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    loader = prepared(loader_of(resumed))
    loader.set_epoch(1)  # its iterator calls set_epoch again
    after = [number for batch in loader for number in numbers(batch)]
    assert before + after == epochs(folder, 2)[1]
    assert [number for batch in loader for number in numbers(batch)] == epochs(folder, 3)[2]

"""Loaders of frameworks around a data set that would change its batches are found."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from gdsdata import GDSDataset, Mix, Sharding
from gdsdata.formats import Records
from gdsdata.io import engine


@pytest.fixture
def shared_by(tmp_path):
    """Return a function that makes a data set of rank 0 of so many."""
    torch.arange(103, dtype=torch.float32).numpy().tofile(tmp_path / "0.bin")

    def dataset(world_size):
        return GDSDataset(tmp_path, 8, Records("f4", (1,)), device="cpu", sharding=Sharding(0, world_size))

    return dataset


@pytest.fixture(scope="module")
def data_loader():
    """Return accelerate's module of loaders, with its states made."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.Accelerator(cpu=True)
    return accelerate.data_loader


def dispatcher(data_loader, dataset, processes):
    """Return the loader whose first process reads for all."""
    loader = data_loader.DataLoaderDispatcher(dataset, batch_size=None)
    loader.state = SimpleNamespace(num_processes=processes, process_index=0)
    return loader


def test_a_loader_whose_first_process_reads_for_all_is_refused_if_others_read_too(shared_by, data_loader):
    loader = dispatcher(data_loader, shared_by(2), 2)
    with pytest.raises(
        RuntimeError,
        match=r"DataLoaderDispatcher would share .* gdsdata.integrations.accelerate.prepare\(accelerator, dataset\)",
    ):
        next(iter(loader))


def test_a_loader_of_a_mix_is_refused_too(shared_by, data_loader):
    loader = dispatcher(data_loader, Mix([shared_by(2), shared_by(2)]), 2)
    with pytest.raises(RuntimeError, match="share out the batches of this Mix"):
        next(iter(loader))


@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_loader_that_takes_every_nth_batch_of_a_share_is_refused(shared_by, data_loader, batch_size):
    shard = data_loader.IterableDatasetShard(shared_by(2), batch_size, num_processes=2)
    with pytest.raises(RuntimeError, match="IterableDatasetShard would share"):
        next(iter(data_loader.DataLoaderShard(shard, batch_size=batch_size)))


def test_a_process_that_alone_reads_all_batches_may_share_them_out(shared_by, data_loader):
    """``sharding=Sharding(0, 1)`` asks for that."""
    dispatcher(data_loader, shared_by(1), 2).set_epoch(0)
    data_loader.IterableDatasetShard(shared_by(1), 1, num_processes=2).set_epoch(0)


def test_prepared_loaders_of_one_process_and_plain_ones_are_not_refused(shared_by, data_loader):
    loaders = [
        DataLoader(shared_by(2), batch_size=None),
        data_loader.prepare_data_loader(DataLoader(shared_by(1), batch_size=None), put_on_device=True),
        data_loader.prepare_data_loader(DataLoader(shared_by(1), batch_size=None)),
    ]
    assert [sum(map(len, loader)) for loader in loaders] == [51, 103, 103]


def test_a_collator_of_transformers_stacks_with_a_warning(shared_by, monkeypatch):
    monkeypatch.setattr(engine, "_warned", set())  # other tests may have had the warning
    collators = pytest.importorskip("transformers.data.data_collator", reason="transformers is not installed")
    loader = DataLoader(shared_by(1), batch_size=2, collate_fn=collators.default_data_collator)
    with pytest.warns(RuntimeWarning, match=r"stacks whole batches .*hf_trainer.use\(trainer\)"):
        iter(loader)


class LikeComposer:
    """Resumes as a Trainer of Composer does: in epoch N by one batch of each epoch before."""

    def __init__(self, train, evaluate):
        self.state = SimpleNamespace(train_dataloader=train)
        self.loaders = evaluate, train

    def _spin_dataloaders_to_cur_epoch(self, epochs):
        evaluate, train = self.loaders
        next(iter(evaluate))
        for _ in range(epochs):
            next(iter(train))


@pytest.mark.parametrize("mixed", [False, True])
def test_composers_way_to_a_later_epoch_is_refused_because_it_leads_to_the_first(shared_by, mixed):
    train = Mix([shared_by(1)]) if mixed else shared_by(1)
    LikeComposer(train, shared_by(1))._spin_dataloaders_to_cur_epoch(0)
    with pytest.raises(RuntimeError, match=r"train on the first epoch again.*composer.Loader\(dataset\)"):
        LikeComposer(train, shared_by(1))._spin_dataloaders_to_cur_epoch(2)

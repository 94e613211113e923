"""A data set in the Trainer of Composer."""

import json
import random
import re

import integrations_script as script
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import torchrun

import gdsdata

composer = pytest.importorskip("composer", reason="mosaicml (Composer) is not installed")

from composer.utils import reproducibility  # noqa: E402

from gdsdata.integrations.composer import Loader  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Composer warns of a small last batch
BATCHES = 13


class Model(composer.ComposerModel):
    """A regression with dropout. Its `seen` has the numbers and the loss of each batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def forward(self, batch):
        return self.layer(torch.nn.functional.dropout(batch / 100, 0.3))

    def loss(self, outputs, batch):
        loss = (outputs - batch % 7).square().mean()
        self.seen.append((batch[:, 0].int().tolist(), loss.item()))
        return loss


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("composer")
    script.write_data(made)
    return made


def trainer_of(folder, data, duration="2ep", load=None, run="run", **arguments):
    model = Model()
    return composer.Trainer(
        model=model,
        train_dataloader=data,
        callbacks=[data] if isinstance(data, Loader) else [],
        optimizers=torch.optim.SGD(model.parameters(), 0.1),
        max_duration=duration,
        load_path=None if load is None else str(folder / run / f"ba{load}.pt"),
        save_filename="ba{batch}.pt",
        save_latest_filename=None,
        device="cpu",
        seed=1,
        progress_bar=False,
        **arguments,
    )


def seen_of(trainer, duration=None):
    trainer.fit(duration=duration)
    trainer.close()
    return trainer.state.model.seen


@pytest.fixture(scope="module")
def whole(folder):
    """Train two epochs, with a checkpoint after each batch."""
    with gdsdata.torch_hooks() as hooks:
        run = str(folder / "run")
        seen = seen_of(trainer_of(folder, Loader(script.read(folder)), save_folder=run, save_interval="1ba"))
    assert hooks.report().served["torch.save"].calls == 2 * BATCHES
    return seen


def test_the_batches_are_those_of_the_data_set(folder, whole):
    data = script.read(folder)
    assert [numbers for numbers, _ in whole] == [batch[:, 0].int().tolist() for _ in range(2) for batch in data]


@pytest.mark.parametrize("batches", [5, BATCHES, 15])
def test_a_resume_has_the_losses_of_a_run_that_was_not_stopped_and_reads_nothing_again(folder, whole, batches):
    data = script.read(folder)
    assert seen_of(trainer_of(folder, Loader(data), load=batches)) == whole[batches:]
    assert data.stats()["batches"] == 2 * BATCHES - batches


def test_two_processes_resume_in_mid_epoch_with_the_same_losses_and_one_goes_on(folder):
    code, said = torchrun(2, script.__file__, folder, "composer", OMP_NUM_THREADS="1", NODE_RANK="0")
    assert code == 0, said
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text())["composer"] for rank in range(2)]
    for runs in ranks:
        assert len(runs["stopped"]) == script.STOP_AFTER and len(runs["whole"]) == 2 * BATCHES
        assert runs["stopped"] + runs["resumed"] == runs["whole"]
    for epoch in range(2):
        batches = [one for runs in ranks for one, _ in runs["whole"][epoch * BATCHES : (epoch + 1) * BATCHES]]
        numbers = sum(batches, [])
        assert len(set(numbers)) == len(numbers) == script.SAMPLES - 1  # an odd one is left out
    alone = script.with_composer(folder, folder / "composer" / "stopped", resumes=True)
    together = [sorted(one + other) for (one, _), (other, _) in zip(*(runs["resumed"] for runs in ranks), strict=True)]
    assert [sorted(one) for one, _ in alone[:-1]] == together[:-1]  # the last one has an odd sample more
    assert set(alone[-1][0]) > set(together[-1])


def test_a_second_fit_goes_on_behind_the_first_one(folder, whole):
    data = script.read(folder)
    trainer = trainer_of(folder, Loader(data), "7ba")
    trainer.fit()
    trainer.fit(duration="3ba")
    assert seen_of(trainer, "10ba") == whole[:20]
    assert data.stats()["batches"] == 20


def test_a_checkpoint_of_another_loader_says_what_is_missing(folder, whole):
    run = str(folder / "other")
    trainer = trainer_of(folder, script.read(folder), "5ba", save_folder=run, save_interval="5ba")
    trainer.fit()
    trainer.close()
    resumed = trainer_of(folder, Loader(script.read(folder)), load=5, run="other")
    with pytest.raises(
        RuntimeError, match=re.escape("is at batch 0 of epoch 0, and Composer would continue at batch 5")
    ):
        resumed.fit()


def test_the_data_set_itself_resumes_in_the_first_epoch_and_is_refused_in_later_ones(folder, whole):
    run = str(folder / "itself")
    trainer_of(folder, script.read(folder), save_folder=run, save_interval="5ba").fit()
    early = trainer_of(folder, script.read(folder), load=5, run="itself")
    assert seen_of(early) == whole[5:]
    late = trainer_of(folder, script.read(folder), load=15, run="itself")
    with pytest.raises(RuntimeError, match=r"train_dataloader=loader, callbacks=\[loader\]"):
        late.fit()


def test_other_data_are_refused():
    with pytest.raises(TypeError, match="takes a GDSDataset or a Mix, and not a list"):
        Loader([1])


def test_a_sharded_checkpoint_of_fewer_ranks_has_all_that_more_ranks_ask_for(folder, tmp_path, monkeypatch):
    """Composer has DCP load a checkpoint into the state of the ranks that there are now."""
    loader = Loader(script.read(folder))
    own = reproducibility.get_rng_state()
    dcp.save({"callbacks": {"Loader": loader.state_dict()}}, checkpoint_id=tmp_path / "c", no_dist=True)
    monkeypatch.setattr(reproducibility, "get_rng_state", lambda: own * 2)
    target = {"callbacks": {"Loader": loader.state_dict()}}
    torch.rand(10)
    dcp.load(target, checkpoint_id=tmp_path / "c", no_dist=True)
    loader.load_state_dict(target["callbacks"]["Loader"])
    loader.before_dataloader(None, None)
    now = reproducibility.dist.all_gather_object(torch.get_rng_state())[0]
    assert torch.equal(now, own[0]["torch"])
    assert random.getstate() == own[0]["python"]

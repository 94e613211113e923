"""A data set in the Trainer of transformers."""

import integrations_script as script
import numpy as np
import pytest
import torch
from helpers import note_calls

import gdsdata
from gdsdata.checkpoint.hooks_report import COUNTS
from gdsdata.checkpoint.safetensors import installed
from gdsdata.io import engine

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")  # a Trainer needs it

from gdsdata.integrations import hf_trainer  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    script.write_data(tmp_path)
    return tmp_path


def data_of(folder, **arguments):
    return script.read(folder, transform=lambda batch: {"values": batch}, **arguments)


def trainer_of(folder, train=None, evaluate=None, metrics=None, **arguments):
    """Return a Trainer that saves in `folder` and has a `Model`."""
    quiet = dict(report_to="none", use_cpu=True, disable_tqdm=True, logging_strategy="no")
    options = dict(num_train_epochs=1, save_strategy="steps", save_steps=5, lr_scheduler_type="constant")
    return transformers.Trainer(
        script.Model(),
        transformers.TrainingArguments(str(folder / "run"), **{**quiet, **options, **arguments}),
        train_dataset=train,
        eval_dataset=evaluate,
        compute_metrics=metrics,
    )


def batches_of(trainer):
    return [numbers for numbers, _ in trainer.model.seen]


@pytest.fixture
def trained(folder):
    """Train an epoch of 13 batches, with checkpoints after 5 and 10 of them and at its end."""
    trainer = hf_trainer.use(trainer_of(folder), train=data_of(folder))
    trainer.train()
    return trainer


def test_a_resume_reads_none_of_the_batches_before_it(folder, trained):
    data = data_of(folder)
    trainer = hf_trainer.use(trainer_of(folder), train=data)
    trainer.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-10"))
    assert batches_of(trainer) == batches_of(trained)[10:]
    assert data.stats()["batches"] == 3


def test_a_run_that_ended_goes_on_with_the_next_epoch(folder, trained):
    trainer = hf_trainer.use(trainer_of(folder, num_train_epochs=2), train=data_of(folder))
    trainer.train(resume_from_checkpoint=True)
    data = data_of(folder)
    data.set_epoch(1)
    assert batches_of(trainer) == [batch["values"][:, 0].tolist() for batch in data]


def test_ignore_data_skip_begins_the_epoch_again(folder, trained):
    trainer = hf_trainer.use(trainer_of(folder, ignore_data_skip=True), train=data_of(folder))
    trainer.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-10"))
    assert batches_of(trainer)[:3] == batches_of(trained)[:3]


def test_a_checkpoint_without_the_data_sets_state_says_what_to_do(folder, trained):
    (folder / "run" / "checkpoint-10" / hf_trainer.STATE_FILE).unlink()
    trainer = hf_trainer.use(trainer_of(folder), train=data_of(folder))
    with pytest.raises(
        FileNotFoundError, match="gdsdata_dataset.pt is missing: .* save_only_model=True, .* ignore_data_skip=True"
    ):
        trainer.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-10"))


def test_a_resume_that_would_continue_elsewhere_is_refused(folder, trained):
    trainer = hf_trainer.use(trainer_of(folder, gradient_accumulation_steps=2), train=data_of(folder))
    with pytest.raises(ValueError, match="was at batch 5 of epoch 0, and the Trainer would continue at batch 10"):
        trainer.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-5"))


OF_TORCH = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


def counted(folder, *patterns):
    """Return the number of files that fit, and their bytes."""
    sizes_bytes = [path.stat().st_size for pattern in patterns for path in folder.glob(pattern)]
    return len(sizes_bytes), sum(sizes_bytes)


@pytest.mark.parametrize("checkpoints", [True, False])
def test_files_of_checkpoints_go_through_gdsdata_unless_checkpoints_is_false(folder, monkeypatch, checkpoints):
    called = note_calls(monkeypatch, installed, "save_file", "load_file")
    before, resumed = COUNTS.snapshot(), folder / "run" / "checkpoint-10"
    for options in ({}, {"save_strategy": "no"}):
        trainer = hf_trainer.use(trainer_of(folder, **options), train=data_of(folder), checkpoints=checkpoints)
        trainer.train(resume_from_checkpoint=str(resumed) if options else None)
    report = COUNTS.snapshot().since(before)
    served = {call: (one.calls, one.bytes) for call, one in report.served.items()}
    if checkpoints:
        written = [f"checkpoint-*/{name}" for name in (*OF_TORCH, "training_args.bin")]
        weights_bytes = sum(one.nbytes for one in trainer.model.state_dict().values())
        assert served == {
            "torch.save": counted(folder / "run", *written),
            "torch.load": counted(resumed, *OF_TORCH),
            "safetensors.save_file": (3, 3 * weights_bytes),
            "safetensors.load_file": (1, weights_bytes),
        }
        assert served["torch.save"][0] == 12 and served["torch.load"][0] == 3
        assert called == ["save_file"] * 3 + ["load_file"]  # of model.safetensors
    else:
        assert served == {} and called == []
    assert report.left_to_torch == ()


def test_the_training_data_are_no_evaluation_data(folder):
    data = data_of(folder)
    trainer = hf_trainer.use(trainer_of(folder, evaluate=data), train=data)
    with pytest.raises(ValueError, match="make a second one"):
        trainer.evaluate()


def test_an_evaluation_reads_all_of_its_data_set_each_time(folder):
    evaluate = data_of(folder, shuffle=True)
    trainer = hf_trainer.use(trainer_of(folder, evaluate=evaluate), train=data_of(folder))
    expected = [batch["values"][:, 0].tolist() for batch in data_of(folder, shuffle=True)]
    assert sorted(sum(expected, [])) == list(range(103)) != sum(expected, [])
    for _ in range(2):
        trainer.model.seen.clear()
        trainer.evaluate()
        assert batches_of(trainer) == expected
    trainer.model.seen.clear()
    trainer.evaluate({"other": evaluate}["other"])
    assert batches_of(trainer) == expected


def test_the_loss_of_an_evaluation_is_the_mean_over_its_samples(folder):
    trainer = hf_trainer.use(trainer_of(folder, evaluate=data_of(folder)), train=data_of(folder))
    trainer.can_return_loss, trainer.label_names = True, []  # what a Trainer finds out of other models
    found = trainer.evaluate()["eval_loss"]
    assert [len(numbers) for numbers, _ in trainer.model.seen] == [8] * 12 + [7]
    assert found == pytest.approx(sum(len(numbers) * loss for numbers, loss in trainer.model.seen) / 103, rel=1e-5)


def test_predict_gives_the_model_the_batches_of_the_data_set(folder):
    data = data_of(folder)
    trainer = hf_trainer.use(trainer_of(folder), train=data)
    for _ in range(2):
        trainer.model.seen.clear()
        trainer.predict(data_of(folder, shuffle=False))
        assert sum(batches_of(trainer), []) == list(range(103))
    with pytest.raises(ValueError, match="test_dataset is the training data set"):
        trainer.predict(data)


def test_a_class_of_ones_own_keeps_its_methods(folder):
    class Mine(transformers.Trainer):
        def log(self, *arguments):
            self.logged = True

    trainer = trainer_of(folder, data_of(folder))
    trainer.__class__ = Mine
    assert hf_trainer.use(hf_trainer.use(trainer)) is trainer
    trainer.train()
    assert trainer.logged and isinstance(trainer, Mine) and type(trainer).__name__ == "Mine"
    assert len(batches_of(trainer)) == 13


def test_a_class_may_derive_from_the_mixin(folder):
    class Mine(hf_trainer.TrainerMixin, transformers.Trainer):
        files_through_gdsdata = False

    trainer = trainer_of(folder, data_of(folder))
    trainer.__class__ = Mine
    trainer.train()
    assert type(trainer) is Mine and len(batches_of(trainer)) == 13
    assert (folder / "run" / "checkpoint-13" / hf_trainer.STATE_FILE).exists()


@pytest.mark.parametrize("name", ["_save_optimizer_and_scheduler", "_init_training_state", "get_eval_dataloader"])
def test_a_version_that_lacks_a_method_is_refused_before_it_trains(folder, monkeypatch, name):
    trainer = trainer_of(folder, data_of(folder))
    monkeypatch.delattr(transformers.Trainer, name)
    with pytest.raises(RuntimeError, match=rf"transformers {transformers.__version__} .* has no {name}.*5\.24"):
        hf_trainer.use(trainer)
    assert type(trainer) is transformers.Trainer

    class Mine(hf_trainer.TrainerMixin, transformers.Trainer):
        pass

    trainer.__class__ = Mine
    with pytest.raises(RuntimeError, match=f"has no {name}"):
        trainer.train()


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_batch_that_is_no_dict_is_an_error_with_a_remedy(folder, evaluates):
    trainer = hf_trainer.use(trainer_of(folder, evaluate=script.read(folder)), train=script.read(folder))
    with pytest.raises(TypeError, match="a batch of the data set is a tensor.*transform="):
        trainer.evaluate() if evaluates else trainer.train()


def test_a_ragged_field_is_an_error_with_a_remedy_and_padded_it_is_none(folder):
    made = [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0]]
    for at, values in enumerate(made):
        np.savez(folder / f"{at}.npz", values=np.array(values, np.float32))

    def read(**arguments):
        return gdsdata.GDSDataset(folder / "*.npz", 3, shuffle=False, device="cpu", **arguments)

    with pytest.raises(TypeError, match="the batch's 'values' is a Ragged.*padded"):
        hf_trainer.use(trainer_of(folder), train=read()).train()
    trainer = hf_trainer.use(trainer_of(folder), train=read(fields=gdsdata.Fields(ragged="padded")))
    trainer.model.layer = torch.nn.Linear(3, 1)
    trainer.train()
    assert batches_of(trainer) == [[1, 3, 4]]


def test_a_trainer_that_only_evaluates_needs_no_training_data(folder):
    trainer = hf_trainer.use(trainer_of(folder, evaluate=data_of(folder)))
    trainer.evaluate()
    assert len(batches_of(trainer)) == 13
    with pytest.raises(ValueError, match="train_dataset"):  # the Trainer's own
        trainer.train()


def test_other_data_are_refused(folder):
    with pytest.raises(TypeError, match="must be a GDSDataset or a Mix, and not a list"):
        hf_trainer.use(trainer_of(folder), train=[1])


def test_a_trainer_without_use_stacks_batches_with_a_warning(folder, monkeypatch):
    monkeypatch.setattr(engine, "_warned", set())  # other tests may have had the warning
    trainer = trainer_of(folder, data_of(folder, drop_last=True), max_steps=1)
    with pytest.warns(RuntimeWarning, match=r"hf_trainer.use\(trainer\)"):
        trainer.train()

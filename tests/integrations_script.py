"""The same training in the loops of Lightning, Fabric, transformers, accelerate and Composer.

    torchrun --standalone --nproc-per-node=2 tests/integrations_script.py FOLDER [FRAMEWORK ...]

Each function of `TRAINERS` trains on the data set of `write_data` and returns what this rank saw:
for each batch its numbers and its loss. Each rank runs each framework without a stop, with one in
the middle of the second epoch, and from there on, and writes FOLDER/rank-R.json. They train on the
CPU, or with TRAIN_ON=cuda on a GPU each.
"""

import functools
import json
import os
import sys
import warnings
from pathlib import Path

import torch

import gdsdata
from gdsdata.formats import Records

ON_GPU = os.environ.get("TRAIN_ON") == "cuda"  # else on the CPU
SAMPLES, STEP = 103, 8  # of all ranks: 13 steps an epoch on one, 12 whole ones and a smaller one on two
ACCUMULATED = 2  # batches of a step of the optimizer: an epoch's last one has one
EPOCHS, STOP_AT = 2, 10  # steps of the optimizer: 7 an epoch
STOP_AFTER = 19  # batches: as many as these steps have


def write_data(folder):
    torch.arange(SAMPLES, dtype=torch.float32).numpy().tofile(folder / "0.bin")


def read(folder, **arguments):
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    device = None if ON_GPU else "cpu"
    found = gdsdata.GDSDataset(folder / "0.bin", STEP // ranks, Records("f4", (1,)), device=device, **arguments)
    if ON_GPU:  # Lightning has not made this rank's GPU the current one yet.
        assert found.device == torch.device("cuda", int(os.environ["LOCAL_RANK"])), found
    return found


class Model(torch.nn.Module):
    """A regression. Its `seen` has the numbers and the loss of each batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def forward(self, values):
        loss = (self.layer(values / 100) - values % 7).square().mean()
        self.seen.append((values[:, 0].int().tolist(), loss.item()))
        return {"loss": loss}


def with_accelerate(folder, place, stop_at=None, resumes=False):
    from accelerate import Accelerator

    from gdsdata.integrations import accelerate

    accelerator = Accelerator(cpu=not ON_GPU, gradient_accumulation_steps=ACCUMULATED)
    plain = Model()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), 0.1))
    data = accelerate.prepare(accelerator, read(folder))
    if resumes:
        accelerator.load_state(place)
    steps = 0
    for _ in range(data.state_dict()["epoch"], EPOCHS):
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
            if steps == stop_at:
                accelerator.save_state(place)
                return plain.seen
    return plain.seen


def with_transformers(folder, place, stop_at=None, resumes=False, checkpoints=True):
    import transformers

    from gdsdata.integrations import hf_trainer

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, arguments, state, control, **_):
            if state.global_step == stop_at:
                control.should_save = control.should_training_stop = True

    arguments = transformers.TrainingArguments(
        str(place),
        num_train_epochs=EPOCHS,
        gradient_accumulation_steps=ACCUMULATED,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        use_cpu=not ON_GPU,
        disable_tqdm=True,
        logging_strategy="no",
    )
    model = Model()
    trainer = transformers.Trainer(model, arguments, callbacks=[Stop()])
    hf_trainer.use(trainer, train=read(folder, transform=lambda batch: {"values": batch}), checkpoints=checkpoints)
    trainer.train(resume_from_checkpoint=resumes)
    return model.seen


def with_lightning(folder, place, stop_at=None, resumes=False):
    import lightning.pytorch as lightning

    from gdsdata.integrations.lightning import GDSCheckpointIO

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, _):
            return self.model(batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    settings = {"accumulate_grad_batches": ACCUMULATED, "plugins": [GDSCheckpointIO()]}
    return lightning_fit(Module(), folder, place, stop_at, resumes, **settings)


def lightning_fit(module, folder, place, stop_at, resumes, **settings):
    """Train a module by Lightning on all ranks; return what its `model` has seen."""
    import lightning.pytorch as lightning

    callbacks = [lightning.callbacks.ModelCheckpoint(place, "stopped", every_n_train_steps=stop_at)] if stop_at else []
    trainer = lightning.Trainer(
        accelerator="gpu" if ON_GPU else "cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        max_epochs=EPOCHS,
        max_steps=stop_at or -1,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        default_root_dir=place,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(module, read(folder), ckpt_path=place / "stopped.ckpt" if resumes else None)
    return module.model.seen


def with_fabric(folder, place, stop_at=None, resumes=False):
    import lightning
    from torch.utils.data import DataLoader

    from gdsdata.integrations.lightning import GDSCheckpointIO

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    fabric = lightning.Fabric(accelerator="gpu" if ON_GPU else "cpu", devices=ranks, plugins=[GDSCheckpointIO()])
    fabric.launch()
    plain, data = Model(), read(folder)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), 0.1))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=None))
    state = {"model": model, "optimizer": optimizer, "data": data}
    if resumes:
        fabric.load(place / "stopped.ckpt", state)
    steps = 0
    for _ in range(data.state_dict()["epoch"], EPOCHS):
        for batch in loader:
            fabric.backward(model(batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == STOP_AFTER and stop_at:
                fabric.save(place / "stopped.ckpt", state)
                return plain.seen
    return plain.seen


def with_composer(folder, place, stop_at=None, resumes=False):
    import composer

    from gdsdata.integrations.composer import Loader

    class Module(composer.ComposerModel):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def forward(self, batch):
            return self.model(batch)

        def loss(self, outputs, batch):
            return outputs["loss"]

    module, data = Module(), Loader(read(folder))
    trainer = composer.Trainer(
        model=module,
        train_dataloader=data,
        callbacks=[data],
        optimizers=torch.optim.SGD(module.parameters(), 0.1),
        max_duration=f"{STOP_AFTER}ba" if stop_at else f"{EPOCHS}ep",
        save_folder=str(place),
        save_filename="ba{batch}.pt",
        save_latest_filename=None,
        save_interval=f"{STOP_AFTER}ba",
        save_overwrite=True,
        load_path=str(place / f"ba{STOP_AFTER}.pt") if resumes else None,
        device="cpu",
        seed=1,
        progress_bar=False,
    )
    with gdsdata.torch_hooks():
        trainer.fit()
    trainer.close()
    return module.model.seen


def refused_by_accelerate(folder):
    """Return what accelerate's own loaders say on this rank: their errors, or their numbers."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from torch.utils.data import DataLoader

    said = []
    for settings in ({}, {"dispatch_batches": False}, {"use_stateful_dataloader": True}):
        accelerator = Accelerator(cpu=not ON_GPU, dataloader_config=DataLoaderConfiguration(**settings))
        try:
            said.append([batch[:, 0].int().tolist() for batch in accelerator.prepare(DataLoader(read(folder), None))])
        except RuntimeError as error:
            said.append(str(error))
    return said


TRAINERS = {
    "accelerate": with_accelerate,
    "transformers": with_transformers,
    "transformers-background": functools.partial(with_transformers, checkpoints="background"),
    "lightning": with_lightning,
    "fabric": with_fabric,
}
# Those whose packages go into no environment with the others.
APART = {"composer": with_composer}


def runs_of(framework, folder, place):
    """Return what this rank saw in an uninterrupted run, in one until the stop, and after it."""
    train = (TRAINERS | APART)[framework]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # workers, loggers and a missing validation
        return {
            "whole": train(folder, place / "whole"),
            "stopped": train(folder, place / "stopped", STOP_AT),
            "resumed": train(folder, place / "stopped", resumes=True),
        }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = {name: runs_of(name, folder, folder / name) for name in sys.argv[2:] or TRAINERS}
    if not sys.argv[2:]:
        results["accelerate's own loaders"] = refused_by_accelerate(folder)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

"""The rows of benchmarks/frameworks.py that take steps inside a Trainer.

The batches of an epoch are compared with what was written before any is timed.
"""

import itertools
import os
import time

import numpy as np
import torch
import training
from framework_trainers import hf_arguments, hf_trainer, imported, lightning_trainer
from torch.utils.data import DataLoader, default_collate

import gdsdata
from gdsdata.bench.measure import device as devices
from gdsdata.bench.peers.torch_dataloader import VolumeDataset

WARM_UP = 20  # steps that are not timed
PREFETCH = 4  # batches a worker


def write_volumes(work):
    """Write a file for each array, unless it exists."""
    (work.folder / "files").mkdir(parents=True, exist_ok=True)
    for number in range(work.samples):
        path = work.folder / "files" / f"{number:06}.npy"
        if not path.exists():
            np.save(path, training.array(number, work.elements))
    os.sync()


class Stays:
    """An epoch of one batch that stays on the device: no loader at all."""

    dataset, batch_size, drop_last = (), None, False

    def __init__(self, batch, count):
        self.batch, self.count = batch, count

    def __len__(self):
        return self.count

    def __iter__(self):
        return itertools.repeat(self.batch, self.count)


class Samples(VolumeDataset):
    """Files as the Trainer of transformers wants them: dicts of arguments."""

    def __getitem__(self, place):
        return {"volume": super().__getitem__(place)}


class Steps(torch.nn.Module):
    """Takes steps of a given length, and has one parameter to train."""

    def __init__(self, step):
        super().__init__()
        self.step, self.weight = step, torch.nn.Parameter(torch.zeros(8, device=step.device))

    def forward(self, volume):
        self.step(volume)
        return {"loss": self.weight.sum()}


class Clock:
    """Times the steps behind the first `WARM_UP` of a run."""

    def __init__(self, device):
        self.device, self.times = device, []

    def note(self, step, steps):
        if step in (WARM_UP, WARM_UP + steps):
            devices.synchronize(self.device)
            self.times.append(time.perf_counter())


def ours(work, loader, transform=None):
    reading = gdsdata.Reading(zero_copy=loader == "gdsdata, zero_copy")
    return gdsdata.GDSDataset(
        work.files, work.batch, device=work.device, drop_last=True, transform=transform, reading=reading
    )


def is_ours(loader):
    return str(loader).startswith("gdsdata")


def in_hf(work, step, loader, kept):
    """Return the seconds of a step in the Trainer of transformers."""
    import transformers

    clock = Clock(work.device)

    class Timing(transformers.TrainerCallback):
        def on_step_end(self, arguments, state, control, **_):
            clock.note(state.global_step, work.steps)

    workers = loader if isinstance(loader, int) else 0
    arguments = hf_arguments(
        work,
        work.folder / "trainer",
        WARM_UP + work.steps,
        save_strategy="no",
        per_device_train_batch_size=work.batch,
        dataloader_num_workers=workers,
        dataloader_pin_memory=work.on_gpu,
        dataloader_persistent_workers=workers > 0,
        dataloader_prefetch_factor=PREFETCH if workers else None,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        accelerator_config={"non_blocking": True},
    )
    data = Samples(work)
    if is_ours(loader):
        data = ours(work, loader, lambda batch: {"volume": batch})
    more = {"data_collator": default_collate}
    trainer = hf_trainer(Steps(step), arguments, data, Timing(), is_ours(loader), **more)
    if loader == "ceiling":
        trainer.get_train_dataloader = lambda: Stays({"volume": kept}, work.samples // work.batch)
    trainer.train()
    return (clock.times[1] - clock.times[0]) / work.steps, data


def in_lightning(work, step, loader, kept):
    """Return the seconds of a step in Lightning's Trainer."""
    import lightning.pytorch as lightning

    clock = Clock(work.device)

    class Timing(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            clock.note(trainer.global_step, work.steps)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.steps = Steps(step)

        def training_step(self, batch, _):
            return self.steps(batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), fused=work.on_gpu)

    if loader == "ceiling":
        data = Stays(kept, work.samples // work.batch)
    else:
        data = ours(work, loader) if is_ours(loader) else data_loader(work, loader)
    lightning_trainer(work, WARM_UP + work.steps, Timing()).fit(Module(), data)
    return (clock.times[1] - clock.times[0]) / work.steps, data


def data_loader(work, workers):
    more = {"persistent_workers": True, "prefetch_factor": PREFETCH} if workers else {}
    options = {"num_workers": workers, "pin_memory": work.on_gpu, "drop_last": True, **more}
    return DataLoader(VolumeDataset(work), work.batch, shuffle=True, **options)


TRAINERS = {"transformers": in_hf, "lightning": in_lightning}  # by what pip installs


def counting(work):
    """Return the function that returns how many products make a step of the given length."""
    torch.set_num_threads(1)
    devices.open_context(work.device)
    return lambda: training.Step(work, *work.step_ms).count


def stepping(trainer, loader, work, count):
    """Return the function that takes a turn of a row of the section `train`.

    Args:
        trainer: a key of `TRAINERS`.
        loader: "ceiling", "gdsdata", "gdsdata, zero_copy", or a DataLoader's workers.
        work: of training.py. count: products of a step, the same in each row.
    """
    torch.set_num_threads(1)
    imported(trainer)
    devices.open_context(work.device)
    kept = torch.from_numpy(np.stack([training.array(number, work.elements) for number in range(work.batch)]))
    kept = kept.to(work.device)
    if loader != "ceiling":
        seen = set()
        for batch in ours(work, loader) if is_ours(loader) else data_loader(work, loader):
            seen |= set(training.numbers_of(work, batch.to(work.device)))
        if len(seen) != work.samples // work.batch * work.batch:
            raise ValueError(f"an epoch had {len(seen)} of {work.samples} samples")
    step = training.Step(work, 0)
    step.count = count
    step.take()  # warm-up
    alone_steps = 1 + int(1000 * training.ALONE_S / work.step_ms[0])

    def alone():
        return training.loop(work, step, itertools.repeat(kept), alone_steps)[0]

    def turn():
        before = alone()
        seconds, data = TRAINERS[trainer](work, step, loader, kept)
        served = {k: v for k, v in data.stats()["bytes"].items() if v} if is_ours(loader) else {}
        return {"seconds": seconds, "alone_s": (before + alone()) / 2, "served": served}

    return turn

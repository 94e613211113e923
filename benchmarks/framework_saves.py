"""The rows of benchmarks/frameworks.py that save and load checkpoints inside a Trainer.

A checkpoint is read back by torch and safetensors alone, and compared with the state that was
saved. So is the state of the Trainer that loads it.
"""

import shutil
import statistics
import threading
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from framework_loads import llama, served
from framework_trainers import hf_arguments, hf_trainer, imported, lightning_trainer
from torch.utils.data import DataLoader

import gdsdata
from gdsdata.bench.data.checkpoints import Saved
from gdsdata.bench.measure import device as devices
from gdsdata.bench.measure import limits, system

TOKENS, SAMPLES = 16, 512  # of a sample, and of an epoch: steps between saves are short
STEPS_APART = 8  # from a save that is on storage to the next
WATCHED_S = 0.001


class Saves(NamedTuple):
    """The work of a row that saves.

    Attributes:
        folder: for checkpoints. device: as torch names it. saves: of a run.
        size_bytes: of a model in float32 and the two moments of AdamW.
    """

    folder: Path
    device: str
    size_bytes: int
    saves: int

    @property
    def on_gpu(self):
        return devices.is_cuda(self.device)

    @property
    def tokens(self):
        return self.folder / "tokens.bin"

    def model(self):
        from transformers import LlamaForCausalLM

        with torch.device(self.device):
            return LlamaForCausalLM(llama(self.size_bytes // 3, 4))


def inputs_of(batch):
    return {"input_ids": batch, "labels": batch}


def samples_for(work, by_gdsdata):
    """Return the training data: one sample a batch."""
    if by_gdsdata:
        tokens = gdsdata.formats.Tokens("uint16", seq_len=TOKENS - 1)
        return gdsdata.GDSDataset([work.tokens], 1, tokens, device=work.device, transform=inputs_of)
    numbers = np.fromfile(work.tokens, np.uint16).astype(np.int64).reshape(-1, TOKENS)
    return [inputs_of(torch.from_numpy(one)) for one in numbers]


def write_tokens(work):
    work.folder.mkdir(parents=True, exist_ok=True)
    (np.arange(TOKENS * SAMPLES) % 251).astype(np.uint16).tofile(work.tokens)


def clear(work):
    """Remove the checkpoints of a row."""
    for name in ("trainer", "lightning"):
        shutil.rmtree(work.folder / name, ignore_errors=True)


def timed(owner, name, device, seconds, then=lambda: None):
    """Have a method note the seconds of each call, until the current stream is through."""
    call = getattr(owner, name)

    def instead(*arguments, **named):
        devices.synchronize(device)
        began = time.perf_counter()
        result = call(*arguments, **named)
        devices.wait_for_stream(device)
        seconds.append(time.perf_counter() - began)
        then()
        return result

    setattr(owner, name, instead)


def moments_of(state):
    """Return the tensors of an optimizer's state by name."""
    return {f"optimizer.{place}.{name}": one for place, of in state.items() for name, one in of.items()}


def state_of(model, optimizer):
    return model.state_dict() | moments_of(optimizer.state_dict()["state"])


def compare(found, expected):
    """Compare tensors by name, bit for bit.

    Raises:
        ValueError: one is missing or different.
    """
    if found.keys() != expected.keys():
        raise ValueError(f"other tensors than were saved: {sorted(found.keys() ^ expected.keys())[:3]}")
    for name, one in expected.items():
        if not torch.equal(found[name].to(one.device), one):
            raise ValueError(f"{name} is not what was saved")


# ------------------------------------------------------------------------------------ checkpoints of transformers


def hf_saves(by_gdsdata, work):
    """Save by a Trainer, and load by another one.

    Args:
        by_gdsdata: whether gdsdata does it; "background": while training goes on.
        work: what is saved.
    """
    import transformers

    folder = work.folder / "trainer"
    stalls, written, loads = [], [], []

    def trainer_for(steps, callback, **more):
        arguments = hf_arguments(work, folder, steps, per_device_train_batch_size=1, **more)
        return hf_trainer(work.model(), arguments, samples_for(work, by_gdsdata), callback, by_gdsdata)

    def note(path, began):
        """Note when a checkpoint is complete, and when it is on storage. Removes the one before."""
        while not (path / "trainer_state.json").exists():
            time.sleep(WATCHED_S)
        complete = time.perf_counter() - began
        Saved(path).sync()
        written.append((complete, time.perf_counter() - began))
        for old in set(folder.iterdir()) - {path}:
            shutil.rmtree(old)

    class Watch(transformers.TrainerCallback):
        watching = threading.Thread()

        def on_save(self, arguments, state, control, **_):
            path = folder / f"checkpoint-{state.global_step}"
            self.watching = threading.Thread(target=note, args=(path, time.perf_counter() - stalls[-1]))
            self.watching.start()
            if by_gdsdata != "background":
                self.watching.join()

        def on_step_end(self, arguments, state, control, **_):
            if control.should_save and self.watching.ident:
                self.watching.join()

    steps = work.saves * STEPS_APART
    watch = Watch()
    trainer = trainer_for(steps, watch, save_steps=STEPS_APART)
    timed(trainer, "_save_checkpoint", work.device, stalls)
    trainer.train()
    watch.watching.join()
    path, expected = folder / f"checkpoint-{steps}", state_of(trainer.model, trainer.optimizer)
    compare(hf_stored(path), expected)
    saved = Saved(path)

    system.warm(saved.files)
    again = trainer_for(steps + 1, transformers.TrainerCallback(), save_strategy="no")
    timed(again, "_load_from_checkpoint", work.device, loads)
    check = lambda: compare(state_of(again.model, again.optimizer), expected)  # noqa: E731
    timed(again, "_load_optimizer_and_scheduler", work.device, loads, check)
    again.train(resume_from_checkpoint=str(path))
    return {"bytes": saved.file_bytes, "stalls": stalls, "written": written, "load_s": sum(loads)}


def hf_stored(path):
    from safetensors.torch import load_file

    moments = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)["state"]
    return {k: v for one in path.glob("*.safetensors") for k, v in load_file(one).items()} | moments_of(moments)


# --------------------------------------------------------------------------------------- checkpoints of Lightning


def stock_io(is_async):
    """Return Lightning's plugin, and a function that counts the checkpoints that it has written."""
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    ended = []

    class Noted(TorchCheckpointIO):
        def save_checkpoint(self, *arguments, **named):
            super().save_checkpoint(*arguments, **named)
            ended.append(True)

    return (AsyncCheckpointIO(Noted()) if is_async else Noted()), lambda: len(ended)


def gdsdata_io(is_async, folder):
    """Return gdsdata's plugin, and the same function: a file has its name when it is complete."""
    from gdsdata.integrations.lightning import GDSCheckpointIO
    from gdsdata.integrations.lightning_async import AsyncGDSCheckpointIO

    plugin = AsyncGDSCheckpointIO() if is_async else GDSCheckpointIO()
    return plugin, lambda: max((int(one.stem) for one in folder.glob("*.ckpt")), default=0)


def lightning_saves(by_gdsdata, is_async, work):
    """Save by a Trainer of Lightning while it trains, and load by another one."""
    import lightning.pytorch as lightning

    folder = work.folder / "lightning"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    plugin, count = gdsdata_io(is_async, folder) if by_gdsdata else stock_io(is_async)
    stalls, written, loads, expected = [], [], [], {}
    steps = {"alone": [], "beside": []}

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = work.model()

        def training_step(self, batch, _):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), fused=work.on_gpu)

        def train_dataloader(self):
            data = samples_for(work, by_gdsdata)
            return data if by_gdsdata else DataLoader(data, batch_size=1)

    class Saving(lightning.Callback):
        """Saves when the save before is on storage, and times the steps."""

        watching, since, last = None, 0, None

        def watch(self, path, number, began):
            while count() < number:
                time.sleep(WATCHED_S)
            elapsed = time.perf_counter() - began
            Saved(path).sync()
            written.append((elapsed, time.perf_counter() - began))

        def on_train_batch_end(self, trainer, module, *_):
            devices.wait_for_stream(work.device)
            now = time.perf_counter()
            is_writing = self.watching is not None and self.watching.is_alive()
            if self.last is not None:
                steps["beside" if is_writing else "alone"].append(now - self.last)
            self.last = now
            self.since += not is_writing
            if self.since <= STEPS_APART:
                return
            if len(stalls) == work.saves:
                trainer.should_stop = True
                return
            self.save(trainer, module)
            self.since, self.last = 0, None

        def save(self, trainer, module):
            number = len(stalls) + 1
            for old in folder.glob("*.ckpt") if number == work.saves else ():
                old.unlink()
            path = folder / f"{number}.ckpt"
            if number == work.saves:
                state = state_of(module, trainer.optimizers[0])
                expected.update({name: one.clone() for name, one in state.items()})
                devices.synchronize(work.device)
            began = time.perf_counter()
            trainer.save_checkpoint(path)
            self.watching = threading.Thread(target=self.watch, args=(path, number, began))
            self.watching.start()

    trainer = lightning_trainer(work, -1, Saving(), plugins=[plugin])
    timed(trainer, "save_checkpoint", work.device, stalls)
    trainer.fit(Module())
    path = folder / f"{work.saves}.ckpt"
    stored = torch.load(path, map_location="cpu", weights_only=False)
    compare(stored["state_dict"] | moments_of(stored["optimizer_states"][0]["state"]), expected)
    size = path.stat().st_size

    class Resumed(lightning.Callback):
        def on_train_start(self, trainer, module):
            compare(state_of(module, trainer.optimizers[0]), expected)

    system.warm([path])
    plugin, _ = gdsdata_io(is_async, folder) if by_gdsdata else stock_io(is_async)
    again = lightning_trainer(work, stored["global_step"] + 1, Resumed(), plugins=[plugin])
    for name in ("load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict"):
        timed(again.strategy, name, work.device, loads)
    again.fit(Module(), ckpt_path=path)
    beside = statistics.median(steps["beside"]) / statistics.median(steps["alone"]) if steps["beside"] else None
    return {"bytes": size, "stalls": stalls, "written": written, "load_s": sum(loads), "steps_beside": beside}


SAVES = {
    "Trainer of transformers": ("transformers", partial(hf_saves, False)),
    "Trainer of transformers, `hf_trainer.use`": ("transformers", partial(hf_saves, True)),
    "Trainer of transformers, `hf_trainer.use`, in the background": ("transformers", partial(hf_saves, "background")),
    "Lightning": ("lightning", partial(lightning_saves, False, False)),
    "Lightning, `GDSCheckpointIO`": ("lightning", partial(lightning_saves, True, False)),
    "Lightning, `AsyncCheckpointIO`": ("lightning", partial(lightning_saves, False, True)),
    "Lightning, `AsyncGDSCheckpointIO`": ("lightning", partial(lightning_saves, True, True)),
}


def saving(name, work):
    """Return the function that takes a turn of a row of the section `checkpoint`."""
    package, run = SAVES[name]
    imported("transformers")  # which has the model, in each row
    imported(package)
    devices.open_context(work.device)

    def turn():
        before = served()
        found = run(work)
        return found | {"served": served() - before}

    return turn


def saving_limits(work):
    """Return the function that measures GB/s to storage, and from the device to pinned memory."""
    devices.open_context(work.device)

    def turn():
        writes = limits.durable_writes(work.folder, work.size_bytes)
        found = {"written_gb_per_s": max(one.get("gb_per_s", 0.0) for one in writes.values())}
        if work.on_gpu:
            found["staged_gb_per_s"] = devices.pinned_copy(work.device, 0.5, to_host=True)["gb_per_s"]
        return found

    return turn

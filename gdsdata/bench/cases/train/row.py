"""The row's side of case=train.

A run's steps are timed between two moments at which the device is done. The host may be two steps
ahead of it.
"""

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from gdsdata.bench.cases.checkpoint import stock
from gdsdata.bench.cases.loader.row import BatchRow
from gdsdata.bench.cases.train import models
from gdsdata.bench.data import images
from gdsdata.bench.measure import device, system
from gdsdata.bench.peers.ceiling import truth_of

HOST_AHEAD = 2  # steps that the host may be ahead of the device
TRIAL_STEPS, TRIAL_SECONDS = 16, 4.0  # of each number of workers that is tried
MOST_DIFFERENCE = 4.0  # of 255, on average over an image: what decoders differ by


@dataclass
class Times:
    """The steps and saves of a loop.

    Marks are of the device: their seconds are known once it is synchronized.
    """

    waits_s: list = field(default_factory=list)  # of the host, in next()
    steps: list = field(default_factory=list)  # (mark before, mark behind)
    saves: list = field(default_factory=list)
    losses: list = field(default_factory=list)

    def lengths(self, name):
        return [device.seconds_between(*marks) for marks in getattr(self, name)]


class TrainRow(BatchRow):
    """A run has a `training` of its own, and a `saver` that `saving` closes."""

    training: Any = None
    saver: Any = None

    def set_up(self):
        super().set_up()
        self.saving, self.cpu_used, self.work = contextlib.ExitStack(), 0.0, self.source.kind
        self.make_training()  # It imports much of torch, while other rows do so too.
        self.training = None

    def plain_reading(self):
        return truth_of(self.source.source)

    def make_training(self):
        shape, repeats = self.data.shape, self.source.repeats
        self.training = models.Training(self.work, shape, self.device, repeats, self.settings.seed)

    def build_training(self, dtype):
        self.make_training()
        self.construct(dtype)

    def close(self):
        self.saving.close()
        self.training = self.saver = None
        super().close()

    def batches(self):
        """Batches of epoch after epoch, without smaller last ones, whose steps would differ."""
        for epoch in itertools.count():
            whole = 0
            for batch in self.peer.epoch(epoch):
                if len(batch) == self.batch_size:
                    whole += 1
                    yield batch
            if not whole:
                raise ValueError(f"epoch {epoch} had no batch of {self.batch_size} samples")

    # Verifying:

    def verify(self, dtype, workers=None):
        self.choose(dtype, workers)
        checked = super().verify(dtype)
        if self.peer_class.saver:
            checked["checked_bytes"] = self.verify_checkpoint(dtype)
        return checked

    def choose(self, dtype, workers):
        """The peer with that many workers, or else with as many as its loop is fastest with."""
        if not hasattr(self.peer_class, "choices"):
            return
        if workers is not None:
            self.peer_class = self.peer_class.with_workers(workers)
            return
        rates, failed = {}, ValueError("there is no number of workers to try")
        for choice in self.peer_class.choices(device.is_cuda(self.device)):
            self.peer_class = choice
            try:
                self.build_training(dtype)
                batches = self.batches()
                self.take(batches, HOST_AHEAD)  # the workers' start is not the loop's
                started = time.perf_counter()
                trial_steps = min(TRIAL_STEPS, self.settings.steps)
                steps = len(self.take(batches, trial_steps, seconds=TRIAL_SECONDS).steps)
                rates[choice] = steps / (time.perf_counter() - started)
            except ValueError as error:  # Each of many workers may have less than a batch.
                failed = error
            finally:
                self.close()
        if not rates:
            raise failed
        self.peer_class = max(rates, key=rates.__getitem__)

    def compare(self, epoch, place, ids, batch, dtype):
        if self.work != "images":
            return super().compare(epoch, place, ids, batch, dtype)
        shape, where = (len(batch), *self.data.shape), f"epoch {epoch}, batch {place}"
        if tuple(batch.shape) != shape or batch.dtype != torch.uint8:
            raise ValueError(f"{where}: {batch.dtype} {tuple(batch.shape)} came, torch.uint8 {shape} was due")
        numbers = ids or images.numbers_in(batch)
        if max(numbers) >= self.data.samples or len(set(numbers)) < len(numbers):
            raise ValueError(f"{where}: its images say that they are {numbers}, of {self.data.samples}")
        expected = torch.from_numpy(self.truth.batch(numbers, dtype))
        differences = (batch.cpu().float() - expected.float()).abs().mean((1, 2, 3)).tolist()
        difference, number = max(zip(differences, numbers, strict=True))
        if difference > MOST_DIFFERENCE:
            raise ValueError(
                f"{where}: image {number} differs from what plain reading gives by {difference:.1f} of 255, "
                "on average over its pixels"
            )

    def verify_checkpoint(self, dtype):
        """The bytes of a checkpoint, which is not to have the step that follows it."""
        try:
            self.build_training(dtype)
            batches = self.batches()
            self.take(batches, 1)
            self.open_saver()
            saved = {name: tensor.clone() for name, tensor in self.training.state().items()}
            self.saver.save(self.training.state(), 1)
            self.take(batches, 1)
            empty = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in saved.items()}
            loaded = stock.tensors_in(self.saver.wait(), empty)
            for name, tensor in saved.items():
                if name not in loaded or not torch.equal(loaded[name].cpu(), tensor.cpu()):
                    raise ValueError(f"checkpoint: {name} is not what it was when it was saved")
            return sum(tensor.nbytes for tensor in saved.values())
        finally:
            self.close()

    # Running:

    def calibrate(self, dtype):
        """The body's repeats for steps of that many seconds, and what they then take."""
        try:
            self.build_training(dtype)
            batch = next(self.batches())
            self.training.repeats = self.training.repeats_for(batch, self.settings.step_ms / 1e3)
            return {"repeats": self.training.repeats, "step_s": self.training.step_s(batch)}
        finally:
            self.close()

    def open_saver(self):
        saver = self.peer_class.saver
        if saver is None:
            return
        saved_in = self.saving.enter_context(tempfile.TemporaryDirectory(dir=self.source.folder))
        self.saver = self.saving.enter_context(contextlib.closing(saver(self.device, self.engine)))
        self.saver.open(saved_in, self.training.state())

    def save(self, step):
        """Saves; returns the marks around it, between which the device gets no steps."""
        begin = device.mark(self.device)
        self.saver.save(self.training.state(), step)
        return begin, device.mark(self.device)

    def take(self, batches, steps, every=None, seconds=float("inf")):
        """Runs so many steps or seconds, a save behind each `every`-th, to the end."""
        times, ends = Times(), time.perf_counter() + seconds
        for step in range(1, steps + 1):
            asked = time.perf_counter()
            batch = next(batches)
            times.waits_s.append(time.perf_counter() - asked)
            begin = device.mark(self.device)
            times.losses.append(self.training.step(batch))
            times.steps.append((begin, device.mark(self.device)))
            if every and (step + every // 2) % every == 0:  # Steps follow the last save too.
                times.saves.append(self.save(step))
            if step > HOST_AHEAD:
                device.wait_for(times.steps[-1 - HOST_AHEAD][1])
            if time.perf_counter() > ends:
                break
        device.synchronize(self.device)
        return times

    def run(self, dtype, cache):
        steps, run_seconds = self.settings.steps, self.settings.run_seconds
        self.start_cpu_clock()
        self.build_training(dtype)
        batches = self.batches()
        self.take(batches, 1)
        self.open_saver()
        if self.saver:  # the first one also makes the memory that the next ones use again
            self.save(0)
            self.saver.wait()
        self.take(batches, self.settings.warm_up, seconds=run_seconds)
        served_before, process = self.peer.served(), os.getpid()
        cpu_before, started = system.tree_cpu_seconds(process), time.perf_counter()
        times = self.take(batches, steps, self.settings.checkpoint_every if self.saver else None, run_seconds)
        elapsed = time.perf_counter() - started
        self.cpu_used = system.tree_cpu_seconds(process) - cpu_before
        if self.saver:
            self.saver.wait()
        return self.described(times, elapsed, steps, served_before)

    def described(self, times, elapsed, steps, served_before):
        done, device_s = len(times.steps), times.lengths("steps")
        losses = torch.stack(times.losses)
        if not losses.isfinite().all():
            raise ValueError(f"the loss of step {int(losses.isfinite().logical_not().nonzero()[0])} is not finite")
        sample_bytes = self.data.sample_bytes
        if self.work == "images":  # As stored, on average: the JPEGs and the tar around them.
            sample_bytes = self.data.file_bytes // self.data.samples
        return self.figures(done * self.batch_size * sample_bytes, elapsed, served_before) | {
            "steps": done,
            "samples": done * self.batch_size,
            "device_step_s": sum(device_s) / done,
            "waiting_share": sum(times.waits_s) / elapsed,
            "next_s": statistics.median(times.waits_s),
            "idle_share": max(0.0, 1 - sum(device_s) / elapsed),
            "cpu_cores": self.cpu_used / elapsed,
            "stalls_s": times.lengths("saves"),
            "state_bytes": sum(tensor.nbytes for tensor in self.training.state().values()) if self.saver else 0,
            "first_loss": float(losses[0]),
            "last_loss": float(losses[-1]),
            "verdict": self.peer.verdict(),
            "cut": done < steps,
        }

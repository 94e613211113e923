"""case=train: a training loop from files to weights, fed by GDSDataset and by others, beside the loop without input.

Each kind of work (text, volumes, images) has a table. Every row runs the same loop, on a model that
starts alike: forward, backward and optimizer, bf16 on a GPU. The ceiling's batch stays on the
device, so it has nothing to wait for; it takes its turns among the others. Rows that save write a
checkpoint of model and optimizer every so many steps.

A run's steps are timed between two moments at which the device has done all. The host is let two
steps ahead of it.
"""

import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from gdsdata.bench import (
    case,
    checkpoint_peers,
    copies,
    data,
    device,
    image_shards,
    intervals,
    limits,
    loader,
    measure,
    train_data,
    train_models,
)
from gdsdata.bench import train_peers as peers
from gdsdata.bench.io import ended_in_order
from gdsdata.bench.process import RowFailed

BATCH_SIZES = {"cuda": {"text": 32, "volumes": 16, "images": 64}, "cpu": {"text": 8, "volumes": 8, "images": 8}}
HOST_AHEAD = 2  # steps that the host may be ahead of the device
TRIAL_STEPS, TRIAL_SECONDS = 16, 4.0  # of each number of workers that is tried
TOUCHED_BYTES = 64 * 2**20
MOST_DIFFERENCE = 4.0  # of 255, on average over an image: what decoders differ by
REACHED = 1.2  # times the step that was wanted: more than that is told


@dataclass
class Work:
    """One kind of work: what is read, and how often the model's body is gone through."""

    kind: str
    source: data.Source
    repeats: float = 1

    @property
    def files(self):
        return self.source.files

    @property
    def file_bytes(self):
        return self.source.file_bytes


class Train(copies.Copying, case.Case):
    no_peers = (peers.Ceiling.key,)

    def measure(self):
        settings = self.settings.data
        folder = Path(settings.folder).expanduser() if settings.folder else data.default_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with ended_in_order(), tempfile.TemporaryDirectory(prefix="train-", dir=folder) as self.checkpoints:
            return super().measure()

    def sources(self):
        settings = self.settings.data
        for kind in self.case.work:
            if kind == "images" and (why := image_shards.missing()):
                self.notes.append(f"images were left out: {why}.")
                continue
            with self.progress.bytes(f"data: {kind}", settings.size_bytes) as advance:
                source = train_data.source_for(kind, settings, self.case, advance)
            if kind == "volumes":
                train_models.check_shape(kind, source.shape)
            if source.samples < self.batch_size(kind):
                raise data.DataError(
                    f"{kind}: {source.samples} samples are not one batch of {self.batch_size(kind)}: set "
                    "case.batch_size= to less, or data.size_bytes= (case.images=) to more"
                )
            work = Work(kind, source)
            if self.case.step_ms:
                self.calibrate(work)
            yield work

    def batch_size(self, kind):
        return self.case.batch_size or BATCH_SIZES[torch.device(self.device).type][kind]

    def calibrate(self, work):
        """Sets its repeats, once for all rows, in a process that is then gone."""
        process, wanted_s = self.process("calibration"), self.case.step_ms / 1e3
        with self.progress.step(f"steps: {work.kind}"):
            try:
                process.ask("load", case=self.case.name, peer="ceiling", device=self.device, **self.load_command(work))
                found = process.ask("calibrate", dtype=self.dtypes(work, None)[0], step_s=wanted_s)
            except RowFailed as failed:
                raise ValueError(f"case.step_ms={self.case.step_ms:g}, {work.kind}: {failed}") from None
            finally:
                self.processes.pop("calibration").end()
        work.repeats = found["repeats"]
        if found["step_s"] > REACHED * wanted_s:
            self.notes.append(
                f"{work.kind}: a step took {found['step_s'] * 1e3:.3g} ms by itself with its body gone through "
                f"{work.repeats:g} time(s), where case.step_ms={self.case.step_ms:g} was wanted: a smaller "
                "case.batch_size= makes it shorter."
            )

    def about(self, source):
        system, disk = measure.file_system(source.files[0])
        return {
            "summary": source.source.summary(),
            "files": len(source.files),
            "first_file": source.files[0],
            "samples": source.source.samples,
            "sample_bytes": source.source.sample_bytes,
            "file_bytes": source.file_bytes,
            "batch_size": self.batch_size(source.kind),
            "repeats": source.repeats,
            "file_system": system,
            "device": disk,
        }

    def dtypes(self, source, cache):
        return ["raw" if source.kind == "text" else np.dtype(source.source.dtype).name]

    def rows_for(self, source, cache):
        return peers.rows_for(source.kind, bool(self.case.checkpoint_every), device.is_cuda(self.device))

    def find(self, key):
        return peers.find(key)

    def missing(self, peer):
        saver = peers.saver_of(peer)
        return super().missing(peer) or (saver.lacks() if saver else "")

    def load_command(self, source):
        return {
            "work": source.kind,
            "repeats": source.repeats,
            "folder": self.checkpoints,
            "source": source.source.as_dict(),
            "batch_size": self.batch_size(source.kind),
            "seed": self.case.seed,
            "engine": self.settings.engine,
            "copies": self.copies_told(),
        }

    def verify_command(self, row):
        """With the workers that the loader's row without saving has found best, if it has."""
        loader_row = next((one for one in row.table.rows if one.key == base_key(row.key) and one is not row), None)
        workers = loader_row.checked.get("workers") if loader_row else None
        trial_steps = min(TRIAL_STEPS, self.case.steps)
        batches = self.case.verify_batches
        return {"dtype": row.table.dtype, "batches": batches, "workers": workers, "trial_steps": trial_steps}

    def touched_bytes(self, source):
        return TOUCHED_BYTES

    def run(self, row):
        read = self.read_by(row)
        resident = self.warmed(read) if row.table.cache == "warm" else measure.drop(read.files)
        asked = {name: getattr(self.case, name) for name in ("steps", "warm_up", "run_seconds", "checkpoint_every")}
        return row.process.run(dtype=row.table.dtype, **asked) | {"resident_before": resident}

    def take_limits(self, table, seconds):
        """What input and checkpoints cross: the link of the GPU, either way; on the CPU its memory."""
        if not self.limits_process:
            return {"memory_copy": limits.memory_copy(seconds)}
        asked = {"device": self.device, "seconds": seconds / 2}
        return {
            "pinned_copy": self.limits_process.ask("pinned_copy", **asked),
            "pinned_copy_to_host": self.limits_process.ask("pinned_copy", to_host=True, **asked),
        }

    def time_table(self, table):
        found = super().time_table(table)
        self.link_gb_per_s = found["pinned_copy_to_host" if self.limits_process else "memory_copy"]["gb_per_s"]
        return found

    def limit_for(self, table, found):
        ceiling = next((row for row in table.rows if row.key == peers.Ceiling.key and row.runs), None)
        if ceiling is None:
            return None, "the row `ceiling` was left out or has failed"
        rates = [run["bytes"] / run["seconds"] / 1e9 for run in ceiling.runs]
        return statistics.median(rates), peers.Ceiling.name

    def summary(self, row):
        runs, stalls = row.runs, [stall for run in row.runs for stall in run["stalls_s"]]
        state_bytes = max((run["state_bytes"] for run in runs), default=0)

        def spread(name):
            return measure.spread([run[name] for run in runs])

        return row.summary() | {
            "steps_per_s": measure.spread([run["steps"] / run["seconds"] for run in runs]),
            "wall_step_s": measure.spread([run["seconds"] / run["steps"] for run in runs]),
            "device_step_s": spread("device_step_s"),
            "waiting_share": spread("waiting_share"),
            "idle_share": spread("idle_share"),
            "cpu_cores": spread("cpu_cores"),
            "saves": len(stalls),
            "state_bytes": state_bytes or None,
            "stall_s": intervals.described(stalls) if stalls else None,
            "least_stall_s": state_bytes / self.link_gb_per_s / 1e9 if state_bytes else None,
            "verdict": runs[-1]["verdict"] if runs else "",
            "cut": any(run["cut"] for run in runs),
        }

    def compared(self, table, limit, limit_name):
        """Rows that save beside each other, and what a checkpoint costs beyond the row of the same loader without."""
        found = []
        for saves in (False, True):
            part = case.Table(table.source, table.dtype, table.cache)
            part.rows = [row for row in table.rows if saves == (peers.saver_of(self.find(row.key)) is not None)]
            found += super().compared(part, limit, limit_name)
        steps_s = {row["key"]: row["wall_step_s"]["median"] for row in found if row["wall_step_s"]}
        for row in found:
            without = steps_s.get(base_key(row["key"])) if row["saves"] else None
            more_s = steps_s[row["key"]] - without if without else None
            row["save_cost_s"] = more_s and more_s * self.case.checkpoint_every
        return found


def base_key(key):
    """Of a row that saves, the key of the same loader's row that does not."""
    return key.split("_")[0]


# ------------------------------------------------------------------------------------------------ in the row's process


@dataclass
class Times:
    """What a loop's steps and saves were. Marks are of the device: seconds are known when it has done all."""

    waited_s: float = 0.0  # by the host, in next()
    steps: list = field(default_factory=list)  # (mark before, mark behind)
    saves: list = field(default_factory=list)
    losses: list = field(default_factory=list)

    def lengths(self, name):
        return [device.seconds_between(*marks) for marks in getattr(self, name)]


class TrainRow(loader.LoaderRow):
    """`training` is the model and its optimizer, made anew for each run; `saver` writes them to `saved_in`."""

    def __init__(self, peer, work, repeats, folder, **of_loader):
        self.work, self.repeats, self.folder = work, repeats, folder
        self.training = self.saver = self.saved_in = None
        self.cpu_used = 0.0
        super().__init__(peer, **of_loader)
        train_models.Training(work, self.source.shape, self.device)  # imports much of torch, while other rows do

    def find(self, key):
        return peers.find(key, (self.work,))

    def plain_reading(self):
        return peers.truth_of(self.source)

    def get_ready(self, dtype):
        self.training = train_models.Training(self.work, self.source.shape, self.device, self.repeats, self.seed)
        self.construct(dtype)

    def close(self):
        if self.saver is not None:
            self.saver.close()
        if self.saved_in is not None:
            self.saved_in.cleanup()
        self.training = self.saver = self.saved_in = None
        super().close()

    def batches(self):
        """Epoch after epoch, without a last batch that is smaller: a step of it would be another one."""
        for epoch in itertools.count():
            whole = 0
            for batch in self.peer.epoch(epoch):
                if len(batch) == self.batch_size:
                    whole += 1
                    yield batch
            if not whole:
                raise ValueError(f"epoch {epoch} had no batch of {self.batch_size} samples")

    # Verifying:

    def verify(self, dtype, batches, workers=None, trial_steps=TRIAL_STEPS):
        self.choose(dtype, workers, trial_steps)
        checked = super().verify(dtype, batches)
        if peers.saver_of(self.peer_class):
            checked["checked_bytes"] = self.verify_checkpoint(dtype)
        return checked

    def choose(self, dtype, workers, trial_steps):
        """The peer with that many workers, or else with as many as its loop is fastest with."""
        if not hasattr(self.peer_class, "choices"):
            return
        if workers is not None:
            self.peer_class = self.peer_class.with_workers(workers)
            return
        rates, failed = {}, None
        for choice in self.peer_class.choices(device.is_cuda(self.device)):
            self.peer_class = choice
            try:
                self.get_ready(dtype)
                batches = self.batches()
                self.take(batches, HOST_AHEAD)  # the workers' start is not the loop's
                started = time.perf_counter()
                steps = len(self.take(batches, trial_steps, seconds=TRIAL_SECONDS).steps)
                rates[choice] = steps / (time.perf_counter() - started)
            except ValueError as error:  # as of many workers, whose share is less than a batch each
                failed = error
            finally:
                self.close()
        if not rates:
            raise failed
        self.peer_class = max(rates, key=rates.get)

    def compare(self, epoch, place, ids, batch, dtype):
        if self.work != "images":
            return super().compare(epoch, place, ids, batch, dtype)
        shape = (len(batch), *self.source.shape)
        if tuple(batch.shape) != shape or batch.dtype != torch.uint8:
            raise ValueError(
                f"epoch {epoch}, batch {place}: {batch.dtype} {tuple(batch.shape)} came, torch.uint8 {shape} was due"
            )
        numbers = ids or image_shards.numbers_in(batch)
        where = f"epoch {epoch}, batch {place}"
        if max(numbers) >= self.source.samples or len(set(numbers)) < len(numbers):
            raise ValueError(f"{where}: its images say that they are {numbers}, of {self.source.samples}")
        expected = torch.from_numpy(self.truth.batch(numbers, dtype))
        differences = (batch.cpu().float() - expected.float()).abs().mean((1, 2, 3)).tolist()
        for number, difference in zip(numbers, differences, strict=True):
            if difference > MOST_DIFFERENCE:
                raise ValueError(
                    f"{where}: image {number} differs from what plain reading gives by {difference:.1f} of 255, "
                    "on average over its pixels"
                )

    def verify_checkpoint(self, dtype):
        """A checkpoint is what the state was when it was saved, however it has changed since; the bytes of it."""
        try:
            self.get_ready(dtype)
            batches = self.batches()
            self.take(batches, 1)
            self.open_saver()
            saved = {name: tensor.clone() for name, tensor in self.training.state().items()}
            self.saver.save(self.training.state(), 1)
            self.take(batches, 1)
            empty = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in saved.items()}
            loaded = checkpoint_peers.stock_tensors(self.saver.wait(), empty)
            for name, tensor in saved.items():
                if name not in loaded or not torch.equal(loaded[name].cpu(), tensor.cpu()):
                    raise ValueError(f"checkpoint: {name} is not what it was when it was saved")
            return sum(tensor.nbytes for tensor in saved.values())
        finally:
            self.close()

    # Running:

    def calibrate(self, dtype, step_s):
        """How often to go through the model's body for steps of that many seconds, and what they then take."""
        try:
            self.get_ready(dtype)
            batch = next(self.batches())
            self.training.repeats = self.training.repeats_for(batch, step_s)
            return {"repeats": self.training.repeats, "step_s": self.training.step_s(batch)}
        finally:
            self.close()

    def open_saver(self):
        saver = peers.saver_of(self.peer_class)
        if saver is None:
            return
        self.saved_in = tempfile.TemporaryDirectory(dir=self.folder)
        self.saver = saver(self.device, self.engine)
        self.saver.open(self.saved_in.name, self.state_bytes())

    def state_bytes(self):
        return sum(tensor.nbytes for tensor in self.training.state().values())

    def save(self, step):
        """Marks before and behind it: between them the device got no more steps."""
        begin = device.mark(self.device)
        self.saver.save(self.training.state(), step)
        return begin, device.mark(self.device)

    def take(self, batches, steps, every=None, seconds=float("inf")):
        """The loop: so many steps, or for so many seconds, with a save behind each `every`-th; until all is done."""
        times, ends = Times(), time.perf_counter() + seconds
        for step in range(1, steps + 1):
            asked = time.perf_counter()
            batch = next(batches)
            times.waited_s += time.perf_counter() - asked
            begin = device.mark(self.device)
            times.losses.append(self.training.step(batch))
            times.steps.append((begin, device.mark(self.device)))
            if every and (step + every // 2) % every == 0:  # steps follow the last one, too
                times.saves.append(self.save(step))
            if step > HOST_AHEAD:
                device.wait_for(times.steps[-1 - HOST_AHEAD][1])
            if time.perf_counter() > ends:
                break
        device.synchronize(self.device)
        return times

    def run(self, dtype, steps, warm_up, run_seconds, checkpoint_every):
        self.start_cpu_clock()
        self.get_ready(dtype)
        batches = self.batches()
        self.take(batches, 1)
        self.open_saver()
        if self.saver:  # the first one also makes the memory that the next ones use again
            self.save(0)
            self.saver.wait()
        self.take(batches, warm_up, seconds=run_seconds)
        served_before, process = self.peer.served(), os.getpid()
        cpu_before, started = measure.tree_cpu_seconds(process), time.perf_counter()
        times = self.take(batches, steps, checkpoint_every if self.saver else None, run_seconds)
        elapsed = time.perf_counter() - started
        self.cpu_used = measure.tree_cpu_seconds(process) - cpu_before
        if self.saver:
            self.saver.wait()
        return self.described(times, elapsed, steps, served_before)

    def described(self, times, elapsed, steps, served_before):
        done, device_s = len(times.steps), times.lengths("steps")
        losses = torch.stack(times.losses)
        if not losses.isfinite().all():
            raise ValueError(f"the loss of step {int(losses.isfinite().logical_not().nonzero()[0])} is not finite")
        return {
            "steps": done,
            "samples": done * self.batch_size,
            "bytes": done * self.batch_size * self.stored_sample_bytes(),
            "seconds": elapsed,
            "device_step_s": sum(device_s) / done,
            "waiting_share": times.waited_s / elapsed,
            "idle_share": max(0.0, 1 - sum(device_s) / elapsed),
            "cpu_cores": self.cpu_used / elapsed,
            "stalls_s": times.lengths("saves"),
            "state_bytes": self.state_bytes() if self.saver else 0,
            "first_loss": float(losses[0]),
            "last_loss": float(losses[-1]),
            "verdict": self.peer.verdict(),
            "cut": done < steps,
            "served": {path: count - served_before.get(path, 0) for path, count in self.peer.served().items()},
            "path": self.peer.path,
        }

    def stored_sample_bytes(self):
        """On average, as stored: of images their JPEGs and the tar around them."""
        if self.work == "images":
            return self.source.file_bytes // self.source.samples
        return self.source.sample_bytes

    def after(self):
        """The CPU time of the timed steps, of the workers too, and what came before and behind them."""
        everything = super().after()["cpu_seconds"]
        return {"cpu_seconds": self.cpu_used, "untimed_cpu_seconds": max(0.0, everything - self.cpu_used)}

"""Measure how idle loaders leave a device that takes steps of a given length, one a batch.

    python benchmarks/training.py [--device cuda] [--case arrays images] [--step-ms 5 2 0]
        [--only gdsdata ...]

`arrays` are int64 arrays of 2 MiB, in WebDataset tars and as npy files of their own; 32 make a
batch of 67 MB. `images` are JPEGs in tars, decoded on the device, 64 a batch. All data is in the
page cache and shuffled.

A step is matrix products that take the given number of milliseconds if nothing else runs. A sum
over a part of the batch comes first, so the step waits for the batch. With 0 ms there are no
products, which measures the loader alone. On the CPU a step is one thread's work.

- idle = 1 - steps x a step's time alone / time of the loop
- slower = a step's time in the loop / alone, by events on the device: what loaders take from steps

A step's time alone is measured before and after each loop, on a batch that stays; both are
averaged. For arrays, the first row is the limit: the same batches, ready in pinned memory. Rows
take turns in random order, each in a process of its own. Their batches are compared with what was
written. Peers that are not installed are listed with the command that installs them.
"""

import argparse
import itertools
import os
import shutil
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader
from turns import Turns, take_all

from gdsdata import Fields, GDSDataset, Reading
from gdsdata.bench.data import images
from gdsdata.bench.measure import device as devices
from gdsdata.bench.measure import system
from gdsdata.bench.peers.shards import decoded
from gdsdata.bench.peers.torch_dataloader import VolumeDataset, as_it_is
from gdsdata.formats import Tar
from gdsdata.integrations import dali

AHEAD = 4  # batches that a loader has ready or in flight, if it has such a setting
SHUFFLE_BUFFER = 256  # samples, for loaders that shuffle in a buffer
ALONE_S = 0.5
PART = 4096  # a step looks at every value of a batch that is this far from the last
IMAGE_SIZE = (384, 512)
MOST_DIFFERENCE = 12.0  # of 255, mean of an image: noise that JPEG removes, and decoders' rounding
COMPARED = 8  # every eighth image is compared in full: making one takes longer than decoding it


class Work(NamedTuple):
    """The work of one row.

    Attributes:
        case: arrays or images.
        folder: holds shards/*.tar, and files/*.npy for arrays.
        samples: in all. batch: samples in one.
        elements: int64 numbers of an array.
        device: as torch names it.
        threads: threads or processes that a loader may use.
        step_ms: (S,), one for each loop of a turn. steps: of each loop.
    """

    case: str
    folder: Path
    samples: int
    batch: int
    elements: int
    device: str
    threads: int
    step_ms: tuple
    steps: int

    @property
    def extension(self):
        return {"arrays": "bin", "images": "jpg"}[self.case]

    @property
    def shards(self):
        return sorted(map(str, (self.folder / "shards").iterdir()))

    @property
    def files(self):
        return sorted(map(str, (self.folder / "files").iterdir()))

    @property
    def on_gpu(self):
        return devices.is_cuda(self.device)


# ------------------------------------------------------------------------------------------------------------- data


def array(number, elements):
    return np.arange(number, number + elements, dtype=np.int64)


def content(work, number):
    if work.case == "arrays":
        return array(number, work.elements).tobytes()
    return images.encoded(number, IMAGE_SIZE)


def write(work):
    """Write the shards, and the files of arrays, unless they exist."""
    if (work.folder / "done").exists():
        return
    shutil.rmtree(work.folder, ignore_errors=True)
    (work.folder / "files").mkdir(parents=True)
    images.write_shards(work.folder / "shards", work.samples, partial(content, work), work.extension)
    for number in range(work.samples if work.case == "arrays" else 0):
        np.save(work.folder / "files" / f"{number:06}.npy", array(number, work.elements))
    (work.folder / "done").touch()


def numbers_of(work, batch):
    """Return the numbers of a batch's samples. Arrays are compared in full, some images loosely.

    Raises:
        ValueError: a sample is not what was written.
    """
    if work.case == "arrays":
        steps = torch.arange(work.elements, device=batch.device)
        if batch.shape[1:] != steps.shape or not torch.equal(batch, batch[:, :1] + steps):
            raise ValueError(f"an array of a batch {tuple(batch.shape)} is not what was written")
        return batch[:, 0].tolist()
    batch = batch.cpu() if batch.shape[1] == 3 else batch.permute(0, 3, 1, 2).cpu()
    numbers = images.numbers_in(batch)
    for number, pixels in zip(numbers, batch, strict=True):
        if number % COMPARED:
            continue
        difference = (pixels.float() - images.image(number, IMAGE_SIZE).float()).abs().mean()
        if difference > MOST_DIFFERENCE:
            raise ValueError(f"image {number} differs from what was written by {difference:.1f} of 255 on average")
    return numbers


# ------------------------------------------------------------------------------------------------------------- rows


def arrays_in(values, work):
    """Return int64 (B, elements) from the bytes of a batch, laid end to end."""
    return values.reshape(-1).view(torch.int64).view(-1, work.elements)


def gdsdata_dataset(work, decode):
    return GDSDataset(
        work.shards,
        work.batch,
        Tar(index_cache=None),
        device=work.device,
        drop_last=True,
        fields=Fields(decode=decode),
        reading=Reading(prefetch=AHEAD),
    )


def gdsdata_row(work):
    dataset = gdsdata_dataset(work, {"jpg": "image"} if work.case == "images" else None)
    while True:
        for batch in dataset:
            yield arrays_in(batch["bin"].values, work) if work.case == "arrays" else batch["jpg"]


def dali_batches(work, outputs, **epochs):
    """Yield batches of a pipeline's one output. ``epochs`` are arguments of DALI's iterator."""
    from nvidia.dali import pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    options = dict(num_threads=work.threads, device_id=devices.index(work.device), prefetch_queue_depth=AHEAD)
    pipeline = pipeline_def(batch_size=work.batch, **options)(outputs)()
    iterator = DALIGenericIterator(pipeline, ["batch"], auto_reset=True, **epochs)
    while True:
        for (batch,) in iterator:
            yield batch["batch"]


def dali_decoded(work, encoded):
    from nvidia.dali import fn, types

    return fn.decoders.image(encoded, device="mixed" if work.on_gpu else "cpu", output_type=types.RGB)


def gdsdata_dali_row(work):
    """Yield encoded images from gdsdata's pinned memory, decoded by DALI."""
    from nvidia.dali import fn

    batches = dali.source(gdsdata_dataset(work, {"jpg": "encoded"}), "jpg", prefetch_queue_depth=AHEAD)
    return dali_batches(work, lambda: dali_decoded(work, fn.external_source(batches, batch=True, no_copy=True)))


def dali_row(work):
    from nvidia.dali import fn

    def outputs():
        stored = fn.readers.webdataset(
            paths=work.shards,
            ext=[work.extension],
            random_shuffle=True,
            initial_fill=SHUFFLE_BUFFER,
            pad_last_batch=True,
            name="reader",
        )
        if work.case == "images":
            return dali_decoded(work, stored)
        return stored.gpu() if work.on_gpu else stored

    batches = dali_batches(work, outputs, reader_name="reader")
    return (arrays_in(batch, work) for batch in batches) if work.case == "arrays" else batches


def dali_numpy_row(work):
    from nvidia.dali import fn

    def outputs():
        stored = fn.readers.numpy(files=work.files, random_shuffle=True, pad_last_batch=True, name="reader")
        return stored.gpu() if work.on_gpu else stored

    return dali_batches(work, outputs, reader_name="reader")


def loader_options(work):
    return dict(num_workers=work.threads, persistent_workers=True, pin_memory=work.on_gpu, prefetch_factor=2)


def epochs_ahead(loader, work):
    """Yield a loader's epochs; each batch is copied on its own stream during the step before it."""
    return devices.copied_ahead(itertools.chain.from_iterable(itertools.repeat(loader)), work.device)


def dataloader_row(work):
    loader = DataLoader(VolumeDataset(work), work.batch, shuffle=True, drop_last=True, **loader_options(work))
    return epochs_ahead(loader, work)


def stacked(samples):
    """Return a batch of WebDataset's samples, stacked in a worker."""
    return torch.from_numpy(np.stack([np.frombuffer(one["bin"], np.int64) for one in samples]))


def pinned_row(work):
    """Yield batches that are ready in pinned memory: the limit."""
    whole = work.samples // work.batch
    batches = np.arange(whole * work.batch).reshape(whole, work.batch)
    ready = [torch.from_numpy(np.stack([array(number, work.elements) for number in batch])) for batch in batches]
    return epochs_ahead([batch.pin_memory() for batch in ready] if work.on_gpu else ready, work)


def webdataset_row(work):
    import webdataset

    shards = webdataset.WebDataset(work.shards, shardshuffle=len(work.shards), empty_check=False)
    collation_fn = decoded if work.case == "images" else stacked
    batches = shards.shuffle(SHUFFLE_BUFFER).batched(work.batch, collation_fn=collation_fn, partial=False)
    loader = webdataset.WebLoader(batches, batch_size=None, collate_fn=as_it_is, **loader_options(work))
    return epochs_ahead(loader, work)


def spdl_row(work):
    """Yield batches that threads read and one more thread copies to the GPU on its own stream."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    def orders():
        for epoch in itertools.count():
            order = np.random.default_rng(epoch).permutation(work.samples)
            whole = len(order) // work.batch * work.batch
            yield from order[:whole].reshape(-1, work.batch)

    files = work.files

    def read(numbers):
        return torch.from_numpy(np.stack([np.load(files[number]) for number in numbers]))

    builder = PipelineBuilder().add_source(orders()).pipe(read, concurrency=work.threads)
    if work.on_gpu:
        torch.cuda.set_device(devices.index(work.device))
        builder = builder.pipe(spdl.io.transfer_tensor)
    pipeline = builder.add_sink(AHEAD).build(num_threads=work.threads)
    with pipeline.auto_stop():
        yield from pipeline


DALI = "nvidia-dali-cuda130"
ROWS = {  # by name: what pip installs, the cases, and what makes its endless batches
    "limit: ready in pinned memory": ("", ("arrays",), pinned_row),
    "gdsdata": ("", ("arrays", "images"), gdsdata_row),
    "gdsdata, decoded by DALI": (DALI, ("images",), gdsdata_dali_row),
    "DALI readers.webdataset": (DALI, ("arrays", "images"), dali_row),
    "DALI readers.numpy": (DALI, ("arrays",), dali_numpy_row),
    "DataLoader over files": ("", ("arrays",), dataloader_row),
    "WebDataset": ("webdataset", ("arrays", "images"), webdataset_row),
    "SPDL over files": ("spdl", ("arrays",), spdl_row),
}


# ------------------------------------------------------------------------------------------------------------ steps


class Step:
    """Matrix products of ``ms`` milliseconds behind a sum over a part of the batch."""

    def __init__(self, work, ms):
        width, dtype = (4096, torch.bfloat16) if work.on_gpu else (192, torch.float32)
        self.matrix = torch.randn(width, width, device=work.device).to(dtype)
        self.result = torch.empty_like(self.matrix)
        self.seen = torch.zeros((), dtype=torch.int64, device=work.device)
        self.count, self.device = 0, work.device
        if ms:
            self.count = 1000
            self.take()  # warm-up
            self.count = max(1, round(ms * self.count / self.take()))

    def take(self):
        """Return the milliseconds of a step without a batch."""
        devices.synchronize(self.device)
        started = time.perf_counter()
        self(None)
        devices.synchronize(self.device)
        return 1000 * (time.perf_counter() - started)

    def __call__(self, batch):
        if batch is not None:
            self.seen += batch.reshape(-1)[::PART].sum()
        for _ in range(self.count):
            torch.mm(self.matrix, self.matrix, out=self.result)


def loop(work, step, batches, steps):
    """Return (seconds a step of the whole loop, seconds of the step itself).

    The host runs at most two steps ahead.
    """
    marks = []
    devices.synchronize(work.device)
    started = time.perf_counter()
    for batch in itertools.islice(batches, steps):
        begin = devices.mark(work.device)
        step(batch)
        marks.append((begin, devices.mark(work.device)))
        if len(marks) > 2:
            devices.wait_for(marks[-3][1])
    devices.synchronize(work.device)
    elapsed = time.perf_counter() - started
    return elapsed / len(marks), sum(devices.seconds_between(*pair) for pair in marks) / len(marks)


def prepared(name, work):
    """Make and check the row, in its own process. Returns the function that takes a turn."""
    torch.set_num_threads(1)
    devices.open_context(work.device)
    steps = {}  # measured in the first turn, when nothing else runs
    batches = ROWS[name][2](work)
    missing = set(range(work.samples))
    for _ in range(3 * work.samples // work.batch):  # a loader that shuffles in a buffer may give a sample late
        kept = next(batches).clone()
        missing -= set(numbers_of(work, kept))
    if len(missing) > 0.1 * work.samples:
        raise ValueError(f"{len(missing)} of {work.samples} samples did not come in three epochs")

    def alone(step, ms):
        """Return the seconds of a step, with nothing to be loaded."""
        return loop(work, step, itertools.repeat(kept), 1 + int(1000 * ALONE_S / ms))[0] if ms else 0.0

    def turn():
        found = []
        for ms in work.step_ms:
            step = steps[ms] = steps.get(ms) or Step(work, ms)
            before = alone(step, ms)
            for _ in range(AHEAD):  # batches that were ready before the loop do not count
                step(next(batches))
            in_loop = loop(work, step, batches, work.steps)
            found.append(((before + alone(step, ms)) / 2, *in_loop))
        return found

    return turn


# ------------------------------------------------------------------------------------------------------------- main


def measured(work, names, rounds):
    """Print the tables of one case, one for each length of a step."""
    write(work)
    chosen = {name: row for name, row in ROWS.items() if work.case in row[1] and (not names or name in names)}
    turns = [Turns(name, package, prepared, name, work) for name, (package, _, _) in chosen.items()]
    turns = [turn.made() for turn in turns]
    share = 1.0
    for done in range(rounds):
        print(f"{work.case}: {done} of {rounds} rounds", file=sys.stderr)
        share = min(share, system.warm(work.shards + work.files))
        take_all(turns)
    for turn in turns:
        turn.end()
    for place, ms in enumerate(work.step_ms):
        said = f"steps of {ms:g} ms" if ms else "no steps"
        print(f"\n{work.case}, {said} on {work.device}, batches of {work.batch}; {share:.0%} in the page cache\n")
        print("| row | batches/s | step alone, ms | idle % (lowest, highest) | steps slower |\n|---|---|---|---|---|")
        for turn in turns:
            print(table_row(turn, place, ms), flush=True)


def table_row(turn, place, ms):
    if turn.error is not None:
        return f"| {turn.name} | {turn.why_not} | | | |"
    runs = [result[place] for result in turn.results]
    rate = statistics.median(1 / whole for _, whole, _ in runs)
    if not ms:
        return f"| {turn.name} | {rate:,.1f} | | | |"
    alone = 1000 * statistics.median(alone for alone, _, _ in runs)
    idle = sorted(100 * (1 - alone / whole) for alone, whole, _ in runs)
    slower = statistics.median(step / alone for alone, _, step in runs)
    spread = f"{statistics.median(idle):.1f} ({idle[0]:.1f}, {idle[-1]:.1f})"
    return f"| {turn.name} | {rate:,.1f} | {alone:.2f} | {spread} | {slower:.2f} x |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--case", nargs="*", default=["arrays", "images"])
    parser.add_argument("--step-ms", nargs="*", type=float, default=[5.0, 2.0, 0.0], help="0: no steps")
    parser.add_argument("--steps", type=int, default=300, help="steps of each loop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("outputs/training"), help="folder of the data")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch", type=int, help="32 arrays, 64 images")
    parser.add_argument("--array-kib", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=max(1, min(16, len(os.sched_getaffinity(0)) // 2)))
    parser.add_argument("--only", nargs="*", default=[], help=f"any of {', '.join(ROWS)}")
    chosen = parser.parse_args()
    devices.check(chosen.device)
    machine, versions = system.machine(), system.versions()
    model = devices.describe(chosen.device).get("model", "no GPU")
    load = machine["load_before"]
    print(f"{machine['cpu']}, {machine['cores']} cores, load {load:.1f}, {model}, torch {versions['torch']}")
    for case in chosen.case:
        work = Work(
            case,
            chosen.folder / f"{case}-{chosen.samples}-{chosen.array_kib}",
            chosen.samples,
            chosen.batch or {"arrays": 32, "images": 64}[case],
            chosen.array_kib * 128,
            chosen.device,
            chosen.threads,
            tuple(chosen.step_ms),
            chosen.steps,
        )
        measured(work, chosen.only, chosen.rounds)


if __name__ == "__main__":
    main()

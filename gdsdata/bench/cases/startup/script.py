"""A user's small training script, from its start to its first optimizer step, by each library.

`python script.py ARGUMENTS` is that script: it notes the time behind each of its parts (`report`
lists them) and prints a JSON line at its end. So nothing is imported here that such a script would
not import, and libraries only within their part. A `Program` is what differs from library to
library. The restored state is that of a model of equal layers and of AdamW.
"""

import time

BEGAN = time.monotonic()  # CLOCK_MONOTONIC, as of the process that started this one

import contextlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import pkgutil  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
import zlib  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

if __name__ == "__main__":
    sys.path.pop(0)  # This folder holds no packages.

import numpy as np  # noqa: E402 (which torch imports)
import torch  # noqa: E402

OWN_PARTS = ("library", "data", "restore", "first_batch")  # what a program of other libraries would do otherwise
WIDTH, SMALL_WIDTH, SMALL_STATE_BYTES = 1024, 256, 64 * 2**20
VALUES_OF_A_WEIGHT = 3  # itself, and AdamW's two moments


# ------------------------------------------------------------------------------------------------ what is trained


def layers_of(state_bytes, seq_len):
    """(layers, their width) of a model with about so many bytes, optimizer and all."""
    width = min(seq_len, WIDTH if state_bytes >= SMALL_STATE_BYTES else SMALL_WIDTH)
    return max(1, round(state_bytes / (width * width * 4 * VALUES_OF_A_WEIGHT))), width


def make_training(state_bytes, seq_len, device):
    """(model, optimizer), all of whose tensors are there: float32 zeros."""
    count, width = layers_of(state_bytes, seq_len)
    model = torch.nn.ParameterList([torch.zeros(width, width, device=device) for _ in range(count)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for weight in model.parameters():
        moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}
    return model, optimizer


def step(model, optimizer, batch):
    values = batch[:, : model[0].shape[0]].float() / 2**16
    for weight in model:
        values = values @ weight
    values.mean().backward()
    optimizer.step()


def named_tensors(model, optimizer):
    """{name: tensor} of all that a checkpoint has."""
    found = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    for index, weight in enumerate(model.parameters()):
        found |= {f"optimizer.{index}.{name}": tensor for name, tensor in optimizer.state[weight].items()}
    return found


def checksums_of(model, optimizer):
    from gdsdata.bench.data.checkpoints import checksum

    tensors, threads = named_tensors(model, optimizer), torch.get_num_threads()
    torch.set_num_threads(1)  # others would still spin while the step is timed
    found = {name: checksum(tensor.reshape(-1).view(torch.uint8)) for name, tensor in tensors.items()}
    torch.set_num_threads(threads)
    return found


# ------------------------------------------------------------------------------------------------ by which library


class Program:
    """The parts of a script that differ from library to library.

    `told` has `tokens` (a file of uint16), `seq_len`, `batch_size`,
    `state_bytes`, `files` (of the checkpoint, by format), `device`, `seed` and `engine` (options).
    """

    key = ""  # its name in case.rows
    name = ""
    setting = ""  # one sentence for the report
    package = ""  # what has to be installed
    state_format = "torch"  # of the checkpoint that it restores
    needs_state, restores = False, True
    way = "read"  # how its bytes come, where it does not count them
    batches: Any
    first_batch: Callable[[], torch.Tensor]  # part "first_batch": int64 (batch_size, seq_len + 1) on the device

    def __init__(self, workers=0):
        self.workers = workers

    @classmethod
    def lacks(cls):
        return ""

    def begin(self, told):
        self.told, self.device = told, told["device"]

    def import_library(self):
        """Part "library"."""

    def open(self):
        """Part "data"."""

    def restore(self, model, optimizer):
        """Part "restore"."""

    def served(self):
        """Bytes moved by then, by path, where the library counts them."""
        return {}

    def close(self):
        pass


class Floor(Program):
    key, name = "floor", "floor"
    setting = "no library, no files: interpreter, torch, CUDA's context, the same model, a step with a batch of zeros"
    way, restores = "", False

    def open(self):
        shape = self.told["batch_size"], self.told["seq_len"] + 1
        self.batch = torch.zeros(shape, dtype=torch.int64, device=self.device)

    def first_batch(self):
        return self.batch


class Ours(Program):
    key, name = "gdsdata", "gdsdata"
    setting = "gdsdata.GDSDataset, and gdsdata.load(into=) of what torch.save wrote"
    way = ""

    def import_library(self):
        import gdsdata

        self.dataset, self.tokens = gdsdata.GDSDataset, gdsdata.formats.Tokens  # which imports them
        self.load: Any = gdsdata.load if self.told["state_bytes"] else None
        self.options = gdsdata.EngineOptions(**self.told["engine"])
        self.reading = gdsdata.Reading(options=self.options)

    def open(self):
        told = self.told
        tokens = self.tokens("uint16", told["seq_len"])
        how = {"seed": told["seed"], "device": self.device, "reading": self.reading}
        self.data = self.dataset(told["tokens"], told["batch_size"], tokens, **how)
        self.batches = iter(self.data)

    def restore(self, model, optimizer):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        self.load(self.told["files"]["torch"], into=state, options=self.options)
        optimizer.load_state_dict(state["optimizer"])  # of which the tensors are there already

    def first_batch(self):
        return next(self.batches)

    def served(self):
        from gdsdata.io.engine import kept_engine, resolved

        found = dict(self.data.stats()["engine"]["bytes"])
        if self.told["state_bytes"]:
            of_load = kept_engine(self.options, resolved(self.device)).statistics()["bytes"]
            if of_load != found:  # else it is the same engine
                found = {path: count + of_load[path] for path, count in found.items()}
        return {path: count for path, count in found.items() if count}

    def close(self):
        self.batches.close()


class Windows:
    """A DataLoader's data set: windows of seq_len + 1 tokens, as a user would write it."""

    def __init__(self, path, seq_len):
        self.tokens, self.seq_len = np.memmap(path, np.uint16, "r"), seq_len

    def __len__(self):
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index):
        begin = index * self.seq_len
        return torch.from_numpy(self.tokens[begin : begin + self.seq_len + 1].astype("int64"))


class Loader(Program):
    """torch's DataLoader and `torch.load`."""

    way = "mmap"
    mmap = False
    restored_by, ending = "torch.load(map_location=)", ""  # of the key and the name

    def __init__(self, workers=0):
        super().__init__(workers)
        self.key, self.name = f"dataloader_{workers}", f"DataLoader, {workers} workers"
        if self.ending:
            self.key, self.name = f"{self.key}_{self.ending}", f"{self.name}, {self.ending}"
        self.setting = f"DataLoader(num_workers={workers}) over a numpy.memmap, {self.restored_by}"

    def import_library(self):
        import torch.utils.data  # noqa: F401

    def open(self):
        told = self.told
        windows: Any = Windows(told["tokens"], told["seq_len"])
        generator = torch.Generator().manual_seed(told["seed"])
        loader = torch.utils.data.DataLoader(
            windows, told["batch_size"], shuffle=True, num_workers=self.workers, generator=generator
        )
        self.batches = iter(loader)

    def restore(self, model, optimizer):
        state = torch.load(self.told["files"]["torch"], map_location=self.device, mmap=self.mmap or None)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def first_batch(self):
        return next(self.batches).to(self.device)

    def close(self):
        self.batches = None


class LoaderMapped(Loader):
    needs_state, mmap = True, True
    restored_by, ending = "torch.load(map_location=) with mmap=True", "mmap"


class LoaderSafetensors(Loader):
    package, needs_state, state_format = "safetensors", True, "safetensors"
    restored_by, ending = "safetensors.torch.load_file(device=), copied", "safetensors"

    def import_library(self):
        super().import_library()
        from safetensors.torch import load_file

        self.load_file = load_file

    def restore(self, model, optimizer):
        found = self.load_file(self.told["files"]["safetensors"], device=self.device)
        for name, tensor in named_tensors(model, optimizer).items():
            tensor.copy_(found[name])


def programs(workers):
    """Those that are measured, with DataLoaders of each of these numbers of workers."""
    loaders = [Loader(count) for count in workers]
    return [Floor(), Ours(), *loaders, LoaderMapped(min(workers)), LoaderSafetensors(min(workers))]


def find(key, workers):
    """Return the program of a row's key, or one of package.module:Class."""
    if ":" in key:
        return pkgutil.resolve_name(key)()
    known = {one.key: one for one in programs(workers)}
    if key not in known:
        raise ValueError(
            f"case.rows: there is no row {key!r}; there are {', '.join(known)}, and package.module:Class for yours"
        )
    return known[key]


# ------------------------------------------------------------------------------------------------ the script


class Clock:
    """When each part was over, by CLOCK_MONOTONIC; `part` is under way."""

    def __init__(self, device):
        self.device, self.over, self.part = device, {"interpreter": BEGAN}, "torch"
        self.stood_s = self.stood_cpu_s = 0.0

    @contextlib.contextmanager
    def standing(self):
        """For what is no part of the script."""
        began, used = time.monotonic(), time.process_time()
        yield
        self.stood_s += time.monotonic() - began
        self.stood_cpu_s += time.process_time() - used

    def done(self, following):
        if self.device != "cpu" and self.part != "torch":
            torch.cuda.synchronize(self.device)
        self.over[self.part], self.part = time.monotonic() - self.stood_s, following


def train(program, told):
    """The script; what it prints."""
    clock, on_gpu = Clock(told["device"]), told["device"] != "cpu"
    try:
        clock.done("context" if on_gpu else "library")
        if on_gpu:
            torch.cuda.set_device(torch.device(told["device"]).index or 0)
            torch.empty(1, device=told["device"])
            clock.done("library")
        program.begin(told)
        program.import_library()
        clock.done("model")
        model, optimizer = make_training(told["state_bytes"], told["seq_len"], told["device"])
        clock.done("data")
        program.open()
        clock.done("restore" if told["state_bytes"] else "first_batch")
        if told["state_bytes"]:
            program.restore(model, optimizer)
            clock.done("first_batch")
        batch = program.first_batch()
        clock.done("first_step")
        with clock.standing():  # the step changes what was restored
            restored = checksums_of(model, optimizer) if told["state_bytes"] and program.restores else {}
        step(model, optimizer, batch)
        clock.done("end")
        found = {"over": clock.over, "stood_cpu_s": clock.stood_cpu_s, "restored": restored}
        return found | after(program, batch)
    except Exception as error:
        return {"error": f"{clock.part}: {type(error).__name__}: {error}", "trace": traceback.format_exc()}


def after(program, batch):
    """The facts that are found behind the last part."""
    served = program.served()
    program.close()
    rows = batch.cpu().contiguous().numpy()
    return {
        "served": served,
        "batch": {"dtype": str(batch.dtype), "device": batch.device.type, "shape": list(batch.shape)},
        "windows": [zlib.crc32(row.tobytes()) for row in rows],
        "peak_bytes": most_resident_bytes(),
    }


def most_resident_bytes():
    """VmHWM: getrusage's ru_maxrss has what the parent had before this was started."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints
    told = json.loads(sys.argv[1])
    found = train(find(told["row"], told["workers"]), told)
    answers.write(json.dumps(found) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()

"""Load a checkpoint: the first load of a process, and later ones, in several processes.

    python benchmarks/loads.py [--kinds safetensors pt dcp shards] [--size-gib 8] [--tensors 128]
        [--rounds 3] [--later 8] [--device cuda] [--folder F]

`case=checkpoint` of the bench has one first load of each row. Here each round starts a process for
each kind, in random order. `shards` are three files through an `index.json`, with half as many
bytes more. `dcp` fills tensors that are there, from a folder that torch wrote; the others make new
ones. Files are in the page cache. All bytes of each load are compared, and zeroed behind it.

Times are ms, medians with the lowest and the highest. A process has imported torch and gdsdata, and
has a CUDA context, but no engine before its first load. Shares are those of the rate of pinned
copies (on the CPU: of copies within memory) that the same process measured. CPU is of later loads.
"""

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from frameworks import cell, routes, table
from turns import Turns, end_all, take_all

from gdsdata.bench.measure import device as devices
from gdsdata.bench.measure import limits, system
from gdsdata.bench.peers.protocols import counted

KINDS = ("safetensors", "pt", "dcp", "shards")
SHARDS = 3
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process loads
COLUMNS = ("kind", "first", "of the copy", "later", "of the copy", "CPU s/GB", "path")


class Checkpoint(NamedTuple):
    """A state in a folder. Tensor i has the values of the first one, rolled by i.

    Attributes:
        tensors: how many. values: of each, bfloat16.
        device: to which it is loaded, as torch names it.
    """

    folder: Path
    kind: str
    tensors: int
    values: int
    device: str

    @property
    def size_bytes(self):
        return self.tensors * self.values * 2

    @property
    def path(self):
        names = {"dcp": "dcp", "shards": "model.safetensors.index.json"}
        return self.folder / names.get(self.kind, f"state.{self.kind}")

    def first_tensor(self, device):
        bits = torch.randint(-(2**15), 2**15, (self.values,), generator=torch.Generator().manual_seed(0))
        return bits.to(torch.int16).to(device)

    def names(self):
        return [f"layers.{i:04}.weight" for i in range(self.tensors)]

    def write(self):
        import torch.distributed.checkpoint as dcp

        import gdsdata

        first = self.first_tensor("cpu")
        state = {name: first.roll(i).view(torch.bfloat16) for i, name in enumerate(self.names())}
        if self.kind == "dcp":
            dcp.save(state, storage_writer=dcp.FileSystemWriter(self.path))
        elif self.kind == "shards":
            file_of = {name: f"model-{i % SHARDS}.safetensors" for i, name in enumerate(state)}
            for file in set(file_of.values()):
                gdsdata.save({name: one for name, one in state.items() if file_of[name] == file}, self.folder / file)
            self.path.write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
        else:
            gdsdata.save(state, self.path)


def loading(checkpoint, later):
    """Return the function that takes a process's only turn: its first load, and later ones."""
    import gdsdata
    from gdsdata.io import engine

    device = checkpoint.device
    devices.open_context(device)
    first, names = checkpoint.first_tensor(device), checkpoint.names()
    state = {}
    if checkpoint.kind == "dcp":
        import torch.distributed.checkpoint as dcp

        state |= {name: torch.zeros_like(first).view(torch.bfloat16) for name in names}

    def load():
        if checkpoint.kind == "dcp":
            reader, planner = gdsdata.GDSStorageReader(checkpoint.path), gdsdata.GDSLoadPlanner()
            dcp.load(state, storage_reader=reader, planner=planner)
        else:
            state.update(gdsdata.load(checkpoint.path, device))

    def check():
        """Compare all bytes, and forget them."""
        if state.keys() != set(names):
            raise ValueError(f"{len(state)} tensors were loaded, {len(names)} were saved")
        for i, name in enumerate(names):
            if not torch.equal(state[name].view(torch.int16), first.roll(i)):
                raise ValueError(f"{name}: the values are not what was saved")
            state[name].zero_()
        if checkpoint.kind != "dcp":
            state.clear()

    def turn():
        found = []
        for _ in range(1 + later):
            devices.synchronize(device)
            cpu_s, started = system.cpu_seconds(), time.perf_counter()
            load()
            devices.synchronize(device)
            found.append((time.perf_counter() - started, system.cpu_seconds() - cpu_s))
            check()
        on_gpu = devices.is_cuda(device)
        limit = devices.pinned_copy(device, 0.5) if on_gpu else limits.memory_copy(0.5)
        served = counted(*(one.statistics() for _, one in engine.engines_here()))
        return {
            "first_s": found[0][0],
            "later_s": statistics.median(seconds for seconds, _ in found[1:]),
            "later_cpu_s": statistics.median(cpu_s for _, cpu_s in found[1:]),
            "limit_s": checkpoint.size_bytes / limit["gb_per_s"] / 1e9,
            "served": dict(served),
        }

    return turn


def cells_of(checkpoint, results):
    """Return the cells of a row of the table."""
    shares = {key: [one["limit_s"] / one[key] for one in results] for key in ("first_s", "later_s")}
    times = {key: [one[key] * 1e3 for one in results] for key in shares}
    return (
        cell(times["first_s"], 0),
        cell(shares["first_s"], 3),
        cell(times["later_s"], 1),
        cell(shares["later_s"], 3),
        cell([one["later_cpu_s"] / checkpoint.size_bytes * 1e9 for one in results], 3),
        routes(results),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--size-gib", type=float, default=8)
    parser.add_argument("--tensors", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--later", type=int, default=8, help="loads of a process behind its first one")
    parser.add_argument("--device", default="cuda", help="as torch names it")
    parser.add_argument("--folder", help="where a folder for the files is made")
    given = parser.parse_args()
    values = round(given.size_gib * 2**30) // given.tensors // 2
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, contextlib.ExitStack() as ended:
        ended.callback(end_all)
        checkpoints = []
        for kind in given.kinds:
            tensors = given.tensors * 3 // 2 if kind == "shards" else given.tensors
            checkpoints.append(Checkpoint(Path(folder), kind, tensors, values, given.device))
            checkpoints[-1].write()
        system.warm([str(path) for path in Path(folder).rglob("*") if path.is_file()])
        results, errors = {one: [] for one in checkpoints}, {}
        for _ in range(given.rounds):
            for checkpoint in random.sample(checkpoints, len(checkpoints)):
                turn = Turns(checkpoint.kind, None, loading, checkpoint, given.later).made()
                take_all([turn])
                turn.end()
                results[checkpoint] += turn.results
                if turn.error:
                    errors[checkpoint] = turn.why_not
    print(f"{given.size_gib:g} GiB of bfloat16 in {given.tensors} tensors to {given.device}, {given.rounds} rounds.")
    table(COLUMNS, [(one.kind, errors.get(one) or cells_of(one, results[one])) for one in checkpoints])


if __name__ == "__main__":
    main()

"""Save and load a state of very many small tensors, as a mixture of experts has: us a tensor.

    python benchmarks/many_tensors.py [--tensors 200000] [--rounds 3] [--folder /dev/shm]

Each tensor has 1 KiB. gdsdata and the formats' own libraries take turns in one process. Loads fill
tensors that are there, and zero before; all bytes of each load are compared. `torch.load` and
safetensors make new tensors, which are copied into these. A folder in memory shows what a tensor
costs. A disk adds what its bytes take.
"""

import argparse
import functools
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import gdsdata
from gdsdata.bench.peers.protocols import fill

ELEMENTS = 256  # float32
for said in ("torch.distributed is disabled", "Detected an existing checkpoint"):
    warnings.filterwarnings("ignore", message=said)  # there is one process, which saves several times


def state_of(tensors):
    """Return tensors with different values, by the names of a mixture of experts."""
    values = torch.arange(tensors * ELEMENTS, dtype=torch.float32).view(tensors, ELEMENTS)
    return {f"layers.{i // 64}.experts.{i % 64}.weight": one.clone() for i, one in enumerate(values)}


def rows_of(state, target, folder):
    """Return the saves, and the loads of what they wrote, by name: gdsdata's, the format's own."""
    by_us, by_others = folder / "gdsdata", folder / "others"
    for place in (by_us, by_others):
        place.mkdir()
    saves = {
        "save, .pt": (
            functools.partial(gdsdata.save, state, by_us / "state.pt"),
            functools.partial(torch.save, state, by_others / "state.pt"),
        ),
        "save, .safetensors": (
            functools.partial(gdsdata.save, state, by_us / "state.safetensors"),
            functools.partial(save_file, state, by_others / "state.safetensors"),
        ),
        "save, DCP": (
            lambda: dcp.save(
                state, storage_writer=gdsdata.GDSStorageWriter(by_us / "dcp"), planner=gdsdata.GDSSavePlanner()
            ),
            lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(by_others / "dcp")),
        ),
    }
    loads = {
        "load, .pt": (
            lambda: gdsdata.load(by_us / "state.pt", into=target),
            lambda: fill(target, torch.load(by_others / "state.pt", weights_only=True)),
        ),
        "load, .safetensors": (
            lambda: gdsdata.load(by_us / "state.safetensors", into=target),
            lambda: fill(target, load_file(by_others / "state.safetensors")),
        ),
        "load, DCP": (
            lambda: dcp.load(
                target, storage_reader=gdsdata.GDSStorageReader(by_us / "dcp"), planner=gdsdata.GDSLoadPlanner()
            ),
            lambda: dcp.load(target, storage_reader=dcp.FileSystemReader(by_others / "dcp")),
        ),
    }
    return saves, loads


def seconds(call):
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def checked_load(call, state, target):
    """Return the seconds of a load, whose bytes are compared."""
    for tensor in target.values():
        tensor.zero_()
    taken = seconds(call)
    wrong = [name for name, tensor in target.items() if not torch.equal(tensor, state[name])]
    if wrong:
        raise SystemExit(f"many_tensors: {len(wrong)} tensors have other bytes, {wrong[0]} among them")
    return taken


def stalls(state, folder, rounds):
    """Return how long `AsyncCheckpointer.save` keeps the program, less the copy of the bytes."""
    source = torch.cat([tensor.view(-1) for tensor in state.values()])
    copy_s = min(seconds(source.clone) for _ in range(3))
    found = []
    with gdsdata.AsyncCheckpointer(folder / "async", keep_last=1) as checkpointer:
        checkpointer.prepare(state)
        for step in range(rounds + 1):
            found.append(seconds(lambda step=step: checkpointer.save(step, state)) - copy_s)
            checkpointer.wait()
    return found[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default="/dev/shm", help="where a folder for the files is made")
    given = parser.parse_args()
    state = state_of(given.tensors)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        saves, loads = rows_of(state, target, Path(folder))
        taken = {(name, i): [] for name in (*saves, *loads) for i in range(2)}
        for _ in range(given.rounds):
            for name, calls in saves.items():
                for i, call in enumerate(calls):
                    taken[name, i].append(seconds(call))
            for name, calls in loads.items():
                for i, call in enumerate(calls):
                    taken[name, i].append(checked_load(call, state, target))
        asynchronous = stalls(state, Path(folder), given.rounds)

    def us(times):
        return f"{statistics.median(times) / given.tensors * 1e6:.1f}"

    print(f"{given.tensors} tensors of {ELEMENTS * 4} bytes in {given.folder}, medians of {given.rounds} rounds.")
    print("\n| us a tensor | gdsdata | the format's own library |\n|---|---:|---:|")
    for name in (*saves, *loads):
        print(f"| {name} | {us(taken[name, 0])} | {us(taken[name, 1])} |")
    print(f"| stall of `AsyncCheckpointer.save`, beyond a copy of the bytes | {us(asynchronous)} | |")


if __name__ == "__main__":
    main()

"""Measure an index of many samples: its load, its memory in several processes, and a batch's plan.

    python benchmarks/scale.py [--samples 1e6 1e8] [--files 1e6 1e9] [--processes 4] [--rounds 200]
        [--folder F]

The index is a synthetic one, of tar shards with 10,000 samples of two fields. It is stored as a
kept index is. Processes load it at the same time, and then plan batches. No shard is there, so
their sizes and times are not compared, which takes a quarter of a second at most.

A plan is the order of 256 shuffled samples and where they lie. Sizes take turns, and CPU time is
measured, so a busy machine changes little.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from gdsdata.data.order.permutation import Order
from gdsdata.formats import stored_index
from gdsdata.formats.extents import ExtentsBuilder
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.index import Index, Sample

A_SHARD, BATCH = 10_000, 256
AT_ONCE = 16  # batches that a data set of small samples plans in one call


def index_of_fields(samples):
    """Return the index of tar shards with an image of 2 to 256 KB and a label in each sample."""
    chosen, shards, builder = np.random.default_rng(0), max(1, samples // A_SHARD), ExtentsBuilder()
    for _ in range(shards):
        length = chosen.integers([2_000, 1], [2**18, 4], (min(A_SHARD, samples), 2))
        taken = 512 + -(-length.reshape(-1) // 512) * 512
        builder.add((np.cumsum(taken) - taken + 512).reshape(-1, 2), length)
    about = np.full(shards, 2**32), np.arange(shards), np.arange(shards + 1) * min(A_SHARD, samples)
    paths = [f"/data/train-{number:06d}.tar" for number in range(shards)]
    return FieldIndex(paths, *about, (Field("jpg"), Field("cls")), builder.extents())


def index_of_one_size(samples, files=4096):
    a_file = samples // files
    about = np.full(files, a_file * 4096), np.arange(files), np.arange(files + 1) * a_file
    extents = np.zeros(files, np.int64), np.full(files, 4096)
    return Index([f"/data/{i}" for i in range(files)], *about, *extents, Sample(np.dtype("u1"), (4096,)))


# -------------------------------------------------------------------------------------------------------------- memory


def memory_mb(path):
    """Return resident and proportional memory of this process's mapping of ``path``."""
    found, is_its = {"Rss:": 0, "Pss:": 0}, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            first, *rest = line.split()
            if "-" in first and not first.endswith(":"):
                is_its = rest[-1] == path
            elif is_its and first in found:
                found[first] += int(rest[0])
    return [round(kib * 1024 / 1e6) for kib in found.values()]


def load_and_report(path):
    """Load an index, wait until all processes have, and print what it takes here."""
    began, cpu = time.perf_counter(), time.process_time()
    index = stored_index.read(path).index
    print(f"{time.perf_counter() - began:.3f} {time.process_time() - cpu:.3f}", flush=True)
    sys.stdin.readline()
    index.plan(np.random.default_rng(0).integers(0, len(index), BATCH))
    print(*memory_mb(path), flush=True)
    sys.stdin.readline()


def loads(path, processes):
    """Return wall s, CPU s, resident MB and proportional MB, the worst of several processes."""
    command = [sys.executable, __file__, "--load", path]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ranks = [subprocess.Popen(command, **pipes) for _ in range(processes)]
    said = []
    for _ in range(2):
        said.append([[float(word) for word in rank.stdout.readline().split()] for rank in ranks])
        for rank in ranks:
            rank.stdin.write("\n")
            rank.stdin.flush()
    for rank in ranks:
        rank.communicate()
    return [max(column) for one in said for column in zip(*one, strict=True)]


# --------------------------------------------------------------------------------------------------------------- plans


def plan_times(indexes, rounds):
    """Return CPU us of the plan of a batch, for each index: one batch a call, and AT_ONCE."""
    orders = {name: Order(len(index), BATCH, True, 7, False, 0, 1) for name, index in indexes.items()}
    taken = {name: ([], []) for name in indexes}
    for turn in range(rounds):
        for name, index in indexes.items():
            for batches, times in zip((1, AT_ONCE), taken[name], strict=True):
                first = turn * AT_ONCE % max(1, len(orders[name]) - AT_ONCE)
                began = time.thread_time_ns()
                samples, _ = orders[name].plan(0, first, batches)
                index.plan(samples)
                times.append((time.thread_time_ns() - began) / batches / 1e3)
    return {name: [float(np.median(times)) for times in both] for name, both in taken.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", nargs="+", default=["1e6", "1e8"], help="of tar shards with two fields")
    parser.add_argument("--files", nargs="+", default=["1e6", "1e9"], help="samples of one size, in 4096 files")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="where the indexes are stored")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.load:
        load_and_report(asked.load)
        return
    indexes = {}
    print("| samples with two fields | bytes a sample | load s | CPU s | resident MB | of it this process's MB |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        for samples in asked.samples:
            path = os.path.join(os.path.realpath(folder), samples)
            with open(path, "wb") as file:
                stored_index.write(file, stored_index.Stored(index_of_fields(int(float(samples))), {}))
            figures = " | ".join(f"{one:g}" for one in loads(path, asked.processes))
            print(f"| {samples} | {os.path.getsize(path) / float(samples):.2f} | {figures} |", flush=True)
            indexes[f"{samples}, two fields"] = stored_index.read(path).index
        indexes |= {f"{samples}, one size": index_of_one_size(int(float(samples))) for samples in asked.files}
        print(f"\n| samples | plan of a batch of {BATCH}, us | the same, {AT_ONCE} batches a call |\n|---|---|---|")
        for name, (one, many) in plan_times(indexes, asked.rounds).items():
            print(f"| {name} | {one:.1f} | {many:.1f} |")


if __name__ == "__main__":
    main()

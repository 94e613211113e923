"""Measure what lanes gain if the data is not in memory.

    python benchmarks/shuffle_reads.py FOLDER [--gib 4]

Writes a file of counting int64s into FOLDER, and reads it cold as samples of several lengths, in a
uniform order and in lanes. Each run lasts an epoch or eight seconds, whichever is shorter. Every
batch is compared with what was written. Prints GB/s, the routes that served the bytes (for lanes,
those of their pieces), and the choice of ``shuffle="auto"``.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch

import gdsdata
from gdsdata.bench.measure import system

SAMPLE_BYTES = [2048, 8192, 32768, 131072]
BATCH_BYTES = 2**20
MOST_S = 8.0


def made(path, gib):
    if not path.exists() or path.stat().st_size != gib * 2**30:
        with open(path, "wb") as file:
            for part in range(gib * 64):
                file.write(np.arange(part * 2**21, (part + 1) * 2**21).tobytes())
            file.flush()
            os.fsync(file.fileno())


def epoch(path, sample_bytes, shuffle):
    """Return GB/s of a cold epoch, or of its first seconds, and the shares of the routes."""
    batch_size, elements = max(64, BATCH_BYTES // sample_bytes), sample_bytes // 8
    records = gdsdata.formats.Records("int64", (elements,))
    dataset = gdsdata.GDSDataset(path, batch_size, records, device="cpu", shuffle=shuffle)
    system.drop([path])
    count, started_s = torch.arange(elements), time.perf_counter()
    for batch in dataset:
        if not (batch[:, 0] % elements == 0).all() or not torch.equal(batch, batch[:, :1] + count):
            raise AssertionError("a sample is not what was written")
        if time.perf_counter() - started_s > MOST_S:
            break
    seconds = time.perf_counter() - started_s
    stats = dataset.stats()
    handed_out, pieces = sum(stats["bytes"].values()), stats["piece_bytes"]
    served = pieces if any(pieces.values()) else stats["bytes"]
    routes = ", ".join(f"{name} {100 * count / sum(served.values()):.0f} %" for name, count in served.items() if count)
    return handed_out / seconds / 1e9, routes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=int, default=4)
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    path = chosen.folder / "samples.bin"
    made(path, chosen.gib)
    print("| sample, bytes | uniform, GB/s | by | lanes, GB/s | by | auto |\n|---|---|---|---|---|---|")
    for sample_bytes in SAMPLE_BYTES:
        uniform_gb_s, uniform_routes = epoch(path, sample_bytes, "uniform")
        lanes_gb_s, lanes_routes = epoch(path, sample_bytes, "lanes")
        records = gdsdata.formats.Records("int64", (sample_bytes // 8,))
        auto = gdsdata.GDSDataset(path, 64, records, device="cpu", shuffle="auto").stats()["shuffle"]
        print(
            f"| {sample_bytes} | {uniform_gb_s:.2f} | {uniform_routes} | {lanes_gb_s:.2f} | {lanes_routes} | {auto} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

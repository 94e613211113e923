"""Shuffled samples of 30 to 100 KB out of tar and MDS shards, beside a loop of `pread` over the same index.

    python benchmarks/fields.py [--folder F] [--rounds 5]

Writes 256 MB of shards of each kind, once, and reads each of them from the page cache in every round, the rows in
random order, batches of 64 as they are stored. What each row gives was compared with what was written.
"""

import argparse
import io
import json
import os
import random
import statistics
import struct
import sys
import tarfile
import time
import zlib
from pathlib import Path

import numpy as np
import torch

from gdsdata import GDSDataset
from gdsdata.formats import Mds, Tar

SAMPLES, SHARDS, BATCH = 4000, 4, 64


def payloads():
    rng = np.random.default_rng(0)
    for _ in range(SAMPLES):
        yield rng.integers(0, 256, rng.integers(30_000, 100_000), np.uint8).tobytes()


def write_tar(folder):
    contents = payloads()
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:05}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for i in range(SAMPLES // SHARDS):
                content = next(contents)
                member = tarfile.TarInfo(f"{shard:03}{i:05}.jpg")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def write_mds(folder):
    """As MosaicML's writer does: a table of offsets, then samples of one column of bytes behind its size."""
    contents, listed = payloads(), []
    config = b'{"column_names": ["jpg"], "column_encodings": ["bytes"], "column_sizes": [null]}'
    for shard in range(SHARDS):
        samples = [next(contents) for _ in range(SAMPLES // SHARDS)]
        samples = [struct.pack("<I", len(one)) + one for one in samples]
        begin = 4 + 4 * (len(samples) + 1) + len(config)
        offsets = begin + np.cumsum([0, *map(len, samples)])
        name = f"shard.{shard:05}.mds"
        table = struct.pack("<I", len(samples)) + offsets.astype("<u4").tobytes()
        (folder / name).write_bytes(table + config + b"".join(samples))
        raw = {"basename": name, "bytes": int(offsets[-1]), "hashes": {}}
        one = {"column_names": ["jpg"], "column_encodings": ["bytes"], "column_sizes": [None], "format": "mds"}
        one |= {"compression": None, "hashes": [], "raw_data": raw, "samples": len(samples), "version": 2}
        listed.append(one | {"size_limit": 1 << 26, "zip_data": None})
    (folder / "index.json").write_text(json.dumps({"shards": listed, "version": 2}))


def batches_of_gdsdata(folder, shards):
    dataset = GDSDataset(folder, BATCH, shards, device="cpu")
    while True:
        for batch in dataset:
            yield batch["jpg"].values, batch["jpg"].offsets


def batches_of_pread(folder, shards):
    """What one would write by hand: a permutation, one read a sample into a batch that is there."""
    index = shards.index(sorted(map(str, folder.iterdir())))
    descriptors = [os.open(path, os.O_RDONLY) for path in index.paths]
    for epoch in range(1 << 30):
        order = np.random.default_rng(epoch).permutation(len(index))
        for first in range(0, len(order), BATCH):
            files, begins, lengths = index.extents(order[first : first + BATCH])
            offsets = np.cumsum([0, *lengths[:, 0]])
            values = torch.empty(int(offsets[-1]), dtype=torch.uint8)
            view = memoryview(values.numpy())
            places = files.tolist(), begins[:, 0].tolist(), offsets[:-1].tolist(), offsets[1:].tolist()
            for file, begin, at, end in zip(*places, strict=True):
                os.preadv(descriptors[file], [view[at:end]], begin)
            yield values, torch.from_numpy(offsets)


def checksums(batches, samples):
    found = []
    while len(found) < samples:
        values, offsets = next(batches)
        found += [zlib.crc32(one.numpy()) for one in values.split(offsets.diff().tolist())]
    return sorted(found)


def samples_per_s(batches, epochs):
    next(batches)
    count, size_bytes, started = 0, 0, time.perf_counter()
    while count < epochs * SAMPLES:
        values, offsets = next(batches)
        count, size_bytes = count + len(offsets) - 1, size_bytes + values.nbytes
    elapsed = time.perf_counter() - started
    return count / elapsed, size_bytes / elapsed / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("outputs/fields"), help="where shards are kept")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    kinds = {"tar": (Tar(), write_tar), "mds": (Mds(), write_mds)}
    rows, expected = {}, sorted(map(zlib.crc32, payloads()))
    for kind, (shards, write) in kinds.items():
        folder = chosen.folder / kind
        if not folder.exists():
            folder.mkdir(parents=True)
            write(folder)
        for path in folder.iterdir():
            path.read_bytes()
        for name, make in (("gdsdata", batches_of_gdsdata), ("pread loop", batches_of_pread)):
            rows[kind, name] = make(folder, shards)
            if checksums(make(folder, shards), SAMPLES) != expected:
                sys.exit(f"{name} gives other bytes of {kind} than were written")
    found = {key: [] for key in rows}
    for _ in range(chosen.rounds):
        for key in random.sample(list(rows), len(rows)):
            found[key].append(samples_per_s(rows[key], 3))
    print("| shards | row | samples/s | GB/s | x pread loop |\n|---|---|---|---|---|")
    for (kind, name), runs in found.items():
        rate, gb = (statistics.median(part) for part in zip(*runs, strict=True))
        beside = statistics.median(run[0] for run in found[kind, "pread loop"])
        print(f"| {kind} | {name} | {rate:,.0f} | {gb:.2f} | {rate / beside:.2f} |")


if __name__ == "__main__":
    main()

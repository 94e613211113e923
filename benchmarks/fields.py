"""Compare gdsdata with its peers on fields and windows of tokens from the page cache.

    python benchmarks/fields.py [--only tar mds litdata files tokens index] [--folder F]
        [--rounds 5]

The data is made once, 256 MB of each kind. Samples have 30 to 100 KB. They are stored as tar, MDS
and LitData shards and as files of their own. A pair of Megatron's files is read as windows of 1025
and 2049 tokens.

The samples of every row (field_peers.py) are compared with what was written, by checksums. Then all
rows take turns in random order, with a memory copy among them. Peers that are not installed are
listed with the command that installs them:

    pip install webdataset mosaicml-streaming litdata spdl megatron-core nvidia-dali-cuda130
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import statistics
import struct
import sys
import tarfile
import tempfile
import time
import zlib
from pathlib import Path

import field_peers as peers
import numpy as np
from torch.utils import _pytree as pytree
from turns import Turns, processes, take_all

from gdsdata.bench.measure import limits, system
from gdsdata.formats import Tar

SAMPLES, SHARDS = 4000, 4
TOKENS = 128_000_000
SEQ_LENS = (1024, 2048)
EPOCHS, WARM_UP_BATCHES = 3, 32  # of a turn; the warm-up hides batches that a loader had prepared
TURN_S = 20  # the longest turn
LIMIT_S = 0.5

# ------------------------------------------------------------------------------------------------------------- data


def payloads(samples):
    rng = np.random.default_rng(0)
    for _ in range(samples):
        yield rng.integers(0, 256, rng.integers(30_000, 100_000), np.uint8).tobytes()


def shards_of(samples):
    contents = payloads(samples)
    return [[next(contents) for _ in range(samples // SHARDS)] for _ in range(SHARDS)]


def write_tar(folder, samples):
    for number, shard in enumerate(shards_of(samples)):
        write_one_tar(folder / f"{number:05}.tar", shard, f"{number:03}")


def write_one_tar(path, contents, prefix):
    """Write a tar as WebDataset does: fractions in times put a pax header before every member."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for i, content in enumerate(contents):
            member = tarfile.TarInfo(f"{prefix}{i:05}.jpg")
            member.size, member.mtime = len(content), 1.75e9 + 0.5
            archive.addfile(member, io.BytesIO(content))


def packed_shard(samples, config=b""):
    """Pack a shard as MosaicML and LitData do: offsets, the columns, sizes and samples."""
    samples = [struct.pack("<I", len(one)) + one for one in samples]
    begin = 4 + 4 * (len(samples) + 1) + len(config)
    offsets = np.cumsum([begin, *map(len, samples)]).astype("<u4")
    return struct.pack("<I", len(samples)) + offsets.tobytes() + config + b"".join(samples)


def write_mds(folder, samples):
    write_mds_shards(folder, shards_of(samples))


def write_mds_shards(folder, shards):
    columns = {"column_names": ["jpg"], "column_encodings": ["bytes"], "column_sizes": [None]}
    listed = []
    for number, shard in enumerate(shards):
        name, packed = f"shard.{number:05}.mds", packed_shard(shard, json.dumps(columns).encode())
        (folder / name).write_bytes(packed)
        raw = {"basename": name, "bytes": len(packed), "hashes": {}}
        one = {"format": "mds", "compression": None, "hashes": [], "raw_data": raw, "samples": len(shard)}
        listed.append(columns | one | {"version": 2, "size_limit": 1 << 26, "zip_data": None})
    (folder / "index.json").write_text(json.dumps({"shards": listed, "version": 2}))


def write_litdata(folder, samples):
    write_litdata_chunks(folder, shards_of(samples))


def write_litdata_chunks(folder, chunks):
    listed = []
    for number, shard in enumerate(chunks):
        name, packed = f"chunk-0-{number}.bin", packed_shard(shard)
        (folder / name).write_bytes(packed)
        listed.append({"chunk_bytes": len(packed), "chunk_size": len(shard), "dim": None, "filename": name})
    spec = pytree.treespec_dumps(pytree.tree_flatten({"jpg": 0})[1])
    config = {"chunk_bytes": 1 << 26, "chunk_size": None, "compression": None, "data_format": ["bytes"]}
    config |= {"data_spec": spec, "encryption": None, "item_loader": "PyTreeLoader"}
    (folder / "index.json").write_text(json.dumps({"chunks": listed, "config": config, "updated_at": "1"}))


def write_files(folder, samples):
    for i, content in enumerate(payloads(samples)):
        (folder / f"{i:05}.jpg").write_bytes(content)


def documents(tokens):
    """Return uint16 tokens, none of them 0, and the lengths of documents (500 to 5000 tokens)."""
    rng = np.random.default_rng(0)
    lengths = []
    while (left := tokens - sum(lengths)) > 0:
        lengths += np.minimum(rng.integers(500, 5000, left // 5000 + 1), left).tolist()
    return rng.integers(1, 50_000, tokens, np.uint16), np.array(lengths)


def write_tokens(folder, tokens):
    values, lengths = documents(tokens)
    values.tofile(folder / "tokens.bin")
    pointers = 2 * (np.cumsum(lengths) - lengths)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(lengths) + 1)
    arrays = (lengths.astype("<i4"), pointers.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8"))
    (folder / "tokens.idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))


WRITERS = {"tar": write_tar, "mds": write_mds, "litdata": write_litdata, "files": write_files, "tokens": write_tokens}


def made(kind, folder, count):
    """Return the folder of such data, and write it if it does not exist."""
    folder = folder / f"{kind}-{count}"
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        WRITERS[kind](unfinished, count)
        unfinished.rename(folder)
    shutil.rmtree(folder / "cache", ignore_errors=True)  # an interrupted run may have left it
    return folder


# ----------------------------------------------------------------------------------------------------- verification


def windows(tokens, seq_len):
    """Return int64 (n, seq_len + 1): the windows of tokens laid end to end."""
    count = (len(tokens) - 1) // seq_len
    return np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)[: count * seq_len : seq_len].astype(np.int64)


def expected_checksums(row, data):
    """Return the checksum of each sample, computed from the written data alone."""
    if data.kind != "tokens":
        return {zlib.crc32(content) for content in payloads(data.samples)}
    values, lengths = documents(os.path.getsize(data.folder / "tokens.bin") // 2)
    texts = np.split(values, np.cumsum(lengths)[:-1])
    if issubclass(row, peers.MegatronIndexed):
        places = peers.inner_windows(lengths, data.seq_len)
        return {zlib.crc32(texts[i][at : at + data.seq_len + 1].astype(np.int64)) for i, at in places.tolist()}
    if issubclass(row, (peers.OursAsMegatron, peers.MegatronGpt)):
        order = np.arange(len(texts), dtype=np.int32)
        np.random.RandomState(peers.MEGATRON_SEED).shuffle(order)
        values = np.concatenate([texts[i] for i in order])
    return set(map(zlib.crc32, windows(values, data.seq_len)))


def check(made_row, data):
    """Read until every sample has come: one epoch, or two for a row that mixes across its end.

    Raises:
        ValueError: the row gives other bytes than were written, or not all of them.
    """
    expected = expected_checksums(type(made_row), data)
    missing, seen = set(expected), 0
    with contextlib.closing(made_row.batches()) as batches:
        while missing:
            batch = next(batches)
            found = set(map(zlib.crc32, peers.samples_of(batch)))
            if not found <= expected:
                raise ValueError(f"{len(found - expected)} samples of a batch are not what was written")
            missing -= found
            seen += peers.count_of(batch)
            if seen > 3 * len(expected):
                raise ValueError(f"{len(missing)} of {len(expected)} samples did not come in three epochs")


# ------------------------------------------------------------------------------------------------------------- rows


def prepared(place, data):
    """Make and check the row, in its own process. Returns the function that takes a turn."""
    made_row = peers.ROWS[data.kind][place](data)
    check(made_row, data)
    return lambda: (samples_per_s(made_row, data), made_row.served())


def samples_per_s(row, data):
    with contextlib.closing(row.batches()) as batches:
        for _ in range(WARM_UP_BATCHES):
            next(batches)
        count, started = 0, time.perf_counter()
        while count < EPOCHS * data.samples and time.perf_counter() - started < TURN_S:
            count += peers.count_of(next(batches))
        return count / (time.perf_counter() - started)


def measured(data, title, rounds, sample_bytes):
    """Print the table of one kind."""
    rows = peers.ROWS[data.kind]
    turns = [Turns(row.name, row.package, prepared, place, data).made() for place, row in enumerate(rows)]
    copies, share = [], 1.0
    for _ in range(rounds):
        share = min(share, system.warm(data.files))
        take_all(turns)
        copies.append(limits.memory_copy(LIMIT_S)["gb_per_s"])
    for turn in turns:
        turn.end()
    shutil.rmtree(data.folder / "cache", ignore_errors=True)
    copy = statistics.median(copies)
    print(f"\n{title}: {share:.0%} in the page cache; a memory copy by a thread a core moves {copy:.1f} GB/s\n")
    print("| row | samples/s | lowest, highest | GB/s as stored | of the copy | gdsdata is | served by |")
    print("|---|---|---|---|---|---|---|")
    ours = median_rate(turns[0]) if rows[0] is peers.Ours and turns[0].results else None
    for turn in turns:
        print(table_row(turn, ours, sample_bytes, copy), flush=True)


def median_rate(turn):
    return statistics.median(rate for rate, _ in turn.results)


def table_row(turn, ours, sample_bytes, copy):
    if turn.error is not None:
        return f"| {turn.name} | {turn.why_not} | | | | | |"
    rate, rates = median_rate(turn), [rate for rate, _ in turn.results]
    gb_per_s = rate * sample_bytes / 1e9
    beside = f"{ours / rate:.2f} x" if ours else ""
    cells = [turn.name, f"{rate:,.0f}", f"{min(rates):,.0f}, {max(rates):,.0f}", f"{gb_per_s:.2f}"]
    served = {path for _, served in turn.results for path in served}
    return f"| {' | '.join(cells)} | {gb_per_s / copy:.2f} | {beside} | {', '.join(sorted(served))} |"


# ------------------------------------------------------------------------------------------------ the index of a tar


def index_s(path, kept_in):
    started = time.perf_counter()
    index = Tar(index_cache=kept_in).index([path])
    elapsed = time.perf_counter() - started
    return elapsed, (index.begin_bytes.tolist(), index.length_bytes.tolist())


def tarfile_index_s(path):
    started = time.perf_counter()
    with tarfile.open(path, "r:") as archive:
        members = [(member.offset_data, member.size) for member in archive]
    elapsed = time.perf_counter() - started
    return elapsed, tuple([[value] for value in column] for column in zip(*members, strict=True))


def measured_index(folder, samples, rounds):
    """Print how long it takes to index a tar of all samples, each time in a new process."""
    path = folder / f"index-{samples}.tar"
    if not path.exists():
        write_one_tar(path, payloads(samples), "")
    share = system.warm([path])
    with tempfile.TemporaryDirectory(dir=folder) as kept_in:
        rows = {
            "gdsdata, its headers": (index_s, path, None),
            "gdsdata, kept of the last time": (index_s, path, kept_in),
            "Python's tarfile": (tarfile_index_s, path),
        }
        found = {name: [] for name in rows}
        with processes.Pool(1, maxtasksperchild=1) as fresh:
            fresh.apply(*call(rows["gdsdata, kept of the last time"]))
            for _ in range(rounds):
                for name in random.sample(list(rows), len(rows)):
                    found[name].append(fresh.apply(*call(rows[name])))
    extents = [extent for runs in found.values() for _, extent in runs]
    if any(extent != extents[0] for extent in extents):
        sys.exit(f"the indexes of {path} differ")
    size = os.path.getsize(path)
    title = f"Index of one tar of {size / 1e6:.0f} MB, {samples} members with pax headers"
    print(f"\n{title}: {share:.0%} in the page cache\n")
    print("| row | ms | lowest, highest |\n|---|---|---|")
    for name, runs in found.items():
        ms = sorted(1000 * seconds for seconds, _ in runs)
        print(f"| {name} | {statistics.median(ms):.1f} | {ms[0]:.1f}, {ms[-1]:.1f} |")


def call(row):
    function, *arguments = row
    return function, tuple(str(one) if isinstance(one, Path) else one for one in arguments)


# ------------------------------------------------------------------------------------------------------------- main


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("outputs/fields"), help="folder of the data")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[*WRITERS, "index"], help="kinds of data, and index")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    machine, versions = system.machine(), system.versions()
    print(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_before']:.1f}, torch {versions['torch']}")
    for kind in chosen.only:
        if kind == "index":
            measured_index(chosen.folder, chosen.samples, chosen.rounds)
        elif kind == "tokens":
            folder = made(kind, chosen.folder, chosen.tokens)
            for seq_len in SEQ_LENS:
                data = peers.Data(kind, folder, (chosen.tokens - 1) // seq_len, seq_len)
                measured(data, f"Windows of {seq_len + 1} tokens", chosen.rounds, 2 * (seq_len + 1))
        else:
            folder = made(kind, chosen.folder, chosen.samples)
            sample_bytes = sum(map(len, payloads(chosen.samples))) / chosen.samples
            data = peers.Data(kind, folder, chosen.samples)
            measured(data, f"{kind}, {chosen.samples} samples", chosen.rounds, sample_bytes)


if __name__ == "__main__":
    main()

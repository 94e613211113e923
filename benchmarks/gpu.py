"""Measure the GPU's figures in one run, beside their limits and peers.

    python benchmarks/gpu.py [--small] [--only NAME ...]

Runs `python -m gdsdata.bench` for each line of the table, with up to 8 GiB of data on the disk and
in /dev/shm. One table shows what was asked for and what was measured; it is written beside the
reports. Needs a GPU and the package's `bench` extra, and uses the peers that are installed. 8 GiB
take about ten minutes. --small takes 1 GiB; such figures mean less. With --only, load-memory needs
load-disk.
"""

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

GIB = 2**30
HEAD = ["work", "asked", "measured", "cpu-s/GB", "served by", "first batch, ms"]
COPY = "of the pinned copy"
IOPS = "of the disk's IOPS"
RECORDS = ["data=tokens", "data.seq_len=2047", "data.stride=2048", "case.batch_size=2048", "case.cold_samples=393216"]
VOLUMES = ["data=npy", "data.shape=[128,64,64]", "case.batch_size=32", "case.epochs=10"]


def lines(size_bytes, in_memory):
    """List (name, the bench's arguments, [(title, row, cache, unit, asked, asked CPU)])."""
    load_rows = "case.rows=[gdsdata,kvikio,kvikio_posix,instanttensor_buffered,safetensors]"
    loader_rows = "case.rows=[gdsdata,gdsdata_pinned,dataloader_batched]"
    volume_rows = "case.rows=[gdsdata,gdsdata_pinned,dali_mmap,read_ring_8]"
    return [
        (
            "load-disk",
            ["case=load", f"data.size_bytes={size_bytes}", load_rows],
            [
                ("one file in ext4's page cache to the GPU", "gdsdata", "warm", COPY, 0.95, 0.17),
                ("the same file, cold", "gdsdata", "cold", "of raw O_DIRECT", 0.97, 0.05),
                ("the cached file against kvikio's defaults", "gdsdata", "warm", "of row kvikio", 8, None),
            ],
        ),
        (
            "load-memory",
            ["case=load", f"data.path={in_memory}", load_rows, "case.cache=[warm]"],
            [("the same file in tmpfs", "gdsdata", "warm", COPY, 0.95, 0.17)],
        ),
        (
            "records",
            [*RECORDS, f"data.size_bytes={size_bytes // 2}", loader_rows, "case.dtypes=[int64]"],
            [
                ("shuffled records of 2048 uint16, as int64", "gdsdata", "warm", "GB/s", 30, None),
                ('the same, residency="pinned"', "gdsdata_pinned", "warm", "GB/s", 45, 0.03),
                ("the same records, cold", "gdsdata", "cold", IOPS, 0.95, None),
            ],
        ),
        (
            "volumes",
            [*VOLUMES, f"data.size_bytes={size_bytes // 2}", volume_rows],
            [
                ("shuffled npy volumes of 2 MiB, batch 32", "gdsdata", "warm", COPY, 0.9, None),
                ('the same, residency="pinned"', "gdsdata_pinned", "warm", COPY, None, None),
                ("the same volumes, cold", "gdsdata", "cold", "of raw O_DIRECT", None, None),
            ],
        ),
    ]


def run(folder, name, arguments, most_s=None):
    """Run the bench once, for at most `most_s`. Returns the results of complete tables, or None."""
    command = [sys.executable, "-m", "gdsdata.bench", *arguments, f"hydra.run.dir={folder / name}"]
    print("\n$ " + " ".join(command[1:]), flush=True)
    found = folder / name / "results.json"
    found.unlink(missing_ok=True)
    with subprocess.Popen(command) as bench:
        try:
            bench.wait(most_s)
        except subprocess.TimeoutExpired:
            print(f"{name}: broken off after {most_s:.0f} s", flush=True)
            bench.send_signal(signal.SIGINT)  # the bench ends its rows and removes its files
    if bench.returncode != 0:
        print(f"{name}: the bench ended with {bench.returncode}", flush=True)
    return json.loads(found.read_text()) if found.exists() else None


def find(results, key, cache):
    rows = (row for row in results["rows"] if row["key"] == key and row["cache"] == cache and not row["error"])
    return next(rows, None)


def table_row(results, title, key, cache, what, asked, asked_cpu):
    row = find(results, key, cache)
    if row is None:
        return [title, "not measured", "", "", "", ""]
    rate, cpu = row["gb_per_s"]["median"], row["cpu_s_per_gb"]["median"]
    if what == "GB/s":
        measured = f"{rate:.1f} GB/s"
    elif what.startswith("of row "):
        peer = find(results, what.removeprefix("of row "), cache)
        measured = f"{rate / peer['gb_per_s']['median']:.1f} x" if peer else "not measured"
    elif what == IOPS:
        measured = f"{row['samples_per_s']['median'] / most_random_reads(results):.3f} {what}"
    else:
        measured = f"{row['ratio_to_limit']:.3f} {what}" if row.get("ratio_to_limit") else "no limit"
    wanted = "" if asked is None else f"{asked} {what}"
    wanted += "" if asked_cpu is None else f", {asked_cpu} cpu-s/GB"
    first = row.get("first_batch_ms", {}).get("median")
    latency = "" if first is None else f"{first:.1f}"
    return [title, wanted, f"{measured} ({rate:.1f} GB/s)", f"{cpu:.3f}", row["path"], latency]


def most_random_reads(results):
    """Return the most records a second of plain O_DIRECT reads, over all measured depths."""
    limits = results["limits"]["tokens"]["int64, cold"]
    return max(found.get("per_s", 0) for name, found in limits.items() if name.startswith("direct_random"))


def first_batches(results):
    """Time a data set's first batch of records, with an engine and a warm CUDA context."""
    import torch

    import gdsdata
    from gdsdata.bench.measure import system

    data, limits = results["data"]["tokens"], results["limits"]["tokens"]
    path, batch, record = data["first_file"], data["batch_size"], data["sample_bytes"]
    warm_s = batch * record / (limits["int64, warm"]["pinned_copy"]["gb_per_s"] * 1e9)
    cold_s = batch / most_random_reads(results)

    def dataset(seed=0, **arguments):
        records, reading = gdsdata.formats.Records("u2", (record // 2,)), gdsdata.Reading(**arguments)
        return gdsdata.GDSDataset(path, batch, records, seed=seed, device="cuda", reading=reading)

    rows = []
    past_the_cache = gdsdata.EngineOptions(direct="always")
    system.warm([path])
    for title, arguments, needed_s in (
        (f"first batch of {batch} records", {}, warm_s),
        ('the same, residency="pinned"', {"residency": "pinned"}, warm_s),
        ("the same, past the page cache", {"options": past_the_cache}, cold_s),
    ):
        kept = dataset(**arguments)  # keeps the engine
        next(iter(kept))
        while not kept.stats().get("residency", {"ready": True})["ready"]:
            time.sleep(0.01)  # lets the process become quiet before it is timed
        seconds = []
        for seed in range(7):
            fresh = dataset(seed=seed, **arguments)
            torch.cuda.synchronize()
            started = time.perf_counter()
            next(iter(fresh))
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        first = statistics.median(seconds) * 1000
        more = f"{first - needed_s * 1000:.1f} ms more than its bytes need ({needed_s * 1000:.1f})"
        served = ", ".join(route for route, count in kept.stats()["engine"]["bytes"].items() if count)
        rows.append([title + ", engine and data set made", "30 ms more", more, "", served, f"{first:.1f}"])
    return rows


def write(folder, head, rows):
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(text + "\n")
    print("\n" + text, flush=True)


def arguments_of(parser, names):
    """Parse the options. Settings of the bench may follow the names behind --only."""
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help=f"any of {', '.join(names)}")
    parser.add_argument("bench", nargs="*", help="settings for each bench, such as case.repeats=2")
    chosen = parser.parse_args()
    chosen.bench += [word for word in chosen.only if "=" in word]
    chosen.only = [word for word in chosen.only if "=" not in word] or names
    if unknown := [name for name in chosen.only if name not in names]:
        parser.error(f"--only {' '.join(unknown)}: use {', '.join(names)}")
    return chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="1 GiB of data instead of 8")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"), help="where reports and table.md are written")
    parser.add_argument("--memory-folder", type=Path, default="/dev/shm/gdsdata-bench", help="a folder in tmpfs")
    chosen = arguments_of(parser, ["load-disk", "load-memory", "records", "volumes"])
    rows = []
    in_memory = chosen.memory_folder / "model.safetensors"
    for name, arguments, wanted in lines(GIB if chosen.small else 8 * GIB, in_memory):
        if name not in chosen.only:
            continue
        results = run(chosen.out, name, [*arguments, "device=cuda", *chosen.bench])
        if results and name == "load-disk":
            chosen.memory_folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(results["data"]["safetensors"]["first_file"], in_memory)
        rows += [table_row(results, *want) for want in wanted] if results else []
        rows += first_batches(results) if results and name == "records" else []
        write(chosen.out, HEAD, rows)


if __name__ == "__main__":
    main()

"""Measure what several ranks of one host get when each byte is read once.

    python benchmarks/once.py --ranks 4 [--device cuda] [--section load dcp batches hsdp records]
        [--size-gib 8 64] [--cache warm cold] [--rounds 3] [--folder F] [--json FILE]

- `load`: a file of safetensors to all ranks, by `case=replicas` of the bench. `--rows` chooses
  its rows, peers among them. `dcp` is the same from a replicated checkpoint of DCP.
- `batches`: all ranks take the same batches of volumes (tensor-parallel peers), by the same case.
- `hsdp`: DCP restores a model in two replicas, each sharded over half of the ranks.
- `records`: each rank has a data set of its own with all shuffled records of 4 KiB, in 1 file and
  in 1024.

A rank's GB/s (1e9 bytes) are the bytes that it got, by the time from a barrier to the end of the
last rank. "In sum" is that of all ranks. The limit `pinned_copies` is that of all GPUs at once. The
first line has copies within the host's memory, by all cores. CPU is user and system time of all
ranks, by the GB that all of them got. All bytes are compared with what was written: in `hsdp` every
time, elsewhere before the turns. Turns of `records` are compared by their numbers. Rows take turns.
Cells are medians, with the lowest and the highest. A run that is stopped (Ctrl-C) loses the section
that it is in.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import once_rows
import torch
from frameworks import cell, table

from gdsdata.bench.cases.replicas.ranks import Ranks
from gdsdata.bench.cases.replicas.settings import ReplicasSettings
from gdsdata.bench.measure import limits, system

GB, GIB = 1e9, 1 << 30
FILES = (1, 1024)
RECORDS_BYTES = 4 * GIB
OURS = ("gdsdata", "gdsdata_alone")
LIMIT_S = 2.0
PATIENCE_S = 280  # with a turn, or with making a row of its own
COLUMNS = ("row", "GB/s a rank", "GB/s in sum", "storage x", "CPU s/GB", "GPU peak GB", "host peak MB", "path")


def by_bench(chosen, work, size_bytes, cache, rows):
    """Run a table of case=replicas, and return its results."""
    with tempfile.TemporaryDirectory() as run:
        command = [sys.executable, "-m", "gdsdata.bench", "case=replicas", f"case.ranks={chosen.ranks}"]
        command += [f"device={chosen.device}", f"data.size_bytes={size_bytes}", f"data.folder={chosen.folder}"]
        command += [f"case.work=[{work}]", f"case.cache=[{cache}]", f"case.repeats={chosen.rounds}"]
        command += [f"case.rows=[{','.join(rows)}]", f"hydra.run.dir={run}"]
        ran = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if ran.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {ran.returncode}: {ran.stderr[-2000:]}")
        return json.loads((Path(run) / "results.json").read_text())


def print_bench(results, work, ranks):
    """Print the table of results of the bench."""
    found = []
    for row in results["rows"]:
        if row["error"]:
            found.append((row["name"], row["error"]))
            continue
        rates = [run["bytes"] / run["seconds"] / GB for run in row["runs"]]
        found.append((
            row["name"],
            [
                cell(rates, 1),
                cell([rate * ranks for rate in rates], 0),
                cell([row["storage_x"]["median"]]),
                cell([row["cpu_s_per_gb"]["median"] / ranks], 3),
                cell([row["device_peak_bytes"] / GB], 1),
                cell([row["peak_bytes"] / 1e6], 0),
                row["path"],
            ],
        ))  # fmt: skip
    table(COLUMNS, found)
    for name, limit in next(iter(results["limits"][work].values())).items():
        print(f"limit {name}: {limit.get('gb_per_s', float('nan')):.1f} GB/s")


def by_ranks(chosen, kind, size_bytes, cache, **more):
    """Take turns of the rows of a class of once_rows, and return {row: turns}."""
    settings = ReplicasSettings(ranks=chosen.ranks, patience_s=PATIENCE_S)
    ranks = Ranks(sys.stderr.buffer, settings, chosen.device)
    try:
        ranks.ask("load", row=f"once_rows:{kind.capitalize()}", key=kind, source=None, settings=settings, engine={})
        rows, files = ranks.ask("make", folder=str(chosen.folder), size_bytes=size_bytes, **more)
        turns = {row: [] for row in rows}
        for _ in range(chosen.rounds):
            for row in random.sample(rows, len(rows)):
                (system.drop if cache == "cold" else system.warm)(files)
                turns[row].append(ranks.run(row=row))
    finally:
        ranks.end()
    return {"files_bytes": sum(map(os.path.getsize, files)), "turns": turns}


def print_ranks(results, ranks):
    """Print the table of results of `by_ranks`."""
    found = []
    for row, turns in results["turns"].items():
        rates = [turn["bytes"] / turn["seconds"] / GB for turn in turns]
        found.append((
            row,
            [
                cell(rates, 1),
                cell([rate * ranks for rate in rates], 1),
                cell([turn["storage_bytes"] / results["files_bytes"] for turn in turns]),
                cell([turn["cpu_seconds"] / (turn["bytes"] * ranks / GB) for turn in turns], 3),
                cell([max(turn["device_peak_bytes"] for turn in turns) / GB], 1),
            ],
        ))  # fmt: skip
    table(COLUMNS[:6], found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = ("load", "dcp", "batches", "hsdp", "records")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--section", nargs="*", choices=sections, default=list(sections))
    parser.add_argument("--size-gib", type=float, nargs="*", default=[8], help="of checkpoints and volumes")
    parser.add_argument("--cache", nargs="*", choices=["warm", "cold"], default=["warm", "cold"])
    parser.add_argument("--rows", nargs="*", default=list(OURS), help="of case=replicas, such as all_gather")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records-bytes", type=int, default=RECORDS_BYTES)
    parser.add_argument("--folder", type=Path, default=Path("outputs/once"), help="folder of the data")
    parser.add_argument("--json", type=Path, help="file for all results")
    chosen = parser.parse_args()
    if chosen.ranks < 2 or chosen.ranks % 2:
        parser.error("--ranks must be an even number, 2 or more")
    chosen.folder.mkdir(parents=True, exist_ok=True)
    ours = str(Path(once_rows.__file__).parent)  # for the ranks
    os.environ["PYTHONPATH"] = os.pathsep.join([ours, *filter(None, [os.environ.get("PYTHONPATH")])])
    cores = len(os.sched_getaffinity(0))
    name = torch.cuda.get_device_name(0) if chosen.device == "cuda" else "the CPU"
    memory = limits.memory_copy(LIMIT_S, most_threads=cores)["gb_per_s"]
    print(f"{chosen.ranks} ranks on {name}, {cores} cores; memory: {memory:.1f} GB/s copied by all of them")
    everything = {"machine": system.machine(), "device": name, "memory_gb_per_s": memory, "command": sys.argv[1:]}

    def keep(title, results):
        everything[title] = results
        if chosen.json:
            chosen.json.write_text(json.dumps(everything))

    for section in chosen.section:
        if section == "records":
            for files in FILES:
                title = f"records of 4 KiB, shuffled, in {files} file(s), warm"
                print(f"\n## {title}", flush=True)
                keep(title, by_ranks(chosen, section, chosen.records_bytes, "warm", files=files))
                print_ranks(everything[title], chosen.ranks)
            continue
        for size_bytes in [int(one * GIB) for one in chosen.size_gib]:
            for cache in chosen.cache:
                title = f"{section}, {system.size_text(size_bytes)}, {cache}"
                print(f"\n## {title}", flush=True)
                if section == "hsdp":
                    keep(title, by_ranks(chosen, section, size_bytes, cache))
                    print_ranks(everything[title], chosen.ranks)
                    continue
                work = {"load": "safetensors", "batches": "volumes"}.get(section, section)
                rows = chosen.rows if section == "load" else OURS
                keep(title, by_bench(chosen, work, size_bytes, cache, rows))
                print_bench(everything[title], work, chosen.ranks)


if __name__ == "__main__":
    main()

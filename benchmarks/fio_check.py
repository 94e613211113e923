"""Compare case=io with fio: same file, size, depth and direction, with O_DIRECT, in turns.

    python benchmarks/fio_check.py [--folder F] [--rounds 7] [--seconds 1.5] [--io-depth 32]
        [--json FILE]

Prints medians and their ratios. fio (apt-get install fio) runs its io_uring engine in three ways:

- with its defaults;
- in huge pages, as case=io's buffers are;
- in huge pages, and submitting and reaping several transfers at a time, as batches of case=io do.

Sequential transfers have 1 MiB, random ones 4 KiB. Writes go to a new file of allocated space, and
both times include one fsync at the end. The bytes of case=io are compared between the turns.

A fourth row has two more calls than the depth. One worker gives the disk no more than the depth, so
later calls wait in the engine, as batches do that a data set reads ahead. Its latency includes that
wait.

`at the disk` is the mean number of requests that the disk had at a time: the kernel's sum of their
durations, divided by the time of the turn.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from gdsdata.bench.cases.io.case import Transfers
from gdsdata.bench.cases.io.settings import IoSettings
from gdsdata.bench.data.pattern import Pattern
from gdsdata.bench.data.transfers import Work, new_file
from gdsdata.bench.harness.process import RowFailed, RowProcess
from gdsdata.bench.measure import system

ROW = "gdsdata.bench.cases.io.row:IoRow"
SIZES = {"read": 2**20, "write": 2**20, "randread": 4096, "randwrite": 4096}
OURS = {  # {name: (row of case=io, engine settings)}; docs/design-decisions.md gives the reasons
    "gdsdata_batch": ("gdsdata_batch", {}),
    "gdsdata_batch, engine.segment_bytes=8388608": ("gdsdata_batch", {"segment_bytes": 8 * 2**20}),
    "gdsdata_batch, engine.workers=4": ("gdsdata_batch", {"workers": 4}),
    "pread": ("pread", {}),
}
TWO_MORE_CALLS = "gdsdata_batch, two more calls"
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # glibc 2.35: malloc calls madvise(MADV_HUGEPAGE)
BESIDE = "fio, huge pages"  # the divisor of the ratios
BATCH_CALLS = 4
GIB = 2**30


def fio_ways(depth):
    """Return {name: (options, environment)}."""
    share = max(1, depth // BATCH_CALLS)
    batches = [f"--iodepth_batch_submit={share}", f"--iodepth_batch_complete_min={share}"]
    aligned = ["--iomem_align=2M"]
    return {
        "fio": ([], {}),
        BESIDE: (aligned, HUGE_PAGES),
        f"fio, huge pages, by {share}": ([*aligned, *batches], HUGE_PAGES),
    }


def run_fio(work, options, environment):
    """Take one turn of fio. Returns {gib_per_s, iops, latency_us, p99_us, cpu_s (a second)}."""
    command = [
        "fio", "--name=turn", f"--filename={work.path}", f"--size={work.file_bytes}", f"--rw={work.direction}",
        f"--bs={work.io_bytes}", f"--iodepth={work.depth}", "--ioengine=io_uring", "--direct=1", "--time_based",
        f"--runtime={round(work.duration_s * 1e6)}us", "--fallocate=none", "--end_fsync=1", f"--randseed={work.seed}",
        "--output-format=json", *options,
    ]  # fmt: skip
    before = requests_s(work.path)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120)
    taken = requests_s(work.path) - before
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr or done.stdout}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    found = job["write" if work.writes else "read"]
    return {
        "gib_per_s": found["bw_bytes"] / GIB,
        "iops": found["iops"],
        "latency_us": found["lat_ns"]["mean"] / 1e3,
        "p99_us": found["clat_ns"]["percentile"]["99.000000"] / 1e3,
        "cpu_s": (job["usr_cpu"] + job["sys_cpu"]) / 100,
        "at_the_disk": taken / (found["runtime"] / 1e3),
    }


def ours(depth):
    return OURS | {TWO_MORE_CALLS: ("gdsdata_batch", {"workers": 1, "queue_depth": depth})}


def with_two_more_calls(work):
    calls = work.batch_calls + 2
    return dataclasses.replace(work, batch_calls=calls, depth=calls * max(1, work.depth // work.batch_calls))


def run_ours(process, work):
    """Take one turn of a row of case=io, and compare its bytes."""
    process.ask("prepare", touched_bytes=work.io_bytes * work.depth)
    before = requests_s(Path(work.path).parent)
    found = process.run(work=work)
    taken = requests_s(Path(work.path).parent) - before
    process.ask("compare")
    return {
        "gib_per_s": found["bytes"] / found["seconds"] / GIB,
        "iops": found["iops"],
        "latency_us": found["latency_us"],
        "p99_us": found["p99_us"],
        "cpu_s": (found["cpu_user_s"] + found["cpu_system_s"]) / found["seconds"],
        "at_the_disk": taken / found["seconds"],
    }


def requests_s(path):
    """Sum the seconds of all requests since boot to the disk that holds ``path``, or return nan.

    Source: Linux's Documentation/block/stat.rst.
    """
    device = os.stat(path).st_dev
    try:
        fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    except FileNotFoundError:
        return float("nan")
    return (int(fields[3]) + int(fields[7])) / 1e3  # reads and writes


def take_turn(name, work, processes):
    """Take one turn, on a file in the state that all rows find it in."""
    if not work.writes:
        system.drop([work.path])
    try:
        if name == TWO_MORE_CALLS:
            work = with_two_more_calls(work)
        if name in processes:
            return run_ours(processes[name], work)
        if work.writes:
            os.close(new_file(work.path, work.file_bytes))
        return run_fio(work, *fio_ways(work.depth)[name])
    finally:
        if work.writes:
            Path(work.path).unlink(missing_ok=True)


def compared(direction, arguments, folder, processes):
    """Take all turns of one direction. Returns {row: [result of each turn]}."""
    path = folder / ("written.bin" if direction.endswith("write") else "read.bin")
    work = Work(
        str(path), direction, "direct" if direction.endswith("write") else "cold", arguments.file_bytes,
        SIZES[direction], arguments.io_depth, arguments.io_depth, BATCH_CALLS, arguments.seconds, 0,
    )  # fmt: skip
    names = [*fio_ways(work.depth), *processes]
    turns = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in random.sample(names, len(names)):
            turns[name].append(take_turn(name, work, processes))
    return turns


def show(direction, depth, turns):
    size = "1 MiB" if SIZES[direction] == 2**20 else "4 KiB"
    print(f"\n## {direction}, {size}, {depth} in flight, O_DIRECT, medians of {len(turns['fio'])} turns\n")
    print("| | GiB/s | least | most | IOPS | latency us | p99 us | CPU | at the disk | x fio, huge pages |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    middle = {
        name: {key: statistics.median(turn[key] for turn in ones) for key in ones[0]} for name, ones in turns.items()
    }
    for name, found in middle.items():
        rates = [turn["gib_per_s"] for turn in turns[name]]
        print(
            f"| {name} | {found['gib_per_s']:.3f} | {min(rates):.3f} | {max(rates):.3f} | {found['iops']:,.0f} | "
            f"{found['latency_us']:,.0f} | {found['p99_us']:,.0f} | {found['cpu_s']:.0%} | "
            f"{found['at_the_disk']:.1f} | {found['gib_per_s'] / middle[BESIDE]['gib_per_s']:.3f} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary folder)")
    parser.add_argument("--file-bytes", type=int, default=512 * 2**20)
    parser.add_argument("--io-depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a turn")
    parser.add_argument("--only", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--json", type=Path, help="every turn's figures")
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio_check: there is no fio in PATH; it comes with `apt-get install fio`")
    print(f"fio: {subprocess.run(['fio', '--version'], capture_output=True, text=True).stdout.strip()}")
    print(f"machine: {system.machine()}")
    found = {}
    with (
        tempfile.TemporaryDirectory(prefix="fio-check-", dir=arguments.folder) as folder,
        open(os.devnull, "wb") as log,
    ):
        folder = Path(folder)
        Pattern(0).write_file(folder / "read.bin", arguments.file_bytes)
        source = Transfers("read", "read", "cpu", str(folder / "read.bin"), arguments.file_bytes)
        processes = {name: RowProcess(log) for name in ours(arguments.io_depth)}
        try:
            for name, (key, engine) in ours(arguments.io_depth).items():
                settings = {"settings": IoSettings(), "engine": engine, "device_name": "cpu"}
                processes[name].ask("load", row=ROW, key=key, source=source, **settings)
            for direction in arguments.only:
                found[direction] = compared(direction, arguments, folder, processes)
                show(direction, arguments.io_depth, found[direction])
        except (RowFailed, RuntimeError, OSError) as failed:
            sys.exit(f"fio_check: {failed}")
        finally:
            for process in processes.values():
                process.end()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

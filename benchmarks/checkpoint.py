"""Measure saving and loading of checkpoints, beside the figures that are asked for.

    python benchmarks/checkpoint.py [--small] [--only NAME ...]

Runs `python -m gdsdata.bench case=checkpoint`, one kind of work at a time. The state on a GPU has 8
GiB, the one on the CPU 2 GiB. The table is written anew after each kind of work. Needs the
package's `bench` extra, safetensors, and 40 GiB of disk. Settings of the bench, such as
data.folder=, follow the options. Work that has not been measured after --seconds is left out.
--small takes 1 GiB and 512 MiB; such figures mean less.
"""

import argparse
import time
from pathlib import Path

from gpu import GIB, arguments_of, find, run, write

HEAD = ["work", "asked", "measured", "GB/s", "cpu-s/GB", "peak MB", "served by"]
OURS = {"gdsdata_pt": ".pt", "gdsdata_safetensors": ".safetensors", "gdsdata_dcp": "DCP"}
RAW_WRITE, RAW_READ = "of the raw O_DIRECT write, synced", "of the raw O_DIRECT read"
LINK, MAPPED = "of the link", "of the mapped file, copied"
STALL, STEPS = "x bytes / link", "x a step without"  # the measured figure may be at most this


def lines(gpu_bytes, cpu_bytes):
    """List (name, the bench's arguments, [(title, row, table, unit, asked)])."""

    def of_ours(what, cache, unit, asked):
        return [(f"{what}, {name}", key, cache, unit, asked) for key, name in OURS.items()]

    def arguments(device, state_bytes, work, *more):
        rows = f"case.rows=[{','.join([*OURS, *more])}]"
        case = ["case=checkpoint", f"case.state_bytes={state_bytes}", f"case.work=[{work}]", "case.repeats=2"]
        return [*case, f"device={device}", rows]

    stall = [
        ("stall of an asynchronous save from a GPU", "gdsdata_async", "staged", STALL, 1.1),
        ("a training step while it is written", "gdsdata_async", "staged", STEPS, 1.05),
    ]
    return [
        (
            "gpu-save",
            arguments("cuda", gpu_bytes, "save", "torch", "dcp"),
            of_ours("durable save from a GPU to a new file", "new", RAW_WRITE, 0.95),
        ),
        (
            "gpu-load",
            arguments("cuda", gpu_bytes, "load", "safetensors", "torch_mmap", "instanttensor_buffered"),
            [
                *of_ours("load to a GPU, warm", "warm", LINK, 0.93),
                *of_ours("load to a GPU, cold", "cold", RAW_READ, 0.97),
            ],
        ),
        (
            "gpu-async",
            arguments("cuda", gpu_bytes, "async", "gdsdata_async", "gdsdata_async_device", "dcp_async"),
            stall,
        ),
        (
            "cpu-save",
            arguments("cpu", cpu_bytes, "save", "torch"),
            of_ours("durable save from the CPU to a new file", "new", RAW_WRITE, 0.93),
        ),
        (
            "cpu-load",
            [*arguments("cpu", cpu_bytes, "load", "safetensors"), "case.cache=[warm]"],
            of_ours("load to the CPU, warm", "warm", MAPPED, 1.0),
        ),
    ]


def ratio_of(row, unit):
    if unit == STEPS:
        return row["step_beside_s"]["median"] / row["step_s"]["median"]
    if unit == MAPPED:
        return row["ratio_to_mapped"]
    ratio = row["ratio_to_limit"]
    return 1 / ratio if unit == STALL and ratio else ratio


def table_row(results, title, key, cache, unit, asked):
    wanted = f"{'at most' if unit in (STALL, STEPS) else 'at least'} {asked} {unit}"
    row = results and find(results, key, cache)
    if not row:
        return [title, wanted, "not measured", "", "", "", ""]
    ratio = ratio_of(row, unit)
    measured = f"{ratio:.3f} {unit}" if ratio else "no limit"
    rate, cpu, peak = row["gb_per_s"]["median"], row["cpu_s_per_gb"]["median"], row["peak_bytes"] / 1e6
    return [title, wanted, measured, f"{rate:.2f}", f"{cpu:.3f}", f"{peak:.0f}", row["path"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="1 GiB on the GPU and 512 MiB on the CPU")
    parser.add_argument("--seconds", type=float, default=480, help="limit of the whole run; later work is left out")
    parser.add_argument("--out", type=Path, default=Path("outputs/checkpoint"), help="where reports and table.md go")
    chosen = arguments_of(parser, ["gpu-save", "gpu-load", "gpu-async", "cpu-save", "cpu-load"])
    ends, rows = time.monotonic() + chosen.seconds, []
    for name, arguments, wanted in lines(*((GIB, GIB // 2) if chosen.small else (8 * GIB, 2 * GIB))):
        if name not in chosen.only:
            continue
        left_s = ends - time.monotonic()
        results = run(chosen.out, name, [*arguments, *chosen.bench], left_s) if left_s > 0 else None
        rows += [table_row(results, *want) for want in wanted]
        write(chosen.out, HEAD, rows)


if __name__ == "__main__":
    main()

"""Measure gdsdata in frameworks beside their own ways.

    python benchmarks/frameworks.py [--device cuda] [--section load checkpoint train] [--cold]
        [--size-gb 12] [--rounds 3] [--json FILE]

- `load`: a model like Llama in bfloat16 and three shards, by transformers and by hand. The limit is
  a copy of as many bytes from pinned memory, or with `--cold` a read of them with O_DIRECT. The
  first load of a process and the next one are timed, but not imports and the CUDA context.
- `checkpoint`: models in float32 with AdamW, a third as large, saved while they train. A stall is
  the time that the call took from training. "Complete" is a save that its process has written, "on
  storage" one whose files were synced after that. Loads are into the Trainer's model and optimizer.
- `train`: files of 2 MiB, shuffled, from the page cache, in steps of a given length that wait for
  their batch (see training.py). The ceiling is the same Trainer with a batch that stays on the
  device. Idle is the share of the loop in which the device takes no step.

Rows take turns in random order, each in a process of its own. All that they read and wrote is
verified. Cells are medians, with the lowest and the highest if there are several. A run that is
stopped (SIGTERM, as of `timeout`, or Ctrl-C) prints the table of the turns that it took.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import framework_loads as loads
import framework_saves as saves
import framework_steps as steps
import torch
import training
from turns import Turns, end_all, take_all

from gdsdata.bench.measure import device as devices
from gdsdata.bench.measure import system

GB = 1e9
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
FRAMEWORKS = ("transformers", "accelerate", "lightning", "pytorch-lightning", "safetensors")


def cell(values, digits=2):
    """Return the median, and the lowest and highest, of the values that are not None."""
    values = sorted(value for value in values if value is not None)
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.median(values):.{digits}f} ({values[0]:.{digits}f}, {values[-1]:.{digits}f})"


def routes(results):
    """Return the share of the bytes that came by each route of gdsdata's engine."""
    counts = {}
    for result in results:
        for route, count in result.get("served", {}).items():
            counts[route] = counts.get(route, 0) + count
    total = sum(counts.values())
    return ", ".join(f"{route} {count / total:.0%}" for route, count in sorted(counts.items(), key=lambda one: -one[1]))


def table(columns, rows):
    """Print a table; a row's cells may be one text that says why there are none."""
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for name, cells in rows:
        cells = [cells] if isinstance(cells, str) else cells
        print("| " + " | ".join([name, *cells, *[""] * (len(columns) - 1 - len(cells))]) + " |", flush=True)


@contextlib.contextmanager
def stopped_early(chosen):
    """Leave the block at Ctrl-C. No turn and no section follows."""
    try:
        yield
    except KeyboardInterrupt:
        chosen.is_stopped = True
        print("\nStopped: turns are missing.")


def stop(*_):
    """Do at SIGTERM what Ctrl-C does, once: `timeout` sends it twice."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def asked(chosen, name):
    return not chosen.only or any(part in name for part in chosen.only)


def progress(text):
    print(text, file=sys.stderr, flush=True)


def only_turn(name, make, *arguments):
    """Return the result of a row's one turn.

    Raises:
        RuntimeError: it failed.
    """
    turns = Turns(name, "", make, *arguments).made()
    if turns.error is None:
        turns.take()
    turns.end()
    if turns.error is not None:
        raise RuntimeError(f"{name}: {turns.why_not}")
    return turns.results[0]


# ------------------------------------------------------------------------------------------------------------- load


def load(chosen):
    """Measure the section `load`, and print its table. Returns the results."""
    folder = chosen.folder / f"llama-{chosen.size_gb:g}-{torch.device(chosen.device).type}"
    model = loads.Model(folder, chosen.device, int(chosen.size_gb * GB), chosen.cold)
    if not model.index.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        only_turn("the model is saved", loads.saving, model)
        os.sync()
    model = model._replace(size_bytes=sum(map(os.path.getsize, model.shards)))
    system.touch_memory(min(model.size_bytes, system.available_bytes() // 2))
    rows = {loads.LIMIT: (loads.limit, model)}
    rows |= {name: (loads.loading, name, model) for name in loads.LOADS if asked(chosen, name)}
    results = {name: {"first": [], "later": [], "error": None} for name in rows}
    shares = []
    with stopped_early(chosen):
        for done in range(chosen.rounds):
            progress(f"load: {done} of {chosen.rounds} rounds")
            turns = [Turns(name, "", *rows[name]) for name, found in results.items() if found["error"] is None]
            shares.append(0.0 if chosen.cold else system.warm(model.shards))
            for turn in random.sample([turn.made() for turn in turns], len(turns)):
                for kind in ("first",) if chosen.cold else ("first", "later"):
                    if chosen.cold and turn.error is None:
                        shares.append(system.drop(model.shards))
                    if turn.error is None:
                        turn.take()
                    if turn.error is None:
                        results[turn.name][kind].append(turn.results[-1])
                turn.end()
                results[turn.name]["error"] = turn.error and turn.why_not
    share = (max if chosen.cold else min)(shares, default=0.0)
    kept = f"{share:.0%} stayed in the page cache" if chosen.cold else f"{share:.0%} in the page cache"
    state = "cold" if chosen.cold else "warm"
    print(f"\n## load, {state}\n\n{model.size_bytes / GB:.2f} GB in {len(model.shards)} shards, {kept}")
    columns = ["row", "first, s", "first, GB/s", "later, GB/s", "of the limit: first", "later", "CPU s/GB"]
    columns += ["host GB", "with mapped files", "device GB", "route"]
    table(columns, [(name, load_cells(found, results, model.size_bytes)) for name, found in results.items()])
    return {"size_bytes": model.size_bytes, "rows": results}


def load_cells(found, results, size_bytes):
    if found["error"] or not found["first"]:
        return found["error"] or "no turn"
    rates = {kind: [size_bytes / one["seconds"] / GB for one in found[kind]] for kind in ("first", "later")}
    limit = [size_bytes / one["seconds"] / GB for kind in ("first", "later") for one in results[loads.LIMIT][kind]]
    cells = [cell(one["seconds"] for one in found["first"]), cell(rates["first"]), cell(rates["later"])]
    for kind in ("first", "later"):
        share = statistics.median(rates[kind]) / statistics.median(limit) if rates[kind] and limit else None
        cells.append(cell([share], 3))
    if found is results[loads.LIMIT]:
        return cells[:3]
    first = found["first"]
    cells.append(cell((one["cpu_s"] / (size_bytes / GB) for one in first), 3))
    cells += [cell(one[what] / GB for one in first) for what in ("own_bytes", "rss_bytes", "device_bytes")]
    return [*cells, routes(first)]


# ------------------------------------------------------------------------------------------------------- checkpoint


def checkpoint(chosen):
    """Measure the section `checkpoint`, and print its table. Returns the results."""
    size_bytes = int(chosen.size_gb * GB / 3)
    work = saves.Saves(chosen.folder / "checkpoints", chosen.device, size_bytes, chosen.saves)
    saves.write_tokens(work)
    results = {name: {"turns": [], "error": None} for name in saves.SAVES if asked(chosen, name)}
    limits = []
    with stopped_early(chosen):
        for done in range(chosen.save_rounds):
            progress(f"checkpoint: {done} of {chosen.save_rounds} rounds")
            turns = [
                Turns(name, "", saves.saving, name, work) for name, found in results.items() if found["error"] is None
            ]
            for turn in random.sample([turn.made() for turn in turns], len(turns)):
                if turn.error is None:
                    turn.take()
                results[turn.name]["turns"] += turn.results
                results[turn.name]["error"] = turn.error and turn.why_not
                turn.end()
                saves.clear(work)
            limits.append(only_turn("limits", saves.saving_limits, work))
    print(f"\n## checkpoint\n\n{size_bytes / GB:.2f} GB of parameters and moments; {chosen.saves} saves a run")
    written, staged = ([one.get(f"{what}_gb_per_s") for one in limits] for what in ("written", "staged"))
    print(f"\nLimits, GB/s: O_DIRECT write, synced {cell(written)}; pinned copy to the host {cell(staged) or '-'}")
    columns = ["row", "stall, s: first", "later", "stall, GB/s", "complete, GB/s", "on storage, GB/s", "load, GB/s"]
    columns += ["steps beside", "route"]
    table(columns, [(name, save_cells(found)) for name, found in results.items()])
    return {"limits": limits, "rows": results}


def save_cells(found):
    turns = found["turns"]
    if found["error"] or not turns:
        return found["error"] or "no turn"
    later = [stall for one in turns for stall in one["stalls"][1:] or one["stalls"]]
    rate = [one["bytes"] / GB / stall for one in turns for stall in one["stalls"][1:] or one["stalls"]]
    ended = [[one["bytes"] / GB / pair[place] for one in turns for pair in one["written"]] for place in range(2)]
    cells = [cell(one["stalls"][0] for one in turns), cell(later), cell(rate), *map(cell, ended)]
    cells.append(cell(one["bytes"] / GB / one["load_s"] for one in turns))
    beside = cell(one.get("steps_beside") for one in turns)
    return [*cells, beside and f"{beside} x", routes(turns)]


# ------------------------------------------------------------------------------------------------------------ train


def train(chosen):
    """Measure the section `train`, and print its table. Returns the results."""
    elements = chosen.volume_kib * 128
    samples = max(2, int(chosen.size_gb * GB / 3 / (8 * elements) / chosen.batch)) * chosen.batch
    folder = chosen.folder / f"volumes-{samples}-{chosen.volume_kib}"
    work = training.Work(
        "arrays", folder, samples, chosen.batch, elements, chosen.device, 1, (chosen.step_ms,), chosen.steps
    )
    steps.write_volumes(work)
    turns = []
    count = only_turn("products of a step", steps.counting, work)
    for trainer in steps.TRAINERS:
        for loader in ("ceiling", "gdsdata", "gdsdata, zero_copy", *chosen.workers):
            name = loader if isinstance(loader, str) else f"DataLoader, {loader} workers"
            if loader == "ceiling" or asked(chosen, f"{trainer}: {name}"):
                turns.append(Turns(f"{trainer}: {name}", "", steps.stepping, trainer, loader, work, count))
    turns = [turn.made() for turn in turns]
    share = 1.0
    with stopped_early(chosen):
        for done in range(chosen.rounds):
            progress(f"train: {done} of {chosen.rounds} rounds")
            share = min(share, system.warm(work.files))
            take_all(turns)
    for turn in turns:
        turn.end()
    results = {turn.name: {"turns": turn.results, "error": turn.error and turn.why_not} for turn in turns}
    print(
        f"\n## train\n\nSteps of {chosen.step_ms:g} ms, {chosen.steps} a turn, {chosen.batch} volumes of "
        f"{chosen.volume_kib / 1024:g} MiB each, {samples} in all, {share:.0%} in the page cache"
    )
    columns = ["row", "ms a step", "of the ceiling, %", "step alone, ms", "idle, %", "route"]
    table(columns, [(name, train_cells(name, results)) for name in results])
    return {"rows": results}


def train_cells(name, results):
    found = results[name]
    if found["error"] or not found["turns"]:
        return found["error"] or "no turn"
    turns, ceiling = found["turns"], results[name.partition(":")[0] + ": ceiling"]["turns"]
    shares = [100 * one["seconds"] / row["seconds"] for one, row in zip(ceiling, turns, strict=False)]
    cells = [cell((1000 * one["seconds"] for one in turns), 3), cell(shares, 1)]
    cells.append(cell((1000 * one["alone_s"] for one in turns), 3))
    return [*cells, cell((100 * (1 - one["alone_s"] / one["seconds"]) for one in turns), 1), routes(turns)]


# ------------------------------------------------------------------------------------------------------------- main


def version_of(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def main():
    sections = {"load": load, "checkpoint": checkpoint, "train": train}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--section", nargs="*", choices=sections, default=list(sections))
    parser.add_argument("--cold", action="store_true", help="loads from storage, each in a process of its own")
    parser.add_argument("--size-gb", type=float, default=12.0, help="of the loaded model; others have a third")
    parser.add_argument("--rounds", type=int, default=3, help="of loads and training loops")
    parser.add_argument("--save-rounds", type=int, default=1, help="of runs that save")
    parser.add_argument("--saves", type=int, default=2, help="of each run that saves")
    parser.add_argument("--steps", type=int, default=120, help="of each training loop")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--batch", type=int, default=32, help="volumes of a batch")
    parser.add_argument("--volume-kib", type=int, default=2048)
    parser.add_argument("--workers", nargs="*", type=int, default=[4, 8, 16], help="of DataLoaders")
    parser.add_argument("--folder", type=Path, default=Path("outputs/frameworks"), help="folder of the data")
    parser.add_argument("--only", nargs="*", default=[], help="rows whose names have one of these words in them")
    parser.add_argument("--json", type=Path, help="file for all results")
    chosen = parser.parse_args()
    arguments = {name: value for name, value in vars(chosen).items() if name not in ("folder", "json")}
    chosen.is_stopped = False
    devices.check(chosen.device)
    signal.signal(signal.SIGTERM, stop)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    chosen.folder = chosen.folder.absolute()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    machine, device = system.machine(), devices.describe(chosen.device)
    versions = system.versions() | {name: version_of(name) for name in FRAMEWORKS}
    print(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_before']:.1f}, kernel {machine['kernel']}")
    print(f"{device.get('model', 'no GPU')}; {' on '.join(system.file_system(chosen.folder))}")
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    results = {
        "when": when,
        "machine": machine,
        "device": device,
        "versions": versions,
        "arguments": arguments,
        "sections": {},
    }
    for section in chosen.section:
        try:
            with stopped_early(chosen):
                results["sections"][section] = sections[section](chosen)
        except RuntimeError as error:  # of what all its rows need; other sections may do without
            print(f"\n## {section}\n\n{error}")
        if chosen.is_stopped:
            end_all()
        if chosen.json:
            chosen.json.write_text(json.dumps(results, indent=1, default=str) + "\n")
        if chosen.is_stopped:
            break


if __name__ == "__main__":
    main()

"""case=loader: GDSDataset beside the alternatives, on the same files, warm and cold, beside the machine's limits."""

import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from . import data, limits, measure, peers, report

SAMPLING_SECONDS = 0.02
VERIFIED_BYTES = 160 * 2**20  # batches that are kept for verifying take no more than this
COLD_MEANS = 0.02  # a cold run starts with no more than this share of the files resident
WARM_MEANS = 0.999
BUSY_CORES = 0.25
# Read before a cold run, so that it times the storage and not memory that is touched for the first time.
OPENING_BATCHES = 8


class RowFailed(Exception):
    pass


class RowProcess:
    """The process of one row (row.py) and the pipe to it."""

    def __init__(self, log):
        package_parent = str(Path(__file__).resolve().parents[2])
        paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gdsdata.bench.row"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            bufsize=0,
        )
        self.pending = b""
        self.peak_bytes = 0

    def send(self, do, **command):
        try:
            self.process.stdin.write(json.dumps({"do": do, **command}).encode() + b"\n")
        except BrokenPipeError:
            raise RowFailed(f"the row's process ended with {self.process.wait()}; see rows.log") from None

    def receive(self, sample_memory=False, timeout=300):
        end = time.monotonic() + timeout
        while b"\n" not in self.pending:
            ready, _, _ = select.select([self.process.stdout], [], [], SAMPLING_SECONDS if sample_memory else 1.0)
            if sample_memory:
                self.peak_bytes = max(self.peak_bytes, measure.tree_bytes(self.process.pid))
            if ready:
                read = os.read(self.process.stdout.fileno(), 1 << 16)
                if not read:
                    raise RowFailed(f"the row's process ended with {self.process.wait()}; see rows.log")
                self.pending += read
            elif time.monotonic() > end:
                self.process.kill()
                raise RowFailed(f"no answer for {timeout} s: the process was ended")
        line, _, self.pending = self.pending.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            self.log.write(answer["trace"].encode() + b"\n")
            self.log.flush()
            raise RowFailed(answer["error"])
        return answer["ok"]

    def ask(self, do, **command):
        self.send(do, **command)
        return self.receive()

    def run(self, opened=None, **command):
        """One timed run: {samples, seconds, first_batch_ms, cpu_seconds, peak_bytes, others_cores, ...}."""
        opened = opened or {}
        before = self.peak_bytes = measure.tree_bytes(self.process.pid)
        clock, machine, here = time.monotonic(), measure.machine_cpu_seconds(), measure.cpu_seconds()
        self.send("run", **command)
        result = self.receive(sample_memory=True)
        result |= self.ask("close")
        used = measure.machine_cpu_seconds() - machine - result["cpu_seconds"] - (measure.cpu_seconds() - here)
        result["others_cores"] = max(0.0, used) / (time.monotonic() - clock)
        result["peak_bytes"] = self.peak_bytes - before
        return result | opened

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Row:
    """One row of one table, and what its runs gave."""

    def __init__(self, source, dtype, cache, peer, process):
        self.source, self.dtype, self.cache, self.peer, self.process = source, dtype, cache, peer, process
        self.described = {"key": peer, "name": peer, "setting": "", "keeps_batches": None}
        self.runs, self.error, self.checked = [], None, 0

    def summary(self):
        row = {"data": self.source.kind, "dtype": self.dtype, "cache": self.cache, **self.described}
        row |= {
            "verified": self.checked > 0 and self.error is None,
            "checked_batches": self.checked,
            "error": self.error,
        }
        sample = self.source.sample_bytes
        gigabytes = [run["samples"] * sample / 1e9 for run in self.runs]
        rates = [run["samples"] / run["seconds"] for run in self.runs]
        served = {}
        for run in self.runs:
            for path, count in run["served"].items():
                served[path] = served.get(path, 0) + count
        row |= {
            "samples_per_s": measure.spread(rates),
            "gb_per_s": measure.spread([rate * sample / 1e9 for rate in rates]),
            "first_batch_ms": measure.spread([run["first_batch_ms"] for run in self.runs]),
            "cpu_s_per_gb": measure.spread(
                [run["cpu_seconds"] / size for run, size in zip(self.runs, gigabytes, strict=True)]
            ),
            "peak_bytes": max((run["peak_bytes"] for run in self.runs), default=None),
            "path": path_text(served, self.runs[0]["path"] if self.runs else ""),
            "served_bytes": served,
            "cut": any(run["cut"] for run in self.runs),
            "resident_before": measure.spread([run["resident_before"] for run in self.runs]),
            "runs": self.runs,
        }
        return row


def path_text(served, otherwise):
    total = sum(served.values())
    if not total:
        return otherwise
    shares = sorted(((count / total, path) for path, count in served.items()), reverse=True)
    if shares[0][0] >= 0.995:
        return shares[0][1]
    return ", ".join(f"{path} {share:.0%}" for share, path in shares if share >= 0.005)


class Bench:
    def __init__(self, settings, folder, progress):
        self.settings, self.folder, self.progress = settings, Path(folder), progress
        self.case = settings.case
        self.notes = []
        self.busy = []  # (cores that other programs used, during which table)
        self.processes = {}

    def kinds(self):
        settings = self.settings.data
        if settings.path and settings.kind == "all":
            return [data.kind_of(settings.path)]
        return ["tokens", "npy"] if settings.kind == "all" else [settings.kind]

    def tables(self, kind, source):
        """(dtype, cache) of each table."""
        dtypes = self.case.dtypes if kind == "tokens" else [np.dtype(source.dtype).name]
        for cache in self.case.cache:
            for dtype in dtypes if cache == "warm" else dtypes[:1]:
                yield dtype, cache

    def wanted(self, kind, cache):
        names = [peer.key for peer in peers.rows_for(kind, cache)]
        if not self.case.rows:
            return names
        for name in self.case.rows:
            if ":" not in name:
                peers.find(name)  # a clear error for a name that is no row
        return [name for name in names if name in self.case.rows] + [name for name in self.case.rows if ":" in name]

    def run(self):
        """Everything; the results as one plain dict."""
        started = time.monotonic()
        results = {
            "schema": 1,
            "case": "loader",
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": [Path(sys.executable).name, "-m", "gdsdata.bench", *sys.argv[1:]],
            "machine": measure.machine(),
            "versions": measure.versions(),
            "config": self.settings.as_dict(),
            "data": {},
            "limits": {},
            "rows": [],
        }
        with open(self.folder / "rows.log", "wb") as log:
            try:
                for kind in self.kinds():
                    with self.progress.bytes(f"data: {kind}", self.settings.data.size_bytes) as advance:
                        source = data.source_for(kind, self.settings.data, advance)
                    self.one_data_set(kind, source, results, log)
            finally:
                for process in self.processes.values():
                    process.end()
        if self.busy:
            self.notes.append(
                f"Other programs kept up to {max(self.busy)[0]:.1f} cores busy during "
                f"{'; '.join(name for _, name in self.busy)}: take the figures with care, and those of rows with "
                "several threads or workers most of all."
            )
        results["notes"] = self.notes
        results["seconds"] = time.monotonic() - started
        results["verified"] = bool(results["rows"]) and all(row["verified"] for row in results["rows"])
        return results

    def one_data_set(self, kind, source, results, log):
        system, device = measure.file_system(source.files[0])
        batch_size = self.case.batch_size or (64 if kind == "tokens" else 16)
        cold_samples = min(self.case.cold_samples or (8192 if kind == "tokens" else source.samples), source.samples)
        results["data"][kind] = {
            "summary": source.summary(),
            "files": len(source.files),
            "first_file": source.files[0],
            "samples": source.samples,
            "sample_bytes": source.sample_bytes,
            "file_bytes": source.file_bytes,
            "batch_size": batch_size,
            "cold_samples": cold_samples,
            "file_system": system,
            "device": device,
        }
        tables = list(self.tables(kind, source))
        names = dict.fromkeys(name for dtype, cache in tables for name in self.wanted(kind, cache))
        load = {
            "source": source.as_dict(),
            "seed": self.case.seed,
            "engine": self.settings.engine,
            "batch_size": batch_size,
        }
        for name in names:  # all at once: their imports take the time
            if name not in self.processes:
                self.processes[name] = RowProcess(log)
        loaded = {}
        with self.progress.count(f"start: {kind}", len(names)) as advance:
            for name in names:
                with contextlib.suppress(RowFailed):  # whoever has ended says so when it is asked
                    self.processes[name].send("load", peer=name, **load)
            for name in names:
                try:
                    loaded[name] = self.processes[name].receive()
                except RowFailed as failed:
                    loaded[name] = failed
                advance(1)
        rows = [
            Row(source, dtype, cache, name, self.processes[name])
            for dtype, cache in tables
            for name in self.wanted(kind, cache)
        ]
        self.verify(kind, rows, loaded, batch_size)
        results["limits"][kind] = {}
        for dtype, cache in tables:
            table = [row for row in rows if (row.dtype, row.cache) == (dtype, cache)]
            found = self.time_table(kind, source, dtype, cache, table, cold_samples)
            results["limits"][kind][f"{dtype}, {cache}"] = found
            limit, limit_name = limits.limit_for(source, cache, cold_samples, found)
            results["rows"] += self.compared([row.summary() for row in table], limit, limit_name)

    def verify(self, kind, rows, loaded, batch_size):
        """Compares each row's first batches with plain numpy, untimed; what fails here is not timed."""
        outcomes = {}
        with self.progress.count(f"verify: {kind}", len(rows)) as advance:
            for row in rows:
                key = (row.peer, row.dtype)
                if isinstance(loaded[row.peer], RowFailed):
                    outcomes[key] = loaded[row.peer]
                else:
                    row.described = loaded[row.peer]
                if key not in outcomes:
                    kept = max(1, VERIFIED_BYTES // (batch_size * row.source.sample_bytes))
                    try:
                        command = {"dtype": row.dtype, "batches": min(self.case.verify_batches, kept)}
                        outcomes[key] = row.process.ask("verify", **command)["checked"]
                    except RowFailed as failed:
                        outcomes[key] = failed
                if isinstance(outcomes[key], RowFailed):
                    row.error = str(outcomes[key])
                else:
                    row.checked = outcomes[key]
                advance(1)

    def time_table(self, kind, source, dtype, cache, table, cold_samples):
        """Fills the rows' runs, and returns the limits measured between them."""
        turns = []
        with self.progress.count(f"{kind} {dtype}, {cache}", (len(table) + 1) * self.case.repeats) as advance:
            for _ in range(self.case.repeats):
                turns.append(limits.take_turn(source, cache, self.case.limit_seconds / self.case.repeats))
                advance(1)
                for row in table:
                    advance(1)
                    if row.error:
                        continue
                    if cache == "warm":
                        command = {"epochs": self.case.epochs, "seconds": self.case.run_seconds, "samples": None}
                        resident = measure.resident_share(source.files)
                        if resident < WARM_MEANS and source.file_bytes < measure.available_bytes():
                            resident = measure.warm(source.files)
                    else:
                        command = {"epochs": 1, "seconds": self.case.cold_seconds, "samples": cold_samples}
                    try:
                        row.process.ask("prepare")
                        if cache == "cold":
                            measure.drop(source.files)
                            command["opened"] = row.process.ask("open", dtype=dtype, batches=OPENING_BATCHES)
                            resident = measure.drop(source.files)
                        run = row.process.run(dtype=dtype, **command)
                    except RowFailed as failed:
                        row.error = str(failed)
                        continue
                    row.runs.append(run | {"resident_before": resident})
        residents = [run["resident_before"] for row in table for run in row.runs]
        if residents and cache == "cold" and max(residents) > COLD_MEANS:
            self.notes.append(
                f"{kind} {dtype}, cold: up to {max(residents):.0%} of the files stayed in the page cache when dropped "
                "(mapped by another process, or files that are not yours): these runs were not cold."
            )
        if residents and cache == "warm" and min(residents) < WARM_MEANS:
            self.notes.append(
                f"{kind} {dtype}, warm: only {min(residents):.0%} of the files were in the page cache "
                "(too large for this machine's memory): these runs were not warm."
            )
        others = [run["others_cores"] for row in table for run in row.runs]
        if others and statistics.median(others) > BUSY_CORES:
            self.busy.append((statistics.median(others), f"{kind} {dtype}, {cache}"))
        return limits.over_turns(turns)

    def compared(self, rows, limit, limit_name):
        """The rows with their ratios to the best peer and to the limit."""
        rates = {row["key"]: row["samples_per_s"]["median"] for row in rows if row["samples_per_s"]}
        others = {key: rate for key, rate in rates.items() if not peers.is_ours(key)}
        best = max(others, key=others.get) if others else None
        for row in rows:
            rate = rates.get(row["key"])
            row["best_peer"] = best
            row["ratio_to_best_peer"] = rate / others[best] if rate and best else None
            row["limit"] = {"samples_per_s": limit, "name": limit_name}
            row["ratio_to_limit"] = rate / limit if rate and limit else None
        return rows


def main(settings, folder):
    """Runs the case and writes its report into `folder`; the process's exit status."""
    from rich.console import Console

    with report.Progress() as progress:
        results = Bench(settings, folder, progress).run()
    written = report.write(results, Path(folder))
    console = Console(width=None if sys.stdout.isatty() else 150)
    report.show(results, console)
    failures = dict.fromkeys((row["data"], row["name"], row["error"]) for row in results["rows"] if row["error"])
    for kind, name, error in failures:
        console.print(
            f"FAILED: {kind}, {name}: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True
        )
    print(f"Report: {written}")
    return 1 if failures or not results["verified"] else 0

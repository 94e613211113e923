"""What every case does: processes of rows that take turns, limits measured between them, one result for the report."""

import contextlib
import importlib
import importlib.util
import json
import signal
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

from gdsdata.bench import limits, measure, report
from gdsdata.bench.device import is_cuda
from gdsdata.bench.process import ENDING_SECONDS, RowFailed, RowProcess, one_interrupt, without_interrupts

COLD_MEANS = 0.02  # a cold run starts with no more than this share of the files resident
WARM_MEANS = 0.999
BUSY_CORES = 0.25
IN_MEMORY = ("tmpfs", "ramfs")
MOST_DEPTH = 1024  # of the O_DIRECT reads that are measured as a limit
INTERRUPTED = 128 + signal.SIGINT  # as a shell says it
NO_TURN = "not measured: the run was broken off before its first turn was over"
PATIENCE_SECONDS = 2  # with rows that are in the middle of something when the bench is interrupted


class Row:
    """One row of one table, and what its runs gave."""

    def __init__(self, table, key, process):
        self.table, self.key, self.process = table, key, process
        self.described = {"key": key, "name": key, "setting": ""}
        self.runs, self.error, self.checked = [], None, {}

    def summary(self):
        """What every case reports of a row; a run's `bytes` are those of the files."""
        sizes = [run["bytes"] / 1e9 for run in self.runs]
        rates = [size / run["seconds"] for size, run in zip(sizes, self.runs, strict=True)]
        served = {}
        for run in self.runs:
            for path, count in run["served"].items():
                served[path] = served.get(path, 0) + count
        return {
            "data": self.table.source.kind,
            "dtype": self.table.dtype,
            "cache": self.table.cache,
            **self.described,
            "verified": bool(self.checked) and self.error is None,
            "error": self.error,
            **self.checked,
            "gb_per_s": measure.spread(rates),
            "seconds": measure.spread([run["seconds"] for run in self.runs]),
            "cpu_s_per_gb": measure.spread(
                [run["cpu_seconds"] / size for run, size in zip(self.runs, sizes, strict=True)]
            ),
            "peak_bytes": max((run["peak_bytes"] for run in self.runs), default=None),
            "path": path_text(served, self.runs[0]["path"] if self.runs else ""),
            "served_bytes": served,
            "resident_before": measure.spread([run["resident_before"] for run in self.runs]),
            "runs": self.runs,
        }


class Table:
    """Rows that are measured beside each other: one source, one dtype, one state of the page cache."""

    def __init__(self, source, dtype, cache):
        self.source, self.dtype, self.cache = source, dtype, cache
        self.rows = []

    @property
    def name(self):
        return f"{self.dtype}, {self.cache}"

    @property
    def full_name(self):
        return f"{self.source.kind} {self.name}"


def path_text(served, otherwise):
    total = sum(served.values())
    if not total:
        return otherwise
    shares = sorted(((count / total, path) for path, count in served.items()), reverse=True)
    if shares[0][0] >= 0.995:
        return shares[0][1]
    return ", ".join(f"{path} {share:.0%}" for share, path in shares if share >= 0.005)


class Case:
    """A case says which rows there are, what a run is, and what of its rows is reported."""

    no_peers = ()  # keys of rows that nobody's own work is compared with

    def __init__(self, settings, folder, progress):
        self.settings, self.folder, self.progress = settings, Path(folder), progress
        self.case, self.device = settings.case, settings.device.name
        self.notes = []
        self.busy = []  # (cores that other programs used, during which table)
        self.processes = {}
        self.broken_off = False
        self.were_warmed = set()

    # What each case has of its own:

    def sources(self):
        """The sources, one after the other; each is measured before the next is made."""
        raise NotImplementedError

    def about(self, source):
        """What results.json says of the source."""
        raise NotImplementedError

    def dtypes(self, source, cache):
        raise NotImplementedError

    def rows_for(self, source, cache):
        """The classes of the rows."""
        raise NotImplementedError

    def find(self, key):
        """The class of that key, or ValueError."""
        raise NotImplementedError

    def load_command(self, source):
        """What a row's process is told first."""
        raise NotImplementedError

    def verify_command(self, row):
        return {}

    def touched_bytes(self, source):
        """Memory that a run will want at most: it is touched beforehand."""
        raise NotImplementedError

    def run(self, row):
        """One run, with the page cache as the table wants it."""
        raise NotImplementedError

    def summary(self, row):
        return row.summary()

    def limit_for(self, table, found):
        """(GB/s of the files' bytes, its name) that no row can be expected to pass, or (None, why it is not known)."""
        raise NotImplementedError

    # What is shared:

    def measure(self):
        """Everything; the results as one plain dict. Interrupted: the rows that have figures, if there are any."""
        started, ending_s = time.monotonic(), ENDING_SECONDS
        results = {
            "schema": report.SCHEMA,
            "case": self.case.name,
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": [Path(sys.executable).name, "-m", "gdsdata.bench", *sys.argv[1:]],
            "machine": measure.machine(),
            "versions": measure.versions(),
            "config": self.settings.as_dict(),
            "data": {},
            "limits": {},
            "rows": [],
        }
        for key in self.case.rows:
            if ":" not in key:
                self.find(key)  # a clear error for a name that is no row
        with open(self.folder / "rows.log", "wb") as self.log:
            try:
                self.limits_process = self.process("limits") if is_cuda(self.device) else None
                results["device"] = {"name": self.device}
                if self.limits_process:
                    results["device"] = self.limits_process.ask("device", device=self.device)
                for source in self.sources():
                    self.one_source(source, results)
                if not results["rows"]:
                    wanted = f"case.rows={self.case.rows}, case.cache={self.case.cache}, device.name={self.device}"
                    raise ValueError(f"{wanted}: nothing to measure. {' '.join(self.notes)}".rstrip())
            except KeyboardInterrupt:
                ending_s = PATIENCE_SECONDS
                if not results["rows"]:
                    raise
                self.broken_off = True
                self.progress.say("broken off: what was measured is reported")
            finally:
                with contextlib.suppress(KeyboardInterrupt):  # nothing is measured any more
                    self.end_processes(ending_s)
        if self.busy:
            self.notes.append(
                f"Other programs kept up to {max(self.busy)[0]:.1f} cores busy during "
                f"{'; '.join(name for _, name in self.busy)}: take the figures with care, and those of rows with "
                "several threads or workers most of all."
            )
        results["broken_off"] = self.broken_off
        results["notes"] = list(dict.fromkeys([report.BROKEN_OFF] * self.broken_off + self.notes))
        results["seconds"] = time.monotonic() - started
        results["verified"] = bool(results["rows"]) and all(row["verified"] for row in results["rows"])
        return results

    def process(self, name):
        if name not in self.processes:
            self.processes[name] = RowProcess(self.log)
        return self.processes[name]

    def end_processes(self, within_s):
        """All at once, for some take their time."""
        ends = time.monotonic() + within_s
        with without_interrupts():
            for process in self.processes.values():
                process.dismiss()
            for process in self.processes.values():
                process.end(max(0.0, ends - time.monotonic()))

    def caches(self, source):
        """The states of the page cache that the source can have here."""
        system, _ = measure.file_system(source.files[0])
        if system not in IN_MEMORY or "cold" not in self.case.cache:
            return self.case.cache
        folder = Path(source.files[0]).parent
        if self.case.cache == ["cold"]:
            raise ValueError(
                f"case.cache=[cold]: {folder} is memory ({system}) and never cold: use case.cache=[warm], or "
                "data.folder= or data.path= on a disk"
            )
        self.notes.append(f"{source.kind}: no cold tables, for {folder} is memory ({system}).")
        return [cache for cache in self.case.cache if cache != "cold"]

    def wanted(self, source, cache):
        """The keys of the table's rows; those whose packages are missing are left out, and a note says so."""
        classes = {peer.key: peer for peer in self.rows_for(source, cache)}
        keys = list(classes)
        if self.case.rows:
            keys = [key for key in keys if key in self.case.rows] + [key for key in self.case.rows if ":" in key]
        missing = {key: why for key in keys if key in classes and (why := self.missing(classes[key]))}
        for key, why in missing.items():
            self.notes.append(f"Row {key} was left out: {why}.")
        return [key for key in keys if key not in missing]

    def missing(self, peer):
        """Why the row cannot be had here; "" where it can."""
        return f"the package {peer.package} is not installed" if peer.package and not installed(peer.package) else ""

    def one_source(self, source, results):
        results["data"][source.kind] = self.about(source)
        tables = []
        for cache in self.caches(source):
            for dtype in self.dtypes(source, cache):
                tables.append(Table(source, dtype, cache))
        keys = {table: self.wanted(source, table.cache) for table in tables}
        names = list(dict.fromkeys(key for table in tables for key in keys[table]))
        if not names:
            return
        loaded = self.start(source, names)
        for table in tables:
            table.rows = [Row(table, key, self.processes[key]) for key in keys[table]]
        self.verify(source, [row for table in tables for row in table.rows], loaded)
        results["limits"][source.kind] = {}
        for table in tables:
            found = self.time_table(table)
            results["limits"][source.kind][table.name] = found
            results["rows"] += self.compared(table, *self.limit_for(table, found))
            # What is done stays, if the rest is killed.
            (self.folder / "results.json").write_text(json.dumps(results | {"notes": self.notes}, indent=1))
            if self.broken_off:
                raise KeyboardInterrupt

    def start(self, source, names):
        """{key: what its process says of the row, or RowFailed}; all at once, for their imports take the time."""
        for name in names:
            self.process(name)
        loaded, command = {}, {"case": self.case.name, "device": self.device, **self.load_command(source)}
        with self.progress.count(f"start: {source.kind}", len(names)) as advance:
            for name in names:
                with contextlib.suppress(RowFailed):  # whoever has ended says so when it is asked
                    self.processes[name].send("load", peer=name, **command)
            for name in names:
                try:
                    loaded[name] = self.processes[name].receive()
                except RowFailed as failed:
                    loaded[name] = failed
                advance(1)
        return loaded

    def verify(self, source, rows, loaded):
        """Compares what each row gives with plain reading, untimed; what fails here is not timed."""
        outcomes = {}
        with self.progress.count(f"verify: {source.kind}", len(rows)) as advance:
            for row in rows:
                key = (row.key, row.table.dtype)
                if isinstance(loaded[row.key], RowFailed):
                    outcomes[key] = loaded[row.key]
                else:
                    row.described = loaded[row.key]
                if key not in outcomes:
                    try:
                        outcomes[key] = row.process.ask("verify", **self.verify_command(row))
                    except RowFailed as failed:
                        outcomes[key] = failed
                if isinstance(outcomes[key], RowFailed):
                    row.error = str(outcomes[key])
                else:
                    row.checked = outcomes[key]
                advance(1)

    def take_limits(self, table, seconds):
        """The limits that bear on a table, measured once."""
        if table.cache == "warm" and self.limits_process:
            return {"pinned_copy": self.limits_process.ask("pinned_copy", device=self.device, seconds=seconds)}
        # The engine's own depth too: a limit must not be beaten only because it was measured at a
        # lower one.
        depths = {32, 64, *(min(row.checked.get("engine_depth", 64), MOST_DEPTH) for row in table.rows)}
        return limits.take_turn(table.source, table.cache, seconds, sorted(depths))

    def time_table(self, table):
        """Fills the rows' runs, and returns the limits measured between them."""
        turns = []
        try:
            self.take_turns(table, turns)
        except KeyboardInterrupt:
            due = [row for row in table.rows if not row.error]
            if not any(row.runs for row in due):
                raise
            self.broken_off = True
            whole = min(len(row.runs) for row in due)
            self.notes.append(f"{table.full_name}: broken off after {whole} of {self.case.repeats} turns.")
            for row in due:
                row.error = None if row.runs else NO_TURN
        self.note_surroundings(table)
        return limits.over_turns(turns)

    def take_turns(self, table, turns):
        with self.progress.count(table.full_name, (len(table.rows) + 1) * self.case.repeats) as advance:
            for _ in range(self.case.repeats):
                turns.append(self.take_limits(table, self.case.limit_seconds / self.case.repeats))
                advance(1)
                for row in table.rows:
                    if not row.error:
                        try:
                            row.process.ask("prepare", touched_bytes=self.touched_bytes(table.source))
                            row.runs.append(self.run(row))
                        except RowFailed as failed:
                            row.error = str(failed)
                    advance(1)

    def note_surroundings(self, table):
        """What of the page cache and of other programs a reader of the table should know."""
        of_rows = {row.key: [run["resident_before"] for run in row.runs] for row in table.rows if row.runs}
        residents = [share for shares in of_rows.values() for share in shares]
        if residents and table.cache == "cold" and max(residents) > COLD_MEANS:
            not_cold = ", ".join(key for key, shares in of_rows.items() if max(shares) > COLD_MEANS)
            self.notes.append(
                f"{table.full_name}: up to {max(residents):.0%} of the files of {not_cold} stayed in the page cache "
                "when dropped (mapped by a process, or files that are not yours): these runs were not cold."
            )
        if residents and table.cache == "warm" and min(residents) < WARM_MEANS:
            self.notes.append(
                f"{table.full_name}: only {min(residents):.0%} of the files were in the page cache "
                "(too large for this machine's memory): these runs were not warm."
            )
        others = [run["others_cores"] for row in table.rows for run in row.runs]
        if others and statistics.median(others) > BUSY_CORES:
            self.busy.append((statistics.median(others), table.full_name))

    def warmed(self, source):
        """Puts the files into the page cache where they are not, and the first time anew: who verified has left them as
        he reads, page by page through a mapping, say. How much of them is there."""
        resident = measure.resident_share(source.files)
        if source.file_bytes < measure.available_bytes():
            if not self.were_warmed.issuperset(source.files):
                self.were_warmed.update(source.files)
                resident = measure.drop(source.files)
            if resident < WARM_MEANS:
                resident = measure.warm(source.files)
        return resident

    def compared(self, table, limit, limit_name):
        """The rows with their ratios to the best peer and to the limit."""
        rows = [self.summary(row) for row in table.rows]
        rates = {row["key"]: row["gb_per_s"]["median"] for row in rows if row["gb_per_s"]}
        others = {key: rate for key, rate in rates.items() if not report.is_ours(key) and key not in self.no_peers}
        best = max(others, key=others.get) if others else None
        for row in rows:
            rate = rates.get(row["key"])
            row["best_peer"] = best
            row["ratio_to_best_peer"] = rate / others[best] if rate and best else None
            row["limit"] = {"gb_per_s": limit, "name": limit_name}
            row["ratio_to_limit"] = rate / limit if rate and limit else None
        return rows


def installed(package):
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package above it
        return False


def find(key, known):
    """The class of that key among `known`, or the one at package.module:Class."""
    if ":" in key:
        module, _, attribute = key.partition(":")
        return getattr(importlib.import_module(module), attribute)
    known = {peer.key: peer for peer in known}
    if key not in known:
        raise ValueError(
            f"case.rows: there is no row {key!r}; there are {', '.join(known)}, and package.module:Class for yours"
        )
    return known[key]


def main(settings, folder):
    """Runs the case and writes its report into `folder`; the process's exit status."""
    with one_interrupt():
        return run_and_report(settings, folder)


def run_and_report(settings, folder):
    from rich.console import Console

    name = settings.case.name
    case = getattr(importlib.import_module(f".{name}", __package__), name.capitalize())
    with report.Progress() as progress:
        results = case(settings, folder, progress).measure()
    written = report.write(results, Path(folder))
    console = Console(width=None if sys.stdout.isatty() else 165)
    report.show(results, console)
    failures = dict.fromkeys(
        (row["data"], row["name"], error)
        for row in results["rows"]
        for error in [row["error"], *row.get("failed_rows", [])]
        if error
    )
    for kind, name, error in failures:
        console.print(
            f"FAILED: {kind}, {name}: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True
        )
    print(f"Report: {written}", flush=True)
    if results["broken_off"]:
        return INTERRUPTED
    return 1 if failures or results["verified"] is False else 0  # None: that was not wanted

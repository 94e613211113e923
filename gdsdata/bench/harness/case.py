"""The part of all cases: processes of rows that take turns, limits, one result."""

import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gdsdata.bench.data import sources
from gdsdata.bench.data.made import data_folder
from gdsdata.bench.harness.folders import temporary_folder
from gdsdata.bench.harness.process import ENDING_SECONDS, MODULE_ARGUMENTS, RowFailed, RowProcess, without_interrupts
from gdsdata.bench.harness.tables import Row, Table, is_ours
from gdsdata.bench.measure import limits, system
from gdsdata.bench.measure.device import is_cuda
from gdsdata.bench.peers import registry

COLD_MEANS = 0.02  # A cold run starts with at most this share of the files resident.
WARM_MEANS = 0.999
BUSY_CORES = 0.25
IN_MEMORY = ("tmpfs", "ramfs")
TOUCHED_BYTES = 512 * 2**20  # more than any row allocates with the default data sets
MOST_DEPTH = 1024  # of the O_DIRECT reads that are measured as a limit
NO_TURN = "not measured: the run was broken off before its first turn was over"
BROKEN_OFF = "This run was broken off (Ctrl-C): what it had not measured by then is missing."
PATIENCE_SECONDS = 2  # with rows that are busy when the bench is interrupted
SCHEMA = 2  # of results.json (docs/bench_results.md): raised when a field changes its meaning or goes


def new_results(settings):
    """results.json before anything is measured."""
    return {
        "schema": SCHEMA,
        "case": settings.case.name,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [Path(sys.executable).name, *MODULE_ARGUMENTS, *sys.argv[1:]],
        "machine": system.machine(),
        "versions": system.versions(),
        "config": settings.as_dict(),
        "device": {"name": settings.device.name},
        "data": {},
        "limits": {},
        "notes": [],
        "rows": [],
    }


def outcome_of(call, *arguments, **more):
    """Return the answer of a row's process, or RowFailed."""
    try:
        return call(*arguments, **more)
    except RowFailed as failed:
        return failed


class Case:
    """A case says which sources and rows it has, what a run is, what a row reports.

    Each has `sources()`: it yields the CaseSources, each of which is measured before the next.
    """

    no_peers: tuple[str, ...] = ()  # keys of rows that others are not compared with
    # Figures that compare a table's rows with one of them: the figure, the other row's key, and the
    # kinds of sources that have it (empty: all).
    ratios: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    sources: Callable[[], Iterable[Any]]
    of_runs: tuple[str, ...] = ()  # fields of runs, whose spread is a field of a row
    most_touched = TOUCHED_BYTES  # the most memory that a run needs beside what `host_bytes` says
    reads_once = False  # Cold runs read their files once, from end to end, and so does their limit.

    def __init__(self, settings, folder, progress):
        self.settings, self.folder, self.progress = settings, Path(folder), progress
        self.case, self.device = settings.case, settings.device.name
        self.notes = []
        self.busy = []  # (cores that other programs used, during which table)
        self.processes = {}
        self.broken_off = False
        self.were_warmed = set()
        self.opened = contextlib.ExitStack()  # closed when all is measured

    # Some cases have their own:

    def facts(self, source):
        """Return more fields of `data` in results.json."""
        about = {"files": len(source.files), "first_file": source.files[0], "file_bytes": source.file_bytes}
        return about | source.facts()

    def dtypes(self, source, cache):
        return [source.dtype]

    def touched_bytes(self, source):
        """Return the most memory that a run needs. It is touched beforehand."""
        return self.most_touched if is_cuda(self.device) else self.host_bytes(source)

    def host_bytes(self, source):
        """Return the same where bytes stay in host memory."""
        return self.most_touched

    def device_of(self, source):
        """Return the device of the source's rows, which some sources name."""
        return getattr(source, "device", self.device)

    def rows_for(self, source, cache):
        return registry.rows(self.case.name, source.peer_kind, cache, self.device_of(source))

    def row_class(self, source):
        """Return module:Class of the row's side, which is beside the case's own module."""
        return f"{type(self).__module__.rpartition('.')[0]}.row:{type(self).__name__}Row"

    def verify_command(self, row):
        return {"dtype": row.table.dtype}

    def read_by(self, row):
        """Return the source of the files that the row reads."""
        return row.table.source

    def run(self, row):
        """Run the row once, with the page cache as the table wants it."""
        resident = self.with_cache(self.read_by(row), row.table.cache)
        found = row.process.run(dtype=row.table.dtype, cache=row.table.cache)
        return found | {"resident_before": resident}

    def row_process(self, key):
        """Start the process of a row."""
        return RowProcess(self.log)

    def find(self, key):
        """Return the class of that key; ValueError if there is none."""
        return registry.find(self.case.name, key)

    def missing(self, peer):
        """Why the row cannot be measured here; "" if it can."""
        return registry.missing(peer)

    def summary(self, row):
        return row.summary() | {name: row.spread(name) for name in self.of_runs}

    def limit_for(self, table, found):
        """Return (GB/s of files' bytes that no row can pass, its name), or (None, why)."""
        return limits.limit_of(found)

    # All cases share:

    def measure(self):
        """Measure everything; return the results, also those of an interrupted run."""
        with self.opened:
            return self.measured()

    @functools.cached_property
    def files_folder(self):
        """The folder of the run's own files, which its end removes."""
        return self.opened.enter_context(temporary_folder(data_folder(self.settings.data), self.case.name))

    def measured(self):
        started, ending_s = time.monotonic(), ENDING_SECONDS
        results = new_results(self.settings)
        for key in self.case.rows:
            if ":" not in key:
                self.find(key)  # a clear error for a name that is no row
        with open(self.folder / "rows.log", "wb") as self.log:
            try:
                self.limits_process: Any = self.process("limits") if is_cuda(self.device) else None
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
                with contextlib.suppress(KeyboardInterrupt):  # Nothing is measured any more.
                    self.end_processes(ending_s)
        if self.busy:
            self.notes.append(
                f"Other programs kept up to {max(self.busy)[0]:.1f} cores busy during "
                f"{'; '.join(name for _, name in self.busy)}: take the figures with care, and those of rows with "
                "several threads or workers most of all."
            )
        results["broken_off"] = self.broken_off
        results["notes"] = list(dict.fromkeys([BROKEN_OFF] * self.broken_off + self.notes))
        results["seconds"] = time.monotonic() - started
        results["verified"] = bool(results["rows"]) and all(row["verified"] for row in results["rows"])
        return results

    def data_set(self, kind, settings=None, files=1):
        """Return the Source of "tokens" or "npy": the settings' own, or made."""
        settings = settings or self.settings.data
        with self.progress.bytes(f"data: {kind}", settings.size_bytes) as advance:
            return sources.source_for(kind, settings, advance, files)

    def process(self, name):
        if name not in self.processes:
            self.processes[name] = RowProcess(self.log) if name == "limits" else self.row_process(name)
        return self.processes[name]

    def end_rows(self):
        for key in self.processes.keys() - {"limits"}:
            self.processes.pop(key).end()

    def end_processes(self, within_s):
        """End all at once, because some take their time."""
        ends = time.monotonic() + within_s
        with without_interrupts():
            for process in self.processes.values():
                process.dismiss()
            for process in self.processes.values():
                process.end(max(0.0, ends - time.monotonic()))

    def about(self, source):
        """Return the source's fields of `data` in results.json."""
        kind, disk = system.file_system(source.files[0])
        return {"summary": source.summary(), **self.facts(source), "file_system": kind, "device": disk}

    def caches(self, source):
        """Return the states of the page cache that the source can have here."""
        kind, _ = system.file_system(source.files[0])
        if kind not in IN_MEMORY or "cold" not in self.case.cache:
            return self.case.cache
        folder = Path(source.files[0]).parent
        if self.case.cache == ["cold"]:
            raise ValueError(
                f"case.cache=[cold]: {folder} is memory ({kind}) and never cold: use case.cache=[warm], or "
                "data.folder= or data.path= on a disk"
            )
        self.notes.append(f"{source.kind}: no cold tables, for {folder} is memory ({kind}).")
        return [cache for cache in self.case.cache if cache != "cold"]

    def wanted(self, source, cache):
        """Return the keys of a table's rows; a note names each that is left out."""
        classes = {peer.key: peer for peer in self.rows_for(source, cache)}
        keys = list(classes)
        if self.case.rows:
            keys = [key for key in keys if key in self.case.rows] + [key for key in self.case.rows if ":" in key]
        missing = {key: why for key in keys if key in classes and (why := self.missing(classes[key]))}
        for key, why in missing.items():
            self.notes.append(f"Row {key} was left out: {why}.")
        return [key for key in keys if key not in missing]

    def one_source(self, source, results):
        caches = self.caches(source)
        tables = [Table(source, dtype, cache) for cache in caches for dtype in self.dtypes(source, cache)]
        keys = {table: self.wanted(source, table.cache) for table in tables}
        names = list(dict.fromkeys(key for table in tables for key in keys[table]))
        if not names:
            return
        results["data"][source.kind] = self.about(source)
        loaded = self.start(source, names)
        for table in tables:
            table.rows = [Row(table, key, self.processes[key]) for key in keys[table]]
        self.verify(source, [row for table in tables for row in table.rows], loaded)
        results["limits"][source.kind] = {}
        for table in tables:
            found = self.time_table(table)
            results["limits"][source.kind][table.name] = found
            results["rows"] += self.compared(table, *self.limit_for(table, found))
            # Finished tables stay if the run is killed.
            (self.folder / "results.json").write_text(json.dumps(results | {"notes": self.notes}, indent=1))
            if self.broken_off:
                raise KeyboardInterrupt

    def load_command(self, source):
        settings = {"settings": self.case, "engine": self.settings.engine, "device_name": self.device_of(source)}
        return {"row": self.row_class(source), "source": source, **settings}

    def start(self, source, names):
        """Return {key: its answer, or RowFailed}. All start at once: imports are slow."""
        for name in names:
            self.process(name)
        loaded, command = {}, self.load_command(source)
        with self.progress.count(f"start: {source.kind}", len(names)) as advance:
            for name in names:
                with contextlib.suppress(RowFailed):  # A process that has ended says so when it is asked.
                    self.processes[name].send("load", key=name, **command)
            for name in names:
                loaded[name] = outcome_of(self.processes[name].receive)
                advance(1)
        return loaded

    def verify(self, source, rows, loaded):
        """Compare each row's bytes with plain reading. A row that fails is not timed."""
        outcomes = {}
        with self.progress.count(f"verify: {source.kind}", len(rows)) as advance:
            for row in rows:
                key, known = (row.key, row.table.dtype), loaded[row.key]
                if not isinstance(known, RowFailed):
                    row.described = known
                    if key not in outcomes:
                        outcomes[key] = outcome_of(row.process.ask, "verify", **self.verify_command(row))
                    known = outcomes[key]
                if isinstance(known, RowFailed):
                    row.error = str(known)
                else:
                    row.checked = known
                advance(1)

    def copy_limit(self, source, seconds, to_host=False):
        """Measure the limit of bytes that are in memory: the GPU's link, or a copy there."""
        if not is_cuda(self.device_of(source)):
            return {"memory_copy": limits.memory_copy(seconds)}
        found = self.limits_process.ask("pinned_copy", device=self.device, seconds=seconds, to_host=to_host)
        return {"pinned_copy_to_host" if to_host else "pinned_copy": found}

    def take_limits(self, table, seconds):
        """Measure the limits that bear on a table, once."""
        if table.cache == "warm":
            return self.copy_limit(table.source, seconds)
        if self.reads_once:
            return limits.sequential_reads(table.source.files)
        # The engine's own depth too: else a limit could be beaten only because its depth was lower.
        depths = {32, 64, *(min(row.checked.get("engine_depth", 64), MOST_DEPTH) for row in table.rows)}
        source = getattr(table.source, "source", table.source)
        return limits.cold_reads(source, seconds, sorted(depths))

    def time_table(self, table):
        """Fill the rows' runs; return the limits that were measured between them."""
        turns: list[dict] = []
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
        """Note a page cache that was not as wanted, and other programs at work."""
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

    def with_cache(self, source, cache):
        """Warm the files, or drop their pages; return the share that is then resident."""
        return self.warmed(source) if cache == "warm" else system.drop(source.files)

    def warmed(self, source):
        """Put files into the page cache; return the share of them that is then resident.

        The first time they are put there anew: a row that verified its bytes has left them as it
        reads, page by page through a mapping for example.
        """
        resident = system.resident_share(source.files)
        if source.file_bytes < system.available_bytes():
            if not self.were_warmed.issuperset(source.files):
                self.were_warmed.update(source.files)
                resident = system.drop(source.files)
            if resident < WARM_MEANS:
                resident = system.warm(source.files)
        return resident

    def compared(self, table, limit, limit_name):
        """Return the rows with their ratios to the best peer and to the limit."""
        rows = [self.summary(row) for row in table.rows]
        rates = {row["key"]: row["gb_per_s"]["median"] for row in rows if row["gb_per_s"]}
        others = {key: rate for key, rate in rates.items() if not is_ours(key) and key not in self.no_peers}
        best = max(others, key=others.__getitem__) if others else None
        for row in rows:
            rate = rates.get(row["key"])
            row["best_peer"] = best
            row["ratio_to_best_peer"] = rate / others[best] if rate and best else None
            row["limit"] = {"gb_per_s": limit, "name": limit_name}
            row["ratio_to_limit"] = rate / limit if rate and limit else None
            for name, key, kinds in self.ratios:
                other = rates.get(key) if not kinds or table.source.kind in kinds else None
                row[name] = rate / other if rate and other else None
        return rows

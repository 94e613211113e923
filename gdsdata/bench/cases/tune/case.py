"""The bench's side of case=tune.

Each kind of work in each state of the page cache is a search of its own (`search`), within its
share of `budget_s`: three fifths to search, and the rest to compare what was found with the
default, turn by turn. All settings are measured in one process (`row`). The bytes of each are
compared with plain reading before it is timed.
"""

import json
import os
import random
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from gdsdata.bench.cases.settings import overrides, quoted
from gdsdata.bench.cases.tune.row import WrongBytes
from gdsdata.bench.cases.tune.search import Refused, Search, confirmed, said
from gdsdata.bench.cases.tune.settings import LEAST_PAIRS, SEARCHED
from gdsdata.bench.data import sources
from gdsdata.bench.data.made import DataError, data_folder, make_folder, need_space
from gdsdata.bench.harness.case import IN_MEMORY, Case
from gdsdata.bench.harness.folders import temporary_folder
from gdsdata.bench.harness.process import MODULE_ARGUMENTS, RowFailed
from gdsdata.bench.harness.tables import Row, Table
from gdsdata.bench.measure import device, limits, system
from gdsdata.io.options import EngineOptions

KEY = "gdsdata"  # of the process
ROWS = {"read": "Reads", "batches": "Batches", "write": "Writes"}
SEARCHING = 0.6  # of the budget
LIMIT_TURNS = 2
DEFAULT_RUNS = 3  # if nothing better was found
OF_STORAGE = ("queue_depth", "request_bytes", "bounce_bytes")  # Reads from the page cache need none of them.


@dataclass
class Files(sources.CaseSource):
    """Files that are read, or the folder that is written to."""

    kind: str
    files: list
    tensor_bytes: int
    origin: str

    @property
    def file_bytes(self):
        return sum(map(os.path.getsize, self.files)) if self.kind == "read" else self.tensor_bytes

    def summary(self):
        if self.kind == "write":
            return self.origin
        size, call = system.size_text(self.file_bytes), system.size_text(self.tensor_bytes)
        return f"{size} in {len(self.files):,} file(s), in reads of {call} at most; {self.origin}"


class OptionsRow(Row):
    """A row whose runs have these options, beside those that all runs have."""

    def __init__(self, table, key, name, base, options):
        super().__init__(table, key, None)
        setting = ", ".join(f"{option}={value}" for option, value in (base | options).items())
        self.options, self.described = options, {"key": key, "name": name, "setting": setting or "EngineOptions()"}


class Tune(Case):
    def measure(self):
        self.answers: list[dict] = []
        self.random = random.Random(self.case.seed)
        default = EngineOptions()  # All runs have `base`, as a user would write it.
        self.base = {name: one for name, one in self.settings.engine.items() if one != getattr(default, name)}
        return super().measure() | {"tune": self.answers}

    def sources(self):
        for work in self.case.work:
            self.checked = {}
            yield {"read": self.to_read, "batches": self.batches, "write": self.to_write}[work]()

    def batches(self):
        settings = self.settings.data
        kind = sources.kind_of(settings.path) if settings.path else {"all": "tokens"}.get(settings.kind, settings.kind)
        return sources.DataSet("batches", self.data_set(kind), self.case.batch_size or (64 if kind == "tokens" else 16))

    def to_write(self):
        folder, size = place_for_writes(self.settings.data), self.case.tensor_bytes
        need_space(folder, "case=tune", 2 * size, "case.tensor_bytes=")
        made = self.opened.enter_context(temporary_folder(folder, "tune"))
        return Files("write", [str(made)], size, f"a new file of {system.size_text(size)} each time")

    def to_read(self):
        path, size = self.settings.data.path, self.case.tensor_bytes
        if path:
            return Files("read", plain_files(path), size, f"your own: {path}")
        made = self.data_set("tokens")
        return Files("read", made.files, size, made.origin)

    def facts(self, source):
        return {"files": len(source.files), "first_file": source.files[0]}

    def caches(self, source):
        if source.kind == "write":
            return ["replaced"]
        if system.file_system(source.files[0])[0] in IN_MEMORY and self.case.cache == ["cold"]:
            self.notes.append(f"{source.kind}: {source.files[0]} is in memory and never cold: it was searched warm.")
            return ["warm"]
        return super().caches(source)

    def row_class(self, source):
        return f"{__package__}.row:{ROWS[source.kind]}"

    def touched_bytes(self, source):
        return super().touched_bytes(source) if source.kind == "batches" else 2 * source.tensor_bytes

    def one_source(self, source, results):
        results["data"][source.kind] = self.about(source)
        results["limits"][source.kind] = {}
        for cache in self.caches(source):
            table = Table(source, "uint8", cache)
            self.prepare_row(source)
            found = self.one_table(table)
            results["limits"][source.kind][table.name] = found
            results["rows"] += self.compared(table, *self.limit_for(table, found))
            self.note_surroundings(table)

    def prepare_row(self, source):
        loaded = self.start(source, [KEY])[KEY]
        if isinstance(loaded, RowFailed):
            raise ValueError(f"case.work=[{source.kind}]: {loaded}")
        self.processes[KEY].ask("prepare", touched_bytes=self.touched_bytes(source))

    def one_table(self, table):
        """Search; make rows of the default and of what was found. Return the limits around it."""
        began, space = time.monotonic(), self.space(table)
        searches = sum(1 if work == "write" else len(self.case.cache) for work in self.case.work)
        budget_s = self.case.budget_s / searches
        turns = [self.take_limits(table, self.case.limit_seconds / LIMIT_TURNS)]
        default = OptionsRow(table, "gdsdata_default", "the default", self.base, {})
        table.rows, options, gain = [default], {}, confirmed([])

        def rate_of(tried):
            run = self.one_run(table, tried)
            return run["bytes"] / run["seconds"] / 1e9

        with self.progress.count(f"search: {table.full_name}", sum(map(len, space.values())) + len(space)) as advance:
            search = Search(space, rate_of, budget_s * SEARCHING, self.random, advance)
            try:
                self.one_run(table, {})
                options = search.run()
            except (WrongBytes, Refused) as error:
                default.error = str(error)
        if options:
            table.rows.append(OptionsRow(table, "gdsdata_tuned", "the best found", self.base, options))
        if not default.error:
            gain = self.compare_with_default(table, options, began + budget_s)
        turns.append(self.take_limits(table, self.case.limit_seconds / LIMIT_TURNS))
        for one in table.rows:
            one.checked = self.checked.get(key_of(one.options), {})
        self.answers.append(self.answer(table, search, options, gain) | {"budget_s": budget_s})
        return limits.over_turns(turns)

    def space(self, table):
        """{parameter: values to try}, without those of the default and those that cannot matter."""
        on_gpu, writes = device.is_cuda(self.device), table.source.kind == "write"
        default = EngineOptions(**self.base)
        segment_kib = (4096 if on_gpu else 8192) if writes else (3072 if on_gpu else 512)
        same = {"queue_depth": 64, "segment_bytes": segment_kib << 10}
        found = {}
        for name in SEARCHED:
            own = getattr(default, name)
            values = [one for one in getattr(self.case, name) if one != (own or same.get(name))]
            if values and not (table.cache == "warm" and name in OF_STORAGE):
                found[name] = values
        return found

    def one_run(self, table, tried):
        """A run with these options; new ones are verified first. Raises Refused, WrongBytes."""
        options, key = self.base | tried, key_of(tried)
        try:
            if key not in self.checked:
                self.checked[key] = self.processes[KEY].ask("verify", options=options)
            if table.cache == "warm":
                self.warmed(table.source)
            self.processes[KEY].ask("open", options=options)
            resident = None
            if table.cache == "warm":
                resident = system.resident_share(table.source.files)
            elif table.cache == "cold":
                resident = system.drop(table.source.files)
            asked = {"seconds": self.case.run_seconds, "once": table.cache == "cold"}
            return self.processes[KEY].run(**asked) | {"resident_before": resident}
        except RowFailed as failed:
            if str(failed).startswith(WrongBytes.__name__):
                raise WrongBytes(f"with {options}: {failed}") from None
            if self.processes[KEY].process.poll() is not None:  # The next setting needs a new one.
                del self.processes[KEY]
                self.prepare_row(table.source)
            raise Refused(str(failed)) from None

    def compare_with_default(self, table, options, ends):
        """Fills the rows' runs: pairs in random order, as many as there is time for."""
        pairs = self.case.repeats if options else min(DEFAULT_RUNS, self.case.repeats)
        with self.progress.count(f"confirm: {table.full_name}", pairs) as advance:
            try:
                for pair in range(pairs):
                    if pair >= LEAST_PAIRS and time.monotonic() > ends:
                        break
                    for one in self.random.sample(table.rows, len(table.rows)):
                        one.runs.append(self.one_run(table, one.options))
                    advance(1)
            except (WrongBytes, Refused) as error:
                one.error = str(error)
        if not options or one.error:
            return confirmed([])
        default, best = (one.rates for one in table.rows)
        return confirmed([after / before for before, after in zip(default, best, strict=True)])

    def answer(self, table, search, options, gain):
        found = self.base | options
        best = found if gain["confirmed"] else self.base
        name = f"{table.source.kind}_{table.cache}"
        text = yaml_text(best, f"case=tune, {table.full_name}, {self.device}: {said(gain)}")
        folder = self.folder / "engine"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(text)
        refused = {one.error for one in search.tried if one.error}
        self.notes += [f"{table.full_name}: a setting was left out: {error}" for error in sorted(refused)]
        if search.tried and not search.complete:
            self.notes.append(
                f"{table.full_name}: the budget ended before every value was tried: case.budget_s= gives more, fewer "
                "values or a shorter case.run_seconds= take less."
            )
        return {
            "data": table.source.kind,
            "dtype": table.dtype,
            "cache": table.cache,
            "complete": search.complete,
            "base": self.base,
            "found": found,
            "best": best,
            "gain": gain,
            "group": name,
            "yaml": text,
            "command": self.command(table, best),
            "tried": [
                {"comparison": one.number, "parameter": one.parameter, "options": one.options, "gb_per_s": one.rates,
                 "error": one.error} for one in search.tried
            ],
        }  # fmt: skip

    def command(self, table, options):
        """The nearest case of the bench, with these options."""
        settings, source = self.settings.data, table.source
        if source.kind == "batches":
            parts = ["case=loader", f"data={source.source.kind}", *overrides("data", settings, ["kind"])]
        else:
            parts = ["case=latency", f"case.work=[{source.kind}]", f"case.sizes_bytes=[{source.tensor_bytes}]"]
            folder = place_for_writes(settings) if settings.path else settings.folder
            if folder:
                parts.append(f"data.folder={quoted(str(folder))}")
        if source.kind != "write":
            parts.append(f"case.cache=[{table.cache}]")
        parts += ["case.rows=[gdsdata]", f"device.name={self.device}"]
        parts += [f"engine.{name}={value}" for name, value in options.items()]
        return shlex.join(["python", *MODULE_ARGUMENTS, *parts])

    def take_limits(self, table, seconds):
        source = table.source
        if source.kind == "write":
            return limits.durable_writes(source.files[0], source.tensor_bytes)
        return super().take_limits(table, seconds)

    def limit_for(self, table, found):
        if table.source.kind != "batches":
            return super().limit_for(table, found)
        return limits.limit_for(table.source.source, table.cache, table.source.cold_samples(), found)


def yaml_text(options, comment):
    """Return a file of Hydra's group `engine`."""
    lines = [f"# {comment}", "defaults:", "  - engine_options", "  - _self_", ""]
    return "\n".join([*lines, *(f"{name}: {json.dumps(value)}" for name, value in options.items())]).rstrip() + "\n"


def key_of(options):
    return tuple(sorted(options.items()))


def plain_files(path):
    """All files of a folder that are not empty, or those that sources.expand finds."""
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        found = sorted(entry.path for entry in os.scandir(path) if entry.is_file() and entry.name[0] != ".")
    else:
        found = sources.expand(path)
    files = [os.path.abspath(one) for one in found if os.path.getsize(one)]
    if not files:
        raise DataError(f"data.path={path}: no file there that is not empty")
    return files


def place_for_writes(settings):
    """A folder on the file system that the settings name."""
    if settings.path:
        path = Path(settings.path).expanduser()
        return path if path.is_dir() else Path(plain_files(settings.path)[0]).parent
    folder = data_folder(settings)
    make_folder(folder)
    return folder

"""The bench's side of case=checkpoint: each kind of work is a source of its own.

- `save` writes a new file and, with overwrite=true, over an older one, until all is on storage.
- `load` fills tensors that exist, warm and cold.
- `async` measures how long save() blocks the caller, the first time and once staging memory exists.

The state is made anew before each run and dropped behind it, so that one process at a time holds
it. It exists when the clock starts, so `peak_bytes` are what saving or loading takes on top.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from gdsdata.bench.cases.checkpoint import stock
from gdsdata.bench.data import checkpoints
from gdsdata.bench.data.made import need_space
from gdsdata.bench.data.sources import CaseSource
from gdsdata.bench.harness.case import Case
from gdsdata.bench.harness.process import RowFailed
from gdsdata.bench.measure import limits

SUFFIXES = {"pt": ".pt", "safetensors": ".safetensors", "raw": ".bin"}  # other formats are folders


@dataclass
class Work(CaseSource):
    """One kind of work; `saved` has the files to load, by format."""

    kind: str
    state: checkpoints.State
    folder: Path
    saved: dict = field(default_factory=dict)

    @property
    def files(self):
        return [file for saved in self.saved.values() for file in saved.files] or [self.folder]

    def path(self, key, file_format):
        return str(self.folder / (key + SUFFIXES.get(file_format, "")))

    def path_of(self, key, saves, loads):
        """Return the path of a row's checkpoint, by the formats that it saves and loads."""
        return self.saved[loads].path if self.kind == "load" else self.path(key, saves)

    @property
    def dtype(self):
        return "+".join(self.state.dtypes)

    def summary(self):
        return self.state.summary()


class Checkpoint(Case):
    of_runs = ("background_s", "step_s", "step_beside_s")
    ratios = (("ratio_to_mapped", "safetensors", ("load",)),)  # That row copies out of a mapped file.

    def sources(self):
        asked = self.case
        state = checkpoints.State(asked.state_bytes, asked.tensors, asked.dtypes, asked.seed)
        for kind in asked.work:
            work = Work(kind, state, self.files_folder)
            # A save beside an older one or a limit's file, or three formats.
            need_space(work.folder, f"case.work=[{kind}]", 3 * state.bytes, "case.state_bytes=")
            if kind == "load":
                self.write_files(work)
            self.end_rows()  # Each work times a first call in a new process.
            yield work
            for saved in work.saved.values():
                saved.remove()

    def write_files(self, work):
        """Files of every format that a row loads, all of the same state."""
        described = self.start(work, self.wanted(work, self.case.cache[0]))
        formats = {said["loads"] for said in described.values() if not isinstance(said, RowFailed)}
        writers = {name: stock.writer_of(name, self.case.written_by) for name in sorted(formats)}
        self.start(work, [writer.key for writer in writers.values()])
        with self.progress.count("files to load", len(writers)) as advance:
            for name, writer in writers.items():
                work.saved[name] = checkpoints.Saved(work.path("saved", name))
                try:
                    self.processes[writer.key].ask("write", path=work.saved[name].path)
                except RowFailed as failed:
                    self.notes.append(f"{writer.name} could not write the {name} file that is loaded: {failed}")
                advance(1)
        self.notes.append(
            "load: files were written by " + ", ".join(f"{one.name} ({name})" for name, one in writers.items()) + "."
        )

    def facts(self, source):
        return {
            "tensors": source.state.tensors,
            "state_bytes": source.state.bytes,
            "file_bytes": {name: saved.file_bytes for name, saved in source.saved.items()},
        }

    def caches(self, source):
        if source.kind == "load":
            return super().caches(source)
        if source.kind == "async":
            return ["staged"]
        return ["new", "replaced"] if self.case.overwrite else ["new"]

    def host_bytes(self, source):
        return source.state.bytes + checkpoints.STATE_PIECE_BYTES

    def read_by(self, row):
        formats = (row.described[name] for name in ("saves", "loads"))
        return checkpoints.Saved(row.table.source.path_of(row.key, *formats))

    def with_cache(self, source, cache):
        return super().with_cache(source, cache) if cache in ("warm", "cold") else None

    def run(self, row):
        """One run; untimed, saved files are then removed, and loaded tensors compared."""
        saves = row.table.source.kind != "load"
        if saves:
            row.process.ask("begin", cache=row.table.cache)
        try:
            result = super().run(row)
            row.process.ask("compare")
        finally:
            if saves:
                self.read_by(row).remove()
        result["peak_bytes"] += result.pop("staging_bytes", 0)
        return result

    def take_limits(self, table, seconds):
        source = table.source
        if source.kind == "save":
            return limits.durable_writes(source.folder, source.state.bytes)
        if table.cache == "cold":
            return limits.sequential_reads([max(source.files, key=os.path.getsize)])
        if source.kind == "load":
            return super().take_limits(table, seconds)
        return self.copy_limit(source, seconds, to_host=True)

    def summary(self, row):
        stated = [run["stated_bytes"] for run in row.runs if run["stated_bytes"] is not None]
        return super().summary(row) | {"stated_bytes": max(stated, default=None)}

"""The bench's side of case=startup.

Each run is a process of its own (`script`), which notes when each part was over; `starts` adds when
it was started. A source is a file of tokens with a checkpoint of some size, or without. The row
`floor` is the same script without a library and without files. The first batch and the restored
tensors of every run are compared with what was written, while its clock stands. A run that is not
timed comes first: it leaves Python's compiled modules in their folders, and the files of all
libraries in the page cache.
"""

import functools
import importlib.util
import os
import time
from pathlib import Path

import torch

import gdsdata
from gdsdata.bench.cases.startup import script
from gdsdata.bench.cases.startup.script import OWN_PARTS
from gdsdata.bench.cases.startup.starts import Beginning, Script, windows_of, write_checkpoints
from gdsdata.bench.data.made import need_space
from gdsdata.bench.harness.case import Case
from gdsdata.bench.harness.process import RowFailed
from gdsdata.bench.measure import system

PACKAGE = Path(gdsdata.__file__).parent


class Startup(Case):
    most_touched, of_runs = 0, ("to_first_batch_s", "own_s", "cpu_seconds")

    def row_process(self, key):
        return Script(self.log, key, self.find(key))

    def sources(self):
        settings, tokens = self.settings.data, self.data_set("tokens")
        with self.progress.step("checksums: tokens"):
            windows = windows_of(tokens, settings.seq_len)
        for state_bytes in sorted(set(self.case.state_bytes)):
            source = Beginning(tokens, state_bytes, windows=windows)
            if state_bytes:
                formats = self.formats(source)
                name = f"case.state_bytes=[{state_bytes}]"
                need_space(self.files_folder, name, len(formats) * state_bytes, "case.state_bytes=")
                with self.progress.step(f"data: {source.kind}"):
                    write_checkpoints(source, formats, self.files_folder, settings.seq_len, self.case.seed)
            yield source
            for path in source.checkpoints.values():
                Path(path).unlink(missing_ok=True)

    def facts(self, source):
        return super().facts(source) | {
            "state_bytes": source.state_bytes,
            "tensors": len(source.checksums),
            "batch_size": self.case.batch_size,
        }

    def rows_for(self, source, cache):
        return [one for one in script.programs(self.case.workers) if source.state_bytes or not one.needs_state]

    def formats(self, source):
        """The formats of the checkpoints that the wanted rows restore."""
        rows = map(self.find, self.wanted(source, "warm"))
        return sorted({row.state_format for row in rows if row.restores and not self.missing(row)})

    def wanted(self, source, cache):
        """Adds the floor, from which all others are measured, whichever rows are wanted."""
        keys = super().wanted(source, cache)
        return keys if "floor" in keys else ["floor", *keys]

    def find(self, key):
        return script.find(key, self.case.workers)

    def load_command(self, source):
        told = {
            "workers": self.case.workers,
            "tokens": source.tokens.files[0],
            "seq_len": self.settings.data.seq_len,
            "batch_size": self.case.batch_size,
            "state_bytes": source.state_bytes,
            "files": source.checkpoints,
            "device": self.device,
            "seed": self.case.seed,
            "engine": self.settings.engine,
        }
        return {"told": told}

    def verify(self, source, rows, loaded):
        self.warmed(source)
        super().verify(source, rows, loaded)
        if not os.path.exists(importlib.util.cache_from_source(str(PACKAGE / "data" / "dataset.py"))):
            self.notes.append(
                f"Python could not keep gdsdata's compiled modules in {PACKAGE}: each start compiled them."
            )

    def verify_command(self, row):
        check = functools.partial(self.check, row.table.source, row.key)
        return {"runs": self.case.warm_up, "check": check}

    def bytes_of(self, source, key):
        batch_bytes = self.case.batch_size * (self.settings.data.seq_len + 1) * 2
        return 0 if key == "floor" else batch_bytes + source.tensor_bytes

    def check(self, source, key, answer):
        """The bytes that were compared.

        Raises RowFailed unless each of the batch's windows is one of the file's, and each tensor is
        as written.
        """
        due = [self.case.batch_size, self.settings.data.seq_len + 1]
        batch, there = answer["batch"], torch.device(self.device).type
        if batch["shape"] != due or batch["dtype"] != "torch.int64" or batch["device"] != there:
            raise RowFailed(
                f"first batch: {batch['dtype']} {batch['shape']} on {batch['device']}, torch.int64 {due} on {there} "
                "were due"
            )
        if key == "floor":
            return 0
        strange = sum(window not in source.windows for window in answer["windows"])
        if strange:
            raise RowFailed(f"first batch: {strange} of its {due[0]} windows are none of {source.tokens.files[0]}")
        wrong = [name for name, due in source.checksums.items() if answer["restored"].get(name) != due]
        if wrong:
            raise RowFailed(
                f"restore: {len(wrong)} of {len(source.checksums)} tensors are not what the checkpoint holds, the "
                f"first of them {wrong[0]!r}"
            )
        return self.bytes_of(source, key)

    def take_limits(self, table, seconds):
        return {}  # The floor is the only limit.

    def limit_for(self, table, found):
        return None, "the row `floor`"

    def run(self, row):
        source = row.table.source
        resident = self.with_cache(source, row.table.cache)
        clock, machine, here = time.monotonic(), system.machine_cpu_seconds(), system.cpu_seconds()
        answer = row.process.start()
        used = system.cpu_seconds() - here  # of the script and its workers, which have ended
        others = max(0.0, system.machine_cpu_seconds() - machine - used) / (time.monotonic() - clock)
        checked_bytes = row.checked["checked_bytes"] + self.check(source, row.key, answer)
        row.checked = {"checked_bytes": checked_bytes}
        parts = parts_of(answer)
        to_batch = sum(seconds for name, seconds in parts.items() if name != "first_step")
        return {
            "bytes": self.bytes_of(source, row.key),
            "seconds": sum(parts.values()),
            "parts_s": parts,
            "to_first_batch_s": to_batch,
            "own_s": sum(parts[name] for name in OWN_PARTS if name in parts),
            "resident_before": resident,
            "cpu_seconds": used - answer["stood_cpu_s"],
            "others_cores": others,
            "peak_bytes": answer["peak_bytes"],
            "served": answer["served"],
            "path": row.process.program.way,
        }

    def summary(self, row):
        parts = row.runs[0]["parts_s"] if row.runs else ()
        return super().summary(row) | {
            "parts_s": {name: system.spread([run["parts_s"][name] for run in row.runs]) for name in parts},
            "gb_per_s": None,  # A start is compared by its seconds.
            "cpu_s_per_gb": None,
        }

    def compared(self, table, limit, limit_name):
        """Adds each row's time above the floor of the same turn: a busy moment slows both."""
        rows = super().compared(table, limit, limit_name)
        floors: list[dict] = next((row["runs"] for row in rows if row["key"] == "floor"), [])
        for row in rows:
            pairs = list(zip(row["runs"], floors, strict=False))
            for name, of in (("above_floor_s", "seconds"), ("batch_above_floor_s", "to_first_batch_s")):
                row[name] = system.spread([run[of] - floor[of] for run, floor in pairs])
        return rows


def parts_of(answer):
    """Seconds of each part, from when they were over."""
    parts, before = {}, answer["spawned"]
    for name, over in answer["over"].items():
        parts[name], before = over - before, over
    return parts

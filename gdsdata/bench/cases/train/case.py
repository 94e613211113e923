"""The bench's side of case=train: each kind of work (text, volumes, images) has a table.

Every row runs the same loop on a model that starts alike: forward, backward and optimizer, bf16 on
a GPU. The ceiling's batch stays on the device, so the loop never waits; it takes its turns among
the others. Rows that save write a checkpoint of model and optimizer every so many steps.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from gdsdata.bench.cases.loader.case import Copying
from gdsdata.bench.cases.train import models
from gdsdata.bench.data import images, text
from gdsdata.bench.data.made import DataError
from gdsdata.bench.data.sources import DataSet
from gdsdata.bench.harness.process import RowFailed
from gdsdata.bench.harness.tables import Table
from gdsdata.bench.measure import intervals, system

CEILING = "ceiling"  # the key of the row without a loader
BATCH_SIZES = {"cuda": {"text": 32, "volumes": 16, "images": 64}, "cpu": {"text": 8, "volumes": 8, "images": 8}}
REACHED = 1.2  # times the wanted step: a longer one is noted


@dataclass
class Work(DataSet):
    """One kind of work: the files, and how often a step goes through the model's body."""

    folder: Path | None = None  # of checkpoints
    repeats: float = 1


class Train(Copying):
    no_peers, most_touched = (CEILING,), 64 * 2**20
    of_runs = ("device_step_s", "waiting_share", "next_s", "idle_share", "cpu_cores")

    def sources(self):
        settings = self.settings.data
        for kind in self.case.work:
            if kind == "images" and (why := images.missing()):
                self.notes.append(f"images were left out: {why}.")
                continue
            with self.progress.bytes(f"data: {kind}", settings.size_bytes) as advance:
                source = text.source_for(kind, settings, self.case, advance)
            models.check_shape(kind, source.shape)
            if source.samples < self.batch_size(kind):
                raise DataError(
                    f"{kind}: {source.samples} samples are not one batch of {self.batch_size(kind)}: set "
                    "case.batch_size= to less, or data.size_bytes= (case.images=) to more"
                )
            work = Work(kind, source, self.batch_size(kind), folder=self.files_folder)
            if self.case.step_ms:
                self.calibrate(work)
            yield work

    def batch_size(self, kind):
        return self.case.batch_size or BATCH_SIZES[torch.device(self.device).type][kind]

    def calibrate(self, work):
        """Sets its repeats, once for all rows, in a process that is then gone."""
        process, wanted_s = self.process("calibration"), self.case.step_ms / 1e3
        with self.progress.step(f"steps: {work.kind}"):
            try:
                process.ask("load", key="ceiling", **self.load_command(work))
                found = process.ask("calibrate", dtype=self.dtypes(work, None)[0])
            except RowFailed as failed:
                raise ValueError(f"case.step_ms={self.case.step_ms:g}, {work.kind}: {failed}") from None
            finally:
                self.processes.pop("calibration").end()
        work.repeats = found["repeats"]
        if found["step_s"] > REACHED * wanted_s:
            self.notes.append(
                f"{work.kind}: a step took {found['step_s'] * 1e3:.3g} ms by itself with its body gone through "
                f"{work.repeats:g} time(s), where case.step_ms={self.case.step_ms:g} was wanted: a smaller "
                "case.batch_size= makes it shorter."
            )

    def facts(self, source):
        return super().facts(source) | {"repeats": source.repeats}

    def dtypes(self, source, cache):
        return ["raw" if source.kind == "text" else source.dtype]

    def rows_for(self, source, cache):
        rows = super().rows_for(source, None)
        return [peer for peer in rows if self.case.checkpoint_every or peer.saver is None]

    def missing(self, peer):
        return super().missing(peer) or (peer.saver.lacks() if peer.saver else "")

    def verify_command(self, row):
        """With the workers that the loader's row without saving has found best, if it has."""
        loader_row = next((one for one in row.table.rows if one.key == base_key(row.key) and one is not row), None)
        workers = loader_row.checked.get("workers") if loader_row else None
        return {"dtype": row.table.dtype, "workers": workers}

    def take_limits(self, table, seconds):
        """Measures what bytes cross: the GPU's link, both ways, or the CPU's memory."""
        if not self.limits_process:
            return self.copy_limit(table.source, seconds)
        return self.copy_limit(table.source, seconds / 2) | self.copy_limit(table.source, seconds / 2, to_host=True)

    def time_table(self, table):
        found = super().time_table(table)
        self.link_gb_per_s = found["pinned_copy_to_host" if self.limits_process else "memory_copy"]["gb_per_s"]
        return found

    def limit_for(self, table, found):
        ceiling = next((row for row in table.rows if row.key == CEILING and row.runs), None)
        if ceiling is None:
            return None, "the row `ceiling` was left out or has failed"
        return statistics.median(ceiling.rates), "zero-I/O ceiling"

    def summary(self, row):
        runs, stalls = row.runs, [stall for run in row.runs for stall in run["stalls_s"]]
        state_bytes = max((run["state_bytes"] for run in runs), default=0)
        return super().summary(row) | {
            "steps_per_s": system.spread([run["steps"] / run["seconds"] for run in runs]),
            "wall_step_s": system.spread([run["seconds"] / run["steps"] for run in runs]),
            "saves": len(stalls),
            "state_bytes": state_bytes or None,
            "stall_s": intervals.described(stalls) if stalls else None,
            "least_stall_s": state_bytes / self.link_gb_per_s / 1e9 if state_bytes else None,
            "verdict": runs[-1]["verdict"] if runs else "",
            "cut": any(run["cut"] for run in runs),
        }

    def compared(self, table, limit, limit_name):
        """Compares rows that save; adds what a checkpoint adds to its loader's loop."""
        found = []
        for saves in (False, True):
            rows = [row for row in table.rows if saves == (self.find(row.key).saver is not None)]
            part = Table(table.source, table.dtype, table.cache, rows)
            found += super().compared(part, limit, limit_name)
        steps_s = {row["key"]: row["wall_step_s"]["median"] for row in found if row["wall_step_s"]}
        for row in found:
            without = steps_s.get(base_key(row["key"])) if row["saves"] else None
            more_s = steps_s[row["key"]] - without if without else None
            row["save_cost_s"] = more_s and more_s * self.case.checkpoint_every
        return found


def base_key(key):
    """The key of the same loader's row that does not save."""
    return key.split("_")[0]

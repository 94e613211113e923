"""The bench's side of case=replicas: each kind of work is a source of its own."""

from gdsdata.bench.cases.load.case import checkpoint_of
from gdsdata.bench.cases.replicas.ranks import Ranks
from gdsdata.bench.data import checkpoints, sources
from gdsdata.bench.data.made import PIECE_BYTES
from gdsdata.bench.harness.case import Case
from gdsdata.bench.harness.process import RowFailed
from gdsdata.bench.measure import device, limits, system

OF_RANKS = "ranks"  # the process whose ranks measure limits, and none of them is a row


class Volumes(sources.DataSet):
    """A data set in batches; every rank takes all of them."""

    @property
    def bytes(self):
        return self.source.samples * self.source.sample_bytes


class Replicas(Case):
    ratios, reads_once = (("ratio_to_alone", "gdsdata_alone", ()),), True

    def sources(self):
        if lack := self.case.lack(self.device):
            raise ValueError(lack)
        made = None
        for name in self.case.work:
            self.end_rows()  # Each work times a first call in a new process.
            if name == "volumes":
                yield Volumes(name, self.data_set("npy"), self.case.batch_size)
            else:
                made = made or checkpoint_of(self, "pt" in self.case.work)
                yield checkpoints.in_format(name, made, self.settings.data)

    def facts(self, source):
        return super().facts(source) | {"ranks": self.case.ranks}

    def host_bytes(self, source):
        return source.bytes + PIECE_BYTES

    def row_process(self, key):
        return Ranks(self.log, self.case, self.device)

    def row_class(self, source):
        return f"{__package__}.rank:{'VolumesRank' if source.kind == 'volumes' else 'TensorsRank'}"

    def run(self, row):
        row.process.ask("open", dtype=row.table.dtype)
        return super().run(row)

    # ------------------------------------------------------------------------------------------------ limits

    def take_limits(self, table, seconds):
        return super().take_limits(table, seconds) | self.of_ranks(table, seconds)

    def of_ranks(self, table, seconds):
        """Measure what needs all ranks; a rank that fails makes it unavailable."""
        names = ["all_gather"]
        if table.cache == "warm" and device.is_cuda(self.device):
            names.append("pinned_copies")
        try:
            if OF_RANKS not in self.processes:
                command = self.load_command(table.source) | {"row": f"{__package__}.rank:LimitsRank"}
                self.process(OF_RANKS).ask("load", key=OF_RANKS, **command)
            return {name: self.processes[OF_RANKS].ask(name, seconds=seconds) for name in names}
        except RowFailed as failed:
            return {name: {"unavailable": str(failed)} for name in names}

    def limit_for(self, table, found):
        """Return the limit of every row: all links together, or one reading of the disk."""
        ranks = self.case.ranks
        if "pinned_copies" in found:
            return limits.rate_of(found["pinned_copies"], f"pinned copies to {ranks} GPUs at once")
        rate, name = super().limit_for(table, {key: one for key, one in found.items() if key != "all_gather"})
        if rate and table.cache == "warm":
            return rate / ranks, f"{name}, shared by {ranks} ranks"
        return rate, name

    # ------------------------------------------------------------------------------------------------ what is reported

    def summary(self, row):
        """CPU time is that of all ranks, for each GB that one of them got."""
        ranks, runs = self.case.ranks, row.runs
        return row.summary() | {
            "batches_per_s": system.spread([run["batches"] / run["seconds"] for run in runs if "batches" in run]),
            "cpu_s_per_gb": system.spread([run["cpu_seconds"] / (ranks * run["bytes"] / 1e9) for run in runs]),
            "device_peak_bytes": max((run["device_peak_bytes"] for run in runs), default=None),
            "storage_x": system.spread([run["storage_bytes"] / row.table.source.file_bytes for run in runs]),
        }

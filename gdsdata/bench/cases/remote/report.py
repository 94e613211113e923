"""Tables of case=remote."""

from gdsdata.bench.measure.system import size_text
from gdsdata.bench.report.columns import BEST_PEER, CPU, GB_PER_S, PATH, PEAK, SPREAD, X_LIMIT, figure, whole
from gdsdata.bench.report.layout import Layout

FIRST_BATCH = figure("first batch ms", "first_batch_ms")


class RemoteLayout(Layout):
    columns = (
        GB_PER_S, SPREAD, figure("connections", "connections", whole), figure("pieces/s", "pieces_per_s", whole), CPU,
        figure("server CPU s/GB", "server_cpu_s_per_gb", on_terminal=False),
        figure("verified MB", "checked_bytes", whole, 1e-6, on_terminal=False), PEAK, PATH, BEST_PEER, X_LIMIT,
    )  # fmt: skip

    def columns_of(self, rows):
        if rows[0]["data"] != "shards":
            return self.columns
        return (*self.columns[:2], FIRST_BATCH, *self.columns[3:])

    def title(self, rows):
        if rows[0]["data"] == "shards":
            there = "from a full cache on the local disk" if rows[0]["cache"] == "warm" else "with an empty cache"
            return f"shuffled batches of shards, an epoch {there}, to {self.device}"
        row, about = rows[0], self.results["data"][rows[0]["data"]]
        what = {"ranges": "shuffled ranges", "objects": "whole objects", "samples": "shuffled samples"}[row["data"]]
        of_bytes = f" of {size_text(row['piece_bytes'])}" if row["piece_bytes"] else ""
        return f"{what}{of_bytes}, from {about['file_system']}, to {self.device}"

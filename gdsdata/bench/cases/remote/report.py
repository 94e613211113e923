"""Tables of case=remote."""

from gdsdata.bench.measure.system import size_text
from gdsdata.bench.report.columns import BEST_PEER, CPU, FIRST, PATH, PEAK, RATE, X_LIMIT, figure, hundredths, whole
from gdsdata.bench.report.layout import Layout

FIRST_BATCH, SERVER_CPU = (
    figure("first batch ms", "first_batch_ms"), figure("server CPU s/GB", "server_cpu_s_per_gb", on_terminal=False),
)  # fmt: skip
FIRST_BATCHES = (
    FIRST_BATCH, figure("least", "first_batch_ms.min"), figure("most", "first_batch_ms.max"),
    figure("round trip ms", "round_trip_ms"), figure("x due", "ratio_to_due", hundredths), PATH, BEST_PEER,
)  # fmt: skip
LOCAL = figure("x local files", "ratio_to_local", hundredths)
PIECES = (figure("pieces/s", "pieces_per_s", whole), CPU, SERVER_CPU)
LAST = (figure("verified MB", "checked_bytes", whole, 1e-6, on_terminal=False), PEAK, PATH, BEST_PEER, X_LIMIT)
COLUMNS = {
    "shards": (*RATE[:2], FIRST_BATCH, *PIECES, *LAST),
    "first_batch": FIRST_BATCHES,
    "load": (*RATE, FIRST, CPU, SERVER_CPU, *LAST),
    "save": (*RATE, FIRST, CPU, SERVER_CPU, *LAST),
}
TITLES = {
    "ranges": "shuffled ranges", "objects": "whole objects", "samples": "shuffled samples",
    "shards": "shuffled batches of shards, an epoch", "load": "load of a checkpoint", "save": "save of a checkpoint",
    "first_batch": "the first batch of a new process",
}  # fmt: skip
CACHES = {"cold": ", with an empty cache", "warm": ", from a full cache on the local disk"}


class RemoteLayout(Layout):
    columns = (*RATE[:2], figure("connections", "connections", whole), *PIECES, *LAST)

    def columns_of(self, rows):
        columns = COLUMNS.get(rows[0]["data"], self.columns)
        return (*columns, LOCAL) if (rows[0]["data"], rows[0]["cache"]) == ("shards", "warm") else columns

    def caption(self, rows):
        if rows[0]["data"] == "first_batch":
            return "due: 100 ms and three round trips"
        return super().caption(rows)

    def title(self, rows):
        work, there = rows[0]["data"], self.results["data"][rows[0]["data"]]["file_system"]
        of_bytes = f" of {size_text(rows[0]['piece_bytes'])}" if rows[0]["piece_bytes"] else ""
        cache = CACHES[rows[0]["cache"]] if work in ("shards", "first_batch") else ""
        way = f"from {self.device}, to {there}" if work == "save" else f"from {there}, to {self.device}"
        return f"{TITLES[work]}{of_bytes}{cache}, {way}"

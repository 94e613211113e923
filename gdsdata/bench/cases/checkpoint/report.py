"""Tables of case=checkpoint."""

from gdsdata.bench.report.columns import BEST_PEER, CPU, PATH, PEAK, RATE, X_LIMIT, figure, hundredths, whole
from gdsdata.bench.report.layout import Layout

OF_ASYNC = (
    figure("then ms", "background_s", scale=1e3), figure("step ms", "step_s", scale=1e3),
    figure("beside it", "step_beside_s", scale=1e3),
    figure("before first", "step_before_first_s", scale=1e3, on_terminal=False),
)  # fmt: skip
STATED, MAPPED = figure("stated MB", "stated_bytes", whole, 1e-6), figure("x mapped", "ratio_to_mapped", hundredths)
TITLES = {
    "new": "save to a new file",
    "replaced": "save over an older file",
    "warm": "load, warm cache",
    "cold": "load, cold cache",
    "staged": "stall of an asynchronous save",
}


class CheckpointLayout(Layout):
    def columns_of(self, rows):
        kind = rows[0]["data"]
        of_async, mapped = (OF_ASYNC if kind == "async" else ()), ((MAPPED,) if kind == "load" else ())
        return (*RATE, *self.first_call(rows), *of_async, CPU, PEAK, STATED, PATH, *mapped, BEST_PEER, X_LIMIT)

    def title(self, rows):
        row, about = rows[0], self.results["data"][rows[0]["data"]]
        what = f"{about['state_bytes'] / 2**20:,.0f} MiB of {row['dtype']} in {about['tensors']:,} tensors"
        return f"{TITLES[row['cache']]}: {what}, {'to' if row['data'] == 'load' else 'from'} {self.device}"

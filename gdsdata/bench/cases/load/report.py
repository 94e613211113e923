"""Tables of case=load."""

from gdsdata.bench.report.columns import BEST_PEER, CPU, PATH, PEAK, RATE, X_LIMIT
from gdsdata.bench.report.layout import Layout


class LoadLayout(Layout):
    def columns_of(self, rows):
        return (*RATE, *self.first_call(rows), CPU, PEAK, PATH, BEST_PEER, X_LIMIT)

    def title(self, rows):
        row, about = rows[0], self.results["data"][rows[0]["data"]]
        what = f"{about['loaded_bytes'] / 2**20:,.0f} MiB of {row['dtype']} in {about['tensors']:,} tensors"
        return f"{row['data']}, {what}, to {self.device}, {row['cache']} cache"

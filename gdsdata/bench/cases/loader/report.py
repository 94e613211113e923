"""Tables of case=loader."""

from gdsdata.bench.report.columns import BEST_PEER, CPU, GB_PER_S, PATH, PEAK, SPREAD, X_LIMIT, figure, whole
from gdsdata.bench.report.layout import Layout

OF_EPOCHS = (figure("first epoch", "first_epoch_gb_per_s"), figure("later", "later_gb_per_s"))


class LoaderLayout(Layout):
    grouped_by = ("data_set", "dtype", "cache")

    def columns_of(self, rows):
        of_epochs = OF_EPOCHS if rows[0]["cache"] == "warm" else ()
        return (
            figure("batch", "batch_size", whole), figure("samples/s", "samples_per_s", whole), SPREAD, GB_PER_S,
            *of_epochs, figure("first batch ms", "first_batch_ms"), CPU, PEAK, PATH, BEST_PEER, X_LIMIT,
        )  # fmt: skip

    def title(self, rows):
        row, about = rows[0], self.results["data"][rows[0]["data"]]
        amount = f", {about['cold_samples']:,} samples" if row["cache"] == "cold" else ""
        there = "" if self.device == "cpu" else f", to {self.device}"
        return f"{row['data_set']}, {row['dtype']}, shuffled, {row['cache']} cache{amount}{there}"

    def caption(self, rows):
        rate, name = rows[0]["limit"]["gb_per_s"], rows[0]["limit"]["name"]
        if rate is None:
            return super().caption(rows)
        samples_per_s = rate * 1e9 / self.results["data"][rows[0]["data"]]["sample_bytes"]
        return f"limit: {name}, {samples_per_s:,.0f} samples/s, {rate:.2f} GB/s"

    def bar_text(self, row):
        return f"{row['samples_per_s']['median']:,.0f} samples/s, batch {row['batch_size']}"

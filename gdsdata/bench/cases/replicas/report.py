"""Tables of case=replicas."""

from gdsdata.bench.report.columns import BEST_PEER, CPU, PATH, PEAK, RATE, X_LIMIT, figure, hundredths, whole
from gdsdata.bench.report.layout import Layout

STORAGE, ALONE = figure("storage x", "storage_x", hundredths), figure("x alone", "ratio_to_alone", hundredths)
BATCHES, DEVICE_PEAK = figure("batches/s", "batches_per_s"), figure("GPU peak MB", "device_peak_bytes", whole, 1e-6)


class ReplicasLayout(Layout):
    picture_title = "GB per second a rank, by row"

    def columns_of(self, rows):
        on_gpu = () if self.device == "cpu" else (DEVICE_PEAK,)
        storage = (STORAGE,) if rows[0]["cache"] == "cold" else ()
        first = (BATCHES,) if rows[0]["data"] == "volumes" else self.first_call(rows)
        return (*RATE, *first, *storage, CPU, PEAK, *on_gpu, PATH, ALONE, BEST_PEER, X_LIMIT)

    def title(self, rows):
        row, about = rows[0], self.results["data"][rows[0]["data"]]
        if row["data"] == "volumes":
            what = f"{about['samples']:,} of {row['dtype']} in batches of {about['batch_size']}"
        else:
            what = f"{about['loaded_bytes'] / 2**20:,.0f} MiB of {row['dtype']} in {about['tensors']:,} tensors"
        return f"{row['data']}, {what}, to {about['ranks']} ranks on {self.device}, {row['cache']} cache"

    def caption(self, rows):
        row = rows[0]
        found = self.results["limits"][row["data"]][f"{row['dtype']}, {row['cache']}"]["all_gather"]
        rate = found.get("gb_per_s")
        gathered = "not known" if rate is None else f"{rate:.2f} GB/s a rank"
        return f"{super().caption(rows)}; all_gather of the same bytes: {gathered}"

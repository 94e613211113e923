"""Tables of case=latency, of all sizes of a kind of work and state; its picture."""

from gdsdata.bench.measure.system import size_text
from gdsdata.bench.report import picture
from gdsdata.bench.report.columns import BEST_PEER, CPU, PATH, X_LIMIT, Column, figure, three_digits, whole
from gdsdata.bench.report.layout import Layout

STATES = {
    "warm": "read, file in the page cache",
    "cold": "read, file not in the page cache",
    "replaced": "write, a new file in the old one's place, synced",
    "in_place": "write over the bytes of a file, synced",
}
OUR_STYLES = [("#1f6f8b", "o"), ("#5aa9c4", "s")]
OTHER_STYLES = [("#d08c3f", "^"), ("#7d6b91", "D"), ("#6b8e4e", "v"), ("#8c8c8c", "x")]
SHIFT = 0.22  # doublings of size, from one row's markers to the next one's


def interval(heading, field, scale):
    """A column of the mean, and how far its interval reaches to either side."""

    def cell(row):
        found = row[field]
        if found["mean_high"] is None:
            return three_digits(found["mean"] * scale)
        reach = (found["mean_high"] - found["mean"]) * scale
        return f"{three_digits(found['mean'] * scale)} ± {reach:{',.0f' if reach >= 10 else '.2g'}}"

    return Column(heading, cell)


class LatencyLayout(Layout):
    columns = (
        Column("size", lambda row: size_text(row["tensor_bytes"])), figure("n", "latency_s.count", whole),
        interval("mean µs", "latency_s", 1e6), figure("stdev", "latency_s.stdev", scale=1e6),
        figure("p50", "latency_s.median", scale=1e6), figure("p90", "latency_s.p90", scale=1e6),
        figure("p99", "latency_s.p99", scale=1e6), interval("mean MB/s", "bandwidth_gb_per_s", 1e3),
        figure("p50 MB/s", "bandwidth_gb_per_s.median", scale=1e3), CPU, PATH, BEST_PEER._replace(heading="x peer"),
        X_LIMIT,
    )  # fmt: skip
    picture_title = "Latency by size of the tensor"
    grouped_by = ("work", "cache")

    def title(self, rows):
        there = "to" if rows[0]["work"] == "read" else "from"
        return f"{STATES[rows[0]['cache']]}, {there} {self.device}"

    def caption(self, rows):
        limits = {row["tensor_bytes"]: row["limit"] for row in rows}
        return "limits: " + "; ".join(f"{size_text(size)} {limit_text(limit)}" for size, limit in limits.items())

    def plot(self, path):
        tables = picture.tables_with(self, "latency_s")
        if not tables:
            return
        keys = dict.fromkeys(row["key"] for _, rows in tables for row in rows)
        styles = picture.looks(keys, OUR_STYLES, OTHER_STYLES)
        across = min(2, len(tables))
        down = -(-len(tables) // across)
        with picture.panels(path, down, across, figsize=(6.2 * across, 4.2 * down + 0.6)) as (figure_, axes):
            for axis in axes.flat[len(tables) :]:
                axis.axis("off")
            for axis, (title, rows) in zip(axes.flat, tables, strict=False):
                panel(axis, title, rows, styles)
            picture.legend(figure_, 5)
            figure_.suptitle("Markers: median latency. Bars: from there to p99.", fontsize=9, x=0.01, ha="left")


def limit_text(limit):
    if limit["gb_per_s"] is None:
        return f"not known ({limit['name']})"
    return f"{three_digits(limit['gb_per_s'])} GB/s ({limit['name']})"


def panel(axis, title, rows, styles):
    """Medians over size, with bars to p99; `styles` has each row's color and marker."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, NullLocator

    sizes = sorted({row["tensor_bytes"] for row in rows})
    keys = list(dict.fromkeys(row["key"] for row in rows))
    for place, key in enumerate(keys):
        ones = [row for row in rows if row["key"] == key]
        color, marker = styles[key]
        beside = 2 ** (SHIFT * (place - (len(keys) - 1) / 2))  # so that bars stand side by side
        at = [row["tensor_bytes"] * beside for row in ones]
        medians = [row["latency_s"]["median"] for row in ones]
        above = [row["latency_s"]["p99"] - median for row, median in zip(ones, medians, strict=True)]
        axis.errorbar(
            at, medians, yerr=[[0] * len(ones), above], color=color, marker=marker, markersize=5, linewidth=1.6,
            elinewidth=1.0, capsize=2.5, label=ones[0]["name"],
        )  # fmt: skip
    limits = {row["tensor_bytes"]: row["limit"]["gb_per_s"] for row in rows if row["limit"]["gb_per_s"]}
    if limits:
        at = sorted(limits)
        seconds = [size / limits[size] / 1e9 for size in at]
        axis.plot(at, seconds, color=picture.LIMIT, linestyle="--", linewidth=1.2, zorder=1, label=picture.BY_LIMIT)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, [size_text(size) for size in sizes])
    axis.xaxis.set_minor_locator(NullLocator())
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,)))
    axis.yaxis.set_major_formatter(EngFormatter(unit="s"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(labelsize=8)
    picture.grid(axis)
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axis.set_xlabel("size of the tensor (bytes, log scale)", fontsize=9)
    axis.set_ylabel("latency (s, log scale)", fontsize=9)

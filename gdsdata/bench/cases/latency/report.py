"""Tables of case=latency, and its picture: all sizes of one kind of work and one state stand in one
table.
"""

from gdsdata.bench.harness.tables import is_ours
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
        tables = [(title, [row for row in rows if row["latency_s"]]) for title, _, rows in self.tables()]
        tables = [(title, rows) for title, rows in tables if rows]
        if not tables:
            return
        names = {row["key"]: row["name"] for _, rows in tables for row in rows}
        across = min(2, len(tables))
        down = -(-len(tables) // across)
        with picture.panels(path, down, across, figsize=(6.2 * across, 4.2 * down + 0.6)) as (figure_, axes):
            for axis in axes.flat[len(tables) :]:
                axis.axis("off")
            lines = {}
            for axis, (title, rows) in zip(axes.flat, tables, strict=False):
                panel(axis, title, rows, names, lines)
            figure_.legend(
                lines.values(), lines.keys(), loc="outside lower center", ncols=min(5, len(lines)), frameon=False,
                fontsize=9,
            )  # fmt: skip
            figure_.suptitle("Markers: median latency. Bars: from there to p99.", fontsize=9, x=0.01, ha="left")


def limit_text(limit):
    if limit["gb_per_s"] is None:
        return f"not known ({limit['name']})"
    return f"{three_digits(limit['gb_per_s'])} GB/s ({limit['name']})"


def styles(keys):
    """{key: (color, marker)}, the same in every panel."""
    found = {}
    for palette, ours in ((OUR_STYLES, True), (OTHER_STYLES, False)):
        ones = [key for key in keys if is_ours(key) == ours]
        found |= {key: palette[place % len(palette)] for place, key in enumerate(ones)}
    return found


def panel(axis, title, rows, names, lines):
    """Medians over size, with bars to p99; `lines` collects one of each kind for the legend."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    sizes = sorted({row["tensor_bytes"] for row in rows})
    keys = list(dict.fromkeys(row["key"] for row in rows))
    for place, key in enumerate(keys):
        ones = [row for row in rows if row["key"] == key]
        color, marker = styles(names)[key]
        beside = 2 ** (SHIFT * (place - (len(keys) - 1) / 2))  # so that bars stand side by side
        at = [row["tensor_bytes"] * beside for row in ones]
        medians = [row["latency_s"]["median"] for row in ones]
        above = [row["latency_s"]["p99"] - median for row, median in zip(ones, medians, strict=True)]
        lines[names[key]] = axis.errorbar(
            at, medians, yerr=[[0] * len(ones), above], color=color, marker=marker, markersize=5, linewidth=1.6,
            elinewidth=1.0, capsize=2.5,
        )  # fmt: skip
    limits = {row["tensor_bytes"]: row["limit"]["gb_per_s"] for row in rows if row["limit"]["gb_per_s"]}
    if limits:
        at = sorted(limits)
        seconds = [size / limits[size] / 1e9 for size in at]
        style = {"color": picture.LIMIT, "linestyle": "--", "linewidth": 1.2, "zorder": 1}
        (lines["limit (see report)"],) = axis.plot(at, seconds, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, [size_text(size) for size in sizes])
    axis.xaxis.set_minor_locator(NullLocator())
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: time_text(value)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(labelsize=8)
    picture.grid(axis)
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axis.set_xlabel("size of the tensor (bytes, log scale)", fontsize=9)
    axis.set_ylabel("latency (s, log scale)", fontsize=9)


def time_text(seconds):
    """An axis' label with its unit."""
    for unit, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.999 * unit:
            return f"{seconds / unit:g} {name}"
    return f"{seconds * 1e9:g} ns"

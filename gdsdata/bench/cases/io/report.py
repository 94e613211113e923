"""Tables of case=io, and its picture over sizes and depths."""

import math

from gdsdata.bench.measure.system import size_text
from gdsdata.bench.report import picture
from gdsdata.bench.report.columns import BEST_PEER, PATH, SPREAD, X_LIMIT, Column, figure, text, whole
from gdsdata.bench.report.layout import Layout

HOW = {"warm": "out of the page cache", "cold": "past the page cache", "direct": "past the page cache, synced"}
STATES = {"warm": ",\npage cache", "cold": ",\nO_DIRECT", "direct": ",\nO_DIRECT, synced"}
COLORS = "viridis"


class IoLayout(Layout):
    columns = (
        Column("IoType", lambda row: row["io_type"], on_terminal=False), text("XferType", "xfer_type"),
        figure("Threads", "threads", whole, on_terminal=False),
        figure("DataSetSize (KiB)", "file_bytes", whole, 2**-10, on_terminal=False),
        figure("IOSize (KiB)", "io_bytes", whole, 2**-10, on_terminal=False),
        figure("GiB/sec", "gb_per_s", scale=1e9 / 2**30), SPREAD._replace(on_terminal=False),
        figure("Avg_Latency (usecs)", "latency_us"), figure("p50", "p50_us"),
        figure("p90", "p90_us", on_terminal=False), figure("p99", "p99_us"),
        figure("p99.9", "p99_9_us", on_terminal=False),
        figure("a call", "transfers_per_call", whole, on_terminal=False), figure("IOPS", "iops", whole),
        figure("ops", "ops", whole, on_terminal=False), figure("total_time (secs)", "seconds", on_terminal=False),
        figure("user s", "cpu_user_s"), figure("sys s", "cpu_system_s"),
        figure("requests/op", "requests_per_op", on_terminal=False), PATH, BEST_PEER, X_LIMIT,
    )  # fmt: skip

    def title(self, rows):
        row, size = rows[0], self.results["data"][rows[0]["data"]]["file_bytes"] / 2**20
        return f"{row['data']}, {row['dtype']} in flight, {HOW[row['cache']]}, file of {size:,.0f} MiB"

    def is_sweep(self):
        return len({(row["io_bytes"], row["depth"]) for row in self.results["rows"]}) > 1

    def sweep(self):
        """{(kind of work, state of the cache): {row: {depth: [(I/O bytes, GiB/s)]}}}"""
        found: dict[tuple, dict] = {}
        for row in self.results["rows"]:
            if row.get("through_cache"):  # It was to go past the cache: this is no point of that state.
                continue
            lines = found.setdefault((row["data"], row["cache"]), {}).setdefault(row["name"], {})
            if row["gb_per_s"]:
                rates = {name: rate * 1e9 / 2**30 for name, rate in row["gb_per_s"].items()}
                lines.setdefault(row["depth"], []).append((row["io_bytes"], rates))
        return found

    def plot(self, path):
        """Draws bars, or of several sizes or depths throughput over size, a line a depth."""
        if not self.is_sweep():
            super().plot(path)
            return
        drawn = {where: lines for where, lines in self.sweep().items() if any(lines.values())}
        if drawn:
            names = list(dict.fromkeys(name for lines in drawn.values() for name in lines))
            size = (max(5.0, 2.9 * len(names) + 0.6), 2.3 * len(drawn) + 0.9)
            shared = {"sharex": True, "sharey": "row", "figsize": size}
            with picture.panels(path, len(drawn), len(names), 110, **shared) as (figure_, axes):
                self.draw(drawn, names, figure_, axes)

    def draw(self, drawn, names, figure_, axes):
        """A line of panels for each direction and state, all of one scale; a panel for each row."""
        import matplotlib

        sizes = sorted({row["io_bytes"] for row in self.results["rows"]})
        depths = sorted({row["depth"] for row in self.results["rows"]})
        palette = matplotlib.colormaps[COLORS]
        colors = {depth: palette(0.9 * place / max(1, len(depths) - 1)) for place, depth in enumerate(depths)}
        for line, ((kind, cache), rows) in zip(axes, drawn.items(), strict=True):
            for axis, name in zip(line, names, strict=True):
                if not rows.get(name):
                    axis.set_axis_off()
                    continue
                for depth, points in sorted(rows[name].items()):
                    draw_line(axis, sorted(points, key=lambda point: point[0]), colors[depth], f"{depth}")
                axis.set_xscale("log", base=2)
                axis.set_xticks(sizes, [size_text(size) for size in sizes], fontsize=8)
                axis.set_yscale("log")
                axis.set_ylim(*decades(rows))
                axis.yaxis.set_major_formatter(lambda rate, place: f"{rate:g}")
                axis.minorticks_off()
                axis.tick_params(labelsize=8, labelbottom=True)
                picture.grid(axis)
                axis.set_title(name, fontsize=9)
            line[0].set_ylabel(f"{kind}{STATES[cache]}\nGiB/s", fontsize=9)
        for axis in axes[-1]:
            axis.set_xlabel("I/O size", fontsize=9)
        told = "transfers in flight (depth)"
        picture.legend(figure_, len(depths), loc="outside upper center", title=told, title_fontsize=9)


def decades(rows):
    """Powers of ten around the rows' rates: each axis has two labels or more."""
    rates = [one for lines in rows.values() for line in lines.values() for _, rate in line for one in rate.values()]
    least = math.floor(math.log10(min(rates)))
    return 10.0**least, 10.0 ** max(least + 1, math.ceil(math.log10(max(rates))))


def draw_line(axis, points, color, label):
    """Medians, with the range of the runs behind them."""
    sizes = [size for size, _ in points]
    least, median, most = ([rate[name] for _, rate in points] for name in ("min", "median", "max"))
    axis.fill_between(sizes, least, most, color=color, alpha=0.15, linewidth=0)
    axis.plot(sizes, median, color=color, marker="o", markersize=4, linewidth=1.5, label=label)

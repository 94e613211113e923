"""The picture of case=io over several sizes or depths: throughput over I/O size, a line for each depth."""

import math

from gdsdata.bench import measure

PANEL_INCHES = (2.9, 2.3)
COLOURS = "viridis"


def is_one(results):
    return len({(row["io_bytes"], row["depth"]) for row in results["rows"] if "io_bytes" in row}) > 1


def grids(results):
    """{(what is read or written, state of the page cache): {row's name: {depth: [(I/O bytes, its GiB/s)]}}}"""
    found = {}
    for row in results["rows"]:
        if row.get("through_cache"):  # where it was to go past it: no point of that state
            continue
        lines = found.setdefault((row["data"], row["cache"]), {}).setdefault(row["name"], {})
        if row["gb_per_s"]:
            rates = {name: rate * 1e9 / 2**30 for name, rate in row["gb_per_s"].items()}
            lines.setdefault(row["depth"], []).append((row["io_bytes"], rates))
    return found


def plot(results, path):
    """A line of panels for each direction and state of the page cache, all of one scale; a panel for each row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = {where: panels for where, panels in grids(results).items() if any(panels.values())}
    if not drawn:  # all failed
        return
    names = list(dict.fromkeys(name for panels in drawn.values() for name in panels))
    sizes = sorted({row["io_bytes"] for row in results["rows"]})
    depths = sorted({row["depth"] for row in results["rows"]})
    palette = matplotlib.colormaps[COLOURS]
    colours = {depth: palette(0.9 * place / max(1, len(depths) - 1)) for place, depth in enumerate(depths)}
    width, height = PANEL_INCHES
    figure, axes = pyplot.subplots(
        len(drawn), len(names), squeeze=False, sharex=True, sharey="row", layout="constrained",
        figsize=(max(5.0, width * len(names) + 0.6), height * len(drawn) + 0.9),
    )  # fmt: skip
    for line, ((kind, cache), panels) in zip(axes, drawn.items(), strict=True):
        for axis, name in zip(line, names, strict=True):
            if not panels.get(name):
                axis.set_axis_off()
                continue
            for depth, points in sorted(panels[name].items()):
                draw_line(axis, sorted(points, key=lambda point: point[0]), colours[depth])
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [measure.size_text(size) for size in sizes], fontsize=8)
            axis.set_yscale("log")
            axis.set_ylim(*decades(panels))
            axis.yaxis.set_major_formatter(lambda rate, place: f"{rate:g}")
            axis.minorticks_off()
            axis.tick_params(labelsize=8, labelbottom=True)
            axis.grid(color="#e5e5e5", linewidth=0.7)
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_title(name, fontsize=9)
        state = {"warm": ",\npage cache", "cold": ",\nO_DIRECT", "direct": ",\nO_DIRECT, synced"}[cache]
        line[0].set_ylabel(f"{kind}{state}\nGiB/s", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("I/O size", fontsize=9)
    handles = [matplotlib.lines.Line2D([], [], color=colours[depth], marker="o", markersize=4) for depth in depths]
    figure.legend(
        handles, [f"{depth}" for depth in depths], title="transfers in flight (depth)", loc="outside upper center",
        ncols=len(depths), fontsize=9, title_fontsize=9, frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def decades(panels):
    """Whole powers of ten around all rates of these panels, so that each axis has two labels and more."""
    points = [point for lines in panels.values() for line in lines.values() for point in line]
    rates = [one for _, rate in points for one in rate.values()]
    least = math.floor(math.log10(min(rates)))
    return 10.0**least, 10.0 ** max(least + 1, math.ceil(math.log10(max(rates))))


def draw_line(axis, points, colour):
    """Medians, with the range of the runs behind them."""
    sizes = [size for size, _ in points]
    least, median, most = ([rate[name] for _, rate in points] for name in ("min", "median", "max"))
    axis.fill_between(sizes, least, most, color=colour, alpha=0.15, linewidth=0)
    axis.plot(sizes, median, color=colour, marker="o", markersize=4, linewidth=1.5)

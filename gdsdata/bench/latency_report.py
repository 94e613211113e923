"""Tables, notes and picture of case=latency: all sizes of one kind of work and one state stand in one table."""

from gdsdata.bench import report
from gdsdata.bench.measure import size_text
from gdsdata.bench.report import number, two_digits

STATES = {
    "warm": "read, file in the page cache",
    "cold": "read, file not in the page cache",
    "replaced": "write, a new file in the old one's place, synced",
    "in_place": "write over the bytes of a file, synced",
}


def in_us(name):
    return lambda row: two_digits(row["latency_s"][name] * 1e6)


def interval(name, factor):
    """The mean and how far its interval reaches to either side."""

    def cell(row):
        found = row[name]
        if found["mean_high"] is None:
            return two_digits(found["mean"] * factor)
        reach = (found["mean_high"] - found["mean"]) * factor
        return f"{two_digits(found['mean'] * factor)} ± {reach:{',.0f' if reach >= 10 else '.2g'}}"

    return cell


def stdev(row):
    found = row["latency_s"]["stdev"]
    return two_digits(found and found * 1e6)


COLUMNS = [
    ("size", lambda row: size_text(row["tensor_bytes"])),
    ("n", lambda row: number(row["latency_s"]["count"])),
    ("mean µs", interval("latency_s", 1e6)),
    ("stdev", stdev),
    ("p50", in_us("median")),
    ("p90", in_us("p90")),
    ("p99", in_us("p99")),
    ("mean MB/s", interval("bandwidth_gb_per_s", 1e3)),
    ("p50 MB/s", lambda row: two_digits(row["bandwidth_gb_per_s"]["median"] * 1e3)),
    ("CPU s/GB", lambda row: two_digits(row["cpu_s_per_gb"]["median"])),
    ("path", lambda row: row["path"]),
    ("x peer", lambda row: number(row["ratio_to_best_peer"], "{:.2f}")),
    *report.RATIOS[1:],
]
PICTURE = "Latency by size of the tensor"


def columns_of(case, kind):
    return COLUMNS


def tables(results):
    """[(title, limits' text, rows)]: a table for each kind of work and state, sizes in ascending order."""
    grouped = {}
    for row in results["rows"]:
        grouped.setdefault((row["work"], row["cache"]), []).append(row)
    found = []
    for (work, cache), rows in grouped.items():
        there = f"{'to' if work == 'read' else 'from'} {results['device']['name']}"
        limits = {row["tensor_bytes"]: row["limit"] for row in rows}
        text = "; ".join(f"{size_text(size)} {limit_text(limit)}" for size, limit in limits.items())
        found.append((f"{STATES[cache]}, {there}", f"limits: {text}", rows))
    return found


def limit_text(limit):
    if limit["gb_per_s"] is None:
        return f"not known ({limit['name']})"
    return f"{two_digits(limit['gb_per_s'])} GB/s ({limit['name']})"


def notes(results):
    config = results["config"]["case"]
    yield (
        f"Each row ran {config['repeats']} times in turn with the others, in a process of its own, each time "
        f"{config['warm_up']} iterations that do not count and then {config['iterations']}, or fewer where "
        f"{config['run_seconds']:g} s were over; n are those of all runs."
    )
    yield (
        "Latency: of one call after the other, never two at a time, from before the file is opened until the device "
        "has the tensor, or storage has the bytes (fsync). Dropping pages and comparing bytes are neither timed nor "
        "counted as CPU time."
    )
    yield (
        "mean ± reach of its 95 % confidence interval (Student's t over all n, which takes iterations for independent: "
        "the spread from run to run is in results.json, and is larger on a machine that others use). p99 of fewer than "
        "100 is about the largest. MB/s: 1e6 bytes of the tensor by each iteration's latency. x peer (the best row of "
        "plain Python) and x limit are of bytes by seconds of a whole run, the median of runs."
    )
    every = "and each timed iteration's" if config["verify"] else "those of timed iterations were not looked at"
    yield f"Bytes: two reads or writes of each row were compared whole with plain reading before timing; {every}."
    yield (
        "Writes: a new file in the old one's place is what write_tensor does for a whole file; after a crash the name "
        "has the old bytes or the new ones. Over the bytes of a file there is no such promise."
    )
    yield f"{report.COLD_NOTE} The same file is read again and again."
    yield (
        "x limit, warm: a memory copy by a thread a core, on a GPU a pinned copy of 256 MiB. Else: a file of the same "
        "size by O_DIRECT through the kernel's AIO, its requests at once (1 MiB, 32 in flight at most), with nothing "
        "opened, allocated or renamed within the time."
    )
    yield report.CPU_NOTE.replace("from construction until all is closed", "of the timed calls alone")
    if results["device"]["name"] != "cpu":
        yield "On the GPU an iteration ends when the device has done all of it (one synchronize)."


# ------------------------------------------------------------------------------------------------ the picture

STYLES = {"gdsdata": ("#1f6f8b", "o"), "gdsdata_engine": ("#5aa9c4", "s")}
OTHER_STYLES = [("#d08c3f", "^"), ("#7d6b91", "D"), ("#6b8e4e", "v"), ("#8c8c8c", "x")]
SHIFT = 0.22  # doublings of size, from one row's markers to the next one's


def style_of(key, keys):
    """The same in every panel."""
    others = [one for one in keys if one not in STYLES]
    return STYLES[key] if key in STYLES else OTHER_STYLES[others.index(key) % len(OTHER_STYLES)]


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [(title, [row for row in rows if row["latency_s"]]) for title, _, rows in tables(results)]
    drawn = [(title, rows) for title, rows in drawn if rows]
    if not drawn:
        return
    names = {row["key"]: row["name"] for _, rows in drawn for row in rows}
    across = min(2, len(drawn))
    down = -(-len(drawn) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(6.2 * across, 4.2 * down + 0.6), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(drawn) :]:
        axis.axis("off")
    lines = {}
    for axis, (title, rows) in zip(axes.flat, drawn, strict=False):
        panel(axis, title, rows, names, lines)
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=min(5, len(lines)), frameon=False, fontsize=9
    )
    figure.suptitle("Markers: median latency. Bars: from there to p99.", fontsize=9, x=0.01, ha="left")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def panel(axis, title, rows, names, lines):
    """Medians over size, with bars to p99; `lines` collects one of each kind for the legend."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    sizes = sorted({row["tensor_bytes"] for row in rows})
    keys = list(dict.fromkeys(row["key"] for row in rows))
    for place, key in enumerate(keys):
        ones = [row for row in rows if row["key"] == key]
        colour, marker = style_of(key, names)
        beside = 2 ** (SHIFT * (place - (len(keys) - 1) / 2))  # so that bars stand side by side
        at = [row["tensor_bytes"] * beside for row in ones]
        medians = [row["latency_s"]["median"] for row in ones]
        above = [row["latency_s"]["p99"] - median for row, median in zip(ones, medians, strict=True)]
        lines[names[key]] = axis.errorbar(
            at, medians, yerr=[[0] * len(ones), above], color=colour, marker=marker, markersize=5, linewidth=1.6,
            elinewidth=1.0, capsize=2.5,
        )  # fmt: skip
    limits = {row["tensor_bytes"]: row["limit"]["gb_per_s"] for row in rows if row["limit"]["gb_per_s"]}
    if limits:
        at = sorted(limits)
        (lines["limit (see report)"],) = axis.plot(
            at, [size / limits[size] / 1e9 for size in at], color=report.LIMIT, linestyle="--", linewidth=1.2, zorder=1
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, [size_text(size) for size in sizes])
    axis.xaxis.set_minor_locator(NullLocator())
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: time_text(value)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(labelsize=8)
    axis.grid(True, which="major", color="#e4e4e4", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axis.set_xlabel("size of the tensor (bytes, log scale)", fontsize=9)
    axis.set_ylabel("latency (s, log scale)", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def time_text(seconds):
    """An axis' label with its unit."""
    for unit, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.999 * unit:
            return f"{seconds / unit:g} {name}"
    return f"{seconds * 1e9:g} ns"

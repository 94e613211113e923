"""Tables, notes and picture of case=startup: the parts of a start stand beside each other, and one behind the other."""

from gdsdata.bench import report
from gdsdata.bench.report import two_digits
from gdsdata.bench.startup_peers import OWN_PARTS, PARTS

TITLES = {
    "interpreter": "Python",
    "torch": "torch",
    "context": "CUDA",
    "library": "library",
    "model": "model",
    "data": "data set",
    "restore": "restore",
    "first_batch": "1st batch",
    "first_step": "1st step",
}
PICTURE = "Seconds from a script's start to its first step, by part"


def seconds(spread):
    """To a millisecond, for that is what a start moves by."""
    return "-" if spread is None else f"{spread['median']:.3f}"


def scatter(row):
    found = row["seconds"]
    return f"{found['min'] - found['median']:+.3f} {found['max'] - found['median']:+.3f}"


COLUMNS = [
    *((title, lambda row, name=name: seconds(row["parts_s"].get(name))) for name, title in TITLES.items()),
    ("total s", lambda row: seconds(row["seconds"])),
    ("spread s", scatter),
    ("to batch s", lambda row: seconds(row["to_first_batch_s"])),
    ("own s", lambda row: seconds(row["own_s"])),
    ("batch above floor", lambda row: seconds(row["batch_above_floor_s"])),
    ("above floor", lambda row: seconds(row["above_floor_s"])),
    ("CPU s", lambda row: two_digits(row["cpu_seconds"]["median"])),
    ("peak MB", lambda row: report.number(row["peak_bytes"] / 1e6)),
    ("path", lambda row: row["path"]),
]


def columns_of(case, kind):
    return COLUMNS


def tables(results):
    """[(title, the floor's text, rows)]: a table for each checkpoint's size and state of the page cache."""
    grouped = {}
    for row in results["rows"]:
        grouped.setdefault((row["data"], row["cache"]), []).append(row)
    found = []
    for (kind, cache), rows in grouped.items():
        title = f"start to first step, {kind}, {cache} cache, on {results['device']['name']}"
        floor = next((row for row in rows if row["key"] == "floor"), None)
        text = "floor: not measured"
        if floor and floor["seconds"]:
            text = (
                f"floor: {seconds(floor['to_first_batch_s'])} s until a batch could come, "
                f"{seconds(floor['seconds'])} s to the first step"
            )
        found.append((title, text, rows))
    return found


def best_loaders(results):
    """Of each table, which DataLoader was the fastest to its first step."""
    for title, _, rows in tables(results):
        loaders = [row for row in rows if row["key"].startswith("dataloader") and row["seconds"]]
        if loaders:
            best = min(loaders, key=lambda row: row["seconds"]["median"])
            yield f"{title}: of the DataLoaders, {best['name']} was the best with {seconds(best['seconds'])} s."


def notes(results):
    config = results["config"]["case"]
    yield (
        f"Each row ran {config['repeats']} times in turn with the others, each time in a process of its own, behind "
        f"{config['warm_up']} run(s) that are not timed; the tables show medians. Times are CLOCK_MONOTONIC's, from "
        "just before the parent starts the process."
    )
    yield "Parts: " + "; ".join(f"{TITLES[name]}: {text}" for name, text in PARTS.items()) + "."
    yield (
        "On a GPU each part behind the imports ends with a synchronize. The parts add up to `total s`. `to batch s` is "
        "all but the first step; `own s`, the sum of "
        f"{', '.join(TITLES[name] for name in OWN_PARTS)}: what the libraries differ in. Above floor: the row's time "
        "less the floor's of the same turn, to the first step or to the batch; it has the scatter of both starts' "
        "imports in it, which `own s` has not."
    )
    yield (
        "Bytes, of every run: a checksum of each restored tensor is compared with what was written, taken before the "
        "first step while the clock stands, and each window of the first batch has to be one of the file's."
    )
    yield (
        f"{report.COLD_NOTE} So it is with the data and the checkpoint; the files of Python, torch and the libraries "
        "stay warm in both, and compiled modules (__pycache__) are in place."
    )
    yield "CPU s: user + system time of the whole process and its workers. peak MB: its largest resident memory."
    yield from best_loaders(results)


# ------------------------------------------------------------------------------------------------ the picture

COLOURS = {
    "interpreter": "#8c8c8c",
    "torch": "#b9c4c9",
    "context": "#d9dfe2",
    "library": "#d08c3f",
    "model": "#e6e9d8",
    "data": "#7d6b91",
    "restore": "#1f6f8b",
    "first_batch": "#5aa9c4",
    "first_step": "#c9d8b6",
}


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [(title, [row for row in rows if row["seconds"]]) for title, _, rows in tables(results)]
    drawn = [(title, rows) for title, rows in drawn if rows]
    if not drawn:
        return
    heights = [len(rows) * 0.34 + 1.2 for _, rows in drawn]
    figure, axes = pyplot.subplots(
        len(drawn), 1, figsize=(9.5, sum(heights) + 0.9), squeeze=False, height_ratios=heights, layout="constrained"
    )
    bars = {}
    for axis, (title, rows) in zip(axes[:, 0], drawn, strict=True):
        panel(axis, title, rows, bars)
    order = [name for name in PARTS if name in bars]
    figure.legend(
        [bars[name] for name in order], [TITLES[name] for name in order], loc="outside lower center", ncols=5,
        frameon=False, fontsize=8,
    )  # fmt: skip
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def panel(axis, title, rows, bars):
    """Each row's parts, medians, one behind the other; `bars` collects one of each part for the legend."""
    ends = [0.0] * len(rows)
    for name in PARTS:
        widths = [row["parts_s"][name]["median"] if name in row["parts_s"] else 0.0 for row in rows]
        if any(widths):
            bars[name] = axis.barh(range(len(rows)), widths, left=ends, color=COLOURS[name], height=0.72)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, (row, end) in enumerate(zip(rows, ends, strict=True)):
        text = f"{end:.2f} s" + ("" if row["key"] == "floor" else f", {seconds(row['own_s'])} of its own")
        axis.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_xlim(0, max(ends) * 1.3)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.tick_params(axis="x", labelsize=8)
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=8)
    axis.set_xlabel("seconds since the process was started (medians of parts)", fontsize=8, loc="left")
    axis.spines[["top", "right"]].set_visible(False)

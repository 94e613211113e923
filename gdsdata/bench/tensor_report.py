"""Tables, notes and picture of case=tensor: first one laid out as DeepNVMe's, then each kind of work by itself."""

from gdsdata.bench import report
from gdsdata.bench.measure import size_text
from gdsdata.bench.report import number, two_digits

STATES = {  # in the order of columns, and what a table's title says of each
    ("read", "cold"): ("load, cold", "load, file not in the page cache"),
    ("read", "warm"): ("load, warm", "load, file in the page cache"),
    ("write", "replaced"): ("store, new file", "store to a new file in the old one's place, synced"),
    ("write", "in_place"): ("store, in place", "store over the bytes of a file, synced"),
}
OVERVIEW = "overview of "  # before CPU, or CPU and GPU: what such a table says in place of its data's kind
LIMIT_ROW = "limit of this machine"
COLUMNS = [
    *report.RATE,
    ("n", lambda row: number(row["latency_s"]["count"])),
    ("CPU s/GB", lambda row: two_digits(row["cpu_s_per_gb"]["median"])),
    ("path", lambda row: row["path"]),
    ("x Python", lambda row: number(row["ratio_to_python"], "{:.2f}")),
    *report.RATIOS,
]
PICTURE = "GB per second, loaded and stored"


def columns_of(case, kind):
    if not kind.startswith(OVERVIEW):
        return COLUMNS
    places = kind.removeprefix(OVERVIEW).split(" and ")
    return [
        (f"{place}: {label}", lambda row, at=(place, *state): row["cells"].get(at, "-"))
        for place in places
        for state, (label, _) in STATES.items()
    ]


def place_of(row):
    return "CPU" if row["tensor_device"] == "cpu" else "GPU"


def tables(results):
    """[(title, limits' text, rows)]: the overview, and a table for each kind of work, device and state."""
    found = [overview(results)]
    for rows in measured(results).values():
        first = rows[0]
        there = f"{'to' if first['work'] == 'read' else 'from'} {first['tensor_device']}"
        title = f"{STATES[first['work'], first['cache']][1]}, {size_text(first['tensor_bytes'])} {there}"
        rate, name = first["limit"]["gb_per_s"], first["limit"]["name"]
        found.append((title, f"limit not known: {name}" if rate is None else f"limit: {name}, {rate:.2f} GB/s", rows))
    return found


def measured(results):
    """{(CPU or GPU, read or write, state): its rows}, in the order of the overview's columns."""
    grouped = {}
    for row in results["rows"]:
        grouped.setdefault((place_of(row), row["work"], row["cache"]), []).append(row)
    order = list(STATES)
    return {at: grouped[at] for at in sorted(grouped, key=lambda at: (at[0], order.index(at[1:])))}


def overview(results):
    """Who moves the bytes, by what is done, in GB/s: one line each, and one for what the machine can do at most."""
    groups = measured(results)
    places = dict.fromkeys(place for place, _, _ in groups)
    lines = {}
    for at, rows in groups.items():
        for row in rows:
            line = lines.setdefault(row["key"], {"name": row["name"], "key": row["key"], "cells": {}})
            line["cells"][at] = "FAILED" if row["error"] else two_digits(row["gb_per_s"]["median"])
    limits = {at: two_digits(rows[0]["limit"]["gb_per_s"]) for at, rows in groups.items()}
    lines[LIMIT_ROW] = {"name": LIMIT_ROW, "key": "", "cells": limits}
    common = {"data": OVERVIEW + " and ".join(places), "error": None}
    size = size_text(results["config"]["case"]["size_bytes"])
    order = ranks(lines)
    text = "GB/s, medians; ratios to the limit and to the best peer are in the tables below"
    return (
        f"Load and store a tensor of {size} by what moves its bytes",
        text,
        [line | common for line in sorted(lines.values(), key=lambda line: order[line["key"]])],
    )


def ranks(lines):
    """gdsdata's rows, the others, the limit; else as they came."""
    keys = [line["key"] for line in lines.values()]
    ordered = sorted(keys, key=lambda key: (not key, not report.is_ours(key)))
    return {key: place for place, key in enumerate(ordered)}


def notes(results):
    config = results["config"]["case"]
    yield (
        f"Each row ran {config['repeats']} times in turn with the others, in a process of its own, each time one load "
        f"or store that does not count and then {config['loop']}. GB/s: 1e9 bytes of the tensor by the seconds of "
        "these, from before the file is opened until the device has the tensor, or storage has the bytes. Dropping "
        "pages, making and comparing bytes are neither timed nor counted as CPU time."
    )
    yield (
        "Stores are durable for every row: those who do not sync themselves are synced (fsync) within the time. A new "
        "file takes the old one's name when it is whole, and the folder is synced, for every row too."
    )
    yield (
        "DeepNVMe's table (DeepSpeedExamples, deepnvme/file_access) has Python, aio_handle and gds_handle by load and "
        "store of a CPU and a GPU tensor; its stores go over the file that is there, and are not synced."
    )
    yield (
        "What a row keeps from one load to the next (its tensor, pinned or registered memory) its setting says; rows "
        "that load into a new tensor get memory from the system each time, which on the CPU costs a page fault for "
        "every page."
    )
    every = "and each timed one's" if config["validate"] else "those of timed ones were not looked at"
    yield f"Bytes: two loads or stores of each row were compared whole with plain reading before timing; {every}."
    yield f"{report.COLD_NOTE} The same file is loaded again and again."
    yield (
        "x Python: by the row of plain Python, as DeepNVMe's `Speedup over Python`. x limit, warm: a memory copy by "
        "a thread a core, on a GPU a pinned copy of 256 MiB. Else: a file of the same size by O_DIRECT through the "
        "kernel's AIO (1 MiB, 32 in flight), synced where it is written, nothing opened or renamed within the time."
    )
    yield report.CPU_NOTE.replace("from construction until all is closed", "of the timed calls alone")


# ------------------------------------------------------------------------------------------------ the picture

OURS = ["#123f4e", "#1f6f8b", "#5aa9c4", "#a5d3e2"]
OTHERS = ["#d08c3f", "#e7c08f", "#6b8e4e", "#a9c191", "#7d6b91", "#b9acc8"]


def colours(keys):
    """{key: its colour}, the same in every panel."""
    ours = [key for key in keys if report.is_ours(key)]
    others = [key for key in keys if not report.is_ours(key)]
    pairs = [(ours, OURS), (others, OTHERS)]
    return {key: palette[place % len(palette)] for ones, palette in pairs for place, key in enumerate(ones)}


def plot(results, path):
    """A panel for CPU and one for GPU tensors; a group of bars for each kind of work, a bar for each row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = {at: [row for row in rows if row["gb_per_s"]] for at, rows in measured(results).items()}
    groups = {at: rows for at, rows in groups.items() if rows}
    if not groups:
        return
    places = list(dict.fromkeys(at[0] for at in groups))
    lines = [line["key"] for line in overview(results)[2] if line["key"]]
    colour_of = colours(lines)
    figure, axes = pyplot.subplots(len(places), 1, figsize=(11, 4.4 * len(places)), squeeze=False, layout="constrained")
    drawn = {}
    for axis, place in zip(axes[:, 0], places, strict=True):
        panel(axis, place, {at: rows for at, rows in groups.items() if at[0] == place}, colour_of, drawn)
    in_order = [next(name for name, (key, _) in drawn.items() if key == one) for one in lines if one in shown(drawn)]
    in_order += [name for name, (key, _) in drawn.items() if not key]
    handles = [drawn[name][1] for name in in_order]
    figure.legend(handles, in_order, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    size = size_text(results["config"]["case"]["size_bytes"])
    figure.suptitle(f"A tensor of {size}; whiskers: slowest and fastest run", fontsize=9, x=0.01, ha="left")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def shown(drawn):
    return {key for key, _ in drawn.values()}


def panel(axis, place, groups, colour_of, drawn):
    """`drawn` collects one of each kind for the legend: {name: (key, what was drawn)}."""
    at, middles, highest = 0, [], 0
    for rows in groups.values():
        rows = sorted(rows, key=lambda row: list(colour_of).index(row["key"]))
        for offset, row in enumerate(rows):
            rate = row["gb_per_s"]
            bar = axis.bar(at + offset, rate["median"], width=0.84, color=colour_of[row["key"]])
            drawn.setdefault(row["name"], (row["key"], bar))
            axis.plot([at + offset] * 2, [rate["min"], rate["max"]], color="#333333", linewidth=1)
            axis.annotate(
                two_digits(rate["median"]), (at + offset, rate["max"]), xytext=(0, 3), textcoords="offset points",
                ha="center", fontsize=7.5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.85},
            )  # fmt: skip
            highest = max(highest, rate["max"])
        limit = rows[0]["limit"]["gb_per_s"]
        if limit:
            dashes = axis.hlines(limit, at - 0.5, at + len(rows) - 0.5, colors=report.LIMIT, linestyles="--", zorder=0)
            drawn.setdefault("limit (see report)", ("", dashes))
            highest = max(highest, limit)
        middles.append(at + (len(rows) - 1) / 2)
        at += len(rows) + 1.2
    axis.set_xticks(middles, [STATES[group[1:]][0] for group in groups], fontsize=9)
    axis.tick_params(axis="x", length=0)
    axis.tick_params(axis="y", labelsize=8)
    axis.set_ylim(0, highest * 1.12)
    axis.set_ylabel("GB/s (1e9 bytes of the tensor)", fontsize=9)
    axis.set_title(f"{place} tensor", loc="left", fontsize=10, fontweight="bold")
    axis.grid(True, axis="y", color="#e4e4e4", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)

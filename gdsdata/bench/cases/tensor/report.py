"""Tables of case=tensor, the first laid out as DeepNVMe's, and its picture."""

from gdsdata.bench.harness.tables import is_ours
from gdsdata.bench.measure import device
from gdsdata.bench.measure.system import size_text
from gdsdata.bench.report import columns, picture
from gdsdata.bench.report.columns import BEST_PEER, CPU, PATH, RATE, X_LIMIT, Column, figure, hundredths, whole
from gdsdata.bench.report.layout import Layout

STATES = {  # in the order of columns: what each says there, and in its table's title
    ("read", "cold"): ("load, cold", "load, file not in the page cache"),
    ("read", "warm"): ("load, warm", "load, file in the page cache"),
    ("write", "replaced"): ("store, new file", "store to a new file in the old one's place, synced"),
    ("write", "in_place"): ("store, in place", "store over the bytes of a file, synced"),
}
LIMIT_ROW = "limit of this machine"
OUR_COLORS = ["#123f4e", "#1f6f8b", "#5aa9c4", "#a5d3e2"]
OTHER_COLORS = ["#d08c3f", "#e7c08f", "#6b8e4e", "#a9c191", "#7d6b91", "#b9acc8"]


class TensorLayout(Layout):
    columns = (
        *RATE, figure("n", "latency_s.count", whole), CPU, PATH, figure("x Python", "ratio_to_python", hundredths),
        BEST_PEER, X_LIMIT,
    )  # fmt: skip
    picture_title = "GB per second, loaded and stored"

    def columns_of(self, rows):
        if "cells" not in rows[0]:
            return self.columns
        places = dict.fromkeys(place for place, _, _ in self.measured())
        return [
            Column(f"{place}: {label}", lambda row, at=(place, *state): row["cells"].get(at, "-"))
            for place in places
            for state, (label, _) in STATES.items()
        ]

    def tables(self):
        """The overview, and a table for each kind of work, device and state."""
        found = [self.overview()]
        for rows in self.measured().values():
            first = rows[0]
            there = f"{'to' if first['work'] == 'read' else 'from'} {first['tensor_device']}"
            title = f"{STATES[first['work'], first['cache']][1]}, {size_text(first['tensor_bytes'])} {there}"
            found.append((title, self.caption(rows), rows))
        return found

    def measured(self):
        """{(CPU or GPU, read or write, state): its rows}, in the order of the overview."""
        found: dict[tuple, list] = {}
        for row in self.results["rows"]:
            found.setdefault((device.kind(row["tensor_device"]), row["work"], row["cache"]), []).append(row)
        order = list(STATES)
        return {at: found[at] for at in sorted(found, key=lambda at: (at[0], order.index(at[1:])))}

    def overview(self):
        """GB/s by row and kind of work: ours first, then the others, and the machine's limit."""
        lines: dict[str, dict] = {}
        limits = {}
        for at, rows in self.measured().items():
            for row in rows:
                named = {"name": row["name"], "key": row["key"], "error": None}
                line = lines.setdefault(row["key"], named | {"cells": {}})
                line["cells"][at] = "FAILED" if row["error"] else columns.three_digits(row["gb_per_s"]["median"])
            limit = rows[0]["limit"]["gb_per_s"]
            limits[at] = columns.three_digits(limit) if limit else "-"
        ordered = sorted(lines.values(), key=lambda line: not is_ours(line["key"]))
        size = size_text(self.settings["size_bytes"])
        return (
            f"Load and store a tensor of {size} by what moves its bytes",
            "GB/s, medians; ratios to the limit and to the best peer are in the tables below",
            [*ordered, {"name": LIMIT_ROW, "key": "", "error": None, "cells": limits}],
        )

    def plot(self, path):
        """Draws CPU and GPU tensors: a group of bars each, a bar for each row."""
        groups = {at: [row for row in rows if row["gb_per_s"]] for at, rows in self.measured().items()}
        groups = {at: rows for at, rows in groups.items() if rows}
        if not groups:
            return
        places = list(dict.fromkeys(at[0] for at in groups))
        colors = picture.looks(dict.fromkeys(row["key"] for row in self.results["rows"]), OUR_COLORS, OTHER_COLORS)
        with picture.panels(path, len(places), figsize=(11, 4.4 * len(places))) as (figure_, axes):
            for axis, place in zip(axes[:, 0], places, strict=True):
                panel(axis, place, {at: rows for at, rows in groups.items() if at[0] == place}, colors)
            picture.legend(figure_, 4)
            size = size_text(self.settings["size_bytes"])
            figure_.suptitle(f"A tensor of {size}; whiskers: slowest and fastest run", fontsize=9, x=0.01, ha="left")


def panel(axis, place, groups, color_of):
    """The groups' bars in the order of `color_of`, each with its rate and its range."""
    at, middles = 0.0, []
    for rows in groups.values():
        rows = sorted(rows, key=lambda row: list(color_of).index(row["key"]))
        for offset, row in enumerate(rows):
            rate = row["gb_per_s"]
            axis.bar(at + offset, rate["median"], width=0.84, color=color_of[row["key"]], label=row["name"])
            axis.plot([at + offset] * 2, [rate["min"], rate["max"]], color=picture.RANGE, linewidth=1)
            axis.annotate(
                columns.three_digits(rate["median"]), (at + offset, rate["max"]), xytext=(0, 3),
                textcoords="offset points", ha="center", fontsize=7.5, bbox=picture.LABEL,
            )  # fmt: skip
        limit = rows[0]["limit"]["gb_per_s"]
        if limit:
            end = at + len(rows) - 0.5
            axis.hlines(limit, at - 0.5, end, colors=picture.LIMIT, linestyles="--", zorder=0, label=picture.BY_LIMIT)
        middles.append(at + (len(rows) - 1) / 2)
        at += len(rows) + 1.2
    axis.set_xticks(middles, [STATES[group[1:]][0] for group in groups], fontsize=9)
    axis.tick_params(axis="x", length=0)
    axis.tick_params(axis="y", labelsize=8)
    axis.margins(y=0.12)
    axis.set_ylabel("GB/s (1e9 bytes of the tensor)", fontsize=9)
    axis.set_title(f"{place} tensor", loc="left", fontsize=10, fontweight="bold")
    picture.grid(axis, "y")

"""The page of case=all: a line for each case, and then each case's main table and picture."""

import json
import math

from gdsdata.bench.cases import layout_of
from gdsdata.bench.report import picture
from gdsdata.bench.report.columns import BEST_PEER, GB_PER_S, X_LIMIT, Column, figure, text, whole
from gdsdata.bench.report.layout import HELPERS, Layout, rendered

VERIFIED = {True: "verified", False: "NOT VERIFIED", None: "not compared"}


def ratio_range(heading, field):
    def cell(row):
        ratios = row[field]
        return f"{min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else "-"

    return Column(heading, cell, on_terminal=False)


class AllLayout(Layout):
    columns = (
        text("main table", "title", on_terminal=False), GB_PER_S, text("best peer", "best_peer"), BEST_PEER, X_LIMIT,
        figure("tables", "tables", whole), ratio_range("x best peer, all", "ratios_to_best_peer"),
        ratio_range("x limit, all", "ratios_to_limit"),
        Column("bytes", lambda row: VERIFIED[row["verified"]], is_text=True), figure("s", "took_s", whole),
    )  # fmt: skip
    picture_title = "gdsdata beside the best peer, by case"

    def tables(self):
        said = "the main table is a case's first; ratios are of gdsdata's fastest row to the best row that is not "
        return [("All cases", f"{said}gdsdata's, and to what this machine can do", self.results["rows"])]

    def page_text(self, folder):
        rows = self.results["rows"]
        failed = [(row["name"], why) for row in rows for why in [row["error"], *row["failed_rows"]] if why]
        found = [(row, self.inner(row, folder)) for row in rows]
        quick, template = self.results["config"]["quick"], self.template("page.jinja")
        said = {"layout": self, "results": self.results, "failed": failed, "cases": found, "quick": quick}
        return rendered(template, **said, **HELPERS)

    def inner(self, row, folder):
        """The layout of a case's results, with `has_picture`; None if it left none."""
        try:
            layout = layout_of(json.loads((folder / row["folder"] / "results.json").read_text()))
            layout.main_table = layout.tables()[0]
        except (OSError, ValueError, KeyError, IndexError):
            return None
        layout.has_picture = (folder / row["folder"] / "results.png").exists()
        return layout

    def plot(self, path):
        """Draws gdsdata's rates by the best peer's: a line a case, a dot a table."""
        rows = [row for row in self.results["rows"] if row["ratios_to_best_peer"]]
        if not rows:
            return
        ratios = [ratio for row in rows for ratio in row["ratios_to_best_peer"]]
        with picture.panels(path, 1, figsize=(9.5, 1.2 + 0.42 * len(rows))) as (_, ((axis,),)):
            for place, row in enumerate(rows):
                ones, main = row["ratios_to_best_peer"], row["ratio_to_best_peer"]
                axis.plot([min(ones), max(ones)], [place, place], color=picture.OTHERS, linewidth=2, zorder=1)
                axis.scatter(ones, [place] * len(ones), color=picture.OURS, s=26, zorder=2, alpha=0.8)
                if main:
                    axis.scatter([main], [place], facecolors="none", edgecolors=picture.RANGE, s=80, zorder=3)
            axis.axvline(1.0, color=picture.LIMIT, linestyle="--", linewidth=1.2, zorder=0)
            axis.set_xscale("log", base=2)
            low, high = math.floor(math.log2(min(*ratios, 0.9))), math.ceil(math.log2(max(*ratios, 1.1)))
            axis.set_xlim(2.0 ** (low - 0.2), 2.0 ** (high + 0.2))
            axis.set_xticks([2.0**one for one in range(low, high + 1)])
            axis.xaxis.set_major_formatter("{x:g}x")
            axis.minorticks_off()
            picture.grid(axis, "x")
            title = f"{self.picture_title}: a dot for each table, a ring for the main one"
            label = "gdsdata's rate by the best peer's (log scale); dashed: as fast as that"
            picture.finish_bars(axis, title, [row["name"] for row in rows], label)

"""The page of case=all: a line for each case, and then each case's main table and picture."""

import json
import math
from pathlib import Path

from gdsdata.bench import report
from gdsdata.bench.report import number, two_digits


def ratio_range(name):
    def cell(row):
        ratios = row[name]
        if len(ratios) < 2:
            return "-"
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    return cell


COLUMNS = [
    ("main table", lambda row: row["title"] or "-"),
    ("GB/s", lambda row: two_digits(row["gb_per_s"] and row["gb_per_s"]["median"])),
    ("best peer", lambda row: row["best_peer"] or "-"),
    ("x best peer", lambda row: number(row["ratio_to_best_peer"], "{:.2f}")),
    ("x limit", lambda row: number(row["ratio_to_limit"], "{:.2f}")),
    ("tables", lambda row: number(row["tables"])),
    ("x best peer, all", ratio_range("ratios_to_best_peer")),
    ("x limit, all", ratio_range("ratios_to_limit")),
    ("bytes", lambda row: {True: "verified", False: "NOT VERIFIED", None: "not compared"}[row["verified"]]),
    ("s", lambda row: number(row["took_s"])),
]
PICTURE = "gdsdata beside the best peer, by case"


def columns_of(case, kind):
    return COLUMNS


def tables(results):
    text = "the main table is a case's first; ratios are of gdsdata's fastest row to the best row that is not gdsdata's"
    return [("All cases", f"{text}, and to what this machine can do", results["rows"])]


def page_text(results, folder):
    lines = [*report.heading(results), "", f"![{PICTURE}](results.png)", "", "## All cases", ""]
    ((_, text, rows),) = tables(results)
    lines += [*report.table_lines(rows, COLUMNS), "", f"{text[0].upper()}{text[1:]}.", ""]
    failed = [(row["name"], why) for row in rows for why in [row["error"], *row["failed_rows"]] if why]
    if failed:
        lines += ["## Failed", "", *[f"- case={name}: `{why}`" for name, why in failed], ""]
    for row in rows:
        lines += case_lines(row, Path(folder))
    lines += ["## Notes", "", *[f"- {note}" for note in results["notes"]], *[f"- {text}" for text in notes(results)]]
    return "\n".join(lines) + "\n"


def case_lines(row, folder):
    """A case's main table, its answer if it has one, and its picture."""
    lines = [f"## case={row['name']}", "", f"{row['setting']} The whole of it: `{row['folder']}/report.html`.", ""]
    try:
        found = json.loads((folder / row["folder"] / "results.json").read_text())
        laid = report.layout(found["case"])
        title, limit, rows = laid.tables(found)[0]
    except (OSError, ValueError, KeyError, IndexError):
        return [*lines, "It left no results.", ""]
    columns = laid.columns_of(found["case"], rows[0]["data"])
    lines += [f"### {title}", "", f"{limit[0].upper()}{limit[1:]}.", "", *report.table_lines(rows, columns), ""]
    for heading, text, _ in report.answers_of(found):
        lines += [f"{heading}: **{text}**", ""]
    if (folder / row["folder"] / "results.png").exists():
        lines += [f"![{laid.PICTURE}]({row['folder']}/results.png)", ""]
    return lines


def notes(results):
    yield "Each case ran by itself, one after the other; its own report has all tables, its settings and its notes."
    yield "GB is 1e9 bytes. x best peer and x limit above 1 are good; the columns `all` are over all tables of a case."
    if results["config"]["quick"]:
        yield "quick=true: all of it was small. It shows that everything works; its figures mean little."


def plot(results, path):
    """For each case a line, for each of its tables a dot: gdsdata's rate by the best peer's, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in results["rows"] if row["ratios_to_best_peer"]]
    if not rows:
        return
    ratios = [ratio for row in rows for ratio in row["ratios_to_best_peer"]]
    figure, axis = pyplot.subplots(figsize=(9.5, 1.2 + 0.42 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        ones = row["ratios_to_best_peer"]
        axis.plot([min(ones), max(ones)], [place, place], color=report.OTHERS, linewidth=2, zorder=1)
        axis.scatter(ones, [place] * len(ones), color=report.OURS, s=26, zorder=2, alpha=0.8)
        axis.scatter([row["ratio_to_best_peer"]] if row["ratio_to_best_peer"] else [], [place][: bool(
            row["ratio_to_best_peer"])], facecolors="none", edgecolors="#333333", s=80, zorder=3)  # fmt: skip
    axis.axvline(1.0, color=report.LIMIT, linestyle="--", linewidth=1.2, zorder=0)
    axis.set_xscale("log", base=2)
    low, high = math.floor(math.log2(min(*ratios, 0.9))), math.ceil(math.log2(max(*ratios, 1.1)))
    axis.set_xlim(2.0 ** (low - 0.2), 2.0 ** (high + 0.2))
    axis.set_xticks([2.0**one for one in range(low, high + 1)], [f"{2.0**one:g}x" for one in range(low, high + 1)])
    axis.minorticks_off()
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=9)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", color="#e5e5e5", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(f"{PICTURE}: a dot for each table, a ring for the main one", loc="left", fontsize=10)
    axis.set_xlabel("gdsdata's rate by the best peer's (log scale); dashed: as fast as that", fontsize=8, loc="left")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)

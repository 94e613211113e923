"""The common part of all cases' pictures."""

import contextlib
import itertools

from gdsdata.bench.harness.tables import is_ours

OURS, OTHERS, LIMIT, RANGE, GRID = "#1f6f8b", "#b9c4c9", "#c0392b", "#333333", "#e5e5e5"
BY_LIMIT = "limit (see report)"  # the last of a legend
LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}


@contextlib.contextmanager
def panels(path, down, across=1, dpi=130, **options):
    """Yield (figure, array of `down` x `across` axes), and save them as `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(down, across, squeeze=False, layout="constrained", **options)
    try:
        yield figure, axes
        figure.savefig(path, dpi=dpi, bbox_inches="tight")
    finally:
        pyplot.close(figure)


@contextlib.contextmanager
def tables_of_bars(path, tables, inches=0.3, width=9.5, frame=1.3, below=0.0):
    """Yield (figure, axes): a panel of bars for each (title, rows), as high as needed."""
    heights = [len(rows) * inches + frame for _, rows in tables]
    with panels(path, len(tables), figsize=(width, sum(heights) + below), height_ratios=heights) as (figure, axes):
        yield figure, axes[:, 0]


def finish_bars(axis, title, names, label):
    """Name the bars of a panel, from its top down."""
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="x", labelsize=8)
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=8)
    axis.set_xlabel(label, fontsize=8, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def beside(axis, text, right, place):
    """Write a text to the right of a bar."""
    axis.annotate(text, (right, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8, bbox=LABEL)


def grid(axis, which="both"):
    axis.grid(axis=which, color=GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def tables_with(layout, field):
    """[(title, the rows that have this field)] of each table in which there is one."""
    tables = [(title, [row for row in rows if row[field]]) for title, _, rows in layout.tables()]
    return [(title, rows) for title, rows in tables if rows]


def looks(keys, ours, others):
    """{key: its look}, the same in every panel; gdsdata's rows take those of `ours`."""
    found: dict = {}
    for palette, are_ours in ((ours, True), (others, False)):
        ones = [key for key in keys if is_ours(key) == are_ours]
        found |= dict(zip(ones, itertools.cycle(palette), strict=False))
    return found


def legend(figure, columns, loc="outside lower center", **style):
    """Draws a legend of all that the panels have labeled, each label once; none without labels."""
    found: dict = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    labels = sorted(found, key=lambda label: label == BY_LIMIT)
    handles = [found[label] for label in labels]
    if labels:
        figure.legend(handles, labels, loc=loc, ncols=columns, frameon=False, fontsize=9, **style)

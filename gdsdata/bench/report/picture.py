"""The common part of all cases' pictures."""

import contextlib

OURS, OTHERS, LIMIT, RANGE, GRID = "#1f6f8b", "#b9c4c9", "#c0392b", "#333333", "#e5e5e5"
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

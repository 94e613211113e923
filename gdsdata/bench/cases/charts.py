"""Parts of pictures that several cases draw."""

import itertools

from gdsdata.bench.harness.tables import is_ours

LIMIT = "limit (see report)"  # its label, the last of a legend


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
    """Draws a legend of all that the panels have labeled, each label once."""
    found: dict = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    labels = sorted(found, key=lambda label: label == LIMIT)
    handles = [found[label] for label in labels]
    figure.legend(handles, labels, loc=loc, ncols=columns, frameon=False, fontsize=9, **style)

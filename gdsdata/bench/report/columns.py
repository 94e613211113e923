"""Columns of tables: a heading, and how a row of results.json becomes a cell."""

from typing import NamedTuple


class Column(NamedTuple):
    heading: str
    cell: object  # row -> text
    is_text: bool = False
    on_terminal: bool = True  # It has less room than report.md.


whole, hundredths = "{:,.0f}".format, "{:.2f}".format


def three_digits(value):
    """Three significant digits; whole numbers from 100 on."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def figure(heading, field, form=three_digits, scale=1.0, on_terminal=True):
    """Make a column of numbers.

    Args:
        field: the row's field, or `field.part`; a spread without a part means its median.
        form: number -> text.
        scale: times which the number is shown.
    """

    def cell(row):
        value = row
        for name in field.split("."):
            value = value.get(name) if value else None
        if isinstance(value, dict):
            value = value["median"]
        return "-" if value is None else form(value * scale)

    return Column(heading, cell, on_terminal=on_terminal)


def text(heading, field, on_terminal=True):
    return Column(heading, lambda row: row[field] or "-", is_text=True, on_terminal=on_terminal)


def spread(row):
    rates = row["gb_per_s"]
    return f"{rates['min'] / rates['median'] - 1:+.0%} {rates['max'] / rates['median'] - 1:+.0%}"


GB_PER_S, SPREAD = figure("GB/s", "gb_per_s"), Column("spread", spread)  # The rates of a row have one spread.
RATE = (GB_PER_S, SPREAD, figure("ms", "seconds", scale=1e3))
CPU, PEAK, PATH = (
    figure("CPU s/GB", "cpu_s_per_gb"), figure("peak MB", "peak_bytes", whole, 1e-6), text("path", "path"),
)  # fmt: skip
FIRST = figure("first ms", "first_s", scale=1e3)
BEST_PEER = figure("x best peer", "ratio_to_best_peer", hundredths)
X_LIMIT = figure("x limit", "ratio_to_limit", hundredths)

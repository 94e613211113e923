"""How a case's results are laid out: its tables, its notes and its picture."""

import inspect
from collections.abc import Callable
from pathlib import Path

from gdsdata.bench.harness.case import BROKEN_OFF
from gdsdata.bench.harness.tables import is_ours
from gdsdata.bench.report import picture
from gdsdata.bench.report.columns import FIRST, Column, hundredths, three_digits, whole

HERE = Path(__file__).parent
VERIFIED = {
    True: "all rows gave the bytes that plain reading gives",
    False: "**NOT VERIFIED: see the rows marked FAILED**",
    None: "not compared, for case.verify=false",
}


class Layout:
    """A case's layout sets `columns`, has `title(rows)`, and notes.md beside its file."""

    columns: tuple[Column, ...] = ()
    title: Callable[..., str]
    picture_title = "GB per second by row"
    bar_sizes: dict[str, float] = {}  # of picture.tables_of_bars
    grouped_by: tuple[str, ...] = ("data", "dtype", "cache")  # the rows of one table have these in common

    def __init__(self, results):
        self.results, self.device = results, results.get("device", {"name": "cpu"})["name"]
        self.settings = results.get("config", {}).get("case", {})

    def columns_of(self, rows):
        return self.columns

    def first_call(self, rows):
        """Return the column of a process's first call, which is never cold."""
        return () if rows[0]["cache"] == "cold" else (FIRST,)

    def caption(self, rows):
        rate, name = rows[0]["limit"]["gb_per_s"], rows[0]["limit"]["name"]
        return f"limit not known: {name}" if rate is None else f"limit: {name}, {rate:.2f} GB/s"

    def groups(self):
        """Return the rows of each table, in the order measured."""
        found: dict[tuple, list] = {}
        for row in self.results["rows"]:
            found.setdefault(tuple(row[name] for name in self.grouped_by), []).append(row)
        return list(found.values())

    def tables(self):
        """Return [(title, caption, rows)]"""
        return [(self.title(rows), self.caption(rows), rows) for rows in self.groups()]

    def answers(self):
        """Return [(heading, what was found, [(caption, kind, text to copy)])], or []."""
        return []

    def limits(self):
        """Return [(kind of data, table, limit's name, what was found)]"""
        return [
            (kind, table, name, limit)
            for kind, found in self.results["limits"].items()
            for table, ones in found.items()
            for name, limit in ones.items()
        ]

    def notes(self):
        """Return the paragraphs of notes.md, which says what each figure means."""
        file = self.template("notes.md")
        said = {"settings": self.settings, "results": self.results, "on_gpu": self.device != "cpu", "layout": self}
        return [" ".join(part.split()) for part in rendered(file, **said).split("\n\n") if part.strip()]

    def template(self, name):
        """Return a file beside the case's own."""
        return Path(inspect.getfile(type(self))).with_name(name)

    def plot(self, path):
        """Draw a panel of bars for each table; nothing if all rows failed."""
        tables = self.drawn()
        if not tables:
            return
        with picture.tables_of_bars(path, tables, **self.bar_sizes) as (figure, axes):
            for axis, (title, rows) in zip(axes, tables, strict=True):
                self.bars(axis, title, rows)
            picture.legend(figure, 5)

    def drawn(self):
        """Return [(title, rows)] of the tables in the picture."""
        return [(title, rows) for title, _, rows in self.tables() if any(row["gb_per_s"] for row in rows)]

    def bars(self, axis, title, rows):
        """Draw GB/s of each row, and the limit."""
        rates = [row["gb_per_s"] or {"min": 0, "median": 0, "max": 0} for row in rows]
        colours = [picture.OURS if is_ours(row["key"]) else picture.OTHERS for row in rows]
        axis.barh(range(len(rows)), [rate["median"] for rate in rates], color=colours, height=0.72)
        for place, (row, rate) in enumerate(zip(rows, rates, strict=True)):
            axis.plot([rate["min"], rate["max"]], [place, place], color=picture.RANGE, linewidth=1)
            picture.beside(axis, self.bar_text(row) if rate["median"] else "failed", rate["max"], place)
        limit = rows[0]["limit"]["gb_per_s"] or 0
        if limit:
            axis.axvline(limit, color=picture.LIMIT, linestyle="--", linewidth=1.2, zorder=0)
        axis.set_xlim(0, 1.22 * max(limit, *(rate["max"] for rate in rates)))
        label = f"GB/s of the files' bytes (1e9)      dashed: {self.caption(rows)}"
        picture.finish_bars(axis, title, list(map(shown_name, rows)), label)

    def bar_text(self, row):
        return f"{three_digits(row['gb_per_s']['median'])} GB/s"

    def page_text(self, folder):
        """report.md."""
        return rendered(HERE / "report.jinja", layout=self, results=self.results, **HELPERS)


def rendered(file, **said):
    """Render a Jinja template with these names; it may import report/shared.jinja."""
    import jinja2

    loader = jinja2.FileSystemLoader([file.parent, HERE])
    environment = jinja2.Environment(
        loader=loader,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["capital"] = capital
    return environment.get_template(file.name).render(**said)


def capital(text):
    return f"{text[:1].upper()}{text[1:]}"


def shown_name(row):
    """Return the row's name, with what a reader has to know before its figures."""
    cut = " (cut off)" if row.get("cut") and row["cache"] == "cold" else ""
    failed = f" ({len(row['failed_rows'])} of its rows FAILED)" if row.get("failed_rows") else ""
    return row["name"] + cut + (" (page cache)" if row.get("through_cache") else "") + failed


def cells(row, columns):
    if row["error"]:
        return [row["name"], "FAILED", *["-"] * (len(columns) - 1)]
    return [shown_name(row), *(column.cell(row) for column in columns)]


def table_lines(rows, columns):
    """Return a table in markdown; our rows are bold."""
    lines = ["| | " + " | ".join(column.heading for column in columns) + " |"]
    lines += ["|---|" + "|".join("---" if column.is_text else "---:" for column in columns) + "|"]
    for row in rows:
        text = [literal(cell).replace("|", "/") for cell in cells(row, columns)]
        if is_ours(row["key"]):
            text[0] = f"**{text[0]}**"
        lines.append("| " + " | ".join(text) + " |")
    return "\n".join(lines)


def literal(text):
    """Return a text whose underscores are no markdown."""
    return text.replace("__", r"\_\_")


HELPERS = {
    "BROKEN_OFF": BROKEN_OFF, "VERIFIED": VERIFIED, "hundredths": hundredths, "literal": literal,
    "table_lines": table_lines, "whole": whole,
}  # fmt: skip

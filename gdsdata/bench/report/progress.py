"""Progress of a run on stderr, and its tables on the terminal."""

import contextlib
import sys
import time

from gdsdata.bench.harness.tables import is_ours
from gdsdata.bench.report.layout import cells


class Progress:
    """Bars if stderr is a terminal; otherwise a line a step, with the seconds it took."""

    def __init__(self):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        console = Console(stderr=True)
        columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Four redraws a second: the bars must take no time from what is measured.
        self.bars = Bars(*columns, console=console, disable=not console.is_terminal, refresh_per_second=4)

    def __enter__(self):
        self.bars.start()
        return self

    def __exit__(self, *_):
        self.bars.stop()

    @contextlib.contextmanager
    def count(self, name, total):
        started = time.monotonic()
        bar = self.bars.add_task(name, total=total)
        yield lambda count: self.bars.advance(bar, count)
        self.bars.update(bar, completed=total)
        if self.bars.disable:
            self.say(f"{name}: {time.monotonic() - started:.1f} s")

    @contextlib.contextmanager
    def bytes(self, name, total_bytes):
        with self.count(f"{name} (MiB)", total_bytes >> 20) as advance:
            yield lambda count: advance(count / 2**20)

    def step(self, name):
        return self.count(name, 1)

    def say(self, text):
        """Print a line, above the bars."""
        if self.bars.disable:
            print(f"gdsdata.bench: {text}", file=sys.stderr, flush=True)
        else:
            self.bars.console.print(text, markup=False, highlight=False)


def show(layout, console):
    from rich import box
    from rich.table import Table

    for title, caption, rows in layout.tables():
        table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
        table.add_column("", no_wrap=True)
        columns = [column for column in layout.columns_of(rows) if column.on_terminal]
        for column in columns:
            heading, wraps = column.heading.replace(" (", "\n("), column.heading == "path"
            table.add_column(heading, justify="left" if column.is_text else "right", no_wrap=not wraps, overflow="fold")
        for row in rows:
            table.add_row(*cells(row, columns), style="bold" if is_ours(row["key"]) else None)
        console.print(table)
    for heading, text, copies in layout.answers():
        console.print(f"{heading}: {text}\n", style="bold", markup=False, highlight=False, soft_wrap=True)
        for caption, _, copy in copies:
            console.print(f"# {caption}\n{copy}\n", markup=False, highlight=False, soft_wrap=True)
    for note in layout.results["notes"]:
        console.print(f"Note: {note}", markup=False)

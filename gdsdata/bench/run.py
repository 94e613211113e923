"""One run of the bench: it measures a case, and writes and prints its report."""

import json
import sys
from pathlib import Path

from gdsdata.bench import cases
from gdsdata.bench.harness.process import INTERRUPTED, ended_in_order, one_interrupt
from gdsdata.bench.report.page import page
from gdsdata.bench.report.progress import Progress, show


@one_interrupt()
@ended_in_order()
def main(settings, folder):
    """Run the case, write its report into `folder`, and return the exit status."""
    from rich.console import Console

    folder = Path(folder)
    with Progress() as progress:
        results = cases.case_class(settings.case.name)(settings, folder, progress).measure()
    written = write(results, folder)
    console = Console(width=None if sys.stdout.isatty() else 165)
    show(cases.layout_of(results), console)
    failures = dict.fromkeys(
        (row["data"], row["name"], error)
        for row in results["rows"]
        for error in [row["error"], *row.get("failed_rows", [])]
        if error
    )
    for kind, name, error in failures:
        said = f"FAILED: {kind}, {name}: {error}"
        console.print(said, style="bold red", markup=False, highlight=False, soft_wrap=True)
    print(f"Report: {written}", flush=True)
    if results["broken_off"]:
        return INTERRUPTED
    return 1 if failures or results["verified"] is False else 0  # None: no comparison was wanted.


def write(results, folder):
    """Write results.json, results.png, report.md and .html; return report.md's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    layout = cases.layout_of(results)
    layout.plot(folder / "results.png")
    text, report = layout.page_text(folder), folder / "report.md"
    report.write_text(text)
    (folder / "report.html").write_text(page(text, folder))
    return report.resolve()

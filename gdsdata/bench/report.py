"""What a run leaves: tables on the terminal, results.json, results.png and report.md; and progress while it works."""

import contextlib
import json

from . import peers

COLUMNS = ["", "samples/s", "spread", "GB/s", "first batch ms", "CPU s/GB", "peak MB", "path", "x best peer", "x limit"]


class Progress:
    """Bars on stderr while it is a terminal; silent otherwise."""

    def __init__(self):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        console = Console(stderr=True)
        columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Four redraws a second: the bars must not take time from what is measured.
        self.bars = Bars(*columns, console=console, disable=not console.is_terminal, refresh_per_second=4)

    def __enter__(self):
        self.bars.start()
        return self

    def __exit__(self, *_):
        self.bars.stop()

    @contextlib.contextmanager
    def count(self, name, total):
        bar = self.bars.add_task(name, total=total)
        yield lambda count: self.bars.advance(bar, count)
        self.bars.update(bar, completed=total)

    @contextlib.contextmanager
    def bytes(self, name, total_bytes):
        with self.count(f"{name} (MiB)", total_bytes >> 20) as advance:
            yield lambda count: advance(count / 2**20)

    def step(self, name):
        return self.count(name, 1)


# ------------------------------------------------------------------------------------------------ tables


def tables(results):
    """[(title, limit's text, rows)] in the order measured."""
    grouped = {}
    for row in results["rows"]:
        grouped.setdefault((row["data"], row["dtype"], row["cache"]), []).append(row)
    found = []
    for (kind, dtype, cache), rows in grouped.items():
        about = results["data"][kind]
        amount = f", {about['cold_samples']:,} samples" if cache == "cold" else ""
        title = f"{kind}, {dtype}, batches of {about['batch_size']}, shuffled, {cache} cache{amount}"
        limit = rows[0]["limit"]
        if limit["samples_per_s"] is None:
            text = f"limit not known: {limit['name']}"
        else:
            rate = limit["samples_per_s"]
            text = f"limit: {limit['name']}, {rate:,.0f} samples/s, {rate * about['sample_bytes'] / 1e9:.2f} GB/s"
        found.append((title, text, rows))
    return found


def number(value, form="{:,.0f}"):
    return "-" if value is None else form.format(value)


def median(row, name, form):
    return number(row[name] and row[name]["median"], form)


def two_digits(value):
    """Three significant digits, as a user would read them."""
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def cells(row):
    if row["error"]:
        return [row["name"], "FAILED", *["-"] * (len(COLUMNS) - 2)]
    rates = row["samples_per_s"]
    return [
        row["name"] + (" (cut off)" if row["cut"] and row["cache"] == "cold" else ""),
        number(rates["median"]),
        f"{rates['min'] / rates['median'] - 1:+.0%} {rates['max'] / rates['median'] - 1:+.0%}",
        two_digits(row["gb_per_s"]["median"]),
        two_digits(row["first_batch_ms"]["median"]),
        two_digits(row["cpu_s_per_gb"]["median"]),
        number(row["peak_bytes"] / 1e6),
        row["path"],
        number(row["ratio_to_best_peer"], "{:.2f}"),
        number(row["ratio_to_limit"], "{:.2f}"),
    ]


def show(results, console):
    from rich import box
    from rich.table import Table

    for title, limit, rows in tables(results):
        table = Table(title=title, caption=limit, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
        for name in COLUMNS:
            text = name in ("", "path")
            table.add_column(name, justify="left" if text else "right", no_wrap=name != "path", overflow="fold")
        for row in rows:
            table.add_row(*cells(row), style="bold" if peers.is_ours(row["key"]) else None)
        console.print(table)
    for note in results["notes"]:
        console.print(f"Note: {note}", markup=False)


def markdown(results):
    machine, versions = results["machine"], results["versions"]
    memory = machine["memory_bytes"] / 2**30
    lines = [
        "# gdsdata bench: loader",
        "",
        f"{results['when']}, {results['seconds']:.0f} s, `{' '.join(results['command'])}`",
        "",
        f"- Machine: {machine['cpu']}{' (virtual)' if machine['virtual'] else ''}, {machine['cores']} cores, "
        f"{memory:.0f} GiB, kernel {machine['kernel']}, load {machine['load_before']:.1f} before the run",
        "- Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    for kind, about in results["data"].items():
        lines.append(f"- Data, {kind}: {about['summary']}; {about['file_system']} on {about['device']}")
    verified = "all rows gave the bytes that plain numpy reads"
    lines += [
        f"- Bytes: {verified if results['verified'] else '**NOT VERIFIED: see the rows marked FAILED**'}",
        "- Engine: "
        + (", ".join(f"{name}={value}" for name, value in results["config"]["engine"].items()) or "defaults"),
        "",
        "![samples per second by row](results.png)",
        "",
    ]
    for title, limit, rows in tables(results):
        lines += [f"## {title}", "", f"{limit[0].upper()}{limit[1:]}.", ""]
        lines += ["| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * 6 + "|---|---:|---:|"]
        for row in rows:
            text = [cell.replace("|", "/").replace("__", r"\_\_") for cell in cells(row)]
            if peers.is_ours(row["key"]):
                text[0] = f"**{text[0]}**"
            lines.append("| " + " | ".join(text) + " |")
        lines.append("")
    failed = [row for row in results["rows"] if row["error"]]
    if failed:
        lines += ["## Failed", ""]
        lines += [
            f"- {row['data']} {row['dtype']} {row['cache']}, {row['name']}: `{row['error']}`" for row in failed
        ] + [""]
    lines += ["## The machine's limits", "", "Medians of the turns they took among the rows.", ""]
    lines += ["| table | limit | GB/s | per second |", "|---|---|---:|---:|"]
    for kind, found in results["limits"].items():
        for table, ones in found.items():
            for name, limit in ones.items():
                if "unavailable" in limit:
                    lines.append(f"| {kind}, {table} | {name} | {limit['unavailable']} | |")
                else:
                    lines.append(
                        f"| {kind}, {table} | {name} | {limit['gb_per_s']:.2f} | {number(limit.get('per_s'))} |"
                    )
    lines += ["", "## Notes", "", *[f"- {note}" for note in results["notes"]]]
    config = results["config"]["case"]
    lines += [
        f"- Each row ran {config['repeats']} times in turn with the others, in a process of its own; the tables show "
        f"medians. A warm run ends after {config['epochs']} epochs or {config['run_seconds']:g} s.",
        "- samples/s and GB/s (1e9 bytes of the samples as stored) count from construction to the last batch; "
        "imports and one untimed pass come before. Cold, a loader that maps no files and has no worker processes is "
        "constructed and has read some batches before the cache is dropped and the clock runs: so the storage is timed "
        "and not memory that is touched for the first time.",
        "- `first batch` always counts from construction, in ms.",
        "- CPU s/GB: user + system time of the process and its workers, from construction until all is closed.",
        "- peak MB: private and shared memory of the process and its workers above what it had before construction; "
        "mapped files are the page cache's and not counted.",
        "- Cold: the files' pages were dropped by posix_fadvise, and mincore was asked whether they are gone (where "
        "not, a note above says so). The device below, or a host's cache in a virtual machine, may still hold them. "
        "Mapped files are read ahead by the kernel, 128 KiB around each page missed: where a few thousand samples are "
        "all over a small file, such a row reads the whole set, and finds the rest of its epoch in the page cache.",
        "- x limit: warm, a memory copy by two threads of the samples' bytes; what stays in a CPU cache can pass it. "
        "Cold, the faster of fetching each sample by O_DIRECT and of reading the whole set once.",
        "",
        "| row | what it is |",
        "|---|---|",
    ]
    settings = {row["name"]: row["setting"] for row in results["rows"]}
    lines += [
        f"| {name.replace('__', chr(92) + '_' + chr(92) + '_')} | {setting} |" for name, setting in settings.items()
    ]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------ the picture

OURS, OTHERS, LIMIT = "#1f6f8b", "#b9c4c9", "#c0392b"


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [table for table in tables(results) if any(row["samples_per_s"] for row in table[2])]
    if not drawn:
        return
    heights = [len(rows) * 0.3 + 1.3 for _, _, rows in drawn]
    figure, axes = pyplot.subplots(
        len(drawn), 1, figsize=(9.5, sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axis, (title, limit_text, rows) in zip(axes[:, 0], drawn, strict=True):
        sample_bytes = results["data"][rows[0]["data"]]["sample_bytes"]
        rates = [row["samples_per_s"]["median"] if row["samples_per_s"] else 0 for row in rows]
        colours = [OURS if peers.is_ours(row["key"]) else OTHERS for row in rows]
        axis.barh(range(len(rows)), [rate * sample_bytes / 1e9 for rate in rates], color=colours, height=0.72)
        for place, (row, rate) in enumerate(zip(rows, rates, strict=True)):
            spread = row["samples_per_s"]
            text = "failed"
            if spread:
                low, high = (spread[name] * sample_bytes / 1e9 for name in ("min", "max"))
                axis.plot([low, high], [place, place], color="#333333", linewidth=1)
                text = f"{rate:,.0f} samples/s"
            right = (spread["max"] if spread else 0) * sample_bytes / 1e9
            axis.annotate(
                text, (right, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
            )  # fmt: skip
        largest = max(max(rates), *(row["samples_per_s"]["max"] for row in rows if row["samples_per_s"]))
        limit = rows[0]["limit"]["samples_per_s"]
        if limit:
            axis.axvline(limit * sample_bytes / 1e9, color=LIMIT, linestyle="--", linewidth=1.2, zorder=0)
            largest = max(largest, limit)
        axis.set_xlim(0, largest * sample_bytes / 1e9 * 1.22)
        axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.tick_params(axis="x", labelsize=8)
        axis.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=8)
        axis.set_xlabel(f"GB/s of the files' bytes (1e9)      dashed: {limit_text}", fontsize=8, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write(results, folder):
    """results.json, results.png and report.md in `folder`; the path of the last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, folder / "results.png")
    report = folder / "report.md"
    report.write_text(markdown(results))
    return report.resolve()

"""What a run leaves: tables on the terminal, results.json, results.png, report.md and .html; and progress meanwhile."""

import contextlib
import importlib
import json
import sys
import time

from gdsdata.bench import page, sweep

BROKEN_OFF = "This run was broken off (Ctrl-C): what it had not measured by then is missing."
SCHEMA = 2  # of results.json (docs/bench_results.md): raised when a field changes its meaning or goes

# (heading, its cell); the rates of a row have one spread, in whichever unit.
RATIOS = [("x best peer", lambda row: number(row["ratio_to_best_peer"], "{:.2f}"))]
RATIOS += [("x limit", lambda row: number(row["ratio_to_limit"], "{:.2f}"))]
RATE = [
    ("GB/s", lambda row: two_digits(row["gb_per_s"]["median"])),
    ("spread", lambda row: spread(row)),
    ("ms", lambda row: two_digits(row["seconds"]["median"] * 1e3)),
]
COST = [
    ("CPU s/GB", lambda row: two_digits(row["cpu_s_per_gb"]["median"])),
    ("peak MB", lambda row: number(row["peak_bytes"] / 1e6)),
    ("path", lambda row: row["path"]),
]
QUANTILES = {"p50": "p50_us", "p90": "p90_us", "p99": "p99_us", "p99.9": "p99_9_us"}
COLUMNS = {
    "loader": [
        ("samples/s", lambda row: number(row["samples_per_s"]["median"])),
        ("spread", lambda row: spread(row)),
        ("GB/s", lambda row: two_digits(row["gb_per_s"]["median"])),
        ("first batch ms", lambda row: two_digits(row["first_batch_ms"]["median"])),
        *COST,
        *RATIOS,
    ],
    "load": [*RATE, *COST, *RATIOS],
    "checkpoint": [
        *RATE,
        ("then ms", lambda row: two_digits(row["background_s"] and row["background_s"]["median"] * 1e3)),
        ("step ms", lambda row: two_digits(row["step_s"] and row["step_s"]["median"] * 1e3)),
        ("beside it", lambda row: two_digits(row["step_beside_s"] and row["step_beside_s"]["median"] * 1e3)),
        *COST[:2],
        ("stated MB", lambda row: number(row["stated_bytes"] and row["stated_bytes"] / 1e6)),
        *COST[2:],
        ("x mapped", lambda row: number(row["ratio_to_mapped"], "{:.2f}")),
        *RATIOS,
    ],
    "io": [
        ("IoType", lambda row: row["io_type"]),
        ("XferType", lambda row: row["xfer_type"]),
        ("Threads", lambda row: number(row["threads"])),
        ("DataSetSize (KiB)", lambda row: number(row["file_bytes"] / 2**10)),
        ("IOSize (KiB)", lambda row: number(row["io_bytes"] / 2**10)),
        ("GiB/sec", lambda row: two_digits(row["gb_per_s"]["median"] * 1e9 / 2**30)),
        ("spread", lambda row: spread(row)),
        ("Avg_Latency (usecs)", lambda row: two_digits(row["latency_us"]["median"])),
        *((name, lambda row, key=key: two_digits(row[key]["median"])) for name, key in QUANTILES.items()),
        ("a call", lambda row: number(row["transfers_per_call"])),
        ("IOPS", lambda row: number(row["iops"]["median"])),
        ("ops", lambda row: number(row["ops"]["median"])),
        ("total_time (secs)", lambda row: two_digits(row["seconds"]["median"])),
        ("user s", lambda row: two_digits(row["cpu_user_s"]["median"])),
        ("sys s", lambda row: two_digits(row["cpu_system_s"]["median"])),
        ("requests/op", lambda row: two_digits(row["requests_per_op"] and row["requests_per_op"]["median"])),
        COST[2],
        *RATIOS,
    ],
}
TEXTS = ("path", "XferType", "main table", "best peer", "bytes")  # columns
# On the terminal, where there is less room: their titles say it, or report.md.
NOT_SHOWN = {
    "io": (
        "IoType", "Threads", "DataSetSize (KiB)", "IOSize (KiB)", "spread", "p90", "p99.9", "a call", "ops",
        "total_time (secs)", "requests/op",
    ),
    "train": ("spread", "on device ms", "x best peer", "saves"),
    "all": ("main table", "x limit, all", "x best peer, all"),
    "startup": ("Python", "CUDA", "model", "spread s", "CPU s", "peak MB"),
}  # fmt: skip
OF_ASYNC = ("then ms", "step ms", "beside it")
LEFT_OUT = {"save": (*OF_ASYNC, "x mapped"), "load": OF_ASYNC, "async": ("x mapped",)}  # columns, by kind of work


def columns_of(case, kind):
    return [column for column in COLUMNS[case] if column[0] not in LEFT_OUT.get(kind, ())]


def layout(case):
    """Who lays out a case's tables, notes and picture: a module with PICTURE, columns_of, tables, notes and plot.

    One with a `page_text` lays its whole page out; one with `answers` says behind the tables what
    came out.
    """
    if case in ("all", "latency", "startup", "tensor", "train", "tune"):
        return importlib.import_module(f".{case}_report", __package__)
    return sys.modules[__name__]


def is_ours(key):
    return key.split("_")[0] == "gdsdata"


class Progress:
    """Bars on stderr while it is a terminal; otherwise a line a step, with the seconds it took."""

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
        started = time.monotonic()
        bar = self.bars.add_task(name, total=total)
        yield lambda count: self.bars.advance(bar, count)
        self.bars.update(bar, completed=total)
        if self.bars.disable:
            print(f"gdsdata.bench: {name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def bytes(self, name, total_bytes):
        with self.count(f"{name} (MiB)", total_bytes >> 20) as advance:
            yield lambda count: advance(count / 2**20)

    def step(self, name):
        return self.count(name, 1)

    def say(self, text):
        """A line above the bars."""
        if self.bars.disable:
            print(f"gdsdata.bench: {text}", file=sys.stderr, flush=True)
        else:
            self.bars.console.print(text, markup=False, highlight=False)


# ------------------------------------------------------------------------------------------------ tables


def loader_title(about, kind, dtype, cache, device):
    amount = f", {about['cold_samples']:,} samples" if cache == "cold" else ""
    there = "" if device == "cpu" else f", to {device}"
    return f"{kind}, {dtype}, batches of {about['batch_size']}, shuffled, {cache} cache{amount}{there}"


def load_title(about, kind, dtype, cache, device):
    size = f"{about['loaded_bytes'] / 2**20:,.0f} MiB"
    return f"{kind}, {size} of {dtype} in {about['tensors']:,} tensors, to {device}, {cache} cache"


def checkpoint_title(about, kind, dtype, cache, device):
    what = {
        "new": "save to a new file",
        "replaced": "save over an older file",
        "warm": "load, warm cache",
        "cold": "load, cold cache",
        "staged": "stall of an asynchronous save, not its first",
    }[cache]
    there = f"{'to' if kind == 'load' else 'from'} {device}"
    return f"{what}: {about['state_bytes'] / 2**20:,.0f} MiB of {dtype} in {about['tensors']:,} tensors, {there}"


def io_title(about, kind, dtype, cache, device):
    size = f"{about['file_bytes'] / 2**20:,.0f} MiB"
    how = {"warm": "out of the page cache", "cold": "past the page cache", "direct": "past the page cache, synced"}
    return f"{kind}, {dtype} in flight, {how[cache]}, file of {size}"


TITLES = {"loader": loader_title, "load": load_title, "checkpoint": checkpoint_title, "io": io_title}


def tables(results):
    """[(title, limit's text, rows)] in the order measured."""
    grouped = {}
    for row in results["rows"]:
        grouped.setdefault((row["data"], row["dtype"], row["cache"]), []).append(row)
    found = []
    for (kind, dtype, cache), rows in grouped.items():
        about = results["data"][kind]
        title = TITLES[results["case"]](about, kind, dtype, cache, results["device"]["name"])
        rate, name = rows[0]["limit"]["gb_per_s"], rows[0]["limit"]["name"]
        if rate is None:
            text = f"limit not known: {name}"
        else:
            samples = f"{rate * 1e9 / about['sample_bytes']:,.0f} samples/s, " if "sample_bytes" in about else ""
            text = f"limit: {name}, {samples}{rate:.2f} GB/s"
        found.append((title, text, rows))
    return found


def number(value, form="{:,.0f}"):
    return "-" if value is None else form.format(value)


def two_digits(value):
    """Three significant digits, as a user would read them."""
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def spread(row):
    rates = row["gb_per_s"]
    return f"{rates['min'] / rates['median'] - 1:+.0%} {rates['max'] / rates['median'] - 1:+.0%}"


def cells(row, columns):
    if row["error"]:
        return [row["name"], "FAILED", *["-"] * (len(columns) - 1)]
    return [shown_name(row), *(cell(row) for _, cell in columns)]


def shown_name(row):
    """With what a reader has to know before its figures."""
    cut = " (cut off)" if row.get("cut") and row["cache"] == "cold" else ""
    failed = f" ({len(row['failed_rows'])} of its rows FAILED)" if row.get("failed_rows") else ""
    return row["name"] + cut + (" (page cache)" if row.get("through_cache") else "") + failed


def answers_of(results):
    laid = layout(results["case"])
    return laid.answers(results) if hasattr(laid, "answers") else []


def answer_lines(results):
    lines = []
    for heading, text, copies in answers_of(results):
        lines += [f"## {heading}", "", f"**{text}**", ""]
        for caption, kind, copy in copies:
            lines += [f"{caption}:", "", f"```{kind}", *copy.splitlines(), "```", ""]
    return lines


def show(results, console):
    from rich import box
    from rich.table import Table

    laid = layout(results["case"])
    for title, limit, rows in laid.tables(results):
        table = Table(title=title, caption=limit, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
        table.add_column("", no_wrap=True)
        hidden = NOT_SHOWN.get(results["case"], ())
        columns = [one for one in laid.columns_of(results["case"], rows[0]["data"]) if one[0] not in hidden]
        for name, _ in columns:
            justify = "left" if name in TEXTS else "right"
            table.add_column(name.replace(" (", "\n("), justify=justify, no_wrap=name != "path", overflow="fold")
        for row in rows:
            table.add_row(*cells(row, columns), style="bold" if is_ours(row["key"]) else None)
        console.print(table)
    for heading, text, copies in answers_of(results):
        console.print(f"{heading}: {text}\n", style="bold", markup=False, highlight=False, soft_wrap=True)
        for caption, _, copy in copies:
            console.print(f"# {caption}\n{copy}\n", markup=False, highlight=False, soft_wrap=True)
    for note in results["notes"]:
        console.print(f"Note: {note}", markup=False)


def heading(results):
    """The page's head: what ran, when, and on what."""
    machine, versions = results["machine"], results["versions"]
    memory = machine["memory_bytes"] / 2**30
    return [
        f"# gdsdata bench: {results['case']}",
        "",
        f"{results['when']}, {results['seconds']:.0f} s, `{' '.join(results['command'])}`",
        "",
        *([f"**{BROKEN_OFF}**", ""] if results.get("broken_off") else []),
        f"- Machine: {machine['cpu']}{' (virtual)' if machine['virtual'] else ''}, {machine['cores']} cores, "
        f"{memory:.0f} GiB, kernel {machine['kernel']}, load {machine['load_before']:.1f} before the run",
        f"- Device: {device_text(results['device'])}",
        "- Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]


def table_lines(rows, columns):
    names = [name for name, _ in columns]
    lines = ["| | " + " | ".join(names) + " |"]
    lines += ["|---|" + "|".join("---" if name in TEXTS else "---:" for name in names) + "|"]
    for row in rows:
        text = [cell.replace("|", "/").replace("__", r"\_\_") for cell in cells(row, columns)]
        if is_ours(row["key"]):
            text[0] = f"**{text[0]}**"
        lines.append("| " + " | ".join(text) + " |")
    return lines


def markdown(results):
    lines = heading(results)
    for kind, about in results["data"].items():
        lines.append(f"- Data, {kind}: {about['summary']}; {about['file_system']} on {about['device']}")
    case, laid = results["case"], layout(results["case"])
    verified = {
        True: "all rows gave the bytes that plain reading gives",
        False: "**NOT VERIFIED: see the rows marked FAILED**",
        None: "not compared, for case.verify=false",
    }[results["verified"]]
    lines += [
        f"- Bytes: {verified}",
        "- Engine: "
        + (", ".join(f"{name}={value}" for name, value in results["config"]["engine"].items()) or "defaults"),
        "",
        f"![{laid.PICTURE}](results.png)",
        "",
    ]
    for title, limit, rows in laid.tables(results):
        lines += [f"## {title}", "", f"{limit[0].upper()}{limit[1:]}.", ""]
        lines += [*table_lines(rows, laid.columns_of(case, rows[0]["data"])), ""]
    lines += answer_lines(results)
    failed = [row for row in results["rows"] if row["error"]]
    if failed:
        lines += ["## Failed", ""]
        lines += [
            f"- {row['data']} {row['dtype']} {row['cache']}, {row['name']}: `{row['error']}`" for row in failed
        ] + [""]
    if any(ones for found in results["limits"].values() for ones in found.values()):
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
    lines += [f"- {text}" for text in laid.notes(results)]
    lines += ["", "| row | what it is |", "|---|---|"]
    settings = {row["name"]: row["setting"] for row in results["rows"]}
    lines += [
        f"| {name.replace('__', chr(92) + '_' + chr(92) + '_')} | {setting} |" for name, setting in settings.items()
    ]
    return "\n".join(lines) + "\n"


def device_text(device):
    if "model" not in device:
        return device["name"]
    memory = device["memory_bytes"] / 2**30
    return f"{device['name']}, {device['model']}, {memory:.0f} GiB, driver {device['driver']}, CUDA {device['cuda']}"


CPU_NOTE = "CPU s/GB: user + system time of the process and its workers, from construction until all is closed."
PEAK_NOTE = (
    "peak MB: private and shared memory (not the GPU's) of the process and its workers above what it had before "
    "construction; mapped files are the page cache's and not counted."
)
STATED_NOTE = (
    "stated MB: bounce and staging memory that gdsdata's engines say they take at most (`bounce_bytes`); of an "
    "AsyncCheckpointer, without the staging memory of the state."
)
COLD_NOTE = (
    "Cold: the files' pages were dropped by posix_fadvise, and mincore was asked whether they are gone (where not, a "
    "note above says so). The device below, or a host's cache in a virtual machine, may still hold them."
)
COLD_LIMIT_NOTE = "x limit, cold: such a file read once with O_DIRECT, 1 MiB a read, 32 in flight."
GPU_NOTE = (
    "On the GPU a run ends when the device has all of it (one synchronize, and one for the first batch). CUDA's "
    "context was made and used before. x limit, warm: a 256 MiB pinned buffer copied to the GPU again and again, in a "
    "process of its own."
)


def loader_notes(results):
    config = results["config"]["case"]
    yield (
        f"Each row ran {config['repeats']} times in turn with the others, in a process of its own; the tables show "
        f"medians. A warm run ends after {config['epochs']} epochs or {config['run_seconds']:g} s."
    )
    yield (
        "samples/s and GB/s (1e9 bytes of the samples as stored) count from construction to the last batch; imports "
        "and one untimed pass come before. Cold, a loader that maps no files and has no worker processes is "
        "constructed and has read some batches before the cache is dropped and the clock runs: so the storage is timed "
        "and not memory that is touched for the first time."
    )
    yield "`first batch` always counts from construction, in ms."
    yield from (CPU_NOTE, PEAK_NOTE)
    if results["device"]["name"] != "cpu":
        yield GPU_NOTE
        yield (
            "residency=pinned is constructed, and the epochs until it is ready are read, before the clock runs: only "
            "its `first batch` counts from construction."
        )
    yield (
        f"{COLD_NOTE} Mapped files are read ahead by the kernel, 128 KiB around each page missed: where a few thousand "
        "samples are all over a small file, such a row reads the whole set, and finds the rest of its epoch in the "
        "page cache."
    )
    warm = "a memory copy by a thread a core of the samples' bytes; what stays in a CPU cache can pass it"
    warm = warm if results["device"]["name"] == "cpu" else "see above"
    yield f"x limit: warm, {warm}. Cold, the faster of fetching each sample by O_DIRECT and of reading the set once."


def load_notes(results):
    repeats = results["config"]["case"]["repeats"]
    yield (
        f"Each row loaded the file {repeats} times in turn with the others, in a process of its own; the tables show "
        "medians. One untimed load, whose bytes were all compared with plain reading, came before."
    )
    yield (
        "GB/s (1e9 bytes of tensors) counts from the call to tensors that are all there: memory for them is allocated "
        "within it, and was given back before."
    )
    yield from (CPU_NOTE, PEAK_NOTE)
    if results["device"]["name"] != "cpu":
        yield GPU_NOTE
    else:
        yield "x limit, warm: a memory copy by a thread a core."
    yield f"{COLD_NOTE} {COLD_LIMIT_NOTE}"


def checkpoint_notes(results):
    config = results["config"]["case"]
    yield (
        f"Each row ran {config['repeats']} times in turn with the others, in a process of its own; the tables show "
        "medians. The state is random bits, made anew before each run; one tensor in ten is of 16 KiB, the others are "
        "of equal size."
    )
    yield (
        "Bytes: before timing, what each row saves is loaded by the format's own library (torch.load with "
        "weights_only, safetensors, torch's DCP; else by plain reading or by the row itself) and compared bit by bit; "
        "an asynchronous save's state is zeroed as soon as it has returned. After every load all tensors, which were "
        "zeros, are compared."
    )
    yield (
        "save: from the call to bytes and names on storage. x limit: a file of as many bytes, its space allocated "
        "before, written with O_DIRECT and synced; the better of two request sizes. What the kernel's own threads do "
        "to write the page cache back is in nobody's CPU seconds."
    )
    yield (
        "load: into tensors that are there, their memory touched. x mapped: of safetensors' row, which on the CPU "
        "copies out of a mapped file."
    )
    yield (
        "async: ms are those in which save keeps the caller and what its current stream is given next; `then ms` are "
        "all until the bytes are on storage. x limit: the state's bytes at the pace of a memory copy, on a GPU of a "
        "pinned copy from it. step ms: a step of a training loop that waits for no input, by itself and `beside it`, "
        "while a save's bytes are written."
    )
    yield from (CPU_NOTE, PEAK_NOTE, STATED_NOTE)
    yield f"{COLD_NOTE} {COLD_LIMIT_NOTE}"
    if results["device"]["name"] != "cpu":
        yield GPU_NOTE


def io_notes(results):
    config = results["config"]["case"]
    runs = "one pass over the file" if config["duration_s"] is None else f"{config['duration_s']:g} s"
    yield (
        f"Each row ran {config['repeats']} times in turn with the others, {runs} each, in a process of its own; the "
        "table shows medians. Opening and allocating come before the clock, a write's fsync is within it."
    )
    yield (
        "Latency is that of a call of Python, from before it to when all of its transfers (`a call`: so many at most) "
        "have ended; of futures, from submission to when the future is done. With many in flight it includes their "
        "waiting for each other, and for Python."
    )
    yield (
        "In flight: threads, a transfer each; one thread's futures; or `batch_calls` calls that share the depth. "
        "Threads and futures pay for Python with every transfer: small ones are better carried by batches."
    )
    yield (
        "requests/op: what the engine asked storage for, for each transfer: below 1 where neighbours of one call were "
        "joined, above where a transfer was cut (`engine.request_bytes`); 0 out of the page cache. It joins no others: "
        "coalesce_gap_bytes is 0 here unless it is set."
    )
    yield (
        "Bytes follow from their place in the file. Each row was compared in a pass of its own (of 4,096 transfers at "
        "most), and after each timed run what its last calls had read, or all that it had written, once more."
        if config["verify"]
        else "Bytes were not compared."
    )
    yield (
        "Writes go to a new file of allocated space, past the page cache, again and again until the time is over, and "
        "are synced once at the end; those of gdsdata.Engine.write (futures) each by itself, as its promise is."
    )
    yield (
        f"{COLD_NOTE} What a row left of the file in the page cache is looked at after each run past it: one that left "
        "more than 2% of what it moved is marked (page cache)."
    )
    yield (
        "Warm: the whole file was read once. x limit: the kernel's native AIO from one thread, the same "
        "transfers, as many in flight; warm, a memory copy by a thread a core (what stays in a CPU cache can pass "
        "it), to a GPU a pinned copy."
    )
    yield "user s, sys s: of the row's process in a run, the io_uring threads among them."


NOTES = {"loader": loader_notes, "load": load_notes, "checkpoint": checkpoint_notes, "io": io_notes}


def notes(results):
    return NOTES[results["case"]](results)


# ------------------------------------------------------------------------------------------------ the picture

PICTURE = "GB per second by row"
OURS, OTHERS, LIMIT = "#1f6f8b", "#b9c4c9", "#c0392b"


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [table for table in tables(results) if any(row["gb_per_s"] for row in table[2])]
    if not drawn:
        return
    heights = [len(rows) * 0.3 + 1.3 for _, _, rows in drawn]
    figure, axes = pyplot.subplots(
        len(drawn), 1, figsize=(9.5, sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axis, (title, limit_text, rows) in zip(axes[:, 0], drawn, strict=True):
        rates = [row["gb_per_s"]["median"] if row["gb_per_s"] else 0 for row in rows]
        colours = [OURS if is_ours(row["key"]) else OTHERS for row in rows]
        axis.barh(range(len(rows)), rates, color=colours, height=0.72)
        for place, (row, rate) in enumerate(zip(rows, rates, strict=True)):
            range_, text = row["gb_per_s"] or {"min": 0, "max": 0}, "failed"
            if rate:
                axis.plot([range_["min"], range_["max"]], [place, place], color="#333333", linewidth=1)
                samples = row.get("samples_per_s")
                text = f"{samples['median']:,.0f} samples/s" if samples else f"{two_digits(rate)} GB/s"
            axis.annotate(
                text, (range_["max"], place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
            )  # fmt: skip
        largest = max(row["gb_per_s"]["max"] for row in rows if row["gb_per_s"])
        limit = rows[0]["limit"]["gb_per_s"]
        if limit:
            axis.axvline(limit, color=LIMIT, linestyle="--", linewidth=1.2, zorder=0)
            largest = max(largest, limit)
        axis.set_xlim(0, largest * 1.22)
        axis.set_yticks(range(len(rows)), [shown_name(row) for row in rows], fontsize=8)
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.tick_params(axis="x", labelsize=8)
        axis.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=8)
        axis.set_xlabel(f"GB/s of the files' bytes (1e9)      dashed: {limit_text}", fontsize=8, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def write(results, folder):
    """results.json, results.png, report.md and report.html in `folder`; the path of report.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    laid = layout(results["case"])
    draw = sweep.plot if sweep.is_one(results) else laid.plot
    draw(results, folder / "results.png")
    report = folder / "report.md"
    text = laid.page_text(results, folder) if hasattr(laid, "page_text") else markdown(results)
    report.write_text(text)
    (folder / "report.html").write_text(page.page(text, folder))
    return report.resolve()

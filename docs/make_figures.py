"""Draw docs/figures/*.svg from benchmarks/results, and write docs/figures.md around them.

python docs/make_figures.py [FOLDER]    # FOLDER: docs

Every number, machine, date and command comes from the result that the figure names.
"""

import json
import re
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import svg

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
HEAD = """# Figures

`make figures` draws this page from the [results of the benchmark](guide/bench.md) that stand in the
repository. Each figure has its machine, date and command beside it. All machines are virtual, and
share their hosts with others. So compare bars within a figure, not across figures. Bars are
medians; a thin line goes from the slowest to the fastest run if there were several. "Limit" is what
the machine does without any loader, measured in the same run.
"""


@dataclass
class Bar:
    """One row: the bar's length, and the slowest and the fastest run."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("gdsdata")


@dataclass
class Run:
    """Where figures come from."""

    file: str  # below benchmarks/results
    machine: str
    when: str
    command: str


@dataclass
class Figure:
    name: str
    title: str
    unit: str
    bars: list[Bar]
    run: Run
    says: str
    limit: tuple[str, float] | None = None
    groups: dict[int, str] = field(default_factory=dict)  # {the number of a bar: the heading above it}


# ----------------------------------------------------------------------------------------------------- reading


def of_json(file: str) -> tuple[dict, Run]:
    """Return a results.json, and where it comes from."""
    found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    device = found.get("device", {}).get("model")
    machine = f"{found['machine']['cpu']}, {found['machine']['cores']} cores" + (f", {device}" if device else "")
    return found, Run(file, machine, found["when"][:10], " ".join(given(found["command"])))


def given(command: list[str]) -> list[str]:
    """Return a command without settings that a later one replaces, and without its folder."""
    kept: dict[str, str] = {}
    for word in command:
        name = word.partition("=")[0] if "=" in word else word
        kept.pop(name, None)
        kept[name] = word
    return [quoted(word) for name, word in kept.items() if name != "hydra.run.dir"]


def quoted(word: str) -> str:
    return f"'{word}'" if "[" in word else word


def bars_of(rows: list[dict], names: dict[str, str], figure: str = "gb_per_s") -> list[Bar]:
    """Return the bars of rows by their keys, with the names that are shown."""
    by_key = {row["key"]: row for row in rows}
    found = [(name, by_key[key][figure]) for key, name in names.items()]
    return [Bar(name, value["median"], value["min"], value["max"]) for name, value in found]


def table(file: str, heading: str) -> list[dict[str, str]]:
    """Return the rows of the first table below a heading of a report, as plain text."""
    lines = iter((RESULTS / file).read_text(encoding="utf-8").splitlines())
    next(line for line in lines if line.startswith("#") and heading in line)
    rows: list[list[str]] = []
    for line in lines:
        if line.startswith("|"):
            rows.append([cell.strip(" *").replace("\\", "") for cell in line.strip("|").split("|")])
        elif rows:
            break
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def limit_of(file: str, heading: str) -> float:
    """Return the GB/s of the line "Limit: ..." below a heading of a report."""
    below = (RESULTS / file).read_text(encoding="utf-8").split(heading, 1)[1]
    return number(re.search(r"Limits?: .*?([\d.,]+) GB/s", below)[1])


# ----------------------------------------------------------------------------------------------------- the figures


def shuffled_records() -> Figure:
    file = "h200/records-fast.md"
    bars, groups = [], {}
    for files in ("1 file", "1,024 files"):
        rows = table(file, f"tokens in {files}, int64, shuffled, warm")
        for batch in ("2,048", "32"):
            groups[len(bars)] = f"{files}, batches of {batch}"
            for name, shown in (("gdsdata", "gdsdata"), ("torch.index_select", "index_select by hand")):
                row = next(row for row in rows if row[""] == name and row["batch"] == batch)
                bars.append(Bar(shown, number(row["GB/s"])))
    run = of_report(file, "Intel Xeon (virtual), 16 cores, NVIDIA H200")
    return Figure(
        "shuffled-records",
        "Shuffled 4 KiB records to a GPU, from the page cache",
        "GB/s, from construction to the last batch",
        bars,
        run,
        "Records of 2048 uint16, 4 GiB, as int64. The loop by hand takes rows of a memmap by "
        "`torch.index_select` into pinned memory and copies them.",
        ("pinned copy", limit_of(file, "tokens in 1 file, int64, shuffled, warm cache")),
        groups,
    )


def volumes_beside_loaders() -> Figure:
    file = "two-cores/loader-peers.md"
    heading = "npy, float32, batches of 16, shuffled, warm"
    head = (RESULTS / file).read_text(encoding="utf-8")
    names = {
        "gdsdata": "gdsdata",
        "read ring, 2 threads": "ring of two reading threads, by hand",
        "SPDL": "SPDL",
        "LitData, 0 workers": "LitData, no workers",
        "WebDataset, 0 workers": "WebDataset, no workers",
        "DataLoader, 0 workers": "DataLoader, no workers",
        "MosaicML Streaming, 0 workers": "MosaicML Streaming, no workers",
    }
    rows = {row[""]: row for row in table(file, heading)}
    bars = []
    for key, shown in names.items():
        value = number(rows[key]["GB/s"])
        low, high = (1 + int(part) / 100 for part in re.findall(r"([-+]?\d+)%", rows[key]["spread"]))
        bars.append(Bar(shown, value, value * low, value * high))
    command = re.search(r"^`(.*?)`", head, re.MULTILINE)[1]
    run = Run(file, "AMD EPYC (virtual), 2 cores, no GPU", re.search(r"\d{4}-\d\d-\d\d", head)[0], command)
    return Figure(
        "volumes-beside-loaders",
        "Shuffled 2 MiB volumes on two cores, from the page cache",
        "GB/s",
        bars,
        run,
        "Each other library is shown with the number of workers that was fastest for it: none, because "
        "the machine has two cores. A ring of threads by hand is as fast.",
        ("memory copy", limit_of(file, heading)),
    )


def volumes_cold() -> Figure:
    found, run = of_json("h200/loader-volumes-cold.json")
    names = {
        "gdsdata": "gdsdata",
        "read_ring_8": "ring of eight reading threads, by hand",
        "spdl": "SPDL",
        "dali_mmap": "DALI",
        "dataloader_16": "DataLoader, 16 workers",
        "webdataset_16": "WebDataset, 16 workers",
        "mosaic_16": "MosaicML Streaming, 16 workers",
        "litdata_16": "LitData, 16 workers",
    }
    bars = bars_of(found["rows"], names)
    for bar, cost in zip(bars, bars_of(found["rows"], names, "cpu_s_per_gb"), strict=True):
        bar.low = bar.high = None
        bar.note = f"{cost.value:.2g} CPU s/GB"
    limit = found["limits"]["npy"]["float32, cold"]["direct_sequential"]["gb_per_s"]
    return Figure(
        "volumes-cold",
        "Shuffled 2 MiB volumes to a GPU, from the disk",
        "GB/s, one run",
        bars,
        run,
        "The disk is the limit. The ring by hand is faster than gdsdata, and needs ten times its CPU. Its "
        "first batch comes 50 ms earlier, too.",
        ("O_DIRECT read", limit),
    )


def checkpoint_loads() -> Figure:
    found, run = of_json("h200/checkpoint-load-peers.json")
    rows = [row for row in found["rows"] if row["cache"] == "warm"]
    names = {
        "gdsdata_pt": "gdsdata, .pt",
        "gdsdata_safetensors": "gdsdata, .safetensors",
        "gdsdata_dcp": "gdsdata, DCP",
        "instanttensor_buffered": "InstantTensor, .safetensors",
        "safetensors": "safetensors",
    }
    limit = found["limits"]["load"]["bfloat16+float32, warm"]["pinned_copy"]["gb_per_s"]
    return Figure(
        "checkpoint-loads",
        "Load 8 GiB to a GPU, from the page cache",
        "GB/s",
        bars_of(rows, names),
        run,
        "300 tensors. The first load of a process is slower: 45 to 48 GB/s "
        "([report](../benchmarks/results/h200/README.md#first-loads-in-a-process-2026-11-26)).",
        ("pinned copy", limit),
    )


def checkpoint_saves() -> Figure:
    found, run = of_json("h200/checkpoint-save.json")
    names = {
        "gdsdata_pt": "gdsdata, .pt",
        "gdsdata_safetensors": "gdsdata, .safetensors",
        "gdsdata_dcp": "gdsdata, DCP",
    }
    limit = found["limits"]["save"]["bfloat16+float32, new"]["direct_write_1024_kib_32"]["gb_per_s"]
    return Figure(
        "checkpoint-saves",
        "Save 8 GiB from a GPU, durably",
        "GB/s, until the file is on storage",
        bars_of(found["rows"], names),
        run,
        "Other libraries were not measured in this run. The limit was measured in turns with the rows, "
        "and the disk's rate moves, so a bar can pass it.",
        ("O_DIRECT write, synced", limit),
    )


def of_report(file: str, machine: str) -> Run:
    """Return where a report of the bench comes from."""
    head = (RESULTS / file).read_text(encoding="utf-8")
    when, command = re.search(r"^(\d{4}-\d\d-\d\d)T.*?`(.*?)`", head, re.MULTILINE).groups()
    return Run(file, machine, when, " ".join(given(command.split())))


def two_gpus(cache: str) -> Figure:
    file = f"h100/replicas-{cache}.md"
    heading = f"safetensors, 8,192 MiB of bf16 in 128 tensors, to 2 ranks on cuda, {cache} cache"
    names = {
        "gdsdata": "gdsdata, together",
        "gdsdata, by itself": "gdsdata, each by itself",
        "By hand: a part each, all_gather": "a part each and all_gather, by hand",
        "InstantTensor, buffered, distributed": "InstantTensor, distributed",
    }
    rows = {row[""]: row for row in table(file, heading)}
    bars = [Bar(shown, number(rows[name]["GB/s"])) for name, shown in names.items() if name in rows]
    says = {
        "cold": "Together, the ranks read each byte once from storage. Each by itself, they read it twice.",
        "warm": "NVLink joins the GPUs. The loop by hand uses `gdsdata.Engine`. On a second machine with slower "
        "memory all rows were slower, and the loop by hand and gdsdata were even "
        "([report](../benchmarks/results/h100/README.md#two-gpus-read-once-2026-11-26)).",
    }
    run = of_report(file, "Intel Xeon (virtual), 32 cores, 2 NVIDIA H100")
    limit = {"cold": "O_DIRECT read", "warm": "pinned copies to both"}[cache], limit_of(file, heading)
    where = {"cold": "from the disk", "warm": "from the page cache"}[cache]
    return Figure(
        f"two-gpus-{cache}", f"Two GPUs load the same 8 GiB, {where}", "GB/s a rank", bars, run, says[cache], limit
    )


def four_gpus() -> Figure:
    file = "h200/once-four-64.json"
    whole = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    found = whole["load, 64 GiB, warm"]
    names = {
        "gdsdata": "gdsdata, together",
        "gdsdata_alone": "gdsdata, each by itself",
        "all_gather": "a part each and all_gather, by hand",
    }
    limit = found["limits"]["safetensors"]["bf16, warm"]["pinned_copies"]["gb_per_s"] / 4
    words = ["python", "benchmarks/once.py", *(word for word in whole["command"] if not word.endswith("json"))]
    machine = f"{found['machine']['cpu']}, {found['machine']['cores']} cores, 4 {whole['device']}"
    return Figure(
        "four-gpus",
        "Four GPUs load the same 64 GiB, from the page cache",
        "GB/s a rank",
        [*bars_of(found["rows"], names), Bar("limit of a link: pinned copies to all four at once", limit)],
        Run(file, machine, found["when"][:10], " ".join(words)),
        "NVLink joins the GPUs. Together, the ranks copy each byte once from the host to a GPU, and from there to the "
        "others. So a rank gets more than its own link carries. The loop by hand uses `gdsdata.Engine`.",
    )


def short_reads() -> Figure:
    file = "h200/short-reads.md"
    bars, groups = [], {}
    rows = table(file, "read, file in the page cache, to cuda")
    for size in ("4 KiB", "64 KiB", "1 MiB"):
        groups[len(bars)] = size
        names = {"Python": "plain Python", "gdsdata, Engine": "gdsdata.Engine", "gdsdata": "gdsdata.read_tensor"}
        for name, shown in names.items():
            row = next(row for row in rows if row[""] == name and row["size"] == size)
            bars.append(Bar(shown, number(row["p50"])))
    return Figure(
        "short-reads",
        "Where it loses: one short read to a GPU",
        "µs from call to tensor, shorter is better; medians of 1500 calls",
        bars,
        of_report(file, "Intel Xeon (virtual), 16 cores, NVIDIA H200"),
        "A file in the page cache. One call costs more than a read and a copy of torch.",
        None,
        groups,
    )


# ------------------------------------------------------------------------------------------------------- the page

ROW, GROUP, BAR, END = 36, 24, 13, 50


def drawn(figure: Figure) -> str:
    """Return a figure as SVG: a label, a bar and its value for each row."""
    values = [max(bar.value, bar.high or 0) for bar in figure.bars]
    scale = (svg.WIDTH - END) / max([*values, figure.limit[1] if figure.limit else 0])
    parts = [svg.text(0, 15, figure.unit, "muted", 13)]
    top = y = 26 if not figure.limit else 46
    for i, bar in enumerate(figure.bars):
        if i in figure.groups:
            y += GROUP
            parts.append(svg.text(0, y - 6, figure.groups[i], "muted", 13, bold=True))
        parts.append(svg.text(0, y + 12, bar.name, bold=bar.is_ours))
        length = bar.value * scale
        parts.append(svg.box(0, y + 18, length, BAR, "accent" if bar.is_ours else "other"))
        end = length
        if bar.low is not None and bar.high is not None:
            end = max(length, bar.high * scale)
            middle = y + 18 + BAR / 2
            parts.append(svg.line(bar.low * scale, middle, end, middle, "ink", 1.2))
        parts.append(svg.text(end + 6, y + 29, f"{bar.value:.3g}", size=13, bold=bar.is_ours))
        if bar.note:
            parts.append(svg.text(svg.WIDTH, y + 12, bar.note, "muted", 12.5, "end"))
        y += ROW
    if figure.limit:
        name, value = figure.limit
        x = value * scale
        anchor = "end" if x > svg.WIDTH / 2 else "start"
        parts.insert(2, svg.line(x, top - 6, x, y, "muted", 1.2, "4 3"))
        parts.append(svg.text(x, top - 11, f"limit: {name}, {value:.3g}", "muted", 12.5, anchor))
    return svg.picture(y + 4, parts, described(figure))


def described(figure: Figure) -> str:
    """Return what a figure says in words, for those who do not see it."""
    rows = "; ".join(
        (f"{figure.groups[i]}: " if i in figure.groups else "") + f"{bar.name} {bar.value:.3g}"
        for i, bar in enumerate(figure.bars)
    )
    limit = f"; limit ({figure.limit[0]}) {figure.limit[1]:.3g}" if figure.limit else ""
    return f"{figure.title}, {figure.unit}: {rows}{limit}"


def section(figure: Figure) -> str:
    run = figure.run
    return (
        f"## {figure.title}\n\n![Bars: {figure.unit}](figures/{figure.name}.svg)\n\n{wrapped(figure.says)}\n\n"
        f"- Machine: {run.machine}\n- Date: {run.when}\n"
        f"- Result: [{run.file}](../benchmarks/results/{run.file})\n\n```text\n{of_lines(run.command)}\n```\n"
    )


def wrapped(words: str, width: int = 100) -> str:
    return "\n".join(textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False))


def of_lines(command: str) -> str:
    """Return a command in lines that a shell joins."""
    return wrapped(command, 84).replace("\n", " \\\n    ")


def main(folder: Path) -> None:
    figures = [
        shuffled_records(),
        volumes_beside_loaders(),
        volumes_cold(),
        checkpoint_loads(),
        checkpoint_saves(),
        two_gpus("cold"),
        two_gpus("warm"),
        four_gpus(),
        short_reads(),
    ]
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for figure in figures:
        (folder / "figures" / f"{figure.name}.svg").write_text(drawn(figure), encoding="utf-8")
    (folder / "figures.md").write_text("\n".join([HEAD, *map(section, figures)]), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)

"""Draw the two diagrams of docs/how-it-works.md: a batch's way and a checkpoint's way.

python docs/make_diagrams.py [FOLDER]    # FOLDER: docs/figures

A diagram is a column of steps. Each is a group of the class `step`, so the site can show one step
at a time (docs/site/static/site.js). Anywhere else all steps are shown.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import svg
from svg import box, line, text

DOCS = Path(__file__).resolve().parent
LEFT = 42
MONO = "ui-monospace, 'DejaVu Sans Mono', monospace"
STYLE = f".drawn .mono{{font-family:{MONO}}}"
# A step's title, what is below it, the height of that, and what draws it below a given height.
Step = tuple[str, str, float, Callable[[float], list[str]]]


def mono(x: float, y: float, words: str, color: str = "ink", size: float = 12, anchor: str = "start") -> str:
    return text(x, y, words, f"{color} mono", size, anchor)


def labelled(x: float, y: float, width: float, height: float, words: str, color: str = "soft") -> list[str]:
    """Return a box with a word in its middle."""
    return [
        box(x, y, width, height, color),
        text(x + width / 2, y + height / 2 + 4, words, "paper" if color == "accent" else "ink", 12, "middle"),
    ]


def arrow(x1: float, y1: float, x2: float, y2: float, color: str = "muted") -> str:
    """Return an arrow that goes down or to the right."""
    tip = "l-4 -6h8z" if x1 == x2 else "l-6 -4v8z"
    return line(x1, y1, x2, y2, color) + f'<path d="M{x2:g} {y2:g}{tip}" class="{color}"/>'


def diagram(steps: list[Step]) -> str:
    """Return steps below one another, numbered, with arrows between them."""
    parts, y = [], 4.0
    for number, (title, below, height, draw) in enumerate(steps, 1):
        end = y + 44 + height
        parts.append(f'<g class="step" data-step="{number}">')
        parts.append(f'<circle cx="15" cy="{y + 14:g}" r="13" class="accent"/>')
        parts.append(text(15, y + 18.5, str(number), "paper", 13, "middle", bold=True))
        parts.append(text(LEFT, y + 13, title, size=15, bold=True))
        parts.append(text(LEFT, y + 31, below, "muted", 13))
        parts += draw(y + 42)
        parts.append("</g>")
        if number < len(steps):
            parts.append(arrow(15, y + 31, 15, end + 8))
        y = end + 14
    says = "; ".join(f"{number}. {step[0]}: {step[1]}" for number, step in enumerate(steps, 1))
    return svg.picture(y - 6, parts, says, STYLE)


# ----------------------------------------------------------------------------------------------------- a batch's way


def ids(y: float) -> list[str]:
    parts = []
    for i, sample in enumerate((7, 2, 9, 0, 4, 11, 1, 6, 10, 3, 8, 5)):
        parts += labelled(LEFT + i * 32, y, 28, 24, str(sample), "accent" if i < 4 else "soft")
    for i in range(3):
        parts.append(text(LEFT + 62 + i * 128, y + 41, f"batch {i}", "muted", 12, "middle"))
    return parts


def plan(y: float) -> list[str]:
    rows = [("7", "b.bin", "offset 2048"), ("2", "a.bin", "offset 4096"), ("9", "b.bin", "offset 6144")]
    rows.append(("0", "a.bin", "offset 0"))
    parts = []
    for i, (sample, file, offset) in enumerate(rows):
        x, top = LEFT + (i % 2) * 193, y + (i // 2) * 28
        parts += [box(x, top, 187, 23, "soft"), mono(x + 9, top + 16, sample, "accent")]
        parts += [mono(x + 32, top + 16, file), mono(x + 84, top + 16, offset, "muted")]
    return parts


def extents(y: float) -> list[str]:
    parts = []
    for row, (name, taken) in enumerate((("a.bin", {0, 2}), ("b.bin", {1, 3}))):
        top = y + row * 34
        parts.append(mono(LEFT, top + 16, name))
        for i in range(6):
            parts += labelled(LEFT + 50 + i * 56, top, 50, 23, str(row * 6 + i), "accent" if i in taken else "soft")
    return parts


def routes(y: float) -> list[str]:
    parts = []
    rows = [("page cache", "copied"), ("disk", "O_DIRECT, io_uring"), ("object store", "ranges by HTTP")]
    for i, (where, how) in enumerate(rows):
        top = y + i * 34
        parts += labelled(LEFT, top, 88, 26, where)
        parts.append(text(LEFT + 97, top + 17, how, "muted", 12.5))
        parts.append(line(LEFT + 222, top + 13, LEFT + 250, y + 47, "accent"))
    parts += labelled(LEFT + 252, y + 30, 130, 34, "memory of a batch", "accent")
    return parts


def ring(y: float) -> list[str]:
    parts = []
    for i, state in enumerate(("leased", "ready", "filling", "free")):
        x = LEFT + i * 98
        parts += labelled(x, y, 84, 30, state, "accent" if state == "ready" else "soft")
        if i < 3:
            parts.append(f'<path d="M{x + 87} {y + 15}l6 -4v8z" class="muted"/>')
    parts.append(f'<path d="M{LEFT + 42} {y + 32}v14h294v-10" class="muted-line" stroke-width="1.5"/>')
    parts.append(f'<path d="M{LEFT + 336} {y + 32}l-4 7h8z" class="muted"/>')
    parts.append(text(LEFT + 189, y + 62, "a dropped buffer is used again", "muted", 12.5, "middle"))
    return parts


def consumer(y: float) -> list[str]:
    return [
        box(LEFT, y, 212, 48, "soft"),
        mono(LEFT + 10, y + 20, "for batch in dataset:"),
        mono(LEFT + 39, y + 38, "loss = model(batch)"),
        text(LEFT + 224, y + 20, "a tensor (B, ...),", "muted", 12.5),
        text(LEFT + 224, y + 38, "on the CPU or the GPU", "muted", 12.5),
    ]


BATCH: list[Step] = [
    ("Order", "seed, epoch and rank give the samples of each batch", 50, ids),
    ("Plan", "the index turns sample ids into places in files", 56, plan),
    ("Extents", "neighbors in a file become one request", 62, extents),
    ("Engine", "threads of C++ move the bytes, each by its route", 98, routes),
    ("Ring", "batches are read ahead, and leave in order", 68, ring),
    ("Consumer", "torch gets the memory by DLPack, without a copy", 54, consumer),
]


# ------------------------------------------------------------------------------------------------ a checkpoint's way


def stage(y: float) -> list[str]:
    parts = [*labelled(LEFT, y, 92, 44, "state"), arrow(LEFT + 96, y + 22, LEFT + 122, y + 22)]
    parts += [box(LEFT + 128 + i * 36, y, 31, 44, "accent") for i in range(4)]
    parts.append(text(LEFT + 280, y + 19, "staging memory,", "muted", 12.5))
    parts.append(text(LEFT + 280, y + 36, "32 MiB a buffer", "muted", 12.5))
    return parts


def file_parts(y: float, filled: int, note: str) -> list[str]:
    """Return a file whose first parts are written."""
    parts = [text(LEFT, y + 13, "a temporary file", "ink", 12.5)]
    parts += [box(LEFT + i * 30, y + 21, 27, 22, "accent" if i < filled else "soft") for i in range(8)]
    parts.append(text(LEFT + 250, y + 37, note, "muted", 12.5))
    return parts


def write(y: float) -> list[str]:
    return file_parts(y, 5, "by whole pages")


def sync(y: float) -> list[str]:
    return file_parts(y, 8, "fsync")


def rename(y: float) -> list[str]:
    return [
        *labelled(LEFT, y, 118, 28, "a temporary file"),
        arrow(LEFT + 122, y + 14, LEFT + 150, y + 14),
        box(LEFT + 154, y, 152, 28, "accent"),
        mono(LEFT + 230, y + 18, "rank-0-5f2c91d0.pt", "paper", 12, "middle"),
    ]


def agree(y: float) -> list[str]:
    parts = []
    for i in range(4):
        parts += labelled(LEFT + i * 66, y, 60, 28, f"rank {i}", "accent" if i == 0 else "soft")
    parts.append(text(LEFT + 272, y + 18, "all files are there", "muted", 12.5))
    return parts


def manifest(y: float) -> list[str]:
    return [
        mono(LEFT, y + 13, "step-100/"),
        box(LEFT, y + 21, 150, 28, "soft"),
        mono(LEFT + 75, y + 39, "rank-0-5f2c91d0.pt", "ink", 12, "middle"),
        box(LEFT + 156, y + 21, 116, 28, "accent"),
        mono(LEFT + 214, y + 39, "manifest.json", "paper", 12, "middle"),
        text(LEFT + 282, y + 39, "now it exists", "muted", 12.5),
    ]


def remove(y: float) -> list[str]:
    parts = []
    for i, step in enumerate((70, 80, 90, 100)):
        x = LEFT + i * 74
        parts += labelled(x, y, 68, 28, f"step-{step}", "accent" if step == 100 else "soft")
        if step == 70:
            parts.append(line(x - 2, y + 30, x + 70, y - 2, "ink", 2))
    parts.append(mono(LEFT + 302, y + 18, "keep_last=3", "muted", 12))
    return parts


CHECKPOINT: list[Step] = [
    ("Stage", "the state is copied; then training goes on", 50, stage),
    ("Write", "a thread writes pieces, past the page cache", 50, write),
    ("Sync", "the bytes are on storage, not in a cache", 50, sync),
    ("Rename", "the rank's file gets its name", 34, rename),
    ("Agree", "an error on one rank is an error on all", 34, agree),
    ("Manifest", "written, synced and renamed likewise: the commit", 56, manifest),
    ("Remove", "older ones go: first the manifest, then the files", 34, remove),
]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, steps in (("batch", BATCH), ("checkpoint", CHECKPOINT)):
        (folder / f"{name}.svg").write_text(diagram(steps), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "figures")

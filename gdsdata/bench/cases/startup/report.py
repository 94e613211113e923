"""Tables of case=startup, and its picture: the parts of a start, one behind the other."""

from typing import NamedTuple

from gdsdata.bench.cases.startup.script import OWN_PARTS
from gdsdata.bench.report import picture
from gdsdata.bench.report.columns import PATH, PEAK, Column, figure
from gdsdata.bench.report.layout import Layout


class Part(NamedTuple):
    """A part of a start: its name in tables and in the picture, its color, and what it is."""

    title: str
    color: str
    text: str
    on_terminal: bool = True


PARTS = {
    "interpreter": Part("Python", "#8c8c8c", "the process and Python, until the script's first line", False),
    "torch": Part("torch", "#b9c4c9", "import torch"),
    "context": Part("CUDA", "#d9dfe2", "CUDA's context", False),
    "library": Part("library", "#d08c3f", "import of what reads: gdsdata, torch.utils.data, safetensors"),
    "model": Part("model", "#e6e9d8", "the model's and the optimizer's tensors, as zeros", False),
    "data": Part("data set", "#7d6b91", "the data set opened, its worker processes started"),
    "restore": Part("restore", "#1f6f8b", "the checkpoint, into the model's and the optimizer's tensors"),
    "first_batch": Part("1st batch", "#5aa9c4", "the first batch on the device"),
    "first_step": Part("1st step", "#c9d8b6", "forward, backward and the optimizer's step, done"),
}


milliseconds = "{:.3f}".format  # because starts differ by so much


def scatter(row):
    found = row["seconds"]
    return f"{found['min'] - found['median']:+.3f} {found['max'] - found['median']:+.3f}"


class StartupLayout(Layout):
    columns = (
        *(
            figure(part.title, f"parts_s.{name}", milliseconds, on_terminal=part.on_terminal)
            for name, part in PARTS.items()
        ),
        figure("total s", "seconds", milliseconds),
        Column("spread s", scatter, on_terminal=False),
        figure("to batch s", "to_first_batch_s", milliseconds),
        figure("own s", "own_s", milliseconds),
        figure("batch above floor", "batch_above_floor_s", milliseconds),
        figure("above floor", "above_floor_s", milliseconds),
        figure("CPU s", "cpu_seconds", on_terminal=False),
        PEAK._replace(on_terminal=False),
        PATH,
    )
    picture_title = "Seconds from a script's start to its first step, by part"
    bar_sizes = {"inches": 0.34, "frame": 1.2, "below": 0.9}
    grouped_by = ("data", "cache")
    parts, own_parts = PARTS, OWN_PARTS  # for notes.md

    def title(self, rows):
        return f"start to first step, {rows[0]['data']}, {rows[0]['cache']} cache, on {self.device}"

    def caption(self, rows):
        floor = next((row for row in rows if row["key"] == "floor" and row["seconds"]), None)
        if floor is None:
            return "floor: not measured"
        batch, step = (milliseconds(floor[name]["median"]) for name in ("to_first_batch_s", "seconds"))
        return f"floor: {batch} s until a batch could come, {step} s to the first step"

    def best_loaders(self):
        """[(title, name, seconds)] of each table's DataLoader that was first at its first step."""
        found = []
        for title, _, rows in self.tables():
            loaders = [row for row in rows if row["key"].startswith("dataloader") and row["seconds"]]
            if loaders:
                best = min(loaders, key=lambda row: row["seconds"]["median"])
                found.append((title, best["name"], milliseconds(best["seconds"]["median"])))
        return found

    def drawn(self):
        return picture.tables_with(self, "seconds")

    def bars(self, axis, title, rows):
        """Draw each row's parts, medians, one behind the other."""
        ends = [0.0] * len(rows)
        for name, part in PARTS.items():
            widths = [row["parts_s"][name]["median"] if name in row["parts_s"] else 0.0 for row in rows]
            if any(widths):
                axis.barh(range(len(rows)), widths, left=ends, color=part.color, height=0.72, label=part.title)
                ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for place, (row, end) in enumerate(zip(rows, ends, strict=True)):
            own = "" if row["key"] == "floor" else f", {milliseconds(row['own_s']['median'])} of its own"
            picture.beside(axis, f"{end:.2f} s{own}", end, place)
        axis.set_xlim(0, max(ends) * 1.3)
        label = "seconds since the process was started (medians of parts)"
        picture.finish_bars(axis, title, [row["name"] for row in rows], label)

"""Tables, answer and picture of case=tune."""

import statistics
import textwrap

from gdsdata.bench.cases.tune.search import said
from gdsdata.bench.measure.system import size_text
from gdsdata.bench.report import picture
from gdsdata.bench.report.columns import CPU, GB_PER_S, PATH, PEAK, SPREAD, X_LIMIT
from gdsdata.bench.report.layout import Layout, capital
from gdsdata.io.options import EngineOptions

STATES = {"warm": "files in the page cache", "cold": "files not in the page cache", "replaced": "a new file, synced"}
FIRST, LATER, MOST_PANELS = "#1f6f8b", "#d08c3f", 3
TITLE_LETTERS = 110  # of a line across the picture


class TuneLayout(Layout):
    columns = (GB_PER_S, SPREAD, CPU, PEAK, PATH, X_LIMIT)
    picture_title = "GB per second by each parameter's value, and of the default beside the best"

    def title(self, rows):
        return self.title_of(rows[0]["data"], rows[0]["cache"])

    def title_of(self, data, cache):
        return f"{data}, {STATES[cache]}, {'from' if data == 'write' else 'to'} {self.device}"

    def answers(self):
        found = []
        for answer in self.results["tune"]:
            use = f"engine/{answer['group']}.yaml in this run's folder: --config-dir FOLDER engine={answer['group']}"
            copies = [
                (use, "yaml", answer["yaml"].rstrip()),
                ("In a program", "python", f"gdsdata.{EngineOptions(**answer['best'])}"),
                ("On a command line", "sh", answer["command"]),
            ]
            heading = f"Best for {self.title_of(answer['data'], answer['cache'])}"
            found.append((heading, f"{capital(said(answer['gain']))}.", copies))
        return found

    def plot(self, path):
        """Draws a search: rates by each parameter's values, and the last pairs."""
        searches = zip(self.results["tune"], self.groups(), strict=True)
        shown = [(answer, rows) for answer, rows in searches if any(row["runs"] for row in rows)]
        if not shown:
            return
        downs = [-(-(len(tried_of(answer)) + 1) // MOST_PANELS) for answer, _ in shown]
        with picture.panels(path, sum(downs), MOST_PANELS, 120, figsize=(11.5, 3.5 * sum(downs))) as (_, axes):
            for (answer, rows), down in zip(shown, downs, strict=True):
                self.draw(axes[:down].ravel(), answer, rows)
                axes = axes[down:]

    def draw(self, axes, answer, rows):
        tried = tried_of(answer)
        for axis, (parameter, ones) in zip(axes, tried.items(), strict=False):
            draw_parameter(axis, parameter, ones)
        draw_pairs(axes[len(tried)], rows)
        for axis in axes[len(tried) + 1 :]:
            axis.set_axis_off()
        for axis in axes[: len(tried) + 1]:
            axis.set_ylim(bottom=0)
            axis.margins(x=0.12)
            axis.tick_params(labelsize=8)
            picture.grid(axis, "y")
            axis.set_ylabel("GB/s (1e9 bytes)", fontsize=8)
        verdict = textwrap.fill(said(answer["gain"]), TITLE_LETTERS)
        title = f"{self.title_of(answer['data'], answer['cache'])}\n{verdict}"
        axes[0].set_title(title, loc="left", fontsize=10, fontweight="bold")


def value_text(parameter, value):
    if value is None:
        return "default"
    return size_text(value).replace(" ", "\n") if parameter.endswith("_bytes") else str(value)


def tried_of(answer):
    """{parameter: what was tried of it}"""
    found: dict[str, list] = {}
    for one in answer["tried"]:
        if one["gb_per_s"]:
            found.setdefault(one["parameter"], []).append(one)
    return found


def draw_parameter(axis, parameter, ones):
    """Every turn as a point; medians joined, a line for each comparison."""
    numbers = sorted({one["comparison"] for one in ones})
    values = sorted({one["options"].get(parameter) for one in ones}, key=lambda value: (value is not None, value))
    for number in numbers:
        color, label = (FIRST, "first pass") if number == numbers[0] else (LATER, "second pass")
        place = {one["options"].get(parameter): sorted(one["gb_per_s"]) for one in ones if one["comparison"] == number}
        at = [values.index(value) for value in values if value in place]
        medians = [statistics.median(place[values[where]]) for where in at]
        axis.plot(at, medians, color=color, linewidth=1.3, marker="_", markersize=12, label=label)
        for where in at:
            axis.plot([where] * len(place[values[where]]), place[values[where]], ".", color=color, markersize=5)
    axis.set_xticks(range(len(values)), [value_text(parameter, value) for value in values])
    axis.set_xlabel(f"engine.{parameter}", fontsize=9)
    if len(numbers) > 1:
        axis.legend(fontsize=7, frameon=False, loc="lower right")


def draw_pairs(axis, rows):
    rates = [[run["bytes"] / run["seconds"] / 1e9 for run in row["runs"]] for row in rows]
    if len(rates) == 2:
        for pair in zip(*rates, strict=False):
            axis.plot([0, 1], pair, color=picture.OTHERS, linewidth=0.8, marker=".", markersize=5)
    for place, ones in enumerate(rates):
        if ones:
            axis.plot([place], [statistics.median(ones)], marker="_", markersize=28, color=picture.OURS, linewidth=0)
            axis.plot([place] * len(ones), ones, ".", color=picture.OURS, markersize=4)
    axis.set_xticks(range(len(rows)), [row["name"] for row in rows])
    axis.set_xlabel("at the end, turn by turn", fontsize=9)
    limit = rows[0]["limit"]["gb_per_s"]
    if limit:
        axis.axhline(limit, color=picture.LIMIT, linestyle="--", linewidth=1.2)
        axis.annotate("limit", (0.02, limit), xycoords=("axes fraction", "data"), xytext=(0, 3),
                      textcoords="offset points", fontsize=7, color=picture.LIMIT)  # fmt: skip

"""Tables, answer, notes and picture of case=tune."""

import json
import statistics
import textwrap

from gdsdata.bench import report
from gdsdata.bench.measure import size_text

STATES = {"warm": "files in the page cache", "cold": "files not in the page cache", "replaced": "a new file, synced"}
COLUMNS = [*report.RATE[:2], *report.COST, report.RATIOS[1]]
PICTURE = "GB per second by each parameter's value, and of the default beside the best"
IN_BYTES = "_bytes"
TITLE_LETTERS = 110  # of a line across the picture


def columns_of(case, kind):
    return COLUMNS


def tables(results):
    found = []
    for answer in results["tune"]:
        rows = [row for row in results["rows"] if (row["data"], row["cache"]) == (answer["data"], answer["cache"])]
        found.append((title_of(answer, results["device"]["name"]), limit_text(rows[0]["limit"]), rows))
    return found


def title_of(answer, device):
    return f"{answer['data']}, {STATES[answer['cache']]}, {'from' if answer['data'] == 'write' else 'to'} {device}"


def limit_text(limit):
    if limit["gb_per_s"] is None:
        return f"limit not known: {limit['name']}"
    return f"limit: {limit['name']}, {limit['gb_per_s']:.2f} GB/s"


def said(gain):
    """One clause: what was found."""
    if gain["ratio"] is None:
        return "no setting was better: the default is as good"
    times = f"{gain['ratio']:.2f} times the default's rate"
    if gain["low"] is not None:
        times += f" ({gain['low']:.2f} to {gain['high']:.2f}, 99 % interval of {gain['pairs']} pairs)"
    if gain["confirmed"]:
        return times
    return f"the default is as good, as far as can be told: what the search had found came to {times}"


def yaml_text(options, comment):
    """A file of Hydra's group `engine`."""
    lines = [f"# {comment}", "defaults:", "  - engine_options", "  - _self_", ""]
    return "\n".join([*lines, *(f"{name}: {json.dumps(value)}" for name, value in options.items())]).rstrip() + "\n"


def python_text(options):
    return f"gdsdata.EngineOptions({', '.join(f'{name}={value!r}' for name, value in options.items())})"


def answers(results):
    """[(heading, what was found, [(caption, kind, text to copy)])], one for each search."""
    found = []
    for answer in results["tune"]:
        text = said(answer["gain"])
        use = f"engine/{answer['group']}.yaml in this run's folder: --config-dir FOLDER engine={answer['group']}"
        copies = [
            (use, "yaml", answer["yaml"].rstrip()),
            ("In a program", "python", python_text(answer["best"])),
            ("On a command line", "sh", answer["command"]),
        ]
        heading = f"Best for {title_of(answer, results['device']['name'])}"
        found.append((heading, f"{text[0].upper()}{text[1:]}.", copies))
    return found


def notes(results):
    config = results["config"]["case"]
    yield (
        "Searched from the default on, one parameter after the other: all its values take turns in random order with "
        "what was best so far, in three rounds, after each of which the slower half leaves; then all once more, if "
        "anything moved."
    )
    yield (
        f"The gain is measured anew: pairs of the default and of what was found, in random order, up to "
        f"{config['repeats']} within the budget. It is the geometric mean of the pairs' ratios with Student's "
        "interval, and counts only where all of the interval is above 1 and the gain is 2 % or more."
    )
    yield (
        f"A run lasts {config['run_seconds']:g} s, and cold no longer than the files; making the engine comes before. "
        "All settings were measured in one process, and each one's bytes compared with plain reading before."
    )
    yield "The default's workers, depth and segment size depend on machine, device and work: see engine.* in --help."
    yield from (report.CPU_NOTE, report.COLD_NOTE)
    if results["device"]["name"] != "cpu":
        yield "On a GPU each read ends with a synchronize. What calibration has kept for it, the default uses too."


# ------------------------------------------------------------------------------------------------ the picture

FIRST, LATER, MOST_PANELS = "#1f6f8b", "#d08c3f", 3


def value_text(parameter, value):
    if value is None:
        return "default"
    return size_text(value).replace(" ", "\n") if parameter.endswith(IN_BYTES) else str(value)


def plot(results, path):
    """A figure of panels for each search: the rate over each parameter's values, and the pairs at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [
        (answer, rows) for answer, (_, _, rows) in zip(results["tune"], tables(results), strict=True)
        if any(row["runs"] for row in rows)
    ]  # fmt: skip
    if not shown:
        return
    panels = {answer["group"]: panels_of(answer) for answer, _ in shown}
    downs = [-(-(len(panels[answer["group"]]) + 1) // MOST_PANELS) for answer, _ in shown]
    figure = pyplot.figure(figsize=(11.5, 3.3 * sum(downs)), layout="constrained")
    parts = figure.subfigures(len(shown), 1, squeeze=False, height_ratios=downs)[:, 0]
    for part, down, (answer, rows) in zip(parts, downs, shown, strict=True):
        verdict = textwrap.fill(said(answer["gain"]), TITLE_LETTERS)
        part.suptitle(f"{title_of(answer, results['device']['name'])}\n{verdict}", fontsize=10, fontweight="bold")
        axes = part.subplots(down, MOST_PANELS, squeeze=False).ravel()
        for axis, (parameter, ones) in zip(axes, panels[answer["group"]].items(), strict=False):
            draw_parameter(axis, parameter, ones)
        used = len(panels[answer["group"]])
        draw_pairs(axes[used], rows)
        for axis in axes[used + 1 :]:
            axis.set_axis_off()
        for axis in axes[: used + 1]:
            axis.set_ylim(bottom=0)
            axis.margins(x=0.12)
            axis.tick_params(labelsize=8)
            axis.grid(axis="y", color="#e5e5e5", linewidth=0.7)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_ylabel("GB/s (1e9 bytes)", fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def panels_of(answer):
    found = {}
    for one in answer["tried"]:
        if one["gb_per_s"]:
            found.setdefault(one["parameter"], []).append(one)
    return found


def draw_parameter(axis, parameter, ones):
    """Every turn as a point; medians joined, a line for each comparison (the later one with what was best by then)."""
    numbers = sorted({one["comparison"] for one in ones})
    values = sorted({one["options"].get(parameter) for one in ones}, key=lambda value: (value is not None, value))
    for number in numbers:
        colour = FIRST if number == numbers[0] else LATER
        place = {one["options"].get(parameter): sorted(one["gb_per_s"]) for one in ones if one["comparison"] == number}
        at = [values.index(value) for value in values if value in place]
        medians = [statistics.median(place[values[where]]) for where in at]
        label = "first pass" if number == numbers[0] else "second pass"
        axis.plot(at, medians, color=colour, linewidth=1.3, marker="_", markersize=12, label=label)
        for where in at:
            axis.plot([where] * len(place[values[where]]), place[values[where]], ".", color=colour, markersize=5)
    axis.set_xticks(range(len(values)), [value_text(parameter, value) for value in values])
    axis.set_xlabel(f"engine.{parameter}", fontsize=9)
    if len(numbers) > 1:
        axis.legend(fontsize=7, frameon=False, loc="lower right")


def draw_pairs(axis, rows):
    rates = [[run["bytes"] / run["seconds"] / 1e9 for run in row["runs"]] for row in rows]
    if len(rates) == 2:
        for pair in zip(*rates, strict=False):
            axis.plot([0, 1], pair, color=report.OTHERS, linewidth=0.8, marker=".", markersize=5)
    for place, ones in enumerate(rates):
        if ones:
            axis.plot([place], [statistics.median(ones)], marker="_", markersize=28, color=report.OURS, linewidth=0)
            axis.plot([place] * len(ones), ones, ".", color=report.OURS, markersize=4)
    axis.set_xticks(range(len(rows)), [row["name"] for row in rows])
    axis.set_xlabel("at the end, turn by turn", fontsize=9)
    limit = rows[0]["limit"]["gb_per_s"]
    if limit:
        axis.axhline(limit, color=report.LIMIT, linestyle="--", linewidth=1.2)
        axis.annotate("limit", (0.02, limit), xycoords=("axes fraction", "data"), xytext=(0, 3),
                      textcoords="offset points", fontsize=7, color=report.LIMIT)  # fmt: skip

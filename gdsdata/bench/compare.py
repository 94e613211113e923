"""`python -m gdsdata.bench.compare A B`: changes between two runs beyond chance.

A and B are results.json files, or the folders they are in. Rows are matched by data, dtype, cache
and key, and compared by time: of the same bytes, and in case=latency the median of one call. Each
repeat is one value, however many iterations it has, and a run's is their geometric mean. Two runs
of case=all are compared case by case. A row is called slower or faster when all of this holds:

- there are 3 repeats or more on either side;
- Welch's interval of the ratio of times (of their logarithms, at 99 %) does not contain 1;
- each run's median lies outside the other's range;
- the time has changed by 2 % or more.

If nothing changed, about one row in a hundred is so called, or fewer. Three repeats that scatter
by 3 % show a slowdown of 20 % four times in five, and five always: more repeats (case.repeats=)
show smaller changes.

Repeats of one run cannot show that the machine was another one during the other run. Measurements
between them can: the machine's own limit, and the median of the table's rows that are not
gdsdata's. If one of these changed at least half as much as a row, the row is called slower (faster)
with the machine. That is no failure for --fail-if-slower.
"""

import argparse
import collections
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from gdsdata import command_output
from gdsdata.bench import extra
from gdsdata.bench.harness.case import SCHEMA
from gdsdata.bench.harness.tables import is_ours
from gdsdata.bench.measure import intervals
from gdsdata.bench.report.columns import three_digits

CONFIDENCE = 0.99
LEAST_REPEATS = 3
LEAST_CHANGE = 0.02
RULE = {"confidence": CONFIDENCE, "least_repeats": LEAST_REPEATS, "least_change_percent": LEAST_CHANGE * 100}
TOO_FEW = "too few repeats to tell"
PARTS = {  # of results.json, that are compared first: {part: (what to say, names that may differ)}
    "machine": ("NOT THE SAME MACHINE", {"load_before"}),
    "device": ("NOT THE SAME DEVICE", set()),
    "versions": ("Versions differ", set()),
    "data": ("Data differ", {"first_file"}),
    "config": ("Settings differ", set()),
}


# ------------------------------------------------------------------------------------------------ reading


def load(path):
    """Return (results, their file); ValueError if this version writes no such results."""
    file = Path(path) / "results.json" if Path(path).is_dir() else Path(path)
    try:
        results = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; give a results.json, or the folder of a run") from None
    except ValueError as error:
        raise ValueError(f"{file} is no results.json of gdsdata.bench: {error}") from None
    if not isinstance(results, dict) or not {"schema", "case", "rows"} <= results.keys():
        raise ValueError(f"{file} is no results.json of gdsdata.bench: it has no schema, case and rows")
    if results["schema"] != SCHEMA:
        raise ValueError(
            f"{file} has schema {results['schema']}, and this gdsdata reads {SCHEMA}: measure again, or compare "
            "with the version that wrote it"
        )
    return results, file


def row_name(row):
    return row["data"], row["dtype"], row["cache"], row["key"]


# ------------------------------------------------------------------------------------------------ what changed


def time_of(case, run):
    """Return the time of a run's work: in seconds for those two cases, else in s/GB."""
    if case == "latency":
        return run["latency_s"]["median"]
    return run["seconds"] if case == "startup" else run["seconds"] / run["bytes"] * 1e9


def judged(before, after):
    """Return a verdict on two runs' repeats; the change in percent with its interval."""
    found = {"verdict": TOO_FEW, "change_percent": None, "low_percent": None, "high_percent": None}
    if not before or not after:
        return found
    found["change_percent"] = percent(statistics.geometric_mean(after) / statistics.geometric_mean(before))
    if min(len(before), len(after)) < LEAST_REPEATS:
        return found
    ratio, low, high = intervals.ratio_interval(before, after, CONFIDENCE)
    found |= {"change_percent": percent(ratio), "low_percent": percent(low), "high_percent": percent(high)}
    found["verdict"] = "within noise"
    if low > 1 and ratio >= 1 + LEAST_CHANGE and apart(before, after):
        found["verdict"] = "slower"
    if high < 1 and ratio <= 1 / (1 + LEAST_CHANGE) and apart(after, before):
        found["verdict"] = "faster"
    return found


def apart(smaller, larger):
    """Return whether each median (unmoved by outliers) is outside the other's range."""
    return statistics.median(smaller) < min(larger) and statistics.median(larger) > max(smaller)


def percent(ratio):
    return (ratio - 1) * 100


def compared(case, old, new):
    """One row of both runs."""
    found = {name: new[name] for name in ("data", "dtype", "cache", "key", "name")}
    found |= {"error": new["error"] or old["error"], "a": None, "b": None, "unit": None, "limit_percent": None}
    failed = [name for name, row in (("A", old), ("B", new)) if row["error"]]
    if failed:
        return found | judged([], []) | {"verdict": f"failed in {' and '.join(failed)}", "cpu": None}
    times = [[time_of(case, run) for run in row["runs"]] for row in (old, new)]
    found |= judged(*times)
    found |= {name: statistics.geometric_mean(ones) for name, ones in zip("ab", times, strict=True)}
    found |= {"unit": "s" if case in ("latency", "startup") else "s/GB", "repeats": [len(ones) for ones in times]}
    used = [[run["cpu_seconds"] / (run["bytes"] or 1) for run in row["runs"]] for row in (old, new)]
    # Short runs can come to less than the clock's tick, and a run of nothing has no ratio to
    # another.
    found["cpu"] = judged(*used) if min(map(min, used)) > 0 else judged([], [])
    found["path"] = [old["path"], new["path"]]
    limits = [row["limit"]["gb_per_s"] for row in (old, new)]
    if all(limits):
        found["limit_percent"] = percent(limits[0] / limits[1])  # of the time at the limit
    return found


def beside_the_machine(rows):
    """Add what peers of a table did; verdicts say which rows changed with the machine."""
    for row in rows:
        peers = [
            peer["change_percent"]
            for peer in rows
            if peer is not row
            and not is_ours(peer["key"])
            and peer["change_percent"] is not None
            and row_name(peer)[:3] == row_name(row)[:3]
        ]
        row["peers_percent"] = statistics.median(peers) if peers else None
    for row in rows:
        if row["verdict"] in ("slower", "faster") and moved_with_the_machine(row):
            row["verdict"] += " with the machine"
    return rows


def moved_with_the_machine(row):
    """Return whether the limit or the peers account for half of a row's change."""
    own = math.log1p(row["change_percent"] / 100)
    controls = [row[name] for name in ("limit_percent", "peers_percent") if row[name] is not None]
    return any(math.log1p(control / 100) / own >= 0.5 for control in controls)


def flat(value, name=""):
    """Return {dotted name: value} of nested dicts."""
    if not isinstance(value, dict):
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{name}.{key}" if name else key)
    return found


def differences(a, b):
    """Return {part: {dotted name: [A's, B's]}} of what should be the same."""
    found: dict[str, dict] = {}
    for part, (_, may_differ) in PARTS.items():
        old, new = flat(a.get(part, {})), flat(b.get(part, {}))
        names = [name for name in {**old, **new} if name.rpartition(".")[2] not in may_differ]
        found[part] = {name: [old.get(name), new.get(name)] for name in names if old.get(name) != new.get(name)}
    return {part: ones for part, ones in found.items() if ones}


def matched(a, b, name_of):
    """Return pairs of rows of one name, and what is said of two runs of any case."""
    old, new = ({name_of(row): row for row in results["rows"]} for results in (a, b))
    said = {
        "case": a["case"],
        "when": [a.get("when"), b.get("when")],
        "only_in_a": [name for name in old if name not in new],
        "only_in_b": [name for name in new if name not in old],
    }
    return [(old[name], row) for name, row in new.items() if name in old], said


def compare(a, b):
    """Return what `--json` prints; ValueError if the cases differ, or a row is damaged."""
    if a["case"] != b["case"]:
        raise ValueError(f"A is of case={a['case']} and B of case={b['case']}: compare two runs of one case")
    try:
        pairs, said = matched(a, b, row_name)
        rows = beside_the_machine([compared(a["case"], *pair) for pair in pairs])
    except (ArithmeticError, AttributeError, LookupError, TypeError, statistics.StatisticsError) as error:
        raise ValueError(f"a row of A or B is damaged ({error!r}): measure that run again") from error
    return said | {
        "broken_off": ["verified" not in one or one.get("broken_off", False) for one in (a, b)],  # killed, or Ctrl-C
        "differences": differences(a, b),
        "rule": RULE,
        "rows": rows,
        "verdicts": dict(collections.Counter(row["verdict"] for row in rows)),
        "busy": [[note for note in one.get("notes", []) if note.startswith("Other programs")] for one in (a, b)],
    }


def compare_all(a, b, a_folder, b_folder):
    """Compare two runs of case=all; name cases of one run only, or without results."""
    pairs, said = matched(a, b, lambda row: row["name"])
    cases, failed = {}, []
    for old, new in pairs:
        try:
            cases[new["name"]] = compare(load(a_folder / old["folder"])[0], load(b_folder / new["folder"])[0])
        except ValueError as error:
            failed.append({"case": new["name"], "error": str(error), "only_b": not old["error"]})
    return said | {"cases": cases, "failed": failed}


def slower_than(found, limit_percent):
    """Return rows slower by more than that, and rows or cases that only B failed."""
    if found["case"] == "all":
        inner = [row for one in found["cases"].values() for row in slower_than(one, limit_percent)]
        return inner + [one for one in found["failed"] if one["only_b"]]
    return [
        row
        for row in found["rows"]
        if row["verdict"] == "failed in B" or (row["verdict"] == "slower" and row["change_percent"] > limit_percent)
    ]


# ------------------------------------------------------------------------------------------------ saying it


def signed(value):
    return "-" if value is None else f"{value:+.1f} %"


def shown_time(value, unit):
    if value is None:
        return "-"
    return f"{three_digits(value * 1e6)} µs" if unit == "s" else f"{three_digits(1 / value)} GB/s"


def said(row):
    """Return the verdict, and what explains it."""
    text = row["verdict"]
    if row["error"]:
        text += f": {row['error']}"
    elif row["path"][0].split()[:1] != row["path"][1].split()[:1]:
        text += f"; served by {row['path'][1]}, before by {row['path'][0]}"
    return text


def count_text(verdicts):
    return ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "no row is in both"


def show_all(found, console):
    for one in found["cases"].values():
        show(one, console)
    for one in found["failed"]:
        console.print(f"case={one['case']} cannot be compared: {one['error']}", style="bold", markup=False)
    for run, names in (("A", found["only_in_a"]), ("B", found["only_in_b"])):
        for name in names:
            console.print(f"Only in {run}: case={name}", markup=False)
    counts: collections.Counter[str] = collections.Counter()
    for one in found["cases"].values():
        counts.update(one["verdicts"])
    console.print(f"All of {len(found['cases'])} cases: {count_text(counts)}.", style="bold", markup=False)


def show(found, console):
    from rich import box
    from rich.table import Table

    def say(text, style=None):
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    for part, ones in found["differences"].items():
        heading, _ = PARTS[part]
        say(f"{heading}:", style="bold")
        for name, (old, new) in ones.items():
            say(f"  {name}: {old} -> {new}")
    for name, off, busy in zip("AB", found["broken_off"], found["busy"], strict=True):
        if off:
            say(f"{name} was broken off: only the rows that it had are compared.", style="bold")
        for note in busy:
            say(f"In {name}: {note}")
    table = Table(title=f"case={found['case']}: B against A", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("", "row", "A", "B", "time", "99 % interval", "CPU", "limit", "peers", "verdict"):
        table.add_column(name, justify="left" if name in ("", "row", "verdict") else "right", no_wrap=name != "verdict")
    for row in found["rows"]:
        interval = "-"
        if row["low_percent"] is not None:
            interval = f"{signed(row['low_percent'])} .. {signed(row['high_percent'])}"
        cpu = row["cpu"] or {"verdict": ""}
        table.add_row(
            f"{row['data']} {row['dtype']}, {row['cache']}",
            row["name"],
            shown_time(row["a"], row["unit"]),
            shown_time(row["b"], row["unit"]),
            signed(row["change_percent"]),
            interval,
            signed(cpu["change_percent"]) if cpu["verdict"] in ("slower", "faster") else "",
            signed(row["limit_percent"]),
            signed(row["peers_percent"]),
            said(row),
            style="bold" if row["verdict"] in ("slower", "faster") or row["error"] else None,
        )
    console.print(table)
    for name, ones in (("A", found["only_in_a"]), ("B", found["only_in_b"])):
        for data, dtype, cache, key in ones:
            say(f"Only in {name}: {data} {dtype}, {cache}: {key}")
    say(f"{len(found['rows'])} rows in both: {count_text(found['verdicts'])}.")
    say(
        "A, B: geometric means of the repeats. time, CPU: more (+) or less (-) of it in B; CPU where beyond noise. "
        "limit, peers: time at the machine's limit, and of the table's other rows that are not gdsdata's. By chance "
        f"about {1 - CONFIDENCE:.0%} of rows are called slower or faster: --help says the rule."
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m gdsdata.bench.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", metavar="A", help="results.json, or its folder: before")
    parser.add_argument("b", metavar="B", help="the same: after")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--fail-if-slower", type=float, metavar="PERCENT",
        help="exit status 1 where a row is called slower, by more than PERCENT of its time, or where only B failed it",
    )  # fmt: skip
    asked = parser.parse_args(arguments)
    command_output.require("gdsdata.bench.compare")
    if not asked.json and (lack := extra.lack("rich")):
        print(f"gdsdata.bench.compare: {lack}, or use --json", file=sys.stderr)
        return 2
    try:
        (a, a_file), (b, b_file) = load(asked.a), load(asked.b)
        of_all = a["case"] == b["case"] == "all"
        found = compare_all(a, b, a_file.parent, b_file.parent) if of_all else compare(a, b)
    except ValueError as error:
        print(f"gdsdata.bench.compare: {error}", file=sys.stderr)
        return 2
    if asked.json:
        print(json.dumps(found, indent=1))
    else:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else 180)
        show_all(found, console) if of_all else show(found, console)
    if asked.fail_if_slower is None:
        return 0
    return 1 if slower_than(found, asked.fail_if_slower) else 0


if __name__ == "__main__":
    sys.exit(main())

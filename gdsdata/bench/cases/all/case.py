"""case=all: every other case, by a command of its own, and one page of them.

A case that fails, or that is killed, stops no other. Its row says why, and which of the case's own
rows failed. results.json has the command of each case: the settings that differ from the defaults,
and its part of `case.settings`.
"""

import contextlib
import inspect
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from gdsdata.bench.cases import layout_of
from gdsdata.bench.cases.all.settings import AllSettings
from gdsdata.bench.cases.settings import overrides, quoted
from gdsdata.bench.harness.case import BROKEN_OFF, new_results
from gdsdata.bench.harness.process import INTERRUPTED, MODULE_ARGUMENTS, environment, interrupted_at_end
from gdsdata.bench.harness.tables import is_ours
from gdsdata.io.options import EngineOptions

OUTPUT = "output.log"  # in a case's folder: what it printed
LAST_LINES = 3  # of that, if it left nothing else


class All:
    def __init__(self, settings, folder, progress):
        self.settings, self.folder, self.progress = settings, Path(folder), progress
        self.broken_off = False

    def measure(self):
        started, settings = time.monotonic(), self.settings
        results = new_results(settings)
        names = settings.case.cases or self.measurable(results["notes"])
        for place, name in enumerate(names):
            self.progress.say(f"case={name}, {place + 1} of {len(names)}")
            try:
                row, found = self.one_case(name)
            except KeyboardInterrupt:  # none is running
                self.broken_off = True
                break
            if self.broken_off and not found:
                break
            results["rows"].append(row)
            if found:
                results["device"] = found.get("device", results["device"])
                results["notes"] += [f"{name}: {note}" for note in notable_notes(found)]
            # Finished cases stay if the run is killed.
            (self.folder / "results.json").write_text(json.dumps(results, indent=1))
            if self.broken_off:
                break
        if self.broken_off:
            if not results["rows"]:
                raise KeyboardInterrupt
            results["notes"].insert(0, BROKEN_OFF)
        verified = [row["verified"] for row in results["rows"] if row["verified"] is not None]
        return results | {
            "broken_off": self.broken_off,
            "seconds": time.monotonic() - started,
            "verified": not any(row["error"] or row["failed_rows"] for row in results["rows"])
            and (all(verified) if verified else None),
        }

    def measurable(self, notes):
        """The cases that this machine can measure; a note names each other one."""
        lacks = {name: cls().lack(self.settings.device.name) for name, cls in self.settings.case.SINGLE.items()}
        notes += [f"case={name} was left out: {lack}." for name, lack in lacks.items() if lack]
        return [name for name, lack in lacks.items() if not lack]

    def one_case(self, name):
        """Its row, and its results, or None if it wrote no report."""
        folder, started = self.folder / name, time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        for of_before in ("results.json", "results.png", "report.md", "report.html"):
            (folder / of_before).unlink(missing_ok=True)
        command = [sys.executable, *MODULE_ARGUMENTS, *self.overrides(name), f"hydra.run.dir={quoted(str(folder))}"]
        with self.progress.step(f"case={name}"):
            status = self.run(command, folder / OUTPUT)
        found, error, failed = results_in(folder), None, []
        if not found:
            lines = (folder / OUTPUT).read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
            error = f"it ended with {status} before its report: {' / '.join(lines)}"
        elif status:
            told = (f"{row['name']}: {row['error'].splitlines()[0]}" for row in found["rows"] if row["error"])
            failed = list(dict.fromkeys(told))
            if not failed and status != INTERRUPTED:
                error = f"it ended with {status}; see {name}/{OUTPUT}"
        row = {
            "data": name, "dtype": "", "cache": "", "key": "gdsdata", "name": name,
            "setting": (inspect.getdoc(AllSettings.SINGLE[name]) or "").splitlines()[0], "folder": name,
            "command": ["python", *command[1:]], "status": status, "error": error, "failed_rows": failed,
            "took_s": time.monotonic() - started, "verified": rest_verified(found),
        }  # fmt: skip
        return row | summary(found), found

    def overrides(self, name):
        """A case's command line: quick, device, and what differs from the defaults."""
        settings = self.settings
        yield f"case={name}"
        if settings.quick:
            yield "quick=true"
        yield f"device.name={settings.device.name}"
        its_own = {"cases", "settings", "name"}
        if name == "tune":
            its_own.add("repeats")  # They are pairs there.
        yield from overrides("data", settings.data)
        yield from overrides("case", settings.case, its_own)
        yield from overrides("engine", EngineOptions(**settings.engine))
        for one in settings.case.settings:
            if one.startswith(f"{name}."):
                yield f"case.{one.removeprefix(f'{name}.')}"

    def run(self, command, output):
        """Runs the command; its exit status.

        Its progress is passed on line by line, and all its output is kept.
        """
        with open(output, "wb") as log:

            def pass_on(lines):
                for line in lines:
                    log.write(line)
                    log.flush()
                    self.progress.say(line.decode(errors="replace").rstrip().removeprefix("gdsdata.bench: "))

            ours = {"stdout": log, "stderr": subprocess.PIPE, "env": environment()}
            process = passing = None
            try:
                with interrupted_at_end():
                    # In a session of its own: Ctrl-C is passed on to it once, and it reports.
                    process = subprocess.Popen(command, **ours, start_new_session=True)
                    passing = threading.Thread(target=pass_on, args=(process.stderr,))
                    passing.start()
                return process.wait()
            except KeyboardInterrupt:
                self.broken_off = True
                if process is None:
                    return INTERRUPTED
                process.send_signal(signal.SIGINT)
                return process.wait()
            finally:
                if process is not None and process.poll() is None:  # The bench itself got a signal to end.
                    process.terminate()
                    process.wait()
                if passing is not None:
                    passing.join()


def rest_verified(found):
    """Whether a case is verified but for its failed rows; None: it compared nothing."""
    if not found:
        return False
    if found["verified"] is not False:
        return found["verified"]
    rest = [row for row in found["rows"] if not row["error"]]
    return bool(rest) and all(row["verified"] for row in rest)


def summary(found):
    """A case's line: its main table, and our ratios to best peer and limit in all."""
    tables, ratios = layout_of(found).tables() if found else [], ("ratio_to_best_peer", "ratio_to_limit")
    ours = [(title, rows, best) for title, _, rows in tables if (best := best_of_ours(rows))]
    said = {"tables": len(tables), **dict.fromkeys(("title", "ours", "best_peer", "gb_per_s", *ratios))}
    for name in ratios:
        said[name.replace("ratio", "ratios")] = [best[name] for _, _, best in ours if best.get(name)]
    if ours:
        title, rows, best = ours[0]
        names = {row["key"]: row["name"] for row in rows}
        said |= {"title": title, "ours": best["name"], "best_peer": names.get(best.get("best_peer"))}
        said |= {name: best.get(name) for name in ("gb_per_s", *ratios)}
    return said


def notable_notes(found):
    """Notes of all on a case: its answers, and what makes its figures doubtful."""
    answers = [f"{heading}: {text}" for heading, text, _ in layout_of(found).answers()]
    return answers + [note for note in found["notes"] if note.startswith("Other programs")]


def results_in(folder):
    """The results of a case, or None: before its report they have fewer fields."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / "results.json").read_text())
        return found if "verified" in found else None


def best_of_ours(rows):
    """The fastest of gdsdata's rows; in a table of several sizes, of the largest."""
    ours = [row for row in rows if is_ours(row["key"]) and row.get("gb_per_s")]
    return max(ours, key=lambda row: (row.get("tensor_bytes") or 0, row["gb_per_s"]["median"]), default=None)

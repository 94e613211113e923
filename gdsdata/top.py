"""``python -m gdsdata.top [--pid PID] [--once] [--json] [--serve 127.0.0.1:PORT]``."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time

from gdsdata import command_output

if __name__ == "__main__":
    command_output.leave_if_interrupted()  # the imports below take a while

from gdsdata.observe.live import client, sections
from gdsdata.observe.live.rates import Sampler

_write = functools.partial(command_output.write, "gdsdata.top")

_DESCRIPTION = """Show what the processes of this user that read and save with gdsdata are doing. They have to run with
GDSDATA_TOP=1 in their environment. Exit status: 0; 1 if no such process was found (--once, --json), or the page could
not be served; 2 for a wrong argument, or a report that cannot be written; 130 if one view was interrupted."""

_MOST_EVERY_S = 86400


def main(arguments: list[str] | None = None) -> int:
    """Do what the arguments say, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gdsdata.top", description=_DESCRIPTION)
    parser.add_argument("--pid", type=int, help="of the only process to show (default: all)")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two views (default: 1)")
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument("--once", action="store_true", help="print one view as plain text; a pipe gets that too")
    shapes.add_argument("--json", action="store_true", help="print one snapshot of each process as JSON")
    shapes.add_argument("--serve", metavar="ADDRESS:PORT", help="serve the view as a page, and /metrics for Prometheus")
    parser.add_argument(
        "--allow-remote", action="store_true", help="let --serve have an address that other machines reach"
    )
    given = parser.parse_args(arguments)
    if given.pid is not None and given.pid < 1:
        parser.error(f"--pid {given.pid} is no process id: give a number of 1 or more")
    if not 0 < given.every <= _MOST_EVERY_S:
        parser.error(f"--every {given.every:g} must be more than 0, and at most {_MOST_EVERY_S} (a day)")
    if given.allow_remote and not given.serve:
        parser.error("--allow-remote is for --serve")
    sampler = Sampler(functools.partial(client.ask, given.pid), min(0.5, given.every / 2), given.pid)
    is_one_view = not given.serve and (given.json or given.once or not (sys.stdout and sys.stdout.isatty()))
    try:
        if given.serve:
            from gdsdata.observe.live import server  # few views need a server

            return server.serve(given.serve, sampler, given.allow_remote, parser.error)
        if given.json:
            return _print_json(sampler)
        if is_one_view:
            return _print_plain(sampler, given.every)
        from gdsdata.observe.live import terminal

        terminal.watch(sampler, given.every)
    except (ImportError, PermissionError) as error:
        print(f"gdsdata.top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # a view that runs until Ctrl-C has ended as it should
        return command_output.INTERRUPTED if is_one_view else 0
    return 0


def _print_json(sampler: Sampler) -> int:
    answers = sampler.answers()
    silent = [one._asdict() for one in answers.silent]
    _write(json.dumps({"version": client.VERSION, "processes": answers.snapshots, "silent": silent}))
    return 0 if answers.snapshots else 1


def _print_plain(sampler: Sampler, every_s: float) -> int:
    """Print one view. It takes two snapshots, because rates are their difference."""
    if sampler.view()["processes"]:
        time.sleep(every_s)
    view = sampler.view()
    _write(sections.plain(view).removesuffix("\n"))
    return 0 if view["processes"] else 1


if __name__ == "__main__":
    sys.exit(command_output.status_of(main))

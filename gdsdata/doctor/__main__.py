"""``python -m gdsdata.doctor [PATH or URL] [--test] [--require gds] [--frameworks] [--json]``."""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
from dataclasses import asdict

from gdsdata import command_output

if __name__ == "__main__":
    command_output.leave_if_interrupted()  # the imports below take a while

from gdsdata.doctor import frameworks, transfers
from gdsdata.doctor.evidence import ThisHost
from gdsdata.doctor.examination import REQUIREMENTS, diagnose, locate, this_host, works
from gdsdata.doctor.report import as_json, as_text
from gdsdata.doctor.url_checks import shown
from gdsdata.storage.location import is_url

_write = functools.partial(command_output.write, "gdsdata.doctor")

_DESCRIPTION = """Find out what this machine can do, which path would serve PATH, and what to do about each no. Exit
status: 0 if PATH can be read as required, 1 if not, 2 for a wrong argument or a report that cannot be written, 130 if
it was interrupted."""

_OF_PATH = "a file, a folder of files (default: the current one), or a URL: s3://, gs://, az://, https://"


def main(arguments: list[str] | None = None, host: ThisHost | None = None) -> int:
    """Examine the path, print the report, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gdsdata.doctor", description=_DESCRIPTION)
    parser.add_argument("path", nargs="?", default=".", help=_OF_PATH)
    parser.add_argument(
        "--require",
        choices=list(REQUIREMENTS),
        default="any",
        help="what has to work for exit status 0: any path, into the GPU, O_DIRECT, io_uring, or GPUDirect Storage",
    )
    parser.add_argument(
        "--test", action="store_true", help="write and read a temporary file beside PATH by each path, and verify it"
    )
    parser.add_argument("--pid", type=int, help="a process whose cuFile statistics are asked for a fallback to the CPU")
    parser.add_argument("--json", action="store_true", help="findings as JSON (fields: gdsdata/doctor/report.py)")
    parser.add_argument(
        "--record", metavar="FOLDER", help="write the evidence to a new folder, so that others can look at it"
    )
    parser.add_argument(
        "--frameworks",
        action="store_true",
        help="show which frameworks are installed, and how each uses gdsdata; PATH is not looked at",
    )
    given = parser.parse_args(arguments)
    if given.pid is not None and given.pid < 1:
        parser.error(f"--pid {given.pid} is no process id: give a number of 1 or more")
    if given.record == "":
        parser.error("--record '' is no folder: name one that is not there yet")
    if given.frameworks:
        its = frameworks.installed()
        _write(_frameworks_as_json() if given.json else frameworks.as_text(its, of_this_process=False))
        return 0
    host = host or this_host()
    host.pid = given.pid
    try:
        place = locate(host, given.path)
    except (FileNotFoundError, NotADirectoryError):
        parser.error(f"there is no '{given.path}'")
    except ValueError as error:
        parser.error(str(error))
    name = shown(place.path)
    if is_url(place.path) and (given.test or given.require != "any"):
        parser.error(f"--test and --require are for files of this machine, and '{name}' is a URL: leave them out")
    findings = diagnose(host, place)
    if given.record:
        try:
            host.record(given.record)
        except FileExistsError:
            parser.error(f"--record needs a folder that is not there yet, and there is '{given.record}'")
        except OSError as error:
            parser.error(f"--record cannot write '{given.record}': {error.strerror}; give a folder that can be made")
    good, rows = works(findings, given.require), []
    if given.test:
        if place.silence:
            parser.error(f"--test: {place.silence}")
        try:
            rows = transfers.run(place.path, size_bytes=transfers.TEST_BYTES)
        except OSError as error:
            parser.error(f"--test needs a folder that may be written: {error}")
        if transfers.abandoned(rows):
            host.left_behind.append("test")
        findings.append(transfers.cpu_use(rows))
        good = good and transfers.verified(rows, given.require)
    if given.json:
        _write(as_json(name, given.require, good, findings, rows))
    else:
        text = as_text(findings, rows, max(60, shutil.get_terminal_size((120, 24)).columns))
        verdict = "works" if good else "does not work"
        _write(f"{text}\n{verdict}: '{name}', as asked for by --require {given.require}")
    return 0 if good else 1


def _frameworks_as_json() -> str:
    found = [asdict(one) for one in frameworks.installed()]
    return json.dumps({"frameworks": found, "hooks": frameworks.hooks_are_installed() or None}, indent=1)


def run() -> None:
    """End the process, also if a thread was left behind that cannot be ended."""
    host = this_host()
    status = command_output.status_of(lambda: main(host=host))
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it is closed
        stream.flush()
    if host.left_behind:
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()

"""Prints the reports of command lines. If one cannot be written, a sentence says so."""

from __future__ import annotations

import io
import os
import signal
import sys

INTERRUPTED = 128 + signal.SIGINT  # the exit status, as a shell has it


def require(command: str) -> None:
    """End the process with exit status 2 if its standard output is closed."""
    if sys.stdout is None:
        print(f"{command}: the report could not be written: standard output is closed", file=sys.stderr)
        sys.exit(2)


def write(command: str, text: str) -> None:
    """Print a report, or end the process with exit status 2 if it cannot be written."""
    require(command)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    try:
        print(text, flush=True)
    except OSError as error:
        print(f"{command}: the report could not be written: {error.strerror}", file=sys.stderr)
        # Otherwise Python's end would fail to write what is left of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(2)

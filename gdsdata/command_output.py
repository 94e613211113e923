"""Prints the reports of command lines, and ends them.

If a report cannot be written, a sentence says so. Ctrl-C ends a program quietly at any time.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable

INTERRUPTED = 128 + signal.SIGINT  # the exit status, as a shell has it


def leave_if_interrupted() -> None:
    """Have Ctrl-C end this process at once and quietly, until `status_of` is called.

    A program calls it before its imports, which have nothing to undo. A parent that ignores Ctrl-C
    for this process is obeyed.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)


def status_of(main: Callable[[], int]) -> int:
    """Return the exit status of a program: that of ``main``, or 130 if Ctrl-C ended it."""
    try:
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return main()
    except KeyboardInterrupt:
        return INTERRUPTED


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

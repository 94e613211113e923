"""The lines that a parser reaches, and a guard over what it does, while `fuzz.py` runs it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any


class Lines:
    """The lines of some modules that have run, in any thread.

    Code whose lines have all run is not traced again, so a parser soon runs nearly at full speed.
    """

    def __init__(self, modules: Sequence[ModuleType]) -> None:
        self._files = {module.__file__ for module in modules}
        self._missing: dict[CodeType, set[int]] = {}
        self._setting = threading.Lock()
        self.reached = 0

    def __enter__(self) -> None:
        # Not `threading.settrace`: of two threads that begin at once, one would fail, because the
        # audit hook of `Guard` lets the other one run meanwhile.
        run, call = threading.Thread.run, self._call

        def traced_run(thread: threading.Thread) -> None:
            with self._setting:
                sys.settrace(call)
            run(thread)

        self._run = run
        threading.Thread.run = traced_run  # type: ignore[method-assign]
        with self._setting:
            sys.settrace(call)

    def __exit__(self, *_: object) -> None:
        with self._setting:
            sys.settrace(None)
        threading.Thread.run = self._run  # type: ignore[method-assign]

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        missing = self._missing.get(code)
        if missing is None:
            missing = self._missing[code] = {line for _, _, line in code.co_lines() if line is not None}
        return self._line if missing else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            missing = self._missing[frame.f_code]
            if frame.f_lineno in missing:
                missing.discard(frame.f_lineno)
                self.reached += 1
        return self._line


class Escaped(BaseException):
    """Reports an action that no parser needs. It is no Exception, so no parser catches it."""


class Guard:
    """Refuses programs, imports, code, and files outside the input's folder while a parser runs."""

    _FORBIDDEN = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "import", "exec", "pty.", "webbrowser.")
    # `budget` reads these before row groups are decoded.
    _MEMORY = ("/proc/meminfo", "/proc/self/mountinfo", "/proc/self/cgroup", "/sys/fs/cgroup/")
    _WITHIN_THE_FOLDER = ("open", "os.mkdir", "os.rename", "os.remove", "os.scandir", "os.listdir")

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._armed = False
        self.seen: str | None = None
        sys.addaudithook(self._hook)  # stays until the process ends

    def __enter__(self) -> None:
        self.seen, self._armed = None, True

    def __exit__(self, *_: object) -> None:
        self._armed = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._armed:
            return
        if event in self._WITHIN_THE_FOLDER:
            within = (self._folder, *self._MEMORY)
            wrong = not isinstance(arguments[0], int) and not os.fsdecode(arguments[0]).startswith(within)
        else:
            wrong = event.startswith(self._FORBIDDEN)
        if wrong:
            self.seen = f"{event} {arguments!r:.200}"  # seen even if the parser caught the exception
            raise Escaped(self.seen)

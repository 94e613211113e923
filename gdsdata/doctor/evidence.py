"""Sources of evidence: files below a root folder, the output of tools, and probes.

A check asks only a `Host`. `ThisHost` is the machine that the check runs on. `RecordedHost` is a
folder with the same files, so checks can be tested without the machine. If something does not
exist, may not be read or does not answer in time, the result is None, never an exception.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MOST_TEXT_BYTES = 16 << 20  # a host of thousands of containers has some MB of mounts
TOOL_LIMIT_S = 10.0
STATUS_LIMIT_S = 2.0
_MOST_LINKS = 256  # links and folders on the way to one file
_MORE_TOOLS = ":/usr/sbin:/sbin:/usr/local/cuda/gds/tools"


def within(limit_s: float, call: Callable[[], Any]) -> Any:
    """Return or raise what ``call`` does, if it ends in time.

    A system call on a dead mount cannot be interrupted, so its thread, a daemon, is left behind.

    Raises:
        TimeoutError: it took longer than ``limit_s``.
    """
    ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put((call(), None))
        except BaseException as error:
            ended.put((None, error))

    threading.Thread(target=run, daemon=True, name="gdsdata-doctor").start()
    try:
        result, error = ended.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {limit_s:g} s") from None
    if error is not None:
        raise error
    return result


class Host(ABC):
    """A machine as its files describe it. Its files are below ``root``.

    Attributes:
        pid: of the process whose cuFile statistics are checked; None: those of all processes.
    """

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = os.path.realpath(root)
        self.pid: int | None = None

    def text(self, path: str) -> str | None:
        """Return a file's text, with NULs as line ends; None if it cannot be read."""
        try:
            with open(self._below(path), "rb") as file:
                return file.read(MOST_TEXT_BYTES).replace(b"\0", b"\n").decode(errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """Return the whole number that a file holds; None if it holds none."""
        try:
            return int(self.text(path) or "")
        except ValueError:
            return None

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; empty if there is no such folder."""
        try:
            return sorted(os.listdir(self._below(folder)))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.exists(self._below(path))

    def real(self, path: str) -> str | None:
        """Return a path of the host with links followed; None if it leads nowhere."""
        real = os.path.realpath(self._below(path))
        if not os.path.exists(real) or not (real + "/").startswith(self.root.rstrip("/") + "/"):
            return None
        return "/" + os.path.relpath(real, self.root)

    @abstractmethod
    def environment(self, name: str) -> str:
        """Return a variable of the environment; empty if it is not set."""

    @abstractmethod
    def tool(self, *command: str) -> str | None:
        """Return what a program prints; None if it is missing, fails or takes too long."""

    @abstractmethod
    def probe(self, name: str, path: str = "") -> dict[str, Any] | None:
        """Return a probe's result (`gdsdata.doctor.probes`); None if there is none."""

    def _below(self, path: str) -> str:
        return os.path.join(self.root, path.lstrip("/"))


class RecordedHost(Host):
    """A folder of evidence from a host.

    It has proc/, sys/ and etc/ as on the host, ``environ`` (NAME=VALUE lines), ``tools/COMMAND
    LINE`` with the output of the command, and ``probes/NAME.json``.
    """

    def environment(self, name: str) -> str:
        lines = (self.text("environ") or "").splitlines()
        return next((line.partition("=")[2] for line in lines if line.partition("=")[0] == name), "")

    def tool(self, *command: str) -> str | None:
        return self.text(f"tools/{' '.join(command)}")

    def probe(self, name: str, path: str = "") -> dict[str, Any] | None:
        text = self.text(f"probes/{name}.json")
        return None if text is None else json.loads(text)


class ThisHost(Host):
    """The machine that this process runs on.

    Results of tools and probes are kept, so two checks run a tool once.

    Args:
        probes: the probes by name; each is called with the path.
        limits_s: how long each probe may take, in seconds.
        root: as in `Host`.
        tool_limit_s: how long each tool may take.

    Attributes:
        left_behind: names of what did not answer in time. Each may hold a thread that cannot be
            ended, and that keeps the interpreter from ending.
    """

    def __init__(
        self,
        probes: Mapping[str, Callable[[str], dict[str, Any]]],
        limits_s: Mapping[str, float],
        root: str | os.PathLike[str] = "/",
        tool_limit_s: float = TOOL_LIMIT_S,
    ) -> None:
        super().__init__(root)
        self.left_behind: list[str] = []
        self._probes, self._limits_s, self._tool_limit_s = probes, limits_s, tool_limit_s
        self._known: dict[tuple[str, ...], Any] = {}
        self._asked: dict[str, str] = {}  # paths, with the text of those that were read

    def text(self, path: str) -> str | None:
        found = super().text(path)
        self._asked[path] = found or ""
        return found

    def names(self, folder: str) -> list[str]:
        found = super().names(folder)
        for name in found:
            self._asked.setdefault(f"{folder}/{name}", "")
        return found

    def exists(self, path: str) -> bool:
        self._asked.setdefault(path, "")
        return super().exists(path)

    def real(self, path: str) -> str | None:
        self._asked.setdefault(path, "")
        return super().real(path)

    def environment(self, name: str) -> str:
        return self._once(("environment", name), lambda: os.environ.get(name, ""))

    def record(self, folder: str | os.PathLike[str]) -> None:
        """Write the evidence so far to a new folder, for a `RecordedHost`.

        Raises:
            OSError: the folder cannot be written, or exists already.
        """
        base = Path(folder)
        base.mkdir(parents=True)
        for path, text in list(self._asked.items()):
            _copy(self.root, base, path, text)
        lines = []
        for (kind, *name), said in self._known.items():
            if kind == "environment" and said:
                lines.append(f"{name[0]}={said}\n")
            elif kind == "tool" and said is not None:
                _write(base / "tools" / " ".join(name), said)
            elif kind == "probe":
                _write(base / "probes" / f"{name[0]}.json", json.dumps(said))
        _write(base / "environ", "".join(lines))

    def tool(self, *command: str) -> str | None:
        return self._once(("tool", *command), lambda: _run(command, self._tool_limit_s))

    def probe(self, name: str, path: str = "") -> dict[str, Any] | None:
        return self._once(("probe", name, path), lambda: self._probe(name, path))

    def _probe(self, name: str, path: str) -> dict[str, Any] | None:
        try:
            return within(self._limits_s[name], lambda: self._probes[name](path))
        except TimeoutError as error:
            self.left_behind.append(name)
            return {"error": str(error), "timed_out": True}

    def _once(self, key: tuple[str, ...], ask: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = ask()
        return self._known[key]


def _copy(root: str, base: Path, path: str, text: str) -> None:
    """Copy a folder, or a file with ``text`` as its content, and links on the way.

    The copy has the same path below ``base``.
    """
    at, rest = "", path.strip("/").split("/")
    for _ in range(_MOST_LINKS):
        if not rest:
            return
        name, *rest = rest
        if name in ("", "."):
            continue
        if name == "..":
            at = os.path.dirname(at)
            continue
        here = f"{at}/{name}"
        original, copy = f"{root.rstrip('/')}{here}", Path(f"{base}{here}")
        if os.path.islink(original):
            try:
                target = os.readlink(original)
            except OSError:  # it is gone
                return
            rest = [*target.strip("/").split("/"), *rest]
            if target.startswith("/"):
                target, at = os.path.relpath(f"{base}{target}", copy.parent), ""
            copy.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                copy.symlink_to(target)
            continue
        if os.path.isdir(original):
            copy.mkdir(parents=True, exist_ok=True)
        elif os.path.exists(original):
            if text or not copy.exists():
                _write(copy, text)
        else:
            return
        at = here


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(errors="surrogateescape"))  # as it was, whatever the locale


def _run(command: tuple[str, ...], limit_s: float) -> str | None:
    """Run a tool in a session of its own, so that its child processes end with it.

    A tool that even SIGKILL does not end, because it waits for a dead device, is left behind.
    """
    environment = {**os.environ, "LC_ALL": "C", "PATH": os.environ.get("PATH", "") + _MORE_TOOLS}
    name = _found(command[0], environment["PATH"])
    if name is None:
        return None
    try:
        process = subprocess.Popen(
            [name, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError:
        return None
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return None
    return printed.decode(errors="replace").strip() if process.returncode == 0 else None


def _found(program: str, search: str) -> str | None:
    """Find a program in the folders with absolute paths: not in the working folder."""
    for folder in search.split(":"):
        candidate = Path(folder) / program
        if folder.startswith("/") and os.access(candidate, os.X_OK) and candidate.is_file():
            return str(candidate)
    return None
